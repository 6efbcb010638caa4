"""The name of a process that handles messages."""

from __future__ import annotations

import os
import secrets
import socket


def new_instance() -> str:
    """A name for a process that has none: no other process will take its id back."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
