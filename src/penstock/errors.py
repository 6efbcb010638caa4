"""Every error Penstock raises on purpose, grouped by what the caller can do.

    PenstockError
    ├── ConfigError              fix the input: a file, an option, a value
    │   ├── BadSetting           a value of `Settings`; carries the names of the settings
    │   └── UsageError           the command line itself was wrong (exit code 64)
    ├── FeatureMissing           use a newer server: it lacks a feature that was asked for
    ├── AccessDenied             fix credentials or permissions
    ├── Unavailable              try again later; nothing was decided
    │   ├── BrokerUnreachable    no server of the list answered
    │   ├── ConnectionLost       a server answered, then the connection broke
    │   ├── DeadlineExceeded     no answer in time
    │   └── JetStreamDisabled    the server answers, but has no JetStream (for this account or domain)
    ├── ApiError                 the server said no; carries its code and its own words
    │   ├── NotFound             StreamNotFound, ConsumerNotFound, MessageNotFound
    │   ├── AlreadyExists        a resource of that name is there with another configuration
    │   ├── InvalidConfiguration the server refused the configuration
    │   └── ServerBusy           retryable: no leader, not enough resources, too many in flight
    ├── OutcomeUnknown           the connection died after the deciding bytes were sent: look before you retry
    ├── DataLoss                 messages that should be there are gone
    ├── ProtocolError            bytes on the wire that no NATS peer should send
    └── ServerFailed             an embedded server did not start or died

Packages may add leaves of their own below these branches. `args` mirror the
constructor's arguments, so every error survives pickling between processes.
"""

from __future__ import annotations

import errno
from typing import ClassVar


class PenstockError(Exception):
    """Base of every error this package raises on purpose."""

    retryable: ClassVar[bool] = False
    """Whether the same call may succeed later without a change by the caller."""
    exit_code: ClassVar[int] = 1
    """What the command line exits with when this error ends a command."""


class ConfigError(PenstockError):
    """An input is wrong: the message says which, where, and what would be right."""


class BadSetting(ConfigError):
    """A setting, or several that contradict each other. `names` are the fields of `Settings`."""

    def __init__(self, problem: str, *names: str) -> None:
        super().__init__(problem, *names)
        self.problem = problem
        self.names = names

    def __str__(self) -> str:
        return self.problem


class UsageError(ConfigError):
    """The command line was called in a way it does not understand."""

    exit_code = 64


class FeatureMissing(PenstockError):
    """The server is too old for something that was asked for."""

    def __init__(self, feature: str, found: str, needed: str) -> None:
        super().__init__(feature, found, needed)
        self.feature = feature
        self.found = found
        self.needed = needed

    def __str__(self) -> str:
        return (
            f"{self.feature} needs nats-server {self.needed} or newer, but this server is {self.found}; "
            "upgrade the server, or leave the feature out"
        )


class AccessDenied(PenstockError):
    """The server knows who we are, or does not, and will not let us in."""


class Unavailable(PenstockError):
    """Nothing was decided; the same call may work later."""

    retryable = True


class BrokerUnreachable(Unavailable):
    """No server of the list could be reached."""

    def __init__(self, servers: tuple[str, ...], reason: str) -> None:
        super().__init__(servers, reason)
        self.servers = servers
        self.reason = reason

    @property
    def refused(self) -> bool:
        """Whether every machine was there and said that no server listens: then nobody else reaches one either."""
        return all(f"[Errno {errno.ECONNREFUSED}]" in reason for reason in self.reason.split("; "))

    def __str__(self) -> str:
        return (
            f"no NATS server answers at {', '.join(self.servers)} ({self.reason}); "
            "start one with `penstock server`, or name yours with --servers or PENSTOCK_SERVERS"
        )


class ConnectionLost(Unavailable):
    """The connection to a server broke; what was under way on it may or may not have arrived."""

    def __init__(self, server: str, reason: str) -> None:
        super().__init__(server, reason)
        self.server = server
        self.reason = reason

    def __str__(self) -> str:
        return f"the connection to {self.server} was lost ({self.reason}); connect again, and look before repeating"


class DeadlineExceeded(Unavailable):
    """No answer came in time."""

    def __init__(self, what: str, seconds: float) -> None:
        super().__init__(what, seconds)
        self.what = what
        self.seconds = seconds

    def __str__(self) -> str:
        return f"no answer to {self.what} within {self.seconds:g} s; is the server overloaded or without a leader?"


class JetStreamDisabled(Unavailable):
    """A server answers, but nobody answers for JetStream."""

    retryable = False

    def __init__(self, where: str) -> None:
        super().__init__(where)
        self.where = where

    def __str__(self) -> str:
        return (
            f"JetStream does not answer on {self.where}; start nats-server with `-js`, enable JetStream "
            "for this account, or check the JetStream domain"
        )


class ApiError(PenstockError):
    """The JetStream API refused a request.

    `code` is the HTTP-like class, `err_code` the server's exact error number, `description` its own words.
    """

    def __init__(self, what: str, code: int, err_code: int, description: str) -> None:
        super().__init__(what, code, err_code, description)
        self.what = what
        self.code = code
        self.err_code = err_code
        self.description = description

    def __str__(self) -> str:
        return f"{self.what}: {self.description} (server error {self.err_code})"


class NotFound(ApiError):
    """The named thing does not exist on the server."""


class StreamNotFound(NotFound):
    """A stream does not exist on the server."""


class ConsumerNotFound(NotFound):
    """A consumer does not exist on its stream."""


class MessageNotFound(NotFound):
    """A message is not, or no longer, in its stream."""


class AlreadyExists(ApiError):
    """A resource of that name exists with another configuration."""


class InvalidConfiguration(ApiError):
    """The server will not accept this configuration."""


class ServerBusy(ApiError):
    """The server cannot do it right now: no leader, no resources, too many in flight."""

    retryable = True


class OutcomeUnknown(PenstockError):
    """The connection was lost after the deciding bytes were sent: it may or may not have happened."""


class DataLoss(PenstockError):
    """Messages that should be there are gone."""


class ProtocolError(PenstockError):
    """The peer sent bytes that are not the NATS protocol."""


class ServerFailed(PenstockError):
    """An embedded nats-server did not start, or died."""
