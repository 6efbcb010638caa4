"""What became of every message: a sink that worker processes report to, and that knows fencing tokens.

The sink stands for whatever keeps a handler's effects. It accepts an effect only with a token that is not lower than
the highest it has seen for the partition, and keeps what it accepted in order. `Verdict` compares that with what was
published.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, Self


class Effect(NamedTuple):
    """One effect that the sink accepted."""

    number: int
    token: int
    worker: str


class Told(NamedTuple):
    """One effect as it was reported, accepted or not."""

    at: datetime
    number: int
    sequence: int
    token: int
    worker: str
    id: str
    accepted: bool

    def __str__(self) -> str:
        by = f"{self.id} in {self.worker}, token {self.token}"
        return f"message {self.number} (sequence {self.sequence}) {'done' if self.accepted else 'REFUSED'} by {by}"


@dataclass
class Verdict:
    """What is wrong with what the sink has; empty when nothing is."""

    lost: dict[str, list[int]] = field(default_factory=dict)
    out_of_order: list[str] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)
    duplicates: int = 0
    unexplained: list[str] = field(default_factory=list)
    """Duplicates under one and the same token: the owner was alive, and did it twice."""
    shared: list[str] = field(default_factory=list)
    """Tokens that two workers had: neither could be refused."""

    @property
    def clean(self) -> bool:
        return not (self.lost or self.out_of_order or self.stale or self.unexplained or self.shared)

    @property
    def wrong(self) -> list[str]:
        """The partitions that something is wrong with."""
        told = (*self.out_of_order, *self.stale, *self.unexplained, *self.shared)
        return sorted({*self.lost, *(line.partition(":")[0] for line in told)})


def judge(published: dict[str, int], effects: dict[str, list[Effect]]) -> Verdict:
    """Compare the effects with the numbers 1 to `published[partition]` of each partition. Pure."""
    verdict = Verdict()
    for partition, count in published.items():
        done = effects.get(partition, [])
        if missing := sorted(set(range(1, count + 1)) - {one.number for one in done}):
            verdict.lost[partition] = missing
        _judge_order(partition, done, verdict)
        verdict.duplicates += len(done) - len({one.number for one in done})
    return verdict


def _judge_order(partition: str, done: list[Effect], verdict: Verdict) -> None:
    highest, token, seen, owners = 0, 0, dict[int, Effect](), dict[int, str]()
    for one in done:
        if one.token and owners.setdefault(one.token, one.worker) != one.worker:  # 0: a side of an overlap, without one
            verdict.shared.append(f"{partition}: {one} under the token of {owners[one.token]}")
        if one.token < token:
            verdict.stale.append(f"{partition}: {one} after token {token}")
        token = max(token, one.token)
        if first := seen.get(one.number):
            if first.token == one.token:
                verdict.unexplained.append(f"{partition}: {one} twice")
        elif one.number < highest:
            verdict.out_of_order.append(f"{partition}: {one} after {highest}")
        seen.setdefault(one.number, one)
        highest = max(highest, one.number)


class Sink:
    """A server on a Unix socket, in the test's own event loop."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.effects: dict[str, list[Effect]] = defaultdict(list)
        self.refused: Counter[str] = Counter()
        """Effects of fenced owners, by worker."""
        self.begun: dict[tuple[str, int], list[str]] = defaultdict(list)
        """Workers that began a message, in order."""
        self.told: dict[str, list[Told]] = defaultdict(list)
        """Everything that was reported, by partition: for whoever has to explain a loss."""
        self.gates: dict[tuple[str, int, str], asyncio.Event] = {}
        """Messages that a worker may begin, but not end before the event."""
        self._tokens: dict[str, int] = defaultdict(int)
        self._server: asyncio.Server | None = None
        self._answering: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_unix_server(self._serve, self.path)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server
        self._server.close()
        for task in list(self._answering):
            task.cancel()
        await asyncio.gather(*self._answering, return_exceptions=True)

    @property
    def count(self) -> int:
        return sum(len({one.number for one in done}) for done in self.effects.values())

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                task = asyncio.create_task(self._answer(json.loads(line), writer))
                self._answering.add(task)
                task.add_done_callback(self._answering.discard)
        except (ConnectionResetError, asyncio.CancelledError):
            return  # the worker was killed, or the test is over
        finally:
            writer.close()

    async def _answer(self, said: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        place = (said["partition"], said["number"])
        if said["what"] == "begin":
            self.begun[place].append(said["worker"])
            if gate := self.gates.get((*place, said["worker"])):
                await gate.wait()
            accepted = True
        elif said["what"] == "seen":
            accepted = any(one.number == said["number"] for one in self.effects[said["partition"]])
        else:
            accepted = self._accept(said)
        if not writer.is_closing():
            writer.write(json.dumps({"call": said["call"], "accepted": accepted}).encode() + b"\n")

    def _accept(self, said: dict[str, Any]) -> bool:
        partition, token = said["partition"], said["token"]
        accepted = token >= self._tokens[partition]
        self.told[partition].append(
            Told(datetime.now(), said["number"], said["sequence"], token, said["worker"], said["id"], accepted)
        )
        if not accepted:
            self.refused[said["worker"]] += 1
            return False
        self._tokens[partition] = token
        self.effects[partition].append(Effect(said["number"], token, said["worker"]))
        return True


class SinkClient:
    """A worker process's way to the sink."""

    def __init__(self) -> None:
        self._waiting: dict[int, asyncio.Future[bool]] = {}
        self._count = 0

    async def connect(self, path: str) -> None:
        self._reader, self._writer = await asyncio.open_unix_connection(path)
        self._listening = asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        while line := await self._reader.readline():
            answer = json.loads(line)
            waiting = self._waiting.pop(answer["call"])
            if not waiting.done():  # its handler was cancelled
                waiting.set_result(answer["accepted"])

    async def tell(self, **said: Any) -> bool:
        self._count += 1
        number = self._count
        self._waiting[number] = asyncio.get_running_loop().create_future()
        self._writer.write(json.dumps({**said, "call": number}).encode() + b"\n")
        return await self._waiting[number]
