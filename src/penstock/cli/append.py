"""`penstock append`: one fact by hand, or all of a file."""

from __future__ import annotations

import base64
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import click

from penstock.cli.common import (
    EXIT_ERROR,
    EXIT_OK,
    RESOURCE_NAME,
    Context,
    err,
    flag_values,
    json_option,
    out,
    print_json,
    sync,
    usage,
)
from penstock.cli.errors_json import reported
from penstock.cli.replicate import GATEWAY_FLAGS, gateway_client
from penstock.errors import ConfigError
from penstock.facts import Appended, Facts, NewFact
from penstock.facts.fact import checked_headers, stored_subject
from penstock.units import counted

AT_ONCE = 1_000
"""Facts of a file that are appended together."""


@click.command(epilog="Exit code 1: an id is stored with other content, or no stream takes the subject.")
@click.argument("subject", required=False)
@click.argument("fact_id", metavar="[ID]", required=False)
@click.option("--data", metavar="TEXT", help="The fact itself.")
@click.option("--file", "file", metavar="FILE", help="The file that holds the fact; `-` for standard input.")
@click.option("--lines", metavar="FILE", help="A file with a fact a line, as JSON; `-` for standard input.")
@click.option("--header", "headers", multiple=True, metavar="NAME=VALUE", help="A header; repeatable.")
@click.option("--stream", type=RESOURCE_NAME, metavar="NAME", help="Append to this stream and no other.")
@click.option("--gateway", metavar="URL", help="Through this gateway, with --token and --tls-… of `penstock` itself.")
@json_option
@click.pass_obj
@reported
@sync
async def append(
    context: Context,
    subject: str | None,
    fact_id: str | None,
    data: str | None,
    file: str | None,
    lines: str | None,
    headers: tuple[str, ...],
    stream: str | None,
    gateway: str | None,
    as_json: bool,
) -> int:
    """Append one fact with ID to SUBJECT, or every line of a file.

    Appending a fact again changes nothing; other content of the same id is refused.

    A line of --lines is a JSON object with `id` and `data`, and if needed `subject` (else SUBJECT), `headers`, and
    `data_base64` for data that is no text: the facts that `penstock fetch --json` prints. Data that is no string is
    stored as JSON.

    \b
    Example:
      penstock append facts.orders o-17 --data '{"total": 3}'
      penstock --token "$TOKEN" append facts.orders o-17 --file order.json --gateway https://gateway:8443
      jq -c '{id: .number, data: .}' orders.json | penstock append facts.orders --lines -
    """
    with flag_values():
        own = checked_headers(_headers(headers))
    if lines is not None:
        if fact_id is not None or data is not None or file is not None:
            usage("--lines has the id and the data of each fact: leave out ID, --data and --file")
        given = (_fact_of(number, line, subject, own) for number, line in enumerate(_lines(lines), 1) if line.strip())
        async with _target(context, gateway) as facts:
            return await _append_all(facts, given, stream, as_json)
    if subject is None or fact_id is None:
        usage("say which fact it is: SUBJECT and ID, or --lines FILE")
    if (data is None) == (file is None):
        usage("say what the fact is: --data TEXT or --file FILE")
    with flag_values():
        stored_subject(subject, fact_id)
    content = data.encode() if data is not None else _content(str(file))
    async with _target(context, gateway) as facts:
        done = await facts.append_fact(subject, fact_id, content, headers=own, stream=stream)
    if as_json:
        print_json({"stream": done.stream, "sequence": done.sequence, "existed": done.existed})
    else:
        was = "was there before, as" if done.existed else "is stored as"
        out.print(f"{fact_id} {was} {done.sequence} of {done.stream}", markup=False)
    return EXIT_OK


async def _append_all(facts: Any, given: Iterable[NewFact], stream: str | None, as_json: bool) -> int:
    """Append facts, many at a time, and print what became of them; as JSON, one line a fact."""
    counts = Counter[str]()
    facts_left = iter(given)
    while some := list(islice(facts_left, AT_ONCE)):
        done = await facts.append_facts(some, stream=stream)
        counts.update(one.outcome for one in done)
        for fact, one in zip(some, done, strict=True):
            _show(fact, one, as_json)
    if not as_json:
        before = f", {counted(counts['existed'], 'fact')} there before" if counts["existed"] else ""
        wrong = f", {counted(counts['conflict'], 'fact')} refused" if counts["conflict"] else ""
        out.print(f"{counted(counts['stored'], 'fact')} stored{before}{wrong}", markup=False)
    return EXIT_ERROR if counts["conflict"] else EXIT_OK


def _show(fact: NewFact, one: Appended, as_json: bool) -> None:
    if as_json:
        place = {"stream": one.stream, "sequence": one.sequence, "outcome": one.outcome}
        out.print(json.dumps({"subject": fact.subject, "id": fact.id, **place}), markup=False, soft_wrap=True)
    elif one.conflict:
        where = f"as {one.sequence} of {one.stream}"
        err.print(f"{fact.id} of {fact.subject} is stored with other content, {where}", markup=False, soft_wrap=True)


def _fact_of(number: int, line: str, subject: str | None, headers: Any) -> NewFact:
    """The fact in a line of a file."""
    try:
        told = json.loads(line)
        data = base64.b64decode(told["data_base64"], validate=True) if "data_base64" in told else _data(told["data"])
        fact = NewFact(told.get("subject") or subject or "", told["id"], data, told.get("headers") or headers)
        stored_subject(fact.subject, fact.id)
        checked_headers(fact.headers)
    except ConfigError as exc:
        raise ConfigError(f"line {number}: {exc}") from exc
    except KeyError as exc:
        raise ConfigError(f"line {number} has no {exc.args[0]!r}") from exc
    except (ValueError, TypeError, AttributeError, RecursionError) as exc:
        raise ConfigError(f'line {number} is no fact such as {{"id": "o-17", "data": "…"}}: {line[:60]!r}') from exc
    return fact


def _data(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else json.dumps(value, separators=(",", ":")).encode()


def _lines(file: str) -> Iterator[str]:
    try:
        with sys.stdin if file == "-" else Path(file).open(encoding="utf-8") as opened:
            yield from opened
    except OSError as exc:
        raise ConfigError(f"{file}: {exc.strerror}") from exc


def _target(context: Context, gateway: str | None) -> Any:
    if gateway is None:
        return Facts(context.settings(), "penstock append")
    chosen: dict[str, Any] = {}
    for name, value in context.connection.items():
        if name in GATEWAY_FLAGS or name not in context.from_variables:  # variables are for NATS, flags for both
            chosen[name] = value
    return gateway_client(gateway, chosen)


def _content(file: str) -> bytes:
    try:
        return sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as exc:
        raise ConfigError(f"{file}: {exc.strerror}") from exc


def _headers(given: tuple[str, ...]) -> dict[str, list[str]]:
    made: dict[str, list[str]] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not name or not equals:
            usage(f"--header takes NAME=VALUE, such as Kind=order, not {text!r}")
        made.setdefault(name, []).append(value)
    return made
