"""Ids, leadership and claims on a real server's KV: one holder at a time, and losers notice."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from tests.support.streams import make_stream

from penstock.errors import ConfigError, Unavailable
from penstock.jetstream.connection import WrongRevision
from penstock.jetstream.kv import Bucket, Entry, Write
from penstock.publish.control import Control
from penstock.server.embedded import EmbeddedServer
from penstock.testing import eventually_async
from penstock.workers.dispatch.dispatcher import Ownership
from penstock.workers.group.assignment import Assignment, Assignments, Draft, Published, Share, writes
from penstock.workers.group.claims import Claim, KVClaims, Reached, claim_key, claims_in, store
from penstock.workers.group.identity import ClaimLost, Election, Identity, IdPool, Lease, WorkerRecord, clock
from penstock.workers.partitions import Hashed, InBucket, Partition, SeenInStream, SubjectPattern

TTL = 0.5


@pytest.fixture
async def bucket(control: Control) -> Bucket:
    made = Bucket(control, "group")
    await made.ensure()
    return made


def held_lease() -> Lease:
    lease = Lease(60)
    lease.renewed(clock())
    return lease


# -- the bucket --------------------------------------------------------------------------------------------------------


async def test_a_value_replaces_only_the_revision_it_was_made_for(bucket: Bucket) -> None:
    first = await bucket.create("a.b", {"n": 1})
    second = await bucket.put("a.b", {"n": 2}, first)
    with pytest.raises(WrongRevision):
        await bucket.put("a.b", {"n": 3}, first)
    with pytest.raises(WrongRevision):
        await bucket.create("a.b", {"n": 3})
    found = await bucket.get("a.b")
    assert found
    assert (found.value, found.revision) == ({"n": 2}, second)


async def test_a_deleted_key_can_be_created_again(bucket: Bucket) -> None:
    await bucket.delete("a.b", await bucket.create("a.b", {"n": 1}))
    assert await bucket.get("a.b") is None
    assert await bucket.entries("a") == {}
    await bucket.create("a.b", {"n": 2})
    assert (await bucket.entries("a"))["a.b"].value == {"n": 2}


async def test_a_batch_with_one_changed_key_writes_nothing(bucket: Bucket) -> None:
    revision = await bucket.create("a.x", {})
    await bucket.put("a.x", {"changed": True}, revision)
    with pytest.raises(WrongRevision):
        await bucket.commit([Write("a.y", {}, 0), Write("a.x", {}, revision)])
    assert set(await bucket.entries("a")) == {"a.x"}


async def test_all_of_several_thousand_keys_are_listed(bucket: Bucket) -> None:
    claims = await store(bucket, (Claim(f"p{n}", n) for n in range(2500)))
    assert len(claims) == 2500
    found = claims_in(await bucket.entries("claims"))
    assert {p: claim.handoff for p, claim in found.items()} == {f"p{n}": n for n in range(2500)}
    assert found == {claim.partition: claim for claim in claims}


async def test_revisions_rise_over_the_loss_of_the_bucket(bucket: Bucket, control: Control) -> None:
    before = await bucket.create("a.b", {})
    await control.jetstream.delete_stream(bucket.stream)
    with pytest.raises(Unavailable):
        await bucket.put("a.b", {})
    await asyncio.sleep(0.002)  # the clock that the new first sequence is taken from counts milliseconds
    await bucket.ensure()
    assert await bucket.create("a.b", {}) > before


# -- ids ---------------------------------------------------------------------------------------------------------------


def identity(bucket: Bucket, instance: str, size: int = 3, ttl: float = TTL) -> Identity:
    return Identity(bucket, IdPool(size=size), WorkerRecord(instance), ttl)


async def test_workers_that_start_together_get_different_ids(bucket: Bucket) -> None:
    some = [identity(bucket, f"i{n}", size=8, ttl=60) for n in range(8)]
    ids = await asyncio.gather(*(one.claim() for one in some))
    assert sorted(ids) == [f"worker-{n}" for n in range(8)]


async def test_a_restarted_worker_has_its_id_back_and_the_one_before_it_stops(bucket: Bucket) -> None:
    before, after = identity(bucket, "pod-7"), identity(bucket, "pod-7")
    await identity(bucket, "other").claim()
    assert await before.claim() == await after.claim() == "worker-1"
    with pytest.raises(ClaimLost):
        await before.renew()
    assert not before.lease.valid
    await after.renew()


async def test_an_id_that_nobody_renews_is_reclaimed_after_its_lease(bucket: Bucket) -> None:
    dead, alive, heir = (identity(bucket, name, size=2) for name in ("dead", "alive", "heir"))
    await dead.claim()
    await alive.claim()

    async def keep_alive() -> None:
        while True:
            await alive.renew()
            await asyncio.sleep(TTL / 5)

    renewing = asyncio.create_task(keep_alive())
    try:
        assert await asyncio.wait_for(heir.claim(), 30) == dead.id
    finally:
        renewing.cancel()
    with pytest.raises(ClaimLost):
        await dead.renew()


async def test_a_worker_keeps_its_id_over_the_loss_of_the_bucket(bucket: Bucket, control: Control) -> None:
    one = Identity(bucket, IdPool(), WorkerRecord("i"), ttl=30)
    await one.claim()
    await control.jetstream.delete_stream(bucket.stream)
    await bucket.ensure()
    await one.renew()
    assert one.lease.valid
    assert await bucket.get(f"workers.{one.id}")


async def test_a_worker_that_was_given_up_and_cleared_away_does_not_come_back(bucket: Bucket) -> None:
    one = Identity(bucket, IdPool(), WorkerRecord("i"), ttl=30)
    await one.claim()
    entry = await bucket.get(f"workers.{one.id}")
    assert entry
    await bucket.delete(f"workers.{one.id}", entry.revision)
    with pytest.raises(ClaimLost):
        await one.renew()


async def test_an_id_that_was_given_up_is_free_once_it_is_cleared_away(bucket: Bucket) -> None:
    one = identity(bucket, "a")
    await one.claim()
    await one.retire()
    assert await identity(bucket, "b").claim() != one.id
    entry = await bucket.get(f"workers.{one.id}")
    assert entry
    await bucket.delete(f"workers.{one.id}", entry.revision)
    assert await identity(bucket, "c").claim() == one.id


# -- leadership --------------------------------------------------------------------------------------------------------


async def test_there_is_one_leader_and_another_once_it_is_silent(bucket: Bucket) -> None:
    first, second = Election(bucket, "a", "a-1", TTL), Election(bucket, "b", "b-1", TTL)
    assert await first.step()
    assert not await second.step()
    assert second.leader == "a"
    await eventually_async(second.step, what="the second to lead")
    assert not first.leading, "it knows by its own clock"
    assert not await first.step()
    assert first.leader == "b"
    assert second.changes == 2


async def test_a_leader_that_resigns_is_followed_at_once(bucket: Bucket) -> None:
    first, second = Election(bucket, "a", "a-1", 60), Election(bucket, "b", "b-1", 60)
    assert await first.step()
    await first.resign()
    assert await second.step()


# -- claims ------------------------------------------------------------------------------------------------------------


def claims_of(bucket: Bucket, name: str, lease: Lease | None = None) -> KVClaims:
    return KVClaims(bucket, name, f"{name}-1", lease or held_lease())


async def claim(claims: KVClaims, partition: str) -> bool:
    """Take a partition that nobody has."""
    found = claims_in(await claims._bucket.values([claim_key(partition)])).get(partition, Claim(partition, 0))
    return found.owner is None and bool(await claims.take([found]))


async def release(claims: KVClaims, partition: str, handoff: int) -> None:
    await claims.give({partition: Reached(handoff)})


async def is_owner(claims: KVClaims, partition: str) -> bool:
    found = claims_in(await claims._bucket.values([claim_key(partition)]))
    return found[partition].owner == claims._worker_id


async def test_of_two_that_claim_a_partition_one_gets_it(bucket: Bucket) -> None:
    a, b = claims_of(bucket, "a"), claims_of(bucket, "b")
    asked: Ownership = a
    got = await asyncio.gather(claim(a, "p"), claim(b, "p"))
    assert sorted(got) == [False, True]
    winner, loser = (a, b) if got[0] else (b, a)
    assert await is_owner(winner, "p")
    assert not await is_owner(loser, "p")
    assert loser.token("p") is None
    assert asked.token("q") is None


async def test_the_next_owner_has_the_handoff_sequence_and_a_higher_token(bucket: Bucket) -> None:
    a, b = claims_of(bucket, "a"), claims_of(bucket, "b")
    await claim(a, "p")
    first = a.token("p")
    await a.settle({"p": 40})
    assert a.token("p") == first, "settling is not a new ownership"
    await release(a, "p", 70)
    assert a.token("p") is None
    assert await claim(b, "p")
    second = b.token("p")
    assert first
    assert second
    assert second > first
    assert b.mine["p"].handoff == 70
    assert b.mine["p"].holders == ("a",)


async def test_a_token_ends_with_the_lease(bucket: Bucket) -> None:
    lease = held_lease()
    a = claims_of(bucket, "a", lease)
    await claim(a, "p")
    lease.end()
    assert a.token("p") is None


async def test_a_stale_owner_finds_out_and_cannot_settle(bucket: Bucket) -> None:
    a, b = claims_of(bucket, "a"), claims_of(bucket, "b")
    await claim(a, "p")
    freed = await store(bucket, [a.mine["p"].freed(Reached(0))])  # as the leader does with a dead worker's
    await b.take(freed)
    assert a.compare(claims_in(await bucket.entries("claims"))) == {"p"}
    assert await a.settle({"p": 99}) == []
    assert a.token("p") is None
    assert b.mine["p"].handoff == 0, "what the stale one wanted to write did not get there"
    assert a.lost == 1


async def test_a_claim_that_is_older_than_our_own_was_read_from_a_replica_that_lags(bucket: Bucket) -> None:
    b, a = claims_of(bucket, "b"), claims_of(bucket, "a")
    await claim(b, "p")
    old = dict(b.mine)
    await a.take(await b.give({"p": Reached(5)}))
    assert a.compare(old) == set()
    assert a.token("p")


async def test_many_keys_are_read_at_once_and_deleted_ones_have_no_value(bucket: Bucket, control: Control) -> None:
    keys = [f"some.{n}" for n in range(250)]
    revisions = await bucket.commit([Write(key, {"n": n}, 0) for n, key in enumerate(keys)])
    await bucket.delete(keys[7], revisions[7])
    found = await bucket.values([*keys, "some.other"])
    assert found.keys() == set(keys) - {keys[7]}
    assert found[keys[249]] == Entry({"n": 249}, revisions[249])
    assert await bucket.values([]) == {}
    with pytest.raises(Unavailable):
        await Bucket(control, "nowhere").values(["a"])


async def test_what_was_taken_without_an_answer_is_found_again(bucket: Bucket) -> None:
    """As when a batch of several hundred claims is interrupted: owned by what the bucket says, and not known here."""
    free = await store(bucket, [Claim("p", 40), Claim("q", 50)])
    a = claims_of(bucket, "a")
    await store(bucket, [free[0].taken("a", "a-1")])
    await claims_of(bucket, "b").take(free[1:])
    assert a.found_again(claims_in(await bucket.entries("claims"))) == {"p"}
    assert a.token("p")
    assert (a.mine["p"].handoff, a.mine["p"].settled) == (40, False)
    assert await a.settle({"p": 60})
    assert a.found_again(claims_in(await bucket.entries("claims"))) == set()


async def test_what_was_let_go_is_not_found_again_by_a_look_at_a_replica_that_lags(bucket: Bucket) -> None:
    a = claims_of(bucket, "a")
    await claim(a, "p")
    await claim(a, "q")
    old = claims_in(await bucket.entries("claims"))
    await a.give({"p": Reached(40)})
    a.drop(["q"])
    assert a.found_again(old) == set()
    await claim(a, "p")
    a.mine.clear()  # as if the answer had been lost
    assert a.found_again(claims_in(await bucket.entries("claims"))) == {"p"}, "taken again since"


async def test_what_was_settled_without_an_answer_stays_ours(bucket: Bucket) -> None:
    a, answered = claims_of(bucket, "a"), claims_of(bucket, "a")
    await claim(a, "p")
    answered.mine |= a.mine
    await answered.settle({"p": 40})
    assert await a.settle({"p": 40}) == [], "refused: the bucket has it already"
    assert a.lost == 0
    assert a.mine == answered.mine


async def test_what_could_not_be_freed_stays_ours_until_it_is(bucket: Bucket) -> None:
    """Else it would be let go with nobody to take it: the bucket says that it has an owner."""
    a, answered = claims_of(bucket, "a"), claims_of(bucket, "a")
    await claim(a, "p")
    answered.mine |= a.mine
    await answered.settle({"p": 40})
    assert await a.give({"p": Reached(70)}) == []
    assert a.token("p") == answered.token("p")
    assert [claim.handoff for claim in await a.give({"p": Reached(70)})] == [70]
    assert a.token("p") is None
    assert await answered.give({"p": Reached(99)}) == []
    assert answered.token("p") is None, "nobody's, and so not ours"


async def test_claims_that_are_gone_with_the_bucket_are_made_again(bucket: Bucket, control: Control) -> None:
    a = claims_of(bucket, "a")
    await claim(a, "p")
    await a.settle({"p": 10})
    before = a.token("p")
    await control.jetstream.delete_stream(bucket.stream)
    await bucket.ensure()
    assert a.compare(claims_in(await bucket.entries("claims"))) == {"p"}
    await a.assert_again(lambda _: 55, ["p"])
    after = a.token("p")
    assert before
    assert after
    assert after > before
    entry = await bucket.get(claim_key("p"))
    assert entry
    assert (entry.value["handoff"], entry.value["settled"]) == (55, True)


async def test_one_changed_claim_does_not_keep_the_others_from_being_taken(bucket: Bucket) -> None:
    free = await store(bucket, [Claim(f"p{n}", 0) for n in range(20)])
    await claims_of(bucket, "b").take(free[7:8])
    a = claims_of(bucket, "a")
    got = {claim.partition for claim in await a.take(free)}
    assert got == {f"p{n}" for n in range(20)} - {"p7"}
    assert set(a.mine) == got


# -- assignments and sources -------------------------------------------------------------------------------------------


async def test_an_assignment_is_seen_whole_and_a_leader_of_yesterday_cannot_publish(bucket: Bucket) -> None:
    assignments, both = Assignments(bucket), {n: Partition(n, (f"s.{n}",)) for n in ("p", "q")}
    assert await assignments.share("a") is None
    yesterday = await assignments.current()
    await bucket.commit(writes(yesterday, Draft(Assignment({"p": "a", "q": "b"}), both, ("a", "b"), "S", "a")))
    assert await assignments.share("a") == Share(1, (both["p"],))
    assert await assignments.share("c") == Share(1)
    with pytest.raises(WrongRevision):
        await bucket.commit(writes(yesterday, Draft(Assignment({"p": "b", "q": "b"}), both, ("b",), "S", "b")))
    current = await assignments.current()
    assert (current.version, current.owners) == (1, {"p": "a", "q": "b"})
    assert current != replace(current, version=2)
    assert isinstance(current, Published)


async def test_a_list_is_written_to_a_bucket_that_this_server_does_not_know_yet(control: Control) -> None:
    """In a cluster the servers hear of a new bucket with a delay; until then nobody takes a write."""
    late = Bucket(control, "late")
    partitions = (Partition("a", ("s.a",)),)
    writing = asyncio.create_task(InBucket(late).write(partitions))
    await asyncio.sleep(0.3)  # the delay is what is tested
    assert not writing.done()
    await late.ensure()
    await writing
    assert tuple(await InBucket(late).partitions()) == partitions


async def test_partitions_in_the_bucket_can_be_changed_while_a_group_runs(bucket: Bucket) -> None:
    source = InBucket(bucket)
    with pytest.raises(Unavailable, match="no list of partitions"):
        await source.partitions()
    await source.write([])
    assert list(await source.partitions()) == []
    await source.write([Partition("p", ("s.p",))])
    await source.write([Partition("p", ("s.p",)), Partition("q", ("s.q",), 3)])
    with pytest.raises(ConfigError, match="same id"):
        await source.write([Partition("p", ("s.p",)), Partition("p", ("s.q",))])
    assert [p.id for p in await source.partitions()] == ["p", "q"]


async def test_partitions_are_found_in_the_stream(control: Control) -> None:
    await make_stream(control.jetstream, subjects=["dc.>"])
    for subject in ("dc.t1.c1.completion", "dc.t1.c2.completion", "dc.t2.c1.completion", "dc.t2.c1.other"):
        await control.connection.request(subject, b"")
    source = SeenInStream(control.jetstream, "S", SubjectPattern("dc.{tool}.{chamber}.completion"))
    assert [p.id for p in await source.partitions()] == ["t1.c1", "t1.c2", "t2.c1"]
    with pytest.raises(ConfigError, match=r"takes dc\.>: no message in it will ever match 'cd\.\*'"):
        await SeenInStream(control.jetstream, "S", SubjectPattern("cd.{tool}")).partitions()
    assert await SeenInStream(control.jetstream, "S", SubjectPattern("dc.{tool}")).partitions() == []


async def test_keys_are_hashed_as_the_server_maps_them(nats_server: EmbeddedServer, control: Control) -> None:
    transform = {"src": "orders.*", "dest": "orders.{{partition(8,1)}}.{{wildcard(1)}}"}
    await make_stream(control.jetstream, subjects=["orders.>"], subject_transform=transform)
    source = Hashed(8, "orders.{partition}.>")
    for n in range(20):
        await control.connection.request(f"orders.key{n}", b"")
        stored = await control.jetstream.get_message("S", n + 1)
        assert stored.subject == f"orders.{source.partition_of(f'key{n}')}.key{n}"
