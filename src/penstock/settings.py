"""How to reach a cluster: servers, credentials, TLS; from a file, the environment, or arguments.

Later sources win: built-in defaults, then the settings file, then `PENSTOCK_*` variables, then explicit arguments.
The file is YAML with the field names of `Settings`: `PENSTOCK_SETTINGS` names it, else `./penstock.settings.yaml`.
"""

from __future__ import annotations

import difflib
import logging
import math
import os
import re
import secrets
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Self
from urllib.parse import unquote, urlsplit

from penstock import contexts
from penstock.errors import BadSetting, ConfigError

DEFAULT_SERVER = "nats://127.0.0.1:4222"
DEFAULT_TIMEOUT = 5.0  # seconds
DEFAULT_INBOX_PREFIX = "_INBOX"
SETTINGS_FILE = "penstock.settings.yaml"
MAX_ALIASES = 16
"""Aliases of a settings file. Nested ones multiply, and an error that shows a value of them might not end."""
MAX_DEPTH = 32
"""Lists and mappings of a settings file inside each other."""
SECRETS = ("credentials", "user", "password", "token")
HIDDEN = ("password", "token")
"""Settings that are shown nowhere, not even when they are wrong."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Where the servers are and how to log in. Secrets are left out of `repr`.

    A login in a server's URL (`nats://user:password@host`) is moved to `user` and `password`, or to `token`, so that
    `servers` can be shown. What is given as such wins over the URL.
    """

    servers: tuple[str, ...] = (DEFAULT_SERVER,)
    """Server URLs, tried in order; the rest of the cluster is learned from the first that answers."""
    credentials: str | None = None
    """Path of a `.creds` file (JWT and seed). Excludes user, password and token."""
    user: str | None = None
    password: str | None = None
    token: str | None = None
    tls_ca: str | None = None
    """Path of the CA certificate that signed the servers' certificates; system CAs when unset."""
    tls_cert: str | None = None
    """Path of the client certificate; goes with `tls_key`."""
    tls_key: str | None = None
    tls_first: bool = False
    """Encrypt before the server says anything; for servers with `handshake_first`."""
    domain: str | None = None
    """JetStream domain to talk to; the server's own when unset."""
    timeout: float = DEFAULT_TIMEOUT
    """Deadline in seconds of one request to the server."""
    inbox_prefix: str = DEFAULT_INBOX_PREFIX
    """What the subjects of answers begin with. With one of its own, and the permission to subscribe to no other, a
    user cannot hear the answers to others of its account."""

    def __post_init__(self) -> None:
        if not self.servers:
            raise BadSetting("no servers given: name at least one, such as nats://127.0.0.1:4222", "servers")
        for server in self.servers:
            check_url(server)
        self._take_login_from_servers()
        if bool(self.tls_cert) != bool(self.tls_key):
            raise BadSetting("tls_cert and tls_key go together: give both, or neither", "tls_cert", "tls_key")
        logins = [name for name in ("credentials", "user", "token") if getattr(self, name)]
        if len(logins) > 1:
            raise BadSetting(f"{' and '.join(logins)} are different ways to log in: give only one", *logins)
        if not (self.timeout > 0 and math.isfinite(self.timeout)):
            raise BadSetting(f"timeout must be above 0 seconds, got {self.timeout:g}", "timeout")
        if self.domain and re.search(r"[\s.*>]", self.domain):
            raise BadSetting(f"domain: {self.domain!r} cannot be a JetStream domain: no spaces, no . * >", "domain")
        if not re.fullmatch(r"[^\s.*>$\x00-\x20\x7f]+(\.[^\s.*>\x00-\x20\x7f]+)*", self.inbox_prefix):
            problem = "it is the beginning of a subject such as _INBOX_billing"
            raise BadSetting(f"inbox_prefix: {self.inbox_prefix!r} cannot be one: {problem}", "inbox_prefix")
        for name in ("credentials", "tls_ca", "tls_cert", "tls_key"):
            path = getattr(self, name)
            if path and not Path(path).is_file():
                raise ConfigError(f"{name}: there is no file {path!r}")

    def _take_login_from_servers(self) -> None:
        logins = {login for server in self.servers if (login := _login(server))}
        object.__setattr__(self, "servers", tuple(map(without_login, self.servers)))
        if not logins or any(getattr(self, name) for name in ("credentials", "user", "token")):
            return
        if len(logins) > 1:
            raise BadSetting("servers: their URLs have different logins; all are servers of one cluster", "servers")
        for name, value in logins.pop()._asdict().items():
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        shown = (
            f"{f.name}={'***' if f.name in HIDDEN else value!r}"
            for f in fields(self)
            if (value := getattr(self, f.name))
        )
        return f"Settings({', '.join(shown)})"

    @property
    def uses_tls(self) -> bool:
        """Whether the connection must be encrypted."""
        asked = self.tls_ca or self.tls_cert or self.tls_first
        return bool(asked) or any(url.startswith(("tls://", "wss://")) for url in self.servers)

    def ssl_context(self) -> ssl.SSLContext | None:
        """The TLS context for these settings, or None for a plain connection."""
        if not self.uses_tls:
            return None
        try:
            context = ssl.create_default_context(cafile=self.tls_ca)
        except OSError as exc:
            raise ConfigError(f"tls_ca: {self.tls_ca!r} holds no certificate in PEM form ({_reason(exc)})") from exc
        try:
            if self.tls_cert:
                context.load_cert_chain(self.tls_cert, self.tls_key, password="")  # never ask for one on the terminal
        except OSError as exc:
            raise ConfigError(
                f"tls_cert and tls_key: {self.tls_cert!r} and {self.tls_key!r} are not a certificate and its key, "
                f"in PEM form and without a password ({_reason(exc)})"
            ) from exc
        return context

    def new_inbox(self, random_bytes: int = 11) -> str:
        """A subject for answers that nobody can guess."""
        return f"{self.inbox_prefix}.{secrets.token_hex(random_bytes)}"

    def with_servers(self, *servers: str) -> Self:
        """The same login for other servers."""
        return replace(self, servers=tuple(servers))

    @classmethod
    def load(
        cls,
        env: Mapping[str, str] | None = None,
        file: str | Path | None = None,
        context: str | None = None,
        declared: Mapping[str, Any] | None = None,
        **overrides: Any,
    ) -> Self:
        """Settings from the settings file, the environment and arguments; an override of None counts as not given.

        `PENSTOCK_*` variables win over those of the NATS command line (`NATS_URL`, `NATS_CREDS`, …), and these over
        the file. `context` is a context of the NATS command line. Where nothing else names servers, its selected one
        counts, with its login. `declared` is what a platform file says: it wins over the settings file alone.
        """
        env = os.environ if env is None else env
        named = file or env.get("PENSTOCK_SETTINGS")
        lowest = _from_file(named)
        values = _layered(lowest, _converted_all(declared or {}))
        variables = _layered(contexts.from_variables(env), _from_env(env))
        later = _layered(variables, {name: value for name, value in overrides.items() if value is not None})
        context = context or env.get("PENSTOCK_CONTEXT") or env.get("NATS_CONTEXT")
        if context or not ("servers" in values or "servers" in later):
            values = _layered(_converted_all(contexts.read(context, env)), values)
        secrets = tuple(_origin_of(name, env) for name in SECRETS if name in later)
        if secrets and not named and "servers" in lowest and "servers" not in {**later, **(declared or {})}:
            tell_servers_of_directory(Path(SETTINGS_FILE).absolute(), lowest["servers"], secrets)
        return cls(**_layered(values, _converted_all(later)))


FIELDS = tuple(f.name for f in fields(Settings))
LOGINS = ("credentials", "user", "password", "token")


def _layered(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> dict[str, Any]:
    """Values where the upper ones win; a login wins over a login of another kind."""
    other_login = any(name in upper for name in ("credentials", "user", "token"))
    kept = {name: value for name, value in lower.items() if not (other_login and name in LOGINS)}
    return {**kept, **upper}


def _converted_all(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _converted(name, value) for name, value in values.items()}


@cache  # once in a process
def tell_servers_of_directory(path: Path, servers: tuple[str, ...], secrets: tuple[str, ...]) -> None:
    """Warn that a file that merely lies in the current directory decides who gets secrets that are not its own."""
    shown = ", ".join(map(without_login, servers))
    log.warning(
        "%s, a file of the current directory, sends the login of %s to %s; name the file in PENSTOCK_SETTINGS, or the "
        "servers in PENSTOCK_SERVERS, if that is meant",
        path,
        " and ".join(secrets),
        shown,
    )


def _from_file(path: str | Path | None) -> dict[str, Any]:
    chosen = Path(path) if path else Path(SETTINGS_FILE)
    if not chosen.is_file():
        if path:
            raise ConfigError(f"there is no settings file {str(chosen)!r}")
        return {}
    values = _yaml(chosen)
    if not isinstance(values, dict):
        raise ConfigError(f"{chosen}: expected `name: value` lines, such as `servers: [{DEFAULT_SERVER}]`")
    for name in values:
        if name not in FIELDS:
            near = difflib.get_close_matches(str(name), FIELDS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(FIELDS)}"
            raise ConfigError(f"{chosen}: unknown setting {name!r}; {hint}")
    try:
        return {name: _converted(name, value) for name, value in values.items() if value is not None}
    except BadSetting as exc:
        raise ConfigError(f"{chosen}: {exc}") from exc


def _yaml(path: Path) -> Any:
    """The document in a file, or an error of one line that says where it is wrong."""
    import yaml  # Spark tasks and planners seldom have a settings file: they start sooner without

    try:
        text = path.read_text(encoding="utf-8")
        _check_yaml(path, text)
        return yaml.safe_load(text) or {}
    except yaml.MarkedYAMLError as exc:
        mark = exc.problem_mark or exc.context_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{path}{place}: {exc.problem or exc.context} (this is not YAML)") from exc
    except (UnicodeDecodeError, yaml.reader.ReaderError) as exc:
        position = exc.start if isinstance(exc, UnicodeDecodeError) else exc.position
        raise ConfigError(f"{path}: this is not a text file ({exc.reason} at position {position})") from exc
    except (ValueError, RecursionError) as exc:  # a date that is none, a document that is nothing but brackets
        reason = str(exc).partition(":")[0]  # without the value behind it, which may be a secret
        raise ConfigError(f"{path}: {reason}") from None
    except (AttributeError, LookupError, TypeError) as exc:  # PyYAML trusts that a tag fits what it is written before
        raise ConfigError(f"{path}: a tag such as `!!timestamp` does not fit its value; write the value alone") from exc
    except OSError as exc:
        raise ConfigError(f"{path}: {_reason(exc)}") from exc


def _check_yaml(path: Path, text: str) -> None:
    """Refuse what is nested too deep or grows by aliases, before anything is built from it."""
    import yaml

    depth = aliases = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        aliases += isinstance(event, yaml.AliasEvent)
        if depth > MAX_DEPTH:
            raise ConfigError(f"{path}: nested deeper than {MAX_DEPTH} levels; a settings file has `name: value` lines")
        if aliases > MAX_ALIASES:
            raise ConfigError(f"{path}: a settings file has at most {MAX_ALIASES} aliases")


def _origin_of(name: str, env: Mapping[str, str]) -> str:
    """The variable that a setting comes from; its flag when it is none."""
    theirs = (variable for variable, setting in contexts.VARIABLES.items() if setting == name)
    variables = (f"PENSTOCK_{name.upper()}", *theirs)
    return next((variable for variable in variables if env.get(variable)), f"--{name}")


def _from_env(env: Mapping[str, str]) -> dict[str, str]:
    return {name: env[key] for name in FIELDS if env.get(key := f"PENSTOCK_{name.upper()}")}


def _reason(error: OSError) -> str:
    """What went wrong, in the words of OpenSSL or of the system."""
    if reason := getattr(error, "reason", None):
        return str(reason).replace("_", " ").lower()
    return error.strerror or str(error)


def _converted(name: str, value: Any) -> Any:
    if name == "servers":
        return _servers(value)
    if name == "tls_first":
        return _flag(name, value)
    if name == "timeout":
        return _seconds(name, value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if not isinstance(value, str):
        shown = type(value).__name__ if name in HIDDEN else repr(value)
        raise BadSetting(f"{name} must be text, got {shown}; put it in quotes", name)
    return value


def _servers(value: Any) -> tuple[str, ...]:
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple):
        raise BadSetting(
            f"servers must be a list of URLs such as [{DEFAULT_SERVER}], not {type(value).__name__}", "servers"
        )
    return tuple(_url(str(part).strip()) for part in parts if str(part).strip())


def _seconds(name: str, value: Any) -> float:
    try:
        if isinstance(value, bool):
            raise TypeError
        return float(value)
    except (TypeError, ValueError):
        raise BadSetting(f"{name} must be a number of seconds, got {value!r}", name) from None


def _flag(name: str, value: Any) -> bool:
    known = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if (text := str(value).lower()) not in known:
        raise BadSetting(f"{name} is true or false, not {value!r}", name)
    return known[text]


def check_url(server: str) -> None:
    """Raise `ConfigError` when this cannot be the URL of a server."""
    try:
        parts = urlsplit(_url(server))
        named = bool(parts.hostname) and parts.port != 0 and "@" not in parts.path + parts.query + parts.fragment
    except ValueError:  # a port that is no number, or out of range, as the rest of a password with a `/` in it may be
        named = False
    if not named:
        shown = without_login(server)
        raise BadSetting(f"servers: {shown!r} is not a server URL such as {DEFAULT_SERVER}", "servers")


class _Login(NamedTuple):
    """What a URL says before the `@`."""

    user: str | None = None
    password: str | None = None
    token: str | None = None


def _login(server: str) -> _Login | None:
    parts = urlsplit(_url(server))
    if not parts.username:
        return None
    name = unquote(parts.username)
    return _Login(token=name) if parts.password is None else _Login(name, unquote(parts.password))


def without_login(server: str) -> str:
    """The URL as it may be shown: whatever stands before an `@` is left out, even where it is no URL at all."""
    login, mark, address = server.rpartition("@")
    scheme, found, _ = login.partition("://")
    return f"{scheme}://{address}" if mark and found else address


def _url(server: str) -> str:
    return server if "://" in server else f"nats://{server}"
