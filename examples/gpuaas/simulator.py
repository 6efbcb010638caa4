"""A GPU cloud in miniature: projects top up, rent GPUs, are metered and charged, run apps, attach storage.

`simulate` is pure: the same seed and start give the same events. Events that belong together come as one `Step`, to be
stored whole or not at all: a charge, its balance change, and the notification about it.
"""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

PRICE_PER_GPU_SECOND = 0.0008
VERSION = "1.0"

STREAM_OF = {
    "platform.billing": "BILLING",
    "platform.payments": "PAYMENTS",
    "gpuaas.provisioning": "PROVISIONING",
    "appplatform.runtime": "APPS",
    "platform.artifact": "APPS",
    "storage.attachment": "STORAGE",
}


@dataclass(frozen=True, slots=True)
class Event:
    """One event in its envelope."""

    subject: str
    event_id: str
    occurred_at: datetime
    correlation_id: str
    payload: dict[str, Any]

    @property
    def stream(self) -> str:
        return STREAM_OF[".".join(self.subject.split(".")[:2])]

    def encode(self) -> bytes:
        """The envelope as JSON."""
        envelope = {
            "event_id": self.event_id,
            "event_type": self.subject,
            "occurred_at": self.occurred_at.isoformat().replace("+00:00", "Z"),
            "version": VERSION,
            "correlation_id": self.correlation_id,
            "payload": self.payload,
        }
        return json.dumps(envelope, separators=(",", ":")).encode()


@dataclass(frozen=True, slots=True)
class Step:
    """Events of one stream that are stored together or not at all."""

    events: tuple[Event, ...]

    @property
    def stream(self) -> str:
        return self.events[0].stream


@dataclass(slots=True)
class Allocation:
    """GPUs that a project rents."""

    allocation_id: str
    project_id: str
    gpus: int


@dataclass(slots=True)
class World:
    """What the simulation remembers between steps."""

    rng: random.Random
    now: datetime
    projects: list[str]
    balances: dict[str, float]
    allocations: list[Allocation] = field(default_factory=list)

    def identifier(self) -> str:
        return str(uuid.UUID(int=self.rng.getrandbits(128), version=4))

    def project(self) -> str:
        return self.rng.choice(self.projects)

    def event(self, subject: str, correlation_id: str, **payload: Any) -> Event:
        return Event(subject, self.identifier(), self.now, correlation_id, payload)

    def single(self, subject: str, **payload: Any) -> Step:
        return Step((self.event(subject, self.identifier(), **payload),))


def simulate(seed: int, start: datetime, span: timedelta, events: int, projects: int = 20) -> Iterator[Step]:
    """At least `events` events, spread evenly over `span` from `start`; the last step is never cut."""
    names = [f"proj-{n:03}" for n in range(1, projects + 1)]
    world = World(random.Random(seed), start.astimezone(UTC), names, dict.fromkeys(names, 0.0))
    made = 0
    while made < events:
        world.now = start.astimezone(UTC) + span * (made / events)
        action = world.rng.choices(list(ACTIONS), list(ACTIONS.values()))[0]
        for step in action(world):
            made += len(step.events)
            yield step


def _top_up(world: World) -> Iterator[Step]:
    project, amount = world.project(), float(world.rng.choice([5, 10, 25, 50]))
    if world.rng.random() < 0.03:
        yield world.single("platform.payments.reconcile_failed", project_id=project, amount=amount)
        return
    world.balances[project] += amount
    yield world.single("platform.payments.balance_credited", project_id=project, amount=amount)


def _provision(world: World) -> Iterator[Step]:
    allocation = Allocation(world.identifier(), world.project(), world.rng.choice([1, 2, 4, 8]))
    about = {"allocation_id": allocation.allocation_id, "project_id": allocation.project_id, "gpus": allocation.gpus}
    yield world.single("gpuaas.provisioning.requested", **about)
    if world.rng.random() < 0.06:
        yield world.single("gpuaas.provisioning.failed", **about, reason="no capacity")
        return
    world.allocations.append(allocation)
    yield world.single("gpuaas.provisioning.active", **about)


def _meter(world: World) -> Iterator[Step]:
    """A charge, its balance change and the notification: one step, since half of it would be a wrong bill."""
    if not world.allocations:
        return
    allocation = world.rng.choice(world.allocations)
    project, correlation = allocation.project_id, world.identifier()
    gpu_seconds = allocation.gpus * world.rng.randint(60, 900)
    price = round(gpu_seconds * PRICE_PER_GPU_SECOND, 4)
    balance = world.balances[project] = round(world.balances[project] - price, 4)
    used = {"allocation_id": allocation.allocation_id, "gpu_seconds": gpu_seconds, "price": price}
    charge = world.event("platform.billing.usage.metered", correlation, project_id=project, **used)
    change = world.event(
        "platform.billing.balance_changed", correlation, project_id=project, change=-price, balance=balance
    )
    notice = world.event("platform.billing.charge_notified", correlation, project_id=project, price=price)
    yield Step((charge, change, notice))


def _release(world: World) -> Iterator[Step]:
    if not world.allocations:
        return
    allocation = world.allocations.pop(world.rng.randrange(len(world.allocations)))
    about = {"allocation_id": allocation.allocation_id, "project_id": allocation.project_id}
    request = "force_release_requested" if world.rng.random() < 0.1 else "releasing.requested"
    yield world.single(f"gpuaas.provisioning.{request}", **about)
    outcome = "release_failed" if world.rng.random() < 0.05 else "releasing.completed"
    yield world.single(f"gpuaas.provisioning.{outcome}", **about)


def _app(world: World) -> Iterator[Step]:
    action = world.rng.choice(["requested", "upgrade_requested", "rollback_requested", "decommission_requested"])
    about = {"project_id": world.project(), "app": world.rng.choice(["notebook", "inference", "training"])}
    yield world.single(f"appplatform.runtime.instance.{action}", **about)
    if action == "upgrade_requested":
        yield world.single("platform.artifact.published", **about, version=f"1.{world.rng.randint(0, 99)}")


def _storage(world: World) -> Iterator[Step]:
    action = world.rng.choice(["requested", "detach_requested"])
    about = {"project_id": world.project(), "volume_id": world.identifier(), "gib": world.rng.choice([50, 100, 500])}
    yield world.single(f"storage.attachment.{action}", **about)


ACTIONS: dict[Callable[[World], Iterator[Step]], int] = {
    _top_up: 12,
    _provision: 10,
    _meter: 60,
    _release: 8,
    _app: 6,
    _storage: 4,
}
"""What may happen next, and how often compared with the rest."""
