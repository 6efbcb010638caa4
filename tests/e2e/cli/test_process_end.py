"""How the process of a command ends."""

from __future__ import annotations

import subprocess
import sys

import pytest

ENDED = """
import atexit, sys
atexit.register(print, "late")
if {native}:
    sys.modules["pyqwest"] = sys
sys.argv = ["penstock", *{words}]
from penstock.cli.main import main
main()
"""


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize(("words", "code"), [(["--version"], 0), (["nosuch"], 64)])
def test_nothing_runs_after_a_command_that_had_native_threads(words: list[str], code: int, native: bool) -> None:
    """Such threads abort a process whose interpreter is ending; what was printed and the exit code stay."""
    program = ENDED.format(native=native, words=words)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert ("late" in done.stdout) is not native
    assert "penstock" in done.stdout + done.stderr
