"""Finds messages of an origin that its copy has not stored, although the origin was told that they are.

A server says nothing about them, so they are read from what is left. A mirror has the sequences of its origin: a
missing one is a hole. Other copies carry the origin's sequence in a header: one that is missing between two others is
a hole, and so is one behind the last that the origin knows as stored. Two causes are known:

- a duplicate window drops what has an id that came before, from whatever origin;
- nats-server 2.15 takes a durable up again by a reset, and takes what the durable delivers before the answer is made
  for stored (DESIGN.md, "Non-obvious (sourcing)").
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise

from penstock.errors import PenstockError
from penstock.jetstream.api import JetStream
from penstock.jetstream.model import Json, StreamInfo
from penstock.jetstream.reader import read_messages
from penstock.jetstream.rows import Range
from penstock.settings import Settings
from penstock.sourcing import modes
from penstock.sourcing.migrate import HEADER

LOOKED_AT = 100_000
"""Copies at the end of a stream that are looked at."""
ALL_SUBJECTS = ">"
LIMITS = ("max_age", "max_msgs", "max_bytes", "max_msgs_per_subject")


async def missing(
    js: JetStream, settings: Settings, stream: StreamInfo, silent: Callable[[Json], bool] = lambda source: False
) -> int:
    """Return how many messages of its origins a stream has not stored, as far as its last copies show it.

    Only sources without a filter are checked: where a filter leaves messages out, none counts as missing. `silent` says
    whether the origin of a source does not answer: that one is not queried again, since it would take a timeout.
    """
    if mirror := stream.config.get("mirror"):
        looked_at = _is_whole(mirror) and _keeps_all(stream) and not silent(mirror)
        return await _missing_in_mirror(js, stream, mirror) if looked_at else 0
    sources: list[Json] = stream.config.get("sources") or []
    if not any(_is_whole(source) for source in sources):
        return 0
    acknowledged = [0 if silent(source) else await _acknowledged(js, source) for source in sources]
    now = await js.stream_info(stream.name)
    at_end = _missing_at_end(now, acknowledged)
    if _counts_agree(now) or not _keeps_all(now):
        return at_end
    between = 0
    for name, holes in holes_between(await asyncio.to_thread(_marks, settings, now)).items():
        # Behind the colon is a hash of the origin's domain: of several with one name, each could be meant.
        meant = [source for source in sources if source["name"] == name.partition(":")[0]]
        named = [None if silent(source) else await _origin(js, source) for source in meant]
        counts = [_never_stored(holes, origin, known=modes.shares_window(now.config)) for origin in named]
        between += min(counts, default=0)
    return at_end + between


def holes_between(marks: Iterable[str]) -> dict[str, list[range]]:
    """Sequences of each origin that lie between copies and have none, from the headers of the copies."""
    seen: dict[str, set[int]] = defaultdict(set)
    for mark in marks:
        origin, number, filter_ = [*mark.split(" "), "", "", ""][:3]
        if filter_ == ALL_SUBJECTS:
            seen[origin].add(int(number))
    return {origin: list(_gaps(sorted(numbers))) for origin, numbers in seen.items()}


def _gaps(numbers: Iterable[int]) -> Iterator[range]:
    for before, after in pairwise(numbers):
        if after > before + 1:
            yield range(before + 1, after)


def _never_stored(holes: list[range], origin: StreamInfo | None, known: bool) -> int:
    """How many of these sequences were messages that should be in the copy.

    What an origin with limits no longer has may have gone before it was read. Without limits, only an acknowledgement
    removes. Of an origin that cannot be asked all are counted where the cause is `known`, else none.
    """
    if origin is None:
        return sum(map(len, holes)) if known else 0
    state, config = origin.state, origin.config
    if config.get("retention", "limits") != "limits" and not any(config.get(limit, 0) > 0 for limit in LIMITS):
        return sum(map(len, holes))
    gone = sorted(origin.raw["state"].get("deleted") or ())
    kept = [range(max(hole.start, state.first_seq), min(hole.stop, state.last_seq + 1)) for hole in holes]
    return sum(len(hole) - (bisect_left(gone, hole.stop) - bisect_left(gone, hole.start)) for hole in kept if hole)


async def _missing_in_mirror(js: JetStream, stream: StreamInfo, mirror: Json) -> int:
    now = await js.stream_info(stream.name, deleted_details=True)
    deleted: list[int] = now.raw["state"].get("deleted") or []
    holes = [range(sequence, sequence + 1) for sequence in deleted]
    return _never_stored(holes, await _origin(js, mirror), known=False) if holes else 0


def _is_whole(source: Json) -> bool:
    return not source.get("filter_subject") and not source.get("subject_transforms")


def _keeps_all(stream: StreamInfo) -> bool:
    """Whether a copy loses messages from its middle by no limit or deletion of its own."""
    return stream.config.get("max_msgs_per_subject", 0) <= 0 and (bool(stream.mirror) or not stream.state.deleted)


def _counts_agree(stream: StreamInfo) -> bool:
    """Whether as many messages came as the origins have numbered: then none is missing, and nothing need be read."""
    sources = stream.config["sources"]
    plain = all(_is_whole(source) and not source.get("opt_start_seq") for source in sources)
    copied = sum(report.raw.get("seq", 0) for report in stream.sources)
    return plain and not stream.config.get("subjects") and copied == stream.state.last_seq


def _missing_at_end(stream: StreamInfo, acknowledged: list[int]) -> int:
    """Messages behind the last copy of each origin that the origin knows as stored."""
    arrived: dict[str, list[int]] = defaultdict(list)
    for report in stream.sources:
        arrived[_key(report.raw)].append(report.raw.get("seq", 0))
    total = 0
    for config, floor in zip(stream.config["sources"], acknowledged, strict=True):
        copies = arrived[_key(config)]
        if len(copies) == 1 and _is_whole(config):
            total += max(0, floor - copies[0])
    return total


def _key(source: Json) -> str:
    return f"{source['name']} {(source.get('external') or {}).get('api')}"


def _at_origin(js: JetStream, source: Json) -> JetStream:
    api = (source.get("external") or {}).get("api")
    return js.at_prefix(api) if api else js


async def _origin(js: JetStream, source: Json) -> StreamInfo | None:
    """The origin with the sequences that are deleted in it; None when it cannot be asked."""
    try:
        return await _at_origin(js, source).stream_info(source["name"], deleted_details=True)
    except PenstockError:
        return None


async def _acknowledged(js: JetStream, source: Json) -> int:
    """Return how far the origin knows its messages as stored; 0 when it cannot be queried, or does not know."""
    if not source.get("consumer"):
        return 0
    try:
        found = await _at_origin(js, source).consumer_info(source["name"], source["consumer"]["name"])
    except PenstockError:
        return 0
    return found.ack_floor_stream_seq


def _marks(settings: Settings, stream: StreamInfo) -> list[str]:
    state = stream.state
    if not state.messages:
        return []
    first = max(state.first_seq, state.last_seq - LOOKED_AT + 1)
    direct = stream.config.get("retention", "limits") != "limits"
    wanted = Range(stream=stream.name, first=first, last=state.last_seq, direct=direct)
    return [message.headers[HEADER][0] for message in read_messages(settings, wanted) if HEADER in message.headers]
