"""`penstock dlq capture` and `reconcile`: letters of what nobody caught."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import asdict

import click

from penstock.cli.common import EXIT_ATTENTION, EXIT_OK, Context, err, json_option, out, print_json, show_result, sync
from penstock.cli.dlq_view import reconciled_table
from penstock.cli.errors_json import reported
from penstock.deadletter.capturer import Capturer
from penstock.deadletter.reconcile import reconcile as search


@click.command()
@click.option("--until-caught-up", is_flag=True, help="End when no advisory is waiting.")
@click.option("--undeclared", is_flag=True, help="Also consumers without `dlq:`, below dlq.STREAM.CONSUMER.")
@json_option
@click.pass_obj
@reported
@sync
async def capture(context: Context, until_caught_up: bool, undeclared: bool, as_json: bool) -> int:
    """Make dead letters of what the server says consumers gave up on.

    Runs until it is stopped; several may run at once. It catches what no worker could: a process that crashes on a
    message, or a consumer that knows nothing of dead letters.

    \b
    Example:
      penstock dlq capture
    """
    capturer, stop = Capturer(context.settings(), undeclared=undeclared), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    done = await capturer.run(stop, until_caught_up=until_caught_up)
    if as_json:
        print_json(asdict(done))
    else:
        out.print(f"{done.advisories} advisories: {done.stored} letters stored, {done.known} known, "
                  f"{done.unconcerned} of no concern, {done.failed} put back")  # fmt: skip
        if done.last_error:
            err.print(done.last_error, markup=False, soft_wrap=True)
    return EXIT_ATTENTION if done.last_error else EXIT_OK


@click.command(epilog="Exit code 2: of some consumer it is not certain that nothing is missing.")
@click.argument("consumers", nargs=-1, metavar="[CONSUMER]...")
@json_option
@click.pass_obj
@reported
@sync
async def reconcile(context: Context, consumers: tuple[str, ...], as_json: bool) -> int:
    """Find what consumers gave up on without anybody hearing of it, and make letters of that.

    Looks at every consumer with a `dlq:`, or at those named. A consumer with messages in flight is left alone: pause it
    first.

    \b
    Example:
      penstock dlq reconcile
    """
    found = await search(context.settings(), consumers)
    show_result(
        as_json,
        {"version": 1, "consumers": [asdict(one) for one in found]},
        reconciled_table(found) if found else "no consumers with a `dlq:`",
    )
    return EXIT_ATTENTION if any(one.undecided for one in found) else EXIT_OK
