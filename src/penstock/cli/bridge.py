"""`penstock bridge`: carry a stream to a cluster that shares no link with it."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import click

from penstock.cli.common import (
    CONNECTION_OPTIONS,
    EXIT_OK,
    RESOURCE_NAME,
    Context,
    F,
    err,
    flag_values,
    json_option,
    out,
    print_json,
    show_result,
    table,
)
from penstock.errors import ConsumerNotFound, StreamNotFound
from penstock.jetstream.api import JetStream
from penstock.jetstream.model import StreamInfo
from penstock.settings import Settings
from penstock.sourcing import bridge as bridging
from penstock.sourcing.bridge import Bridge, BridgeConfig, BridgeStatistics
from penstock.sourcing.mapping import Mapping
from penstock.units import counted
from penstock.wire import blocking

SIDES = ("from", "to")


def side_options(command: F) -> F:
    """The connection flags twice, for the origin and for the destination."""
    for side in reversed(SIDES):
        for option in reversed([*(_renamed(one, side) for one in _templates()), _settings_option(side)]):
            command = option(command)
    return command


def _templates() -> list[click.Option]:
    probe: Any = lambda: None  # noqa: E731 -- carries the parameters of the options
    for option in CONNECTION_OPTIONS:
        option(probe)
    return list(probe.__click_params__)


def _renamed(template: click.Option, side: str) -> Callable[[F], F]:
    words = {"from": "of the origin", "to": "of the destination"}[side]
    text = (template.help or "").partition("  [env")[0].rstrip(".")
    return click.option(
        f"--{side}-{template.opts[0].removeprefix('--')}",
        metavar=template.metavar,
        type=template.type,
        help=f"{text}, {words}.",
    )


def _settings_option(side: str) -> Callable[[F], F]:
    return click.option(f"--{side}-settings", metavar="FILE", help="A settings file with all of these.")


def side_settings(context: Context, options: dict[str, Any], side: str) -> Settings:
    """The settings of one side: its flags, then its file, then whatever holds for both."""
    given = {
        name.removeprefix(f"{side}_"): value
        for name, value in options.items()
        if name.startswith(f"{side}_") and value is not None
    }
    file = given.pop("settings", None)
    if file:
        return Settings.load(env={}, file=file, **given)
    if given:
        return Settings.load(env={}, **given)
    return context.settings()


@click.command(epilog="Exit code 1: it was fenced off by another instance, or something needs manual action.")
@click.argument("name")
@click.argument("origin", type=RESOURCE_NAME, metavar="FROM_STREAM")
@click.argument("destination", type=RESOURCE_NAME, metavar="TO_STREAM")
@side_options
@click.option("--subject", "subjects", multiple=True, metavar="FILTER", help="Only these subjects; repeatable.")
@click.option("--map", "mappings", multiple=True, metavar="FROM=TO", help="Rename subjects; repeatable.")
@click.option("--deliver-subject", default="", help="Deliver subject of the origin's consumer.  [default: generated]")
@click.option("--rate", type=click.FloatRange(min=0, min_open=True), metavar="N", help="Messages a second, at most.")
@click.option("--create", is_flag=True, help="Make the destination stream if it does not exist.")
@click.option("--until-caught-up", is_flag=True, help="End when everything is carried over.")
@click.option("--report-every", type=float, default=10.0, show_default=True, metavar="SECONDS", help="0: never.")
@click.option(
    "--metrics-port", type=click.IntRange(0, 65535), metavar="PORT", help="Serve /metrics for Prometheus on loopback."
)
@click.option("--dry-run", is_flag=True, help="Check both sides, say what would happen, and change nothing.")
@json_option
@click.pass_obj
def bridge(
    context: Context,
    /,
    name: str,
    origin: str,
    destination: str,
    subjects: tuple[str, ...],
    mappings: tuple[str, ...],
    deliver_subject: str,
    rate: float | None,
    create: bool,
    until_caught_up: bool,
    report_every: float,
    metrics_port: int | None,
    dry_run: bool,
    as_json: bool,
    **sides: Any,
) -> int:
    """Carry FROM_STREAM into TO_STREAM of another cluster, every message once and in order.

    NAME is the bridge: its durable consumer on the origin has that name, and every copy carries it in a header. The
    destination has no other writer; a second instance of the same name takes over, and the first one stops.

    \b
    Example:
      penstock bridge site1 ORDERS SITE1_ORDERS \\
        --from-servers nats://site1:4222 --from-credentials site1.creds \\
        --to-servers tls://hub:4222 --to-tls-ca hub-ca.pem --create --map 'orders.>=site1.orders.>'
    """
    with flag_values():
        config = BridgeConfig(
            name=name,
            origin=origin,
            destination=destination,
            subjects=subjects,
            mappings=tuple(Mapping.parse(text) for text in mappings),
            deliver_subject=deliver_subject,
            rate=rate,
        )
    made = Bridge(config, side_settings(context, sides, "from"), side_settings(context, sides, "to"))
    if dry_run:
        return _dry_run(made, create, as_json)
    if create:
        _create_destination(made)
    stopped = threading.Event()
    with _stopping(stopped), _reporting(made, report_every, metrics_port):
        statistics = made.run(stopped.is_set, until_caught_up=until_caught_up)
    _show(statistics, as_json)
    return EXIT_OK


def _show(statistics: BridgeStatistics, as_json: bool) -> None:
    show_result(
        as_json,
        asdict(statistics),
        f"stored {counted(statistics.stored, 'message')}, up to sequence {statistics.position} of the origin",
    )


@contextmanager
def _stopping(stopped: threading.Event) -> Iterator[None]:
    """Ctrl-C and SIGTERM let the batch under way be finished."""
    before = {number: signal.signal(number, lambda *_: stopped.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _reporting(made: Bridge, every: float, port: int | None) -> Iterator[None]:
    """A line on stderr from time to time, and metrics for whoever asks."""
    ended = threading.Event()
    if every > 0:
        threading.Thread(target=_report, args=(made, every, ended), daemon=True).start()
    end = None
    if port is not None:
        from penstock.sourcing.metrics import serve  # only where somebody asks for metrics

        end = serve(made, port)
    try:
        yield
    finally:
        ended.set()
        if end:
            end()


def _report(made: Bridge, every: float, ended: threading.Event) -> None:
    before, since = 0, time.monotonic()
    while not ended.wait(every):
        now = made.statistics()
        rate = (now.stored - before) / (time.monotonic() - since)
        before, since = now.stored, time.monotonic()
        trouble = f", trouble: {now.last_error}" if now.last_error else ""
        behind = "lag not known yet" if now.lag is None else f"{now.lag} behind"
        err.print(f"at {now.position}, {behind}, {rate:.0f} messages/s{trouble}", markup=False, soft_wrap=True)


# -- before it starts --------------------------------------------------------------------------------------------------


def _dry_run(made: Bridge, create: bool, as_json: bool) -> int:
    """Look at both sides."""
    config = made.config
    with blocking.connect(made.origin_settings) as there, blocking.connect(made.destination_settings) as here:
        origin = _jetstream(there, made.origin_settings)
        source = blocking.run(origin.stream_info(config.origin))
        _check_origin(origin, source, config)
        jetstream = _jetstream(here, made.destination_settings)
        missing = create and config.destination not in blocking.run(jetstream.stream_names())
        target = None if missing else bridging.destination_info(jetstream, config)
        delivers_to = config.delivers_to(blocking.run(origin.account_info()).domain)
        position = 0
        if target:
            bridging.check_destination(target)
            bridging.check_mappings(source, target, config)
            position = bridging.resume_point(jetstream, target, config).position
    facts = {
        "origin": f"{config.origin} at {made.origin_settings.servers[0]}",
        "destination": f"{config.destination} at {made.destination_settings.servers[0]}",
        "destination_exists": target is not None,
        "consumer": config.name,
        "deliver_subject": delivers_to,
        "subjects": list(config.subjects) or [">"],
        "mappings": [str(mapping) for mapping in config.mappings],
        "resumes_behind": position,
        "origin_last_sequence": source.state.last_seq,
    }
    if as_json:
        print_json(facts)
    else:
        rows = [(key.replace("_", " "), ", ".join(v) if isinstance(v, list) else v) for key, v in facts.items()]
        out.print(table(f"bridge {config.name}: nothing was changed", ["", ""], rows))
    return EXIT_OK


def _check_origin(origin: JetStream, source: StreamInfo, config: BridgeConfig) -> None:
    """What the origin would refuse, or has otherwise."""
    try:
        bridging.check_consumer(blocking.run(origin.consumer_info(config.origin, config.name)), config)
    except ConsumerNotFound:
        bridging.check_origin(origin, source, config)


def _create_destination(made: Bridge) -> None:
    """Make the destination with the subjects of the origin, as the mappings have them."""
    config = made.config
    with blocking.connect(made.origin_settings) as there, blocking.connect(made.destination_settings) as here:
        jetstream = _jetstream(here, made.destination_settings)
        try:
            blocking.run(jetstream.stream_info(config.destination))
            return
        except StreamNotFound:
            pass
        origin = _jetstream(there, made.origin_settings)
        source = blocking.run(origin.stream_info(config.origin))
        _check_origin(origin, source, config)
        subjects = bridging.destination_subjects(source, config)
        blocking.run(jetstream.create_stream({"name": config.destination, "subjects": subjects, "allow_atomic": True}))
        err.print(f"made stream {config.destination} with subjects {', '.join(subjects)}", markup=False)


def _jetstream(connection: blocking.BlockingConnection, settings: Settings) -> JetStream:
    return JetStream(connection.requester(), settings.domain, settings.timeout)
