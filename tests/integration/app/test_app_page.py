"""The page about apps: its files and commands on an empty server, and what they show."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.commands import here
from tests.support.pages import DOCS, apply_platform

from penstock.server.embedded import EmbeddedServer
from penstock.testing import stream_messages


def test_the_page_works_as_it_stands(
    nats_server: EmbeddedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (DOCS / "app.md").read_text()
    file = apply_platform("app.md", tmp_path, nats_server)
    file.write_text(file.read_text().replace("nats://127.0.0.1:4222", nats_server.url))
    service, tests = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (tmp_path / "service.py").write_text(service)
    (tmp_path / "test_service.py").write_text(tests)
    (lines,) = re.findall(r"^printf '%s\\n' '(.*)' '(.*)' > usage.jsonl$", text, re.MULTILINE)
    (tmp_path / "usage.jsonl").write_text("\n".join(lines))
    assert here("--servers", nats_server.url, "publish", "usage.metered", "--file", "usage.jsonl").returncode == 0
    done = here("run", "service:app", "--until-done")
    assert done.returncode == 2, done.stderr
    (shown,) = re.findall(r"```text\n(.*?)```", text, re.DOTALL)
    told, letter, *table = shown.splitlines()
    assert told in done.stderr
    assert letter.split(" ", 2)[2] in caplog.text
    assert [line.split() for line in done.stdout.splitlines()] == [line.split() for line in table]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_service.py"]
    tested = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "2 passed" in tested.stdout, tested.stdout
    assert [one.data for one in stream_messages(nats_server.settings, "BILLING") if one.data] == [
        b'{"project":"a","cents":42}'
    ]
