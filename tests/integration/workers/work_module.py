"""Handlers that run in processes of their own, or as `penstock work work_module:…`."""

from __future__ import annotations

import os
import time
from pathlib import Path

from penstock.consume.messages import Message, MessageContext


def record(message: Message, context: MessageContext) -> None:
    """Append partition, number and process to the file that the message names."""
    path, _, number = message.data.decode().rpartition(":")
    with open(path, "a") as file:
        file.write(f"{context.partition_id}:{number}:{os.getpid()}\n")


def die_once(message: Message, context: MessageContext) -> None:
    """Kill this process, unless it was done before."""
    path = Path(message.data.decode())
    if not path.exists():
        path.touch()
        os._exit(1)


def hang_at_two(message: Message, context: MessageContext) -> None:
    """Never return from the second message of partition `a`."""
    if context.partition_id == "a" and message.data == b"2":
        time.sleep(3600)
    time.sleep(0.05)
