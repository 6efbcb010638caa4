"""Who is looking, and what they may do.

On loopback, without a login, everybody who reaches the page is the person at this machine. Beyond loopback there must
be TLS, and a client certificate, a token, or the name that a reverse proxy puts into a header.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from penstock.errors import ConfigError

COOKIE = "penstock"
LOCAL = "local"
VIEWER, OPERATOR = "viewer", "operator"
LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True, slots=True)
class Person:
    """Somebody who looks at a page."""

    name: str
    operator: bool


@dataclass(frozen=True, slots=True)
class Access:
    """The rules."""

    actions: bool = False
    """Whether anything may be changed at all."""
    tokens: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Name and role, by the SHA-256 of the token."""
    user_header: str | None = None
    """The header in which a reverse proxy names the person."""
    operators: frozenset[str] = frozenset()
    """Names from certificates or the proxy that may act."""
    certificates: bool = False
    """Whether a client certificate that the CA signed is a login."""
    hosts: frozenset[str] = LOCAL_NAMES
    """Names under which the page may be asked for; others are refused, against rebinding of names."""
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)

    @property
    def needs_login(self) -> bool:
        return bool(self.tokens or self.user_header or self.certificates)

    def person(
        self, headers: Mapping[str, str], cookies: Mapping[str, str], certificate: Mapping[str, object] | None
    ) -> Person | None:
        """Who it is; None when they must log in first."""
        if not self.needs_login:
            return Person(LOCAL, self.actions)
        if self.user_header and (name := headers.get(self.user_header, "").strip()):
            return self._named(name)
        if self.certificates and certificate and (common := _common_name(certificate)):
            return self._named(common)
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = token if scheme.lower() == "bearer" else cookies.get(COOKIE, "")
        return self.bearer(given.strip()) if given.strip() else None

    def bearer(self, token: str) -> Person | None:
        """Whose token it is."""
        digest = hashlib.sha256(token.encode(errors="replace")).hexdigest()
        for known, (name, role) in self.tokens.items():
            if hmac.compare_digest(known, digest):
                return Person(name, self.actions and role == OPERATOR)
        return None

    def _named(self, name: str) -> Person:
        return Person(name, self.actions and name in self.operators)

    def form_token(self, person: Person) -> str:
        """What a form of this person must carry, so that no other site can send it for them."""
        return hmac.new(self.secret, b"form\0" + person.name.encode(), hashlib.sha256).hexdigest()

    def is_own_form(self, person: Person, token: str) -> bool:
        return hmac.compare_digest(self.form_token(person).encode(), token.encode(errors="replace"))

    def is_own_origin(self, origin: str, host: str) -> bool:
        """Whether an `Origin` is where these pages are: the `Host` of the request, or a name that was configured.

        A reverse proxy may have changed the `Host`.
        """
        try:
            found = urlsplit(origin)
            name = (found.hostname or "").lower()
        except ValueError:
            return False
        return found.netloc.lower() == host.lower() or name in self.hosts - LOCAL_NAMES - {"*"}

    def takes_host(self, host: str) -> bool:
        """Whether the `Host` of a request is one of ours."""
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() and not host.endswith("]") else host
        name = name.strip("[]").lower()
        return "*" in self.hosts or name in self.hosts


def is_loopback(host: str) -> bool:
    """Whether nobody but this machine reaches that address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def tokens_in(path: Path) -> dict[str, tuple[str, str]]:
    """Tokens of a file with lines of `NAME viewer|operator SHA256`. Raises `ConfigError` for any other line."""
    found = {}
    try:
        lines = path.read_text().splitlines()
    except OSError as exc:
        raise ConfigError(f"the tokens cannot be read: {exc}") from exc
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 3 or words[1] not in (VIEWER, OPERATOR) or len(words[2]) != 64:
            raise ConfigError(f"{path}:{number}: write NAME viewer|operator SHA256-OF-THE-TOKEN")
        found[words[2].lower()] = (words[0], words[1])
    if not found:
        raise ConfigError(f"{path} has no tokens: write lines of NAME viewer|operator SHA256-OF-THE-TOKEN")
    return found


def _common_name(certificate: Mapping[str, object]) -> str | None:
    """The name in a certificate, as Python's `ssl` shows it."""
    parts = certificate.get("subject")
    for part in parts if isinstance(parts, tuple) else ():
        for key, value in part:
            if key == "commonName":
                return str(value)
    return None
