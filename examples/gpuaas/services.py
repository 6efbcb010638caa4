"""The GPU cloud's services as partitioned workers: provisioning, billing, notification.

Each is a handler on one stream, with a partition for every subject it cares for; `penstock work` runs one of them:

    penstock work services:provision --group provisioning --stream PROVISIONING \
      --partition requested=gpuaas.provisioning.requested --partition releasing=gpuaas.provisioning.releasing.requested

Events may come twice: what a service has seen changes nothing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from penstock.workers.messages import Message, MessageContext
from penstock.workers.partitions import Partition

Handle = Callable[[Message, MessageContext], Awaitable[None]]


@dataclass(slots=True)
class Books:
    """What the services know; in a real cloud each has a database."""

    seen: set[str] = field(default_factory=set)
    rented: dict[str, int] = field(default_factory=dict)
    """GPUs by allocation."""
    gpu_seconds: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    """Used GPU time by project."""
    notices: Counter[str] = field(default_factory=Counter)

    def is_new(self, event: dict[str, Any], service: str) -> bool:
        key = f"{service}/{event['event_id']}"
        if key in self.seen:
            return False
        self.seen.add(key)
        return True


BOOKS = Books()


async def provision(message: Message, context: MessageContext) -> None:
    """Rent GPUs out, and take them back."""
    event = message.json()
    if not BOOKS.is_new(event, "provisioning"):
        return
    payload = event["payload"]
    if context.partition_id == "requested":
        BOOKS.rented[payload["allocation_id"]] = payload["gpus"]
    else:
        BOOKS.rented.pop(payload["allocation_id"], None)


async def bill(message: Message, context: MessageContext) -> None:
    """Add up what projects have used."""
    event = message.json()
    if BOOKS.is_new(event, "billing"):
        BOOKS.gpu_seconds[event["payload"]["project_id"]] += event["payload"]["gpu_seconds"]


async def notify(message: Message, context: MessageContext) -> None:
    """Tell people what became of their allocations."""
    if BOOKS.is_new(message.json(), "notification"):
        BOOKS.notices[context.partition_id] += 1


@dataclass(frozen=True, slots=True)
class Service:
    """A handler, and what it works on."""

    name: str
    stream: str
    handle: Handle
    subjects: dict[str, str]
    """Subject by partition."""
    dlq: str

    @property
    def partitions(self) -> tuple[Partition, ...]:
        return tuple(Partition(id_, (subject,)) for id_, subject in self.subjects.items())


def topics(prefix: str, *names: str) -> dict[str, str]:
    return {name: f"{prefix}.{name}" for name in names}


SERVICES = (
    Service(
        "provisioning",
        "PROVISIONING",
        provision,
        topics("gpuaas.provisioning", "requested", "releasing.requested", "force_release_requested"),
        "dlq.provisioning.worker",
    ),
    Service("billing", "BILLING", bill, topics("platform.billing", "usage.metered"), "dlq.billing.worker"),
    Service(
        "notification",
        "PROVISIONING",
        notify,
        topics("gpuaas.provisioning", "active", "failed", "releasing.completed", "release_failed"),
        "dlq.provisioning.notices",
    ),
)
