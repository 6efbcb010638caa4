"""What `penstock --help` loads: little, so that it answers at once."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

SLOW = {"asyncio", "numpy", "pyarrow", "pyspark", "rich.progress", "yaml", "penstock.topology", "penstock.wire"}
"""What takes long to import, and only some commands need."""


def test_help_loads_nothing_that_only_some_commands_need() -> None:
    code = "import json, sys, penstock.cli.main; print(json.dumps(list(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=60)
    assert SLOW & set(json.loads(done.stdout)) == set()


@pytest.mark.parametrize(
    "module", ["penstock.app", "penstock.ui.server", "penstock.gateway.server", "penstock.workers"]
)
def test_what_is_installed_without_arrow_does_not_need_it(module: str) -> None:
    code = f"import json, sys, {module}; print(json.dumps(list(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=60)
    assert {"numpy", "pyarrow", "pyspark"} & set(json.loads(done.stdout)) == set()
