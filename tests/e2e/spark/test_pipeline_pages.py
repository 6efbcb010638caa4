"""The commands about pipelines that the README and docs/pipelines.md show, run as they are, in the example's folder."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pyarrow.dataset
import pytest
import yaml
from tests.support.commands import here

from penstock.examples import example_dir
from penstock.server.embedded import EmbeddedServer

ROOT = Path(__file__).parents[3]


def shown(page: str) -> list[str]:
    """The commands `penstock pipeline …` of a page, in a block or in a sentence, without comments and placeholders."""
    found = re.findall(r"(?:^|`)(penstock pipeline [^`#\n]+)", (ROOT / page).read_text(), re.MULTILINE)
    commands = [" ".join(command.split()) for command in found]
    return [command for command in commands if not re.search(r"NAME|…|<|\.zip", command)]


@pytest.fixture
def folder(tmp_path: Path, nats_server: EmbeddedServer) -> Path:
    """The example, applied to a server of its own, with a few events.

    Without the pipeline that reads every stream, which the quickstart runs: it starts a process for each of them.
    """
    copied = Path(shutil.copytree(example_dir(), tmp_path / "gpuaas", ignore=shutil.ignore_patterns("__pycache__")))
    declared = yaml.safe_load((copied / "penstock.yaml").read_text())
    del declared["pipelines"]["event_lake"]
    (copied / "penstock.yaml").write_text(yaml.safe_dump(declared, sort_keys=False))
    (copied / "penstock.lock.yaml").unlink()  # it has the name of what was left out
    run("penstock apply penstock.yaml --env dev --allow-override", copied, nats_server)
    event = '{"event_id":"e1","occurred_at":"2026-01-01T10:00:00Z","payload":'
    event += '{"project_id":"p","gpu_seconds":60,"price":0.5}}\n'
    (copied / "events.jsonl").write_text(event)
    run("penstock publish platform.billing.usage.metered --file events.jsonl", copied, nats_server)
    return copied


def run(command: str, folder: Path, server: EmbeddedServer) -> subprocess.CompletedProcess[str]:
    done = here(*command.split()[1:], cwd=folder, variables={"PENSTOCK_SERVERS": server.url})
    assert done.returncode == 0, f"{command}: {done.stdout[-1500:]} {done.stderr[-1500:]}"
    return done


@pytest.mark.usefixtures("spark")
def test_the_commands_of_the_pages_work_as_they_are_shown(folder: Path, nats_server: EmbeddedServer) -> None:
    commands = list(dict.fromkeys([*shown("README.md"), *shown("docs/pipelines.md")]))
    assert {" ".join(command.split()[:3]) for command in commands} == {
        "penstock pipeline run",
        "penstock pipeline ls",
        "penstock pipeline status",
    }
    runs = [command for command in commands if " run " in command]
    others = [command for command in commands if " run " not in command]
    said = {command: run(command, folder, nats_server) for command in (*runs, *others)}
    assert "finished" in said["penstock pipeline status"].stdout
    told = said["penstock pipeline run usage_hourly"].stderr
    batch = r"batch 0, rows 1, rows/s \d+, took [\d.]+ s, rows behind \d+, behind \S+, rows kept [\d,]+, bytes kept \S+"
    assert re.search(rf"^usage_hourly: {batch}", told, re.MULTILINE), said
    # a batch is told when it ends, which may be before the durable has followed; in the end it has
    assert re.search(r"^usage_hourly: batch \d+, .*, rows behind 0, behind 0s, ", told, re.MULTILINE), said
    (row,) = pyarrow.dataset.dataset(folder / "lake/usage_hourly", format="parquet").to_table().to_pylist()
    assert (row["project_id"], row["gpu_seconds"]) == ("p", 60)
