"""Read the gateway section of a platform file: who may call it, and what each caller is granted."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from penstock.jetstream.model import parse_time
from penstock.topology.document import Node, Problems, nearest
from penstock.topology.kinds import (
    Count,
    Duration,
    Field,
    ListOf,
    Moment,
    Name,
    RecordKind,
    Size,
    Subject,
    TextKind,
    name_problem,
    read_record,
)
from penstock.topology.model import ConsumerSpec, GatewayIdentity, GatewayLimits, GatewaySpec, GatewayToken, StreamSpec
from penstock.units import from_nanoseconds

_SHA256 = re.compile(r"[0-9a-f]{64}")
SECOND = 1_000_000_000
MIB = 1024 * 1024

GATEWAY_LIMITS = RecordKind(
    "limits of the gateway",
    (
        Field("page", Count(1, 5_000), "Facts of a page, at most.", default=500),
        Field("page_bytes", Size(), "Bytes of a page, at most; a fact that is larger comes alone.", default=4 * MIB),
        Field("body", Size(), "Bytes of a request, at most.", default=2 * MIB),
        Field("rate", Count(1), "Calls a second of one identity.", default=500),
        Field("concurrent", Count(1), "Calls of one identity at the same time.", default=32),
        Field("wait", Duration(), "Longest that a fetch may wait for a first fact.", default=30 * SECOND),
        Field("connections", Count(1), "Open connections, in all; fewer where descriptors are few.", default=512),
        Field("connections_per_address", Count(1), "Open connections from one address.", default=128),
    ),
    "limits-of-the-gateway",
)

GATEWAY_TOKEN = RecordKind(
    "a bearer token",
    (
        Field(
            "sha256", TextKind("64 hexadecimal digits"), "SHA-256 of the token: the file never holds it.", required=True
        ),
        Field("expires", Moment(), "Refused from then on."),
    ),
    "a-bearer-token",
)

GATEWAY_IDENTITY_FIELDS: tuple[Field, ...] = (
    Field("certificates", ListOf(TextKind("a DNS name or URI")), "Names in the client certificates that prove it."),
    Field("tokens", ListOf(GATEWAY_TOKEN), "Bearer tokens that prove it."),
    Field("consumers", ListOf(Name("consumer name")), "Declared consumers that it may fetch and confirm."),
    Field("subjects", ListOf(Subject()), "Subjects that it may append to; wildcards as in a filter."),
    Field("owner", TextKind("a team"), "Who answers for it."),
)


class Identities:
    """Identities by name; they are read one by one, with the consumers that the file declares at hand."""

    def read(self, node: object, problems: object) -> None:
        return None

    def describe(self) -> str:
        return "[identities](#gateway-identities) by name"


GATEWAY_FIELDS: tuple[Field, ...] = (
    Field("limits", GATEWAY_LIMITS, "What one caller may do."),
    Field("identities", Identities(), "Who may call, and what each is granted. Whatever is not granted is refused."),
)


@dataclass(frozen=True, slots=True)
class DeclaredNames:
    """What the rest of the file declares; None for a part that is too wrong to build."""

    streams: Mapping[str, StreamSpec | None]
    consumers: Mapping[str, ConsumerSpec | None]


def gateway(node: Node | None, declared: DeclaredNames, problems: Problems) -> GatewaySpec | None:
    """The gateway of the file; None when it has none."""
    if node is None or node.value is None:
        return None
    values = read_record(node, "the gateway", GATEWAY_FIELDS, problems)
    if values is None:
        return None
    section = node.get("identities")
    identities = _identities(section, declared, problems) if section is not None else {}
    return GatewaySpec(_limits(values.get("limits", {})), identities, node.place.line)


def _limits(values: dict[str, Any]) -> GatewayLimits:
    if "wait" in values:
        values["wait"] = from_nanoseconds(values["wait"])
    return GatewayLimits(**values)


def _identities(section: Node, declared: DeclaredNames, problems: Problems) -> dict[str, GatewayIdentity]:
    if not section.is_map:
        problems.add(section, f"expected identities by name, found {section.describe()}")
        return {}
    made = {name: _identity(name, node, declared, problems) for name, node in section.value.items()}
    _check_unique(section, made, problems)
    return made


def _identity(name: str, node: Node, declared: DeclaredNames, problems: Problems) -> GatewayIdentity:
    if wrong := name_problem(name):
        problems.add(node, f"{name!r} cannot be the name of an identity: {wrong}")
    values = read_record(node, f"identity {name!r}", GATEWAY_IDENTITY_FIELDS, problems) or {}
    tokens = tuple(_token(one, node, problems) for one in values.get("tokens", ()))
    certificates = tuple(values.get("certificates", ()))
    if not tokens and not certificates:
        problems.add(node, f"identity {name!r} has neither certificates nor tokens: nobody could ever be it")
    grants = (_consumer(one, node, declared, problems) for one in values.get("consumers", ()))
    return GatewayIdentity(
        name=name,
        certificates=certificates,
        tokens=tokens,
        consumers=tuple(grant for grant in grants if grant),
        subjects=tuple(values.get("subjects", ())),
        owner=values.get("owner"),
        line=node.place.line,
    )


def _token(values: dict[str, Any], node: Node, problems: Problems) -> GatewayToken:
    digest = str(values.get("sha256", "")).lower()
    if not _SHA256.fullmatch(digest):
        problems.add(
            node.get("tokens") or node, "a token is given by its SHA-256 in 64 hexadecimal digits, never itself"
        )
    expires: datetime | None = parse_time(values["expires"]) if "expires" in values else None
    return GatewayToken(digest, expires)


def _consumer(name: str, node: Node, declared: DeclaredNames, problems: Problems) -> tuple[str, str] | None:
    """A granted consumer with its stream; it must be one that the file declares."""
    if (spec := declared.consumers.get(name)) is not None:
        return spec.stream, name
    where = node.get("consumers") or node
    if name not in declared.consumers:
        problems.add(
            where, f"consumer {name!r} is not declared under consumers; {nearest(name, list(declared.consumers))}"
        )
    return None


def _check_unique(section: Node, made: Mapping[str, GatewayIdentity], problems: Problems) -> None:
    """Two identities with one certificate or token would be one, with the grants of whichever comes first."""
    seen: dict[str, str] = {}
    for name, identity in made.items():
        for proof in (*identity.certificates, *(token.sha256 for token in identity.tokens)):
            if (first := seen.setdefault(proof, name)) != name:
                problems.add(section.keys[name], f"identities {first!r} and {name!r} both have {proof!r}")
