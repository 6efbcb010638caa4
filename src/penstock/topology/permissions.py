"""What each component of a platform must be allowed on the server, and no more. Pure.

A component is what logs in as one user: a service with its consumers and what it writes, a pipeline, the gateway, who
deals with dead letters, a worker group that belongs to no service; and a group that the platform file does not declare,
or a bridge, that the caller names. Each hears answers below an inbox of its own (`inbox_prefix`), so that it cannot
hear those to others.

A service that stores results once may not remove their markers, since who may purge a part of a stream may purge all of
it: they stay until the stream's own limits remove them.

Two things cannot be made narrower on a NATS server. `STREAM.MSG.GET` and `DIRECT.GET` name what to read in the body, so
who may use them for a stream may read all of it. The names of a group's consumers, and of those that a Spark task or a
list of dead letters reads through, are chosen while it runs, so these may create and delete any consumer of the stream.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from penstock.errors import ConfigError
from penstock.jetstream import kv
from penstock.jetstream.model import Json
from penstock.subjects import DLQ_AUDIT, ONE, REST, any_overlap, api_prefix, covered
from penstock.topology.model import ConsumerSpec, GroupSpec, PipelineSpec, Platform, ServiceSpec, StreamSpec

ADVISORIES = "DLQ_ADVISORIES"
CAPTURE = "dlq_capture"
HISTORY, HISTORY_SUBJECT = "PENSTOCK_HISTORY", "penstock.history"
AUDIT = "DLQ_AUDIT"
AUDIT_SUBJECTS = f"{DLQ_AUDIT}.>"
FACTS = "penstock_facts"
LEDGER = "penstock_ledger"
PROGRESS = "penstock_pipelines"
BRIDGE_SUBJECTS = "penstock.bridge"
MARKERS = "penstock.done"


@dataclass(frozen=True, slots=True)
class Permissions:
    """The subjects that one user may publish to and subscribe to."""

    user: str
    kind: str
    """What it is: service, pipeline, gateway, dead letters, group or bridge."""
    publish: tuple[str, ...]
    subscribe: tuple[str, ...]

    @property
    def inbox_prefix(self) -> str:
        """What its `inbox_prefix` setting must be."""
        return inbox_of(self.user)

    def to_json(self) -> Json:
        allowed = {"publish": {"allow": list(self.publish)}, "subscribe": {"allow": list(self.subscribe)}}
        return {"user": self.user, "kind": self.kind, "inbox_prefix": self.inbox_prefix, "permissions": allowed}

    def to_user(self, password: str | None = None) -> Json:
        """An entry of `authorization.users` in a server's configuration."""
        login = {"user": self.user} | ({"password": password} if password else {})
        return {**login, "permissions": self.to_json()["permissions"]}

    def to_claims(self) -> Json:
        """The claims of a user's JWT; issuer, subject and dates come from who signs it."""
        allowed = {"pub": {"allow": list(self.publish)}, "sub": {"allow": list(self.subscribe)}}
        return {"name": self.user, "nats": {**allowed, "subs": -1, "data": -1, "payload": -1, "type": "user",
                                            "version": 2}}  # fmt: skip


@dataclass(slots=True)
class _Needs:
    """What a component needs, while it is found out."""

    domain: str | None
    """Of JetStream, that it names in its requests."""
    publish: set[str] = field(default_factory=set)
    subscribe: set[str] = field(default_factory=set)

    def api(self, *verbs: str) -> None:
        """A server of another domain checks a request as it is sent, one of that domain maps it to its own before."""
        self.publish |= {f"{api_prefix(domain)}.{verb}" for verb in verbs for domain in {None, self.domain}}

    def read_through(self, stream: str, consumer: str) -> None:
        """Pull from a consumer, and answer what it delivers."""
        self.api(f"CONSUMER.INFO.{stream}.{consumer}", f"CONSUMER.MSG.NEXT.{stream}.{consumer}")
        self.publish.add(f"$JS.ACK.{stream}.{consumer}.>")

    def bucket(self, name: str) -> None:
        """Read and write a KV bucket, and create it where it is missing."""
        stream = kv.stream_of(name)
        self.api(f"STREAM.INFO.{stream}", f"STREAM.CREATE.{stream}", f"STREAM.MSG.GET.{stream}")
        self.entry(name, ">")

    def entry(self, bucket: str, key: str) -> None:
        """Write a key of a KV bucket; the bucket of another domain is reached through the API of that domain."""
        self.publish |= {kv.write_prefix(bucket, domain) + key for domain in {None, self.domain}}

    def read_ranges(self, stream: StreamSpec) -> None:
        """Read any part of a stream, without a trace where consumers decide what it keeps."""
        self.api(f"STREAM.INFO.{stream.name}", f"STREAM.MSG.GET.{stream.name}")
        self.api(*(_passing_consumers(stream.name) if stream.retention == "limits" else [f"DIRECT.GET.{stream.name}"]))

    def read_pages(self, stream: str, consumer: str, dedicated: bool) -> None:
        """Read through a consumer by pages with receipts. The bucket and its key are there: `penstock rotate-key`."""
        self.read_through(stream, consumer)
        if dedicated:  # it resets its consumer to get in order what was not confirmed, if the server can do that
            self.api("INFO", f"CONSUMER.RESET.{stream}.{consumer}")
        self.api(f"STREAM.MSG.GET.KV_{FACTS}")
        self.entry(FACTS, f"book.{stream}.{consumer}")

    def bury(self, dlq: str) -> None:
        """Store dead letters, unless the audit says that they are dealt with."""
        self.publish.add(f"{dlq}.>")
        self.api(f"STREAM.MSG.GET.{AUDIT}")

    def made(self, user: str, kind: str) -> Permissions:
        return Permissions(user, kind, _widest(self.publish), _widest({*self.subscribe, f"{inbox_of(user)}.>"}))


def _widest(subjects: set[str]) -> tuple[str, ...]:
    """Without what another of them covers."""
    return tuple(sorted(one for one in subjects if not covered(one, subjects - {one})))


def inbox_of(user: str) -> str:
    return f"_INBOX_{user}"


def user_of(name: str) -> str:
    """The name of a component as the name of a user: `ops / replay tooling` is `ops-replay-tooling`."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-") or "user"


def permissions(platform: Platform, domain: str | None = None) -> list[Permissions]:
    """Those of every service, every group that belongs to none, every pipeline, the gateway, the pages, and who deals
    with dead letters, as the file declares.

    `domain` is the one that components name in their settings.
    """
    found = [
        *_services(platform, domain),
        *(
            of_group(platform, one.name, one.stream, one.dlq, domain)
            for one in platform.groups.values()
            if not one.service
        ),
        *_pipelines(platform, domain),
        *_gateway(platform, domain),
        *_dead_letters(platform, domain),
        _pages(platform, domain),
    ]
    taken: dict[str, Permissions] = {}
    for one in found:
        if one.user in taken:
            raise ConfigError(
                f"{platform.path}: {taken[one.user].kind} and {one.kind} would both be user {one.user!r}; rename one"
            )
        taken[one.user] = one
    return found


def _services(platform: Platform, domain: str | None) -> Iterator[Permissions]:
    reads: dict[str, list[ConsumerSpec | GroupSpec]] = {}
    for one in platform.handled:
        if one.service:
            reads.setdefault(one.service, []).append(one)
    for service in dict.fromkeys([*reads, *platform.services]):
        needs = _Needs(domain)
        for one in reads.get(service, ()):
            if isinstance(one, GroupSpec):
                _take_part(needs, platform, one.name, one.stream, one.dlq)
            else:
                _read_consumer(needs, one)
        if writer := platform.services.get(service):
            _write(needs, platform, writer)
        yield needs.made(user_of(service), "service")


def _write(needs: _Needs, platform: Platform, service: ServiceSpec) -> None:
    """Publish, in batches where a stream takes them, and append facts, which are looked at before and after."""
    for subject in service.publishes:
        needs.publish |= set(_granted(platform, subject))
        for stream in _takers(platform, subject):
            if stream.config.get("allow_atomic") or stream.config.get("allow_batched"):
                needs.api("STREAM.NAMES", f"STREAM.INFO.{stream.name}")
            if (markers := f"{MARKERS}.{stream.name}.>") in stream.subjects:  # results of handlers, once
                needs.publish.add(markers)
                needs.api(f"STREAM.MSG.GET.{stream.name}")
    for subject in service.appends:
        _append(needs, platform, subject)


def _append(needs: _Needs, platform: Platform, subject: str) -> None:
    needs.publish |= set(_granted(platform, _with_id(subject)))
    needs.api(*(f"STREAM.MSG.GET.{stream.name}" for stream in _takers(platform, _with_id(subject))))


def _read_consumer(needs: _Needs, consumer: ConsumerSpec) -> None:
    """As a named reader with pages and receipts, or as a plain pull consumer; a push consumer delivers by itself."""
    if consumer.is_push:
        needs.api(f"CONSUMER.INFO.{consumer.stream}.{consumer.name}")
        needs.publish.add(f"$JS.ACK.{consumer.stream}.{consumer.name}.>")
        needs.subscribe.add(str(consumer.config["deliver_subject"]))
    else:
        needs.read_pages(consumer.stream, consumer.name, consumer.is_dedicated)
        needs.api(f"STREAM.INFO.{consumer.stream}")  # an app asks which stream of that name it is
    if consumer.dlq:
        needs.bury(consumer.dlq)


def _pipelines(platform: Platform, domain: str | None) -> Iterator[Permissions]:
    for spec in platform.pipelines.values():
        needs = _Needs(domain)
        for stream in platform.streams_read_by(spec):
            _read_with_spark(needs, platform.streams[stream], spec)
        _write_with_spark(needs, platform, spec)
        needs.api(f"STREAM.INFO.KV_{PROGRESS}", f"STREAM.CREATE.KV_{PROGRESS}")
        needs.entry(PROGRESS, spec.name)
        yield needs.made(f"pipeline-{user_of(spec.name)}", "pipeline")


def _read_with_spark(needs: _Needs, stream: StreamSpec, spec: PipelineSpec) -> None:
    """Read ranges, and have the durable follow: by a reset, or by acknowledging where that decides what is kept."""
    durable = spec.consumer
    needs.api("INFO", *(f"CONSUMER.{verb}.{stream.name}.{durable}" for verb in ("CREATE", "INFO", "RESET")))
    needs.api(f"CONSUMER.CREATE.{stream.name}.{durable}.>")  # with one filter, which is part of the subject
    needs.read_ranges(stream)
    if stream.retention != "limits":
        needs.api(f"CONSUMER.MSG.NEXT.{stream.name}.{durable}", f"CONSUMER.LIST.{stream.name}")
        needs.publish.add(f"$JS.ACK.{stream.name}.{durable}.>")
    if stream.retention == "workqueue" and not spec.source.subjects:
        # Everything there is the pipeline's. Where it is not, this would allow to delete what others wait for: then the
        # pipeline acknowledges instead.
        needs.api(f"STREAM.PURGE.{stream.name}")


def _write_with_spark(needs: _Needs, platform: Platform, spec: PipelineSpec) -> None:
    """Publish, and read back after a crash what was published before it; the ledger says how far a batch came."""
    written = {sink.stream: sink.subject for sink in spec.sinks if sink.stream}
    if spec.bad_records:
        written |= {stream.name: spec.bad_records for stream in _takers(platform, spec.bad_records)}
    for name, subject in written.items():
        stream = platform.streams[name]
        needs.publish |= {subject} if subject else set(stream.subjects)
        needs.read_ranges(stream)
    if written:
        needs.api("INFO", *(f"STREAM.{verb}.KV_{LEDGER}" for verb in ("INFO", "CREATE", "MSG.GET", "PURGE")))
        if any(platform.streams[name].replicas > 1 for name in written):
            needs.api(f"STREAM.UPDATE.KV_{LEDGER}")
        needs.api(*_passing_consumers(kv.stream_of(LEDGER)))
        needs.entry(LEDGER, ">")


def _passing_consumers(stream: str) -> list[str]:
    """To read a range: through consumers with names of the moment."""
    return [f"CONSUMER.{verb}.{stream}.>" for verb in ("CREATE", "DELETE", "MSG.NEXT")]


def _gateway(platform: Platform, domain: str | None) -> Iterator[Permissions]:
    if platform.gateway is None or not platform.gateway.identities:
        return
    needs = _Needs(domain)
    needs.api("INFO", "STREAM.NAMES")
    for identity in platform.gateway.identities.values():
        for stream, consumer in identity.consumers:
            declared = platform.consumers.get(consumer)
            needs.read_pages(stream, consumer, declared is not None and declared.is_dedicated)
        for subject in identity.subjects:
            _append(needs, platform, subject)
    yield needs.made("gateway", "gateway")


def _dead_letters(platform: Platform, domain: str | None) -> Iterator[Permissions]:
    """`penstock dlq capture`, and a person with the rest of `penstock dlq`."""
    letters = [stream for stream in platform.streams.values() if stream.is_dead_letters]
    if not letters:
        return
    others = [stream for stream in platform.streams.values() if not stream.is_dead_letters]
    capture = _Needs(domain)
    _capture(capture, letters, others)
    yield capture.made("dlq-capture", "dead letters")
    person = _Needs(domain)
    _capture(person, letters, others)  # `reconcile` begins with it
    _list_letters(person, letters)
    _settle_letters(person, letters, others)
    yield person.made("dlq", "dead letters")


def _pages(platform: Platform, domain: str | None) -> Permissions:
    """`penstock ui` without actions: look at everything, also at what the file does not declare."""
    needs = _Needs(domain)
    needs.api("INFO", "STREAM.LIST", "STREAM.NAMES", "STREAM.INFO.*", "STREAM.MSG.GET.*", "DIRECT.GET.*")
    needs.api("CONSUMER.LIST.*", "CONSUMER.INFO.*.*")
    letters = [stream.name for stream in platform.streams.values() if stream.is_dead_letters]
    for name in (AUDIT, *letters) if letters else ():
        needs.api(*_passing_consumers(name))
    if platform.history:
        needs.api(f"STREAM.CREATE.{HISTORY}")
        needs.publish.add(HISTORY_SUBJECT)
    return needs.made("ui", "pages")


def _capture(needs: _Needs, letters: list[StreamSpec], others: list[StreamSpec]) -> None:
    """Make letters of advisories. These are about all consumers: which have a `dlq:` is seen when they are asked."""
    needs.read_through(ADVISORIES, CAPTURE)
    needs.api(f"CONSUMER.CREATE.{ADVISORIES}.{CAPTURE}", "CONSUMER.INFO.*.*", "STREAM.NAMES")
    needs.api(*(f"STREAM.MSG.GET.{name}" for name in (AUDIT, *(stream.name for stream in (*others, *letters)))))
    needs.publish |= {f"$JS.ACK.{stream.name}.>" for stream in others}
    needs.publish |= {subject for stream in letters for subject in stream.subjects}


def _list_letters(needs: _Needs, letters: list[StreamSpec]) -> None:
    """`ls`, `show`, `audit`: read the streams whole, and look for what nobody has captured."""
    needs.api("STREAM.LIST", f"STREAM.INFO.{AUDIT}", f"STREAM.MSG.GET.{ADVISORIES}")
    for name in (AUDIT, *(stream.name for stream in letters)):
        needs.api(*_passing_consumers(name))


def _settle_letters(needs: _Needs, letters: list[StreamSpec], others: list[StreamSpec]) -> None:
    """`replay`, `discard`, `reconcile`: publish again, note it, take away; read what a consumer has had."""
    needs.api("INFO", "CONSUMER.LIST.*")
    needs.api(*(f"STREAM.MSG.DELETE.{stream.name}" for stream in letters))
    needs.publish.add(AUDIT_SUBJECTS)
    for stream in others:
        needs.publish |= set(stream.subjects)
        needs.read_ranges(stream)


def _direct(platform: Platform, stream: str) -> list[str]:
    """Only where a stream allows it is anything read so; of one that the file does not declare nobody knows."""
    declared = platform.streams.get(stream)
    return [f"DIRECT.GET.{stream}"] if declared is None or declared.config.get("allow_direct") else []


def _any_consumer(stream: str) -> list[str]:
    verbs = ("CREATE", "INFO", "DELETE", "MSG.NEXT", "RESET")
    return [*(f"CONSUMER.{verb}.{stream}.>" for verb in verbs), f"CONSUMER.LIST.{stream}"]


def of_group(
    platform: Platform, group: str, stream: str, dlq: str | None = None, domain: str | None = None
) -> Permissions:
    """Those of the workers of a group on a stream; `dlq` is where their dead letters go."""
    needs = _Needs(domain)
    _take_part(needs, platform, group, stream, dlq)
    return needs.made(f"group-{user_of(group)}", "group")


def _take_part(needs: _Needs, platform: Platform, group: str, stream: str, dlq: str | None) -> None:
    bucket = f"penstock_{group}"
    needs.api("INFO", f"STREAM.INFO.{stream}", f"STREAM.MSG.GET.{stream}", *_direct(platform, stream))
    needs.api(*_any_consumer(stream))
    needs.publish.add(f"$JS.ACK.{stream}.>")
    needs.bucket(bucket)
    stored = kv.stream_of(bucket)
    needs.api(f"DIRECT.GET.{stored}", f"CONSUMER.CREATE.{stored}.>", f"CONSUMER.DELETE.{stored}.>")
    if dlq:
        needs.bury(dlq)


def of_bridge(platform: Platform, bridge: str, origin: str, destination: str, domain: str | None = None) -> Permissions:
    """Those of a bridge between two streams of one account, without mappings to other subjects.

    Where the sides are different servers, each user needs its half: `destination`'s subjects, `STREAM.INFO` and
    `STREAM.MSG.GET` there, all else at the origin.
    """
    needs, declared = _Needs(domain), platform.streams.get(destination)
    needs.api("INFO", f"STREAM.INFO.{origin}", f"STREAM.INFO.{destination}", f"STREAM.MSG.GET.{destination}")
    needs.api(*(f"CONSUMER.{verb}.{origin}.{bridge}" for verb in ("INFO", "RESET")))
    needs.api(f"CONSUMER.CREATE.{origin}.{bridge}", f"CONSUMER.CREATE.{origin}.{bridge}.>")
    if (read := platform.streams.get(origin)) and read.retention == "workqueue":
        needs.api(f"STREAM.MSG.GET.{origin}")  # is anything left there?
    needs.publish |= {f"$JS.FC.{origin}.{bridge}.>", *(declared.subjects if declared else ())}
    needs.subscribe.add(f"{BRIDGE_SUBJECTS}.*.{origin}.{bridge}")
    return needs.made(f"bridge-{user_of(bridge)}", "bridge")


def _with_id(subject: str) -> str:
    """Where facts of a subject are stored: with one more token, made of the id."""
    return subject if subject.endswith(">") else f"{subject}.*"


def _granted(platform: Platform, subject: str) -> Iterator[str]:
    """What to allow for what the file says is written. A wildcard at its beginning would be the server's API and the
    inboxes of others, too: the streams that take it say what is meant. Among dead letters nobody writes that way."""
    first, _, rest = subject.partition(".")
    if first not in (ONE, REST):
        yield subject
        return
    for stream in _takers(platform, subject):
        for taken in stream.subjects:
            if stream.is_dead_letters or taken.startswith("$") or not any_overlap([taken], [subject]):
                continue
            token = taken.partition(".")[0]
            if token in (ONE, REST):
                raise ConfigError(
                    f"{platform.path}: whoever may write {subject!r} to stream {stream.name!r}, which takes {taken!r}, "
                    "may use the server's own API: let one of the two begin with a name"
                )
            yield taken if first == REST else f"{token}.{rest}"


def _takers(platform: Platform, subject: str) -> Iterator[StreamSpec]:
    return (stream for stream in platform.streams.values() if any_overlap([subject], stream.subjects))
