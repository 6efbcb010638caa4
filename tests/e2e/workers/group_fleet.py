"""A group under test: worker processes, a publisher that never stops, the sink, and a look into the group's bucket."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.e2e.workers.group_tracker import Sink, Verdict, judge

from penstock.errors import PenstockError
from penstock.jetstream.kv import Bucket
from penstock.publish.control import Control
from penstock.server.cluster import EmbeddedCluster
from penstock.server.embedded import EmbeddedServer
from penstock.settings import Settings
from penstock.testing import eventually_async
from penstock.wire import aio
from penstock.workers.group import claims, identity
from penstock.workers.group.assignment import Assignments
from penstock.workers.group.claims import Claim, claims_in
from penstock.workers.group.identity import ACTIVE, WorkerRecord, workers_in
from penstock.workers.options import bucket_name
from penstock.workers.partitions import InBucket, Partition

ROOT = Path(__file__).parents[3]
STREAM = "S"
TTL = 1.5
ACK_WAIT = 20.0
"""Longer than a test takes: whatever comes again does so because of a handoff, and not because of a time-out."""
PATIENCE = 240.0


class Flood:
    """Publishes numbered messages to all partitions in turn, and knows which numbers are stored."""

    def __init__(self, settings: Settings, partitions: list[str], pause: float) -> None:
        self.published: dict[str, int] = defaultdict(int)
        self._connection = aio.Connection(settings, name="flood")
        self.partitions = partitions
        self.instruct: Callable[[], str] = lambda: ""
        """What the handler is told to do with the next message; see `group_worker`."""
        self._pause = pause
        self._task: asyncio.Task[None] | None = None
        self._ending = False

    @property
    def total(self) -> int:
        return sum(self.published.values())

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def end(self) -> None:
        """Publish no more; what was begun is stored when this returns."""
        self._ending = True
        if self._task:
            await self._task
        await self._connection.close()

    async def _run(self) -> None:
        while not self._ending:
            for partition in list(self.partitions):
                number = self.published[partition] + 1
                await self._publish(f"s.{partition}", number)
                self.published[partition] = number
            await asyncio.sleep(self._pause)

    async def _publish(self, subject: str, number: int) -> None:
        data = json.dumps({"n": number, "do": self.instruct()}).encode()
        headers = {"Nats-Msg-Id": f"{subject}#{number}"}
        while True:
            try:
                if not self._connection.connected:
                    await self._connection.reconnect()
                answer = json.loads((await self._connection.request(subject, data, headers, timeout=2.0)).data)
                if "error" not in answer:
                    return
            except PenstockError:  # the broker is being restarted: the message id keeps it from being stored twice
                await asyncio.sleep(0.1)


class WorkerProcess:
    """One process with one or more workers."""

    def __init__(self, name: str, told: dict[str, Any], log: Path) -> None:
        self.name = name
        self.log = log
        with log.open("wb") as output:
            module = told.get("module", "tests.e2e.workers.group_worker")
            command = [sys.executable, "-m", module, json.dumps({**told, "name": name})]
            self._process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output)

    def send(self, number: int) -> None:
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        """SIGKILL, also when it is stopped already."""
        with suppress(ProcessLookupError):
            self.send(signal.SIGKILL)
        self._process.wait(60)

    def wait(self, seconds: float) -> None:
        """For its end."""
        self._process.wait(seconds)

    def ended(self) -> bool:
        return self._process.poll() is not None

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-40:])


@dataclass
class Fleet:
    """All of it."""

    server: EmbeddedServer | EmbeddedCluster
    sink: Sink
    flood: Flood
    control: Control
    bucket: Bucket
    told: dict[str, Any]
    logs: Path
    processes: dict[str, WorkerProcess]
    patience: float = PATIENCE

    def start(self, *names: str, **more: Any) -> None:
        for name in names:
            self.processes[name] = WorkerProcess(name, {**self.told, **more}, self.logs / f"{name}.log")

    def kill(self, name: str) -> None:
        self.processes.pop(name).kill()

    def signal(self, name: str, number: int) -> None:
        self.processes[name].send(number)

    async def stop(self, *names: str) -> None:
        """SIGTERM: hand over and leave."""
        for name in names:
            self.signal(name, signal.SIGTERM)
        await self.eventually(lambda: all(self.processes[name].ended() for name in names), "workers to have left")
        for name in names:
            assert self.processes.pop(name).tail().splitlines()[-1] == "left"

    # -- looking -------------------------------------------------------------------------------------------------------

    async def workers(self) -> dict[str, WorkerRecord]:
        return workers_in(await self.bucket.entries(identity.WORKERS))

    async def claims(self) -> dict[str, Claim]:
        return claims_in(await self.bucket.entries(claims.CLAIMS))

    async def leader(self) -> str:
        """The process that leads."""

        async def known() -> WorkerRecord | None:
            entry = await self.bucket.get(identity.LEADER_KEY)
            return (await self.workers()).get(entry.value["worker"]) if entry else None

        found = await eventually_async(known, self.patience, "somebody to lead", state=self.state)
        assert found
        return found.instance.rsplit("-", 1)[0]

    async def worker_id(self, name: str) -> str:
        """The id of the first worker of a process."""
        return next(w for w, record in (await self.workers()).items() if record.instance == f"{name}-0")

    async def settled(self, workers: int) -> None:
        """Wait until so many workers share the partitions, and nothing moves."""

        async def calm() -> bool:
            alive = {w for w, record in (await self.workers()).items() if record.state == ACTIVE}
            owned = (await self.claims()).values()
            share = {claim.owner for claim in owned if claim.settled}
            return len(alive) == workers and share == alive and all(claim.settled for claim in owned)

        await self.eventually(calm, f"{workers} workers to share the partitions")

    def assigned(self, workers: int) -> Callable[[], Awaitable[bool]]:
        """Whether there is an assignment for so many workers."""

        async def known() -> bool:
            return len((await Assignments(self.bucket).current()).members) == workers

        return known

    async def more_done(self, count: int) -> None:
        goal = self.sink.count + count
        await self.eventually(lambda: self.sink.count >= goal, f"{goal} messages to be done")

    def _has_done_more_than(self, count: int) -> bool:
        return self.sink.count > count

    async def finish(self, patience: float = PATIENCE) -> Verdict:
        """End the flood, wait until everything is done, or nothing more has been for `patience` seconds, and judge."""
        await self.flood.end()
        while self.sink.count < self.flood.total:
            before = self.sink.count
            try:
                await eventually_async(partial(self._has_done_more_than, before), patience)
            except AssertionError:
                break  # the verdict says more than that it took too long
        return judge(self.flood.published, self.sink.effects)

    async def eventually(self, condition: Callable[[], Awaitable[bool] | bool], what: str) -> None:
        async def now() -> bool:
            try:
                found = condition()
                return await found if isinstance(found, Awaitable) else found
            except PenstockError:  # the broker or the bucket is away
                return False

        await eventually_async(now, self.patience, what, state=self.state)

    async def explain(self, verdict: Verdict) -> str:
        """What is wrong, and the history of those partitions: who had them from where on, and who did what of them.

        All of it is in `trace.txt`, beside the logs; what is returned is for the screen.
        """
        traces = [f"== {name}\n" + "\n".join(self._history(name)) for name in verdict.wrong]
        (self.logs / "trace.txt").write_text("\n\n".join([str(verdict), *traces]))
        return "\n".join([str(verdict), f"see {self.logs}/trace.txt", *traces[:2], await self.state()])

    def _history(self, partition: str) -> list[str]:
        told = [f"{one.at:%H:%M:%S.%f}"[:-3] + f" {one}" for one in self.sink.told[partition]]
        word = re.compile(rf"(?<![\w.]){partition}\b|\bs\.{partition}\b")
        for log in sorted(self.logs.glob("*.log")):
            lines = log.read_text(errors="replace").splitlines()
            told += [f"{line[:12]} [{log.stem}]{line[12:]}" for line in lines if word.search(line)]
        return sorted(told)

    async def state(self) -> str:
        parts = [f"{self.sink.count} of {self.flood.total} done"]
        with suppress(PenstockError):
            parts.append(str(await self.workers()))
            parts.append("\n".join(str(claim) for claim in (await self.claims()).values()))
        for process in self.processes.values():
            if not process.ended():
                process.send(signal.SIGUSR1)
        await asyncio.sleep(0.5)  # to let them write; nothing depends on it
        parts += [f"-- {name}:\n{process.tail()}" for name, process in self.processes.items()]
        return "\n".join(parts)


@asynccontextmanager
async def fleet(
    server: EmbeddedServer | EmbeddedCluster,
    directory: Path,
    retention: str,
    partitions: int = 12,
    pause: float = 0.03,
    **more: Any,
) -> AsyncIterator[Fleet]:
    """A stream of that retention and a group on it that has no workers yet; replicated, on a cluster."""
    names = [f"p{number}" for number in range(partitions)]
    replicas = 3 if isinstance(server, EmbeddedCluster) else 1
    async with AsyncExitStack() as closing:
        control = await Control.connect(server.settings)
        closing.push_async_callback(control.close)
        config = {"name": STREAM, "subjects": ["s.>"], "retention": retention, "num_replicas": replicas}
        await control.jetstream.create_stream(config)
        bucket = Bucket(control, bucket_name("g"), like=STREAM)
        await bucket.ensure()
        await InBucket(bucket).write(Partition(name, (f"s.{name}",)) for name in names)
        sink = await closing.enter_async_context(Sink(directory / "sink"))
        told = {
            "servers": list(server.settings.servers),
            "stream": STREAM,
            "sink": str(sink.path),
            "ttl": TTL,
            "ack_wait": ACK_WAIT,
            "timeout": 3.0,
            **more,
        }
        made = Fleet(server, sink, Flood(server.settings, names, pause), control, bucket, told, directory, {})
        try:
            yield made
        finally:
            for process in made.processes.values():
                process.kill()
            await made.flood.end()
