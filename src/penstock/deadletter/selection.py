"""Selects dead letters, and groups them by cause. No I/O."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from penstock.deadletter.letters import FiledLetter

Key = tuple[str, str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """Letters that match everything given; what is left out matches all."""

    readers: tuple[str, ...] = ()
    """Consumers, or pipelines, that gave up; also as `STREAM/CONSUMER`."""
    errors: tuple[str, ...] = ()
    """Fingerprints, error types, or parts of the error's message."""
    since: datetime | None = None
    """Failed at or after."""
    until: datetime | None = None
    """Failed before."""
    ids: tuple[str, ...] = ()
    """Ids, or beginnings of ids."""

    @property
    def is_everything(self) -> bool:
        return self == Selection()

    def matches(self, filed: FiledLetter) -> bool:
        letter, at = filed.letter, filed.letter.last_failure or filed.time
        return (
            (not self.readers or letter.reader in self.readers or f"{letter.stream}/{letter.reader}" in self.readers)
            and (not self.errors or any(_is_error(filed, error) for error in self.errors))
            and (self.since is None or at >= self.since)
            and (self.until is None or at < self.until)
            and (not self.ids or any(filed.id.startswith(id_) for id_ in self.ids))
        )


def _is_error(filed: FiledLetter, error: str) -> bool:
    failure = filed.letter.failure
    return error in (failure.fingerprint, failure.type) or error.lower() in failure.message.lower()


@dataclass(slots=True)
class Group:
    """Letters of one consumer and one cause."""

    stream: str
    reader: str
    fingerprint: str
    error: str
    template: str
    count: int = 0
    oldest: datetime | None = None
    newest: datetime | None = None
    most_replays: int = 0
    sample: str = ""
    """The id of one of them."""

    def add(self, filed: FiledLetter) -> None:
        at = filed.letter.last_failure or filed.time
        self.count += 1
        self.oldest = min(self.oldest or at, at)
        self.newest = max(self.newest or at, at)
        self.most_replays = max(self.most_replays, filed.letter.replays)
        self.sample = self.sample or filed.short_id


def grouped(letters: Iterable[FiledLetter]) -> list[Group]:
    """Letters by consumer and fingerprint: the largest group of a consumer first."""
    groups: dict[Key, Group] = {}
    for filed in letters:
        letter, failure = filed.letter, filed.letter.failure
        key = (letter.stream, letter.reader, failure.fingerprint)
        group = groups.get(key)
        if group is None:
            group = groups[key] = Group(*key, error=failure.type, template=failure.template)
        group.add(filed)
    return sorted(groups.values(), key=lambda group: (group.stream, group.reader, -group.count, group.fingerprint))
