"""Carries out a plan, one change after the other, and stops at the first that fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

from penstock import subjects
from penstock.errors import ApiError, NotFound, PenstockError
from penstock.jetstream import codes
from penstock.jetstream.api import JetStream
from penstock.jetstream.model import Json
from penstock.topology import compare
from penstock.topology.plan import Change, ChangeKind, Plan
from penstock.topology.risk import Risk

SHOWN = 5
"""How many resources a message names before it counts the rest."""

Progress = Callable[[Change, int, int], None]
"""Called after each change: the change, how many are done, of how many."""


class ApplyRefused(PenstockError):
    """The plan would lose something, or cannot be carried out at all. Nothing was done."""

    def __init__(self, changes: Sequence[Change]) -> None:
        super().__init__(tuple(changes))
        self.changes = tuple(changes)

    def __str__(self) -> str:
        what = "; ".join(f"{c.resource} ({c.risk}: {c.reason})" for c in self.changes[:SHOWN])
        more = len(self.changes) - SHOWN
        rest = f" and {more} more" if more > 0 else ""
        if all(change.owner and change.risk is Risk.IMPOSSIBLE for change in self.changes):
            return f"nothing was done: {what}{rest}"
        return f"nothing was done, for something would be lost: {what}{rest}; if that is meant, add --allow-destroy"


class ApplyInterrupted(PenstockError):
    """Somebody wanted it to end."""

    def __str__(self) -> str:
        return "interrupted; whether this change was made is not known"


class ApplyError(PenstockError):
    """A change failed. What came before it is done, it and what came after it is not; `apply` again continues there."""

    def __init__(
        self, done: Sequence[Change], failed: Change, not_done: Sequence[Change], cause: PenstockError
    ) -> None:
        super().__init__(tuple(done), failed, tuple(not_done), cause)
        self.done = tuple(done)
        self.failed = failed
        self.not_done = tuple(not_done)
        """What was not tried; the failed change is not among them."""
        self.cause = cause

    def __str__(self) -> str:
        return (
            f"stopped at {self.failed.resource} ({self.failed.kind}): {self.cause} | "
            f"done: {_names(self.done)} | not done: {_names((self.failed, *self.not_done))} | "
            "`penstock apply` again continues from here"
        )


def _names(changes: Sequence[Change]) -> str:
    if not changes:
        return "nothing"
    more = f" and {len(changes) - SHOWN} more" if len(changes) > SHOWN else ""
    return f"{len(changes)} ({', '.join(change.resource.name for change in changes[:SHOWN])}{more})"


def check(plan: Plan, allow_destroy: bool = False) -> None:
    """Raise `ApplyRefused` when the plan may not be carried out."""
    refused = plan.with_risk(Risk.IMPOSSIBLE)
    if not allow_destroy:
        refused = [change for change in plan.changes if change.destroys or change.risk is Risk.IMPOSSIBLE]
    if refused:
        raise ApplyRefused(refused)


async def apply(
    js: JetStream, plan: Plan, *, allow_destroy: bool = False, progress: Progress | None = None
) -> tuple[Change, ...]:
    """Carry out the plan in its order; returns what was done.

    Raises `ApplyRefused` before anything is done, or `ApplyError` at the first change that fails; also when it is
    cancelled, which ends with that error. Each change is made by steps that may be repeated, so after a crash of either
    side a new plan holds exactly what is left to do.
    """
    check(plan, allow_destroy)
    done: list[Change] = []
    for change in plan.changes:
        try:
            await _carry_out(js.at_prefix(change.resource.api) if change.resource.api else js, change)
        except PenstockError as exc:
            raise ApplyError(done, change, plan.changes[len(done) + 1 :], await _explained(js, change, exc)) from exc
        except asyncio.CancelledError as exc:
            raise ApplyError(done, change, plan.changes[len(done) + 1 :], ApplyInterrupted()) from exc
        done.append(change)
        if progress:
            progress(change, len(done), len(plan.changes))
    return tuple(done)


async def _explained(js: JetStream, change: Change, error: PenstockError) -> PenstockError:
    """The server's refusal, with the name of the stream that is in the way where it does not say that."""
    if not isinstance(error, ApiError) or error.err_code != codes.SUBJECTS_OVERLAP:
        return error
    mine = (change.config or {}).get("subjects") or [change.resource.stream]
    with suppress(PenstockError):  # then at least what the server said
        for other in await js.streams():
            pair = subjects.any_overlap(mine, other.config.get("subjects") or ())
            if pair and other.name != change.resource.stream:
                words = f"{error.description}: {pair[0]!r} overlaps {pair[1]!r} of stream {other.name!r}"
                return type(error)(error.what, error.code, error.err_code, words)
    return error


async def _carry_out(js: JetStream, change: Change) -> None:
    """One change.

    Recreating has two steps: 1. delete (crash after: the resource is missing, and the next plan creates it);
    2. create (crash after: it is as declared). Every other change is a single request that decides.
    """
    match change.kind:
        case ChangeKind.CREATE:
            await _create(js, change)
        case ChangeKind.UPDATE:
            await _update(js, change)
        case ChangeKind.RECREATE:
            await _delete(js, change)
            await _create(js, change)
        case ChangeKind.DELETE:
            await _delete(js, change)


async def _create(js: JetStream, change: Change) -> None:
    assert change.config is not None, "only a deletion has no configuration"
    if change.resource.consumer is None:
        await js.create_stream(change.config)
    else:
        await js.create_consumer(change.resource.stream, change.config)


async def _update(js: JetStream, change: Change) -> None:
    wanted, names = change.config or {}, [field.name for field in change.fields]

    def patch(current: Json) -> Json:
        return compare.patched(current, wanted, names)

    if change.resource.consumer is None:
        await js.update_stream(change.resource.stream, patch)
    else:
        await js.update_consumer(change.resource.stream, change.resource.consumer, patch)


async def _delete(js: JetStream, change: Change) -> None:
    with suppress(NotFound):  # gone already: with its stream, or in an earlier try
        if change.resource.consumer is None:
            await js.delete_stream(change.resource.stream)
        else:
            await js.delete_consumer(change.resource.stream, change.resource.consumer)
