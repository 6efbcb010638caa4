"""Rules about named readers and the gateway that serves them."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.subjects import REST, covered
from penstock.topology.model import ConsumerSpec, GatewayIdentity
from penstock.topology.rules.rule import Case, Hit, Severity, at, rule


def readers(case: Case) -> Iterator[ConsumerSpec]:
    """Consumers that are fetched from by name: those that say so, and those that the gateway grants."""
    granted = {name for identity in identities(case) for _, name in identity.consumers}
    for consumer in case.platform.consumers.values():
        if consumer.reader or consumer.name in granted:
            yield consumer


def identities(case: Case) -> tuple[GatewayIdentity, ...]:
    return tuple(case.platform.gateway.identities.values()) if case.platform.gateway else ()


@rule(
    "R01",
    Severity.WARNING,
    "named reader that nobody answers for",
    "A name that is a position outlives its program. Without owner and purpose nobody dares to remove it.",
)
def owned(case: Case) -> Iterator[Hit]:
    for consumer in readers(case):
        missing = [key for key in ("owner", "purpose") if not getattr(consumer, key)]
        if missing:
            message = f"named reader {consumer.name!r} has no {' and no '.join(missing)}"
            yield at(consumer, None, message, f"add `{missing[0]}:`")


@rule(
    "R02",
    Severity.WARNING,
    "named reader that gives up",
    "After `max_deliver` the server delivers a fact no more: a reader that was down for long never gets it.",
)
def patient(case: Case) -> Iterator[Hit]:
    for consumer in readers(case):
        if consumer.max_deliver not in (None, -1):
            message = f"named reader {consumer.name!r} gets a fact at most {consumer.max_deliver} times"
            yield at(consumer, "max_deliver", message, "leave max_deliver out: a page comes until it is confirmed")


@rule(
    "R03",
    Severity.ERROR,
    "granted subject that no stream keeps",
    "A fact lies on its subject with one more token, made of its id. An append to such a subject is refused.",
)
def kept(case: Case) -> Iterator[Hit]:
    captured = [subject for stream in case.platform.streams.values() for subject in stream.subjects]
    for identity in identities(case):
        for subject in identity.subjects:
            stored = subject if subject.endswith(REST) else f"{subject}.*"
            if not covered(stored, captured):
                yield Hit(
                    f"identity {identity.name!r} may append to {subject!r}, but no declared stream captures {stored!r}",
                    f"let a stream capture `{stored}`",
                    identity.line,
                    f"gateway.identities.{identity.name}.subjects",
                )
