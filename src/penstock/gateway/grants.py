"""Authenticates and authorizes callers. Pure: certificates and tokens in, a decision out."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from penstock import subjects
from penstock.errors import AccessDenied
from penstock.topology.model import GatewayIdentity, GatewaySpec

BEARER = "bearer "


class NotAuthenticated(AccessDenied):
    """The caller is not authenticated; the message does not say how close it came."""


class NotGranted(AccessDenied):
    """The caller is known, and this is not granted to it."""


class Grants:
    """The identities of a platform file."""

    def __init__(self, spec: GatewaySpec) -> None:
        self._by_name = {name: one for one in spec.identities.values() for name in one.certificates}
        self._tokens = [(token, one) for one in spec.identities.values() for token in one.tokens]
        self.identities = tuple(spec.identities.values())

    def caller(
        self, certificate: Mapping[str, Any] | None, authorization: str | None, now: datetime
    ) -> GatewayIdentity:
        """The identity that a certificate (checked by TLS already) or an `Authorization` header proves.

        A caller that shows both must be the same by both. Raises `NotAuthenticated`.
        """
        proven = []
        if certificate:
            proven.append(self._of_certificate(certificate))
        if authorization:
            proven.append(self._of_token(authorization, now))
        if not proven:
            raise NotAuthenticated("show a client certificate, or a bearer token in the Authorization header")
        if any(one is not proven[0] for one in proven):
            raise NotAuthenticated("the certificate and the token belong to different identities")
        return proven[0]

    def _of_certificate(self, certificate: Mapping[str, Any]) -> GatewayIdentity:
        for name in _names(certificate):
            if found := self._by_name.get(name):
                return found
        raise NotAuthenticated("no identity of the platform file has a name of this certificate")

    def _of_token(self, authorization: str, now: datetime) -> GatewayIdentity:
        if not authorization.lower().startswith(BEARER):
            raise NotAuthenticated("the Authorization header holds no bearer token")
        digest = hashlib.sha256(authorization[len(BEARER) :].strip().encode()).hexdigest()
        found = None
        for token, identity in self._tokens:  # compare all of them: the time taken does not reveal which one matched
            if hmac.compare_digest(token.sha256, digest) and (token.expires is None or now < token.expires):
                found = identity
        if found is None:
            raise NotAuthenticated("the bearer token is not known, or has expired")
        return found


def granted_consumer(identity: GatewayIdentity, consumer: str, stream: str) -> str:
    """The stream of a consumer that the caller may use; `stream` may be empty where its grants leave no doubt."""
    streams = [name for name, granted in identity.consumers if granted == consumer and stream in ("", name)]
    if len(streams) != 1:
        raise NotGranted(f"consumer {consumer!r} is not granted to {identity.name!r}")
    return streams[0]


def check_subject(identity: GatewayIdentity, subject: str) -> None:
    """Raise unless the caller may append to this subject."""
    fine = subjects.problem(subject) is None and subjects.is_literal(subject)
    if not fine or not subjects.covered(subject, identity.subjects):
        raise NotGranted(f"subject {subject!r} is not granted to {identity.name!r}")


def _names(certificate: Mapping[str, Any]) -> Iterator[str]:
    """The names that a certificate proves, as `ssl` shows them: alternative names, never the common name."""
    for kind, name in certificate.get("subjectAltName", ()):
        if kind in ("DNS", "URI", "email"):
            yield name
