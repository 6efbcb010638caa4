"""`penstock lint` and `penstock asyncapi` as a person runs them: exit codes, one line an error, never a traceback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from tests.support.commands import here as penstock

EXAMPLE = Path(__file__).parents[3] / "examples/gpuaas/penstock.yaml"
CLEAN = """\
streams:
  S: {subjects: [s.>], max_age: 7d}
  DLQ: {subjects: [dlq.>], max_age: 30d}
consumers:
  worker: {stream: S, filter: s.a, service: w, ack_wait: 30s, max_deliver: 5, dlq: dlq.s.a}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "penstock.yaml"
    path.write_text(CLEAN)
    return path


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("streams: {S: {subjects: [s.>}\n", ":1:29: not valid YAML"),
        (
            CLEAN.replace("max_age: 7d", "maxage: 7d"),
            ":2:24: unknown key 'maxage' in stream 'S'; did you mean 'max_age'?",
        ),
        (CLEAN.replace("30s", "30 parsecs"), ":5:58: '30 parsecs' is not a duration: write a number and a unit (w, d,"),
        (CLEAN.replace("stream: S", "stream: T"), ":5:20: consumer 'worker' reads stream 'T', which is not declared"),
        (CLEAN + "  worker: {stream: S}\n", ":6:3: 'worker' is written twice: here and in line 5"),
        (CLEAN.replace("[s.>]", "{a: b}"), ":2:17: expected a subject, found a mapping"),
    ],
    ids=["syntax", "unknown key", "unit", "missing stream", "double name", "wrong type"],
)
def test_bad_input_is_one_line_a_person_can_act_on(file: Path, text: str, expected: str) -> None:
    file.write_text(text)
    result = penstock("lint", file)
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.startswith(f"error: {file}{expected}")
    assert len(result.stderr.splitlines()) == 1


def test_several_mistakes_are_one_line_each(file: Path) -> None:
    file.write_text(CLEAN.replace("7d", "7x").replace("30s", "30x"))
    result = penstock("lint", file)
    assert result.returncode == 1
    assert len(result.stderr.splitlines()) == 2


def test_a_missing_file_and_an_unknown_environment_are_errors(file: Path, tmp_path: Path) -> None:
    missing = penstock("lint", tmp_path / "nothing.yaml")
    assert (missing.returncode, len(missing.stderr.splitlines())) == (1, 1)
    assert "there is no file" in missing.stderr
    file.write_text("environments: {prod: {}}\n" + CLEAN)
    unknown = penstock("lint", file, "--env", "pord")
    assert unknown.returncode == 1
    assert "did you mean 'prod'?" in unknown.stderr


def test_wrong_usage_exits_64(file: Path) -> None:
    assert penstock("lint", file, "--no-such-flag").returncode == 64


def test_findings_decide_the_exit_code(file: Path) -> None:
    assert penstock("lint", file).returncode == 0
    file.write_text(CLEAN.replace(", ack_wait: 30s", ""))
    assert penstock("lint", file).returncode == 0, "a warning alone is no failure"
    strict = penstock("lint", file, "--strict")
    assert strict.returncode == 2
    assert "C03" in strict.stdout
    file.write_text(CLEAN.replace(", dlq: dlq.s.a", ""))
    errors = penstock("lint", file)
    assert errors.returncode == 2
    assert "D01" in errors.stdout


def test_json_says_the_same_as_the_table(file: Path) -> None:
    file.write_text(CLEAN.replace(", dlq: dlq.s.a", ""))
    result = penstock("lint", file, "--json", "--catalog")
    report = json.loads(result.stdout)
    (finding,) = [f for f in report["findings"] if f["code"] == "D01"]
    assert result.returncode == 2
    assert report["counts"]["error"] == 1
    assert (finding["line"], finding["path"], finding["severity"]) == (5, "consumers.worker.max_deliver", "error")
    assert report["catalog"]["services"] == [{"consumers": 1, "service": "w"}]


def test_json_of_a_file_that_does_not_load_names_every_problem(file: Path) -> None:
    file.write_text(CLEAN.replace("7d", "7x"))
    result = penstock("lint", file, "--json")
    report = json.loads(result.stdout)
    assert result.returncode == 1
    (problem,) = report["problems"]
    assert (problem["file"], problem["line"], problem["column"]) == (str(file), 2, 33)
    assert problem["message"] in report["error"]
    assert f"error: {report['error']}" == result.stderr.strip()


def test_a_rename_is_noticed_once_the_names_are_locked(file: Path) -> None:
    locked = penstock("lint", file, "--update-lock")
    assert locked.returncode == 0
    assert "2 streams, 1 consumer" in locked.stdout
    assert "clean" in penstock("lint", file).stdout
    file.write_text(CLEAN.replace("  worker:", "  labourer:"))
    renamed = penstock("lint", file, "--json")
    assert renamed.returncode == 2
    assert "N01" in {f["code"] for f in json.loads(renamed.stdout)["findings"]}
    assert penstock("lint", file, "--update-lock").returncode == 0
    assert penstock("lint", file).returncode == 0


def test_the_file_in_the_current_folder_is_the_default(file: Path) -> None:
    assert penstock("lint", cwd=file.parent).returncode == 0


def test_the_catalog_of_the_example_is_printed_whole() -> None:
    result = penstock("lint", EXAMPLE, "--catalog")
    assert result.returncode == 0
    assert "provisioning_worker_force_release" in result.stdout
    (total,) = [line for line in result.stdout.splitlines() if line.startswith("total")]
    assert total.split() == ["total", "23"]


def test_an_asyncapi_document_is_written_and_can_be_read_back(file: Path, tmp_path: Path) -> None:
    printed = penstock("asyncapi", file)
    assert printed.returncode == 0
    assert yaml.safe_load(printed.stdout)["asyncapi"] == "3.0.0"
    target = tmp_path / "api.json"
    assert penstock("asyncapi", file, "--out", target).returncode == 0
    assert json.loads(target.read_text()) == yaml.safe_load(printed.stdout)
    file.write_text("asyncapi: api.json\n" + CLEAN)
    assert penstock("lint", file).returncode == 0
    file.write_text("asyncapi: api.json\n" + CLEAN.replace("30s", "31s"))
    contradicting = penstock("lint", file)
    assert contradicting.returncode == 2
    assert "A01" in contradicting.stdout
    nowhere = penstock("asyncapi", file, "--out", tmp_path / "no" / "such" / "folder.yaml")
    assert (nowhere.returncode, len(nowhere.stderr.splitlines())) == (1, 1)
