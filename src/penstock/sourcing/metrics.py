"""A bridge's statistics for Prometheus, on loopback."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from penstock.metrics import endpoint
from penstock.metrics.families import Family, Numbers, Sample

if TYPE_CHECKING:
    from penstock.sourcing.bridge import Bridge, BridgeStatistics

_KINDS = {
    "position": ("gauge", "Origin sequence of the last message that is stored."),
    "stored": ("counter", "Messages stored by this instance."),
    "bytes": ("counter", "Bytes of data stored by this instance."),
    "batches": ("counter", "Atomic batches committed by this instance."),
    "lag": ("gauge", "Messages that the origin has behind the last one received; NaN until known."),
    "gaps": ("counter", "Times that messages were lost on the way and asked for again."),
    "resets_by_others": ("counter", "Times that somebody else reset the consumer."),
    "sessions": ("counter", "Times that both sides were connected."),
}
FAMILIES = {f"penstock_bridge_{name}": Family(kind, help_, ("bridge",)) for name, (kind, help_) in _KINDS.items()}


def samples(bridge: str, statistics: BridgeStatistics) -> Iterator[Sample]:
    """Yield the metrics of a bridge."""
    for name in _KINDS:
        value = getattr(statistics, name)
        yield Sample(f"penstock_bridge_{name}", (bridge,), float("nan") if value is None else value)


def serve(bridge: Bridge, port: int) -> Callable[[], None]:
    """Answer `GET /metrics` on loopback until the function that is returned is called."""
    numbers = Numbers(FAMILIES, lambda: samples(bridge.config.name, bridge.statistics()))
    _, end = endpoint.serve(port, "127.0.0.1", endpoint.always_well, numbers)
    return end
