"""Message headers: the block that `HPUB` sends and `HMSG` delivers. No I/O."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from penstock.errors import ConfigError

VERSION = b"NATS/1.0"
Headers = Mapping[str, str | Sequence[str]]
"""What callers give: one value a name, or several."""

_BAD_NAME = re.compile(r"[^!-9;-~]")
"""A name is printable ASCII without the colon: the server finds the value behind the first one."""
_BAD_VALUE = re.compile(r"[\r\n\0]")
_STATUS = re.compile(rb"NATS/1\.0[ \t]+([0-9]{3,4})(?:[ \t]([^\r\n]*))?\r\n")
"""A status line. Servers take it out of what publishers store, so that it is the server's own."""


def line(name: str, value: str) -> bytes:
    """One header line. Refuses what would end the line early, and so forge another header or a message."""
    if not isinstance(name, str) or not isinstance(value, str):
        raise ConfigError(f"header {name!r} must have a name and a value of text, not {value!r}: decode it first")
    if not name or _BAD_NAME.search(name):
        raise ConfigError(f"header name {name!r} is not usable: printable ASCII without spaces and colons is")
    if _BAD_VALUE.search(value):
        raise ConfigError(f"the value of header {name!r} contains a line break or NUL: {value!r}")
    try:
        return f"{name}: {value}\r\n".encode()
    except UnicodeEncodeError:
        raise ConfigError(f"the value of header {name!r} is no text (half a surrogate pair): {value!r}") from None


def lines(headers: Headers | None) -> bytes:
    """All header lines, without the version line and the closing empty line."""
    if not headers:
        return b""
    parts: list[bytes] = []
    for name, value in headers.items():
        if isinstance(value, str | bytes) or not isinstance(value, Sequence):
            parts.append(line(name, value))
        else:
            parts.extend(line(name, one) for one in value)
    return b"".join(parts)


def block(header_lines: bytes) -> bytes:
    """The whole block around lines made with `line` or `lines`."""
    return VERSION + b"\r\n" + header_lines + b"\r\n"


def encode(headers: Headers | None) -> bytes:
    """The header block of a message; empty when there are none."""
    return block(lines(headers)) if headers else b""


def parse(raw: bytes) -> dict[str, list[str]]:
    """The values of a header block by name, as written.

    A server stores whatever a publisher calls a header block. So nothing is refused here: the first line is passed
    over, and so are lines that are no headers and one that does not end.
    """
    found: dict[str, list[str]] = {}
    for one in raw.split(b"\r\n")[1:-1]:
        name, colon, value = one.partition(b":")
        if colon:
            found.setdefault(_text(name), []).append(_text(value.strip()))
    return found


def status(raw: bytes) -> tuple[int, str] | None:
    """Code and text of the status line (`NATS/1.0 503 No Responders`), or None for a usual message."""
    found = _STATUS.match(raw)
    return (int(found[1]), _text((found[2] or b"").strip())) if found else None


def _text(raw: bytes) -> str:
    # Any publisher may have written it: invalid UTF-8 must not stop a reader.
    return raw.decode("utf-8", "surrogateescape")
