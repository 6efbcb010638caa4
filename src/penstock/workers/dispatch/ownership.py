"""Who may handle a partition now: the worker asks before every message, and whoever coordinates a group answers."""

from __future__ import annotations

from typing import Protocol


class Ownership(Protocol):
    """What a worker is allowed to handle."""

    def token(self, partition_id: str) -> int | None:
        """The fencing token of a partition that this worker owns now.

        None: not owned now. Its messages are then neither handled nor acknowledged; they wait. A token is larger than
        every token that was given out for the partition before. Called for every message: answer from memory.
        """
        ...


class OwnsAll:
    """For a worker that is alone: everything assigned to it is its own."""

    def __init__(self, token: int = 1) -> None:
        self._token = token

    def token(self, partition_id: str) -> int | None:
        return self._token
