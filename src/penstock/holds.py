"""Steps at which tests stop a process, to kill it there or to let it go on too late.

With `PENSTOCK_HOLD_IN=<folder>`, the first process that reaches a step for which the folder holds a file of that name
renames the file to `<step>.<its pid>` and stops (SIGSTOP), until somebody kills it or lets it go on. Without the
variable, steps do nothing.
"""

from __future__ import annotations

import os
import signal

VARIABLE = "PENSTOCK_HOLD_IN"


def reached(step: str) -> None:
    """This step is done; the next begins."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        return
    armed = os.path.join(folder, step)
    try:
        os.rename(armed, f"{armed}.{os.getpid()}")
    except FileNotFoundError:
        return
    os.kill(os.getpid(), signal.SIGSTOP)
