"""The field tables and the lint rules against a real server: what they say about it is true."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.unit.topology.lint_cases import CASES, LintCase

from penstock import errors
from penstock.jetstream import JetStream, connect
from penstock.server.embedded import EmbeddedServer
from penstock.topology.fields import CONSUMER_BY_WIRE, CONSUMER_FIELDS, STREAM_BY_WIRE, STREAM_FIELDS
from penstock.topology.load import load
from penstock.topology.model import Platform

STREAMS = """
streams:
  PLAIN:
    subjects: [plain.*.>]
    description: for people
    retention: interest
    storage: memory
    max_age: 1h
    max_bytes: 1MiB
    max_msgs: 1000
    max_msgs_per_subject: 10
    max_msg_size: 1kB
    max_consumers: 5
    discard: new
    discard_new_per_subject: true
    duplicate_window: 1m
    replicas: 1
    no_ack: true
    allow_direct: true
    consumer_limits: {inactive_threshold: 1h, max_ack_pending: 100}
    metadata: {team: blue}
    republish: {from: plain.>, to: again.plain.>, headers_only: true}
    subject_transform: {from: "plain.*.>", to: "plain.{{wildcard(1)}}.>"}
    placement: {}
  FLAGS:
    subjects: [flags.>]
    compression: s2
    first_seq: 100
    allow_rollup: true
    deny_delete: true
    allow_msg_ttl: true
    subject_delete_marker_ttl: 1m
    allow_atomic: true
    allow_batched: true
    allow_msg_schedules: true
  COUNTS: {subjects: [counts.>], allow_msg_counter: true}
  ASYNC: {subjects: [async.>], persist_mode: async, deny_purge: true}
  COPY: {mirror: {name: FLAGS, opt_start_seq: 100}, mirror_direct: false}
  MANY:
    sources:
      - {name: COUNTS, opt_start_time: 2026-01-01T00:00:00Z, filter_subject: counts.a}
      - {name: FLAGS, subject_transforms: [{from: flags.>, to: many.>}]}
      - {name: FAR, external: {api: $JS.far.API, deliver: from.far}}
      - {name: OTHER, domain: hub, consumer: {name: reader, deliver_subject: deliver.reader}}
"""

CONSUMERS = """
streams: {S: {subjects: [s.>]}}
consumers:
  pull:
    stream: S
    filter: s.a
    description: for people
    ack_wait: 45s
    max_deliver: 7
    replay: original
    max_ack_pending: 50
    max_waiting: 20
    max_batch: 100
    max_expires: 30s
    max_bytes: 1MiB
    headers_only: true
    sample_freq: 50%
    inactive_threshold: 1h
    replicas: 1
    mem_storage: true
    pause_until: 2126-01-31T12:00:00Z
    priority_policy: pinned_client
    priority_groups: [workers]
    priority_timeout: 2m
    metadata: {team: blue}
  waits: {stream: S, filters: [s.a, s.b], backoff: [1s, 5s], deliver: {start_sequence: 3}}
  later: {stream: S, deliver: {start_time: 2026-01-01T00:00:00Z}}
  push:
    stream: S
    ack_policy: flow_control
    deliver: new
    deliver_subject: d.push
    flow_control: true
    idle_heartbeat: 1s
    max_ack_pending: 10
    rate_limit: 100000
  group: {stream: S, ack_policy: all, deliver_subject: d.group, deliver_group: g, deliver: last}
  last: {stream: S, filter: s.>, deliver: last_per_subject, ack_policy: none}
"""
NOT_AT_CREATION = {"sealed"}
"""The server refuses to make a sealed stream; a test of its own seals one."""


def platform(folder: Path, text: str) -> Platform:
    path = folder / "penstock.yaml"
    path.write_text(text)
    return load(path)


async def create(js: JetStream, declared: Platform) -> None:
    """Make everything the platform declares, plainly, in the order of the file."""
    for stream in declared.streams.values():
        await js.create_stream(stream.config)
    for consumer in declared.consumers.values():
        await js.create_consumer(consumer.stream, consumer.config)


async def clear(js: JetStream) -> None:
    for name in await js.stream_names():
        await js.delete_stream(name)


def kept(declared: Any, found: Any) -> bool:
    """Whether the server shows everything that was declared; what it adds does not count."""
    if isinstance(declared, dict):
        return all(not value or kept(value, (found or {}).get(key)) for key, value in declared.items())
    if isinstance(declared, list):
        return len(declared) == len(found) and all(kept(a, b) for a, b in zip(declared, found, strict=True))
    return bool(declared == found)


async def test_every_stream_field_reaches_the_server_and_comes_back(
    shared_server: EmbeddedServer, tmp_path: Path
) -> None:
    declared = platform(tmp_path, STREAMS)
    used: set[str] = set()
    async with connect(shared_server.settings) as broker:
        js = broker.jetstream
        await clear(js)
        for name, stream in declared.streams.items():
            shown = (await js.create_stream(stream.config)).config
            wrong = {k: (v, shown.get(k)) for k, v in stream.config.items() if v and not kept(v, shown.get(k))}
            assert not wrong, f"stream {name}: declared and shown differ: {wrong}"
            assert shown.keys() - {"name"} <= STREAM_BY_WIRE.keys(), "the server has a field that the table lacks"
            used |= stream.lines.keys()
    assert used == {field.key for field in STREAM_FIELDS if field.sent} - NOT_AT_CREATION


async def test_a_stream_can_be_sealed_by_an_update(shared_server: EmbeddedServer, tmp_path: Path) -> None:
    declared = platform(tmp_path, "streams: {SEAL: {sealed: true}}").streams["SEAL"].config
    async with connect(shared_server.settings) as broker:
        js = broker.jetstream
        await clear(js)
        with pytest.raises(errors.InvalidConfiguration):
            await js.create_stream(declared)
        await js.create_stream({"name": "SEAL"})
        assert (await js.update_stream("SEAL", {"sealed": declared["sealed"]})).config["sealed"] is True


async def test_every_consumer_field_reaches_the_server_and_comes_back(
    shared_server: EmbeddedServer, tmp_path: Path
) -> None:
    declared = platform(tmp_path, CONSUMERS)
    used: set[str] = set()
    async with connect(shared_server.settings) as broker:
        js = broker.jetstream
        await clear(js)
        await js.create_stream(declared.streams["S"].config)
        for name, consumer in declared.consumers.items():
            shown = (await js.create_consumer("S", consumer.config)).config
            wrong = {k: (v, shown.get(k)) for k, v in consumer.config.items() if v and not kept(v, shown.get(k))}
            assert not wrong, f"consumer {name}: declared and shown differ: {wrong}"
            assert shown.keys() - {"name", "durable_name"} <= CONSUMER_BY_WIRE.keys()
            used |= consumer.lines.keys()
    assert used - {"stream"} == {field.key for field in CONSUMER_FIELDS if field.sent}


@pytest.mark.parametrize("case", [case for case in CASES if case.refused], ids=str)
async def test_the_server_refuses_what_lint_says_it_refuses_and_takes_the_mended_one(
    case: LintCase, shared_server: EmbeddedServer, tmp_path: Path
) -> None:
    async with connect(shared_server.settings) as broker:
        js = broker.jetstream
        await clear(js)
        with pytest.raises(errors.ApiError) as refusal:
            await create(js, platform(tmp_path, case.broken))
        assert not refusal.value.retryable
        await clear(js)
        if case.code != "S06":  # its mended form needs three servers
            await create(js, platform(tmp_path, case.mended))
