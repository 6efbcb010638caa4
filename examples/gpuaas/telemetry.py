"""Readings of the GPU nodes, handled by a group of workers, each node's in order.

penstock work telemetry:read --group telemetry --file telemetry.yaml
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator

from penstock.consume.messages import Message, MessageContext

NODES = tuple(f"node-{number:02}" for number in range(1, 13))

handled: defaultdict[str, list[int]] = defaultdict(list)
"""Sequences of the readings, by node, as they were handled."""


def readings(count: int) -> Iterator[tuple[str, bytes]]:
    """Subjects and bodies of so many readings of the nodes in turn."""
    for number in range(count):
        node = NODES[number % len(NODES)]
        yield f"telemetry.{node}", json.dumps({"node": node, "celsius": 40 + number * 7 % 30}).encode()


async def read(message: Message, context: MessageContext) -> None:
    handled[context.partition_id].append(message.sequence)
