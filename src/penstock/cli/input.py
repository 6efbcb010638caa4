"""Lines from a file or from standard input, as they come, without holding up the event loop."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from penstock.errors import ConfigError

CHUNK = 256 * 1024
MAX_LINE = 64 * 1024 * 1024
"""Bytes of one line: no server takes larger messages."""
QUEUED = 4
"""Chunks that are read ahead."""


class LineReader:
    """Numbered lines of a file descriptor, in chunks of what is there. Empty lines are counted and left out.

    A thread reads, so that a pipe that pauses does not stop the work in the event loop. It reads with `os.read`, not
    through Python's buffered files: one blocked in there cannot be left behind at exit.
    """

    def __init__(self, descriptor: int, size: int | None, owned: bool = False) -> None:
        self._descriptor = descriptor
        self._owned = owned
        self.size = size
        """Bytes there are in all; None when that is not known."""
        self.bytes_read = 0
        self.lines = 0

    async def chunks(self) -> AsyncIterator[list[tuple[int, bytes]]]:
        rest = b""
        async for data in self._blocks():
            self.bytes_read += len(data)
            *lines, rest = (rest + data).split(b"\n")
            if len(rest) > MAX_LINE:
                raise ConfigError(
                    f"line {self.lines + len(lines) + 1} is longer than {MAX_LINE} bytes; is it JSON lines?"
                )
            if numbered := list(self._numbered(lines)):
                yield numbered
        if numbered := list(self._numbered([rest] if rest else [])):
            yield numbered

    def _numbered(self, lines: list[bytes]) -> Iterator[tuple[int, bytes]]:
        for line in lines:
            self.lines += 1
            if stripped := line.rstrip(b"\r"):
                yield self.lines, stripped

    async def _blocks(self) -> AsyncIterator[bytes]:
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[bytes | OSError] = asyncio.Queue()
        room = threading.Semaphore(QUEUED)

        def read() -> None:
            try:
                for block in self._read():
                    room.acquire()
                    loop.call_soon_threadsafe(queue.put_nowait, block)
            except RuntimeError:
                pass  # the loop is closed: nobody wants more
            finally:
                if self._owned:
                    os.close(self._descriptor)

        threading.Thread(target=read, name="penstock input", daemon=True).start()
        while block := await queue.get():
            room.release()
            if isinstance(block, OSError):
                raise ConfigError(f"the input cannot be read: {block}") from block
            yield block

    def _read(self) -> Iterator[bytes | OSError]:
        """Blocks, then an empty one for the end, or the error that stopped it."""
        block = b"?"
        while block:
            try:
                block = os.read(self._descriptor, CHUNK)
            except OSError as exc:
                yield exc
                return
            yield block


def open_lines(file: str) -> LineReader:
    """The lines of a file, or of standard input for `-`."""
    if file == "-":
        return LineReader(sys.stdin.fileno(), None)
    try:
        descriptor = os.open(Path(file), os.O_RDONLY)
    except OSError as exc:
        raise ConfigError(f"{file}: {exc.strerror}") from exc
    return LineReader(descriptor, os.fstat(descriptor).st_size or None, owned=True)
