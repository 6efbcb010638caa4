"""`penstock sources`: how streams read other streams, and the consumers they read through."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from penstock import subjects
from penstock.cli.common import (
    EXIT_ATTENTION,
    EXIT_ERROR,
    EXIT_OK,
    RESOURCE_NAME,
    Column,
    Context,
    err,
    fail,
    flag_values,
    json_option,
    out,
    print_json,
    sync,
    table,
    usage,
)
from penstock.cli.platform import env_option, file_argument
from penstock.cli.terminal import echo
from penstock.errors import AccessDenied, AlreadyExists, StreamNotFound, Unavailable
from penstock.jetstream import connect
from penstock.jetstream.api import JetStream
from penstock.jetstream.model import Json
from penstock.printable import json_text
from penstock.settings import Settings
from penstock.sourcing import migrate as migrating
from penstock.sourcing import mirrors, modes
from penstock.sourcing.accounts import API, Grant, needs_grant
from penstock.sourcing.links import SourceLink, State, links
from penstock.sourcing.migrate import MigrationRefused, SourceMigration
from penstock.topology import actual, delivery, ownership
from penstock.topology.load import load
from penstock.topology.model import Platform, SourceSpec, StreamSpec
from penstock.topology.resource import Actual, Desired, Resource, deliver_subject, managed_consumers, source_consumer
from penstock.units import parse_moment

COLUMNS: list[Column] = [
    "STREAM",
    "ORIGIN",
    "MODE",
    "CONSUMER",
    ("LAG", "right"),
    ("SECONDS", "right"),
    "STATE",
    ("ACKED", "right"),
    ("ARRIVED", "right"),
]


@click.group()
def sources() -> None:
    """Sources and mirrors: status, and the consumers they read through.

    \b
    Example:
      penstock sources ls
      penstock sources create-consumer penstock.yaml ORDERS_COPY
    """


@sources.command(epilog="Exit code 2: a source is stalled or failing.")
@click.argument("stream", type=RESOURCE_NAME, required=False)
@json_option
@click.pass_obj
@sync
async def ls(context: Context, stream: str | None, as_json: bool) -> int:
    """List every source and mirror, or those of STREAM: mode, origin, consumer, lag, state.

    LAG and SECONDS are what the origin has and the copy has not, "not known" where the origin cannot be asked; ACKED is
    how far the origin knows that it is stored, ARRIVED how far it is. An ephemeral consumer is nobody's but the
    server's, so only the server's own lag is shown for it.

    \b
    Example:
      penstock sources ls --json | jq '.[] | select(.state != "active")'
    """
    async with connect(context.settings()) as broker:
        found = await links(broker.jetstream, stream)
    if as_json:
        print_json([_facts(link) for link in found])
    elif found:
        out.print(table(None, COLUMNS, [_row(link) for link in found]))
        for link in found:
            if link.problem:
                out.print(f"{link.stream} from {link.origin}: {link.problem}", markup=False, soft_wrap=True)
    else:
        out.print("no sources and no mirrors")
    ill = any(link.state in (State.STALLED, State.FAILING) for link in found)
    return EXIT_ATTENTION if ill else EXIT_OK


def _facts(link: SourceLink) -> Json:
    """A source for machines; these names stay."""
    return {
        "stream": link.stream,
        "origin": link.origin,
        "api": link.api,
        "kind": link.kind,
        "mode": str(link.mode),
        "consumer": link.consumer,
        "lag_messages": link.lag,
        "lag_seconds": None if link.lag_time is None else link.lag_time.total_seconds(),
        "state": str(link.state),
        "heard_seconds_ago": None if link.heard_ago is None else link.heard_ago.total_seconds(),
        "paused_until": _until(link),
        "ack_floor": link.acknowledged,
        "arrived": link.arrived,
        "problem": link.problem,
    }


def _until(link: SourceLink) -> str | None:
    return (datetime.now(UTC) + link.paused_for).isoformat(timespec="seconds") if link.paused_for else None


def _row(link: SourceLink) -> list[Any]:
    state = f"paused until {_until(link)}" if link.paused_for else str(link.state)
    where = f"{link.origin} ({link.api})" if link.api else link.origin
    seconds = None if link.lag_time is None else f"{link.lag_time.total_seconds():.0f}"
    return [
        link.stream,
        f"{where} (mirror)" if link.kind == "mirror" else where,
        link.mode,
        link.consumer,
        "not known" if link.lag is None else link.lag,
        seconds,
        state,
        link.acknowledged,
        link.arrived,
    ]


@sources.command("create-consumer", epilog="Exit code 2: the origin cannot be reached, and its owner has to do it.")
@file_argument
@click.argument("stream", type=RESOURCE_NAME)
@click.argument("origin", required=False)
@env_option
@click.option("--filter", "filters", multiple=True, metavar="SUBJECT", help="Only these subjects; repeatable.")
@click.option("--start-sequence", type=click.IntRange(1), metavar="SEQ", help="Begin at this sequence of the origin.")
@click.option("--start-time", metavar="TIME", help="Begin at this time (RFC 3339).")
@click.option("--last-per-subject", is_flag=True, help="Begin with the last message of each subject.")
@click.option("--replay-original", is_flag=True, help="Deliver at the speed at which messages were stored.")
@click.option("--max-ack-pending", type=click.IntRange(1), default=modes.MAX_ACK_PENDING, show_default=True)
@click.option("--print", "only_print", is_flag=True, help="Print the configuration, and ask nobody.")
@click.pass_obj
@sync
async def create_consumer(
    context: Context,
    file: str,
    stream: str,
    origin: str | None,
    env: str | None,
    filters: tuple[str, ...],
    start_sequence: int | None,
    start_time: str | None,
    last_per_subject: bool,
    replay_original: bool,
    max_ack_pending: int,
    only_print: bool,
) -> int:
    """Make the consumer that a user-managed source of STREAM reads through, with everything a source needs.

    Where the origin cannot be reached with this login, the exact request is printed instead, to hand over.

    \b
    Example:
      penstock sources create-consumer penstock.yaml ORDERS_COPY --last-per-subject --filter 'orders.>'
    """
    _check_start(start_sequence, start_time, last_per_subject)
    for one in filters:
        if problem := subjects.problem(one):
            usage(f"--filter {one!r}: {problem}")
    start_time = _moment(start_time) if start_time else None
    platform = load(file, env)
    source = _user_managed(platform, stream, origin)
    subject = deliver_subject(stream, source)
    resource = source_consumer(source)
    starts = {
        "opt_start_seq": start_sequence,
        "opt_start_time": start_time,
    }
    config = {
        **modes.required(resource.name, subject),
        **modes.start({k: v for k, v in starts.items() if v is not None}),
        "max_ack_pending": max_ack_pending,
    }
    if last_per_subject:
        config["deliver_policy"] = "last_per_subject"
        filters = filters or (">",)  # the server wants one with this policy
    if replay_original:
        config["replay_policy"] = "original"
    if filters:
        config |= {"filter_subject": filters[0]} if len(filters) == 1 else {"filter_subjects": list(filters)}
    if only_print:
        _hand_over(resource, config)
        return EXIT_OK
    settings = context.settings_below_flags(**platform.environment.settings_overrides())
    async with connect(settings) as broker:
        there = broker.jetstream.at_prefix(resource.api) if resource.api else broker.jetstream
        try:
            await there.create_consumer(resource.stream, config)
        except AlreadyExists:
            found = (await there.consumer_info(resource.stream, resource.name)).config
            wrong = list(modes.misfits(found, subject))
            err.print(f"{resource} exists already: {'; '.join(wrong) or 'it fits'}", markup=False, soft_wrap=True)
            return EXIT_ATTENTION if wrong else EXIT_OK
        except (Unavailable, AccessDenied, StreamNotFound) as exc:
            err.print(
                f"the origin cannot be reached ({exc}); hand this over to its owner:", markup=False, soft_wrap=True
            )
            _hand_over(resource, config)
            return EXIT_ATTENTION
    out.print(f"made {resource}, delivering to {subject}", markup=False)
    return EXIT_OK


def _check_start(sequence: int | None, time: str | None, last_per_subject: bool) -> None:
    given = {"--start-sequence": sequence is not None, "--start-time": time is not None}
    flags = [flag for flag, is_given in {**given, "--last-per-subject": last_per_subject}.items() if is_given]
    if len(flags) > 1:
        usage(f"{' and '.join(flags)} are different starts: give one of them")


def _moment(text: str) -> str:
    """A time as the server takes it."""
    with flag_values("--start-time"):
        return parse_moment(text).isoformat().replace("+00:00", "Z")


def _user_managed(platform: Platform, stream: str, origin: str | None) -> SourceSpec:
    if stream not in platform.streams:
        usage(f"the file declares no stream {stream!r}")
    found = [
        one
        for one in platform.streams[stream].origins
        if one.consumer and not one.server_managed and origin in (None, one.name)
    ]
    if len(found) != 1:
        names = ", ".join(one.name for one in found) or "none"
        usage(f"stream {stream!r} must have one user-managed source of that name; it has: {names}")
    return found[0]


def _hand_over(consumer: Resource, config: Json) -> None:
    """The exact request, as anybody with access can send it, and what an account must grant."""
    body = {"stream_name": consumer.stream, "config": config, "action": "create"}
    subject = f"{API}.CONSUMER.CREATE.{consumer.stream}.{consumer.name}"
    echo(f"# send this to the subject {subject} where {consumer.stream} lives")
    if consumer.api:
        echo(f"# (from here it is reached as {consumer.api})")
    echo(json_text(body, indent=2, sort_keys=True))
    if needs_grant(consumer.api):
        grant = Grant(consumer.stream, consumer.name, str(consumer.api), config["deliver_subject"])
        echo(f"# in the server's configuration, for the account of {consumer.stream}:\n{grant.exports()}")
        echo(f"# for the account that reads:\n{grant.imports()}")


@sources.command(epilog="Exit code 0: every source reads as declared. 2: something is to be done, and was not.")
@file_argument
@env_option
@click.option("--yes", is_flag=True, help="Do it; without, only the plan is shown.")
@click.option(
    "--backup",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Where mirrors are kept while they are exchanged.  [default: .penstock/migrations beside FILE]",
)
@json_option
@click.pass_obj
@sync
async def migrate(context: Context, file: str, env: str | None, yes: bool, backup: Path | None, as_json: bool) -> int:
    """Change how living sources and mirrors read their origins to what the file declares. Nothing is lost or repeated.

    Between ephemeral, a durable of Penstock's and one of your own, in any direction, while messages flow. A migration
    that was interrupted is finished. What else differs from the file is left to `penstock apply`. A mirror is saved,
    deleted and restored, so its readers find it missing for a moment.

    \b
    Example:
      penstock sources migrate penstock.yaml
      penstock sources migrate penstock.yaml --yes
    """
    platform = load(file, env)
    settings = context.settings_below_flags(**platform.environment.settings_overrides())
    folder = backup or Path(file).parent / ".penstock" / "migrations"
    behind: dict[str, int] = {}
    async with connect(settings) as broker:
        desired = Desired.of(platform, (await broker.jetstream.account_info()).domain)
        found = await actual.read(broker.jetstream, desired)
        desired = delivery.keeping_subjects(desired, found)
        wanted = migrations(platform, desired, found, mirrors.interrupted(folder))
        if not as_json:
            _show_migrations(wanted)
        refused = _refused(wanted, found)
        for migration, why in refused:
            fail(str(why))
            wanted.remove(migration)
        for migration in wanted if yes else ():
            behind[migration.stream] = await _migrated(broker.jetstream, settings, migration, folder)
            if not as_json:
                echo(f"{migration.stream} goes on behind sequence {behind[migration.stream]} of its origin")
    if as_json:
        print_json([{**_migration_facts(one), "behind": behind.get(one.stream)} for one in wanted])
    if refused:
        return EXIT_ERROR
    return EXIT_ATTENTION if wanted and not yes else EXIT_OK


def _refused(wanted: list[SourceMigration], found: Actual) -> list[tuple[SourceMigration, MigrationRefused]]:
    """The migrations that cannot be done, with the reason; they keep no other from being done."""
    refused = []
    for migration in wanted:
        info = found.streams.get(migration.stream)
        if info and SourceMigration.noted(info) is None:
            try:
                migrating.check(migration, info)
            except MigrationRefused as exc:
                refused.append((migration, exc))
    return refused


async def _migrated(js: JetStream, settings: Settings, migration: SourceMigration, folder: Path) -> int:
    if migration.mirror:
        return await mirrors.run(js, settings, migration, folder)
    return await migrating.run(js, migration)


def _show_migrations(wanted: list[SourceMigration]) -> None:
    for one in wanted:
        echo(f"{one.stream} from {one.origin}: {_reads(one.old)} -> {_reads(one.new)}")
        if one.mirror:
            echo("  a mirror: saved to a file, deleted and restored; its readers find it missing for a moment")
        if one.old_name and one.old_name != one.new_name:
            echo(f"  consumer {one.old_name} goes if Penstock made it; one of your own stays, and an Interest")
            echo("  origin keeps messages for it; a WorkQueue origin takes no second one, so there it goes too")
    if not wanted:
        echo("every source reads as declared")


def _reads(source: Json) -> str:
    consumer = source.get("consumer")
    return f"through {consumer['name']}" if consumer else "ephemeral"


def _migration_facts(migration: SourceMigration) -> Json:
    return {"stream": migration.stream, "origin": migration.origin, "from": migration.old, "to": migration.new}


def migrations(
    platform: Platform, desired: Desired, found: Actual, interrupted: Sequence[SourceMigration] = ()
) -> list[SourceMigration]:
    """The sources and mirrors whose consumer differs from what the file declares, and migrations begun. Pure."""
    left = {one.stream: one for one in interrupted}
    made = []
    for name, spec in platform.streams.items():
        info = found.streams.get(name)
        if begun := (SourceMigration.noted(info) if info else None) or left.get(name):
            made.append(begun)
        elif info:
            made += _changed(platform, spec, desired, info.config)
    return made


def _changed(platform: Platform, spec: StreamSpec, desired: Desired, shown: Json) -> Iterator[SourceMigration]:
    wanted, managed = desired.configs[Resource(spec.name)], managed_consumers(platform)
    consumers = {resource: desired.configs[resource] for resource in managed}
    for source, new, old in zip(spec.origins, _origins(wanted), _paired(wanted, shown), strict=True):
        if old is not None and (old.get("consumer") or None) != (new.get("consumer") or None):
            config = consumers.get(source_consumer(source)) if source.consumer else None
            marked = ownership.marked(config, platform.name) if config else {}
            yield SourceMigration(spec.name, old, new, marked, mirror=spec.mirror is not None)


def _origins(config: Json) -> list[Json]:
    return [config["mirror"]] if config.get("mirror") else list(config.get("sources") or ())


def _paired(wanted: Json, shown: Json) -> list[Json | None]:
    """For each wanted origin the one that the server shows for it: of that name, in that domain, and each only once."""
    left, found = _origins(shown), []
    for new in _origins(wanted):
        same = [one for one in left if _place(one) == _place(new)]
        # Of several sources of one origin, the one that reads through the same consumer.
        old = next((one for one in same if one.get("consumer") == new.get("consumer")), same[0] if same else None)
        if old is not None:
            left.remove(old)
        found.append(old)
    return found


def _place(origin: Json) -> tuple[str, str | None]:
    return origin["name"], (origin.get("external") or {}).get("api")
