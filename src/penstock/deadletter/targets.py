"""Checks whether the original streams would store letters again. Pure, but for one request to the server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.deadletter.letters import DeadLetter
from penstock.jetstream.api import JetStream
from penstock.subjects import matches

Subjects = Mapping[str, Sequence[str]]
"""What each stream captures, by its name."""


async def captured_subjects(jetstream: JetStream) -> Subjects:
    return {info.name: info.config.get("subjects") or () for info in await jetstream.streams()}


def nowhere_to_go(letter: DeadLetter, streams: Subjects) -> str | None:
    """Return why no stream would store the message again; None when one would. The same text for many letters."""
    if letter.stream and letter.stream not in streams:
        return f"its stream {letter.stream!r} is gone: create it again first"
    asked = [streams[letter.stream]] if letter.stream else streams.values()
    if any(matches(one, letter.subject) for captured in asked for one in captured):
        return None
    if letter.stream:
        return f"stream {letter.stream!r} no longer takes its subject: add that to the stream's subjects first"
    return "no stream takes its subject: create one first"
