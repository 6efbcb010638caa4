"""Finds the original subject of dead letters that a service wrote itself, without Penstock's headers.

Such a letter is stored on the `dlq:` of the consumer that gave up, and has no other information about its origin. The
consumers that declare the subject have it, as long as they agree on one literal subject.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from penstock.deadletter.capturer import dlq_of
from penstock.deadletter.letters import FiledLetter
from penstock.errors import ConfigError
from penstock.jetstream.api import JetStream
from penstock.jetstream.model import ConsumerInfo, StreamInfo
from penstock.subjects import is_dead_letter, is_literal


@dataclass(frozen=True, slots=True)
class Address:
    """The origin of a message."""

    subject: str
    stream: str
    consumer: str | None = None
    """The consumer that gave up on it; None when several share the dead-letter subject."""


Addresses = Mapping[str, Address]
"""Origins by dead-letter subject."""


async def declared(js: JetStream) -> Addresses:
    """Return the origins that the consumers of the server declare with `dlq:`."""
    found: dict[str, list[Address]] = defaultdict(list)
    for stream in await js.streams():
        for consumer in await js.consumers(stream.name) if stream.state.consumers else ():
            if dlq := dlq_of(consumer):
                found[dlq].append(Address(_subject(consumer, stream), stream.name, consumer.name))
    return {dlq: address for dlq, some in found.items() if (address := _agreed(some))}


async def named(js: JetStream, subject: str) -> Address:
    """Return the address of a subject given by the user. Raises `ConfigError` when no stream stores it."""
    streams = await js.stream_names(subject)
    if not streams:
        raise ConfigError(
            f"no stream takes {subject!r}, where the letters are to go: create one, or name another subject"
        )
    return Address(subject, streams[0] if len(streams) == 1 else "")


def is_foreign(filed: FiledLetter) -> bool:
    """Whether the letter does not say where it came from."""
    return not filed.letter.subject


def addressed(filed: FiledLetter, addresses: Addresses, otherwise: Address | None = None) -> FiledLetter:
    """Return the letter with its origin, if that is known; `otherwise` is used for the rest."""
    if not is_foreign(filed):
        return filed
    address = addresses.get(filed.subject)
    if otherwise and (address is None or not address.subject):
        address = replace(otherwise, consumer=address.consumer if address else None)
    if address is None:
        return filed
    letter = replace(
        filed.letter,
        subject=address.subject,
        stream=filed.letter.stream or address.stream,
        consumer=filed.letter.consumer or address.consumer,
    )
    return replace(filed, letter=letter)


def overlooked(consumers: Iterable[ConsumerInfo]) -> dict[str, int]:
    """Return consumers of letters with a delivery limit, and the maximum of letters each may not deliver again."""
    found = {}
    for one in consumers:
        given_up = one.delivered_consumer_seq - one.ack_floor_consumer_seq - one.ack_pending
        if one.config.get("max_deliver", -1) > 0 and given_up > 0:
            found[f"{one.stream}/{one.name}"] = given_up
    return found


def _subject(consumer: ConsumerInfo, stream: StreamInfo) -> str:
    """The one subject that the consumer reads; empty when there may be several."""
    subjects = consumer.filters or tuple(stream.config.get("subjects") or ())
    one = subjects[0] if len(subjects) == 1 else ""
    return one if is_literal(one) and not is_dead_letter(one) else ""


def _agreed(some: list[Address]) -> Address | None:
    if len({(one.subject, one.stream) for one in some}) > 1:
        return None
    return some[0] if len(some) == 1 else replace(some[0], consumer=None)
