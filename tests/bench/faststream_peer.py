"""FastStream, to compare with. No part of the product: `make bench-peers` fetches it into `.peers`.

As a script: install what `faststream.txt` pins. pydantic and nats-py are those of this environment, so that both sides
have the same.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from penstock.errors import ConfigError

HERE = Path(__file__).resolve().parent
TARGET = HERE.parents[1] / ".peers" / "faststream"


def fetch() -> None:
    uv = Path(sys.executable).with_name("uv")
    flags = ["-q", "--no-deps", "--require-hashes", "--target", TARGET, "-r", HERE / "faststream.txt"]
    subprocess.run([str(uv), "pip", "install", *map(str, flags)], check=True)


def path() -> Path:
    """Where it is. Raises when it was not fetched."""
    if not (TARGET / "faststream").is_dir():
        raise ConfigError("FastStream is not there: run `make bench-peers`, or `python tests/bench/faststream_peer.py`")
    return TARGET


if __name__ == "__main__":
    fetch()
