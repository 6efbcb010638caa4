"""The name of a process that handles messages."""

from __future__ import annotations

import os
import secrets
import socket


def new_instance() -> str:
    """Return a name for a process without a configured one: no other process will reclaim its id."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
