"""`penstock import`: a server that another tool set up becomes a platform file, and plan has nothing to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.commands import here

from penstock.jetstream.api import JetStream
from penstock.server.embedded import EmbeddedServer
from penstock.wire import blocking

SECOND = 1_000_000_000
OPTIONS: list[dict[str, Any]] = [
    {},
    {"description": "für Leute"},
    {"retention": "workqueue"},
    {"retention": "interest"},
    {"storage": "memory"},
    {"max_age": 3600 * SECOND, "duplicate_window": 30 * SECOND},
    {"max_bytes": 10 * 2**20},
    {"max_msgs": 1000, "discard": "new"},
    {"max_msgs_per_subject": 5, "discard": "new", "discard_new_per_subject": True},
    {"max_msg_size": 1000},
    {"max_consumers": 7},
    {"compression": "s2"},
    {"first_seq": 100},
    {"subject_transform": {"src": "s13.*", "dest": "t.{{wildcard(1)}}"}},
    {"republish": {"src": "s14.>", "dest": "again.>", "headers_only": True}},
    {"no_ack": True},
    {"allow_direct": True, "mirror_direct": False},
    {"deny_delete": True, "deny_purge": True},
    {"allow_rollup_hdrs": True},
    {"allow_msg_ttl": True, "subject_delete_marker_ttl": 60 * SECOND, "allow_rollup_hdrs": True},
    {"allow_atomic": True, "allow_batched": True},
    {"allow_msg_counter": True},
    {"allow_msg_schedules": True, "allow_rollup_hdrs": True},
    {"consumer_limits": {"inactive_threshold": 600 * SECOND, "max_ack_pending": 50}},
    {"metadata": {"team": "a", "cost centre": "7"}},
    {"subjects": None, "mirror": {"name": "S00"}},
    {"subjects": None, "sources": [{"name": "S00", "filter_subject": "s0.a"}, {"name": "S01", "opt_start_seq": 3}]},
    {
        "subjects": None,
        "sources": [{"name": "S00", "subject_transforms": [{"src": "s0.*", "dest": "x.{{wildcard(1)}}"}]}],
    },
    {"persist_mode": "async"},
    {"sealed": False, "num_replicas": 1},
]
CONSUMERS: list[dict[str, Any]] = [
    {},
    {"filter_subject": "s0.a"},
    {"filter_subjects": ["s0.a", "s0.b"]},
    {"ack_wait": 5 * SECOND, "max_deliver": 4},
    {"max_deliver": 3, "backoff": [SECOND, 5 * SECOND]},
    {"deliver_policy": "new"},
    {"deliver_policy": "by_start_sequence", "opt_start_seq": 7},
    {"deliver_policy": "by_start_time", "opt_start_time": "2026-01-31T12:00:00Z"},
    {"deliver_policy": "last_per_subject", "filter_subject": "s0.>"},
    {"max_ack_pending": 5, "max_waiting": 3, "max_batch": 10, "max_expires": SECOND},
    {"inactive_threshold": 3600 * SECOND},
    {"headers_only": True, "sample_freq": "50%"},
    {"ack_policy": "none"},
    {"ack_policy": "all"},
    {"deliver_subject": "push.here", "flow_control": True, "idle_heartbeat": 5 * SECOND, "deliver_group": ""},
    {"deliver_subject": "push.group", "deliver_group": "g", "rate_limit_bps": 1000000},
    {"mem_storage": True, "description": "in memory", "metadata": {"a": "b"}},
    {"replay_policy": "original"},
]


@pytest.fixture
def server(nats_server: EmbeddedServer) -> EmbeddedServer:
    with blocking.connect(nats_server.settings) as connection:
        api = JetStream(connection.requester())
        for number, options in enumerate(OPTIONS):
            config = {"name": f"S{number:02}", "subjects": [f"s{number}.>"], **options}
            blocking.run(api.create_stream({key: value for key, value in config.items() if value is not None}))
        for number, options in enumerate(CONSUMERS):
            config = {"durable_name": f"c{number}", "ack_policy": "explicit", **options}
            blocking.run(api.create_consumer("S00", config))
        blocking.run(api.create_stream({"name": "KV_b", "subjects": ["$KV.b.>"], "max_msgs_per_subject": 1}))
    return nats_server


def test_plan_has_nothing_to_do_after_an_import(server: EmbeddedServer, tmp_path: Path) -> None:
    file = tmp_path / "penstock.yaml"
    done = here("import", file, "--servers", server.url, "--json")
    told = json.loads(done.stdout)
    assert told["left_out"] == ["stream KV_b: it belongs to a bucket; --buckets takes it in"], done.stderr
    assert (told["streams"], told["consumers"]) == (len(OPTIONS), len(CONSUMERS))
    planned = here("plan", file)
    assert planned.returncode == 0, planned.stdout
    written = yaml.safe_load(file.read_text())
    assert written["streams"]["S05"] == {"subjects": ["s5.>"], "max_age": "1h", "duplicate_window": "30s"}
    assert written["consumers"]["c4"]["backoff"] == ["1s", "5s"]


def test_a_file_is_not_written_over_and_a_server_can_be_left_as_it_is(server: EmbeddedServer, tmp_path: Path) -> None:
    file = tmp_path / "penstock.yaml"
    file.write_text("mine")
    assert here("import", file, "--servers", server.url).returncode == 64
    assert file.read_text() == "mine"
    assert here("import", file, "--servers", server.url, "--force", "--no-mark").returncode == 2
    planned = here("plan", file, "--json")
    changes = json.loads(planned.stdout)["changes"]
    assert {one["kind"] for one in changes if one["name"] != "BATCH_ADVISORIES"} == {"update"}
    assert len(changes) == len(OPTIONS) + len(CONSUMERS) + 1, "the marks of its owner, and what is kept beside it"
