"""Text that others chose, as it may be printed. Pure."""

from __future__ import annotations

import json
import re
from typing import Any

ACTED_ON = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters but line feed and tab, those that turn the direction of writing, and what is no UTF-8."""


def visible(text: str) -> str:
    """The text with an escape in place of each character that a terminal would act on, or could not print."""
    return ACTED_ON.sub(_escaped, text)


def _escaped(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def json_text(value: Any, **options: Any) -> str:
    """As `json.dumps`, in characters that no terminal acts on: DEL is ASCII, and JSON does not escape it."""
    return json.dumps(value, **options).replace("\x7f", "\\u007f")
