"""Durable replication between streams that share no link: a receiver on one side, atomic batches on the other.

What happens, in order, to the messages of one batch:
1. they are received, and stay unacknowledged at the origin (crash after: they are delivered again);
2. they are committed to the destination, all or none, each with its origin's sequence, and only if the destination
   still ends where this bridge left it (crash after: the destination's last message tells that they are there);
3. they are acknowledged at the origin, which may delete them (crash after: nothing is left to do).
So the destination holds every message once, in order, whichever process is killed. No duplicate window is involved.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from penstock import subjects
from penstock.errors import (
    AlreadyExists,
    ConfigError,
    ConsumerNotFound,
    MessageNotFound,
    OutcomeUnknown,
    PenstockError,
    StreamNotFound,
    Unavailable,
)
from penstock.jetstream.api import JetStream
from penstock.jetstream.model import ConsumerInfo, StreamInfo
from penstock.publish.batch import EXPECTED_LAST, Batch
from penstock.publish.blocking import BlockingPublisher, Flight
from penstock.publish.errors import DuplicateId, StreamFull, WrongSequence
from penstock.retry import Backoff, Tries, is_retryable
from penstock.settings import Settings
from penstock.sourcing import copies, modes
from penstock.sourcing.copies import Backlog, BatchPart, Copier, Mark
from penstock.sourcing.flow import Flow
from penstock.sourcing.leftovers import Leftovers
from penstock.sourcing.mapping import Mapping, SubjectMap
from penstock.sourcing.receiver import ReceivedChunk, Receiver, ReceiverInterrupted, consumer_config
from penstock.wire import blocking, headers

BRIDGE_SUBJECTS = "penstock.bridge"
BATCH = 1000
BATCH_BYTES = 4 * 1024 * 1024
IN_FLIGHT = 2
"""Open batches: while the destination stores one, the next is built."""
FIRST_WITHIN = 15.0
"""Seconds in which both sides must be reached for the first time: a wrong address must fail."""
STUCK_FOR = 5.0
"""Seconds that the origin may have messages for the bridge without delivering them, before the bridge reconnects."""
CONFLICTS = 3
"""Conflicts in a row, without progress, that the last writes of a predecessor can explain."""


class Fenced(PenstockError):
    """Another instance of the bridge, or another writer, has written to the destination; this one wrote nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BridgeConfig:
    """Origin, destination and options of a bridge."""

    name: str
    """Name of the consumer on the origin, and mark of the copies."""
    origin: str
    """The stream that is read."""
    destination: str
    """The stream that is written, by this bridge alone."""
    subjects: tuple[str, ...] = ()
    """Filters; none: everything."""
    mappings: tuple[Mapping, ...] = ()
    deliver_subject: str = ""
    """Deliver subject of the origin's consumer; chosen when empty."""
    rate: float | None = None
    """Maximum messages per second."""

    def __post_init__(self) -> None:
        if set(self.name) & set(" .*>/\\\t\r\n") or not self.name:
            raise ConfigError(f"{self.name!r} cannot be the name of a bridge: letters, digits, _ and - are")
        for role, stream in (("origin", self.origin), ("destination", self.destination)):
            if set(stream) & set(" .*>/\\\t\r\n") or not stream:
                raise ConfigError(f"{stream!r} cannot be the stream that is the {role} of bridge {self.name!r}")
        if self.deliver_subject and (
            (wrong := subjects.problem(self.deliver_subject)) or not subjects.is_literal(self.deliver_subject)
        ):
            raise ConfigError(
                f"{self.deliver_subject!r} cannot be where bridge {self.name!r} receives: {wrong or 'it has wildcards'}"
            )
        for filter_ in self.subjects:
            if wrong := subjects.problem(filter_):
                raise ConfigError(f"{filter_!r} cannot be a filter of bridge {self.name!r}: {wrong}")

    def delivers_to(self, domain: str | None) -> str:
        """Where the origin delivers. Linked domains share their subjects, so it names the domain of the origin."""
        return self.deliver_subject or f"{BRIDGE_SUBJECTS}.{modes.place(domain)}.{self.origin}.{self.name}"

    @property
    def delivered_to_before(self) -> str | None:
        """The deliver subject that earlier versions chose, without a domain."""
        return None if self.deliver_subject else f"{BRIDGE_SUBJECTS}.{self.origin}.{self.name}"


@dataclass(frozen=True, slots=True)
class BridgeStatistics:
    """A snapshot of a bridge."""

    position: int = 0
    """Origin sequence of the last message that is stored."""
    stored: int = 0
    """Messages stored by this instance."""
    bytes: int = 0
    batches: int = 0
    lag: int | None = None
    """Messages that the origin has after the last one received; None while that is not known."""
    gaps: int = 0
    """How often deliveries were lost and requested again."""
    resets_by_others: int = 0
    sessions: int = 0
    """How often both sides were reconnected."""
    last_error: str | None = None
    started: float = field(default_factory=time.time)


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The position of the destination."""

    last_sequence: int
    """Last sequence of the destination, which the next batch expects."""
    mark: Mark | None
    """The mark of its last message; None when it holds none."""

    @property
    def position(self) -> int:
        return self.mark.sequence if self.mark else 0


class Bridge:
    """One running bridge. `run` blocks; `statistics` may be read from another thread."""

    def __init__(self, config: BridgeConfig, origin: Settings, destination: Settings) -> None:
        self.config = config
        self.instance = secrets.token_hex(4)
        self.origin_settings = origin
        self.destination_settings = destination
        self.leftovers = Leftovers(origin, config.origin, config.name, config.subjects, config.destination)
        self._map = SubjectMap(config.mappings)
        self._statistics = BridgeStatistics()
        self._rename_ids_until = 0
        self._predecessor: str | None = None
        self._conflicts = 0

    def statistics(self) -> BridgeStatistics:
        return self._statistics

    def run(self, stop: Callable[[], bool] = lambda: False, *, until_caught_up: bool = False) -> BridgeStatistics:
        """Copy messages until `stop` returns True, or nothing is left. Retries failures of either side.

        With `until_caught_up` it ends when the origin's server says that its consumer has nothing left to deliver and
        nothing unacknowledged. By then a WorkQueue origin holds none of these messages any more.

        Raises `Fenced` when another instance has taken over, and permanent errors at once.
        """
        tries = Tries(backoff=Backoff(first=0.1), retry_on=self._worth_another_try)
        deadline = time.monotonic() + FIRST_WITHIN
        while not stop():
            before = self._statistics.stored
            try:
                self._session(stop, until_caught_up)
                return self._statistics
            except PenstockError as exc:
                self._note(last_error=str(exc))
                if not self._statistics.sessions and time.monotonic() > deadline:
                    raise
                if progress := self._statistics.stored > before:
                    tries.succeeded()
                tries.failed_blocking(exc)
                if progress:
                    self._conflicts = 0
        return self._statistics

    def _worth_another_try(self, exc: BaseException) -> bool:
        if isinstance(exc, WrongSequence):
            self._conflicts += 1
            if self._conflicts > CONFLICTS:
                raise self._fenced(self._predecessor) from exc
            return True
        return isinstance(exc, OutcomeUnknown | DuplicateId | StreamFull) or is_retryable(exc)

    # -- one session: both sides connected -------------------------------------------------------------------------

    def _session(self, stop: Callable[[], bool], until_caught_up: bool) -> None:
        with BlockingPublisher.connect(self.destination_settings) as publisher:
            info = destination_info(publisher.jetstream, self.config)
            check_destination(info)
            resume = resume_point(publisher.jetstream, info, self.config)
            self._check_owner(resume)
            flow = Flow(resume.position)
            ensure_consumer(self.origin_settings, self.config)
            with Receiver(self.origin_settings, self.config.origin, self.config.name, flow) as receiver:
                self._note(sessions=self._statistics.sessions + 1, position=resume.position)
                keep_ttl = bool(info.config.get("allow_msg_ttl"))
                copier = Copier(self.config.name, self.config.origin, self.instance, keep_ttl=keep_ttl)
                copier.rename_ids_until = self._rename_ids_until
                _Pump(self, publisher, receiver, copier, resume.last_sequence).run(stop, until_caught_up)

    def _check_owner(self, resume: ResumePoint) -> None:
        """Check that the destination's last message is ours or our predecessor's, not a successor's."""
        last = resume.mark.instance if resume.mark else None
        if not self._statistics.sessions:
            self._predecessor = last
        if last == self.instance:
            return
        # What a predecessor had sent may arrive after our read, but not after our first write.
        if last != self._predecessor or self._statistics.stored:
            raise self._fenced(last)

    def _fenced(self, other: str | None) -> Fenced:
        return Fenced(
            f"another instance of bridge {self.config.name!r} ({other}) writes to stream "
            f"{self.config.destination!r}; this one ({self.instance}) stops, and nothing is lost or repeated"
        )

    def _note(self, **changes: object) -> None:
        self._statistics = replace(self._statistics, **changes)  # type: ignore[arg-type]  # names of its own fields

    def noted(self, part: BatchPart, receiver: Receiver) -> None:
        """A part is stored."""
        now = self._statistics
        self._note(
            position=part.last_sequence,
            stored=now.stored + len(part.data),
            bytes=now.bytes + sum(map(len, part.data)),
            batches=now.batches + 1,
            lag=receiver.lag,
            gaps=receiver.flow.gaps,
            resets_by_others=receiver.flow.restarts,
            last_error=None,
        )

    def knows_lag(self, lag: int) -> None:
        """Record how many messages the origin's server has not delivered yet."""
        self._note(lag=lag)

    def renames_ids(self, part: BatchPart) -> None:
        """Rename the message ids of this part: the destination has one of them in its duplicate window."""
        self._rename_ids_until = part.last_sequence

    def mapped(self, given: list[bytes]) -> list[bytes]:
        return self._map(given)


class _Pump:
    """Moves messages from a receiver into batches, a few of them open.

    A full batch is sent at once; the rest of a chunk waits for the next one, as long as the destination is busy.
    """

    def __init__(
        self, bridge: Bridge, publisher: BlockingPublisher, receiver: Receiver, copier: Copier, last: int
    ) -> None:
        self._bridge = bridge
        self._publisher = publisher
        self._receiver = receiver
        self._copier = copier
        self._last = last
        """The destination's last sequence, including open batches."""
        self._backlog = Backlog(BATCH, BATCH_BYTES)
        self._flights: deque[tuple[Flight, BatchPart]] = deque()
        self._pace = Pace(bridge.config.rate)
        self._idle_since: float | None = None
        """Since when nothing arrives although the origin has more."""
        self._leftovers = bridge.leftovers

    def run(self, stop: Callable[[], bool], until_caught_up: bool) -> None:
        for chunk in self._receiver.chunks():
            if chunk is not None:
                self._idle_since = None
                self._take(chunk)
                # A small chunk is all that is available: do not wait for more to send with its rest.
                self._send(everything=len(chunk) < BATCH)
            else:
                self._send(everything=True)
                self._land(0)
            if stop() or (until_caught_up and chunk is None and self._caught_up()):
                self._land(0)
                return

    def _caught_up(self) -> bool:
        """Whether nothing is left at the origin; queries its server only when no more messages arrive."""
        if not self._receiver.flow.settled:
            return False
        left = self._leftovers.ask()
        self._bridge.knows_lag(left.undelivered)
        if left:
            self._idle_since = self._idle_since or time.monotonic()
            if time.monotonic() - self._idle_since > STUCK_FOR:
                if left.kept_alone:
                    self._leftovers.take_back(self._publisher.jetstream)
                raise ReceiverInterrupted(
                    f"stream {self._bridge.config.origin!r} has {left}, and delivered none for {STUCK_FOR:g} s"
                )
        return not left

    def _take(self, chunk: ReceivedChunk) -> None:
        rows = chunk.rows()
        self._backlog.add(self._bridge.mapped(rows.subjects), self._copier.lines(rows), rows)

    def _send(self, everything: bool) -> None:
        while len(self._backlog) >= BATCH or (everything and self._backlog):
            self._land(IN_FLIGHT - 1 if len(self._backlog) >= BATCH else 0)
            part = self._backlog.take()
            self._pace.wait(len(part.data))
            self._begin(part)

    def _begin(self, part: BatchPart) -> None:
        batch = Batch(self._bridge.config.destination)
        part.lines[0] += headers.line(EXPECTED_LAST, str(self._last))
        batch.extend_encoded(part.subjects, part.data, part.lines, expected=self._last)
        self._flights.append((self._publisher.begin(batch), part))
        self._last += len(part.data)

    def _land(self, left: int) -> None:
        """Wait until at most `left` batches are open, and acknowledge at the origin what is stored."""
        while len(self._flights) > left:
            flight, part = self._flights.popleft()
            try:
                self._publisher.finish(flight)
            except DuplicateId:
                self._bridge.renames_ids(part)
                raise
            self._bridge.noted(part, self._receiver)
            self._receiver.stored(part.last_sequence)


class Pace:
    """Keeps below a rate by waiting."""

    def __init__(self, rate: float | None) -> None:
        self._rate = rate
        self._free_at = time.monotonic()

    def wait(self, count: int) -> None:
        if not self._rate:
            return
        now = time.monotonic()
        if self._free_at > now:
            time.sleep(self._free_at - now)
        self._free_at = max(now, self._free_at) + count / self._rate


# -- checks of both sides ----------------------------------------------------------------------------------------------


def destination_info(jetstream: JetStream, config: BridgeConfig) -> StreamInfo:
    """The destination; raises `ConfigError` when there is none."""
    try:
        return blocking.run(jetstream.stream_info(config.destination))
    except StreamNotFound as exc:
        raise ConfigError(
            f"the destination has no stream {config.destination!r}; `penstock bridge --create` makes it, or declare it "
            "there with `allow_atomic: true`"
        ) from exc


def check_destination(info: StreamInfo) -> None:
    """Raise `ConfigError` when a bridge cannot write to the stream, or could not tell later what it wrote."""
    config = info.config
    if not config.get("allow_atomic"):
        raise ConfigError(
            f"stream {info.name!r} takes no atomic batches; set `allow_atomic: true` and run `penstock apply`"
        )
    if config.get("retention", "limits") != "limits":
        raise ConfigError(
            f"stream {info.name!r} has retention {config['retention']}: its readers would remove the messages that "
            "tell the bridge where it was; bridge into a limits stream, and source from that"
        )
    if config.get("mirror") or config.get("sources"):
        raise ConfigError(f"stream {info.name!r} copies other streams: a bridge must be its only writer")


def resume_point(jetstream: JetStream, info: StreamInfo, config: BridgeConfig) -> ResumePoint:
    """Return the position of the destination; raises `Fenced` when its last message is not from this bridge."""
    try:
        last = blocking.run(jetstream.get_message(info.name, last_of=">"))
    except MessageNotFound:
        return ResumePoint(info.state.last_seq, None)
    mark = copies.mark_of(last.headers)
    if mark is None or (mark.bridge, mark.stream) != (config.name, config.origin):
        whose = f"bridge {mark.bridge!r} of {mark.stream!r}" if mark else f"another publisher, on {last.subject!r}"
        raise Fenced(
            f"the last message of stream {info.name!r} ({last.sequence}) is from {whose}; a bridge must be the only "
            "writer of its destination: give it a stream of its own"
        )
    return ResumePoint(max(last.sequence, info.state.last_seq), mark)


def ensure_consumer(settings: Settings, config: BridgeConfig) -> ConsumerInfo:
    """Return the bridge's durable on the origin; creates it if missing. Raises when it reads something else."""
    with blocking.connect(settings, name="penstock bridge") as connection:
        jetstream = JetStream(connection.requester(), settings.domain, settings.timeout)
        try:
            info = blocking.run(jetstream.consumer_info(config.origin, config.name))
        except ConsumerNotFound:
            check_origin(jetstream, blocking.run(jetstream.stream_info(config.origin)), config)
            domain = blocking.run(jetstream.account_info()).domain
            wanted = consumer_config(config.name, config.delivers_to(domain), config.subjects)
            try:
                return blocking.run(jetstream.create_consumer(config.origin, wanted))
            except AlreadyExists as exc:
                raise Unavailable(f"somebody else is making consumer {config.name!r} of {config.origin!r}") from exc
        check_consumer(info, config)
        return _with_domain(jetstream, info, config)


def _with_domain(jetstream: JetStream, info: ConsumerInfo, config: BridgeConfig) -> ConsumerInfo:
    """Move a consumer of an earlier version to a subject that names its domain; without a domain it stays."""
    if info.config.get("deliver_subject") != config.delivered_to_before:
        return info
    if not (domain := blocking.run(jetstream.account_info()).domain):
        return info
    change = {"deliver_subject": config.delivers_to(domain)}
    return blocking.run(jetstream.update_consumer(config.origin, config.name, change))


def check_consumer(info: ConsumerInfo, config: BridgeConfig) -> None:
    """Raise `ConfigError` when the bridge's consumer reads something else than the bridge should."""
    if set(info.filters) != set(config.subjects):
        raise ConfigError(
            f"consumer {config.name!r} of {config.origin!r} filters on {', '.join(info.filters) or 'everything'}, but "
            f"the bridge is to copy {', '.join(config.subjects) or 'everything'}; give the bridge another name, "
            "or the same filter"
        )


def check_origin(jetstream: JetStream, origin: StreamInfo, config: BridgeConfig) -> None:
    """Raise `ConfigError` when the origin has nothing for the bridge, or would refuse it a consumer."""
    check_filters(origin, config)
    if origin.config.get("retention") != "workqueue":
        return
    wanted = config.subjects or (">",)
    for other in blocking.run(jetstream.consumers(origin.name)):
        if other.name != config.name and subjects.any_overlap(wanted, other.filters or (">",)):
            raise ConfigError(
                f"stream {origin.name!r} is a WorkQueue, where one consumer alone reads a subject, and {other.name!r} "
                f"reads {', '.join(other.filters) or 'everything'}; delete that consumer, or give the bridge other "
                "subjects with --subject"
            )


def check_filters(origin: StreamInfo, config: BridgeConfig) -> None:
    """Raise `ConfigError` for a filter that no message of the origin can pass."""
    stored = _stored_subjects(origin)
    for filter_ in config.subjects:
        if not subjects.any_overlap([filter_], stored):
            raise ConfigError(
                f"no subject of stream {origin.name!r} ({', '.join(stored)}) passes {filter_!r}; correct the filter"
            )


def check_mappings(origin: StreamInfo, destination: StreamInfo, config: BridgeConfig) -> None:
    """Raise `ConfigError` when messages would get subjects that the destination does not capture.

    Only where all that passes a filter is concerned: where some of it would be captured, the messages decide.
    """
    captured = list(destination.config.get("subjects") or ())
    read = config.subjects or _stored_subjects(origin)
    concerned = replace(config, mappings=tuple(m for m in config.mappings if subjects.any_overlap([m.source], read)))
    for subject in destination_subjects(origin, concerned):
        if not subjects.any_overlap([subject], captured):
            raise ConfigError(
                f"stream {destination.name!r} captures {', '.join(captured)}, and nothing of {subject!r}, which the "
                "bridge would write; map the subjects, or add it to the stream"
            )


def _stored_subjects(stream: StreamInfo) -> list[str]:
    """What the stream can hold; anything, where it copies others or changes what it captures."""
    config = stream.config
    if config.get("mirror") or config.get("sources") or config.get("subject_transform"):
        return [">"]
    return list(config.get("subjects") or [">"])


def destination_subjects(origin: StreamInfo, config: BridgeConfig) -> list[str]:
    """What a destination must capture: the destinations of the mappings, and what they leave as it is."""
    given = config.subjects or tuple(origin.config.get("subjects") or ()) or (">",)
    unmapped = [one for one in given if not subjects.covered(one, [mapping.source for mapping in config.mappings])]
    return list(dict.fromkeys([*(mapping.pattern for mapping in config.mappings), *unmapped]))
