"""For every lint rule a platform that breaks it and the same one mended; the server tests use the broken ones too."""

from __future__ import annotations

from dataclasses import dataclass

DLQ = "  DLQ: {subjects: [dlq.>], max_age: 30d}\n"
LOCK = "version: 1\nstreams: [S]\nconsumers: {c: {streams: [S], filters: [s.a]}}\n"
CALM = "service: w, ack_wait: 30s"
"""What a consumer needs so that no other rule has something to say."""


@dataclass(frozen=True)
class LintCase:
    """A rule's code, what breaks it, what does not, and the line of the finding."""

    code: str
    broken: str
    mended: str
    line: int
    lock: str | None = None
    refused: bool = False
    """Whether the server itself refuses the broken one."""

    def __str__(self) -> str:
        return f"{self.code}:{self.line}"


def streams(*lines: str) -> str:
    return "streams:\n" + "".join(f"  {line}\n" for line in lines)


def consumers(stream: str, *lines: str) -> str:
    """A stream `S`, the dead letters, and consumers from line 5 on."""
    return f"streams:\n  S: {{{stream}}}\n{DLQ}consumers:\n" + "".join(f"  {line}\n" for line in lines)


S = "subjects: [s.>], max_age: 1d"
WQ = "subjects: [s.>], retention: workqueue"


def one(keys: str, stream: str = S) -> str:
    """A stream `S` with one consumer `c` in line 5."""
    return consumers(stream, f"c: {{stream: S, {CALM}{', ' if keys else ''}{keys}}}")


def group(keys: str) -> str:
    """A stream `S`, the dead letters, and a group `g` in line 5, with its keys from line 7 on."""
    lines = "".join(f"    {key}\n" for key in keys.split(", "))
    return f"streams:\n  S: {{{S}}}\n{DLQ}groups:\n  g:\n    stream: S\n{lines}"


def swap(text: str, old: str, new: str) -> str:
    assert old in text, f"{old!r} is not in the case"
    return text.replace(old, new)


def packs(keys: str, kind: str = "rows") -> str:
    """A stream `S` in line 2 that pipelines write packs to."""
    return streams(f"S: {{{S}, packing: {kind}{', ' if keys else ''}{keys}}}")


PACKED_OUT = "subjects: [out.>], max_age: 1d, allow_atomic: true, packing: rows"


def flow(keys: str, stream: str = S, other: str = "subjects: [out.>], max_age: 1d, allow_atomic: true") -> str:
    """Streams `S` and `OUT`, and a pipeline `p` in line 6."""
    return f"streams:\n  S: {{{stream}}}\n  OUT: {{{other}}}\n{DLQ}pipelines:\n  p: {{{keys}}}\n"


NAMED = "reader: shared, owner: t, purpose: p"
GRANT = "gateway:\n  identities:\n    e: {certificates: [x], consumers: [c]}\n"


def grant(subject: str) -> str:
    """A gateway with an identity in line 8, behind one consumer, that may append to the subject."""
    return GRANT.replace("consumers: [c]", f"subjects: ['{subject}']")


FLOW_CONTROL = (
    "ack_policy: flow_control, deliver_subject: d.c, flow_control: true, "
    "idle_heartbeat: 1s, max_ack_pending: 10, why: x"
)
ORIGIN = "ORIGIN: {subjects: [o.>], retention: interest}"
SINK = "to: {stream: OUT, subject: out.x}"

CASES = [
    # consumers
    LintCase("C01", one("ack_policy: none"), one("ack_policy: none, why: metrics only"), 5),
    LintCase("C02", one("deliver_subject: d.c"), one("deliver_subject: d.c, why: a browser"), 5),
    LintCase("C03", consumers(S, "c: {stream: S, service: w}"), one(""), 5),
    LintCase("C04", one("filter: t.a"), one("filter: s.a"), 5),
    LintCase(
        "C05",
        one("filters: [s.*, s.a], max_ack_pending: 9"),
        one("filters: [s.b, s.a], max_ack_pending: 9"),
        5,
        refused=True,
    ),
    LintCase("C06", one("filters: [s.a, s.b]"), one("filters: [s.a, s.b], max_ack_pending: 9"), 5),
    LintCase("C07", one("replicas: 3"), one("replicas: 1"), 5, refused=True),
    LintCase("C08", one("inactive_threshold: 1h"), one(""), 5),
    LintCase("C08", one("mem_storage: true"), one(""), 5),
    LintCase(
        "C09",
        one("max_ack_pending: 50", f"{S}, consumer_limits: {{max_ack_pending: 10}}"),
        one("max_ack_pending: 5", f"{S}, consumer_limits: {{max_ack_pending: 10}}"),
        5,
        refused=True,
    ),
    LintCase("C10", consumers(S, "c: {stream: S, ack_wait: 1s}"), one(""), 5),
    LintCase("C11", one("flow_control: true"), one(""), 5, refused=True),
    LintCase("C11", one("idle_heartbeat: 5s"), one(""), 5, refused=True),
    LintCase("C11", one("rate_limit: 1000"), one(""), 5, refused=True),
    LintCase("C11", one("deliver_subject: d.c, why: x, max_waiting: 5"), one("max_waiting: 5"), 5, refused=True),
    *(
        LintCase(
            "C12",
            consumers(S, f"c: {{stream: S, service: w, {keys}}}"),
            consumers(S, f"c: {{stream: S, service: w, {FLOW_CONTROL}}}"),
            5,
            refused=refused,
        )
        for refused, keys in (
            (False, swap(FLOW_CONTROL, "idle_heartbeat: 1s", "idle_heartbeat: 2s")),
            (False, swap(FLOW_CONTROL, "flow_control: true", "flow_control: false")),
            (True, swap(FLOW_CONTROL, "deliver_subject: d.c, flow_control: true, idle_heartbeat: 1s, ", "")),
            (True, swap(FLOW_CONTROL, "max_ack_pending: 10", "max_ack_pending: unlimited")),
            (True, f"{FLOW_CONTROL}, ack_wait: 30s"),
            (True, f"{FLOW_CONTROL}, backoff: [1s]"),
            (True, f"{FLOW_CONTROL}, max_deliver: 3, dlq: dlq.s.a"),
        )
    ),
    LintCase(
        "C13",
        one("ack_wait: 1s, backoff: [1s, 2s, 3s], max_deliver: 2, dlq: dlq.s.a").replace("ack_wait: 30s, ", ""),
        one("ack_wait: 1s, backoff: [1s, 2s], max_deliver: 2, dlq: dlq.s.a").replace("ack_wait: 30s, ", ""),
        5,
        refused=True,
    ),
    LintCase("C14", one("backoff: [1s, 2s]"), one("backoff: [30s, 40s]"), 5),
    LintCase("C15", one("deliver: last_per_subject"), one("deliver: last_per_subject, filter: s.>"), 5, refused=True),
    LintCase("C15", one("deliver: new", WQ), one("deliver: all", WQ), 5, refused=True),
    LintCase("C16", one("ack_policy: all, why: x", WQ), one("", WQ), 5, refused=True),
    LintCase(
        "C17",
        consumers(WQ, f"a: {{stream: S, {CALM}, filter: s.*}}", f"b: {{stream: S, {CALM}, filter: s.x}}"),
        consumers(WQ, f"a: {{stream: S, {CALM}, filter: s.y}}", f"b: {{stream: S, {CALM}, filter: s.x}}"),
        5,
        refused=True,
    ),
    LintCase(
        "C17",
        consumers(WQ, f"a: {{stream: S, {CALM}}}", f"b: {{stream: S, {CALM}, filter: s.x}}"),
        consumers(S, f"a: {{stream: S, {CALM}}}", f"b: {{stream: S, {CALM}, filter: s.x}}"),
        5,
        refused=True,
    ),
    LintCase(
        "C18", one("priority_policy: overflow"), one("priority_policy: overflow, priority_groups: [g]"), 5, refused=True
    ),
    LintCase(
        "C18", one("priority_groups: [g]"), one("priority_policy: overflow, priority_groups: [g]"), 5, refused=True
    ),
    # streams
    LintCase(
        "S01",
        streams("A: {subjects: [a.>], max_age: 1d}", "B: {subjects: [a.*.c], max_age: 1d}"),
        streams("A: {subjects: [a.>], max_age: 1d}", "B: {subjects: [b.*.c], max_age: 1d}"),
        3,
        refused=True,
    ),
    LintCase(
        "S02",
        streams("A: {subjects: [a.>, a.b], max_age: 1d}"),
        streams("A: {subjects: [a.>], max_age: 1d}"),
        2,
        refused=True,
    ),
    LintCase("S03", one("", f"{S}, max_bytes: 1MiB"), one("", f"{S}, max_bytes: 1MiB, discard: new"), 2),
    LintCase("S03", one("", f"{S}, max_msgs: 5"), one("may_miss: true", f"{S}, max_msgs: 5"), 2),
    LintCase(
        "S04",
        one("max_deliver: 10, dlq: dlq.s.a", "subjects: [s.>], max_age: 1m"),
        one("max_deliver: 2, dlq: dlq.s.a", "subjects: [s.>], max_age: 1m"),
        5,
    ),
    *(
        LintCase(
            "S05",
            streams(f"A: {{subjects: [a.>], max_age: 1d, {keys}}}"),
            streams("A: {subjects: [a.>], max_age: 1d}"),
            2,
            refused=True,
        )
        for keys in (
            "discard_new_per_subject: true",
            "duplicate_window: 2d",
            "deny_purge: true, allow_rollup: true",
            "allow_msg_counter: true, discard: new",
            "allow_msg_counter: true, allow_msg_ttl: true",
            "allow_msg_counter: true, retention: interest",
            "allow_msg_schedules: true, discard: new",
            "persist_mode: async, allow_atomic: true",
            "persist_mode: async, storage: memory",
        )
    ),
    LintCase(
        "S05",
        streams("A: {subjects: [$JS.API.>], max_age: 1d}"),
        streams("A: {subjects: [$JS.EVENT.>], max_age: 1d}"),
        2,
        refused=True,
    ),
    LintCase(
        "S05",
        streams("A: {max_age: 1d}", "M: {max_age: 1d, mirror: {name: A}, allow_atomic: true}"),
        streams("A: {max_age: 1d}", "M: {max_age: 1d, mirror: {name: A}}"),
        3,
        refused=True,
    ),
    LintCase(
        "S05",
        streams("A: {subjects: [a.>, a.>], max_age: 1d}"),
        streams("A: {subjects: [a.>], max_age: 1d}"),
        2,
        refused=True,
    ),
    LintCase(
        "S06",
        streams("A: {max_age: 1d, replicas: 3}"),
        "environments: {dev: {replicas: 1, nodes: 3}}\n" + streams("A: {max_age: 1d, replicas: 3}"),
        2,
        refused=True,
    ),
    LintCase(
        "S07",
        "environments: {dev: {nodes: 3}}\n" + streams("A: {max_age: 1d, replicas: 2}"),
        "environments: {dev: {nodes: 3}}\n" + streams("A: {max_age: 1d, replicas: 3}"),
        3,
    ),
    LintCase("S08", streams("A: {}"), streams("A: {max_bytes: 1MiB}"), 2),
    LintCase("S09", streams("A: {max_age: 1d, storage: memory}"), streams("A: {max_age: 1d}"), 2),
    LintCase("S09", streams("A: {max_age: 1d, persist_mode: async}"), streams("A: {max_age: 1d}"), 2),
    LintCase("S10", streams("A: {retention: interest}"), streams("A: {max_age: 1d}"), 2),
    # dead letters
    LintCase("D01", one("max_deliver: 5"), one("max_deliver: 5, dlq: dlq.s.a"), 5),
    LintCase(
        "D02",
        f"streams:\n  S: {{{S}}}\nconsumers:\n  c: {{stream: S, {CALM}, max_deliver: 5, dlq: dlq.s.a}}\n",
        one("max_deliver: 5, dlq: dlq.s.a"),
        4,
    ),
    LintCase(
        "D02",
        flow(f"from: {{stream: S}}, {SINK}, bad_records: bad.s"),
        flow(f"from: {{stream: S}}, {SINK}, bad_records: dlq.s.a"),
        6,
    ),
    LintCase("D03", one("max_deliver: 5, dlq: dlq.s"), one("max_deliver: 5, dlq: dlq.s.a"), 5),
    LintCase(
        "D09",
        swap(one("max_deliver: 5, dlq: letters.s.a"), "[dlq.>]", "[dlq.>, letters.>]"),
        one("max_deliver: 5, dlq: dlq.s.a"),
        5,
    ),
    LintCase(
        "D04",
        flow(
            "from: {stream: S}, to: {stream: OUT, subject: dlq.s.a}", other="subjects: [dlq.>], allow_atomic: true"
        ).replace(DLQ, ""),
        flow(f"from: {{stream: S}}, {SINK}").replace(DLQ, ""),
        5,
    ),
    LintCase(
        "D04",
        streams("A: {subjects: [a.>], max_age: 1d, republish: {to: dlq.a.>}}"),
        streams("A: {subjects: [a.>], max_age: 1d, republish: {to: b.a.>}}"),
        2,
    ),
    LintCase(
        "D04",
        streams("A: {subjects: [a.*], max_age: 1d, subject_transform: {from: a.*, to: 'dlq.{{wildcard(1)}}'}}"),
        streams("A: {subjects: [a.*], max_age: 1d, subject_transform: {from: a.*, to: 'b.{{wildcard(1)}}'}}"),
        2,
    ),
    LintCase(
        "D05", streams("A: {subjects: [a.>, dlq.>], max_age: 1d}"), streams("A: {subjects: [dlq.>], max_age: 1d}"), 2
    ),
    LintCase(
        "D06",
        consumers(S, f"c: {{stream: DLQ, {CALM}, max_deliver: 5, dlq: dlq.s.a}}"),
        consumers(S, f"c: {{stream: DLQ, {CALM}, filter: dlq.t.>, max_deliver: 5, dlq: dlq.s.a}}"),
        5,
    ),
    LintCase("D07", one("dlq: dlq.s.a"), one("dlq: dlq.s.a, max_deliver: 5"), 5),
    LintCase(
        "D08",
        consumers(S, f"c: {{stream: DLQ, {CALM}, max_deliver: 1}}"),
        consumers(S, f"c: {{stream: DLQ, {CALM}}}"),
        5,
    ),
    # sources and mirrors
    LintCase(
        "O01",
        streams(ORIGIN, "A: {max_age: 1d, sources: [{name: ORIGIN}]}"),
        streams(ORIGIN, "A: {max_age: 1d, sources: [{name: ORIGIN, consumer: {name: x, server_managed: true}}]}"),
        3,
    ),
    LintCase(
        "O02",
        streams(
            "A: {max_age: 1d, sources: [{name: B, domain: d, filter_subject: b.c, "
            "consumer: {name: x, deliver_subject: d.x}}]}"
        ),
        streams(
            "A: {max_age: 1d, sources: [{name: B, domain: d, filter_subject: b.c, "
            "consumer: {name: x, server_managed: true}}]}"
        ),
        2,
        refused=True,
    ),
    LintCase(
        "O03",
        consumers(
            S + "}\n  A: {max_age: 1d, sources: [{name: S, consumer: {name: c, deliver_subject: d.c}}]",
            f"c: {{stream: S, {CALM}}}",
        ),
        consumers(
            S + "}\n  A: {max_age: 1d, sources: [{name: S, consumer: {name: c, deliver_subject: d.c}}]",
            f"c: {{stream: S, service: w, {swap(FLOW_CONTROL, ', why: x', '')}}}",
        ),
        3,
    ),
    LintCase(
        "O03",
        streams(
            "O: {max_age: 1d}", "A: {max_age: 1d, sources: [{name: O, consumer: {name: c, deliver_subject: d.c}}]}"
        ),
        streams(
            "O: {max_age: 1d}", "A: {max_age: 1d, sources: [{name: O, consumer: {name: c, server_managed: true}}]}"
        ),
        3,
    ),
    LintCase(
        "O04",
        streams("A: {max_age: 1d, sources: [{name: NOBODY}]}"),
        streams("A: {max_age: 1d, sources: [{name: NOBODY, domain: hub}]}"),
        2,
    ),
    LintCase(
        "O05",
        streams("A: {max_age: 1d, mirror: {name: B}}", "B: {max_age: 1d, mirror: {name: A}}"),
        streams("A: {max_age: 1d}", "B: {max_age: 1d, mirror: {name: A}}"),
        2,
        refused=True,
    ),
    LintCase(
        "O06",
        streams(
            "A: {max_age: 1d, sources: [{name: B, domain: d, filter_subject: b.c, "
            "subject_transforms: [{from: b.d, to: e}]}]}"
        ),
        streams("A: {max_age: 1d, sources: [{name: B, domain: d, subject_transforms: [{from: b.d, to: e}]}]}"),
        2,
        refused=True,
    ),
    LintCase(
        "O07",
        streams(
            "O: {max_age: 1d}",
            "A: {max_age: 1d, sources: [{name: O, consumer: {name: x, server_managed: true}}]}",
            "B: {max_age: 1d, sources: [{name: O, consumer: {name: x, server_managed: true}}]}",
        ),
        streams(
            "O: {max_age: 1d}",
            "A: {max_age: 1d, sources: [{name: O, consumer: {name: x, server_managed: true}}]}",
            "B: {max_age: 1d, sources: [{name: O, consumer: {name: y, server_managed: true}}]}",
        ),
        3,
    ),
    LintCase(
        "O08",
        streams("A: {max_age: 1d, mirror: {name: B, domain: d}}"),
        streams("A: {max_age: 1d, mirror: {name: B, domain: d, consumer: {name: x, server_managed: true}}}"),
        2,
    ),
    LintCase(
        "O09",
        streams(
            "A: {max_age: 1d, sources: [{name: B, domain: d, opt_start_seq: 5, opt_start_time: 2030-01-01T00:00:00Z, "
            "consumer: {name: x, server_managed: true}}]}"
        ),
        streams(
            "A: {max_age: 1d, sources: [{name: B, domain: d, opt_start_seq: 5, "
            "consumer: {name: x, server_managed: true}}]}"
        ),
        2,
    ),
    LintCase(
        "O10",
        streams(
            "A: {subjects: [a.>], max_age: 1d, sources: [{name: B, domain: d, "
            "consumer: {name: x, deliver_subject: a.x}}]}"
        ),
        streams(
            "A: {subjects: [a.>], max_age: 1d, sources: [{name: B, domain: d, "
            "consumer: {name: x, deliver_subject: to.x}}]}"
        ),
        2,
    ),
    LintCase(
        "O12",
        streams(
            "A: {sources: [{name: B, domain: d, consumer: {name: x, deliver_subject: to.x}}, "
            "{name: B, domain: e, consumer: {name: x, deliver_subject: to.x}}]}"
        ),
        streams(
            "A: {sources: [{name: B, domain: d, consumer: {name: x, deliver_subject: to.x}}, "
            "{name: B, domain: e, consumer: {name: x, deliver_subject: to.y}}]}"
        ),
        2,
    ),
    LintCase(
        "O13",
        streams(
            "S: {subjects: [s.>], max_age: 1d}",
            "T: {subjects: [t.>], max_age: 1d}",
            "A: {max_age: 1d, duplicate_window: 2m, sources: [{name: S}, {name: T}]}",
        ),
        streams(
            "S: {subjects: [s.>], max_age: 1d}",
            "A: {max_age: 1d, duplicate_window: 2m, sources: [{name: S}]}",
        ),
        4,
    ),
    LintCase(
        "O11",
        streams("S: {subjects: [s.>], max_age: 1d}", "A: {max_age: 1d, mirror: {name: S, filter_subject: t.>}}"),
        streams("S: {subjects: [s.>], max_age: 1d}", "A: {max_age: 1d, mirror: {name: S, filter_subject: s.a}}"),
        3,
    ),
    # pipelines
    LintCase(
        "P01",
        flow(f"from: {{stream: S}}, {SINK}", other="subjects: [out.>], max_age: 1d"),
        flow(f"from: {{stream: S}}, {SINK}"),
        6,
    ),
    LintCase(
        "P01",
        flow("from: {stream: S}, to: {stream: OUT, subject: out.x, delivery: fast}"),
        flow(
            "from: {stream: S}, to: {stream: OUT, subject: out.x, delivery: fast}",
            other="subjects: [out.>], max_age: 1d, allow_batched: true",
        ),
        6,
    ),
    LintCase(
        "P02",
        flow("from: {stream: S}, to: {stream: OUT, subject: elsewhere.x}"),
        flow(f"from: {{stream: S}}, {SINK}"),
        6,
    ),
    LintCase(
        "P03",
        flow(f"from: {{stream: S, subjects: [t.x]}}, {SINK}"),
        flow(f"from: {{stream: S, subjects: [s.x]}}, {SINK}"),
        6,
    ),
    LintCase(
        "P04",
        flow("from: {stream: S}, to: {stream: S, subject: s.out}", f"{S}, allow_atomic: true"),
        flow("from: {stream: S, subjects: [s.in]}, to: {stream: S, subject: s.out}", f"{S}, allow_atomic: true"),
        6,
    ),
    LintCase("P05", flow(f"from: {{stream: S}}, {SINK}", WQ), flow(f"from: {{stream: S, consumer: p}}, {SINK}", WQ), 6),
    # packs
    LintCase("K01", packs("max_msgs_per_subject: 1"), packs("max_msgs_per_subject: 9"), 2),
    LintCase(
        "K01",
        packs("") + "  T: {sources: [{name: S}], max_msgs_per_subject: 1}\n",
        packs("", "none") + "  T: {sources: [{name: S}], max_msgs_per_subject: 1}\n",
        3,
    ),
    LintCase("K02", packs("allow_msg_ttl: true"), packs("allow_msg_ttl: true", "none"), 2),
    LintCase("K02", packs("allow_msg_ttl: true", "{kind: typed, rows: 9}"), packs("allow_msg_ttl: false"), 2),
    LintCase(
        "K03",
        flow(f"from: {{stream: S}}, sql: 'SELECT id AS message_id, data FROM events', {SINK}", other=PACKED_OUT),
        flow(f"from: {{stream: S}}, sql: 'SELECT id AS message_ids, data FROM events', {SINK}", other=PACKED_OUT),
        6,
    ),
    LintCase(
        "K03",
        flow(
            "from: {stream: S}, sql: 'SELECT Message_Id FROM events', to: {stream: OUT, subject: out.x, packing: rows}"
        ),
        flow(
            "from: {stream: S}, sql: 'SELECT Message_Id FROM events', to: {stream: OUT, subject: out.x, packing: none}",
            other=PACKED_OUT,
        ),
        6,
    ),
    LintCase("K04", packs("duplicate_window: 1h"), packs(""), 2),
    LintCase("K05", one("", f"{WQ}, packing: rows"), one("", f"{S}, packing: rows"), 5),
    LintCase("K05", one("", "subjects: [s.>], retention: interest, packing: rows"), one("", WQ), 5),
    LintCase("K05", swap(group("partitions: 's.{id}'"), S, f"{WQ}, packing: rows"), group("partitions: 's.{id}'"), 6),
    LintCase(
        "K05",
        one("", f"{WQ}, packing: rows"),
        one("", f"{WQ}, packing: rows")
        + "pipelines: {p: {from: {stream: S, consumer: c}, to: {format: parquet, path: x}}}\n",
        5,
    ),
    LintCase("K06", one("deliver: last", f"{S}, packing: rows"), one("deliver: last"), 5),
    LintCase(
        "K06",
        one("deliver: last_per_subject, filter: s.a", f"{S}, packing: rows"),
        one("deliver: new, filter: s.a", f"{S}, packing: rows"),
        5,
    ),
    LintCase("K07", one("headers_only: true", f"{S}, packing: rows"), one("headers_only: true"), 5),
    LintCase(
        "K08",
        flow(f"from: {{stream: S}}, {SINK}", other=swap(PACKED_OUT, "rows", "typed")),
        flow(f"from: {{stream: S}}, event: {{schema: id string}}, {SINK}", other=swap(PACKED_OUT, "rows", "typed")),
        6,
    ),
    LintCase(
        "K08",
        flow(f"from: {{stream: S}}, {SINK}", other=swap(PACKED_OUT, "rows", "{bytes: 1MiB}, max_msg_size: 64KiB")),
        flow(f"from: {{stream: S}}, {SINK}", other=swap(PACKED_OUT, "rows", "{bytes: 64KiB}, max_msg_size: 64KiB")),
        6,
    ),
    LintCase(
        "K09",
        packs("") + "  T: {mirror: {name: S}, packing: rows}\n",
        packs("") + "  T: {mirror: {name: S}}\n",
        3,
    ),
    LintCase("K09", swap(packs(""), "s.>", "dlq.s.>"), swap(packs("", "none"), "s.>", "dlq.s.>"), 2),
    # named readers
    LintCase("R01", one("reader: shared, owner: t"), one("reader: shared, owner: t, purpose: p"), 5),
    LintCase("R01", one("") + GRANT, one("owner: t, purpose: p") + GRANT, 5),
    LintCase("R02", one(f"{NAMED}, max_deliver: 5, dlq: dlq.s.a"), one(NAMED), 5),
    LintCase("R03", one(NAMED) + grant("t.x"), one(NAMED) + grant("s.x"), 8),
    LintCase("R03", one(NAMED, "subjects: [s.a], max_age: 1d") + grant("s.a"), one(NAMED) + grant("s.>"), 8),
    # names
    LintCase("N01", one("filter: s.a").replace("  c:", "  renamed:"), one("filter: s.a"), 5, LOCK),
    LintCase(
        "N08",
        one("").rstrip() + "\n  d: {stream: S, renamed_from: c}\n",
        one("").rstrip() + "\n  d: {stream: S, renamed_from: b}\n",
        6,
    ),
    LintCase("N02", f"streams:\n  S: {{{S}}}\n", one("filter: s.a"), 1, LOCK),
    LintCase("N03", one("filter: s.a").replace("stream: S", "stream: DLQ"), one("filter: s.a"), 5, LOCK),
    LintCase("N04", f"streams:\n{DLQ}", one("filter: s.a"), 1, LOCK),
    LintCase(
        "N05", one("filter: s.a"), consumers(S, f"c: {{stream: S, {CALM}, filter: s.a}}").replace(DLQ, ""), 1, LOCK
    ),
    LintCase(
        "N06",
        one("").rstrip() + "\npipelines:\n  p: {from: {stream: S, consumer: c}, to: {format: parquet, path: x}}\n",
        one("").rstrip() + "\npipelines:\n  p: {from: {stream: S, consumer: p}, to: {format: parquet, path: x}}\n",
        7,
    ),
    LintCase("G01", group("partitions: t.{x}, dlq: dlq.s.a"), group("partitions: s.{x}, dlq: dlq.s.a"), 7),
    LintCase("G02", group("partitions: s.{x}"), group("partitions: s.{x}, dlq: dlq.s.a"), 5),
    LintCase(
        "G03",
        group("partitions: s.{x}, dlq: dlq.s.a") + f"consumers:\n  g-1: {{stream: S, {CALM}, filter: s.a}}\n",
        group("partitions: s.{x}, dlq: dlq.s.a") + f"consumers:\n  h-1: {{stream: S, {CALM}, filter: s.a}}\n",
        10,
    ),
    LintCase("D02", group("partitions: s.{x}, dlq: dead.s.a"), group("partitions: s.{x}, dlq: dlq.s.a"), 8),
    LintCase(
        "N07",
        consumers(
            S + "}\n  A: {max_age: 1d, sources: [{name: S, consumer: {name: c, server_managed: true}}]",
            f"c: {{stream: S, service: w, {FLOW_CONTROL}}}",
        ),
        consumers(
            S + "}\n  A: {max_age: 1d, sources: [{name: S, consumer: {name: other, server_managed: true}}]",
            f"c: {{stream: S, service: w, {FLOW_CONTROL}}}",
        ),
        6,
    ),
]
