"""The benchmarks of workers in their short forms: what they count is what there is."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from penstock.cli.bench import suite
from penstock.server.embedded import EmbeddedServer


def figures(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "penstock", "bench", *arguments, "--quick", "--json"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert shown.returncode in (0, 2), shown.stderr
    return {one["name"]: one for one in json.loads(shown.stdout)[0]["figures"]}


def test_a_short_soak_says_whether_memory_and_open_files_are_flat() -> None:
    found = figures("workers", "--soak", "0.05")
    memory, files, handled, redelivered, _ = found.values()
    assert memory["unit"] in ("MiB, flat", "MiB, NOT flat")
    assert files["unit"] == "more, flat"
    assert handled["value"] > 0
    assert redelivered["value"] == 0


def test_growth_counts_every_claim_and_every_update(nats_server: EmbeddedServer) -> None:
    suite()  # makes the benchmarks' modules known
    import group_load

    found = group_load.share(nats_server, partitions=50, workers=3)
    assert found.first.traffic.messages >= 3 * 50, "each claim is made, taken and settled"
    assert found.leaving.traffic.messages >= 3 * found.leaving.moved > 0
    assert found.first.traffic.bytes > 100 * found.first.traffic.messages
    assert (found.updates >= 3, found.failures) == (True, 0)
