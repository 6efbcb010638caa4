"""What flows from where to where: a graph of publishers, streams, readers and what they write. Pure.

It is laid out by the declared platform. What is on the server and not in the file is in it too, and marked.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from enum import StrEnum

from penstock import subjects
from penstock.observe.pipelines import PipelineStatus
from penstock.observe.snapshot import Key, Rates, Snapshot
from penstock.observe.status import ConsumerStatus, StreamStatus
from penstock.spark.progress import FAILED, NEVER, SILENT
from penstock.topology.model import Platform

BEHIND_SECONDS = 10.0
"""From this age of the oldest unacknowledged message on, a reader is behind."""
INTERNAL = ("KV_", "OBJ_", "DLQ_ADVISORIES", "DLQ_AUDIT", "BATCH_ADVISORIES", "PENSTOCK_HISTORY")
"""So begin the names of streams that only lists show: buckets, and what Penstock keeps for itself."""


class NodeState(StrEnum):
    """How something is, from good to bad."""

    OK = "ok"
    IDLE = "idle"
    WAITING = "waiting for its next run"
    BEHIND = "behind"
    UNATTENDED = "nobody reads"
    FAILED = "failed"


BADNESS = {state: place for place, state in enumerate(NodeState)}


class NodeKind(StrEnum):
    """What a node of the graph is."""

    PUBLISHER = "publisher"
    ORIGIN = "origin"
    STREAM = "stream"
    SERVICE = "service"
    CONSUMER = "consumer"
    GROUP = "group"
    PIPELINE = "pipeline"
    OUTPUT = "output"
    TABLE = "table"
    LETTERS = "dead letters"


COLUMN = {
    NodeKind.PUBLISHER: 0, NodeKind.ORIGIN: 0, NodeKind.STREAM: 1, NodeKind.SERVICE: 2, NodeKind.CONSUMER: 2,
    NodeKind.GROUP: 2, NodeKind.PIPELINE: 2, NodeKind.OUTPUT: 3, NodeKind.TABLE: 3, NodeKind.LETTERS: 3,
}  # fmt: skip
COLUMNS = 4


@dataclass(frozen=True, slots=True)
class FlowNode:
    """Something that messages flow through."""

    kind: NodeKind
    name: str
    state: NodeState = NodeState.OK
    detail: str = ""
    declared: bool = True

    @property
    def id(self) -> str:
        return f"{self.kind}:{self.name}"


@dataclass(frozen=True, slots=True)
class Edge:
    """Messages on their way from one node to another."""

    source: str
    target: str
    rate: float | None = None
    """Messages a second; None where nobody counts them."""
    lag: int = 0
    seconds: float = 0.0
    """Age of the oldest message that waits."""
    state: NodeState = NodeState.OK


@dataclass(slots=True)
class FlowPicture:
    """The whole graph."""

    nodes: dict[str, FlowNode] = field(default_factory=dict)
    edges: dict[tuple[str, str], Edge] = field(default_factory=dict)

    def add(self, node: FlowNode) -> str:
        """Add a node, or make one that is there as bad as this one says."""
        known = self.nodes.get(node.id)
        if known is None:
            self.nodes[node.id] = node
        elif BADNESS[node.state] > BADNESS[known.state]:
            self.nodes[node.id] = replace(known, state=node.state)
        return node.id

    def connect(self, edge: Edge) -> None:
        """Add an edge; several between the same two are one."""
        at = (edge.source, edge.target)
        if known := self.edges.get(at):
            rate = None if known.rate is None and edge.rate is None else (known.rate or 0) + (edge.rate or 0)
            edge = replace(
                edge,
                rate=rate,
                lag=known.lag + edge.lag,
                seconds=max(known.seconds, edge.seconds),
                state=worst((known.state, edge.state)),
            )
        self.edges[at] = edge


def worst(states: Iterable[NodeState]) -> NodeState:
    return max(states, key=BADNESS.__getitem__, default=NodeState.OK)


def state_of(consumer: ConsumerStatus) -> NodeState:
    """How a consumer gets on."""
    if consumer.is_unattended:
        return NodeState.UNATTENDED
    if consumer.awaits_run:
        return NodeState.WAITING
    if consumer.lag_messages and consumer.lag.total_seconds() >= BEHIND_SECONDS:
        return NodeState.BEHIND
    return NodeState.OK


def word_for(consumer: ConsumerStatus) -> str:
    """The state of a consumer as lists show it: one that is paused is nothing else."""
    return "paused" if consumer.paused_for is not None else state_of(consumer)


def is_declared(consumer: ConsumerStatus, platform: Platform | None) -> bool:
    """Whether a consumer is in the platform file, or belongs to something that looks after it by itself.

    The durable of a pipeline is declared when the pipeline is.
    """
    if platform is None or consumer.group or consumer.carries:
        return True
    if consumer.pipeline is not None and consumer.pipeline in platform.pipelines:
        return True
    spec = platform.consumers.get(consumer.name)
    return spec is not None and spec.stream == consumer.stream


@dataclass(frozen=True, slots=True)
class Reading:
    """A consumer in the graph."""

    consumer: ConsumerStatus
    rate: float
    node: FlowNode
    edge: Edge


Readings = dict[Key, Reading]


def flow(
    snapshot: Snapshot, rates: Rates, platform: Platform | None = None, readings: Readings | None = None
) -> FlowPicture:
    """The graph of a snapshot. What the platform declares and the server lacks is in it, as failed.

    `readings`: consumers of the graph before this one of the same platform, which are not made again if they are the
    same objects; after the call those of this graph.
    """
    graph = FlowPicture()
    shown = {one.name: one for one in snapshot.status.streams if not one.name.startswith(INTERNAL)}
    for stream in shown.values():
        graph.add(_stream_node(stream, rates, platform))
        for source in stream.sources:
            _add_source(graph, stream, source.name, source.lag, bool(source.error), shown)
    if platform:
        for name, spec in platform.streams.items():
            if name not in shown:
                kind = NodeKind.LETTERS if spec.is_dead_letters else NodeKind.STREAM
                graph.add(FlowNode(kind, name, NodeState.FAILED, "declared, not on the server"))
        _add_publishers(graph, platform, shown.values())
    letters = [one for one in shown.values() if one.is_dead_letters]
    _add_consumers(graph, snapshot, rates, shown, letters, platform, {} if readings is None else readings)
    _add_groups(graph, snapshot, rates, letters)
    _add_pipelines(graph, snapshot, rates, shown, letters, platform)
    return graph


def _stream_node(stream: StreamStatus, rates: Rates, platform: Platform | None) -> FlowNode:
    kind = NodeKind.LETTERS if stream.is_dead_letters else NodeKind.STREAM
    rate = rates.stored.get(stream.name, 0.0)
    detail = f"{stream.messages:,} messages" + (f", {per_second(rate)}" if rate else "")
    bad = stream.healthy_replicas < stream.replicas
    state = (
        NodeState.FAILED if bad else NodeState.BEHIND if kind is NodeKind.LETTERS and stream.messages else NodeState.OK
    )
    return FlowNode(kind, stream.name, state, detail, platform is None or stream.name in platform.streams)


def _add_source(
    graph: FlowPicture, stream: StreamStatus, origin: str, lag: int, failing: bool, shown: dict[str, StreamStatus]
) -> None:
    here = origin in shown and origin != stream.name
    source = (
        f"{NodeKind.STREAM}:{origin}" if here else graph.add(FlowNode(NodeKind.ORIGIN, origin, detail="another place"))
    )
    graph.connect(Edge(source, _id_of(stream), None, lag, state=NodeState.FAILED if failing else NodeState.OK))


def _id_of(stream: StreamStatus) -> str:
    return f"{NodeKind.LETTERS if stream.is_dead_letters else NodeKind.STREAM}:{stream.name}"


def _add_publishers(graph: FlowPicture, platform: Platform, streams: Iterable[StreamStatus]) -> None:
    listed = list(streams)
    for service in platform.services.values():
        written = (*service.publishes, *service.appends)
        for stream in listed:
            if not stream.is_dead_letters and subjects.any_overlap(written, stream.subjects):
                graph.connect(Edge(graph.add(FlowNode(NodeKind.PUBLISHER, service.name)), _id_of(stream)))


def _add_consumers(
    graph: FlowPicture,
    snapshot: Snapshot,
    rates: Rates,
    shown: dict[str, StreamStatus],
    letters: Sequence[StreamStatus],
    platform: Platform | None,
    readings: Readings,
) -> None:
    before = readings.copy()
    readings.clear()
    for consumer in snapshot.status.consumers:
        if consumer.stream not in shown or consumer.group or consumer.carries or consumer.pipeline:
            continue
        key = (consumer.stream, consumer.name)
        rate, made = rates.settled.get(key, 0.0), before.get(key)
        if made is None or made.consumer is not consumer or made.rate != rate:
            made = _reading(consumer, rate, _id_of(shown[consumer.stream]), platform)
        readings[key] = made
        graph.add(made.node)
        graph.connect(made.edge)
        if consumer.dlq:
            count = (consumer.dead_letters or 0) + consumer.given_up
            _add_dead_letters(graph, made.edge.target, consumer.dlq, count, letters)


def _reading(consumer: ConsumerStatus, rate: float, source: str, platform: Platform | None) -> Reading:
    state = state_of(consumer)
    kind, name = (NodeKind.SERVICE, consumer.service) if consumer.service else (NodeKind.CONSUMER, consumer.name)
    node = FlowNode(kind, name, state, declared=is_declared(consumer, platform))
    edge = Edge(source, node.id, rate, consumer.lag_messages, consumer.lag.total_seconds(), state)
    return Reading(consumer, rate, node, edge)


def _add_dead_letters(
    graph: FlowPicture, reader: str, dlq: str | None, count: int, letters: Sequence[StreamStatus]
) -> None:
    """Lead from a reader to where its letters go, also while there are none."""
    written = [dlq, f"{dlq}.*.*"] if dlq else []  # a letter has a subject below, a bad record has this one
    for one in letters if written else ():
        if subjects.any_overlap(written, one.subjects):
            state = NodeState.BEHIND if count else NodeState.OK
            graph.connect(Edge(reader, _id_of(one), None, count, state=state))


def _add_groups(graph: FlowPicture, snapshot: Snapshot, rates: Rates, letters: Sequence[StreamStatus]) -> None:
    for group in snapshot.groups:
        theirs = [one for one in snapshot.status.consumers if one.group == group.group and one.stream == group.stream]
        active, lag = group.active, group.lag
        seconds = max((one.lag.total_seconds() for one in theirs), default=0.0)
        idle = NodeState.UNATTENDED if lag else NodeState.IDLE
        state = (NodeState.BEHIND if lag and seconds >= BEHIND_SECONDS else NodeState.OK) if active else idle
        detail = f"{active} workers, {len(group.partitions)} partitions"
        target = graph.add(FlowNode(NodeKind.GROUP, group.group, state, detail))
        if f"{NodeKind.STREAM}:{group.stream}" in graph.nodes:
            rate = sum(rates.settled.get((one.stream, one.name), 0.0) for one in theirs)
            graph.connect(Edge(f"{NodeKind.STREAM}:{group.stream}", target, rate, lag, seconds, state))
        for one in theirs:
            _add_dead_letters(graph, target, one.dlq, (one.dead_letters or 0) + one.given_up, letters)


def _add_pipelines(
    graph: FlowPicture,
    snapshot: Snapshot,
    rates: Rates,
    shown: dict[str, StreamStatus],
    letters: Sequence[StreamStatus],
    platform: Platform | None,
) -> None:
    for one in snapshot.pipelines:
        state = _pipeline_state(one, snapshot)
        spec = platform.pipelines.get(one.name) if platform else None
        name = graph.add(FlowNode(NodeKind.PIPELINE, one.name, state, one.state, platform is None or spec is not None))
        for stream in one.streams:
            if stream in shown:
                consumer = snapshot.consumer(stream, one.consumer)
                lag = consumer.lag_messages if consumer else 0
                seconds = consumer.lag.total_seconds() if consumer else 0.0
                rate = rates.settled.get((stream, one.consumer), 0.0)
                reading = state_of(consumer) if consumer and one.state not in (FAILED, SILENT) else state
                graph.connect(Edge(_id_of(shown[stream]), name, rate, lag, seconds, reading))
        _add_dead_letters(graph, name, spec.bad_records if spec else None, 0, letters)
        for sink in spec.sinks if spec else ():
            kind = NodeKind.OUTPUT if sink.stream else NodeKind.TABLE
            written = graph.add(FlowNode(kind, sink.stream or sink.path or "console", detail=sink.format or ""))
            graph.connect(Edge(name, written))


def _pipeline_state(pipeline: PipelineStatus, snapshot: Snapshot) -> NodeState:
    """What its driver says, or that it is as far behind as the worst of its durables."""
    if pipeline.state in (FAILED, SILENT):
        return NodeState.FAILED
    found = (snapshot.consumer(stream, pipeline.consumer) for stream in pipeline.streams)
    own = NodeState.IDLE if pipeline.state == NEVER else NodeState.OK
    return worst((own, *(state_of(one) for one in found if one)))


def per_second(rate: float) -> str:
    return f"{rate:,.0f}/s" if rate >= 10 or not rate else f"{rate:.1f}/s"


# -- the picture -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Placed:
    """A node and its place."""

    node: FlowNode
    column: int
    row: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Nodes in columns, so that most edges run from left to right and few cross."""

    placed: dict[str, Placed]
    edges: tuple[Edge, ...]
    rows: int
    left_out: int
    """Nodes that are not in the picture, since there are too many; those that need attention are in it."""


def layout(graph: FlowPicture, most: int = 60) -> Layout:
    """Place at most `most` nodes a column."""
    columns: list[list[FlowNode]] = [[] for _ in range(COLUMNS)]
    for node in graph.nodes.values():
        columns[COLUMN[node.kind]].append(node)
    weight = _weights(graph) if any(len(nodes) > most for nodes in columns) else {}
    left_out = 0
    for place, nodes in enumerate(columns):
        left_out += max(0, len(nodes) - most)
        kept = nodes
        if len(nodes) > most:
            kept = sorted(nodes, key=lambda node: (-BADNESS[node.state], -weight.get(node.id, 0.0)))[:most]
        columns[place] = sorted(kept, key=lambda node: (node.kind, node.name))
    neighbours = _neighbours(graph, {node.id for nodes in columns for node in nodes})
    for place in (*range(1, COLUMNS), *range(COLUMNS - 2, -1, -1), *range(1, COLUMNS)):
        _untangle(columns, place, neighbours)
    placed = {
        node.id: Placed(node, column, row) for column, nodes in enumerate(columns) for row, node in enumerate(nodes)
    }
    edges = tuple(one for one in graph.edges.values() if one.source in placed and one.target in placed)
    return Layout(placed, edges, max(map(len, columns), default=0), left_out)


def _weights(graph: FlowPicture) -> dict[str, float]:
    weight: dict[str, float] = defaultdict(float)
    for edge in graph.edges.values():
        for end in (edge.source, edge.target):
            weight[end] += edge.lag + (edge.rate or 0.0) + 0.1
    return weight


def _neighbours(graph: FlowPicture, drawn: Set[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for source, target in graph.edges:
        if source in drawn and target in drawn:
            found[source].append(target)
            found[target].append(source)
    return found


def _untangle(columns: list[list[FlowNode]], place: int, neighbours: dict[str, list[str]]) -> None:
    """Order a column by where the neighbours of its nodes are; those without any stay at the end."""
    rows = {
        node.id: row / max(1, len(nodes))
        for at, nodes in enumerate(columns)
        if at != place
        for row, node in enumerate(nodes)
    }

    def middle(node: FlowNode) -> float:
        found = [rows[one] for one in neighbours[node.id] if one in rows]
        return sum(found) / len(found) if found else 2.0

    columns[place].sort(key=lambda node: (middle(node), node.kind, node.name))


def needs_attention(graph: FlowPicture) -> Iterator[tuple[FlowNode, list[Edge]]]:
    """What is behind, not read or failed, with the edges that show it, the worst first."""
    bad = [node for node in graph.nodes.values() if BADNESS[node.state] >= BADNESS[NodeState.BEHIND]]
    edges: dict[str, list[Edge]] = defaultdict(list)
    for edge in graph.edges.values():
        if edge.state is not NodeState.OK:
            edges[edge.target].append(edge)
    for node in sorted(bad, key=lambda node: (-BADNESS[node.state], node.kind, node.name)):
        yield node, edges[node.id]


class FlowWatch:
    """The graph of snapshot after snapshot: where nothing that it shows has changed, it is the same object."""

    def __init__(self, platform: Platform | None = None) -> None:
        self._platform = platform
        self._seen: object = None
        self._graph = FlowPicture()
        self._readings: Readings = {}

    def of(self, snapshot: Snapshot, rates: Rates) -> FlowPicture:
        streams = tuple(one for one in snapshot.status.streams if not one.name.startswith(INTERNAL))
        names = {one.name for one in streams}
        stored = {name: rate for name, rate in rates.stored.items() if rate and name in names}
        settled = {key: rate for key, rate in rates.settled.items() if rate and key[0] in names}
        seen = (streams, snapshot.status.consumers, snapshot.groups, snapshot.pipelines, stored, settled)
        if seen != self._seen:
            self._graph = flow(snapshot, Rates(stored, settled), self._platform, self._readings)
            self._seen = seen
        return self._graph
