"""Pipelines as `penstock pipeline ls|status` print them for machines."""

from __future__ import annotations

from datetime import timedelta

import pytest

from penstock.cli.pipeline_view import to_json
from penstock.observe.pipelines import PipelineStatus


@pytest.mark.parametrize(("rows", "seconds"), [(None, None), (0, 0.0), (3, 0.0)])
def test_a_pipeline_that_never_ran_is_not_said_to_keep_up(rows: int | None, seconds: float | None) -> None:
    shown = to_json(PipelineStatus("p", "never ran", ("S",), "pipeline_p", rows, timedelta(), None))
    assert (shown["rows_behind"], shown["seconds_behind"]) == (rows, seconds)
