"""Reading platform files: what they mean, and what is said about their mistakes."""

from __future__ import annotations

import pickle
import textwrap
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.topology.document import FileProblems
from penstock.topology.load import load
from penstock.topology.model import Platform

Load = Callable[..., Platform]
SECOND = 1_000_000_000


@pytest.fixture
def read(tmp_path: Path) -> Load:
    def write_and_load(text: str, env: str | None = None, **variables: str) -> Platform:
        path = tmp_path / "penstock.yaml"
        path.write_text(textwrap.dedent(text))
        return load(path, env, variables)

    return write_and_load


def said(read: Load, text: str, env: str | None = None) -> list[str]:
    """The problems of a file, as `line:column: message`."""
    with pytest.raises(FileProblems) as caught:
        read(text, env)
    return [f"{p.line}:{p.column}: {p.message}" for p in caught.value.problems]


def test_a_stream_is_in_the_servers_shape_and_holds_only_what_is_declared(read: Load) -> None:
    platform = read("""
        streams:
          S: {subjects: [s.>], max_age: 7d, max_bytes: 64MiB, retention: work-queue, replicas: 3, allow_rollup: true}
    """)
    assert platform.streams["S"].config == {
        "name": "S",
        "subjects": ["s.>"],
        "max_age": 7 * 86400 * SECOND,
        "max_bytes": 64 * 1024**2,
        "retention": "workqueue",
        "num_replicas": 3,
        "allow_rollup_hdrs": True,
    }


def test_a_consumer_is_pull_with_explicit_ack_unless_it_says_otherwise(read: Load) -> None:
    consumer = read("""
        streams: {S: {}}
        consumers:
          c: {stream: S, filter: S, ack_wait: 1m30s, backoff: [1s, 5s], max_deliver: unlimited, dlq: dlq.x, service: w}
    """).consumers["c"]
    assert consumer.config == {
        "durable_name": "c",
        "name": "c",
        "deliver_policy": "all",
        "ack_policy": "explicit",
        "filter_subject": "S",
        "ack_wait": 90 * SECOND,
        "backoff": [SECOND, 5 * SECOND],
        "max_deliver": -1,
    }
    assert (consumer.stream, consumer.dlq, consumer.service, consumer.line) == ("S", "dlq.x", "w", 4)
    assert not consumer.is_push


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("all", {"deliver_policy": "all"}),
        ("last_per_subject", {"deliver_policy": "last_per_subject"}),
        ("{start_sequence: 42}", {"deliver_policy": "by_start_sequence", "opt_start_seq": 42}),
        (
            "{start_time: 2026-01-31T12:00:00+01:00}",
            {"deliver_policy": "by_start_time", "opt_start_time": "2026-01-31T11:00:00Z"},
        ),
        ("{start_time: 2026-01-31}", {"deliver_policy": "by_start_time", "opt_start_time": "2026-01-31T00:00:00Z"}),
    ],
)
def test_deliver_says_where_a_consumer_starts(read: Load, written: str, expected: dict[str, object]) -> None:
    config = read(f"streams: {{S: {{}}}}\nconsumers: {{c: {{stream: S, deliver: {written}}}}}").consumers["c"].config
    assert {key: config[key] for key in config if key.startswith(("deliver", "opt"))} == expected


def test_an_environment_gives_its_replicas_and_lays_its_changes_over_the_rest(read: Load) -> None:
    text = """
        environments:
          dev: {servers: ["nats://localhost:4222"]}
          prod:
            servers: [nats://a:4222, nats://b:4222]
            replicas: 3
            timeout: 2s
            token: secret
            streams: {S: {max_bytes: 1GiB, max_age: null, placement: {tags: [ssd]}}}
            consumers: {c: {ack_wait: 1m}}
        streams: {S: {subjects: [s.>], max_age: 1d, max_bytes: 1MiB, placement: {cluster: east}}, T: {replicas: 1}}
        consumers: {c: {stream: S, ack_wait: 30s}}
    """
    dev, prod = read(text), read(text, "prod")
    assert dev.environment.name == "dev"
    assert dev.streams["S"].replicas == 1
    assert prod.streams["S"].config == {
        "name": "S",
        "subjects": ["s.>"],
        "max_bytes": 1024**3,
        "num_replicas": 3,
        "placement": {"cluster": "east", "tags": ["ssd"]},
    }
    assert prod.streams["T"].replicas == 1
    assert prod.consumers["c"].ack_wait == timedelta(minutes=1)
    assert prod.environment.settings_overrides() == {
        "servers": ("nats://a:4222", "nats://b:4222"),
        "timeout": 2.0,
        "token": "secret",
    }
    assert "secret" not in repr(prod)


def test_the_only_environment_or_dev_is_the_default(read: Load) -> None:
    assert read("environments: {stage: {}}\nstreams: {S: {}}").environment.name == "stage"
    assert read("environments: {stage: {}, dev: {}}\nstreams: {S: {}}").environment.name == "dev"
    assert read("streams: {S: {}}").environment.name == "default"
    assert "--env a or b" in said(read, "environments: {a: {}, b: {}}")[0]
    assert "did you mean 'prod'?" in said(read, "environments: {prod: {}, dev: {}}", "prd")[0]


def test_variables_come_from_the_environment_of_the_file_then_from_outside(read: Load) -> None:
    text = """
        environments:
          dev: {replicas: "${COPIES}", password: "${SECRET}", user: u, variables: {REGION: eu, COPIES: 1}}
          prod: {password: "${NOT_SET_HERE}", user: u, replicas: "${NOR_THIS}"}
        streams: {S: {subjects: ["${REGION}.>"], replicas: "${COPIES}", description: "costs $${5}"}}
    """
    platform = read(text, SECRET="s3", REGION="outside")
    assert platform.environment.password == "s3"
    assert platform.streams["S"].subjects == ("eu.>",)
    assert platform.streams["S"].replicas == 1
    assert platform.streams["S"].config["description"] == "costs ${5}"
    (problem,) = said(read, text)
    assert problem.startswith("3:42: the variable 'SECRET' is not set")


def test_anchors_and_merge_keys_work(read: Load) -> None:
    platform = read("""
        streams: {S: {}}
        consumers:
          a: &shared {stream: S, ack_wait: 30s, max_deliver: 5}
          b: {<<: *shared, max_deliver: 7}
    """)
    assert (platform.consumers["b"].max_deliver, platform.consumers["b"].ack_wait) == (7, timedelta(seconds=30))


def test_paths_of_a_login_are_relative_to_the_file(read: Load, tmp_path: Path) -> None:
    platform = read("environments: {dev: {credentials: keys/dev.creds}}\nstreams: {S: {}}")
    assert platform.environment.credentials == str(tmp_path / "keys/dev.creds")


# -- sources ---------------------------------------------------------------------------------------------------------


def test_a_server_managed_source_is_kept_in_the_model_and_out_of_the_wire_config(read: Load) -> None:
    stream = read("""
        streams:
          AGG:
            sources:
              - {name: ORDERS, domain: edge, filter_subject: orders.>, opt_start_seq: 5,
                 consumer: {name: agg-orders, server_managed: true}}
    """).streams["AGG"]
    plain = {"name": "ORDERS", "external": {"api": "$JS.edge.API", "deliver": ""}}
    assert stream.config["sources"] == [{**plain, "filter_subject": "orders.>", "opt_start_seq": 5}]
    source = stream.sources[0]
    assert source.server_managed
    assert source.is_external
    assert source.bound("deliver.here") == {
        **plain,
        "consumer": {"name": "agg-orders", "deliver_subject": "deliver.here"},
    }


def test_a_users_own_source_consumer_is_sent_as_it_is(read: Load) -> None:
    stream = read("""
        streams:
          ORDERS: {subjects: [orders.>]}
          COPY: {mirror: {name: ORDERS, consumer: {name: copy, deliver_subject: d.copy}}}
    """).streams["COPY"]
    assert stream.config["mirror"] == {"name": "ORDERS", "consumer": {"name": "copy", "deliver_subject": "d.copy"}}
    assert stream.subjects == ()


# -- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("streams: {S: {subjcts: [a]}}", "1:15: unknown key 'subjcts' in stream 'S'; did you mean 'subjects'?"),
        ("streams: {S: {num_replicas: 3}}", "1:15: unknown key 'num_replicas' in stream 'S'; did you mean 'replicas'?"),
        ("strems: {}", "1:1: unknown key 'strems' in the platform file; did you mean 'streams'?"),
        (
            "streams: {S: {placement: {cluser: a}}}",
            "1:27: unknown key 'cluser' in placement; did you mean 'cluster'?",
        ),
        ("streams: {S: {storage: flie}}", "1:24: expected file or memory, found 'flie'; did you mean 'file'?"),
        ("streams: {S: {no_ack: 7}}", "1:23: expected true or false, found '7'"),
        ("streams: {S: {max_msgs: many}}", "1:25: expected a whole number from 1, or unlimited, found 'many'"),
        ("streams: {S: {replicas: 6}}", "1:25: expected a whole number from 1 to 5, found 6"),
        ("streams: {S: {max_age: 10ms}}", "1:24: '10ms' is too short: the server takes 100ms or more"),
        ("streams: {S: [a]}", "1:14: expected stream 'S' as `name: value` pairs, found a list"),
        ("streams: [S]", "1:10: expected streams by name, found a list"),
        ("streams: {a.b: {}}", "1:11: 'a.b' cannot be a stream name: it contains '.'; use letters, digits, _ and -"),
        ("streams: {S: {mirror: {}}}", "1:23: a source needs 'name': stream name"),
        (
            "consumers: {c: {stream: S}}",
            "1:25: consumer 'c' reads stream 'S', which is not declared under streams",
        ),
        ("streams: {S: {subject_transform: {from: a}}}", "1:34: a subject transform needs 'to': a destination subject"),
        ("environments: {dev: {replcas: 1}}", "1:22: unknown key 'replcas' in environment 'dev'; did you mean"),
        (
            "environments: {dev: {streams: {T: {}}}}\nstreams: {S: {}}",
            "1:32: 'T' is not declared under streams, so there is nothing to change; known are S",
        ),
        (
            "streams: {S: {sources: [{name: O, consumer: {name: c}}]}}",
            "1:45: a source's own consumer needs a deliver_subject; or write `server_managed: true`",
        ),
        (
            "streams: {S: {mirror: {name: O}, subjects: [s]}}",
            "1:14: stream 'S' is a mirror: it takes no subjects and no sources",
        ),
        ("- a", "1:1: expected the sections"),
        ("streams: {S: {max_age: 999999999999d}}", "1:24: '999999999999d' is too long a time"),
        ("streams: {S: {max_age: 293w1000000d}}", "1:24: '293w1000000d' is too long a time"),
        ("streams: {S: {max_bytes: 9223372036854775808}}", "1:26: '9223372036854775808' is too large"),
        ("streams: {S: {max_bytes: 8388608TiB}}", "1:26: '8388608TiB' is too large"),
        (f"streams: {{S: {{max_bytes: '{'9' * 5000}'}}}}", f"1:26: '{'9' * 30}…' is too large"),
        ("streams: {S: {max_msg_size: 2GiB}}", "1:29: '2GiB' is too large"),
        (
            "streams: {S: {max_msgs: 9223372036854775808}}",
            "1:25: expected a whole number from 1, or unlimited, found 9",
        ),
        ("environments: {dev: {servers: ['::::']}}", "1:32: servers: '::::' is not a server URL"),
        ("streams: {S: {metadata: {penstock.platform: x}}}", "1:26: 'penstock.platform' is not yours"),
        ("streams: {S: {metadata: {_nats.level: x}}}", "1:26: '_nats.level' is not yours"),
    ],
)
def test_a_mistake_is_named_with_its_place_and_what_would_be_right(read: Load, text: str, expected: str) -> None:
    assert said(read, text)[0].startswith(expected)


def test_all_mistakes_are_reported_together_in_the_order_of_the_file(read: Load) -> None:
    problems = said(
        read,
        """\
        streams:
          S: {max_age: 7x, max_bytes: 64M}
        consumers:
          c: {stream: T, ack_wait: 30, filter: a..b}
        """,
    )
    assert [problem.split(":")[0] for problem in problems] == ["2", "2", "4", "4", "4"]
    assert "w, d, h, m, s, ms, us" in problems[0]
    assert "kB, MB" in problems[1]


def test_two_consumers_with_one_name_are_an_error_that_names_both_lines(read: Load) -> None:
    problems = said(read, "streams: {S: {}}\nconsumers:\n  c: {stream: S}\n  d: {stream: S}\n  c: {stream: S}\n")
    assert problems == ["5:3: 'c' is written twice: here and in line 3; keep one, or rename one"]


@pytest.mark.parametrize("text", ["a: [1, 2", "a: b: c", "a:\n\t- b", "a: *nobody", "a: \x00"])
def test_text_that_is_not_yaml_is_an_error_with_a_place(read: Load, text: str) -> None:
    (problem,) = said(read, text)
    assert "not valid YAML" in problem


def test_an_alias_that_contains_itself_is_an_error_and_no_endless_loop(read: Load) -> None:
    assert any("contains itself" in problem for problem in said(read, "streams: &a {S: *a}"))


@pytest.mark.parametrize("depth", [101, 2_000, 50_000])
@pytest.mark.parametrize("opening", ["[", "{a: ", "- "])
def test_deep_nesting_is_refused_before_anything_is_built(read: Load, opening: str, depth: int) -> None:
    assert "nested deeper than 100 levels" in said(read, opening * depth)[0]


def test_a_hundred_levels_are_still_read(read: Load) -> None:
    (problem,) = said(read, "[" * 100 + "]" * 100)
    assert "expected the sections" in problem


def test_aliases_that_multiply_are_refused(read: Load) -> None:
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    levels += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9)]
    (problem,) = said(read, "\n".join(levels))
    assert problem.startswith("6:"), "the level at which it is too much"
    assert "aliases stand for more than 500000 values" in problem


def test_an_environment_that_was_not_chosen_may_have_a_server_from_a_variable(read: Load) -> None:
    text = "environments: {dev: {}, prod: {servers: ['${NATS_URL}']}}\nstreams: {S: {}}"
    assert read(text).environment.servers == ()
    assert read(text, "prod", NATS_URL="nats://a:4222").environment.servers == ("nats://a:4222",)


def test_a_missing_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no file .*nothing\.yaml"):
        load(tmp_path / "nothing.yaml")


def test_problems_survive_pickling(read: Load) -> None:
    with pytest.raises(FileProblems) as caught:
        read("strems: {}")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize("text", ["", "name: shop", "environments: {dev: {}}", "streams: {}\nconsumers:\n"])
def test_a_file_that_declares_nothing_is_an_error(read: Load, text: str) -> None:
    assert said(read, text) == ["1:1: this file declares nothing: add streams, consumers, groups or pipelines"]


def test_no_platform_may_take_the_name_of_those_without_one(read: Load) -> None:
    (problem,) = said(read, "name: default\nstreams: {S: {}}")
    assert problem.startswith("1:7: 'default' is what every platform without a name is called")


@pytest.mark.parametrize(
    "value",
    ["!!timestamp x", "!!timestamp ''", "!!timestamp 2020-99-99", "!!binary '%%%'", "!!binary aGk=", "!!bool x",
     "!!int ''", "!!float ''", "!!int x", "!other x"],
)  # fmt: skip
def test_a_tag_that_does_not_fit_is_a_line_not_a_traceback(read: Load, value: str) -> None:
    with pytest.raises(FileProblems) as caught:
        read(f"streams:\n  A:\n    subjects: [a.>]\n    description: {value}\n")
    assert caught.value.problems[0].line == 4
