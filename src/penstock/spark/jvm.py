"""Starts Spark's JVM, without the one warning that users cannot act on."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from contextlib import suppress

from pyspark import SparkConf, SparkContext
from pyspark.java_gateway import launch_gateway

GREETING = b"WARNING: Using incubator modules:"
"""Said by every JVM that Spark starts, since Spark asks for such a module; no option of the JVM turns it off."""
STDERR = 2
CONNECT_TIMEOUT = "SPARK_AUTH_SOCKET_TIMEOUT"
"""Seconds in which a Python process of Spark must be connected to the JVM, read by PySpark from its environment."""
PATIENT = "60"
"""PySpark's own 15 seconds are too few on a busy machine: a query then fails before its first micro-batch."""


def launch(settings: Mapping[str, str]) -> None:
    """Start the JVM that the next session of this process uses; nothing happens when there is one.

    Its stderr goes through a thread of this process that leaves out the greeting, and passes on all the rest.
    """
    if SparkContext._gateway is not None or "PYSPARK_GATEWAY_PORT" in os.environ:  # spark-submit has started one
        return
    conf = SparkConf()
    for key, value in settings.items():
        conf.set(key, value)
    os.environ.setdefault(CONNECT_TIMEOUT, PATIENT)
    from_jvm, to_us = os.pipe()
    passing = threading.Thread(target=_pass_on, args=(from_jvm,), name="spark-stderr", daemon=True)
    passing.start()
    try:
        gateway = launch_gateway(conf, {"stderr": to_us})  # type: ignore[no-untyped-call] # PySpark has no types here
    except BaseException:
        os.close(to_us)
        passing.join(1.0)  # what it said at its end is the reason
        raise
    os.close(to_us)
    SparkContext._ensure_initialized(gateway=gateway)


def _pass_on(source: int) -> None:
    with open(source, "rb") as lines, suppress(OSError):  # our stderr is closed
        for line in lines:
            if not line.startswith(GREETING):
                os.write(STDERR, line)
