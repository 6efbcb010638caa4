"""`penstock replicate`: facts over a boundary."""

from __future__ import annotations

import asyncio
import signal
from contextlib import AsyncExitStack
from dataclasses import asdict
from typing import Any

import click

from penstock.cli.bridge import side_options, side_settings
from penstock.cli.common import (
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
from penstock.errors import ConfigError
from penstock.facts import Facts
from penstock.facts.reader import MOST_FACTS
from penstock.facts.replication import Destination, Replication, ReplicationConfig, ReplicationStatistics, Source
from penstock.sourcing.mapping import Mapping
from penstock.units import counted

GATEWAY_FLAGS = frozenset({"token", "tls_ca", "tls_cert", "tls_key", "timeout"})
"""Connection flags that mean something to a gateway."""


@click.command(epilog="Exit code 1: a fact was refused, or something else needs manual action.")
@click.argument("consumer", type=RESOURCE_NAME)
@side_options
@click.option("--from-gateway", metavar="URL", help="Read through this gateway, not over NATS.")
@click.option("--to-gateway", metavar="URL", help="Append through this gateway, not over NATS.")
@click.option(
    "--stream",
    type=RESOURCE_NAME,
    metavar="NAME",
    help="The reader's stream; needed where several streams have a consumer of that name.",
)
@click.option("--to-stream", type=RESOURCE_NAME, metavar="NAME", help="Append to this stream and no other.")
@click.option("--map", "mappings", multiple=True, metavar="FROM=TO", help="Rename subjects; repeatable.")
@click.option("--limit", type=click.IntRange(1, MOST_FACTS), default=100, show_default=True, help="Facts per page.")
@click.option("--until-caught-up", is_flag=True, help="End when everything is carried over and confirmed.")
@json_option
@click.pass_obj
@reported
@sync
async def replicate(
    context: Context,
    /,
    consumer: str,
    from_gateway: str | None,
    to_gateway: str | None,
    stream: str | None,
    to_stream: str | None,
    mappings: tuple[str, ...],
    limit: int,
    until_caught_up: bool,
    as_json: bool,
    **sides: Any,
) -> int:
    """Carry the facts of the named reader CONSUMER to another side, each once by its id, and in order.

    Either side is a NATS server, by its connection flags, or a gateway, with --from-gateway or --to-gateway; then
    --from-token, --from-tls-ca and their like are for the gateway. A page is confirmed when all of its facts are
    appended: killed at any point, run it again. A fact that is stored on the other side with other content ends it.

    \b
    Example:
      penstock replicate edge_reader --from-servers nats://core:4222 \\
        --to-gateway https://gateway.plant:8443 --to-token "$TOKEN" --to-tls-ca plant.pem
      penstock replicate edge_reader --from-gateway https://gateway:8443 --to-servers nats://plant:4222 \\
        --map 'facts.orders=plant.orders' --until-caught-up
    """
    with flag_values():
        renames = [Mapping.parse(text) for text in mappings]
    config = ReplicationConfig(
        consumer=consumer, stream=stream, to_stream=to_stream, rename=_renamed(renames), limit=limit
    )
    origin, other = _side(context, sides, "from", from_gateway), _side(context, sides, "to", to_gateway)
    async with AsyncExitStack() as stack:
        source: Source = await stack.enter_async_context(origin)
        destination: Destination = await stack.enter_async_context(other)
        made, stop = Replication(source, destination, config), asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):  # the page under way is finished
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        try:
            done = await made.run(stop, until_caught_up=until_caught_up)
        except BaseException:
            _show(made.statistics(), as_json, err_too=True)
            raise
    _show(done, as_json)
    return EXIT_OK


def _show(done: ReplicationStatistics, as_json: bool, err_too: bool = False) -> None:
    if as_json:
        if not err_too:
            print_json(asdict(done))
        return
    before = f", {counted(done.existed, 'fact')} were there before" if done.existed else ""
    confirmed = f"; confirmed up to sequence {done.position}" if done.position else ""
    words = f"appended {counted(done.appended, 'fact')}{before}{confirmed}"
    (err if err_too else out).print(words, markup=False)


def _renamed(mappings: list[Mapping]) -> Any:
    def rename(subject: str) -> str:
        return next((made for one in mappings if (made := one.map(subject)) is not None), subject)

    return rename


def _side(context: Context, sides: dict[str, Any], side: str, gateway: str | None) -> Any:
    """The side's facts: over NATS, or through a gateway."""
    if gateway is None:
        return Facts(side_settings(context, sides, side), "penstock replicate")
    given = {name.removeprefix(f"{side}_"): value for name, value in sides.items() if name.startswith(f"{side}_")}
    return gateway_client(gateway, given, f"--{side}-")


def gateway_client(url: str, given: dict[str, Any], prefix: str = "--") -> Any:
    """A client of a gateway, for connection flags that begin with `prefix`."""
    wrong = [
        f"{prefix}{name.replace('_', '-')}" for name, value in given.items() if value and name not in GATEWAY_FLAGS
    ]
    if wrong:
        usage(f"{', '.join(wrong)} {'is' if len(wrong) == 1 else 'are'} for NATS, and {prefix}gateway for a gateway")
    if not url.startswith(("https://", "http://")):
        usage(f"{prefix}gateway takes a URL such as https://gateway:8443, not {url!r}")
    try:
        from penstock.gateway import GatewayClient, GatewayLogin  # with packages that NATS alone does not need
    except ModuleNotFoundError as exc:
        raise ConfigError(
            f"a gateway needs more packages ({exc.name} is missing): pip install 'penstock-nats[gateway]'"
        ) from exc
    files = {name: given.get(f"tls_{name}") for name in ("ca", "cert", "key")}
    options = {"timeout": given["timeout"]} if given.get("timeout") else {}
    try:
        return GatewayClient(url, GatewayLogin(token=given.get("token"), **files), **options)
    except OSError as exc:
        raise ConfigError(f"{exc.filename}: {exc.strerror}") from exc
