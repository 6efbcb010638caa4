"""Hostile bytes through both kernels, in buffers that end at memory which nobody may touch.

A process of its own, since a mistake ends it: `python guarded.py SEED ROUNDS`. Whatever machine code reads or writes
behind an array is a SIGSEGV; what it writes before one is seen in a canary.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import random
import sys
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa

from penstock.errors import ProtocolError
from penstock.wire import compiled
from penstock.wire.scan import Scanner
from penstock.wire.scanning import Stop

SID = 7
CANARY = 0xA5
PROT_NONE = 0
_libc = ctypes.CDLL(None, use_errno=True)
_fronts: list[np.ndarray[Any, Any]] = []


def guarded(shape: Any, dtype: Any = np.float64) -> np.ndarray[Any, Any]:
    """An array whose last byte is the last before a page without access."""
    kind, page = np.dtype(dtype), mmap.PAGESIZE
    size = math.prod(shape if isinstance(shape, tuple) else (shape,)) * kind.itemsize
    room = -(-size // page) * page + page
    area = mmap.mmap(-1, room + page)
    whole = np.frombuffer(area, dtype=np.uint8)
    address = whole.__array_interface__["data"][0]
    if _libc.mprotect(ctypes.c_void_p(address + room), ctypes.c_size_t(page), PROT_NONE):
        raise OSError(ctypes.get_errno(), "mprotect")
    front = whole[room - size - 64 : room - size]
    front[:] = CANARY
    _fronts.append(front)
    made: np.ndarray[Any, Any] = whole[room - size : room].view(kind).reshape(shape)
    return made


class GuardedNumpy:
    """numpy, with guarded arrays where the scanner makes its own."""

    empty = zeros = staticmethod(guarded)

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)


LINES = [b"Nats-Stream: S", b"Nats-Subject: a.b", b"Nats-Sequence: 1", b"Nats-Time-Stamp: 2026-03-01T12:00:00.5Z"]
LINES += [b"Nats-Num-Pending: 3", b"Nats-Last-Sequence: 0"]
ODD_LINES = [b"Nats-Subject: ", b"Nats-Subject:", b"Nats-Sequence: ", b"Nats-Sequence: 99999999999999999999", b"", b":"]
ODD_LINES += [b"Nats-Time-Stamp: 1969-12-31T23:59:59Z", b"Nats-Time-Stamp: 0001-01-01T00:00:00Z", b"Nats-Time-Stamp: Z"]
ODD_LINES += [
    b"Nats-Time-Stamp: 2026-03-01T12:00:00.Z",
    b"Nats-Num-Pending: -1",
    b"A: b",
    b"A: ",
    b"A:\x0b\x0c",
    b"\x00: \xff",
]
FIRST_LINES = [b"NATS/1.0\r\n"] * 30 + [b"", b"\r\n", b"NATS/1.0", b"NATS/1.0\n", b"x\r\n", b"NATS/1.0 503\r\n"]
CLOSES = [b"\r\n"] * 30 + [b"", b"\n", b"\r", b"\r\n\r\n", b"x", b"\r\nA: b"]
ENDS = [b"\r\n"] * 60 + [b"\n", b"\r", b"\r\r\n", b""]
SUBJECTS = [b"a.b"] * 40 + [
    b"work.a\x1bb",
    b"\x01",
    b"a\x0b",
    b"\x0c7",
    b"\x00",
    b"\x7f\xff",
    b"",
    b" ",
    b"a\tb",
    b"a\rb",
]
REPLIES = [b"$JS.ACK.S.c.1.%d.%d.1700000000000000000.3"] * 12
REPLIES += [b"$JS.ACK.S.c.1.%d.%d.-1000000000.3", b"$JS.ACK.h.x.S.c.1.%d.%d.1.0", b"$JS.ACK.\x0b.\x01.1.%d.%d.1.0"]
REPLIES += [b"$JS.ACK.S.c.1.%d.%d.9999999999999999999.3", b"$JS.ACK.S.c.1.%d.%d..3", b"$JS.ACK.%d%d", b"_INBOX.%d.%d"]


def message(rng: random.Random, number: int, direct: bool) -> bytes:
    lines = [rng.choice(ODD_LINES) if rng.random() < 0.1 else line for line in LINES] if direct else []
    lines = [rng.choice(ODD_LINES) for _ in range(rng.choice([0, 0, 1, 3, 70]))] + lines
    block = rng.choice(FIRST_LINES) + b"".join(line + rng.choice(ENDS) for line in lines) + rng.choice(CLOSES)
    block = block if lines or rng.random() < 0.1 else b""
    body = rng.randbytes(rng.randrange(6))
    reply = b"" if direct else rng.choice(REPLIES) % (number, number) + b" "
    sizes = b"%d %d" % (len(block), len(block + body)) if block else b"%d" % len(body)
    verb = b"HMSG" if block else b"MSG"
    return b"%b %b %d %b%b\r\n%b%b\r\n" % (verb, rng.choice(SUBJECTS), SID, reply, sizes, block, body)


def hostile(rng: random.Random, direct: bool) -> bytes:
    data = bytearray(b"".join(message(rng, number, direct) for number in range(1, rng.randrange(2, 8))))
    for _ in range(rng.choice([0, 0, 1, 3])):
        data[rng.randrange(len(data))] = rng.choice([0, 9, 10, 11, 13, 32, 45, 48, 57, 58, 255])
    return bytes(data[: rng.randrange(len(data)) + 1] if rng.random() < 0.3 else data)


def seen(data: bytes, direct: bool, kernels: compiled.Kernels) -> tuple[list[Any], list[str]]:
    """All rows and everything else that comes out of the bytes, in a buffer that they fill to its end."""
    scanner = Scanner("S", SID, direct=direct, kernels=kernels, buffer_bytes=len(data), batch_rows=3)
    scanner.expect(None)
    scanner.feed(data)
    rows: list[Any] = []
    others: list[str] = []
    while True:
        try:
            found = scanner.next()
        except ProtocolError:
            found = None
        if found is None or (found is not Stop.FULL and isinstance(found, Stop)):
            others.append(repr(found))
            return rows + _raw(scanner.take()), others
        if found is Stop.FULL:
            rows += _raw(scanner.take())
            if not scanner.rest():
                return rows, others
        else:
            others.append(repr(found))


def _raw(batch: pa.RecordBatch) -> list[Any]:
    """Rows as bytes: what a publisher chose need not be UTF-8."""
    binary = pa.map_(pa.binary(), pa.list_(pa.field("element", pa.binary())))
    plain = [batch.column("subject").cast(pa.binary()), batch.column("headers").cast(binary), batch.column("data")]
    numbers = [batch.column("sequence"), batch.column("timestamp").cast(pa.int64())]
    return list(zip(*(column.to_pylist() for column in (*plain, *numbers)), strict=True))


def main(seed: int, rounds: int) -> None:
    compiled.warm()
    machine = compiled.current()
    assert machine is not compiled.PLAIN, "there is no machine code to compare with"
    rng, found = random.Random(seed), 0
    with patch("penstock.wire.scan.np", GuardedNumpy()):
        for number in range(rounds):
            direct = rng.random() < 0.5
            data = hostile(rng, direct)
            first, second = (seen(data, direct, kernels) for kernels in (machine, compiled.PLAIN))
            assert first == second, (seed, number, direct, data, first, second)
            assert all((front == CANARY).all() for front in _fronts), (seed, number, direct, data)
            _fronts.clear()
            found += len(first[0])
    print(found)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
