"""Everything that durable sourcing forbids is refused before a server is asked, with the rule in words."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.topology.lint_cases import FLOW_CONTROL, consumers, streams, swap

from penstock.errors import ConfigError
from penstock.topology.lint import LintErrors, require_sound
from penstock.topology.load import load

OWN = "consumer: {name: c, deliver_subject: d.c}"
PLAIN = "subjects: [s.>], max_age: 1d"


def sourced(keys: str) -> list[str]:
    """A platform with a source that has these keys, and one with a mirror that has."""
    source = f"{{name: B, domain: d, {keys}}}"
    return [streams(f"A: {{max_age: 1d, sources: [{source}]}}"), streams(f"A: {{max_age: 1d, mirror: {source}}}")]


def read_through(keys: str, stream: str = PLAIN) -> list[str]:
    """A source, and a mirror, that read through consumer `c` with these keys."""
    made = []
    for origin in (f"sources: [{{name: S, {OWN}}}]", f"mirror: {{name: S, {OWN}}}"):
        made.append(consumers(f"{stream}}}\n  A: {{max_age: 1d, {origin}", f"c: {{stream: S, service: w, {keys}}}"))
    return made


def without(part: str) -> str:
    return swap(FLOW_CONTROL, part, "")


FORBIDDEN: dict[str, tuple[list[str], str]] = {
    "a start sequence beside a consumer of one's own": (sourced(f"opt_start_seq: 5, {OWN}"), "move it to the consumer"),
    "a start time beside it": (sourced(f"opt_start_time: 2030-01-01T00:00:00Z, {OWN}"), "move it to the consumer"),
    "a filter beside it": (sourced(f"filter_subject: b.c, {OWN}"), "move it to the consumer"),
    "a consumer without a name": (sourced("consumer: {deliver_subject: d.c}"), "name"),
    "a consumer of one's own without a deliver subject": (sourced("consumer: {name: c}"), "needs a deliver_subject"),
    "a deliver subject with wildcards": (sourced("consumer: {name: c, deliver_subject: d.*}"), "without `*`"),
    "a name that no consumer can have": (sourced("consumer: {name: a.b, server_managed: true}"), "consumer name"),
    "another ack policy": (read_through("ack_wait: 30s, deliver_subject: d.c, why: x"), "not flow_control"),
    "a pull consumer": (
        read_through(without("deliver_subject: d.c, flow_control: true, idle_heartbeat: 1s, ")),
        "push consumers only",
    ),
    "another deliver subject": (read_through(swap(FLOW_CONTROL, "d.c", "d.other")), "deliver_subject is another"),
    "no flow control": (read_through(swap(FLOW_CONTROL, "flow_control: true", "flow_control: false")), "always has"),
    "another heartbeat": (read_through(swap(FLOW_CONTROL, "idle_heartbeat: 1s", "idle_heartbeat: 5s")), "1s"),
    "an ack wait": (read_through(f"{FLOW_CONTROL}, ack_wait: 30s"), "cannot have ack_wait"),
    "a backoff": (read_through(f"{FLOW_CONTROL}, backoff: [1s]"), "cannot have backoff"),
    "a most number of deliveries": (read_through(f"{FLOW_CONTROL}, max_deliver: 3, dlq: dlq.a"), "max_deliver"),
    "any number on their way": (
        read_through(swap(FLOW_CONTROL, "max_ack_pending: 10", "max_ack_pending: unlimited")),
        "limited max_ack_pending",
    ),
    "a queue group": (read_through(f"{FLOW_CONTROL}, deliver_group: g"), "queue group"),
    "headers alone": (read_through(f"{FLOW_CONTROL}, headers_only: true"), "no data"),
    "one consumer for two sources": (
        [
            streams(
                f"A: {{max_age: 1d, sources: [{{name: B, domain: d, {OWN}}}]}}",
                f"C: {{max_age: 1d, sources: [{{name: B, domain: d, {OWN}}}]}}",
            )
        ],
        "more than one source",
    ),
    "an ephemeral reader of a workqueue": (
        [streams("O: {subjects: [o.>], retention: workqueue}", "A: {max_age: 1d, sources: [{name: O}]}")],
        "without a durable",
    ),
    "an ephemeral reader of an interest stream": (
        [streams("O: {subjects: [o.>], retention: interest}", "A: {max_age: 1d, mirror: {name: O}}")],
        "without a durable",
    ),
    "a second reader of a workqueue's messages": (
        [
            consumers(
                "subjects: [s.>], retention: workqueue}\n  A: {max_age: 1d, sources: "
                "[{name: S, consumer: {name: x, server_managed: true}}]",
                "c: {stream: S, service: w, ack_wait: 30s, filter: s.a}",
            )
        ],
        "overlap",
    ),
    "a sequence and a time to start at": (
        sourced("opt_start_seq: 5, opt_start_time: 2030-01-01T00:00:00Z, consumer: {name: c, server_managed: true}"),
        "keep one of them",
    ),
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_what_durable_sourcing_forbids_is_refused_with_the_rule_in_words(what: str, tmp_path: Path) -> None:
    texts, words = FORBIDDEN[what]
    for text in texts:
        path = tmp_path / "penstock.yaml"
        path.write_text(text)
        with pytest.raises(ConfigError) as refused:
            require_sound(load(path))
        errors = refused.value
        said = (
            " ".join(f"{one.message}; {one.fix}" for one in errors.findings)
            if isinstance(errors, LintErrors)
            else str(errors)
        )
        assert words in said, said


@pytest.mark.parametrize(
    "text",
    [
        *read_through(without(", why: x")),
        *sourced("filter_subject: b.c, opt_start_seq: 5, consumer: {name: c, server_managed: true}"),
        *sourced(OWN),
    ],
)
def test_what_it_allows_is_not_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "penstock.yaml"
    path.write_text(text)
    require_sound(load(path))
