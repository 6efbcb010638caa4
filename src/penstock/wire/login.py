"""Where to connect, whether to encrypt, and who to be: decisions from settings and the server's INFO. No I/O but the
credentials file."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from urllib.parse import unquote, urlsplit

from penstock import __version__
from penstock.errors import AccessDenied, ConfigError, FeatureMissing
from penstock.settings import Settings

DEFAULT_PORT = 4222
DEFAULT_MAX_PAYLOAD = 1024 * 1024
_SECTION = r"-+BEGIN {name}-+\s+(\S+)\s+-+END {name}-+"
_JWT = re.compile(_SECTION.format(name="NATS USER JWT"))
_SEED = re.compile(_SECTION.format(name="USER NKEY SEED"))


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One server to try, with the login its URL carries."""

    host: str
    port: int = DEFAULT_PORT
    tls: bool = False
    """The URL insists on TLS (`tls://`)."""
    tls_name: str = ""
    """The name its certificate must have."""
    user: str | None = None
    password: str | None = None

    def __str__(self) -> str:  # no secrets: this is what errors show
        return f"{'tls' if self.tls else 'nats'}://{self.address}"

    @property
    def address(self) -> str:
        """Host and port as cluster members announce them."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, url: str) -> Self:
        """The endpoint of a server URL. Only TCP: `nats://` and `tls://`."""
        parts = urlsplit(url if "://" in url else f"nats://{url}")
        if parts.scheme not in ("nats", "tls"):
            raise ConfigError(f"{parts.scheme}:// is not spoken here: give a nats:// or tls:// server")
        try:
            host, port = parts.hostname, parts.port or DEFAULT_PORT
        except ValueError as exc:
            raise ConfigError(f"a server URL with an unusable port: {exc}") from exc
        if not host:
            raise ConfigError(f"a server URL without a host: {parts.scheme}://…")
        user = unquote(parts.username) if parts.username is not None else None
        password = unquote(parts.password) if parts.password is not None else None
        return cls(host, port, parts.scheme == "tls", host, user, password)


def endpoints(settings: Settings) -> tuple[Endpoint, ...]:
    """The servers of the settings, in their order."""
    return tuple(Endpoint.parse(url) for url in settings.servers)


def discovered(known: Iterable[Endpoint], through: Endpoint, connect_urls: Iterable[str]) -> tuple[Endpoint, ...]:
    """Members of the cluster that INFO names and the settings do not; they share the login and the certificate name."""
    seen = {endpoint.address for endpoint in known}
    parsed = (Endpoint.parse(url) for url in connect_urls)
    return tuple(
        Endpoint(one.host, one.port, through.tls, through.tls_name, through.user, through.password)
        for one in parsed
        if one.address not in seen
    )


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What a connection needs of INFO."""

    server_id: str
    version: str
    max_payload: int
    tls_required: bool
    tls_available: bool
    nonce: str | None
    headers: bool
    connect_urls: tuple[str, ...]

    @property
    def server_version(self) -> str:
        """What `features.require` asks for."""
        return self.version

    @classmethod
    def parse(cls, fields: dict[str, Any]) -> Self:
        return cls(
            server_id=str(fields.get("server_id", "")),
            version=str(fields.get("version", "")),
            max_payload=int(fields.get("max_payload") or DEFAULT_MAX_PAYLOAD),
            tls_required=bool(fields.get("tls_required")),
            tls_available=bool(fields.get("tls_available")),
            nonce=fields.get("nonce"),
            headers=bool(fields.get("headers")),
            connect_urls=tuple(fields.get("connect_urls") or ()),
        )


def needs_tls(info: ServerInfo, settings: Settings, endpoint: Endpoint) -> bool:
    """Whether to encrypt after INFO. What the settings ask for is never silently dropped."""
    wanted = settings.uses_tls or endpoint.tls
    if wanted and not (info.tls_required or info.tls_available):
        raise AccessDenied(f"{endpoint} does not offer TLS, and the settings ask for it; enable TLS there, or drop it")
    return wanted or info.tls_required


def connect_options(
    info: ServerInfo, settings: Settings, endpoint: Endpoint, *, name: str, echo: bool, encrypted: bool
) -> dict[str, Any]:
    """The options of CONNECT. Logins of the settings win over the one in the URL."""
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
    return options | _identity(info, settings, endpoint)


def _identity(info: ServerInfo, settings: Settings, endpoint: Endpoint) -> dict[str, str]:
    if settings.credentials:
        return signed(Path(settings.credentials), info.nonce)
    if settings.token is not None:
        return {"auth_token": settings.token}
    if settings.user is not None:
        return {"user": settings.user, "pass": settings.password or ""}
    if endpoint.user is not None and endpoint.password is not None:
        return {"user": endpoint.user, "pass": endpoint.password}
    if endpoint.user is not None:
        return {"auth_token": endpoint.user}
    return {}


def signed(path: Path, nonce: str | None) -> dict[str, str]:
    """Prove possession of the seed by signing the server's nonce; with a JWT when the file has one."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        reason = getattr(exc, "strerror", None) or "it is not text"
        raise ConfigError(f"{path} cannot be read as a credentials file: {reason}") from exc
    seed = _SEED.search(text)
    if not seed:
        raise ConfigError(f"{path}: there is no USER NKEY SEED in this credentials file")
    if not nonce:
        return {}  # the server asks nobody to sign: it has no such users
    import nkeys  # and libsodium with it: only where a login needs it

    try:
        pair = nkeys.from_seed(seed[1].encode())
    except nkeys.NkeysError as exc:
        raise ConfigError(f"{path}: the NKEY seed is damaged ({type(exc).__name__})") from exc
    signature = base64.urlsafe_b64encode(pair.sign(nonce.encode())).rstrip(b"=").decode()
    jwt = _JWT.search(text)
    who = {"jwt": jwt[1]} if jwt else {"nkey": pair.public_key.decode()}
    return {**who, "sig": signature}
