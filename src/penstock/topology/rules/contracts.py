"""Rules about the AsyncAPI document: it and the platform file say the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from penstock import subjects
from penstock.topology.model import ConsumerSpec
from penstock.topology.rules.rule import Case, Hit, Severity, at, rule
from penstock.units import format_duration, from_nanoseconds


@rule(
    "A01",
    Severity.ERROR,
    "contradicts the AsyncAPI document",
    "Services are written from the one file and run by the other: they will be wrong about subjects, retries and dead "
    "letters.",
)
def contradiction(case: Case) -> Iterator[Hit]:
    for consumer in case.platform.consumers.values():
        for key, here, there in (*_differences(consumer), *_other_subjects(case, consumer)):
            assert consumer.contract is not None
            yield at(
                consumer,
                key,
                f"consumer {consumer.name!r} has {key} {here}, {consumer.contract.where} says {there}",
                "make both say the same, or leave it out here",
            )


def _differences(consumer: ConsumerSpec) -> Iterator[tuple[str, str, str]]:
    contract = consumer.contract
    if contract is None:
        return
    pairs: tuple[tuple[str, Any, Any], ...] = (
        ("ack_wait", consumer.config.get("ack_wait"), contract.ack_wait),
        ("max_deliver", consumer.config.get("max_deliver"), contract.max_deliver),
        ("dlq", consumer.dlq, contract.dlq_subject),
    )
    for key, here, there in pairs:
        if there is not None and here != there:
            yield key, _shown(key, here), _shown(key, there)


def _other_subjects(case: Case, consumer: ConsumerSpec) -> Iterator[tuple[str, str, str]]:
    """What the consumer reads, where nothing of it is what the document describes."""
    stream = case.platform.streams.get(consumer.stream)
    read = consumer.filters or (stream.subjects if stream else ())
    described = consumer.contract.subject if consumer.contract else None
    if described and read and not subjects.any_overlap([described], read):
        yield "filter", ", ".join(read), f"address {described}"


def _shown(key: str, value: Any) -> str:
    if value is None:
        return "unset"
    return format_duration(from_nanoseconds(value)) if key == "ack_wait" else str(value)


@rule(
    "A02",
    Severity.INFO,
    "not in the AsyncAPI document",
    "The document of the platform does not mention the subject, so nobody can read there what its events are.",
)
def undocumented(case: Case) -> Iterator[Hit]:
    for consumer in case.platform.consumers.values():
        if case.platform.asyncapi and consumer.contract is None and consumer.filters:
            yield at(
                consumer,
                None,
                f"{case.platform.asyncapi} has no channel for {', '.join(consumer.filters)}",
                "add the channel with `x-nats-config`",
            )
