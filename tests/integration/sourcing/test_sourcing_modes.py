"""Sources and mirrors through durables, over a leaf link: made, kept in step, removed and checked."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import yaml
from tests.support.servers import both
from tests.support.streams import make_stream

from penstock.jetstream.connection import Broker
from penstock.jetstream.model import Json
from penstock.sourcing import modes
from penstock.sourcing.modes import misfits
from penstock.testing import LeafPair, eventually_async, stream_data
from penstock.topology import actual, apply, plan, verify
from penstock.topology.apply import ApplyRefused
from penstock.topology.load import load
from penstock.topology.plan import Change, Plan
from penstock.topology.resource import Desired

MANAGED = {"name": "reader", "server_managed": True}


def desired(tmp_path: Path, **streams: Json) -> Desired:
    path = tmp_path / "penstock.yaml"
    path.write_text(yaml.safe_dump({"streams": streams}))
    return Desired.of(load(path))


async def planned(hub: Broker, want: Desired, allow_destroy: bool = False) -> Plan:
    found = await actual.read(hub.jetstream, want)
    actual.require_answers(found)
    return plan.plan(want, found, allow_destroy=allow_destroy)


async def applied(hub: Broker, want: Desired, allow_destroy: bool = False) -> tuple[Change, ...]:
    made = await planned(hub, want, allow_destroy)
    return await apply.apply(hub.jetstream, made, allow_destroy=allow_destroy)


async def origin(leaf: Broker, retention: str, count: int = 0, **config: Json) -> None:
    await make_stream(leaf.jetstream, "ORIGIN", subjects=["o.>"], retention=retention, **config)
    await publish(leaf, 0, count)


async def publish(leaf: Broker, first: int, count: int, subject: str = "o.x") -> None:
    for number in range(first, first + count):
        await leaf.request(subject, b"%d" % number, 20)


def numbers(first: int, last: int) -> list[bytes]:
    return [b"%d" % number for number in range(first, last)]


async def arrived(pair: LeafPair, hub: Broker, want: list[bytes]) -> None:
    """Exactly these, in this order, and nothing more a moment later."""

    async def there() -> bool:
        return (await hub.jetstream.stream_info("COPY")).state.messages >= len(want)

    async def state() -> Json:
        return (await hub.jetstream.stream_info("COPY")).raw

    await eventually_async(there, 60, f"{len(want)} messages in COPY", state)
    assert await asyncio.to_thread(stream_data, pair.hub.settings, "COPY") == want


@pytest.mark.parametrize("kind", ["sources", "mirror"])
@pytest.mark.parametrize("retention", ["limits", "workqueue", "interest"])
async def test_a_server_managed_durable_copies_everything_once_from_any_retention(
    pair: LeafPair, tmp_path: Path, retention: str, kind: str
) -> None:
    async with both(pair) as (hub, leaf):
        await origin(leaf, retention)
        source = {"name": "ORIGIN", "domain": "leaf", "consumer": MANAGED}
        want = desired(tmp_path, COPY={kind: [source] if kind == "sources" else source})
        assert [str(change.resource) for change in await applied(hub, want)] == [
            "consumer reader of ORIGIN at $JS.leaf.API",
            "stream COPY",
        ]
        await publish(leaf, 0, 50)
        await arrived(pair, hub, numbers(0, 50))
        assert not await planned(hub, want)
        config = (await leaf.jetstream.consumer_info("ORIGIN", "reader")).config
        assert list(misfits(config, config["deliver_subject"])) == []
        if retention != "limits":

            async def emptied() -> bool:
                return (await leaf.jetstream.stream_info("ORIGIN")).state.messages == 0

            await eventually_async(emptied, 60, "the origin to be acknowledged")


async def test_filter_and_start_of_the_source_go_into_its_consumer(pair: LeafPair, tmp_path: Path) -> None:
    async with both(pair) as (hub, leaf):
        await origin(leaf, "limits", 10)
        await publish(leaf, 10, 5, "o.other")
        await publish(leaf, 15, 5)
        source = {"name": "ORIGIN", "domain": "leaf", "consumer": MANAGED, "filter_subject": "o.x", "opt_start_seq": 6}
        want = desired(tmp_path, COPY={"sources": [source]})
        await applied(hub, want)
        await arrived(pair, hub, [*numbers(5, 10), *numbers(15, 20)])
        config = (await leaf.jetstream.consumer_info("ORIGIN", "reader")).config
        assert (config["filter_subject"], config["opt_start_seq"]) == ("o.x", 6)
        assert not await planned(hub, want)


async def test_the_consumer_is_brought_back_into_step_and_verify_says_when_it_is_not(
    pair: LeafPair, tmp_path: Path
) -> None:
    async with both(pair) as (hub, leaf):
        await origin(leaf, "limits")
        want = desired(tmp_path, COPY={"sources": [{"name": "ORIGIN", "domain": "leaf", "consumer": MANAGED}]})
        await applied(hub, want)
        await leaf.jetstream.update_consumer("ORIGIN", "reader", {"max_ack_pending": 7})
        findings = verify.verify(want, await actual.read(hub.jetstream, want))
        assert "max_ack_pending differs" in next(str(f.problem) for f in findings if f.check is verify.Check.CONSUMERS)
        assert [[field.name for field in change.fields] for change in await applied(hub, want)] == [["max_ack_pending"]]
        assert not await planned(hub, want)


async def test_the_consumer_goes_only_with_its_source_and_only_when_destroying_is_allowed(
    pair: LeafPair, tmp_path: Path
) -> None:
    async with both(pair) as (hub, leaf):
        await origin(leaf, "interest")
        await applied(
            hub, desired(tmp_path, COPY={"sources": [{"name": "ORIGIN", "domain": "leaf", "consumer": MANAGED}]})
        )
        await publish(leaf, 0, 5)
        await arrived(pair, hub, numbers(0, 5))
        without = desired(tmp_path, COPY={"subjects": ["copy.>"]})
        with pytest.raises(ApplyRefused, match="its source is gone"):
            await applied(hub, without)
        assert (await leaf.jetstream.consumer_info("ORIGIN", "reader")).name == "reader"
        await applied(hub, without, allow_destroy=True)
        assert await leaf.jetstream.consumer_names("ORIGIN") == []


async def test_switching_a_living_source_in_place_is_refused_for_it_would_copy_again(
    pair: LeafPair, tmp_path: Path
) -> None:
    async with both(pair) as (hub, leaf):
        await origin(leaf, "limits", 5)
        await applied(hub, desired(tmp_path, COPY={"sources": [{"name": "ORIGIN", "domain": "leaf"}]}))
        await arrived(pair, hub, numbers(0, 5))
        with pytest.raises(ApplyRefused, match="penstock sources migrate"):
            await applied(
                hub, desired(tmp_path, COPY={"sources": [{"name": "ORIGIN", "domain": "leaf", "consumer": MANAGED}]})
            )


@pytest.mark.parametrize(
    ("choice", "want"),
    [
        ({"deliver_policy": "last_per_subject", "filter_subject": "o.>"}, [b"9", b"14"]),
        ({"replay_policy": "original"}, numbers(0, 15)),
        ({"deliver_policy": "by_start_sequence", "opt_start_seq": 11}, numbers(10, 15)),
    ],
)
async def test_a_consumer_of_the_user_may_start_and_replay_as_it_likes(
    pair: LeafPair, tmp_path: Path, choice: Json, want: list[bytes]
) -> None:
    async with both(pair) as (hub, leaf):
        await origin(leaf, "limits", 10)
        await publish(leaf, 10, 5, "o.other")
        await leaf.jetstream.create_consumer("ORIGIN", {**modes.required("mine", "to.the.hub"), **choice})
        source = {"name": "ORIGIN", "domain": "leaf", "consumer": {"name": "mine", "deliver_subject": "to.the.hub"}}
        await applied(hub, desired(tmp_path, COPY={"sources": [source]}))
        await arrived(pair, hub, want)


@pytest.mark.parametrize("kind", ["sources", "mirror"])
async def test_verify_says_what_is_wrong_with_a_consumer_that_somebody_else_made(
    pair: LeafPair, tmp_path: Path, kind: str
) -> None:
    async with both(pair) as (hub, leaf):
        await origin(leaf, "limits")
        source = {"name": "ORIGIN", "domain": "leaf", "consumer": {"name": "mine", "deliver_subject": "to.the.hub"}}
        want = desired(tmp_path, COPY={kind: [source] if kind == "sources" else source})
        await applied(hub, want)

        async def said() -> list[str]:
            found = verify.verify(want, await actual.read(hub.jetstream, want))
            return [one.problem for one in found if one.resource.consumer == "mine"]

        assert "create-consumer" in (await said())[0]
        wrong = {**modes.required("mine", "elsewhere"), "headers_only": True}
        await leaf.jetstream.create_consumer("ORIGIN", wrong)
        (problem,) = await said()
        assert "delivers to 'elsewhere'" in problem
        assert "headers_only" in problem
        await leaf.jetstream.delete_consumer("ORIGIN", "mine")
        await leaf.jetstream.create_consumer("ORIGIN", modes.required("mine", "to.the.hub"))
        assert await said() == []
