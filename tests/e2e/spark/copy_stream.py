"""A streaming query that copies one stream to another, as a program of its own, for tests that kill it.

    python copy_stream.py '{"servers": …, "source": {…}, "sink": {…}, "checkpoint": …, "master": …}'

With `"settings": {…}` Spark gets further settings; with `"shuffle": true` rows go through a shuffle, whose number of
tasks adaptive execution chooses by the cores that there are. It ends by itself with everything that was in the input
when it started, and goes on from its checkpoint.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

from penstock.spark import register
from penstock.spark.session import session


def main(config: dict[str, Any]) -> None:
    settings = {"spark.sql.shuffle.partitions": "2", "spark.task.maxFailures": "8", **config["settings"]}
    spark = session("copy-stream", master=config["master"], settings=settings, short_lived=True)
    register(spark)
    source = {"servers": config["servers"], **config["source"]}
    frame = spark.readStream.format("jetstream").options(**source).load()
    copied = frame.select(F.expr("concat('out.', subject)").alias("subject"), "data", "headers")
    if config["shuffle"]:
        copied = copied.repartition("data")
    sink = {"servers": config["servers"], "checkpointLocation": config["checkpoint"], **config["sink"]}
    query = copied.writeStream.format("jetstream").options(**sink).trigger(availableNow=True).start()
    query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
