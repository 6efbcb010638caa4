"""The graph of what flows where, and its picture."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from penstock.observe.flow import (
    COLUMN,
    Edge,
    FlowNode,
    FlowPicture,
    NodeKind,
    NodeState,
    flow,
    layout,
    needs_attention,
)
from penstock.observe.snapshot import Rates, Snapshot, rates
from penstock.observe.status import ConsumerStatus, Status, StreamStatus
from penstock.topology.load import load

NOW = datetime(2026, 11, 17, tzinfo=UTC)
FILE = """
name: shop
environments: {dev: {servers: ["nats://localhost:4222"]}}
streams:
  ORDERS: {subjects: [orders.>], max_age: 1d}
  MISSING: {subjects: [missing.>], max_age: 1d}
  DLQ: {subjects: [dlq.>], max_age: 1d}
consumers:
  bill: {stream: ORDERS, filter: orders.paid, service: billing, ack_wait: 30s, max_deliver: 3, deliver: all,
         dlq: dlq.orders.paid, purpose: bills}
services:
  shop: {publishes: [orders.>]}
"""


def stream(name: str, *subjects: str, **changes: Any) -> StreamStatus:
    made = StreamStatus(
        name=name, subjects=subjects, retention="limits", messages=10, bytes=1000, max_bytes=None, first_seq=1,
        last_seq=10, last_time=NOW, consumers=0, replicas=1, healthy_replicas=1, sources=(), takes_batches=False,
        platform=None,
    )  # fmt: skip
    return replace(made, **changes)


def consumer(name: str, **changes: Any) -> ConsumerStatus:
    made = ConsumerStatus(
        stream="ORDERS", name=name, filters=(), service="billing", owner=None, purpose=None, lag_messages=0,
        lag=timedelta(), ack_pending=0, max_ack_pending=None, ack_floor=10, delivered=10, redelivered=0, waiting=1,
        paused_for=None, dlq=None, dead_letters=0, given_up=0, platform=None,
    )  # fmt: skip
    return replace(made, **changes)


def snapshot(*consumers: ConsumerStatus, streams: tuple[StreamStatus, ...] = (), seconds: float = 0) -> Snapshot:
    known = streams or (stream("ORDERS", "orders.>"), stream("DLQ", "dlq.>", messages=0))
    return Snapshot(Status(NOW + timedelta(seconds=seconds), known, consumers, None))


def test_a_service_is_as_bad_as_its_worst_consumer_and_edges_add_up() -> None:
    behind = consumer("slow", lag_messages=5, lag=timedelta(seconds=60))
    stuck = consumer("stuck", lag_messages=7, lag=timedelta(seconds=90), waiting=0)
    found = flow(snapshot(consumer("fine"), behind, stuck), Rates())
    assert found.nodes["service:billing"].state is NodeState.UNATTENDED
    edge = found.edges["stream:ORDERS", "service:billing"]
    assert (edge.lag, edge.seconds, edge.state) == (12, 90.0, NodeState.UNATTENDED)
    assert [node.id for node, _ in needs_attention(found)] == ["service:billing"]


def test_what_is_declared_and_missing_and_what_is_there_and_not_declared_is_told(tmp_path: Path) -> None:
    file = tmp_path / "penstock.yaml"
    file.write_text(FILE)
    platform = load(file, "dev")
    known = (
        stream("ORDERS", "orders.>"),
        stream("DLQ", "dlq.>"),
        stream("OTHER", "other.>"),
        stream("KV_x", "$KV.x.>"),
    )
    found = flow(snapshot(consumer("bill"), consumer("strange", service=None), streams=known), Rates(), platform)
    assert found.nodes["stream:MISSING"].state is NodeState.FAILED
    assert not found.nodes["stream:OTHER"].declared
    assert not found.nodes["consumer:strange"].declared
    assert found.nodes["service:billing"].declared
    assert ("publisher:shop", "stream:ORDERS") in found.edges
    assert "stream:KV_x" not in found.nodes
    assert found.nodes["dead letters:DLQ"].state is NodeState.BEHIND, "there are letters"


def test_letters_lead_from_who_gave_up_to_where_they_lie() -> None:
    found = flow(snapshot(consumer("bill", dlq="dlq.orders.paid", dead_letters=2, given_up=1)), Rates())
    assert found.edges["service:billing", "dead letters:DLQ"].lag == 3


def test_a_reader_with_a_dlq_leads_to_the_letters_also_while_there_are_none() -> None:
    found = flow(snapshot(consumer("bill", dlq="dlq.orders.paid"), consumer("other", service="other")), Rates())
    edge = found.edges["service:billing", "dead letters:DLQ"]
    assert (edge.lag, edge.state) == (0, NodeState.OK)
    assert ("service:other", "dead letters:DLQ") not in found.edges
    below = (stream("ORDERS", "orders.>"), stream("DLQ", "dlq.orders.paid.>", messages=0))
    found = flow(snapshot(consumer("bill", dlq="dlq.orders.paid"), streams=below), Rates())
    assert ("service:billing", "dead letters:DLQ") in found.edges


def test_rates_are_what_has_grown_between_two_looks() -> None:
    before = snapshot(consumer("bill", settled=100))
    after = snapshot(
        consumer("bill", settled=160),
        streams=(stream("ORDERS", "orders.>", last_seq=30, bytes=3000), stream("NEW", "new.>", last_seq=99)),
        seconds=2,
    )
    found = rates(before, after)
    assert (found.stored["ORDERS"], found.stored["NEW"], found.grown["ORDERS"]) == (10.0, 0.0, 1000.0)
    assert found.settled["ORDERS", "bill"] == 30.0
    assert rates(after, snapshot(consumer("bill", settled=3), seconds=4)).settled["ORDERS", "bill"] == 0.0
    assert rates(None, after) == Rates()


def test_a_picture_has_every_node_in_its_column_and_leaves_out_only_what_is_fine() -> None:
    graph = FlowPicture()
    for number in range(100):
        state = NodeState.FAILED if number == 99 else NodeState.OK
        stream_id = graph.add(FlowNode(NodeKind.STREAM, f"S{number:02}", state))
        graph.connect(Edge(stream_id, graph.add(FlowNode(NodeKind.CONSUMER, f"c{number:02}")), 1.0))
    found = layout(graph, most=20)
    assert found.left_out == 160
    assert "stream:S99" in found.placed
    assert all(one.column == COLUMN[one.node.kind] for one in found.placed.values())
    places = [(one.column, one.row) for one in found.placed.values()]
    assert len(set(places)) == len(places)
    whole = layout(graph, most=100)
    rows = {name: one.row for name, one in whole.placed.items()}
    assert all(rows[edge.source] == rows[edge.target] for edge in whole.edges), "no edges cross"
