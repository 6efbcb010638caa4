"""The GPU cloud's services: handlers on the consumers that penstock.yaml declares.

    penstock run services:app                              # all of them
    penstock run services:app --service billing-worker     # one of them, on as many machines as you like

Events may come twice: what a service has seen changes nothing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import penstock

app = penstock.App(Path(__file__).with_name("penstock.yaml"), env="dev")


@dataclass(frozen=True, slots=True)
class Event:
    """What handlers need of an event's envelope."""

    event_id: str
    payload: dict[str, Any]


@dataclass(slots=True)
class Books:
    """What the services know; in a real cloud each has a database."""

    seen: set[tuple[str, str]] = field(default_factory=set)
    rented: dict[str, int] = field(default_factory=dict)
    """GPUs by allocation."""
    gpu_seconds: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    """Used GPU time by project."""
    limit: float = 40.0
    """No top-up may be larger. Somebody has set it too low."""
    paid: dict[str, float] = field(default_factory=dict)
    """What was paid, by event, booked or not."""
    booked: dict[str, float] = field(default_factory=dict)
    notices: Counter[str] = field(default_factory=Counter)

    def is_new(self, event: Event, message: penstock.Message) -> bool:
        key = (message.consumer, event.event_id)
        if key in self.seen:
            return False
        self.seen.add(key)
        return True


books = Books()


@app.consumer("billing_worker_usage_metered")
async def add_up(usage: Event, message: penstock.Message) -> None:
    if books.is_new(usage, message):
        books.gpu_seconds[usage.payload["project_id"]] += usage.payload["gpu_seconds"]


@app.consumer("billing_worker_balance_credited")
async def credit(top_up: Event) -> None:
    """Book a top-up. One above the limit fails, is tried as often as the consumer says, and becomes a dead letter."""
    project, amount = top_up.payload["project_id"], top_up.payload["amount"]
    books.paid[top_up.event_id] = amount
    if amount > books.limit:
        raise penstock.RetryLater(f"a top-up of {amount:g} for {project} is above the limit of {books.limit:g}", 0.05)
    books.booked[top_up.event_id] = amount


@app.consumer("provisioning_worker_provision_requested")
async def rent(request: Event) -> None:
    books.rented[request.payload["allocation_id"]] = request.payload["gpus"]


@app.consumer("provisioning_worker_releasing_requested")
@app.consumer("provisioning_worker_force_release")
async def take_back(request: Event) -> None:
    books.rented.pop(request.payload["allocation_id"], None)


NOTED = (
    "billing_worker_provision_active",
    "billing_worker_releasing_completed",
    "billing_worker_release_failed",
    "notification_relay_low_balance",
    "notification_relay_auto_release_pending",
    "notification_relay_balance_depleted",
    "notification_relay_reconcile_failed",
    "notification_relay_provision_active",
    "notification_relay_provision_failed",
    "notification_relay_releasing_completed",
    "notification_relay_release_failed",
    "app_runtime_worker_instance_requested",
    "app_runtime_worker_instance_upgrade_requested",
    "app_runtime_worker_instance_rollback_requested",
    "app_runtime_worker_instance_decommission_requested",
    "storage_worker_attachment_requested",
    "storage_worker_attachment_detach_requested",
    "dlq_inspector",
)


async def note(message: penstock.Message) -> None:
    """Tell people, start what they asked for, look at a letter: here it is only counted."""
    books.notices[message.consumer] += 1


for consumer in NOTED:
    app.consumer(consumer)(note)
