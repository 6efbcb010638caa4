"""The JetStream API: the only module that requests streams, consumers and messages."""

from __future__ import annotations

import base64
import json
import re
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol

from penstock import retry
from penstock.errors import (
    ApiError,
    ConfigError,
    ConnectionLost,
    DeadlineExceeded,
    MessageNotFound,
    OutcomeUnknown,
    ServerBusy,
    Unavailable,
)
from penstock.jetstream import codes, features
from penstock.jetstream.listing import StreamMemory
from penstock.jetstream.model import (
    AccountInfo,
    ConsumerInfo,
    ConsumerReset,
    Json,
    StoredMessage,
    StreamInfo,
    parse_time,
)
from penstock.subjects import api_prefix
from penstock.wire import headers

Change = Mapping[str, Any] | Callable[[Json], Json]
"""New values for some fields, or a function from the configuration read to the one to write."""

Parse = Callable[[bytes], Json]
"""Turns the body of an answer into a document."""

_NOT_A_NAME = re.compile(r"[.*>/\\\s]|^$")
"""Characters that would turn a stream's or consumer's name into another subject, or into a path."""
BEYOND_ALL = 2**31 - 1
"""An offset that no listing reaches: its page is empty, and still says how many there are."""
OVERLAP = 64
"""Number of items that a listing goes back when items were removed before its page."""


class Requester(Protocol):
    """Sends one request and returns the body of its answer. Raises only `PenstockError`.

    After `ConnectionLost` and `DeadlineExceeded` the request may have been carried out; after other errors it was not.
    """

    async def __call__(self, subject: str, payload: bytes, timeout: float) -> bytes: ...


class JetStream:
    """Streams, consumers and messages of one account, over any `Requester`.

    Every request has a deadline: `timeout` seconds including all retries. Idempotent requests (reads, and writes that
    may be repeated) are retried with jittered backoff while the server is busy or the connection is down. Others
    (delete, purge, reset, step down) are retried only when the server itself said that it did nothing; when its answer
    was lost, `OutcomeUnknown` is raised. A refusal of the server is raised as `ApiError`.
    """

    def __init__(self, request: Requester, domain: str | None = None, timeout: float = 5.0) -> None:
        self._request = request
        self._prefix = api_prefix(domain)
        self.timeout = timeout
        self.requests = 0
        """API requests sent so far."""
        self._api_level = -1

    def in_domain(self, domain: str) -> JetStream:
        """Return a client for the JetStream of another domain on the same connection."""
        return JetStream(self._request, domain, self.timeout)

    def at_prefix(self, api: str) -> JetStream:
        """Return a client for an API prefix such as `$JS.leaf.API`, a domain or an import, on the same connection."""
        other = JetStream(self._request, None, self.timeout)
        other._prefix = api.rstrip(".")
        return other

    def subject(self, verb: str) -> str:
        """Return the API subject of a verb, for requests that are sent another way."""
        return f"{self._prefix}.{verb}"

    # -- account ---------------------------------------------------------------------------------------------------

    async def account_info(self) -> AccountInfo:
        info = AccountInfo.parse(await self._read("account info", "INFO"))
        self._api_level = info.api_level
        return info

    async def require(self, *needed: features.Feature) -> None:
        """Raise `FeatureMissing` when the server is too old; queries it only until it was seen to be new enough."""
        for feature in needed:
            if self._api_level < feature.api_level:
                features.require(await self.account_info(), feature)

    # -- streams ---------------------------------------------------------------------------------------------------

    async def create_stream(self, config: Json) -> StreamInfo:
        """Create a stream. Creating it again with the same configuration changes nothing.

        Raises `AlreadyExists` when the name is taken by a stream with another configuration.
        """
        name = _name("stream", config.get("name", ""))
        await self.require(*features.of_stream(config))
        return StreamInfo.parse(await self._read(f"create stream {name!r}", f"STREAM.CREATE.{name}", config))

    async def update_stream(self, name: str, change: Change) -> StreamInfo:
        """Read the stream's configuration, change it, write all of it back: fields we do not know are kept."""
        current = await self.stream_info(name)
        config = _changed(current.config, change)
        await self.require(*features.of_stream(config))
        return StreamInfo.parse(await self._read(f"update stream {name!r}", f"STREAM.UPDATE.{name}", config))

    async def delete_stream(self, name: str) -> None:
        await self._decide(f"delete stream {name!r}", f"STREAM.DELETE.{_name('stream', name)}")

    async def stream_info(
        self, name: str, subjects_filter: str | None = None, deleted_details: bool = False
    ) -> StreamInfo:
        """Configuration and state; with `subjects_filter`, the message count of every matching subject too."""
        what, verb = f"stream {name!r}", f"STREAM.INFO.{_name('stream', name)}"
        if subjects_filter is None:
            body = {"deleted_details": True} if deleted_details else None
            return StreamInfo.parse(await self._read(what, verb, body))
        subjects: dict[str, int] = {}
        offset = 0
        while True:
            ask = {"subjects_filter": subjects_filter, "offset": offset, "deleted_details": deleted_details}
            answer = await self._read(what, verb, ask)
            page = answer["state"].get("subjects") or {}
            subjects |= page
            # Do not count the subjects: those that differ only in bytes that are no UTF-8 are the same in JSON.
            offset += answer.get("limit") or len(page)
            if not page or offset >= answer.get("total", 0):
                answer["state"]["subjects"] = subjects
                return StreamInfo.parse(answer)

    async def subject_count(self, name: str, subjects_filter: str) -> int:
        """Return how many subjects of the stream match, without listing them."""
        ask = {"subjects_filter": subjects_filter, "offset": BEYOND_ALL}
        answer = await self._read(f"stream {name!r}", f"STREAM.INFO.{_name('stream', name)}", ask)
        return int(answer.get("total", 0))

    async def streams(self, subject: str | None = None) -> list[StreamInfo]:
        """Return all streams, over all pages; with `subject`, those that a filter of it could match."""
        body = {"subject": subject} if subject else {}
        return [StreamInfo.parse(raw) for raw in await self._list("list streams", "STREAM.LIST", "streams", body)]

    async def streams_again(self, memory: StreamMemory) -> list[StreamInfo]:
        """Return all streams, and parse only those that differ from what `memory` has of the last call."""
        memory.begin()
        return memory.streams(await self._list("list streams", "STREAM.LIST", "streams", {}, memory.page))

    async def stream_names(self, subject: str | None = None) -> list[str]:
        body = {"subject": subject} if subject else {}
        return await self._list("list stream names", "STREAM.NAMES", "streams", body)

    async def purge_stream(
        self, name: str, *, subject: str | None = None, before_seq: int | None = None, keep: int | None = None
    ) -> int:
        """Remove messages for good: all, those of a subject, those below `before_seq`, or all but the last `keep`."""
        if before_seq is not None and keep is not None:
            raise ConfigError("purge takes before_seq or keep, not both")
        body = {k: v for k, v in {"filter": subject, "seq": before_seq, "keep": keep}.items() if v is not None}
        answer = await self._decide(f"purge stream {name!r}", f"STREAM.PURGE.{_name('stream', name)}", body)
        return int(answer["purged"])

    async def step_down_stream(self, name: str) -> None:
        """Make the stream's leader hand over to another replica."""
        what, verb = f"step down the leader of stream {name!r}", f"STREAM.LEADER.STEPDOWN.{_name('stream', name)}"
        await self._decide(what, verb)

    # -- messages --------------------------------------------------------------------------------------------------

    async def get_message(
        self,
        stream: str,
        seq: int | None = None,
        *,
        last_of: str | None = None,
        next_of: str | None = None,
        since: datetime | None = None,
    ) -> StoredMessage:
        """Return one stored message: by sequence, the last of a subject, the next of a subject at or above `seq`, or
        the first stored at or after `since`."""
        start = since.astimezone(UTC).isoformat() if since else None
        given = {"seq": seq, "last_by_subj": last_of, "next_by_subj": next_of, "start_time": start}
        ask = {k: v for k, v in given.items() if v is not None}
        if since:
            await self.require(features.GET_BY_TIME)
        what = f"message {' '.join(f'{k}={v}' for k, v in ask.items())} of stream {stream!r}"
        answer = await self._read(what, f"STREAM.MSG.GET.{_name('stream', stream)}", ask)
        raw = answer["message"]
        return StoredMessage(
            stream=stream,
            subject=raw["subject"],
            sequence=raw["seq"],
            time=parse_time(raw["time"]),
            data=base64.b64decode(raw.get("data") or ""),
            headers=headers.parse(base64.b64decode(raw.get("hdrs") or "")),
        )

    async def next_sequence(self, stream: str, first: int, subject: str = ">") -> int:
        """Return the sequence of the first message of the subject at or after `first`, from the leader; 0: none."""
        try:
            return (await self.get_message(stream, max(first, 1), next_of=subject)).sequence
        except MessageNotFound:
            return 0

    async def delete_message(self, stream: str, seq: int, erase: bool = False) -> None:
        """Remove one message; `erase` also overwrites its bytes on disk."""
        body = {"seq": seq, "no_erase": not erase}
        verb = f"STREAM.MSG.DELETE.{_name('stream', stream)}"
        try:
            await self._decide(f"delete message {seq} of stream {stream!r}", verb, body)
        except ApiError as exc:
            if exc.err_code == codes.DELETE_FAILED:
                await self.get_message(stream, seq)  # raises MessageNotFound, if that is the reason
            raise

    # -- consumers -------------------------------------------------------------------------------------------------

    async def create_consumer(self, stream: str, config: Json) -> ConsumerInfo:
        """Create a consumer; `AlreadyExists` when its name is taken with another configuration."""
        return await self._put_consumer(stream, config, "create")

    async def update_consumer(self, stream: str, name: str, change: Change) -> ConsumerInfo:
        """Read the consumer's configuration, change it, write all of it back: fields we do not know are kept."""
        current = await self.consumer_info(stream, name)
        return await self._put_consumer(stream, _changed(current.config, change), "update")

    async def _put_consumer(self, stream: str, config: Json, action: str) -> ConsumerInfo:
        name = config.get("name") or config.get("durable_name")
        if not name:
            raise ConfigError(f"a consumer on stream {stream!r} needs a name")
        body = {"stream_name": stream, "config": {"name": name, **config}, "action": action}
        await self.require(*features.of_consumer(config))
        answer = await self._read(f"{action} consumer {name!r} of {stream!r}", _consumer("CREATE", stream, name), body)
        return ConsumerInfo.parse(answer)

    async def delete_consumer(self, stream: str, name: str) -> None:
        await self._decide(f"delete consumer {name!r} of {stream!r}", _consumer("DELETE", stream, name))

    async def consumer_info(self, stream: str, name: str) -> ConsumerInfo:
        answer = await self._read(f"consumer {name!r} of stream {stream!r}", _consumer("INFO", stream, name))
        return ConsumerInfo.parse(answer)

    async def consumers(self, stream: str) -> list[ConsumerInfo]:
        """Return all consumers of a stream, over all pages."""
        what, verb = f"list consumers of {stream!r}", f"CONSUMER.LIST.{_name('stream', stream)}"
        return [ConsumerInfo.parse(raw) for raw in await self._list(what, verb, "consumers", {})]

    async def consumer_names(self, stream: str) -> list[str]:
        what, verb = f"list consumer names of {stream!r}", f"CONSUMER.NAMES.{_name('stream', stream)}"
        return await self._list(what, verb, "consumers", {})

    async def pause_consumer(self, stream: str, name: str, until: datetime | timedelta) -> datetime | None:
        """Stop deliveries until then; returns when they resume by themselves."""
        until = datetime.now(UTC) + until if isinstance(until, timedelta) else until.astimezone(UTC)
        answer = await self._pause("pause", stream, name, {"pause_until": until.isoformat()})
        return parse_time(answer.get("pause_until", ""))

    async def resume_consumer(self, stream: str, name: str) -> None:
        """Resume deliveries; no effect on a consumer that is not paused."""
        await self._pause("resume", stream, name, {})

    async def _pause(self, action: str, stream: str, name: str, body: Json) -> Json:
        await self.require(features.CONSUMER_PAUSE)
        return await self._read(f"{action} consumer {name!r} of {stream!r}", _consumer("PAUSE", stream, name), body)

    async def reset_consumer(self, stream: str, name: str, seq: int | None = None) -> ConsumerReset:
        """Drop pending acknowledgements, and continue at `seq`, or after the ack floor when `seq` is None.

        Only consumers that deliver `all`, `by_start_sequence` or `by_start_time` can be moved, and not before their
        start. Moving forward on a WorkQueue or Interest stream leaves the skipped messages in the stream permanently.
        The stream's end is the maximum: from beyond it, the server would silently skip future messages.
        """
        if seq is not None and seq < 1:
            raise ConfigError(f"a consumer can be reset to sequence 1 or above, not to {seq}")
        await self.require(features.CONSUMER_RESET)
        await self.consumer_info(stream, name)  # the server does not answer a reset of a missing consumer
        if seq is not None:
            refuse_beyond_end(await self.stream_info(stream), seq)
        body = None if seq is None else {"seq": seq}
        answer = await self._decide(f"reset consumer {name!r} of {stream!r}", _consumer("RESET", stream, name), body)
        return ConsumerReset(answer["reset_seq"], ConsumerInfo.parse(answer))

    # -- the wire --------------------------------------------------------------------------------------------------

    async def _ask(self, what: str, verb: str, body: Json | None, within: float, parse: Parse = json.loads) -> Json:
        """Send one request and return its answer; a refusal of the server is raised."""
        payload = b"" if body is None else json.dumps(body, separators=(",", ":")).encode()
        self.requests += 1
        try:
            raw = await self._request(f"{self._prefix}.{verb}", payload, max(within, 0.001))
        except DeadlineExceeded as exc:
            raise DeadlineExceeded(what, self.timeout) from exc
        answer = parse(raw)
        if error := answer.get("error"):
            raise codes.refusal(what, error)
        return answer

    async def _repeat(
        self,
        what: str,
        verb: str,
        body: Json | None,
        retry_on: Callable[[BaseException], bool],
        parse: Parse = json.loads,
    ) -> Json:
        deadline = time.monotonic() + self.timeout
        return await retry.retrying(
            lambda: self._ask(what, verb, body, deadline - time.monotonic(), parse),
            within=self.timeout,
            retry_on=retry_on,
        )

    async def _read(self, what: str, verb: str, body: Json | None = None, parse: Parse = json.loads) -> Json:
        """Send an idempotent request: retried while the server is busy or unavailable, up to the deadline."""
        return await self._repeat(what, verb, body, retry.is_retryable, parse)

    async def _decide(self, what: str, verb: str, body: Json | None = None) -> Json:
        """Send a request that must not be done twice: retried only while nothing was done."""
        try:
            return await self._repeat(what, verb, body, _nothing_was_done)
        except (ConnectionLost, DeadlineExceeded) as exc:
            raise OutcomeUnknown(f"{what}: the answer was lost ({exc})") from exc

    async def _list(self, what: str, verb: str, key: str, body: Json, parse: Parse = json.loads) -> list[Any]:
        """Return all items of a listing, in the order of their names.

        Pages are counted from the start, so an item removed before a page shifts others out of it. Hence each page is
        requested so that it overlaps the one before, and from further back when it turns out not to.
        """
        items: list[Any] = []
        last, offset = "", 0
        while True:
            answer = _complete(what, await self._read(what, verb, {**body, "offset": offset}, parse))
            page, total = answer.get(key) or [], answer.get("total", 0)
            if last and offset and not (page and _name_of(page[0]) <= last):
                offset = max(0, offset - OVERLAP)
                continue
            items += [item for item in page if _name_of(item) > last]
            if not page or offset + len(page) >= total:
                return items
            last, offset = _name_of(page[-1]), offset + len(page) - 1


def refuse_beyond_end(stream: StreamInfo, seq: int) -> None:
    """Raise when a consumer that continues at `seq` would skip messages that the stream does not have yet."""
    end = stream.state.last_seq
    if seq > end + 1:
        raise ConfigError(
            f"a consumer of stream {stream.name!r} cannot continue at sequence {seq}: the stream ends at {end}, and "
            f"messages yet to come would be skipped; to skip all there is, reset it to {end + 1}"
        )


MOVABLE = ("all", "by_start_sequence", "by_start_time")
"""Deliver policies with which the server moves a consumer to a sequence."""


def refuse_unmovable(info: ConsumerInfo, seq: int) -> None:
    """Raise when the server would refuse (10204) to move the consumer to `seq`."""
    policy, start = info.config.get("deliver_policy", "all"), info.config.get("opt_start_seq", 0)
    who = f"consumer {info.name!r} of {info.stream!r} cannot be moved to sequence {seq}"
    if policy not in MOVABLE:
        raise ConfigError(
            f"{who}: it delivers {policy!r}, and the server moves only consumers that deliver {', '.join(MOVABLE)}; "
            "without a target it can be reset to where it is"
        )
    if seq < start:
        raise ConfigError(f"{who}: it starts at {start}, and the server moves no consumer before its start")


def _nothing_was_done(error: BaseException) -> bool:
    lost = isinstance(error, ConnectionLost | DeadlineExceeded)
    return not lost and isinstance(error, ServerBusy | Unavailable) and retry.is_retryable(error)


def _complete(what: str, answer: Json) -> Json:
    """Raise when a listing is incomplete: a cluster leaves out what does not answer in time, which does not mean that
    it is missing."""
    if missing := answer.get("missing"):
        raise Unavailable(f"{what}: no answer about {', '.join(sorted(missing))}; is a server of the cluster down?")
    return answer


def _name_of(item: Any) -> str:
    """Return the name of a listed item: a name, a consumer's info, or a stream's info."""
    return str(item if isinstance(item, str) else item.get("name") or item["config"]["name"])


def _name(kind: str, name: str) -> str:
    if _NOT_A_NAME.search(name):
        raise ConfigError(f"{name!r} cannot be the name of a {kind}: spaces and . * > / \\ are not allowed")
    return name


def _consumer(verb: str, stream: str, name: str) -> str:
    return f"CONSUMER.{verb}.{_name('stream', stream)}.{_name('consumer', name)}"


def _changed(config: Json, change: Change) -> Json:
    return change(dict(config)) if callable(change) else {**config, **change}
