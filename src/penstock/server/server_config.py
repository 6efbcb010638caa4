"""What an embedded nats-server is told, and the configuration file that becomes. Pure: nothing is started here."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from penstock.errors import ConfigError
from penstock.jetstream.model import Json
from penstock.settings import without_login

LOOPBACK = "127.0.0.1"
ANY_HOST = frozenset({"0.0.0.0", "::", ""})
ROUTE_USER = "route"
"""As whom nodes of a cluster log in at each other."""
LEAF_DOMAIN = "leaf"
"""JetStream domain of a leaf that names none: a leaf must not share its hub's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerTls:
    """Certificates of a server, and what its own clients need to talk to it."""

    cert: str
    key: str
    ca: str | None = None
    """The CA that signed `cert`; clients trust it. Unset: a CA that the system trusts."""
    verify: bool = False
    """Ask clients for a certificate signed by `ca`."""
    client_cert: str | None = None
    """A client certificate for `EmbeddedServer.settings`; goes with `client_key`."""
    client_key: str | None = None

    def __post_init__(self) -> None:
        if self.verify and not self.ca:
            raise ConfigError("to verify client certificates the server needs the CA that signed them (tls ca)")
        for path in (self.cert, self.key, self.ca, self.client_cert, self.client_key):
            if path and not Path(path).is_file():
                raise ConfigError(f"TLS: there is no file {path!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterMember:
    """What one node must know of its cluster."""

    name: str
    port: int
    """Where this node listens for routes, on loopback."""
    route_ports: tuple[int, ...]
    """The route ports of all nodes, this one's too: the server takes their number as the size of the cluster."""
    password: str = field(default="", repr=False)
    """What nodes prove to each other that they belong together. Without one, any process of this machine may join."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerConfig:
    """Everything one embedded server is told. Secrets are left out of `repr`."""

    name: str | None = None
    """Unique among connected servers; made from the port when unset."""
    host: str = LOOPBACK
    """Address that clients and leaf nodes may come in on; monitoring and routes stay on loopback."""
    port: int = 4222
    monitoring_path: str = field(default="", repr=False)
    """What the paths of monitoring begin with. It asks nobody for a login: with a path that cannot be guessed, other
    users of this machine do not read there which streams and connections there are."""
    leaf_port: int = 7422
    """Where other servers may join as leaf nodes; 0 for nowhere."""
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    users: tuple[Json, ...] = field(default=(), repr=False)
    """Users with permissions, as a server's configuration has them; `user` is one more, who may do everything."""
    tls: ServerTls | None = None
    domain: str | None = None
    """JetStream domain."""
    leaf_of: str | None = field(default=None, repr=False)
    """URL of another server's leaf-node port; user and password may be in it."""
    cluster: ClusterMember | None = None
    max_payload: int | None = None
    """Largest message in bytes; the server's default (1 MiB) when unset."""
    sync_interval: str | None = None
    """How often stored messages are forced to disk: `always`, or a duration such as `10s`; default 2m."""
    jetstream: bool = True
    extra: str = field(default="", repr=False)
    """Lines for the end of the configuration file, as they are."""

    def __post_init__(self) -> None:
        if bool(self.user) != bool(self.password):
            raise ConfigError("user and password go together: give both, or neither")
        if self.user and self.token:
            raise ConfigError("user and token are different ways to log in: give only one")
        if self.users and self.token:
            raise ConfigError("users and token are different ways to log in: give only one")
        if self.leaf_of and not _names_a_host(self.leaf_of):
            raise ConfigError(f"leaf_of: {without_login(self.leaf_of)!r} is not a URL such as nats://hub.example:7422")

    @property
    def server_name(self) -> str:
        return self.name or f"penstock-{self.port}"

    @property
    def jetstream_domain(self) -> str | None:
        return self.domain or (LEAF_DOMAIN if self.leaf_of else None)

    @property
    def reachable_host(self) -> str:
        """The host a client on this machine connects to."""
        host = LOOPBACK if self.host in ANY_HOST else self.host
        return f"[{host}]" if ":" in host else host


def config_file(config: ServerConfig, store: Path, ports: Path) -> str:
    """The nats-server configuration: data in `store`; the ports it really listens on appear as a file in `ports`."""
    lines = [
        f"server_name: {quoted(config.server_name)}",
        f"host: {quoted(config.host)}",
        f"port: {config.port}",
        f"http: {quoted(f'{LOOPBACK}:-1')}",
        f"http_base_path: {quoted(config.monitoring_path)}" if config.monitoring_path else "",
        f"ports_file_dir: {quoted(str(ports))}",
        *_limits(config),
        *_jetstream(config, store),
        *_authorization(config),
        *_tls(config.tls, ""),
        *_leafnodes(config),
        *_cluster(config.cluster),
        config.extra,
    ]
    return "\n".join(lines) + "\n"


def quoted(text: str) -> str:
    """A string as the configuration file writes it; its escapes are a subset of JSON's."""
    if any(ord(character) < 32 for character in text):
        raise ConfigError("control characters are not allowed in the server's configuration")
    return json.dumps(text, ensure_ascii=False)


def _value(value: Any) -> str:
    """A value as the configuration file writes it: like JSON, but for its escapes."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{quoted(str(name))}: {_value(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    return quoted(value) if isinstance(value, str) else json.dumps(value)


def _names_a_host(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and parts.port != 0
    except ValueError:  # brackets that do not close, a port that is no number or out of range
        return False


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine reach a server that listens there."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _limits(config: ServerConfig) -> Iterator[str]:
    if config.max_payload:
        yield f"max_payload: {config.max_payload}"


def _jetstream(config: ServerConfig, store: Path) -> Iterator[str]:
    if not config.jetstream:
        return
    yield "jetstream {"
    yield f"  store_dir: {quoted(str(store))}"
    if config.jetstream_domain:
        yield f"  domain: {quoted(config.jetstream_domain)}"
    if config.sync_interval:
        yield f"  sync_interval: {quoted(config.sync_interval)}"
    yield "}"


def _authorization(config: ServerConfig) -> Iterator[str]:
    if config.users:
        own = [{"user": config.user, "password": config.password}] if config.user else []
        yield f"authorization: {_value({'users': [*own, *config.users]})}"
    elif config.user and config.password:
        yield f"authorization {{ user: {quoted(config.user)}, password: {quoted(config.password)} }}"
    elif config.token:
        yield f"authorization {{ token: {quoted(config.token)} }}"


def _tls(tls: ServerTls | None, indent: str) -> Iterator[str]:
    if not tls:
        return
    yield f"{indent}tls {{"
    yield f"{indent}  cert_file: {quoted(tls.cert)}"
    yield f"{indent}  key_file: {quoted(tls.key)}"
    if tls.ca:
        yield f"{indent}  ca_file: {quoted(tls.ca)}"
    if tls.verify:
        yield f"{indent}  verify: true"
    yield f"{indent}}}"


def _leafnodes(config: ServerConfig) -> Iterator[str]:
    yield "leafnodes {"
    yield f"  host: {quoted(config.host)}"
    yield f"  port: {config.leaf_port}"
    yield from _tls(config.tls, "  ")
    if config.leaf_of:
        yield '  reconnect: "1s"'
        yield "  remotes: [ {"
        yield f"    url: {quoted(config.leaf_of)}"
        if config.leaf_of.startswith("tls://"):
            yield from _tls(config.tls, "    ")
        yield "  } ]"
    yield "}"


def _cluster(member: ClusterMember | None) -> Iterator[str]:
    if not member:
        return
    login = f"{ROUTE_USER}:{member.password}@" if member.password else ""
    routes = ", ".join(quoted(f"nats-route://{login}{LOOPBACK}:{port}") for port in member.route_ports)
    yield "cluster {"
    yield f"  name: {quoted(member.name)}"
    yield f"  host: {quoted(LOOPBACK)}"
    yield f"  port: {member.port}"
    if member.password:
        yield f"  authorization {{ user: {quoted(ROUTE_USER)}, password: {quoted(member.password)} }}"
    yield f"  routes: [{routes}]"
    yield "}"
