"""The steps of a write at which tests stop a process, to kill it there.

`PENSTOCK_HOLD_AT=<step>:<file>` makes the first process that reaches the step write its pid into the file and stop
(SIGSTOP). Whoever set the variable kills it, or lets it go on (SIGCONT) when the world has changed. While the file
exists nobody stops any more. Without the variable a step is nothing.
"""

from __future__ import annotations

import os
import signal

VARIABLE = "PENSTOCK_HOLD_AT"

OPENED = "opened"
INTENDED = "intended"
STORED = "stored"
ENDED = "ended"
CLOSED = "closed"


def reached(step: str) -> None:
    """Say that this step is done; the next begins."""
    wanted, _, file = os.environ.get(VARIABLE, "").partition(":")
    if wanted != step:
        return
    try:
        handle = os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    except FileExistsError:
        return
    os.write(handle, str(os.getpid()).encode())
    os.close(handle)
    os.kill(os.getpid(), signal.SIGSTOP)
