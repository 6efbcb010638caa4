"""The quickstart's own folder, `./.penstock`, and the broker that lives in it."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import ServerFailed
from penstock.server.embedded import EmbeddedServer
from penstock.settings import Settings

STOP_WITHIN = 10.0  # seconds
OTHERS = frozenset({"lock", "server"})
"""What lies in the folder and is no run's own: the lock, and the data of `penstock server`."""


@dataclass(frozen=True, slots=True)
class KeptBroker:
    """A broker that an earlier run left running."""

    url: str
    pid: int
    data: Path

    @property
    def alive(self) -> bool:
        """Whether that process still is the nats-server of this data directory: process ids are used again."""
        shown = subprocess.run(
            ["ps", "-ww", "-o", "command=", "-p", str(self.pid)], capture_output=True, text=True, check=False
        )
        program, flag, configuration = shown.stdout.strip().rpartition(" -c ")
        named = bool(flag) and configuration == str(EmbeddedServer.config_path(self.data))
        return named and Path(program).name == "nats-server"

    def stop(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)
        deadline = time.monotonic() + STOP_WITHIN
        while self.alive:
            if time.monotonic() > deadline:
                raise ServerFailed(f"the nats-server with process id {self.pid} does not end; end it by hand")
            time.sleep(0.05)


@dataclass(frozen=True, slots=True)
class Home:
    """Everything the quickstart keeps between runs."""

    path: Path

    @property
    def data(self) -> Path:
        return self.path / "nats"

    @property
    def _note(self) -> Path:
        return self.path / "broker.json"

    @property
    def _lock(self) -> Path:
        return self.path / "lock"

    def kept(self) -> KeptBroker | None:
        """The broker that an earlier run left running, if it still runs."""
        try:
            noted = json.loads(self._note.read_text())
            broker = KeptBroker(noted["url"], noted["pid"], self.data)
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None
        # 0 and what is below are groups of processes to `kill`, and 1 is the system's first.
        return broker if type(broker.pid) is int and broker.pid > 1 and broker.alive else None

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """The folder for one run alone: a second one would work on the first one's broker, or clear it away."""
        self.path.mkdir(parents=True, exist_ok=True)
        with self._lock.open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ServerFailed(
                    f"another quickstart is running in {str(self.path.absolute())!r}; "
                    "wait for its end, or start this one in another directory"
                ) from None
            yield

    def clear(self) -> None:
        """Stop a kept broker and forget everything that earlier runs left."""
        if broker := self.kept():
            broker.stop()
        for path in self.path.iterdir():
            if path.name in OTHERS:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()

    @contextmanager
    def broker(self, keep: bool) -> Iterator[Settings]:
        """A broker for the length of the block: the kept one, or a new one that is stopped, or kept, at the end."""
        if kept := self.kept():
            yield Settings(servers=(kept.url,))
            return
        server = EmbeddedServer(data=self.data).start()
        try:
            yield server.settings
        except BaseException:
            server.stop()
            raise
        if keep:
            self._note.write_text(json.dumps({"url": server.url, "pid": server.detach()}))
        else:
            server.stop()
