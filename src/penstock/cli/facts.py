"""`penstock fetch` and `penstock confirm`: a named reader, by hand."""

from __future__ import annotations

import base64
from typing import Any

import click

from penstock.cli.common import (
    EXIT_OK,
    RESOURCE_NAME,
    Column,
    Context,
    flag_values,
    json_option,
    out,
    print_json,
    show_result,
    sync,
    table,
)
from penstock.cli.errors_json import reported
from penstock.facts import Fact, Facts, Page
from penstock.facts.reader import MOST_FACTS
from penstock.units import approximate_duration, counted, parse_duration

COLUMNS: list[Column] = [("SEQUENCE", "right"), "SUBJECT", "ID", ("TRY", "right"), "DATA"]
SHOWN = 200
"""Characters of a fact's data in the table."""

stream_option = click.option(
    "--stream",
    type=RESOURCE_NAME,
    metavar="NAME",
    help="The consumer's stream; needed where several streams have one of that name.",
)


@click.command()
@click.argument("consumer", type=RESOURCE_NAME)
@stream_option
@click.option("--limit", type=click.IntRange(1, MOST_FACTS), default=10, show_default=True, help="Facts, at most.")
@click.option("--wait", default="0s", show_default=True, metavar="DURATION", help="How long to wait for the first.")
@json_option
@click.pass_obj
@reported
@sync
async def fetch(context: Context, consumer: str, stream: str | None, limit: int, wait: str, as_json: bool) -> int:
    """Fetch the next page of the durable CONSUMER, and print its receipt.

    A page that is not confirmed within the consumer's ack wait comes again, in order.

    \b
    Example:
      penstock fetch edge_reader --limit 100 --wait 5s
      penstock fetch edge_reader --json | jq -r .receipt
    """
    with flag_values():
        seconds = parse_duration(wait).total_seconds()
    async with Facts(context.settings(), "penstock fetch") as facts:
        page = await facts.fetch_facts(consumer, limit, stream=stream, wait=seconds)
    if as_json:
        print_json(_page(page))
    elif page:
        out.print(table(f"{page.stream} / {consumer}", COLUMNS, map(_row, page.facts)))
        out.print(f"\n{counted(page.pending, 'fact')} pending behind these. When these are dealt with:")
        named = f" --stream {stream}" if stream else ""
        out.print(f"  penstock confirm {consumer}{named} {page.receipt}", soft_wrap=True, markup=False)
    else:
        out.print(f"no facts for {page.stream} / {consumer}{_held(page)}", markup=False, soft_wrap=True)
    return EXIT_OK


@click.command()
@click.argument("consumer", type=RESOURCE_NAME)
@click.argument("receipt")
@stream_option
@json_option
@click.pass_obj
@reported
@sync
async def confirm(context: Context, consumer: str, receipt: str, stream: str | None, as_json: bool) -> int:
    """Confirm the page of the durable CONSUMER that came with RECEIPT, and no other.

    Confirming twice is harmless. A receipt that is stale, forged, or of another consumer is refused.

    \b
    Example:
      penstock confirm edge_reader pr2.aGF0cyE.T2xkZ...
    """
    async with Facts(context.settings(), "penstock confirm") as facts:
        done = await facts.confirm_receipt(consumer, receipt, stream=stream)
    if as_json:
        print_json(
            {"stream": done.stream, "consumer": consumer, "first": done.first, "last": done.last,
             "already": done.already}
        )  # fmt: skip
    else:
        before = ", as before" if done.already else ""
        out.print(f"{done.stream} / {consumer}: the page from {done.first} to {done.last} is confirmed{before}")
    return EXIT_OK


@click.command("rotate-key")
@json_option
@click.pass_obj
@reported
@sync
async def rotate_key(context: Context, as_json: bool) -> int:
    """Sign receipts with a new key from now on.

    Receipts of the key before stay valid until the next rotation; give readers the time to confirm their pages.

    \b
    Example:
      penstock rotate-key --env prod
    """
    async with Facts(context.settings(), "penstock rotate-key") as facts:
        current, previous = await facts.rotate_signing_key()
    show_result(
        as_json,
        {"key": current, "previous": previous},
        f"receipts are signed with key {current} now; those of key {previous} stay valid",
    )
    return EXIT_OK


def _held(page: Page) -> str:
    """What is handed out and not confirmed, and when it comes again."""
    if not page.held:
        return ""
    when = approximate_duration(page.retry_after) if page.retry_after else "a moment"
    are, come = ("is", "comes") if page.held == 1 else ("are", "come")
    return f" now: {counted(page.held, 'fact')} {are} handed out and not confirmed, and {come} again in {when}"


def _row(fact: Fact) -> tuple[Any, ...]:
    text = fact.data.decode("utf-8", "replace")
    shown = text if len(text) <= SHOWN else f"{text[:SHOWN]}…"
    return fact.sequence, fact.subject, fact.id, fact.attempt, shown


def _page(page: Page) -> dict[str, Any]:
    """A page for machines; these names stay."""
    return {
        "stream": page.stream,
        "consumer": page.consumer,
        "receipt": page.receipt,
        "pending": page.pending,
        "held": page.held,
        "retry_after_seconds": page.retry_after.total_seconds() if page.retry_after else None,
        "facts": [_fact(fact) for fact in page.facts],
    }


def _fact(fact: Fact) -> dict[str, Any]:
    try:
        data = {"data": fact.data.decode()}
    except UnicodeDecodeError:
        data = {"data_base64": base64.b64encode(fact.data).decode()}
    return {
        "stream": fact.stream,
        "sequence": fact.sequence,
        "subject": fact.subject,
        "id": fact.id,
        "headers": fact.headers,
        "stored_at": fact.stored_at.isoformat(),
        "attempt": fact.attempt,
        **data,
    }
