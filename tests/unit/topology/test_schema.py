"""The JSON Schema of the platform file takes what the loader takes, and tells what people mistype."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from tests.support.pages import DOCS

from penstock.examples import example_dir
from penstock.topology.fields import CONSUMER_FIELDS, STREAM_FIELDS
from penstock.topology.schema import schema

VALIDATOR = jsonschema.Draft202012Validator(schema())


def wrong(document: Any) -> list[str]:
    return [error.message for error in VALIDATOR.iter_errors(json.loads(json.dumps(document, default=str)))]


def test_it_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(schema())


@pytest.mark.parametrize("path", sorted(example_dir().glob("*.yaml")), ids=lambda path: path.name)
def test_the_examples_are_taken(path: Path) -> None:
    if "asyncapi" not in path.name and "lock" not in path.name:
        assert wrong(yaml.safe_load(path.read_text())) == []


@pytest.mark.parametrize(
    "page", ["app.md", "facts.md", "gateway.md", "groups.md", "workers.md", "publishing.md", "packs.md"]
)
def test_the_files_of_the_pages_are_taken(page: str) -> None:
    text = (DOCS / page).read_text()
    for block in text.split("```yaml\n")[1:]:
        assert wrong(yaml.safe_load(block.partition("```")[0])) == []


def test_every_field_is_known_and_described() -> None:
    for section, fields in {"streams": STREAM_FIELDS, "consumers": CONSUMER_FIELDS}.items():
        one = schema()["properties"][section]["additionalProperties"]
        known = (one["anyOf"][0] if "anyOf" in one else one)["properties"]
        assert set(known) == {field.key for field in fields}
        assert all(entry["description"] for entry in known.values())


@pytest.mark.parametrize(
    "document",
    [
        {"stream": {}},
        {"streams": {"S": {"subject": ["s.>"]}}},
        {"streams": {"S": {"allow_atomic": "maybe"}}},
        {"streams": {"S": {"replicas": 9}}},
        {"streams": {"S": {"packing": {"row": 500}}}},
        {"consumers": {"c": {"filter": "s.a"}}},
        {"streams": []},
    ],
)
def test_what_people_mistype_is_told(document: Any) -> None:
    assert wrong(document)
