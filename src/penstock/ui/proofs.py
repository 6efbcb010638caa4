"""Proof: what a sink and a bridge wrote, and a recount of it on the server."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TypeVar

from starlette.exceptions import HTTPException
from starlette.responses import Response

from penstock.observe import proof
from penstock.observe.pipelines import PipelineStatus
from penstock.ui.page import Page

T = TypeVar("T")

CHUNKS = 500
"""Chunks on a page."""


async def listed(page: Page) -> Response:
    await page.snapshot()
    js = (await page.watch.control()).jetstream
    sinks, bridges = await proof.sinks(js), await proof.bridges(js)
    readers = {one.name: _pipeline(page, one.name) for one in sinks}
    return page.show("proof.html", "/proof", "Proof", sinks=sinks, bridges=bridges, readers=readers)


async def sink(page: Page) -> Response:
    """One micro-batch of a sink; with `recount` in the query it is counted again."""
    await page.snapshot()
    js = (await page.watch.control()).jetstream
    wanted = tuple(page.at(part) for part in ("stream", "created", "name"))
    series = next((one for one in await proof.sinks(js) if (one.stream, one.created, one.name) == wanted), None)
    if series is None:
        raise HTTPException(404, "the ledger knows of no such writes")
    batch = await proof.sink_batch(js, series, int(page.at("batch")))
    counted = await _alone(page, proof.recount_sink(js, page.watch.settings, batch)) if page.asked("recount") else None
    return page.show(
        "proof_sink.html", "/proof", f"Batch {batch.number} into {series.stream}", batch=batch, series=series,
        counted=counted, pipeline=_pipeline(page, series.name), chunks=batch.chunks[:CHUNKS],
    )  # fmt: skip


async def bridge(page: Page) -> Response:
    """A stream that a bridge writes; with `recount` in the query it is counted again."""
    js = (await page.watch.control()).jetstream
    found = next((one for one in await proof.bridges(js) if one.destination == page.at("stream")), None)
    if found is None:
        raise HTTPException(404, f"no bridge writes {page.at('stream')!r}, or it is empty")
    counted = (
        await _alone(page, proof.recount_bridge(js, page.watch.settings, found)) if page.asked("recount") else None
    )
    return page.show("proof_bridge.html", "/proof", f"Bridge {found.bridge}", bridge=found, counted=counted)


async def _alone(page: Page, counting: Awaitable[T]) -> T:
    """One recount at a time: it reads as fast as the server gives."""
    async with page.watch.counting:
        return await counting


def _pipeline(page: Page, series: str) -> PipelineStatus | None:
    """The pipeline whose query writes that series; a query with several sinks numbers them behind its id."""
    known = page.watch.latest.pipelines if page.watch.latest else ()
    queries = (series, series.rpartition("-")[0])
    return next((one for one in known if one.progress and one.progress.query in queries), None)
