"""AsyncAPI both ways: what a document says about consumers, and the document written from a platform."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from penstock.errors import ConfigError
from penstock.topology import asyncapi
from penstock.topology.lint import lint
from penstock.topology.load import load
from penstock.topology.model import Platform

PLATFORM = """
asyncapi: api.yaml
streams: {S: {subjects: [s.>], max_age: 7d}, DLQ: {subjects: [dlq.>], max_age: 30d}}
consumers:
  worker: {stream: S, filter: s.a, service: w KEYS}
"""
VERSION_3 = """
asyncapi: 3.0.0
info: {title: t, version: "1"}
channels:
  a: {address: s.a, x-nats-config: {ack_wait: 45s, max_deliver: 20, dlq_subject: dlq.s.a, note: ours}}
"""
VERSION_2 = """
asyncapi: 2.6.0
info: {title: t, version: "1"}
channels:
  s.a: {subscribe: {x-nats-config: {ack_wait: 45s, max_deliver: 20, dlq_subject: dlq.s.a}}}
"""

SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["asyncapi", "info"],
    "additionalProperties": False,
    "properties": {
        "asyncapi": {"const": "3.0.0"},
        "info": {"type": "object", "required": ["title", "version"], "additionalProperties": {"type": "string"}},
        "servers": {
            "propertyNames": {"pattern": r"^[\w\-]+$"},
            "additionalProperties": {
                "type": "object",
                "required": ["host", "protocol"],
                "properties": {"host": {"type": "string", "pattern": "^[^@/]+$"}, "protocol": {"type": "string"}},
                "additionalProperties": False,
            },
        },
        "channels": {
            "additionalProperties": {
                "type": "object",
                "properties": {"address": {"type": "string"}, "description": {"type": "string"}},
                "patternProperties": {"^x-[\\w\\-]+$": {}},
                "additionalProperties": False,
            }
        },
        "operations": {
            "additionalProperties": {
                "type": "object",
                "required": ["action", "channel"],
                "properties": {
                    "action": {"enum": ["send", "receive"]},
                    "channel": {
                        "type": "object",
                        "required": ["$ref"],
                        "properties": {"$ref": {"type": "string", "format": "uri-reference"}},
                    },
                    "description": {"type": "string"},
                    "tags": {
                        "type": "array",
                        "uniqueItems": True,
                        "items": {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}},
                    },
                },
                "patternProperties": {"^x-[\\w\\-]+$": {}},
                "additionalProperties": False,
            }
        },
    },
}
"""The rules of AsyncAPI 3.0 for the parts that are written here."""


def check(document: dict[str, Any]) -> None:
    """What a validator of AsyncAPI 3.0 checks: the shape, and that every reference leads somewhere."""
    jsonschema.validate(document, SCHEMA, format_checker=jsonschema.FormatChecker())
    for operation in document["operations"].values():
        section, name = operation["channel"]["$ref"].removeprefix("#/").split("/")
        assert name in document[section]


def platform(folder: Path, keys: str = "", document: str = VERSION_3, text: str = PLATFORM) -> Platform:
    (folder / "api.yaml").write_text(document)
    path = folder / "penstock.yaml"
    path.write_text(text.replace(" KEYS", keys))
    return load(path)


def codes(declared: Platform) -> set[str]:
    return {finding.code for finding in lint(declared)}


@pytest.mark.parametrize("document", [VERSION_2, VERSION_3], ids=["2.6", "3.0"])
def test_what_the_platform_leaves_out_comes_from_the_document(tmp_path: Path, document: str) -> None:
    consumer = platform(tmp_path, document=document).consumers["worker"]
    assert consumer.ack_wait == timedelta(seconds=45)
    assert (consumer.max_deliver, consumer.dlq) == (20, "dlq.s.a")


@pytest.mark.parametrize("document", [VERSION_2, VERSION_3], ids=["2.6", "3.0"])
def test_a_contradiction_is_an_error_that_names_both_values(tmp_path: Path, document: str) -> None:
    declared = platform(tmp_path, ", ack_wait: 30s, dlq: dlq.s.b", document)
    said = [f"{f.line}: {f.message}" for f in lint(declared) if f.code == "A01"]
    assert said == [
        "5: consumer 'worker' has ack_wait 30s, api.yaml:5 says 45s",
        "5: consumer 'worker' has dlq dlq.s.b, api.yaml:5 says dlq.s.a",
    ]


OPERATION_3 = VERSION_3 + "operations: {worker: {action: receive, channel: {$ref: '#/channels/a'}}}\n"
OPERATION_2 = VERSION_2.replace("subscribe: {", "subscribe: {operationId: worker, ")


@pytest.mark.parametrize("document", [OPERATION_2, OPERATION_3], ids=["2.6", "3.0"])
@pytest.mark.parametrize(
    ("address", "filter_", "agrees"),
    [
        ("s.a", "s.a", True),
        ("s.b", "s.a", False),
        ("s.{id}", "s.a", True),
        ("t.{id}", "s.a", False),
        ("s.b", "s.>", True),
        ("s.b", "[s.a, s.b]", True),
    ],
)
def test_the_address_of_the_operations_channel_is_what_the_consumer_reads(
    tmp_path: Path, document: str, address: str, filter_: str, agrees: bool
) -> None:
    changed = document.replace(": s.a,", f': "{address}",').replace("  s.a:", f'  "{address}":')
    text = PLATFORM.replace("filter: s.a", f"filter{'s' * (filter_[0] == '[')}: {filter_}")
    said = [f.message for f in lint(platform(tmp_path, document=changed, text=text)) if f.code == "A01"]
    read = address.replace("{id}", "*")
    assert said == ([] if agrees else [f"consumer 'worker' has filter {filter_}, api.yaml:5 says address {read}"])


def test_a_channel_without_an_address_says_nothing_about_subjects(tmp_path: Path) -> None:
    assert "A01" not in codes(platform(tmp_path, document=OPERATION_3.replace("address: s.a, ", "")))


def test_agreement_is_no_finding(tmp_path: Path) -> None:
    assert "A01" not in codes(platform(tmp_path, ", ack_wait: 45s, max_deliver: 20, dlq: dlq.s.a"))


def test_a_subject_that_the_document_does_not_have_is_a_note(tmp_path: Path) -> None:
    declared = platform(tmp_path, text=PLATFORM.replace("filter: s.a", "filter: s.other"))
    assert "A02" in codes(declared)
    assert "A02" not in codes(platform(tmp_path))


def test_an_operation_of_the_consumers_name_wins_over_its_channel(tmp_path: Path) -> None:
    operation = (
        "operations: {worker: {action: receive, channel: {$ref: '#/channels/a'}, x-nats-config: {ack_wait: 9s}}}"
    )
    consumer = platform(tmp_path, document=VERSION_3 + operation).consumers["worker"]
    assert consumer.ack_wait == timedelta(seconds=9)
    assert consumer.max_deliver == 20


@pytest.mark.parametrize("pointer", ["api.yaml#/channels/a", "#/channels/a"])
def test_a_consumer_can_name_its_channel(tmp_path: Path, pointer: str) -> None:
    text = PLATFORM.replace("filter: s.a", "filter: s.>")
    assert platform(tmp_path, f', asyncapi: "{pointer}"', text=text).consumers["worker"].max_deliver == 20


@pytest.mark.parametrize(
    ("keys", "document", "expected"),
    [
        (
            ', asyncapi: "api.yaml#/channels/aa"',
            VERSION_3,
            r"penstock.yaml:5:1: .* no channel 'aa'; did you mean 'a'\?",
        ),
        (', asyncapi: "gone.yaml#/channels/a"', VERSION_3, r"penstock.yaml:5:1: there is no AsyncAPI document"),
        (', asyncapi: "api.yaml#/servers/a"', VERSION_3, r"neither #/channels/NAME nor #/operations/NAME"),
        ("", "openapi: 3.0.0", r"api.yaml:1:1: not an AsyncAPI"),
        ("", VERSION_3.replace("45s", "45"), r"api.yaml:5:.*'45' is not a duration"),
        ("", VERSION_3.replace("ack_wait", "ack_wiat"), r"unknown key 'ack_wiat' .* did you mean 'ack_wait'\?"),
        ("", "asyncapi: [", r"api.yaml:\d+:\d+: not valid YAML"),
        ("", "asyncapi: 3.0.0\nchannels: [a]", r"api.yaml:2:11: expected channels by name, found a list"),
        ("", "asyncapi: 3.0.0\nchannels: {a: 7}", r"api.yaml:2:15: expected channel 'a' as a mapping, found '7'"),
        ("", "asyncapi: 2.6.0\nchannels: s.a", r"api.yaml:2:11: expected channels by name, found 's.a'"),
        ("", "asyncapi: 3.0.0\noperations: {o: [a]}", r"api.yaml:2:17: expected operation 'o' as a mapping"),
        ("", "asyncapi: 3.0.0\nchannels: {a: {$ref: '#/channels/b'}}", r"api.yaml:2:22: '#/channels/b' leads nowhere"),
        ("", "asyncapi: 3.0.0\nchannels: {a: {$ref: '#/channels/a'}}", r"api.yaml:2:22: .* leads back to itself"),
        (
            "",
            "asyncapi: 3.0.0\nchannels: {a: {$ref: 'http://x/y#/a'}}",
            r"api.yaml:2:22: .* leads out of this document",
        ),
        ("", VERSION_3 + "components: {messages: {m: {$ref: '#/gone/0'}}}", r"api.yaml:6:35: '#/gone/0' leads nowhere"),
        (
            "",
            VERSION_3 + "operations: {o: {action: receive, channel: {$ref: '#/somewhere/a'}}}\nsomewhere: {a: {}}",
            r"operation 'o' has no channel of this document",
        ),
    ],
)
def test_a_broken_reference_or_document_is_an_error_with_its_place(
    tmp_path: Path, keys: str, document: str, expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        platform(tmp_path, keys, document)


def test_a_channel_may_stand_among_the_components(tmp_path: Path) -> None:
    document = (
        VERSION_3.replace("channels:", "components: {channels: {c: &c").replace("\n  a: {", " {").rstrip() + "}}\n"
    )
    document += "channels: {a: {$ref: '#/components/channels/c'}}\n"
    assert platform(tmp_path, document=document).consumers["worker"].max_deliver == 20


RICH = """
environments: {dev: {servers: ["nats://me:secret@localhost:4222", "tls://b:4222"]}}
streams:
  S: {subjects: [s.>], max_age: 7d, description: Events, allow_atomic: true}
  DLQ: {subjects: [dlq.>], max_age: 30d}
consumers:
  worker: {stream: S, filter: s.a, service: w, ack_wait: 30s, max_deliver: 10, dlq: dlq.s.a, purpose: works}
  other: {stream: S, filter: s.a, service: w, ack_wait: 90s, max_deliver: 3, dlq: dlq.s.b}
  many: {stream: S, filters: [s.b, s.c.*], service: w, ack_wait: 1m30s}
  all: {stream: S, service: w, ack_wait: 30s}
  letters: {stream: DLQ, filter: dlq.>, service: ops, ack_wait: 60s, max_deliver: 1}
pipelines:
  flow: {from: {stream: S, subjects: [s.in]}, to: [{stream: S, subject: s.out}, {format: parquet, path: lake}]}
"""


def test_a_written_document_is_valid_and_leaves_logins_out(tmp_path: Path) -> None:
    document = asyncapi.document(platform(tmp_path, text=RICH), "the title", "2.0.0")
    check(document)
    assert document["servers"]["dev-0"] == {"host": "localhost:4222", "protocol": "nats"}
    assert "secret" not in str(document)
    assert document["operations"]["worker"]["x-nats-config"] == {
        "stream": "S",
        "consumer": "worker",
        "ack_wait": "30s",
        "max_deliver": 10,
        "dlq_subject": "dlq.s.a",
    }
    assert {operation["action"] for operation in document["operations"].values()} == {"send", "receive"}


def test_the_check_of_documents_can_fail(tmp_path: Path) -> None:
    document = asyncapi.document(platform(tmp_path, text=RICH))
    document["operations"]["worker"]["channel"]["$ref"] = "#/channels/nowhere"
    with pytest.raises(AssertionError):
        check(document)
    document["operations"]["worker"]["action"] = "read"
    with pytest.raises(jsonschema.ValidationError):
        check(document)


def test_reading_back_what_was_written_finds_no_contradiction(tmp_path: Path) -> None:
    first = platform(tmp_path, text=RICH)
    written = yaml.safe_dump(asyncapi.document(first))
    again = platform(tmp_path, document=written, text="asyncapi: api.yaml\n" + RICH)
    assert all(consumer.contract for consumer in again.consumers.values())
    assert not {"A01", "A02"} & codes(again)
    bare = RICH.replace("ack_wait: 30s, max_deliver: 10, dlq: dlq.s.a, ", "")
    filled = platform(tmp_path, document=written, text="asyncapi: api.yaml\n" + bare)
    assert filled.consumers["worker"].config == first.consumers["worker"].config
