"""Anything may happen to a group, in any order: nothing is lost, order holds, and little is done twice.

A seed makes a sequence of events for a small group of worker processes on a real server: faults of processes, of the
broker and of what the group keeps there, messages that fail, hang and are given up, and operators who delete what they
should not. Every seed can be run again: `pytest tests/e2e/workers/test_group_model.py -k "seed-7 and limits"`.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.workers.group_fleet import STREAM, TTL, Fleet, fleet
from tests.e2e.workers.group_tracker import Verdict, judge
from tests.support.streams import make_stream

from penstock.errors import ApiError, ConsumerNotFound, PenstockError, StreamNotFound
from penstock.server.embedded import EmbeddedServer
from penstock.testing import eventually_async
from penstock.testing.proxy import LossyProxy, keep_all
from penstock.workers.group import assignment, claims
from penstock.workers.group.leader import holder_name
from penstock.workers.partitions import LIST_KEY, InBucket, Partition

RETENTIONS = ["limits", "workqueue", "interest"]
EVENTS = 6
IN_FLIGHT = 50
"""Messages that a worker has out, at most: what one crash may repeat."""
ALL_DONE_WITHIN = 120.0
"""Seconds after the last event in which everything must be done, on a machine that has other work too."""


class Model:
    """One group, and everything that happens to it."""

    def __init__(self, group: Fleet, proxy: LossyProxy, retention: str, seed: int) -> None:
        self.group = group
        self.proxy = proxy
        """Between the broker and worker c."""
        self.retention = retention
        self.random = random.Random(f"{retention}-{seed}")
        self._orders = random.Random(f"orders-{retention}-{seed}")
        self.happened: list[str] = []
        self.gone: dict[str, set[int]] = {}
        """Numbers that an operator deleted before they were done, by partition: they need not come."""
        self._by_pattern = "pattern" in group.told
        self._next = 0
        self._stopped: set[str] = set()
        group.flood.instruct = self._instruct

    def _instruct(self) -> str:
        return self._orders.choices(["", "retry", "poison", "slow", "hang"], [200, 4, 2, 2, 1])[0]

    # -- what may happen -----------------------------------------------------------------------------------------------

    def events(self) -> dict[str, Callable[[], Awaitable[None]]]:
        every: dict[str, Callable[[], Awaitable[None]]] = {
            "kill": self.kill, "kill and start again": self.kill_and_start_again, "freeze": self.freeze,
            "stop": self.stop, "scale up": self.scale_up, "scale down": self.scale_down, "cut off": self.cut_off,
            "new subject": self.new_subject, "broker": self.kill_broker, "reset": self.reset_consumer,
            "delete consumer": self.delete_consumer, "keys": self.delete_keys, "purge": self.purge,
            "delete": self.delete_message, "remake": self.remake_stream,
        }  # fmt: skip
        if not self._by_pattern:  # those groups have a list
            every |= {"weights": self.change_list, "wrong list": self.write_wrong_list, "taken off": self.take_off}
        return every

    async def run(self) -> None:
        self._start("a", "b", "c")
        if self._by_pattern:  # there is nothing to share before there are messages
            if self.retention == "interest":
                await self.group.eventually(self._held, "the group to have begun")
            self.group.flood.start()
        await self.group.settled(3)
        if not self._by_pattern:
            self.group.flood.start()
        await self.group.more_done(20)
        events = self.events()
        for _ in range(EVENTS):
            name = self.random.choice(sorted(events))
            self.happened.append(name)
            await events[name]()
            await asyncio.sleep(self.random.choice([0.0, 0.3, 1.0]))
        for name in self._stopped:
            self.group.signal(name, signal.SIGCONT)
        self._connect_again()

    def _start(self, *names: str) -> None:
        for name in names:
            self.group.start(name, **({"servers": [self.proxy.url]} if name == "c" else {}))

    async def _held(self) -> bool:
        return holder_name("g") in await self.group.control.jetstream.consumer_names(STREAM)

    def _some(self) -> str:
        return self.random.choice(sorted(self.group.processes.keys() - self._stopped))

    def _start_one(self) -> None:
        self._next += 1
        self.group.start(f"w{self._next}")

    def _keep_two(self) -> None:
        while len(self.group.processes.keys() - self._stopped) < 2:
            self._start_one()

    async def kill(self) -> None:
        self.group.kill(self._some())
        self._keep_two()

    async def kill_and_start_again(self) -> None:
        name = self._some()
        self.group.kill(name)
        self._start(name)

    async def cut_off(self) -> None:
        """Of worker c nothing gets through any more: its connections are silent, or refused."""
        if "c" not in self.group.processes:
            self._start("c")
        if self.random.random() < 0.5:
            self.proxy.cut(refuse=True)
        else:
            self.proxy.drop_up = self.proxy.drop_down = lambda _: True
        self._keep_two()
        await asyncio.sleep(self.random.choice([0.3, 2.5]) * TTL)
        if self.random.random() < 0.7:
            self._connect_again()

    def _connect_again(self) -> None:
        self.proxy.drop_up = self.proxy.drop_down = keep_all
        self.proxy.allow()

    async def freeze(self) -> None:
        name = self._some()
        self._stopped.add(name)
        self.group.signal(name, signal.SIGSTOP)
        self._keep_two()
        await asyncio.sleep(self.random.choice([0.3, 2.5]) * TTL)
        if self.random.random() < 0.7:
            self._stopped.discard(name)
            self.group.signal(name, signal.SIGCONT)

    async def stop(self) -> None:
        await self._leave(self._some())
        self._keep_two()

    async def scale_up(self) -> None:
        for _ in range(self.random.randint(1, 3)):
            self._start_one()

    async def scale_down(self) -> None:
        """To two workers, all others at once."""
        running = sorted(self.group.processes.keys() - self._stopped)
        await self._leave(*self.random.sample(running, max(len(running) - 2, 0)))

    async def _leave(self, *names: str) -> None:
        leaving = [self.group.processes.pop(name) for name in names]
        for process in leaving:
            process.send(signal.SIGTERM)
        for process in leaving:
            await asyncio.to_thread(process.wait, 60)  # the sink answers meanwhile

    async def kill_broker(self) -> None:
        server = self.group.server
        assert isinstance(server, EmbeddedServer)
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.start)

    async def new_subject(self) -> None:
        name = f"n{len(self.group.flood.partitions)}"
        await self._try(lambda: self._list([*self.group.flood.partitions, name]))
        if self.retention == "interest" and not self._by_pattern:  # what comes before somebody wants it is not kept
            await self.group.eventually(lambda: self._covered([name]), "somebody to cover it")
        self.group.flood.partitions.append(name)

    async def change_list(self) -> None:
        await self._try(lambda: self._list(self.group.flood.partitions, weight=self.random.randint(2, 5)))

    async def write_wrong_list(self) -> None:
        """A partition gets another's subject, or a new one overlaps all, or it is no list: all are told, and work goes
        on. Then it is put right."""
        names = self.group.flood.partitions
        first, second, *rest = self._listed(names)
        wrong: list[Callable[[], Awaitable[object]]] = [
            lambda: InBucket(self.group.bucket).write([first, Partition(second.id, ("s.other",)), *rest]),
            lambda: InBucket(self.group.bucket).write([first, second, *rest, Partition("all", ("s.>",))]),
            lambda: self.group.bucket.put(LIST_KEY, {"partitions": [{"name": "p0"}]}),
        ]
        await self._try(self.random.choice(wrong))
        await asyncio.sleep(self.random.choice([0.3, 1.5]))
        await self._try(lambda: self._list(names))

    async def take_off(self) -> None:
        """One partition is taken off the list, and comes back; an Interest stream keeps nothing of it meanwhile."""
        names = list(self.group.flood.partitions)
        gone = self.random.choice(names)
        await self._try(lambda: self._list([name for name in names if name != gone]))
        await asyncio.sleep(self.random.choice([0.3, 2.0]))
        await self._try(lambda: self._list(names))
        if self.retention == "interest":
            await self.group.eventually(lambda: self._has_owner(gone), "the partition to have an owner again")
            self._need_not_come([gone])

    async def _has_owner(self, name: str) -> bool:
        owner = (await assignment.Assignments(self.group.bucket).current()).owners.get(name)
        claim = (await self.group.claims()).get(name)
        return claim is not None and claim.settled and claim.owner == owner

    async def _list(self, names: list[str], weight: int = 1) -> None:
        await InBucket(self.group.bucket).write(self._listed(names, weight))

    def _listed(self, names: list[str], weight: int = 1) -> list[Partition]:
        return [Partition(name, (f"s.{name}",), weight) for name in names]

    async def reset_consumer(self) -> None:
        """To its first message: the server moves no consumer to before the sequence that it was created with."""
        jetstream = self.group.control.jetstream

        async def reset(name: str) -> None:
            config = (await jetstream.consumer_info(STREAM, name)).config
            await jetstream.reset_consumer(STREAM, name, config.get("opt_start_seq", 1))

        await self._with_some_consumer(reset)

    async def delete_consumer(self) -> None:
        await self._with_some_consumer(lambda name: self.group.control.jetstream.delete_consumer(STREAM, name))
        if self.retention == "interest":  # it kept what nobody else wants
            await self._lose_until_covered()

    async def _with_some_consumer(self, act: Callable[[str], Awaitable[object]]) -> None:
        names = await self.group.control.jetstream.consumer_names(STREAM)
        if names:
            with suppress(ConsumerNotFound):
                await self._try(lambda: act(self.random.choice(sorted(names))))

    async def delete_keys(self) -> None:
        """One of a kind, or all claims at once."""
        bucket = self.group.bucket
        family = self.random.choice([claims.CLAIMS, claims.PROGRESS, "leader", assignment.ASSIGNMENT])
        keys = sorted(await bucket.entries(family))
        chosen = keys if self.random.random() < 0.3 else keys[:1]
        self.happened[-1] += f" ({len(chosen)} of {family})"
        for key in chosen:
            if entry := await bucket.get(key):
                with suppress(PenstockError):
                    await bucket.delete(key, entry.revision)

    async def purge(self) -> None:
        await self._lose(lambda: self.group.control.jetstream.purge_stream(STREAM))

    async def delete_message(self) -> None:
        jetstream = self.group.control.jetstream
        state = (await jetstream.stream_info(STREAM)).state
        if state.messages:
            sequence = self.random.randint(max(state.first_seq, state.last_seq - 5), state.last_seq)

            async def delete() -> None:
                with suppress(ApiError):  # it is gone already
                    await jetstream.delete_message(STREAM, sequence)

            await self._lose(delete)

    async def remake_stream(self) -> None:
        async def remake() -> None:
            jetstream = self.group.control.jetstream
            with suppress(StreamNotFound):
                await jetstream.delete_stream(STREAM)
            await make_stream(jetstream, STREAM, subjects=["s.>"], retention=self.retention)

        await self._lose(remake)
        if self.retention == "interest":
            await self._lose_until_covered()

    async def _lose_until_covered(self) -> None:
        """What comes to an Interest stream before somebody wants it is not kept."""
        await self.group.eventually(self._all_covered, "the consumers to be back")
        await self._lose(self._all_covered)

    async def _all_covered(self) -> bool:
        return await self._covered(self.group.flood.partitions)

    async def _covered(self, partitions: list[str]) -> bool:
        consumers = await self.group.control.jetstream.consumers(STREAM)
        covered = {subject for consumer in consumers for subject in consumer.filters}
        return all(f"s.{partition}" in covered for partition in partitions)

    async def _lose(self, act: Callable[[], Awaitable[object]]) -> None:
        """Whatever is not done when this is over need not come any more; what is published meanwhile neither."""
        await self._try(act)
        self._need_not_come(self.group.flood.partitions)

    def _need_not_come(self, partitions: Collection[str]) -> None:
        for partition in partitions:
            published = range(1, self.group.flood.published[partition] + 2)
            done = {effect.number for effect in self.group.sink.effects[partition]}
            self.gone.setdefault(partition, set()).update(set(published) - done)

    async def _try(self, act: Callable[[], Awaitable[object]]) -> None:
        """A broker that was killed a moment ago may not be back."""

        async def done() -> bool:
            try:
                await act()
            except ConsumerNotFound:
                return True
            except PenstockError:
                return False
            return True

        await eventually_async(done, 30, "the broker to be there")

    # -- what must come of it ------------------------------------------------------------------------------------------

    def _missing(self) -> dict[str, list[int]]:
        found = judge(self.group.flood.published, self.group.sink.effects).lost
        expected = {p: [n for n in some if n not in self.gone.get(p, ())] for p, some in found.items()}
        return {p: some for p, some in expected.items() if some}

    async def verdict(self) -> Verdict:
        await self.group.flood.end()
        with suppress(AssertionError):  # the verdict says what is missing
            await eventually_async(lambda: not self._missing(), ALL_DONE_WITHIN)
        verdict = judge(self.group.flood.published, self.group.sink.effects)
        verdict.lost = self._missing()
        return verdict


def seeds(count: int, first: int = 0) -> list[object]:
    return [pytest.param(first + n, id=f"seed-{first + n}") for n in range(count)]


async def check(server: EmbeddedServer, directory: Path, retention: str, seed: int) -> None:
    """Every other seed finds its partitions in the stream, the others have a list."""
    extra: dict[str, Any] = {"dlq": "dlq.g", "handler_timeout": 5.0}
    if seed % 2:
        extra["pattern"] = "s.{partition}"
    with LossyProxy(server.port) as proxy:
        await _check(server, proxy, directory, retention, seed, extra)


async def _check(
    server: EmbeddedServer, proxy: LossyProxy, directory: Path, retention: str, seed: int, extra: dict[str, Any]
) -> None:
    async with fleet(server, directory, retention, partitions=6, pause=0.05, **extra) as group:
        await make_stream(group.control.jetstream, "DLQ", subjects=["dlq.>"])
        model = Model(group, proxy, retention, seed)
        try:
            await model.run()
            verdict = await model.verdict()
        except Exception:
            print(f"{retention}, seed {seed}: {model.happened}")
            raise
        print(f"{retention}, seed {seed}: {model.happened}, {group.flood.total} messages, {verdict.duplicates} again")
        assert verdict.clean, f"{model.happened}\n{await group.explain(verdict)}"
        assert verdict.duplicates <= IN_FLIGHT * (len(model.happened) + 1), model.happened


SHORT = {"limits": 4, "workqueue": 3, "interest": 3}
"""How many seeds of each retention are part of `make test`: ten in all."""
SEEDS = [
    pytest.param(retention, seed, id=f"{retention}-seed-{seed}", marks=[pytest.mark.short] if seed < some else [])
    for retention, some in SHORT.items()
    for seed in range(10)
]


@pytest.mark.kills
@pytest.mark.parametrize(("retention", "seed"), SEEDS)
async def test_whatever_happens(nats_server: EmbeddedServer, tmp_path: Path, retention: str, seed: int) -> None:
    await check(nats_server, tmp_path, retention, seed)


@pytest.mark.soak
@pytest.mark.parametrize("seed", seeds(100, first=100))
@pytest.mark.parametrize("retention", RETENTIONS)
async def test_whatever_else_happens(nats_server: EmbeddedServer, tmp_path: Path, retention: str, seed: int) -> None:
    await check(nats_server, tmp_path, retention, seed)
