"""The memory of a process that publishes very many messages, one by one, with our publishers."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import publish_load
import rawnats
from harness import Bench, Figure, memory_of
from publish_load import STREAM

from penstock.server.embedded import EmbeddedServer

KEPT_BYTES = 64 * 1024 * 1024
"""The stream keeps so much: ten million messages need not lie on the disk."""
GROWTH_MIB = 8
"""Growth that counts as flat: the sampled memory of an idle Python process moves by a few MiB."""
MIB = 1024 * 1024


def run(bench: Bench) -> None:
    bench.about = "A process of its own publishes 200-byte messages; growth is measured after the first 30 %."
    server = bench.enter(EmbeddedServer(data=bench.scratch / "nats"))
    count = bench.size(10_000_000, quick=300_000)
    for mode in ("fast", "atomic"):
        bench.probe(partial(memory, server, mode, count))


def memory(server: EmbeddedServer, mode: str, count: int) -> list[Figure]:
    config = {"allow_atomic": True, "allow_batched": True, "max_bytes": KEPT_BYTES}
    rawnats.fresh_stream(server.port, STREAM, ["bench.>"], **config)
    found = memory_of([sys.executable, str(Path(publish_load.__file__)), server.url, mode, str(count)])
    name = f"{mode}, {count:,} messages: memory"
    return [
        Figure(name=f"{name} growth", value=found.growth() / MIB, unit="MiB", at_most=GROWTH_MIB),
        Figure(name=f"{name} at its peak", value=found.peak / MIB, unit="MiB"),
    ]
