"""Every Python process of Spark imports what it needs anew: nothing in the usual path may import pandas."""

from __future__ import annotations

import subprocess
import sys

import pytest

READ = """
from penstock.spark import source, unpack
from penstock.wire import frames
from penstock.wire.scan import Scanner

scanner = Scanner("ORDERS", 1)
for sequence in (1, 2):
    reply = f"$JS.ACK.ORDERS.c.1.{sequence}.{sequence}.1700000000000000000.0"
    headers = b"NATS/1.0\\r\\nA: b\\r\\n\\r\\n"
    sizes = b"%d %d" % (len(headers), len(headers) + 4)
    scanner.feed(b"HMSG orders.eu 1 %s %s\\r\\n%sbody\\r\\n" % (reply.encode(), sizes, headers))
scanner.next()
(batch,) = unpack.shaped([scanner.take()], unpack.Shape())
assert batch.column("stream").to_pylist() == ["ORDERS"] * 2, batch
assert batch.column("data").to_pylist() == [b"body"] * 2, batch
"""
WRITE = """
import pyarrow as pa
from penstock.spark import sink, task
from penstock.spark.chunks import cut
from penstock.spark.output import Columns, RowMaker
from penstock.wire.columns import repeated

batch = pa.RecordBatch.from_arrays([repeated("body", 3).view(pa.binary())], names=["data"])
(chunk,) = cut([RowMaker(Columns("OUT", ("out.>",), "out.a")).rows(batch)])
assert len(chunk.row_digests()) == 3
assert len(chunk.take([0, 2])) == 2
"""


@pytest.mark.parametrize("program", [READ, WRITE], ids=["reading", "writing"])
def test_a_process_that_reads_or_writes_does_not_import_pandas(program: str) -> None:
    check = 'import sys\nassert "pandas" not in sys.modules, "pandas was imported"\n'
    done = subprocess.run([sys.executable, "-c", program + check], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
