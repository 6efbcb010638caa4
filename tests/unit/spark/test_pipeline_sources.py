"""What a declared pipeline tells the source."""

from __future__ import annotations

from penstock.examples import example_dir
from penstock.settings import Settings
from penstock.spark.pipelines import pipeline, source_options
from penstock.topology.load import load


def test_letters_that_were_replayed_are_no_loss_to_a_pipeline_and_other_holes_are() -> None:
    platform = load(example_dir() / "penstock.yaml", "dev")
    flow = pipeline(platform, "event_lake", Settings())
    strict = {stream for stream in flow.streams if source_options(flow, stream)["failOnDataLoss"] == "true"}
    assert strict == set(platform.streams) - {"DLQ"}
