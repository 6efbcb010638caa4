"""`scripts/house` counts by reading the source; what it counts does not grow again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "house"

MOST = {
    "reconnect loops": 1,
    "KV layers": 1,
    "pull issuers": 1,
    "acknowledgement parsers": 1,
    "inbox makers": 1,
    "API prefixes outside the client": 0,
    "metrics implementations": 1,
    "package cycles": 0,
    "class names with two or more meanings": 5,
}
"""What the source has today. Lower a number when it falls; never raise one."""

EVERYTHING_TWICE = {
    "one/a.py": '''
"""A docstring may name $JS.API without a count."""
import secrets
from prometheus_client import Counter
from penstock.two import b

class Same: ...

def again(connection, reply, domain, bucket, inbox_prefix):
    connection.reconnect()
    reply.split(".")
    inbox = f"{inbox_prefix}.{secrets.token_hex()}"
    return f"$JS.{domain}.API", f"$KV.{bucket}.x", f"CONSUMER.MSG.NEXT.{bucket}", inbox
''',
    "two/b.py": """
import penstock.one.a
from aio import connect

class Same: ...

def again(message, backoff, bucket, settings):
    for pause in backoff.delays():
        connect(settings)
    message.reply.rsplit(b".", 3)
    text = "# HELP of a metric"
    return "$JS.API.INFO", f"KV_{bucket}", f"x.CONSUMER.MSG.NEXT.{bucket}", f"_INBOX.{uuid.uuid4()}", text
""",
    "workers/c.py": 'names = "a.b".split("."), "KV_a", f"{names}"\n',
}


def house(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, timeout=60)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    for name, text in EVERYTHING_TWICE.items():
        file = tmp_path / "penstock" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path


def test_each_thing_is_found_where_it_is(source: Path) -> None:
    found = json.loads(house("--json", "--source", str(source)).stdout)
    assert {name: one["count"] for name, one in found.items()} == {
        **dict.fromkeys(MOST, 2),
        "package cycles": 1,
        "class names with two or more meanings": 1,
        "modules of workers/": 1,
        "lines of src": sum(text.count("\n") for text in EVERYTHING_TWICE.values()),
    }
    assert found["package cycles"]["places"] == ["one ↔ two"]
    assert found["KV layers"]["places"] == ["penstock/one/a.py", "penstock/two/b.py"]


def test_what_the_source_should_have_once_does_not_grow() -> None:
    found = json.loads(house("--json").stdout)
    grown = {name: found[name] for name, most in MOST.items() if found[name]["count"] > most}
    assert grown == {}


def test_the_table_has_every_count(source: Path) -> None:
    printed = house("--short", "--source", str(source)).stdout
    assert [line.rsplit(maxsplit=1)[0] for line in printed.splitlines()][: len(MOST)] == list(MOST)


@pytest.mark.parametrize("arguments", [("--unknown",), ("--source", "/nowhere")])
def test_wrong_usage_exits_64(arguments: tuple[str, ...]) -> None:
    done = house(*arguments)
    assert (done.returncode, done.stdout) == (64, "")
    assert "error: " in done.stderr
