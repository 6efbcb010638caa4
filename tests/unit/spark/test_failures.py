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
QUERY = """
=== Streaming Query ===
Identifier: p [id = 44156c4f-ecaa-4c71-b64a-dfd09ad97982, runId = 2c56edb6-dc09-42de-81a1-1913f4e9e3b5]
Current Committed Offsets: {}

Current State: ACTIVE
Thread State: RUNNABLE

Logical Plan:
~WriteToMicroBatchDataSourceV1 ForeachBatchSink, 44156c4f-ecaa-4c71-b64a-dfd09ad97982, [queryName=p], Append
+- ~Project [id#9, n#10L]
"""
PROXY = """An exception was raised by the Python Proxy. Return Message: Traceback (most recent call last):
  File "/x/py4j/clientserver.py", line 644, in _call_proxy
    return_value = getattr(self.pool[obj_id], method)(*params)
                   ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
  File "/x/pyspark/sql/readwriter.py", line 1841, in save
    self._jwrite.save(path)
  File "/x/py4j/protocol.py", line 327, in get_return_value
    raise Py4JJavaError(
py4j.protocol.Py4JJavaError: An error occurred while calling o1001.save.
: java.lang.NoSuchMethodError: 'void org.apache.spark.sql.execution.LogicalRDD.<init>(scala.collection.immutable.Seq)'
\tat org.apache.spark.sql.delta.util.StateCache$CachedDS.$anonfun$cachedDs$4(StateCache.scala:85)
\tat scala.Option.getOrElse(Option.scala:201)

"""
OLD_JAR = f"{PROXY}{QUERY}\npy4j.Py4JException: {PROXY}"
"""Spark 4.3.0 with the jar of Delta 4.4.0, which is made for Spark 4.2; shortened."""
IN_A_WORKER = """An exception was raised by the Python Proxy. Return Message: Traceback (most recent call last):
  File "/x/pyspark/errors/exceptions/captured.py", line 262, in deco
    raise converted from None
  File "/x/pipelines.py", line 5, in half
    return 10 // (n - 7)
    ^^^^^^^^^^^^^^^^^
pyspark.errors.exceptions.captured.PythonException: An exception was thrown from the Python worker:
Traceback (most recent call last):
  File "/x/pipelines.py", line 5, in half
    return 10 // (n - 7)
           ~~~^^~~~~~~~~
ZeroDivisionError: integer division or modulo by zero
"""
WORDLESS = """Traceback (most recent call last):
  File "/x/pipelines.py", line 3, in f
    assert rows
AssertionError
"""


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (WORKER, "stream 'S': stream not found (server error 10059)"),
        (USER, "ZeroDivisionError: division by zero"),
        (JVM, "File file:/x does not exist"),
        ("plain words", "plain words"),
        (
            OLD_JAR,
            "a jar is missing, or made for another version of Spark: NoSuchMethodError: "
            "'void org.apache.spark.sql.execution.LogicalRDD.<init>(scala.collection.immutable.Seq)'",
        ),
        (USER + QUERY, "ZeroDivisionError: division by zero"),
        (WORDLESS + QUERY, "AssertionError"),
        (IN_A_WORKER + QUERY, "ZeroDivisionError: integer division or modulo by zero"),
    ],
)
def test_the_innermost_reason_is_told_without_stacks(text: str, says: str) -> None:
    assert readable(text) == says


def test_an_error_in_sql_keeps_the_hint_and_loses_the_plan() -> None:
    told = readable(SQL)
    assert told == "A column with name `nope` cannot be resolved. Did you mean `id`? line 1"
    assert "Project" not in told
    assert "SQLSTATE" not in told
