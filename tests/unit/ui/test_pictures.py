"""Names and small pictures of the pages."""

from __future__ import annotations

from penstock.observe.flow import Edge, FlowNode, FlowPicture, NodeKind, layout
from penstock.ui import charts
from penstock.ui.page import breakable


def test_a_name_breaks_behind_its_parts_and_stays_text() -> None:
    assert breakable("billing_worker.usage-metered/x") == "billing_<wbr>worker.<wbr>usage-<wbr>metered/<wbr>x"
    assert breakable("<b>_x") == "&lt;b&gt;_<wbr>x"
    assert breakable("ends_") == "ends_"


def test_a_trend_of_nothing_is_not_drawn() -> None:
    assert charts.trend([0, 0, 0]) == charts.trend([5]) == charts.trend([]) == ""
    assert charts.trend([0, 1], 10, 10) == "0.0,9.0 10.0,1.0"


def test_columns_are_named_and_more_flow_is_a_wider_line() -> None:
    graph = FlowPicture()
    stream = graph.add(FlowNode(NodeKind.STREAM, "ORDERS"))
    for name, rate in (("slow", None), ("some", 1.0), ("fast", 5_000.0)):
        graph.connect(Edge(stream, graph.add(FlowNode(NodeKind.SERVICE, name)), rate))
    drawn = charts.picture(layout(graph))
    assert [name for _, name in drawn.heads] == ["Streams", "Readers"]
    width = {line.edge.target: line.width for line in drawn.lines}
    assert width["service:slow"] < width["service:some"] < width["service:fast"] <= 7
    assert min(box.y for box in drawn.boxes) >= charts.HEAD
