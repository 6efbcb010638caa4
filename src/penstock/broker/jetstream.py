"""The JetStream API: the one place that asks the server about streams, consumers and messages."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol

from penstock import retry
from penstock.broker.codes import api_error
from penstock.broker.model import (
    AccountInfo,
    ConsumerInfo,
    ConsumerReset,
    Json,
    StoredMessage,
    StreamInfo,
    parse_time,
)
from penstock.errors import ConfigError
from penstock.wire import headers

Change = Mapping[str, Any] | Callable[[Json], Json]
"""New values for some fields, or a function from the configuration read to the one to write."""


class Requester(Protocol):
    """Sends one request and returns the body of its answer. Raises only `PenstockError`."""

    async def __call__(self, subject: str, payload: bytes, timeout: float) -> bytes: ...


class JetStream:
    """Streams, consumers and messages of one account, over any `Requester`.

    Every call has a deadline (`timeout` seconds in all). Reads and other calls that may be repeated are tried again,
    with jittered backoff, while the server says that it is busy; a call whose answer was lost is not repeated unless
    it is idempotent. Answers of the server that mean "no" are raised as `ApiError`.
    """

    def __init__(self, request: Requester, domain: str | None = None, timeout: float = 5.0) -> None:
        self._request = request
        self._prefix = f"$JS.{domain}.API" if domain else "$JS.API"
        self.timeout = timeout
        self.requests = 0
        """API requests sent so far."""

    def in_domain(self, domain: str) -> JetStream:
        """The same connection, asking the JetStream of another domain."""
        return JetStream(self._request, domain, self.timeout)

    # -- account ---------------------------------------------------------------------------------------------------

    async def account_info(self) -> AccountInfo:
        return AccountInfo.parse(await self._read("account info", "INFO"))

    # -- streams ---------------------------------------------------------------------------------------------------

    async def create_stream(self, config: Json) -> StreamInfo:
        """Create a stream. Creating it again with the same configuration changes nothing.

        Raises `AlreadyExists` when the name is taken by a stream with another configuration.
        """
        name = config["name"]
        return StreamInfo.parse(await self._read(f"create stream {name!r}", f"STREAM.CREATE.{name}", config))

    async def update_stream(self, name: str, change: Change) -> StreamInfo:
        """Read the stream's configuration, change it, write all of it back: fields we do not know are kept."""
        current = await self.stream_info(name)
        config = _changed(current.config, change)
        return StreamInfo.parse(await self._read(f"update stream {name!r}", f"STREAM.UPDATE.{name}", config))

    async def delete_stream(self, name: str) -> None:
        await self._ask(f"delete stream {name!r}", f"STREAM.DELETE.{name}")

    async def stream_info(
        self, name: str, subjects_filter: str | None = None, deleted_details: bool = False
    ) -> StreamInfo:
        """Configuration and state; with `subjects_filter`, the message count of every matching subject too."""
        what, verb = f"stream {name!r}", f"STREAM.INFO.{name}"
        if subjects_filter is None:
            body = {"deleted_details": True} if deleted_details else None
            return StreamInfo.parse(await self._read(what, verb, body))
        subjects: dict[str, int] = {}
        while True:
            ask = {"subjects_filter": subjects_filter, "offset": len(subjects), "deleted_details": deleted_details}
            answer = await self._read(what, verb, ask)
            page = answer["state"].get("subjects") or {}
            subjects |= page
            if not page or len(subjects) >= answer.get("total", 0):
                answer["state"]["subjects"] = subjects
                return StreamInfo.parse(answer)

    async def streams(self, subject: str | None = None) -> list[StreamInfo]:
        """All streams, however many pages that takes; with `subject`, those that a filter of it could match."""
        body = {"subject": subject} if subject else {}
        return [StreamInfo.parse(raw) async for raw in self._pages("list streams", "STREAM.LIST", "streams", body)]

    async def stream_names(self, subject: str | None = None) -> list[str]:
        body = {"subject": subject} if subject else {}
        return [name async for name in self._pages("list stream names", "STREAM.NAMES", "streams", body)]

    async def purge_stream(
        self, name: str, *, subject: str | None = None, before_seq: int | None = None, keep: int | None = None
    ) -> int:
        """Remove messages for good: all, those of a subject, those below `before_seq`, or all but the last `keep`."""
        if before_seq is not None and keep is not None:
            raise ConfigError("purge takes before_seq or keep, not both")
        body = {k: v for k, v in {"filter": subject, "seq": before_seq, "keep": keep}.items() if v is not None}
        answer = await self._ask(f"purge stream {name!r}", f"STREAM.PURGE.{name}", body)
        return int(answer["purged"])

    async def step_down_stream(self, name: str) -> None:
        """Make the stream's leader hand over to another replica."""
        await self._ask(f"step down the leader of stream {name!r}", f"STREAM.LEADER.STEPDOWN.{name}")

    # -- messages --------------------------------------------------------------------------------------------------

    async def get_message(
        self, stream: str, seq: int | None = None, *, last_of: str | None = None, next_of: str | None = None
    ) -> StoredMessage:
        """One stored message: by sequence, the last of a subject, or the next of a subject at or above `seq`."""
        ask = {k: v for k, v in {"seq": seq, "last_by_subj": last_of, "next_by_subj": next_of}.items() if v is not None}
        what = f"message {seq or last_of or next_of!r} of stream {stream!r}"
        answer = await self._read(what, f"STREAM.MSG.GET.{stream}", ask)
        raw = answer["message"]
        return StoredMessage(
            stream=stream,
            subject=raw["subject"],
            sequence=raw["seq"],
            time=parse_time(raw["time"]),
            data=base64.b64decode(raw.get("data") or ""),
            headers=headers.parse(base64.b64decode(raw.get("hdrs") or "")),
        )

    async def delete_message(self, stream: str, seq: int, erase: bool = False) -> None:
        """Remove one message; `erase` also overwrites its bytes on disk."""
        body = {"seq": seq, "no_erase": not erase}
        await self._ask(f"delete message {seq} of stream {stream!r}", f"STREAM.MSG.DELETE.{stream}", body)

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
        answer = await self._read(f"{action} consumer {name!r} of {stream!r}", f"CONSUMER.CREATE.{stream}.{name}", body)
        return ConsumerInfo.parse(answer)

    async def delete_consumer(self, stream: str, name: str) -> None:
        await self._ask(f"delete consumer {name!r} of {stream!r}", f"CONSUMER.DELETE.{stream}.{name}")

    async def consumer_info(self, stream: str, name: str) -> ConsumerInfo:
        answer = await self._read(f"consumer {name!r} of stream {stream!r}", f"CONSUMER.INFO.{stream}.{name}")
        return ConsumerInfo.parse(answer)

    async def consumers(self, stream: str) -> list[ConsumerInfo]:
        """All consumers of a stream, however many pages that takes."""
        what = f"list consumers of {stream!r}"
        return [ConsumerInfo.parse(raw) async for raw in self._pages(what, f"CONSUMER.LIST.{stream}", "consumers", {})]

    async def pause_consumer(self, stream: str, name: str, until: datetime | timedelta) -> datetime | None:
        """Stop deliveries until then; returns when they resume by themselves."""
        until = datetime.now(UTC) + until if isinstance(until, timedelta) else until.astimezone(UTC)
        answer = await self._pause(stream, name, {"pause_until": until.isoformat()})
        return parse_time(answer.get("pause_until", ""))

    async def resume_consumer(self, stream: str, name: str) -> None:
        await self._pause(stream, name, {})

    async def _pause(self, stream: str, name: str, body: Json) -> Json:
        return await self._read(f"pause consumer {name!r} of {stream!r}", f"CONSUMER.PAUSE.{stream}.{name}", body)

    async def reset_consumer(self, stream: str, name: str, seq: int | None = None) -> ConsumerReset:
        """Forget what is in flight, and continue at `seq`, or after the ack floor when `seq` is None.

        Only consumers that deliver `all`, `by_start_sequence` or `by_start_time` can be moved, and not before their
        start. Moving forward on a WorkQueue or Interest stream leaves the skipped messages in the stream for good.
        """
        if seq is not None and seq < 1:
            raise ConfigError(f"a consumer can be reset to sequence 1 or above, not to {seq}")
        what = f"reset consumer {name!r} of {stream!r}"
        body = None if seq is None else {"seq": seq}
        answer = await self._ask(what, f"CONSUMER.RESET.{stream}.{name}", body)
        return ConsumerReset(answer["reset_seq"], ConsumerInfo.parse(answer))

    # -- the wire --------------------------------------------------------------------------------------------------

    async def _ask(self, what: str, verb: str, body: Json | None = None) -> Json:
        """One request, one answer; the server's "no" is raised."""
        payload = b"" if body is None else json.dumps(body, separators=(",", ":")).encode()
        self.requests += 1
        answer: Json = json.loads(await self._request(f"{self._prefix}.{verb}", payload, self.timeout))
        if error := answer.get("error"):
            raise api_error(what, error)
        return answer

    async def _read(self, what: str, verb: str, body: Json | None = None) -> Json:
        """`_ask` for what may be repeated: tried again while the server is busy, up to the deadline."""
        call: Callable[[], Awaitable[Json]] = lambda: self._ask(what, verb, body)  # noqa: E731
        return await retry.retrying(call, within=self.timeout)

    async def _pages(self, what: str, verb: str, key: str, body: Json) -> AsyncIterator[Any]:
        offset = 0
        while True:
            answer = await self._read(what, verb, {**body, "offset": offset})
            page = answer.get(key) or []
            for item in page:
                yield item
            offset += len(page)
            if not page or offset >= answer.get("total", 0):
                return


def _changed(config: Json, change: Change) -> Json:
    return change(dict(config)) if callable(change) else {**config, **change}
