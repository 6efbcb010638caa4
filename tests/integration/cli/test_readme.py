"""The README's snippets run as they are, in their order, on an empty server; Spark's tests run the one about Spark."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.support.commands import here

from penstock.server.embedded import EmbeddedServer
from penstock.testing import TestApp

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text()
USE = README[README.index("## Use it") : README.index("## More")]
BLOCK = re.compile(r"```(\w*)\n(.*?)```", re.DOTALL)
COMMENT = re.compile(r" +#.*$")
ENDS_WITH = {"plan": 2}
"""A plan has something to do."""
RUNNING = {"work": ["--until-done"], "run": ["--until-done"], "dlq capture": ["--until-caught-up"]}
"""What is added to commands that run until they are stopped."""
NOT_HERE = re.compile(r"^penstock (status --watch|gateway)")
"""Shown until somebody stops it; and with placeholders for certificates, docs/gateway.md has a whole example."""


class Reader:
    """Somebody who follows the page."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self.variables = {"PENSTOCK_SERVERS": url, "PYTHONPATH": ""}
        self.receipt = ""
        self.ran: list[str] = []

    def type(self, line: str) -> None:
        words = shlex.split(line)
        if words[0] == "echo":
            (self.folder / words[-1]).write_text(f"{words[1]}\n")
        elif words[0] == "cd":
            self.folder /= words[1]
        else:
            self.run(words[1:])

    def run(self, words: list[str]) -> None:
        name = " ".join(words[: 2 if words[0] in ("dlq", "group") else 1])
        words = [self.receipt if word == "pr2.…" else word for word in words]
        more = ["--json"] if name == "fetch" else ["--allow-override"] if name == "apply" else RUNNING.get(name, [])
        done = here(*words, *more, cwd=self.folder, variables=self.variables)
        assert done.returncode == ENDS_WITH.get(name, 0), (words, done.stdout[-1000:], done.stderr[-1000:])
        if name == "fetch":
            self.receipt = json.loads(done.stdout)["receipt"]
        self.ran.append(name)


def test_everything_under_use_it_runs_on_an_empty_server(
    nats_server: EmbeddedServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setenv("PENSTOCK_SERVERS", nats_server.url)
    monkeypatch.syspath_prepend(tmp_path / "examples/gpuaas")
    reader = Reader(tmp_path, nats_server.url)
    for language, text in BLOCK.findall(USE):
        if language == "python" and "spark" not in text:
            exec(compile(text, "README.md", "exec"), {"__name__": "readme"})
        elif not language:
            for line in text.splitlines():
                if not NOT_HERE.match(line):
                    reader.type(COMMENT.sub("", line))
    assert capsys.readouterr().out == "[1, 2]\n"
    ran = "lint, plan, apply, verify, view, publish, fetch, confirm, run, apply, work, group show, dlq ls, dlq replay, "
    ran += "dlq capture"
    assert ", ".join(reader.ran) == ran


def plain(line: str) -> list[str]:
    """The words of a line, without what differs from run to run: times, ages and fingerprints."""
    line = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(,\d+)?", "TIME", line)
    return [re.sub(r"^(\d+m?s|[0-9a-f]{8})$", "_", word) for word in line.split()]


def test_a_handler_of_ones_own_takes_the_commands_that_are_shown(
    nats_server: EmbeddedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = README[README.index("## A handler of your own") : README.index("## The whole story")]
    shown = [plain(line) for kind, text in BLOCK.findall(section) if kind == "text" for line in text.splitlines()]
    commands = [line for kind, text in BLOCK.findall(section) if not kind for line in text.splitlines()]
    assert [commands[0].split()[0], commands[3]] == ["pip", "penstock server &"]  # there already, here
    monkeypatch.setenv("PENSTOCK_SERVERS", nats_server.url)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    script = "\n".join([commands[1], commands[2], *commands[4:]])
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    printed = [plain(line) for line in (*done.stderr.splitlines(), *done.stdout.splitlines())]
    assert [line for line in shown if line not in printed] == [], done.stdout + done.stderr


async def test_the_first_lines_of_code_work_as_they_stand(
    nats_server: EmbeddedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "penstock.yaml").write_text(
        "streams:\n  BILLING: {subjects: [platform.billing.>, penstock.done.BILLING.>], allow_atomic: true}\n"
        "consumers:\n  billing_worker_usage_metered: {stream: BILLING, filter: platform.billing.usage.metered}\n"
    )
    names: dict[str, Any] = {"__name__": "readme_first"}
    monkeypatch.setitem(sys.modules, "readme_first", ModuleType("readme_first"))
    sys.modules["readme_first"].__dict__.update(names)
    exec(compile(BLOCK.findall(README)[0][1], "README.md", "exec"), sys.modules["readme_first"].__dict__)
    for server in (None, nats_server):
        async with TestApp(sys.modules["readme_first"].app, server) as test:
            await test.send("platform.billing.usage.metered", {"project_id": "p", "gpu_seconds": 21})
            await test.done()
            charged = [one.data for one in await test.stored("BILLING") if one.subject.endswith("charged")]
            assert charged == [b'{"project":"p","cents":42}']


def test_the_test_is_a_test(nats_server: EmbeddedServer) -> None:
    testing = next(code for language, code in BLOCK.findall(README) if language == "python" and "def test_" in code)
    names: dict[str, object] = {"__name__": "readme"}
    exec(compile(testing, "README.md", "exec"), names)
    call = names["test_something"]
    assert callable(call)
    call(nats_server)
