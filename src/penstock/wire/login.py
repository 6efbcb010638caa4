"""Decides where to connect, whether to encrypt, and how to authenticate, from settings and the server's INFO. No I/O
but the credentials file."""

from __future__ import annotations

import base64
import re
import ssl
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

from penstock import __version__
from penstock.errors import AccessDenied, ConfigError, ConnectionLost, FeatureMissing, PenstockError, ProtocolError
from penstock.settings import Settings

DEFAULT_PORT = 4222
ALERT_WITHIN = 1.0
"""Seconds to wait for the alert of a server that does not accept our certificate."""
DEFAULT_MAX_PAYLOAD = 1024 * 1024
MAX_DISCOVERED = 256
"""Members of a cluster that are taken from one INFO."""
_SECTION = r"-+BEGIN {name}-+\s+(\S+)\s+-+END {name}-+"
_JWT = re.compile(_SECTION.format(name="NATS USER JWT"))
_SEED = re.compile(_SECTION.format(name="USER NKEY SEED"))
_BARE_SEED = re.compile(r"\s*(SU[A-Z2-7]{56})\s*")
"""A file of `nk -gen user`: the seed and nothing else."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One server to try. The login is a matter of the settings."""

    host: str
    port: int = DEFAULT_PORT
    tls: bool = False
    """The URL insists on TLS (`tls://`)."""
    tls_name: str = ""
    """The name its certificate must have."""

    def __str__(self) -> str:
        return f"{'tls' if self.tls else 'nats'}://{self.address}"

    @property
    def address(self) -> str:
        """Host and port as cluster members announce them."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, url: str) -> Self:
        """The endpoint of a server URL. Only TCP: `nats://` and `tls://`."""
        try:
            parts = urlsplit(url if "://" in url else f"nats://{url}")
            host, port = parts.hostname, parts.port or DEFAULT_PORT
        except ValueError as exc:
            raise ConfigError(f"a server URL with an unusable host or port: {exc}") from exc
        if parts.scheme not in ("nats", "tls"):
            raise ConfigError(f"{parts.scheme}:// is not supported; use a nats:// or tls:// URL")
        if not host:
            raise ConfigError(f"a server URL without a host: {parts.scheme}://…")
        return cls(host, port, parts.scheme == "tls", host)


def endpoints(settings: Settings) -> tuple[Endpoint, ...]:
    """The servers of the settings, in their order."""
    return tuple(Endpoint.parse(url) for url in settings.servers)


def discovered(known: Iterable[Endpoint], through: Endpoint, connect_urls: Iterable[str]) -> tuple[Endpoint, ...]:
    """Members of the cluster that INFO names and the settings do not; they share the certificate name."""
    seen = {endpoint.address for endpoint in known}
    found: list[Endpoint] = []
    for url in connect_urls:
        with suppress(ConfigError):  # ignore it: the settings have a server that works
            one = Endpoint.parse(url)
            if one.address not in seen:
                found.append(Endpoint(one.host, one.port, through.tls, through.tls_name))
    return tuple(found[:MAX_DISCOVERED])


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What a connection needs of INFO."""

    server_id: str
    version: str
    max_payload: int
    tls_required: bool
    tls_available: bool
    tls_verify: bool
    """Whether the server asks for a certificate of ours."""
    nonce: str | None
    headers: bool
    connect_urls: tuple[str, ...]
    jetstream: bool = False
    """Whether the server itself has JetStream."""

    @property
    def server_version(self) -> str:
        """What `features.require` asks for."""
        return self.version

    @classmethod
    def parse(cls, fields: dict[str, Any]) -> Self:
        """Raises `ProtocolError` where a field is not what servers send."""
        return cls(
            server_id=_field(fields, "server_id", str, ""),
            version=_field(fields, "version", str, ""),
            max_payload=_field(fields, "max_payload", int, DEFAULT_MAX_PAYLOAD),
            tls_required=_field(fields, "tls_required", bool, False),
            tls_available=_field(fields, "tls_available", bool, False),
            tls_verify=_field(fields, "tls_verify", bool, False),
            nonce=_field(fields, "nonce", str, "") or None,
            headers=_field(fields, "headers", bool, False),
            connect_urls=tuple(url for url in _field(fields, "connect_urls", list, []) if isinstance(url, str)),
            jetstream=_field(fields, "jetstream", bool, False),
        )


def _field(fields: dict[str, Any], name: str, kind: type[T], default: T) -> T:
    """A field of INFO; the default where it is missing, null or empty."""
    value = fields.get(name) or default
    if not isinstance(value, kind) or (isinstance(value, str) and not value.isprintable()):
        raise ProtocolError(f"the server sent an INFO with an invalid {name}: {value!r:.60}")
    return value


def needs_tls(info: ServerInfo, settings: Settings, endpoint: Endpoint) -> bool:
    """Whether to encrypt after INFO. What the settings ask for is never silently dropped."""
    wanted = settings.uses_tls or endpoint.tls
    if wanted and not (info.tls_required or info.tls_available):
        raise AccessDenied(
            f"{endpoint} does not offer TLS, and the settings ask for it; enable TLS there, or drop the TLS settings "
            "and tls://"
        )
    return wanted or info.tls_required


def failure(endpoint: Endpoint, error: OSError | ConnectionLost) -> PenstockError:
    """Return why a login failed: the server is unavailable, or the TLS handshake failed, which no retry fixes."""
    cause = error.__cause__ if isinstance(error, ConnectionLost) else error
    if isinstance(cause, ssl.SSLCertVerificationError):
        return AccessDenied(
            f"{endpoint} has a certificate that is not trusted ({cause.verify_message}); "
            "name the CA that signed it with --tls-ca or PENSTOCK_TLS_CA"
        )
    if isinstance(cause, ssl.SSLError) and not isinstance(cause, ssl.SSLEOFError | ssl.SSLZeroReturnError):
        return AccessDenied(
            f"{endpoint} ended the TLS handshake ({cause.reason or cause}); does it want a client certificate? "
            "Give one it trusts with --tls-cert and --tls-key or PENSTOCK_TLS_CERT and PENSTOCK_TLS_KEY"
        )
    if isinstance(error, ConnectionLost):
        return error
    return ConnectionLost(str(endpoint), str(error) or type(error).__name__)


def connect_options(info: ServerInfo, settings: Settings, *, name: str, echo: bool, encrypted: bool) -> dict[str, Any]:
    """The options of CONNECT."""
    if not info.headers:
        raise FeatureMissing("message headers", info.version or "unknown", "2.2")
    options: dict[str, Any] = {
        "verbose": False,
        "pedantic": False,
        "lang": "python",
        "version": __version__,
        "protocol": 1,
        "headers": True,
        "no_responders": True,
        "echo": echo,
        "name": name,
        "tls_required": encrypted,
    }
    return options | _identity(info, settings)


def _identity(info: ServerInfo, settings: Settings) -> dict[str, str]:
    if settings.credentials:
        return signed(Path(settings.credentials), info.nonce)
    if settings.token is not None:
        return {"auth_token": settings.token}
    if settings.user is not None:
        return {"user": settings.user, "pass": settings.password or ""}
    return {}


def signed(path: Path, nonce: str | None) -> dict[str, str]:
    """Prove possession of the seed by signing the server's nonce; with a JWT when the file has one."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        reason = getattr(exc, "strerror", None) or "it is not text"
        raise ConfigError(f"{path} cannot be read as a credentials file: {reason}") from exc
    seed = _SEED.search(text) or _BARE_SEED.fullmatch(text)
    if not seed:
        raise ConfigError(f"{path}: there is no USER NKEY SEED in this credentials file")
    if not nonce:
        return {}  # the server sends no nonce: it has no such users
    import nkeys  # and libsodium with it: only where a login needs it

    try:
        pair = nkeys.from_seed(seed[1].encode())
    except nkeys.NkeysError as exc:
        raise ConfigError(f"{path}: the NKEY seed is damaged ({type(exc).__name__})") from exc
    signature = base64.urlsafe_b64encode(pair.sign(nonce.encode())).rstrip(b"=").decode()
    jwt = _JWT.search(text)
    who = {"jwt": jwt[1]} if jwt else {"nkey": pair.public_key.decode()}
    return {**who, "sig": signature}
