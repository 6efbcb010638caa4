"""Changing the body of a letter before it is replayed. No I/O."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from penstock.deadletter.letters import DeadLetter, event_id
from penstock.errors import ConfigError

Edit = Callable[[DeadLetter], bytes]
"""From a letter to the body that is published."""


class NotEditable(ConfigError):
    """A letter cannot be changed in the way asked for."""


def merge_patch(text: str) -> Edit:
    """A JSON merge patch (RFC 7396): given members replace those of the event, null removes them."""
    try:
        patch = json.loads(text)
    except ValueError as exc:
        raise ConfigError(f"the edit is not JSON: {exc}") from exc
    if not isinstance(patch, dict):
        raise ConfigError('the edit must be a JSON object, such as \'{"payload": {"price": 0}}\'')

    def edit(letter: DeadLetter) -> bytes:
        try:
            event = json.loads(letter.body)
            return json.dumps(_merged(event, patch), separators=(",", ":"), ensure_ascii=False).encode()
        except (ValueError, RecursionError) as exc:  # UnicodeError, too: JSON may have half a surrogate pair in it
            raise NotEditable(f"its body is not JSON: {exc}") from exc

    return edit


def _merged(target: Any, patch: Any) -> Any:
    if not isinstance(patch, dict):
        return patch
    made = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            made.pop(name, None)
        else:
            made[name] = _merged(made.get(name), value)
    return made


def edited(letter: DeadLetter, edit: Edit | None) -> bytes:
    """The body to publish. An edit must leave the event's id alone: by it consumers know what they have seen."""
    if edit is None:
        return letter.body
    body = edit(letter)
    before, after = event_id(letter.body, {}), event_id(body, {})
    if before != after:
        raise NotEditable(f"the edit changes event_id from {before!r} to {after!r}; a replay keeps it")
    return body
