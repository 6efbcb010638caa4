"""Files that nobody but their owner reads, because they hold secrets or messages."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

PRIVATE = 0o600


def open_private(path: Path) -> BinaryIO:
    """Open a file for writing from its beginning, for its owner alone, even if it existed and others could read it.

    A symbolic link in its place is refused: it would name a file of somebody else's choice.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, PRIVATE)
    file = os.fdopen(descriptor, "wb")
    os.fchmod(descriptor, PRIVATE)  # before anything is in it
    os.ftruncate(descriptor, 0)
    return file


def write_private(path: Path, text: str) -> None:
    """Write a text file for its owner alone."""
    with open_private(path) as file:
        file.write(text.encode())
