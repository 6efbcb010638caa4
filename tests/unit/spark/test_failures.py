"""Spark's errors as one readable message."""

from __future__ import annotations

import pytest

from penstock.spark.failures import readable

WORKER = """[STREAM_FAILED] Query [id = 1, runId = 2] terminated with exception: Job aborted due to stage failure
org.apache.spark.api.python.PythonException: Traceback (most recent call last):
  File "/x/pyspark/worker.py", line 1, in main
    process()
  File "/x/penstock/spark/source.py", line 5, in read
    raise StreamNotFound("stream 'S'", 404, 10059, "stream not found")
penstock.errors.StreamNotFound: stream 'S': stream not found (server error 10059)

\tat org.apache.spark.api.python.BasePythonRunner$ReaderIterator.handlePythonException(PythonRunner.scala:581)
Caused by: java.lang.RuntimeException: something of the JVM
"""
USER = """py4j.Py4JException: An exception was raised. Return Message: Traceback (most recent call last):
  File "/x/pipelines.py", line 3, in f
    1 / 0
ZeroDivisionError: division by zero
"""
SQL = """[UNRESOLVED_COLUMN] A column with name `nope` cannot be resolved. Did you mean `id`? SQLSTATE: 42703; line 1;
'Project ['nope]
+- SubqueryAlias events
"""
JVM = """[STREAM_FAILED] Query terminated with exception: Job aborted
Caused by: org.apache.spark.SparkException: outer
Caused by: java.io.FileNotFoundException: File file:/x does not exist
\tat org.apache.spark.Foo(Foo.scala:1)
"""


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (WORKER, "stream 'S': stream not found (server error 10059)"),
        (USER, "ZeroDivisionError: division by zero"),
        (JVM, "File file:/x does not exist"),
        ("plain words", "plain words"),
    ],
)
def test_the_innermost_reason_is_told_without_stacks(text: str, says: str) -> None:
    assert readable(text) == says


def test_an_error_in_sql_keeps_the_hint_and_loses_the_plan() -> None:
    told = readable(SQL)
    assert told == "A column with name `nope` cannot be resolved. Did you mean `id`? line 1"
    assert "Project" not in told
    assert "SQLSTATE" not in told
