"""The Spark session of a pipeline."""

from __future__ import annotations

import pytest
from pyspark.logger import PySparkLogger

from penstock.spark.session import hush


@pytest.mark.parametrize("name", ["SQLQueryContextLogger", "DataFrameQueryContextLogger"])
def test_pyspark_logs_no_stack_for_what_a_pipeline_says_in_one_line(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    hush()
    PySparkLogger.getLogger(name).exception("there is no column `nope`", errorClass="UNRESOLVED_COLUMN")
    assert capsys.readouterr().err == ""
