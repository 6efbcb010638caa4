"""`packing:` of streams and sinks: what it means, and what is said about its mistakes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.support.pages import DOCS

from penstock.errors import ConfigError
from penstock.topology.lint import lint
from penstock.topology.load import load
from penstock.topology.model import PackingSpec, Platform, StreamSpec

FULL = "{kind: typed, rows: 500, bytes: 256KiB, codec: lz4}"


def written(folder: Path, stream: str, sink: str = "{stream: S, subject: s.x}", more: str = "") -> Platform:
    """A stream `S` with this packing, and a pipeline `p` that writes to the sink."""
    path = folder / "penstock.yaml"
    path.write_text(
        f"streams:\n  IN: {{subjects: [in.>]}}\n  S: {{subjects: [s.>]{stream}}}\n{more}"
        f"pipelines:\n  p: {{from: {{stream: IN}}, to: {sink}}}\n"
    )
    return load(path, variables={})


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("rows", PackingSpec("rows")),
        ("typed", PackingSpec("typed")),
        (FULL, PackingSpec("typed", 500, 256 * 1024, "lz4")),
        ("{rows: 10}", PackingSpec("rows", 10)),
        ("none", None),
    ],
)
def test_a_pipeline_writes_what_its_stream_says(tmp_path: Path, text: str, meant: PackingSpec | None) -> None:
    platform = written(tmp_path, f", packing: {text}")
    assert platform.packing_of(platform.pipelines["p"].sinks[0]) == meant


@pytest.mark.parametrize(("text", "meant"), [("none", None), ("{rows: 10}", PackingSpec("rows", 10))])
def test_a_sink_says_otherwise(tmp_path: Path, text: str, meant: PackingSpec | None) -> None:
    platform = written(tmp_path, f", packing: {FULL}", f"{{stream: S, subject: s.x, packing: {text}}}")
    assert platform.packing_of(platform.pipelines["p"].sinks[0]) == meant


def test_messages_are_written_where_nobody_says_anything_and_files_have_no_packs(tmp_path: Path) -> None:
    platform = written(tmp_path, "", "[{stream: S, subject: s.x}, {format: console}]")
    assert [platform.packing_of(sink) for sink in platform.pipelines["p"].sinks] == [None, None]


def test_the_server_sees_nothing_of_it(tmp_path: Path) -> None:
    def stream(packing: str) -> StreamSpec:
        return written(tmp_path, packing).streams["S"]

    assert stream(f", packing: {FULL}").config == stream("").config


def test_an_environment_changes_it(tmp_path: Path) -> None:
    path = tmp_path / "penstock.yaml"
    path.write_text(
        "environments:\n  dev: {streams: {S: {packing: null}}}\n  prod: {streams: {S: {packing: {rows: 9}}}}\n"
        f"streams:\n  S: {{packing: {FULL}}}\n"
    )
    assert not load(path, "dev", {}).streams["S"].packs
    assert load(path, "prod", {}).streams["S"].packing == PackingSpec("typed", 9, 256 * 1024, "lz4")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("typd", r"3:33: expected none, rows or typed, found 'typd'; did you mean 'typed'\?"),
        ("[rows]", "expected none, rows or typed, found a list"),
        ("{kind: row}", r"found 'row'; did you mean 'rows'\?"),
        ("{kind: rows, row: 5}", r"unknown key 'row' in packing; did you mean 'rows'\?"),
        ("{rows: 0}", "expected a whole number from 1 to 1000000, found 0"),
        ("{bytes: 0}", "'0' is too small: expected 1 byte or more"),
        ("{codec: lz5}", r"expected none, lz4 or zstd, found 'lz5'; did you mean 'lz4'\?"),
    ],
)
def test_a_mistake_is_told_with_the_nearest_word(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        written(tmp_path, f", packing: {text}")


def test_files_take_no_packing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="packing is for streams"):
        written(tmp_path, "", "{format: parquet, path: x, packing: rows}")


def test_packs_flow_on_to_streams_that_take_them_over(tmp_path: Path) -> None:
    copies = (
        "  COPY: {mirror: {name: S}}\n  ALL: {sources: [{name: COPY}], allow_msg_ttl: true}\n"
        "  FAR: {sources: [{name: S, domain: hub}], allow_msg_ttl: true}\n"
    )
    found = lint(written(tmp_path, ", packing: rows", more=copies))
    assert [one.path for one in found if one.code == "K02"] == ["streams.ALL.allow_msg_ttl"]


def test_the_platform_of_the_page_is_sound(tmp_path: Path) -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", (DOCS / "packs.md").read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        (tmp_path / "penstock.yaml").write_text(block)
        platform = load(tmp_path / "penstock.yaml", variables={})
        assert {one.code for one in lint(platform)} <= {"N05"}  # there is no lock file


def test_filters_by_subject_go_with_packs_which_have_one_subject_each(tmp_path: Path) -> None:
    reader = "consumers:\n  c: {stream: S, filter: s.x, ack_wait: 30s}\n"
    assert not [one for one in lint(written(tmp_path, ", packing: rows", more=reader)) if one.code.startswith("K")]
