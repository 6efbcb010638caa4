"""A child process that does not outlive us, however we end.

The child is started through a few lines of shell, which leave a guard behind and become the child: same process id, a
millisecond. The guard holds the reading end of a pipe. When we die, even by SIGKILL, the pipe closes and the guard ends
the child; a farewell line on the pipe sends the guard home instead. `PR_SET_PDEATHSIG` would not do: it fires when the
*thread* that started the child ends.
"""

from __future__ import annotations

import os
import subprocess
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import IO

SCRIPT = """
exec 3<&0 </dev/null
(
  trap '' INT TERM HUP
  read -r farewell <&3 && exit 0
  kill -TERM $$
  for _ in 1 2 3 4 5 6 7 8 9 10; do sleep 0.2; kill -0 $$ || exit 0; done
  kill -KILL $$
) >/dev/null 2>&1 &
exec "$@" 3<&-
"""


class GuardedProcess:
    """A running child with its guard. Any thread may start, poll and end it."""

    def __init__(self, command: Sequence[str], output: IO[bytes]) -> None:
        # A session of its own: Ctrl-C in the terminal is for us, and we decide how the child ends.
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", SCRIPT, "guard", *command],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            bufsize=0,
            start_new_session=True,
        )
        _guarded.add(self)

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """The exit code (negative: minus the signal), or None while it runs."""
        code = self._process.poll()
        if code is not None:
            self.release()
        return code

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; `subprocess.TimeoutExpired` when that takes longer."""
        code = self._process.wait(timeout)
        self.release()
        return code

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    def release(self) -> None:
        """Send the guard home: from now on the child may outlive us. Needed too once the child is gone, since its
        process id may then become another's."""
        pipe = self._process.stdin
        if pipe and not pipe.closed:
            with suppress(BrokenPipeError):  # the guard itself was killed
                pipe.write(b"farewell\n")
            pipe.close()

    def let_go(self) -> None:
        """Close our end without a word: in a fork of us, so that only the original keeps the child alive."""
        if self._process.stdin:
            self._process.stdin.close()


_guarded: weakref.WeakSet[GuardedProcess] = weakref.WeakSet()


def _let_go_of_all() -> None:
    for process in list(_guarded):
        process.let_go()


os.register_at_fork(after_in_child=_let_go_of_all)
