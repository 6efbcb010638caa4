"""The stream that a query reads, as the driver sees it: its content, and the sequence of a position."""

from __future__ import annotations

import difflib
import secrets
from datetime import datetime

from penstock.errors import ConfigError, MessageNotFound, StreamNotFound
from penstock.jetstream import features
from penstock.jetstream.direct import DirectGetRefused
from penstock.jetstream.model import StreamInfo
from penstock.jetstream.pull import consumer_config, create_reader
from penstock.spark.link import Link
from penstock.spark.loss import MANY, Holes, is_sparse, removes_inside
from penstock.spark.options import Position, PositionKind, SourceOptions

ROLLUP = "Nats-Rollup"
NAMED = 10
"""Maximum number of existing streams that an error about a missing one lists."""


class NoSuchStream(ConfigError):
    """The stream that a query names does not exist."""


class OutOfReach(ConfigError):
    """An offset that the stream does not have, or not yet."""


class Origin:
    """Queries about one stream, answered by its leader."""

    def __init__(self, link: Link, options: SourceOptions) -> None:
        self._link = link
        self._stream = options.stream
        self._subjects = options.subjects

    def info(self) -> StreamInfo:
        """The stream's configuration and state."""
        return existing(self._link, self._stream)

    def check_server(self, info: StreamInfo, options: SourceOptions, streaming: bool) -> None:
        """Raise `FeatureMissing` when the server is too old for this read."""
        needed = features_needed(info, options, streaming)
        self._link.call(lambda api: api.require(*needed))

    def holes(self, info: StreamInfo, filtered: bool) -> Holes:
        """Return what is missing in the stream, as far as it is significant.

        With filters only what is missing before the first sequence counts: a hole could have been of any subject. Where
        consuming deletes, this query's messages stay until it has consumed them, but those of other consumers may be
        deleted at any time.
        """
        first, last = info.state.first_seq, info.state.last_seq
        if is_sparse(info.config) or (filtered and needs_direct_get(info)) or self._rolled_up(info):
            return Holes(0, last, complete=False)
        if filtered or removes_inside(info.config) or info.state.deleted > MANY:
            return Holes(first, last, complete=False)
        if not info.state.deleted:
            return Holes(first, last)
        detailed = self._link.call(lambda api: api.stream_info(self._stream, deleted_details=True))
        deleted = detailed.raw["state"].get("deleted") or []
        return Holes(detailed.state.first_seq, detailed.state.last_seq, sorted(deleted))

    def _rolled_up(self, info: StreamInfo) -> bool:
        """Whether the oldest message is a roll-up of those before it."""
        return bool(info.config.get("allow_rollup_hdrs")) and ROLLUP in self.headers(info.state.first_seq)

    def stored_at(self, sequence: int) -> str:
        """When the message at `sequence` was stored; empty when it is not there."""
        try:
            time = self._link.get_message(self._stream, seq=sequence).time if sequence else None
        except MessageNotFound:
            return ""
        return time.isoformat() if time else ""

    def next_sequence(self, first: int) -> int:
        """The sequence of the first message that the query wants, at or behind `first`; 0: there is none."""
        return self._link.next_sequence(self._stream, first, self._subjects)

    def headers(self, sequence: int) -> dict[str, list[str]]:
        """The headers of the message at `sequence`, whatever its subject; empty when there is none."""
        try:
            return self._link.get_message(self._stream, seq=sequence).headers if sequence else {}
        except MessageNotFound:
            return {}

    def count_from(self, first: int, subjects: tuple[str, ...]) -> int:
        """How many messages that the query wants lie at or behind `first`. Asks by a consumer: Limits streams only.

        Raises `ConsumersUsedUp` when the stream may have no more of them.
        """
        name = f"penstock-count-{secrets.token_hex(8)}"
        config = consumer_config(name, first, subjects)
        counted = self._link.call(lambda api: create_reader(api, self._stream, config)).pending
        self._link.call(lambda api: api.delete_consumer(self._stream, name))
        return counted

    def sequence_at(self, time: datetime) -> int | None:
        """The first message stored at that time or later; None when there is none yet."""
        try:
            return self._link.get_message(self._stream, next_of=">", since=time).sequence
        except MessageNotFound:
            return None

    # -- positions -------------------------------------------------------------------------------------------------

    def before(self, position: Position, info: StreamInfo, floor: int) -> int:
        """The sequence before the first message to read. `floor`: what the durable has acknowledged."""
        first, last = max(info.state.first_seq, 1), info.state.last_seq
        if position.kind is PositionKind.EARLIEST:
            return first - 1
        if position.kind is PositionKind.LATEST:
            return last
        if position.kind is PositionKind.CONSUMER:
            return floor
        return self._reachable(position, last, "startingOffsets", extra=1) - 1

    def last(self, position: Position, info: StreamInfo, floor: int) -> int:
        """The last sequence to read."""
        if position.kind is PositionKind.LATEST:
            return info.state.last_seq
        if position.kind is PositionKind.CONSUMER:
            return floor
        reachable = self._reachable(position, info.state.last_seq, "endingOffsets", extra=0)
        return reachable if position.kind is PositionKind.SEQUENCE else reachable - 1

    def _reachable(self, position: Position, last: int, option: str, extra: int) -> int:
        """The sequence that a position names. `extra`: how far behind the last message it may lie."""
        if position.time is not None:
            if position.time > datetime.now(position.time.tzinfo):
                raise OutOfReach(f"{option} {position} lies in the future; use `latest` for whatever comes next")
            return self.sequence_at(position.time) or last + 1
        if position.sequence > last + extra:
            raise OutOfReach(
                f"{option} {position.sequence} lies in the future: stream {self._stream!r} ends at sequence {last}; "
                "use `latest` for whatever comes next"
            )
        return position.sequence


def existing(link: Link, stream: str) -> StreamInfo:
    """The stream of that name. Raises `NoSuchStream`, with the nearest name there is."""
    try:
        return link.stream_info(stream)
    except StreamNotFound as exc:
        names = link.call(lambda api: api.stream_names())
        raise NoSuchStream(f"there is no stream {stream!r}{_hint(stream, names)}") from exc


def needs_direct_get(info: StreamInfo) -> bool:
    """Whether the stream must be read without a consumer, since consumers decide what it keeps."""
    return bool(info.config.get("retention", "limits") != "limits")


def features_needed(info: StreamInfo, options: SourceOptions, streaming: bool) -> list[features.Feature]:
    """What the server must be new enough for. Pure."""
    by_time = PositionKind.TIME in (options.starting.kind, options.ending.kind)
    needed = [features.BATCH_DIRECT_GET] if needs_direct_get(info) else []
    needed += [features.GET_BY_TIME] if by_time else []
    return [*needed, features.CONSUMER_RESET] if streaming and options.consumer else needed


def check_readable(info: StreamInfo, consumer: str | None) -> None:
    """Raise unless the stream can be read the way its retention asks for."""
    if not needs_direct_get(info):
        return
    kind = {"workqueue": "a WorkQueue", "interest": "an Interest"}.get(info.config["retention"], "no Limits")
    if consumer is None:
        raise ConfigError(
            f"stream {info.name!r} is {kind} stream, where only acknowledging deletes: name a durable consumer for the "
            "query with the option consumer=<name>; a streaming query makes it if it does not exist"
        )
    if not info.config.get("allow_direct"):
        raise DirectGetRefused(info.name)


def created(info: StreamInfo) -> str:
    """When the stream was created, in the server's own words, to the nanosecond."""
    return str(info.raw.get("created", ""))


def _hint(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    if near:
        return f"; did you mean {near[0]!r}?"
    if not known:
        return "; there are no streams at all"
    more = f" and {len(known) - NAMED} more" if len(known) > NAMED else ""
    return f"; there are {', '.join(sorted(known)[:NAMED])}{more}"
