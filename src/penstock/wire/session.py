"""The protocol state of one connection, without I/O: received bytes become events, and answers become bytes to send.

Both transports are this plus a socket: they pass bytes in, send what `outgoing` holds, and hand events to callers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from penstock.errors import (
    AccessDenied,
    BrokerUnreachable,
    ConfigError,
    ConnectionLost,
    JetStreamDisabled,
    PenstockError,
    ProtocolError,
    Unavailable,
)
from penstock.settings import Settings
from penstock.subjects import api_prefix
from penstock.wire import frames
from penstock.wire import headers as header_block
from penstock.wire.login import Endpoint, ServerInfo

NO_RESPONDERS = 503
MAX_WAITING_BYTES = 64 * 1024 * 1024
"""Maximum bytes of messages not received by a caller yet; beyond it the connection is closed."""

_DENIED = re.compile(r'permissions violation .*?"([^"]*)"', re.IGNORECASE)
_LOGIN_REFUSED = re.compile(r"authorization violation|authentication|authorization timeout|revoked", re.IGNORECASE)


class Denied(NamedTuple):
    """The server refused one publish or subscription; the connection lives on."""

    subject: str
    text: str

    def error(self) -> AccessDenied:
        return AccessDenied(f"the server refused it: {self.text}; ask for the permission, or use another login")


def as_checked(subject: str, domain: str | None) -> str:
    """The subject that a server of the domain names when it refuses a request: it maps the request to its own first."""
    prefix = f"{api_prefix(domain)}."
    if not domain or not subject.startswith(prefix):
        return subject
    rest = subject.removeprefix(prefix)
    return rest if rest.startswith("$KV.") else f"{api_prefix(None)}.{rest}"


Event = frames.Message | Denied


class Session:
    """Frames in, events and bytes out, for one connection from INFO to the end."""

    def __init__(self, endpoint: Endpoint, info: ServerInfo, parser: frames.Parser, settings: Settings) -> None:
        self.endpoint = endpoint
        self.info = info
        self.parser = parser
        self.outgoing = bytearray()
        """Bytes the transport must send soon: answers to pings."""
        self.inbox_prefix = f"{settings.new_inbox()}."
        self.pings = 0
        """Pings sent; the server answers them in order."""
        self.pongs = 0
        self._replies = 0
        self._sid = 0

    def next(self) -> Event | None:
        """Return the next event, or None until more bytes are fed. Raises the error that ends the connection."""
        while (frame := self.parser.next()) is not None:
            match frame:
                case frames.Message():
                    return frame
                case frames.Ping():
                    self.outgoing += frames.PONG
                case frames.Pong():
                    self.pongs += 1
                case frames.Info(fields):
                    self.info = ServerInfo.parse(fields)
                case frames.Err(text):
                    return self.complaint(text)
        return None

    def complaint(self, text: str) -> Denied:
        """Interpret an `-ERR`: returns a refusal that the connection survives, or raises."""
        if found := _DENIED.search(text):
            return Denied(found[1], text)
        raise error_of(text, self.endpoint)

    def ping(self) -> int:
        """Count a ping that is about to be sent: it is answered once `pongs` has reached the number returned."""
        self.pings += 1
        return self.pings

    def next_sid(self) -> int:
        self._sid += 1
        return self._sid

    def next_reply(self) -> str:
        """Return a unique reply subject below the one inbox subscription."""
        self._replies += 1
        return f"{self.inbox_prefix}{self._replies}"

    def publication(self, subject: str, data: bytes, headers: header_block.Headers | None, reply: str) -> bytes:
        """The bytes of one message. Refuses one that the server would answer by closing the connection."""
        block = header_block.encode(headers)
        if len(block) + len(data) > self.info.max_payload:
            raise ConfigError(
                f"a message of {len(block) + len(data)} bytes for {subject!r} is larger than this server takes "
                f"({self.info.max_payload} bytes); make it smaller, or raise the server's max_payload"
            )
        return frames.publish(subject, data, reply, block)


def error_of(text: str, endpoint: Endpoint) -> PenstockError:
    """The error for an `-ERR` after which the server closes the connection."""
    if _LOGIN_REFUSED.search(text):
        return AccessDenied(
            f"{endpoint} refused the login ({text.lower()}); "
            "check --credentials, or user, password and token in PENSTOCK_USER, PENSTOCK_PASSWORD, PENSTOCK_TOKEN"
        )
    return ConnectionLost(str(endpoint), text)


def unreachable(tried: Sequence[Endpoint], failures: Sequence[PenstockError]) -> PenstockError:
    """Return the error when no server accepted us: a refused login is more specific than a server that is down."""
    for failure in failures:
        if isinstance(failure, AccessDenied):
            return failure
    reasons = "; ".join(dict.fromkeys(getattr(failure, "reason", str(failure)) for failure in failures))
    return BrokerUnreachable(tuple(map(str, tried)), reasons)


def first_info(parser: frames.Parser) -> ServerInfo | None:
    """The server's greeting, or None until more bytes are fed."""
    frame = parser.next()
    if frame is None:
        return None
    if not isinstance(frame, frames.Info):
        raise ProtocolError(f"a NATS server greets with INFO, not with {type(frame).__name__}")
    return ServerInfo.parse(frame.fields)


def check_nothing_before_tls(parser: frames.Parser) -> None:
    """Raise unless only the greeting arrived in plain text: an attacker on the path could have added the rest."""
    if parser.buffered:
        raise ProtocolError(f"{parser.buffered} bytes came in plain text before TLS began; the connection is not safe")


def checked_answer(message: frames.Message, subject: str, settings: Settings) -> frames.Message:
    """Return the answer to a request; raises when it says that there are no responders."""
    status = message.status
    if status is None or status[0] != NO_RESPONDERS:
        return message
    if subject.startswith("$JS."):
        domain = f" (domain {settings.domain!r})" if settings.domain else ""
        raise JetStreamDisabled(f"this server{domain}")
    raise Unavailable(f"nobody answers on {subject!r}")
