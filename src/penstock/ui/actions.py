"""What an operator does to a consumer from its page: pause, resume, reset. Each is asked about before it is done."""

from __future__ import annotations

import json
import logging
import secrets
from datetime import UTC, datetime
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import RedirectResponse, Response

from penstock.deadletter import streams as letter_streams
from penstock.deadletter.audit import audit_stream, this_user
from penstock.errors import ConfigError, Unavailable
from penstock.jetstream.api import JetStream, refuse_beyond_end, refuse_unmovable
from penstock.jetstream.model import ConsumerInfo
from penstock.jetstream.resets import foresee, reset_words
from penstock.sourcing import resets as sourcing
from penstock.ui.access import LOCAL
from penstock.ui.page import Page
from penstock.units import parse_duration

log = logging.getLogger(__name__)


async def consumer(page: Page) -> Response:
    """Show what an action would do; with the field `sure`, do it."""
    action, stream, name = page.at("action"), page.at("stream"), page.at("name")
    js = (await page.watch.control()).jetstream
    info = await js.consumer_info(stream, name)
    if action not in ("pause", "resume", "reset"):
        raise HTTPException(404)
    target = await _target(page, js, info) if action == "reset" else None
    effect = await _effect(page, action, js, info, target)
    if page.field("sure") != "yes":
        return sure(page, "/consumers", action, f"{action.capitalize()} {name}?", [effect])
    reason = page.field("reason").strip()
    told = {"stream": stream, "consumer": name, "effect": effect, "reason": reason}
    await noted(page, {"action": f"consumer.{action}", **told})
    if action == "pause":
        await js.pause_consumer(stream, name, datetime.now(UTC) + parse_duration(page.field("length", "10m")))
    elif action == "resume":
        await js.resume_consumer(stream, name)
    else:
        await sourcing.moved(page.watch.settings, js, info, target)
    return RedirectResponse(str(page.request.url.path).rpartition("/")[0], 303)


async def _effect(page: Page, action: str, js: JetStream, info: ConsumerInfo, target: int | None) -> str:
    """What the action does, in the words of the command line."""
    if action == "pause":
        length = page.field("length", "10m")
        parse_duration(length)
        retention = (await js.stream_info(info.stream)).config.get("retention", "limits")
        more = f"; {sourcing.pause_words(info, retention)}" if sourcing.is_sourcing(info) else ""
        return f"no deliveries to {info.stream} / {info.name} for {length}; messages wait, nothing is lost{more}"
    if action == "resume":
        return f"{info.stream} / {info.name} delivers again"
    assert target is not None
    return reset_words(await foresee(js, await js.stream_info(info.stream), info, target), info)


async def _target(page: Page, js: JetStream, info: ConsumerInfo) -> int:
    text = page.field("to").strip()
    stream = await js.stream_info(info.stream)
    if not text:
        return info.ack_floor_stream_seq + 1
    if not text.isdecimal() or not int(text):
        raise ConfigError(f"{text!r} is not a sequence: write a number from 1 on")
    refuse_beyond_end(stream, int(text))
    refuse_unmovable(info, int(text))
    return int(text)


def sure(page: Page, section: str, action: str, title: str, lines: list[str], needs_reason: bool = False) -> Response:
    """Ask whether to do what the lines say. The fields of the form are sent again by somebody who is sure."""
    fields = {name: values for name, values in page.form.items() if name not in ("token", "sure")}
    values: dict[str, Any] = {
        "action": action,
        "lines": lines,
        "fields": fields,
        "needs_reason": needs_reason,
        "back": section,
    }
    return page.show("sure.html", section, title, **values)


async def noted(page: Page, record: dict[str, object]) -> None:
    """Write to the audit who does what, before it is done. Raises when that cannot be written: then nothing is done."""
    told = {**record, "version": 1, "actor": actor(page), "time": datetime.now(UTC).isoformat()}
    log.info("%s", json.dumps(told))
    control = await page.watch.control()
    await audit_stream(control.jetstream)
    await control.ready()
    subject = letter_streams.action_subject(secrets.token_hex(8))
    answer = await control.connection.request(subject, json.dumps(told).encode())
    if "error" in json.loads(answer.data):
        raise Unavailable(f"the audit was not written, so nothing was done: {answer.data.decode()}")


def actor(page: Page) -> str:
    """The person, as the audit names them."""
    return f"{this_user()} in the browser" if page.person.name == LOCAL else page.person.name
