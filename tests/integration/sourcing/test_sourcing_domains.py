"""Two linked domains with the same names: what is made for one does not reach the other."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.support.commands import here
from tests.support.streams import make_stream

from penstock.jetstream import connect
from penstock.jetstream.model import Json
from penstock.publish import BlockingPublisher
from penstock.server.embedded import EmbeddedServer
from penstock.sourcing.bridge import Bridge, BridgeConfig
from penstock.testing import eventually, stream_data
from penstock.topology import actual, plan
from penstock.topology.load import load
from penstock.topology.resource import Desired
from penstock.wire import blocking

SITES = ("site1", "site3")
COUNT = 500
OLD_SUBJECT = "penstock.source.TELE_ALL.TELE.hub"
"""What earlier versions chose, without a domain."""


class Domains:
    """A hub and two leaves of it, each with a stream TELE and a domain of its own."""

    def __init__(self, hub: EmbeddedServer, sites: dict[str, EmbeddedServer]) -> None:
        self.hub = hub
        self.sites = sites

    def make_origins(self, retention: str) -> None:
        for name, server in self.sites.items():
            with BlockingPublisher.connect(server.settings) as publisher:
                config: Json = {"subjects": [f"tele.{name}.>"], "retention": retention, "allow_atomic": True}
                blocking.run(make_stream(publisher.jetstream, "TELE", **config))

    def publish(self, first: int, count: int = COUNT) -> None:
        for name, server in self.sites.items():
            with BlockingPublisher.connect(server.settings) as publisher:
                data = [f"{name} {number}".encode() for number in range(first, first + count)]
                publisher.publish_batch("TELE", f"tele.{name}.x", data)

    def left(self) -> list[int]:
        return [messages(server, "TELE") for server in self.sites.values()]

    def require_copied(self, count: int) -> None:
        """Each of the first `count` messages of each site is there once."""
        eventually(lambda: messages(self.hub, "TELE_ALL") >= count * len(SITES), 60, "all copies", self.left)
        copies = Counter(stream_data(self.hub.settings, "TELE_ALL"))
        assert copies == Counter(f"{name} {number}".encode() for name in SITES for number in range(count))

    def delete_all(self) -> None:
        for server in (self.hub, *self.sites.values()):
            with BlockingPublisher.connect(server.settings) as publisher:
                for name in blocking.run(publisher.jetstream.stream_names()):
                    blocking.run(publisher.jetstream.delete_stream(name))


def messages(server: EmbeddedServer, stream: str) -> int:
    with BlockingPublisher.connect(server.settings) as publisher:
        return blocking.run(publisher.jetstream.stream_info(stream)).state.messages


@pytest.fixture(scope="module")
def linked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Domains]:
    data = tmp_path_factory.mktemp("domains")
    with (
        EmbeddedServer(data / "hub", domain="hub") as hub,
        EmbeddedServer(data / "1", domain="site1", leaf_of=hub.leaf_url) as one,
        EmbeddedServer(data / "3", domain="site3", leaf_of=hub.leaf_url) as three,
    ):
        eventually(lambda: hub.reaches("site1") and hub.reaches("site3"), 30, "both leaves")
        yield Domains(hub, dict(zip(SITES, (one, three), strict=True)))


@pytest.fixture
def domains(linked: Domains) -> Iterator[Domains]:
    yield linked
    linked.delete_all()


def platform_file(folder: Path, hub: EmbeddedServer, name: str = "hub", sites: tuple[str, ...] = SITES) -> Path:
    sources = "".join(
        f"      - {{name: TELE, domain: {site}, consumer: {{name: hub, server_managed: true}}}}\n" for site in sites
    )
    path = folder / "penstock.yaml"
    path.write_text(
        f'name: {name}\nenvironments: {{dev: {{servers: ["{hub.url}"]}}}}\n'
        f"streams:\n  TELE_ALL:\n    sources:\n{sources}"
    )
    return path


@pytest.mark.parametrize("retention", ["interest", "workqueue", "limits"])
def test_equal_names_in_two_domains_lose_and_repeat_nothing(domains: Domains, tmp_path: Path, retention: str) -> None:
    domains.make_origins(retention)
    file = platform_file(tmp_path, domains.hub)
    assert here("apply", file).returncode == 0
    domains.publish(0)
    domains.require_copied(COUNT)
    if retention != "limits":
        eventually(lambda: domains.left() == [0, 0], 30, "the origins to be emptied", domains.left)
    assert here("plan", file).returncode == 0
    verified = here("verify", file, "--wait", "30")
    assert verified.returncode == 0, verified.stdout


def bind_by_hand(domains: Domains, sites: tuple[str, ...] = SITES) -> None:
    """What earlier versions made."""

    async def bind() -> None:
        async with connect(domains.hub.settings) as hub:
            for site in sites:
                config = {
                    "name": "hub",
                    "durable_name": "hub",
                    "deliver_subject": OLD_SUBJECT,
                    "deliver_policy": "all",
                    "ack_policy": "flow_control",
                    "flow_control": True,
                    "idle_heartbeat": 1_000_000_000,
                    "max_ack_pending": 65_536,
                    "metadata": {"penstock.sourcing": "TELE_ALL"},
                }
                await hub.jetstream.at_prefix(f"$JS.{site}.API").create_consumer("TELE", config)
            sources = [
                {
                    "name": "TELE",
                    "external": {"api": f"$JS.{site}.API", "deliver": ""},
                    "consumer": {"name": "hub", "deliver_subject": OLD_SUBJECT},
                }
                for site in sites
            ]
            await hub.jetstream.create_stream({"name": "TELE_ALL", "sources": sources})

    asyncio.run(bind())


def test_a_subject_without_a_domain_that_one_source_uses_stays_as_it_is(domains: Domains, tmp_path: Path) -> None:
    domains.make_origins("limits")
    bind_by_hand(domains, ("site1",))
    file = platform_file(tmp_path, domains.hub, sites=("site1",))

    async def changes() -> list[str]:
        desired = Desired.of(load(file), "hub")
        async with connect(domains.hub.settings) as hub:
            made = plan.plan(desired, await actual.read(hub.jetstream, desired))
        return [field.name for change in made.changes for field in change.fields if "metadata" not in field.name]

    assert asyncio.run(changes()) == []


def test_a_subject_that_two_sources_share_is_found_and_mended(domains: Domains, tmp_path: Path) -> None:
    domains.make_origins("limits")
    bind_by_hand(domains)
    file = platform_file(tmp_path, domains.hub)
    verified = here("verify", file, "--wait", "0")
    assert verified.returncode == 2
    assert f"deliver to the same subject '{OLD_SUBJECT}'" in verified.stdout
    applied = here("apply", file)
    assert applied.returncode == 0, applied
    domains.publish(0)
    domains.require_copied(COUNT)
    assert here("plan", file).returncode == 0


def test_the_origins_own_platform_leaves_the_readers_consumer_alone(domains: Domains, tmp_path: Path) -> None:
    """Both files have one platform's name; only the hub's knows the stream that reads."""
    domains.make_origins("limits")
    assert here("apply", platform_file(tmp_path, domains.hub, name="shop")).returncode == 0
    site = domains.sites["site1"]
    origin = tmp_path / "site1.yaml"
    origin.write_text(
        f'name: shop\nenvironments: {{dev: {{servers: ["{site.url}"]}}}}\n'
        "streams: {TELE: {subjects: [tele.site1.>]}}\n"
    )
    for flags in ((), ("--prune",)):
        planned = here("plan", origin, *flags)
        assert "consumer hub" not in planned.stdout, planned.stdout


def test_living_sources_of_equal_names_are_migrated_each_behind_its_own_copies(
    domains: Domains, tmp_path: Path
) -> None:
    domains.make_origins("limits")
    ephemeral = [{"name": "TELE", "external": {"api": f"$JS.{site}.API", "deliver": ""}} for site in SITES]
    with BlockingPublisher.connect(domains.hub.settings) as publisher:
        blocking.run(publisher.jetstream.create_stream({"name": "TELE_ALL", "sources": ephemeral}))
    domains.publish(0)
    domains.require_copied(COUNT)
    file = platform_file(tmp_path, domains.hub)
    done = here("sources", "migrate", file, "--yes")
    assert done.returncode == 0, done
    domains.publish(COUNT)
    domains.require_copied(2 * COUNT)
    assert "every source reads as declared" in here("sources", "migrate", file).stdout


def test_a_source_that_cannot_be_migrated_keeps_no_other_from_it(domains: Domains, tmp_path: Path) -> None:
    domains.make_origins("limits")
    once = {"name": "TELE", "external": {"api": "$JS.site1.API", "deliver": ""}}
    with BlockingPublisher.connect(domains.hub.settings) as publisher:
        filters = ({"filter_subject": "tele.site1.a"}, {"filter_subject": "tele.site1.b"})
        twice = [{**once, **one} for one in filters]
        blocking.run(publisher.jetstream.create_stream({"name": "TWICE", "sources": twice}))
        blocking.run(publisher.jetstream.create_stream({"name": "TELE_ALL", "sources": [once]}))
    file = platform_file(tmp_path, domains.hub, sites=("site1",))
    managed = "{name: TELE, domain: site1, filter_subject: tele.site1.%s, consumer: {name: %s, server_managed: true}}"
    file.write_text(file.read_text() + f"  TWICE: {{sources: [{managed % ('a', 'a')}, {managed % ('b', 'b')}]}}\n")
    done = here("sources", "migrate", file, "--yes")
    assert (done.returncode, "reads it 2 times" in done.stderr) == (1, True), done
    assert "TELE_ALL goes on behind sequence 0" in done.stdout


def test_two_bridges_of_one_name_on_two_leaves_do_not_hear_each_other(domains: Domains, tmp_path: Path) -> None:
    domains.make_origins("workqueue")
    domains.publish(0)
    with EmbeddedServer(tmp_path / "far") as far:
        for site, server in domains.sites.items():
            with BlockingPublisher.connect(far.settings) as publisher:
                wanted = {"subjects": [f"tele.{site}.>"], "allow_atomic": True}
                blocking.run(make_stream(publisher.jetstream, site.upper(), **wanted))
            config = BridgeConfig(name="b", origin="TELE", destination=site.upper())
            Bridge(config, server.settings, far.settings).run(until_caught_up=True)
        subjects = set()
        for server in domains.sites.values():
            with BlockingPublisher.connect(server.settings) as publisher:
                info = blocking.run(publisher.jetstream.consumer_info("TELE", "b"))
                subjects.add(info.config["deliver_subject"])
        assert subjects == {"penstock.bridge.site1.TELE.b", "penstock.bridge.site3.TELE.b"}
        assert domains.left() == [0, 0]
        for site in SITES:
            assert stream_data(far.settings, site.upper()) == [f"{site} {n}".encode() for n in range(COUNT)]


@contextmanager
def away(domains: Domains, site: str) -> Iterator[None]:
    """The leaf is down."""
    domains.sites[site].kill()
    eventually(lambda: not domains.hub.reaches(site), 30, f"{site} to be away")
    try:
        yield
    finally:
        domains.sites[site].start()
        eventually(lambda: domains.hub.reaches(site), 30, f"{site} to be back")


def test_a_leaf_that_is_away_does_not_stop_the_rest_of_the_file(domains: Domains, tmp_path: Path) -> None:
    domains.make_origins("interest")
    file = platform_file(tmp_path, domains.hub)
    assert here("apply", file).returncode == 0
    file.write_text(
        file.read_text().replace("    sources:", "    max_bytes: 64MB\n    sources:")
        + "  TELE_MORE:\n    sources:\n"
        + "".join(
            f"      - {{name: TELE, domain: {site}, consumer: {{name: more, server_managed: true}}}}\n"
            for site in SITES
        )
        + "  LOCAL: {subjects: [local.>], max_bytes: 1MiB}\n"
        + "consumers:\n  reader: {stream: TELE_MORE, ack_wait: 30s}\n"
    )
    with away(domains, "site3"):
        planned = here("plan", file, "--json")
        assert planned.returncode == 2, planned.stderr
        told = json.loads(planned.stdout)
        left = {(one["name"], one.get("api")): one["reason"] for one in told["unreached"]}
        assert set(left) == {
            ("hub", "$JS.site3.API"),
            ("more", "$JS.site3.API"),
            ("TELE_MORE", None),
            ("reader", None),
        }
        assert "is the link to its origin up?" in left["hub", "$JS.site3.API"]
        assert left["TELE_MORE", None] == "waits for consumer more of TELE at $JS.site3.API"
        changed = {change["name"] for change in told["changes"]}
        assert changed == {"TELE_ALL", "LOCAL", "more"}  # the consumer at site1, which is there
        applied = here("apply", file)
        assert applied.returncode == 2, applied.stdout
        assert "not reached: 4 resources" in applied.stderr
        assert "not looked at" in applied.stdout
        again = here("apply", file, "--json")
        assert (again.returncode, json.loads(again.stdout)["done"]) == (2, [])
        assert messages(domains.hub, "LOCAL") == 0
        verified = here("verify", file, "--wait", "0", "--json")
        assert verified.returncode == 2
        found = {finding["name"] for finding in json.loads(verified.stdout)["findings"]}
        assert {"TELE_MORE", "more", "hub"} <= found
        shown = here("verify", file, "--wait", "0").stdout
        assert "✗ streams as declared" in shown
        assert "✗ consumers as declared" in shown
        assert "stream TELE_MORE: does not exist yet: it waits for consumer more" in shown
    applied = here("apply", file)
    assert applied.returncode == 0, applied.stdout
    domains.publish(0)
    domains.require_copied(COUNT)
    eventually(lambda: messages(domains.hub, "TELE_MORE") == 2 * COUNT, 60, "the second copies")


@pytest.mark.parametrize("window", ["", "    duplicate_window: 2m\n"], ids=["no window", "window"])
def test_verify_tells_that_a_duplicate_window_drops_messages_with_equal_ids(
    domains: Domains, tmp_path: Path, window: str
) -> None:
    domains.make_origins("interest")
    file = platform_file(tmp_path, domains.hub)
    file.write_text(file.read_text().replace("    sources:", f"{window}    sources:"))
    assert here("apply", file).returncode == 0
    for number in range(20):
        ids = [f"id-{number}", f"id-{number}" if number % 2 else f"other-{number}"]
        for (name, server), id_ in zip(domains.sites.items(), ids, strict=True):
            with BlockingPublisher.connect(server.settings) as publisher:
                publisher.publish_batch("TELE", f"tele.{name}.x", [b""], message_id=id_)
    eventually(lambda: domains.left() == [0, 0], 60, "the origins to be emptied", domains.left)
    verified = here("verify", file, "--json")
    stored = messages(domains.hub, "TELE_ALL")
    assert (stored, verified.returncode) == ((30, 2) if window else (40, 0)), verified.stdout
    problems = [finding["problem"] for finding in json.loads(verified.stdout)["findings"]]
    assert any("10 messages of its origins are not stored here" in problem for problem in problems) == bool(window)
    assert ("O13" in here("lint", file).stdout) == bool(window)
