"""What the server assumes for a field that is left out, given the fields beside it. Pure."""

from __future__ import annotations

from penstock.jetstream.model import Json
from penstock.topology.fields import CONSUMER_BY_WIRE, STREAM_BY_WIRE

STREAM: Json = {name: field.default for name, field in STREAM_BY_WIRE.items() if field.default is not None}
CONSUMER: Json = {name: field.default for name, field in CONSUMER_BY_WIRE.items() if field.default is not None}


def of_stream(config: Json) -> Json:
    """The defaults of a stream with this configuration."""
    window, age = STREAM["duplicate_window"], config.get("max_age")
    own = {"duplicate_window": min(window, age) if age else window}
    if not config.get("mirror") and not config.get("sources"):
        own["subjects"] = [config["name"]]
    return {**STREAM, **own}


def of_consumer(stream: Json) -> Json:
    """The defaults of a consumer of the stream with this configuration, whose `consumer_limits` count."""
    limits = stream.get("consumer_limits") or {}
    own = {"inactive_threshold": limits["inactive_threshold"]} if limits.get("inactive_threshold") else {}
    if pending := limits.get("max_ack_pending"):
        own["max_ack_pending"] = min(pending, CONSUMER["max_ack_pending"])
    return {**CONSUMER, **own}
