"""`penstock plan`, `apply` and `verify`: the declared platform against a server."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import click

from penstock.cli import errors_json, plan_view
from penstock.cli.common import (
    EXIT_ATTENTION,
    EXIT_ERROR,
    EXIT_OK,
    Context,
    err,
    fail,
    json_option,
    out,
    print_json,
    show_result,
    sync,
)
from penstock.cli.common import progress as progress_bar
from penstock.cli.lint import findings_table
from penstock.cli.terminal import Text
from penstock.deadletter.waiting import given_up
from penstock.errors import ConfigError, DeadlineExceeded, PenstockError, ServerBusy
from penstock.jetstream import connect
from penstock.jetstream.connection import Broker
from penstock.jetstream.model import Json
from penstock.settings import Settings
from penstock.sourcing import holes
from penstock.topology import actual, needs, plan_json
from penstock.topology import apply as carrying_out
from penstock.topology import plan as planning
from penstock.topology import verify as verification
from penstock.topology.apply import ApplyError, ApplyRefused
from penstock.topology.lint import Concerns, LintErrors, NamesGone, require_names, require_sound
from penstock.topology.load import load
from penstock.topology.lock import lock_of, lock_path, read_lock, write_lock
from penstock.topology.model import Platform
from penstock.topology.plan import Change, ChangeKind, Plan
from penstock.topology.resource import Actual, Desired
from penstock.topology.risk import Risk
from penstock.topology.verify import Check, Deviation
from penstock.units import counted

SETTLES_WITHIN = 5.0
LOOK_EVERY = 0.1  # seconds

file_argument = click.argument("file", default="penstock.yaml", type=click.Path(dir_okay=False))
env_option = click.option("--env", metavar="NAME", help="Environment of the file.  [default: the only one, or dev]")
override_option = click.option(
    "--allow-override",
    is_flag=True,
    help="Work on the servers that PENSTOCK_SERVERS names although FILE names others.",
)
take_over_option = click.option("--take-over", is_flag=True, help="Also change what another platform owns, and own it.")
prune_option = click.option("--prune", is_flag=True, help="Also delete what this platform owns and no longer declares.")


@dataclass(frozen=True, slots=True)
class PlatformSession:
    """A platform file and the server it is held against."""

    platform: Platform
    desired: Desired
    broker: Broker
    overridden_by: tuple[str, ...] = ()
    """Variables that send us to other servers than the file names."""

    @property
    def heading(self) -> Json:
        """What every JSON answer says about itself."""
        return {**_heading(self.platform, self.broker.settings), "overridden_by": list(self.overridden_by)}

    @property
    def title(self) -> Text:
        """Where we are, for people."""
        name, servers = self.platform.environment.name, ", ".join(self.broker.settings.servers)
        by = f", by {' and '.join(self.overridden_by)}" if self.overridden_by else ""
        domain = f", domain {self.broker.settings.domain}" if self.broker.settings.domain else ""
        return Text(f"environment {name} at {servers}{domain}{by}", style="dim")

    def require_declared_servers(self) -> None:
        """Raise `ConfigError` when a variable, and no flag, names another cluster than the file."""
        if self.overridden_by:
            raise ConfigError(
                f"nothing was done: {' and '.join(self.overridden_by)} overrides what {self.platform.path} says about "
                f"environment {self.platform.environment.name!r}; unset the variable, or add --allow-override"
            )

    async def read(self) -> Actual:
        with progress_bar() as bar:
            task = bar.add_task("reading consumers", total=None)
            return await actual.read(
                self.broker.jetstream, self.desired, lambda done, total: bar.update(task, completed=done, total=total)
            )

    async def plan(self, allow_destroy: bool, prune: bool, take_over: bool) -> Plan:
        found = await self.read()
        actual.require_answers(found)
        return planning.plan(self.desired, found, allow_destroy=allow_destroy, prune=prune, take_over=take_over)

    async def verify(self, wait: float) -> tuple[Actual, list[Deviation]]:
        deadline = time.monotonic() + wait
        while True:
            found, lost = await self.read(), await given_up(self.broker.jetstream)
            findings = verification.verify(self.desired, found, lost.by_consumer, await self._missing(found))
            if not verification.may_settle(findings) or time.monotonic() >= deadline:
                return found, findings
            await asyncio.sleep(LOOK_EVERY)

    async def _missing(self, found: Actual) -> dict[str, int]:
        """Messages of its origins that each stream has not stored."""
        silent = {(one.stream, one.api) for one in found.unanswered if one.api}

        def nobody_answers(source: Json) -> bool:
            return (source["name"], (source.get("external") or {}).get("api")) in silent

        js, settings = self.broker.jetstream, self.broker.settings
        streams = found.streams.values()
        return {one.name: await holes.missing(js, settings, one, nobody_answers) for one in streams}


def _heading(platform: Platform, settings: Settings) -> Json:
    return {"environment": platform.environment.name, "servers": list(settings.servers)}


@asynccontextmanager
async def session(context: Context, platform: Platform) -> AsyncIterator[PlatformSession]:
    """The platform and a connection to its environment's servers; flags and variables win over the file."""
    settings = _settings(context, platform)
    overridden = context.overriding(platform.environment.settings_overrides(), settings)
    async with connect(settings) as broker:
        account = await broker.jetstream.account_info()  # says so when there is no JetStream
        desired = Desired.of(platform, account.domain)
        needs.require(desired, broker)
        yield PlatformSession(platform, desired, broker, tuple(overridden))


def _settings(context: Context, platform: Platform) -> Settings:
    return context.settings_below_flags(**platform.environment.settings_overrides())


def _sound(file: str, env: str | None, as_json: bool) -> tuple[Platform, Concerns]:
    """The platform that a file declares, once lint has no error; else all of them are shown."""
    platform = load(file, env)
    try:
        return platform, require_sound(platform, read_lock(lock_path(platform.path)))
    except LintErrors as exc:
        if not as_json:
            out.print(findings_table(exc.findings))
        raise


@click.command(
    epilog="Exit code 0: nothing would change. 2: something would, or is out of reach. 1: a wrong file, or no answer."
)
@file_argument
@env_option
@click.option("--allow-destroy", is_flag=True, help="Plan to recreate streams that cannot be changed.")
@prune_option
@take_over_option
@json_option
@click.pass_obj
@sync
async def plan(
    context: Context, file: str, env: str | None, allow_destroy: bool, prune: bool, take_over: bool, as_json: bool
) -> int:
    """Show what `apply` would do, and what each change would cost.

    Changes are sorted into: create, safe, loses position, loses data, impossible. Nothing is changed.

    \b
    Example:
      penstock plan penstock.yaml --env prod
      penstock plan penstock.yaml --json | jq '.changes[] | select(.risk != "safe")'
    """
    with errors_json.told(as_json):
        platform, concerns = _sound(file, env, as_json)
        async with session(context, platform) as s:
            made = await s.plan(allow_destroy, prune, take_over)
            concerns = concerns.without(_deleted_empty(made))
    show_result(
        as_json,
        {**plan_json.plan_json(made, concerns), **s.heading},
        lambda: _show([s.title, *plan_view.plan_lines(made), *plan_view.concern_lines(concerns, allow_destroy)]),
    )
    return EXIT_ATTENTION if made or made.unreached else EXIT_OK


@click.command(
    epilog="Exit code 0: all is as declared now. 2: all that could be reached is. 1: it stopped, and says at what."
)
@file_argument
@env_option
@click.option("--allow-destroy", is_flag=True, help="Allow changes that lose a position or messages.")
@prune_option
@take_over_option
@override_option
@json_option
@click.pass_obj
@sync
async def apply(
    context: Context,
    file: str,
    env: str | None,
    allow_destroy: bool,
    prune: bool,
    take_over: bool,
    allow_override: bool,
    as_json: bool,
) -> int:
    """Make the server as the file declares it.

    Applying twice changes nothing the second time. It stops at the first error, and says what was done. What would
    lose a position or messages is refused, before anything is done, unless --allow-destroy is given: also a stream or
    consumer that the lock file next to FILE knows and FILE no longer has. A consumer with `renamed_from:` goes on where
    the one of that name is. PENSTOCK_SERVERS and PENSTOCK_DOMAIN do not replace what FILE says about its environment
    without --allow-override; --servers does. Whatever else `penstock lint` calls an error is always refused.
    Afterwards the lock file next to FILE holds the names of today.

    \b
    Example:
      penstock apply penstock.yaml --env dev
      penstock apply penstock.yaml --prune --allow-destroy
    """
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, signal.raise_signal, signal.SIGINT)  # as Ctrl-C
    with errors_json.told(as_json):
        platform, concerns = _sound(file, env, as_json)
        async with session(context, platform) as s:
            if not allow_override:
                s.require_declared_servers()
            made = await s.plan(allow_destroy, prune, take_over)
            concerns = concerns.without(_deleted_empty(made))
            if not as_json:
                _show([s.title, *plan_view.plan_lines(made), *plan_view.concern_lines(concerns, allow_destroy)])
            outcome = await _outcome(s, made, concerns, allow_destroy)
    if as_json:
        told = plan_json.result_json(made, concerns, outcome.done, outcome.failed, outcome.reason)
        print_json({**told, **s.heading})
    elif outcome.done and not outcome.error:
        out.print(Text.assemble(("Applied", "bold green"), f" {counted(len(outcome.done), 'change')}."))
    if outcome.error:
        fail(str(outcome.error))
        return EXIT_ERROR
    _lock(platform)
    if made.unreached:
        err.print(Text(f"not reached: {counted(len(made.unreached), 'resource')}; apply again later", style="yellow"))
    return EXIT_ATTENTION if made.unreached else EXIT_OK


@dataclass(frozen=True, slots=True)
class Outcome:
    """How far an apply came."""

    done: tuple[Change, ...] = ()
    failed: Change | None = None
    error: ApplyRefused | NamesGone | ApplyError | None = None

    @property
    def reason(self) -> str | None:
        """Why it ended early, without what was done and what was not."""
        if self.error is None:
            return None
        return str(self.error.cause if isinstance(self.error, ApplyError) else self.error)


async def _outcome(s: PlatformSession, made: Plan, concerns: Concerns, allow_destroy: bool) -> Outcome:
    try:
        if not allow_destroy:
            require_names(s.platform, concerns)
        return Outcome(await _carry_out(s, made, allow_destroy))
    except (ApplyRefused, NamesGone) as exc:
        return Outcome(error=exc)
    except ApplyError as exc:
        return Outcome(exc.done, exc.failed, exc)


def _deleted_empty(made: Plan) -> set[str]:
    """Names of what a plan deletes without losing anything."""
    return {one.resource.name for one in made.with_risk(Risk.SAFE) if one.kind is ChangeKind.DELETE}


def _lock(platform: Platform) -> None:
    """Remember the names that hold a position now. All is done by then: a folder that is read-only is no failure."""
    path, names = lock_path(platform.path), lock_of(platform)
    try:
        if read_lock(path) != names:
            write_lock(path, names)
    except ConfigError as exc:
        err.print(Text(f"warning: {exc}", style="yellow"), soft_wrap=True)


async def _carry_out(s: PlatformSession, made: Plan, allow_destroy: bool) -> tuple[Change, ...]:
    with progress_bar() as bar:
        task = bar.add_task("applying", total=len(made.changes))
        return await carrying_out.apply(
            s.broker.jetstream,
            made,
            allow_destroy=allow_destroy,
            progress=lambda change, done, total: bar.update(task, completed=done, description=str(change.resource)),
        )


@click.command(epilog="Exit code 0: all is well. 2: something differs, or is not healthy.")
@file_argument
@env_option
@click.option(
    "--wait",
    type=float,
    default=SETTLES_WITHIN,
    show_default=True,
    metavar="SECONDS",
    help="How long replicas and sources may take to settle.",
)
@json_option
@click.pass_obj
@sync
async def verify(context: Context, file: str, env: str | None, wait: float, as_json: bool) -> int:
    """Check that the server is as the file declares it, and well.

    JetStream answers, every stream and consumer is as declared, replicas are current, sources and mirrors are active.
    Replicas and sources that were made a moment ago get some time to settle.

    \b
    Example:
      penstock verify penstock.yaml --env prod && start-the-service
    """
    with errors_json.told(as_json):
        platform = load(file, env)
        try:
            async with session(context, platform) as s:
                found, findings = await s.verify(wait)
        except (ServerBusy, DeadlineExceeded) as exc:  # it can be reached, and is ill
            _show_unhealthy(exc, platform, _settings(context, platform), as_json)
            return EXIT_ATTENTION
    if as_json:
        unknown = [plan_json.resource_json(one) for one in verification.undeclared(s.desired, found)]
        print_json({**plan_json.findings_json(s.desired.platform, findings), "undeclared": unknown, **s.heading})
    else:
        _show_findings(s, found, findings)
    return EXIT_ATTENTION if findings else EXIT_OK


def _show_unhealthy(exc: PenstockError, platform: Platform, settings: Settings, as_json: bool) -> None:
    if as_json:
        print_json({**plan_json.findings_json(platform.name, (), str(exc)), **_heading(platform, settings)})
        return
    where = ", ".join(settings.servers)
    out.print(Text.assemble(("✗", "bold red"), f" JetStream is unhealthy at {where}: {exc}"), soft_wrap=True)


def _show_findings(s: PlatformSession, found: Actual, findings: list[Deviation]) -> None:
    where = ", ".join(s.broker.settings.servers)
    out.print(Text.assemble(("✓", "bold green"), f" JetStream answers at {where} ", (s.broker.server_version, "dim")))
    replicated = [stream for stream in found.streams.values() if stream.config.get("num_replicas", 1) > 1]
    counts = {
        Check.STREAMS: len(s.platform.streams),
        Check.CONSUMERS: len(s.platform.consumers),
        Check.REPLICAS: len(replicated),
        Check.GIVEN_UP: sum(bool(consumer.max_deliver or consumer.dlq) for consumer in s.platform.consumers.values()),
        Check.SOURCES: sum(len(stream.sources) + bool(stream.mirror) for stream in found.streams.values()),
    }
    _show(plan_view.finding_lines(findings, counts))
    if unknown := verification.undeclared(s.desired, found):
        names = ", ".join(str(one) for one in unknown)
        out.print(Text(f"  not declared: {names}", style="dim"), soft_wrap=True)


def _show(lines: Iterable[Text]) -> None:
    out.print(plan_view.shown(lines), soft_wrap=True)
