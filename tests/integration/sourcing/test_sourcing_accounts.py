"""Sources and mirrors from one account to another, with the rights that Penstock prints and with no more."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from tests.support.commands import invoked
from tests.support.streams import make_stream

from penstock.jetstream import connect
from penstock.jetstream.model import Json
from penstock.server.embedded import EmbeddedServer
from penstock.settings import Settings
from penstock.sourcing.accounts import Grant, needs_grant
from penstock.testing import eventually_async, stream_data

OWN: Json = {"name": "mine", "deliver_subject": "to.hub"}
GRANT = Grant("ORIGIN", "mine", "site.api", "to.hub")
WHOLE_EXPORTS = 'exports: [ {service: "$JS.API.>"}, {stream: "to.hub.>"}, {service: "$JS.FC.>"} ]'
WHOLE_IMPORTS = """imports: [
  {service: {account: SITE, subject: "$JS.API.>"}, to: "site.api.>"}
  {stream: {account: SITE, subject: "to.hub.>"}}
  {service: {account: SITE, subject: "$JS.FC.>"}}
]"""


@contextmanager
def accounts(data: Path, exports: str, imports: str) -> Iterator[tuple[Settings, Settings]]:
    """One server with two accounts; settings for each."""
    extra = f"""
accounts {{
  SITE {{ jetstream: enabled, users: [ {{user: site, password: secret}} ], {exports} }}
  HUB {{ jetstream: enabled, users: [ {{user: hub, password: secret}} ], {imports} }}
}}"""
    with EmbeddedServer(data, extra=extra) as server:
        site, hub = (Settings(servers=(server.url,), user=user, password="secret") for user in ("site", "hub"))
        yield site, hub


def platform_file(folder: Path, kind: str, consumer: Json, deliver: str = "") -> str:
    external = {"api": "site.api", "deliver": deliver} if deliver else {"api": "site.api"}
    source = {"name": "ORIGIN", "external": external, "consumer": consumer}
    path = folder / "penstock.yaml"
    path.write_text(yaml.safe_dump({"streams": {"COPY": {kind: [source] if kind == "sources" else source}}}))
    return str(path)


def run(settings: Settings, *arguments: str) -> tuple[int, str]:
    flags = ["--servers", settings.servers[0], "--user", str(settings.user), "--password", str(settings.password)]
    return invoked(*flags, *arguments)


async def make_origin(site: Settings, *consumers: Json) -> None:
    async with connect(site) as broker:
        await make_stream(broker.jetstream, "ORIGIN", subjects=["o.>"], retention="workqueue")
        for config in consumers:
            await broker.jetstream.create_consumer("ORIGIN", config)


async def copied_and_acknowledged(site: Settings, hub: Settings, count: int) -> None:
    async with connect(site) as origin, connect(hub) as copy:
        for number in range(count):
            await origin.request("o.x", b"%d" % number, 20)

        async def there() -> bool:
            held = (await origin.jetstream.stream_info("ORIGIN")).state.messages
            return (await copy.jetstream.stream_info("COPY")).state.messages == count and held == 0

        await eventually_async(there, 60, "everything to be copied, and the origin to know it")
    assert await asyncio.to_thread(stream_data, hub, "COPY") == [b"%d" % number for number in range(count)]


@pytest.mark.parametrize("kind", ["sources", "mirror"])
def test_the_rights_that_are_printed_are_enough_to_read_from_another_account(tmp_path: Path, kind: str) -> None:
    with accounts(tmp_path / "nats", GRANT.exports(), GRANT.imports("SITE")) as (site, hub):
        path = platform_file(tmp_path, kind, OWN)
        code, printed = run(hub, "sources", "create-consumer", path, "COPY")
        assert code == 2, "this account may not make the consumer"
        assert GRANT.exports() in printed
        assert GRANT.imports() in printed
        request = json.loads(printed[printed.index("\n{") : printed.index("\n}") + 2])
        asyncio.run(make_origin(site, request["config"]))  # what the owner of the origin does with it
        assert (run(hub, "apply", path))[0] == 0
        asyncio.run(copied_and_acknowledged(site, hub, 50))
        code, text = run(hub, "sources", "ls", "--json")
        (facts,) = json.loads(text)
        assert (code, facts["state"], facts["lag_messages"]) == (0, "active", None), "it works, and cannot be asked"
        assert "not known" in run(hub, "sources", "ls")[1]


@pytest.mark.parametrize("kind", ["sources", "mirror"])
def test_penstock_makes_the_consumer_in_another_account_where_it_may(tmp_path: Path, kind: str) -> None:
    with accounts(tmp_path / "nats", WHOLE_EXPORTS, WHOLE_IMPORTS) as (site, hub):
        asyncio.run(make_origin(site))
        path = platform_file(tmp_path, kind, {"name": "reader", "server_managed": True}, deliver="to.hub")
        assert (run(hub, "apply", path))[0] == 0
        asyncio.run(copied_and_acknowledged(site, hub, 50))
        assert (run(hub, "plan", path))[0] == 0
        code, text = run(hub, "sources", "ls", "--json")
        (facts,) = json.loads(text)
        assert (code, facts["mode"], facts["state"], facts["ack_floor"]) == (0, "server-managed", "active", 50)


def test_only_another_account_needs_a_grant() -> None:
    assert needs_grant("site.api")
    assert not any(needs_grant(api) for api in (None, "$JS.API", "$JS.leaf.API"))
