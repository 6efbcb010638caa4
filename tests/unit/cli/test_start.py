"""What `penstock --help` loads: little, so that it answers at once."""

from __future__ import annotations

import json
import subprocess
import sys

SLOW = {"asyncio", "numpy", "pyarrow", "pyspark", "rich.progress", "yaml", "penstock.topology", "penstock.wire"}
"""What takes long to import, and only some commands need."""


def test_help_loads_nothing_that_only_some_commands_need() -> None:
    code = "import json, sys, penstock.cli.main; print(json.dumps(list(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=60)
    assert SLOW & set(json.loads(done.stdout)) == set()
