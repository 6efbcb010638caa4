"""What services write: declared in the platform file, and part of their permissions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.topology.load import load
from penstock.topology.permissions import permissions


def written(folder: Path, services: Any) -> Path:
    file = folder / "penstock.yaml"
    streams = {"S": {"subjects": ["s.>"]}, "T": {"subjects": ["t.>"], "allow_atomic": True}}
    consumers = {"reader": {"stream": "S", "filter": "s.a", "service": "both"}}
    file.write_text(json.dumps({"streams": streams, "consumers": consumers, "services": services}))
    return file


def test_a_service_that_reads_and_writes_is_one_user(tmp_path: Path) -> None:
    services = {"both": {"publishes": ["s.b"]}, "batches": {"publishes": ["t.x"]}, "facts": {"appends": ["t.facts"]}}
    found = {one.user: set(one.publish) for one in permissions(load(written(tmp_path, services)))}
    assert set(found) == {"both", "batches", "facts", "ui"}
    assert {"s.b", "$JS.API.CONSUMER.MSG.NEXT.S.reader"} <= found["both"]
    assert found["batches"] == {"t.x", "$JS.API.STREAM.NAMES", "$JS.API.STREAM.INFO.T"}
    assert found["facts"] == {"t.facts.*", "$JS.API.STREAM.MSG.GET.T"}


@pytest.mark.parametrize(
    ("subject", "allowed"), [(">", {"s.>", "t.>"}), ("*.>", {"s.>", "t.>"}), ("*.x.*", {"s.x.*", "t.x.*"})]
)
def test_a_wildcard_at_the_beginning_allows_streams_and_not_the_server(
    tmp_path: Path, subject: str, allowed: set[str]
) -> None:
    """`>` would be `$JS.API.STREAM.DELETE.…` and the inboxes of others, too."""
    found, _ = permissions(load(written(tmp_path, {"both": {"publishes": [subject]}})))
    assert {one for one in found.publish if not one.startswith("$")} == allowed


@pytest.mark.parametrize(
    ("services", "words"),
    [
        ({"x": {"publishes": ["u.a"]}}, "'u.a', which no stream takes"),
        ({"x": {"publish": ["s.a"]}}, "publishes"),
        ({"x": {"publishes": ["s..a"]}}, "s..a"),
        (["x"], "expected services by name"),
        ({"x": "s.a"}, "x"),
    ],
)
def test_what_cannot_be_right_is_told_with_its_line(tmp_path: Path, services: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=r"penstock\.yaml:1:") as told:
        load(written(tmp_path, services))
    assert words in str(told.value)
