"""Every field of the platform file, once: parsing, the reference page, and the sorting of changes read these tables.

The server's side is nats-server 2.15. A field that it does not know (`sent=False`) is Penstock's own.
"""

from __future__ import annotations

from penstock import packs
from penstock.topology.effects import (
    AT_CREATION,
    CAPTURES,
    CONTENT,
    DELIVERY,
    DISCARD,
    EXPIRY,
    FILTERS,
    IMMUTABLE,
    MIRROR,
    ONE_WAY,
    RECREATE,
    RETENTION,
    SEALS,
    SOURCES,
)
from penstock.topology.kinds import (
    Count,
    Deliver,
    Duration,
    Field,
    Flag,
    ListOf,
    Moment,
    Name,
    OneOf,
    Percent,
    RecordKind,
    ServerUrl,
    Size,
    Subject,
    Template,
    TextKind,
    TextMap,
    WordOr,
)
from penstock.topology.model import UNPACKED
from penstock.units import INT32

MAX_REPLICAS = 5
RESERVED = ("penstock.", "_nats.")
"""Names in metadata that Penstock and the server write."""
SECOND = 1_000_000_000

TRANSFORM = RecordKind(
    "a subject transform",
    (
        Field("from", Subject(), "Subjects it applies to; all when left out.", wire="src"),
        Field("to", Template(), "What the subject becomes.", wire="dest", required=True),
    ),
    "a-subject-transform",
)

REPUBLISH = RecordKind(
    "republish",
    (
        Field("from", Subject(), "Stored subjects that are published again; all when left out.", wire="src"),
        Field("to", Template(), "Where they are published.", wire="dest", required=True),
        Field("headers_only", Flag(), "Leave the body out.", default=False),
    ),
    "republish",
)

PLACEMENT = RecordKind(
    "placement",
    (
        Field("cluster", TextKind("the name of a cluster"), "Only servers of this cluster."),
        Field("tags", ListOf(TextKind("a server tag")), "Only servers with all of these tags."),
    ),
    "placement",
)

CONSUMER_LIMITS = RecordKind(
    "consumer limits",
    (
        Field("inactive_threshold", Duration(), "Most that a consumer of this stream may ask for; also the default."),
        Field("max_ack_pending", Count(), "Most that a consumer of this stream may ask for; also the default."),
    ),
    "consumer-limits",
)

EXTERNAL = RecordKind(
    "an external stream",
    (
        Field("api", Subject(literal=True), "API prefix of the other account or domain.", required=True),
        Field("deliver", Subject(literal=True), "Prefix of the subjects its messages arrive on."),
    ),
    "an-external-stream",
)

SOURCE_CONSUMER = RecordKind(
    "the consumer of a source",
    (
        Field("name", Name("consumer name"), "The durable consumer on the origin.", required=True),
        Field(
            "server_managed",
            Flag(),
            "Penstock makes and keeps that consumer, with the filter and start of this source. "
            "nats-server has no such field: it only ever sees the finished consumer.",
            default=False,
            sent=False,
        ),
        Field(
            "deliver_subject",
            Subject(literal=True),
            "Where the consumer delivers. Needed for a consumer of your own; chosen for you when server-managed.",
            since="2.14",
        ),
    ),
    "the-consumer-of-a-source",
)

SOURCE = RecordKind(
    "a source",
    (
        Field("name", Name("stream name"), "The origin stream.", required=True),
        Field("domain", Name("JetStream domain"), "JetStream domain of the origin: short for `external`.", sent=False),
        Field("external", EXTERNAL, "The origin lives in another account or domain."),
        Field("filter_subject", Subject(), "Only these subjects. Not with a consumer of your own."),
        Field("opt_start_seq", Count(1), "Begin at this sequence of the origin. Not with a consumer of your own."),
        Field("opt_start_time", Moment(), "Begin at this time. Not with a consumer of your own."),
        Field("subject_transforms", ListOf(TRANSFORM), "Filter and rename subjects on the way in."),
        Field(
            "consumer", SOURCE_CONSUMER, "Read through a durable consumer instead of an ephemeral one.", since="2.14"
        ),
    ),
    "a-source",
)

PACKING = WordOr(
    RecordKind(
        "packing",
        (
            Field(
                "kind",
                OneOf((UNPACKED, packs.ROWS, packs.TYPED)),
                "A message a row, packs of messages, or packs of events by their columns.",
                default=packs.ROWS,
            ),
            Field("rows", Count(1, packs.MAX_ROWS), "Rows of a pack, at most; 1,000 when left out."),
            Field(
                "bytes",
                Size(least=1),
                "Bytes of a pack before compression, at most; 256KiB, or what a message may have, when left out.",
            ),
            Field("codec", OneOf(packs.CODECS), "How a pack is compressed.", default=packs.NONE),
        ),
        "packing",
    )
)

STREAM_FIELDS: tuple[Field, ...] = (
    Field("subjects", ListOf(Subject()), "What the stream captures. Left out on a mirror.", change=CAPTURES),
    Field("description", TextKind(), "For people."),
    Field(
        "retention",
        OneOf(("limits", "interest", "workqueue"), {"work_queue": "workqueue"}),
        "When a message goes: by limits, when every consumer has acknowledged it, or when its one consumer has.",
        default="limits",
        change=RETENTION,
    ),
    Field("storage", OneOf(("file", "memory")), "Where messages live.", default="file", change=IMMUTABLE),
    Field("max_age", Duration(0, "100ms"), "Older messages are deleted.", default=0, change=CONTENT),
    Field(
        "max_bytes", Size(-1), "The stream's size limit; `discard` says what happens then.", default=-1, change=CONTENT
    ),
    Field("max_msgs", Count(1, None, -1), "Limit on the number of messages.", default=-1, change=CONTENT),
    Field(
        "max_msgs_per_subject", Count(1, None, -1), "Limit on the messages of one subject.", default=-1, change=CONTENT
    ),
    Field("max_msg_size", Size(-1, INT32), "Larger messages are refused.", default=-1),
    Field(
        "max_consumers",
        Count(1, None, -1),
        "Limit on the number of consumers; without one, a 2.15 server stops at 1,000.",
        default=-1,
    ),
    Field(
        "discard",
        OneOf(("old", "new")),
        "At a limit: delete the oldest, or refuse the new.",
        default="old",
        change=DISCARD,
    ),
    Field(
        "discard_new_per_subject",
        Flag(),
        "Refuse by subject. Needs `discard: new` and `max_msgs_per_subject`.",
        default=False,
    ),
    Field(
        "duplicate_window",
        Duration(None, "100ms"),
        "How long a `Nats-Msg-Id` is remembered. Two minutes, or `max_age` where that is shorter, when left out.",
        default=120 * SECOND,
    ),
    Field(
        "replicas",
        Count(1, MAX_REPLICAS),
        "Copies in the cluster. The environment's `replicas` when left out.",
        wire="num_replicas",
        default=1,
    ),
    Field("placement", PLACEMENT, "Which servers may hold it."),
    Field("mirror", SOURCE, "The stream is a copy of this one; it takes no subjects and no sources.", change=MIRROR),
    Field("sources", ListOf(SOURCE), "Streams whose messages flow into this one.", change=SOURCES),
    Field("compression", OneOf(("none", "s2")), "Compression on disk.", default="none"),
    Field("first_seq", Count(1), "Sequence of the first message; counts when the stream is made.", change=IMMUTABLE),
    Field("subject_transform", TRANSFORM, "Rename subjects before a message is stored."),
    Field("republish", REPUBLISH, "Publish every stored message again, elsewhere."),
    Field("no_ack", Flag(), "Publishers get no acknowledgement.", default=False),
    Field(
        "allow_rollup",
        Flag(),
        "Let a message with a `Nats-Rollup` header replace all before it.",
        wire="allow_rollup_hdrs",
        default=False,
    ),
    Field("allow_direct", Flag(), "Let any replica answer reads of single messages.", default=False),
    Field("mirror_direct", Flag(), "Let a mirror answer such reads for its origin.", default=False),
    Field("deny_delete", Flag(), "Refuse to delete messages through the API.", default=False, change=ONE_WAY),
    Field("deny_purge", Flag(), "Refuse to purge through the API.", default=False, change=ONE_WAY),
    Field(
        "sealed",
        Flag(),
        "No message is added or removed any more, for good. Not when the stream is made.",
        default=False,
        change=SEALS,
    ),
    Field(
        "allow_msg_ttl",
        Flag(),
        "Let a message carry its own time to live.",
        default=False,
        change=ONE_WAY,
        since="2.11",
    ),
    Field(
        "subject_delete_marker_ttl",
        Duration(None, "1s"),
        "Leave a marker for this long when a subject's last message goes.",
        since="2.11",
    ),
    Field("allow_atomic", Flag(), "Allow atomic batches of up to 1,000 messages.", default=False, since="2.12"),
    Field("allow_batched", Flag(), "Allow fast ingest.", default=False, since="2.14"),
    Field(
        "allow_msg_counter",
        Flag(),
        "Messages are counters that add up. Only with limits retention.",
        default=False,
        change=IMMUTABLE,
        since="2.12",
    ),
    Field(
        "allow_msg_schedules",
        Flag(),
        "Let a message be published later, by header.",
        default=False,
        change=ONE_WAY,
        since="2.12",
    ),
    Field(
        "persist_mode",
        OneOf(("default", "async")),
        "`async` acknowledges before the disk has it: a hard kill of the server loses messages.",
        default="default",
        change=IMMUTABLE,
        since="2.12",
    ),
    Field("consumer_limits", CONSUMER_LIMITS, "Limits and defaults for this stream's consumers."),
    Field(
        "packing",
        PACKING,
        "How pipelines write to it: a message a row, or [packs](packs.md) of many rows. A sink may say otherwise.",
        default=UNPACKED,
        sent=False,
    ),
    Field(
        "metadata",
        TextMap(RESERVED),
        "Names and texts kept with the stream. Names that start with `penstock.` are ours.",
    ),
    Field("owner", TextKind("a team"), "Who answers for it.", sent=False),
    Field("purpose", TextKind(), "What it is for.", sent=False),
    Field("ignore", TextMap(), "Lint codes that do not apply here, each with the reason.", sent=False),
)

SERVICE_FIELDS: tuple[Field, ...] = (
    Field("publishes", ListOf(Subject()), "Subjects that it publishes to; wildcards as in a filter."),
    Field("appends", ListOf(Subject()), "Subjects that it appends facts to, by `penstock append` or `replicate`."),
    Field("owner", TextKind("a team"), "Who answers for it."),
)

CONSUMER_FIELDS: tuple[Field, ...] = (
    Field("stream", Name("stream name"), "The stream it reads.", required=True, sent=False, change=RECREATE),
    Field("filter", Subject(), "Only messages of these subjects.", wire="filter_subject", change=FILTERS),
    Field(
        "filters",
        ListOf(Subject(), 1),
        "Several filters instead of one; they must not overlap.",
        wire="filter_subjects",
        change=FILTERS,
    ),
    Field("service", TextKind("a service"), "The program that reads through it; totals are counted by it.", sent=False),
    Field("owner", TextKind("a team"), "Who answers for it.", sent=False),
    Field("purpose", TextKind(), "What it is for.", sent=False),
    Field(
        "renamed_from",
        Name("consumer name"),
        "What it was called before: `apply` creates it at the ack floor of that one, and deletes that one. "
        "What was acknowledged above the floor is delivered again.",
        sent=False,
    ),
    Field(
        "reader",
        OneOf(("dedicated", "shared")),
        "For named readers (`penstock fetch`): a `dedicated` one has one open page at a time, so that facts never come "
        "out of order; instances of a `shared` one have a page each. Shared when left out.",
        sent=False,
    ),
    Field("description", TextKind(), "For people; the server keeps it."),
    Field("ack_wait", Duration(), "Not acknowledged for this long: delivered again.", default=30 * SECOND),
    Field(
        "max_deliver",
        Count(1, None, -1),
        "Deliveries before the server gives up. The message then belongs in the dead-letter queue.",
        default=-1,
    ),
    Field("backoff", ListOf(Duration()), "Waits between deliveries; the first replaces `ack_wait`."),
    Field(
        "dlq",
        Subject(literal=True),
        "Dead letters go here, by convention `dlq.<domain>.<event>`.",
        sent=False,
    ),
    Field(
        "deliver",
        Deliver(OneOf(("all", "last", "new", "last_per_subject"))),
        "Where it starts.",
        wire="deliver_policy",
        default="all",
        change=RECREATE,
        spread=True,
    ),
    Field(
        "ack_policy",
        OneOf(("explicit", "all", "none", "flow_control")),
        "How messages are acknowledged. Anything but explicit wants a `why`, or `all` a `reader: dedicated`.",
        default="explicit",
        change=RECREATE,
    ),
    Field("why", TextKind("a reason"), "Why this consumer is not a pull consumer with explicit acks.", sent=False),
    Field(
        "may_miss",
        Flag(),
        "It may lose messages that the stream discards before it has read them.",
        default=False,
        sent=False,
    ),
    Field(
        "replay",
        OneOf(("instant", "original")),
        "As fast as possible, or at the speed they came.",
        wire="replay_policy",
        default="instant",
        change=RECREATE,
    ),
    Field("max_ack_pending", Count(1, None, -1), "Delivered and not yet acknowledged, at most.", default=1000),
    Field("max_waiting", Count(1), "Pull requests that may wait.", default=512, change=RECREATE),
    Field("max_batch", Count(1), "Most messages a pull request may ask for."),
    Field("max_expires", Duration(None, "1ms"), "Longest a pull request may wait."),
    Field("max_bytes", Size(), "Most bytes a pull request may ask for."),
    Field("headers_only", Flag(), "Deliver headers and the size, not the body.", default=False),
    Field("sample_freq", Percent(), "Share of acknowledgements that raise a latency event."),
    Field(
        "inactive_threshold",
        Duration(),
        "Unused for this long: deleted. A durable lives on when left out.",
        change=EXPIRY,
    ),
    Field("replicas", Count(0, MAX_REPLICAS), "Copies; 0 means as many as the stream.", wire="num_replicas", default=0),
    Field("mem_storage", Flag(), "Keep its state in memory.", default=False, change=RECREATE),
    Field("pause_until", Moment(), "Deliver nothing until then.", change=AT_CREATION, since="2.11"),
    Field(
        "priority_policy",
        OneOf(("none", "overflow", "pinned_client", "prioritized")),
        "Which of several clients gets messages. `prioritized` needs 2.12.",
        default="none",
        since="2.11",
    ),
    Field(
        "priority_groups",
        ListOf(TextKind("a group name")),
        "Groups for the policy; needs `priority_policy`.",
        since="2.11",
    ),
    Field("priority_timeout", Duration(), "How long a silent pinned client keeps its pin.", since="2.11"),
    Field(
        "deliver_subject",
        Subject(literal=True),
        "Makes it a push consumer that delivers here. Wants a `why`.",
        change=DELIVERY,
    ),
    Field("deliver_group", TextKind("a queue group"), "Queue group of the push subscribers."),
    Field("flow_control", Flag(), "Push only: the server waits for the client.", default=False, change=RECREATE),
    Field("idle_heartbeat", Duration(None, "100ms"), "Push only: a sign of life when idle.", change=RECREATE),
    Field("rate_limit", Count(1), "Push only: bits per second.", wire="rate_limit_bps"),
    Field(
        "metadata",
        TextMap(RESERVED),
        "Names and texts kept with the consumer. Names that start with `penstock.` are ours.",
    ),
    Field(
        "asyncapi",
        TextKind("a channel such as `asyncapi.yaml#/channels/usage`"),
        "The AsyncAPI channel whose `x-nats-config` fills in what is left out here.",
        sent=False,
    ),
    Field("ignore", TextMap(), "Lint codes that do not apply here, each with the reason.", sent=False),
)

GROUP_FIELDS: tuple[Field, ...] = (
    Field("stream", Name("stream name"), "The stream whose partitions it shares among its workers.", required=True),
    Field(
        "partitions",
        ListOf(TextKind("a pattern such as `tele.{device}`, or subjects"), 1),
        "The partitions: a pattern whose named tokens say which one a subject belongs to, or a list of subjects, each "
        "a partition.",
        required=True,
    ),
    Field(
        "hashed",
        Count(1, 100_000),
        "A fixed number of partitions for any number of keys; `partitions` has `{partition}` in it then.",
    ),
    Field("service", TextKind("a service"), "The program whose workers they are."),
    Field("owner", TextKind("a team"), "Who answers for it."),
    Field("purpose", TextKind(), "What it is for."),
    Field("dlq", Subject(literal=True), "Dead letters go here, by convention `dlq.<domain>.<event>`."),
    Field("max_deliver", Count(1), "Tries of a message before it becomes a dead letter.", default=3),
    Field(
        "backoff",
        ListOf(Duration(None, "1ms"), 1),
        "Waits between tries; the last one repeats. 2s, 5s, 15s when left out.",
    ),
    Field("ack_wait", Duration(None, "1ms"), "Not answered for this long: delivered again.", default=30 * SECOND),
    Field("max_ack_pending", Count(1, INT32), "Delivered to a worker and not yet acknowledged, at most.", default=500),
    Field("start", OneOf(("all", "new")), "Where a partition begins that nobody ever handled.", default="all"),
    Field(
        "strategy",
        OneOf(("consistent_hash", "round_robin", "weighted")),
        "How partitions are shared.",
        default="consistent_hash",
    ),
    Field("ignore", TextMap(), "Lint codes that do not apply here, each with the reason."),
)

LOGIN_FIELDS: tuple[Field, ...] = (
    Field("credentials", TextKind("a path"), "A `.creds` file."),
    Field("user", TextKind(), "User name."),
    Field("password", TextKind(), "Password; write `${NAME}` and export it rather than keep it in a file."),
    Field("token", TextKind(), "Token; as for the password."),
    Field("tls_ca", TextKind("a path"), "CA of the servers' certificates."),
    Field("tls_cert", TextKind("a path"), "Client certificate; goes with `tls_key`."),
    Field("tls_key", TextKind("a path"), "Key of the client certificate."),
    Field("domain", Name("JetStream domain"), "JetStream domain of the streams."),
    Field("timeout", Duration(), "Deadline of one request."),
    Field("inbox_prefix", TextKind("the beginning of a subject"), "Where answers come to; `_INBOX` when left out."),
)
LOGIN_PATHS = ("credentials", "tls_ca", "tls_cert", "tls_key")
"""Login fields that are paths, relative to the platform file."""


class Overlay:
    """A part of the platform that an environment changes; it is read after it was laid over the rest."""

    def read(self, node: object, problems: object) -> None:
        return None

    def describe(self) -> str:
        return "fields that differ here, by name; `null` takes a field away"


ENVIRONMENT_FIELDS: tuple[Field, ...] = (
    Field("servers", ListOf(ServerUrl(), 1), "Server URLs."),
    Field("replicas", Count(1, MAX_REPLICAS), "Copies of every stream that does not say otherwise.", default=1),
    Field("nodes", Count(1), "Servers in the cluster; as many as `replicas` when left out."),
    *LOGIN_FIELDS,
    Field("variables", TextMap(), "Values for `${NAME}` anywhere in the file; then exported variables count."),
    Field("streams", Overlay(), "What is different about streams in this environment."),
    Field("consumers", Overlay(), "What is different about consumers in this environment."),
    Field("groups", Overlay(), "What is different about groups in this environment."),
    Field("pipelines", Overlay(), "What is different about pipelines in this environment."),
)

PIPELINE_SOURCE = RecordKind(
    "where a pipeline reads",
    (
        Field("stream", Name("stream name"), "The stream; or `streams`."),
        Field("streams", ListOf(TextKind("a stream name"), 1), "Several streams, or `*` for every declared one."),
        Field("subjects", ListOf(Subject()), "Filters; everything when left out."),
        Field("consumer", Name("consumer name"), "Durable consumer that holds the position, on each of the streams."),
        Field("start", TextKind("earliest, latest, consumer, a sequence or a time"), "Where the first run starts."),
        Field("max_rows", Count(1), "Most messages in one micro-batch."),
        Field("max_bytes", Size(), "Most bytes in one micro-batch."),
        Field("partitions", Count(1), "Tasks that read in parallel."),
        Field("fail_on_data_loss", Flag(), "Stop when messages went before they were read.", default=True),
        Field("keep_batches_whole", Flag(), "Never split an atomic batch between micro-batches.", default=False),
    ),
    "where-a-pipeline-reads",
)

PIPELINE_EVENT = RecordKind(
    "the events of a pipeline",
    (
        Field("format", OneOf(("json", "text", "binary", "avro", "protobuf")), "How the body is read.", default="json"),
        Field(
            "schema",
            TextKind("a Spark schema or a file"),
            "Columns of the event as Spark writes them (`NOT NULL`: required), or a file with them; "
            "for Avro an .avsc file, for Protobuf a descriptor set.",
        ),
        Field(
            "message", TextKind("a message name"), "The message of a Protobuf descriptor set, such as `billing.Usage`."
        ),
        Field("check", TextKind("a SQL condition"), "An event for which it is not true is a bad record."),
    ),
    "the-events-of-a-pipeline",
)

DEDUPE = RecordKind(
    "dedupe",
    (
        Field("key", TextKind("a column"), "Events with the same value are one event.", required=True),
        Field("within", Duration(), "How far apart they may come.", required=True),
    ),
    "dedupe",
)

PIPELINE_SINK = RecordKind(
    "where a pipeline writes",
    (
        Field("format", TextKind("a format"), "parquet, orc, json, csv, delta, iceberg or console; with `path`."),
        Field("path", TextKind("a path"), "Where the files go."),
        Field("stream", Name("stream name"), "Or a stream."),
        Field("subject", Subject(literal=True), "Subject of the messages written; else the rows' column `subject`."),
        Field("delivery", OneOf(("atomic", "fast")), "How a stream is written.", default="atomic"),
        Field("packing", PACKING, "Instead of what the stream says: messages, or packs with these bounds."),
        Field(
            "mode",
            OneOf(("append", "upsert")),
            "Files: add every row, or keep one row a key. An aggregation is upserted when left out.",
        ),
        Field(
            "key", ListOf(TextKind("a column")), "What names a row of an upsert; the columns grouped by when left out."
        ),
        Field("partition_by", ListOf(TextKind("a column")), "Columns that split the files into folders."),
        Field("options", TextMap(), "Further options for the writer."),
    ),
    "where-a-pipeline-writes",
)

TRIGGER = RecordKind(
    "trigger",
    (
        Field("available_now", Flag(), "Take what is there, then stop."),
        Field("every", Duration(), "Run again and again."),
    ),
    "trigger",
)

PIPELINE_FIELDS: tuple[Field, ...] = (
    Field("from", PIPELINE_SOURCE, "What it reads.", required=True),
    Field("event", PIPELINE_EVENT, "How a message becomes a row."),
    Field("dedupe", DEDUPE, "Take the same event once."),
    Field(
        "sql", TextKind("a Spark SQL query over `events`"), "What it computes; the events as they are when left out."
    ),
    Field("function", TextKind("module:function"), "Or a Python function from the events' DataFrame to the result's."),
    Field(
        "each_batch",
        TextKind("module:function"),
        "A Python function from the result of each micro-batch to what is written; batch operations are allowed.",
    ),
    Field("to", ListOf(PIPELINE_SINK, 1), "What it writes.", required=True),
    Field("bad_records", Subject(literal=True), "Where events go that cannot be read."),
    Field("trigger", TRIGGER, "When it runs; `{available_now: true}` when left out."),
    Field("checkpoint", TextKind("a path"), "Spark's checkpoint; `.penstock/checkpoints/<pipeline>` when left out."),
    Field("owner", TextKind("a team"), "Who answers for it."),
    Field("purpose", TextKind(), "What it is for."),
    Field("ignore", TextMap(), "Lint codes that do not apply here, each with the reason."),
)

STREAM_BY_WIRE = {field.name: field for field in STREAM_FIELDS if field.sent}
"""The server's name of a stream field to its row in the table."""
CONSUMER_BY_WIRE = {field.name: field for field in CONSUMER_FIELDS if field.sent} | {
    name: field for field in CONSUMER_FIELDS if field.spread for name in ("opt_start_seq", "opt_start_time")
}
"""The server's name of a consumer field to its row in the table."""
