"""A single-node Kafka from Maven Central, to compare with. No part of the product: `make bench-peers` fetches it.

As a script: fetch the jars of `peers.txt`.
"""

from __future__ import annotations

import socket
import subprocess
import uuid
from base64 import urlsafe_b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyspark

from penstock.errors import ConfigError
from penstock.server.ports import free_ports
from penstock.testing import eventually

HERE = Path(__file__).resolve().parent
JARS = HERE.parents[1] / ".peers"


def coordinates() -> list[tuple[str, str, str, str]]:
    """Folder, group, artifact and version of every jar."""
    lines = (HERE / "peers.txt").read_text().splitlines()
    pairs = (line.split() for line in lines)
    return [(folder, *name.split(":", 2)) for folder, name in pairs]  # type: ignore[misc] # a name has three parts


def fetch() -> None:
    """Have Ivy, which comes with PySpark, download what is not there yet, from where it finds packages by default."""
    for folder in sorted({jar[0] for jar in coordinates()}):
        wanted = [jar[1:] for jar in coordinates() if jar[0] == folder]
        if not all((JARS / folder / f"{artifact}-{version}.jar").exists() for _, artifact, version in wanted):
            _fetch(folder, wanted)


def _fetch(folder: str, wanted: list[tuple[str, str, str]]) -> None:
    target = JARS / folder
    target.mkdir(parents=True, exist_ok=True)
    parts = "".join(f'<dependency org="{g}" name="{a}" rev="{v}" transitive="false"/>' for g, a, v in wanted)
    listed = target / "ivy.xml"
    listed.write_text(
        f'<ivy-module version="2.0"><info organisation="penstock" module="{folder}"/>'
        f"<dependencies>{parts}</dependencies></ivy-module>"
    )
    (ivy,) = (Path(pyspark.__file__).parent / "jars").glob("ivy-*.jar")
    pattern = f"{target}/[artifact]-[revision](-[classifier]).[ext]"
    command = ["java", "-jar", str(ivy), "-ivy", str(listed), "-retrieve", pattern, "-types", "jar", "bundle"]
    subprocess.run(command, check=True)


def jars(folder: str) -> list[Path]:
    """The jars of a folder. Raises when they were not fetched."""
    wanted = [JARS / name / f"{artifact}-{version}.jar" for name, _, artifact, version in coordinates()]
    if missing := [path.name for path in wanted if not path.exists()]:
        raise ConfigError(f"{len(missing)} jars of Kafka are missing ({missing[0]}, …): run `make bench-peers`")
    return [path for path in wanted if path.parent.name == folder]


@contextmanager
def kafka(data: Path) -> Iterator[str]:
    """A broker that is its own controller; gives its address."""
    broker, controller = free_ports(2, "127.0.0.1")
    data.mkdir(parents=True)
    config = data / "server.properties"
    config.write_text(_config(broker, controller, data / "log"))
    java = ["java", "-Xms1g", "-Xmx1g", "-cp", ":".join(map(str, jars("kafka")))]
    ident = urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
    with (data / "output").open("w") as output:
        make = [*java, "kafka.tools.StorageTool", "format", "-t", ident, "-c", str(config)]
        subprocess.run(make, check=True, stdout=output, stderr=output)
        process = subprocess.Popen([*java, "kafka.Kafka", str(config)], stdout=output, stderr=output)
    try:
        eventually(lambda: _accepts(broker), within=60, what="Kafka to listen", state=(data / "output").read_text)
        yield f"127.0.0.1:{broker}"
    finally:
        process.kill()
        process.wait()


def _accepts(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _config(broker: int, controller: int, log: Path) -> str:
    return f"""
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
listeners=PLAINTEXT://127.0.0.1:{broker},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{broker}
controller.listener.names=CONTROLLER
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT
log.dirs={log}
num.partitions=2
offsets.topic.replication.factor=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
"""


if __name__ == "__main__":
    fetch()
