"""Subjects of one stream to subjects of another. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from penstock import subjects
from penstock.errors import ConfigError

_WILDCARD = re.compile(r"\{\{\s*wildcard\((\d+)\)\s*\}\}|\$(\d+)")
REMEMBERED = 10_000
"""Subjects whose mapping is kept at hand."""


@dataclass(frozen=True, slots=True)
class Mapping:
    """`orders.*.>` to `eu.orders.{{wildcard(1)}}.>`: what `*` matched by its number, what `>` matched at the end."""

    source: str
    destination: str

    def __post_init__(self) -> None:
        if wrong := subjects.problem(self.source):
            raise ConfigError(f"mapping {self}: {self.source!r} is no subject: {wrong}")
        stars = self.source.split(".").count("*")
        used = [int(a or b) for a, b in _WILDCARD.findall(self.destination)]
        if any(not 1 <= number <= stars for number in used):
            raise ConfigError(f"mapping {self}: {self.source!r} has {stars} `*`, so there is no wildcard({max(used)})")
        if self.destination.endswith(".>") and not self.source.endswith(">"):
            raise ConfigError(f"mapping {self}: the destination ends with `>`, but nothing of the source is left over")
        if "*" in self.destination:
            raise ConfigError(f"mapping {self}: write {{{{wildcard(1)}}}} or $1 for what the first `*` matched")
        if wrong := subjects.problem(self.pattern):
            raise ConfigError(f"mapping {self}: {self.destination!r} is no subject: {wrong}")

    @classmethod
    def parse(cls, text: str) -> Mapping:
        source, equals, destination = text.partition("=")
        if not equals or not source or not destination:
            raise ConfigError(f"{text!r} is no mapping: write FROM=TO, such as 'orders.>=eu.orders.>'")
        return cls(source.strip(), destination.strip())

    def __str__(self) -> str:
        return f"{self.source}={self.destination}"

    @property
    def pattern(self) -> str:
        """Every subject that the mapping can make."""
        tokens = ["*" if _WILDCARD.search(token) else token for token in self.destination.split(".")]
        return ".".join(tokens)

    def map(self, subject: str) -> str | None:
        """The new subject, or None when this mapping does not concern it."""
        if not subjects.matches(self.source, subject):
            return None
        tokens, pattern = subject.split("."), self.source.split(".")
        stars = [token for token, wanted in zip(tokens, pattern, strict=False) if wanted == "*"]
        made = _WILDCARD.sub(lambda found: stars[int(found[1] or found[2]) - 1], self.destination)
        if not made.endswith(">"):
            return made
        return made.removesuffix(">") + ".".join(tokens[len(pattern) - 1 :])


class SubjectMap:
    """The first mapping that concerns a subject decides; without one it stays as it is."""

    def __init__(self, mappings: Sequence[Mapping] = ()) -> None:
        self._mappings = tuple(mappings)
        self._known: dict[bytes, bytes] = {}

    def __call__(self, given: list[bytes]) -> list[bytes]:
        if not self._mappings:
            return given
        known = self._known
        if len(known) > REMEMBERED:
            known.clear()
        for subject in set(given).difference(known):
            text = subject.decode("utf-8", "surrogateescape")  # a server takes bytes that are no UTF-8
            known[subject] = self._mapped(text).encode("utf-8", "surrogateescape")
        return [known[subject] for subject in given]

    def _mapped(self, subject: str) -> str:
        return next((new for one in self._mappings if (new := one.map(subject)) is not None), subject)
