"""The parts of the example's pipelines that are easier to say in Python than in SQL."""

from __future__ import annotations

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 # Spark's own convention

LOW_BALANCE = 20
CREDITED = "platform.payments.balance_credited"
LOW = "platform.billing.low_balance_warning"
DEPLETED = "platform.billing.balance_depleted"


def balances(events: DataFrame) -> DataFrame:
    """Every movement of money, and beside them the new balance of each project they belong to.

    Amounts are decimals, so that a sum is the same in whatever order Spark adds it up.
    """
    credit, debit = F.col("payload.amount"), -F.col("payload.price")
    amount = F.when(F.col("jetstream.subject") == CREDITED, credit).otherwise(debit).cast("decimal(18,4)")
    movements = events.select("payload.project_id", amount.alias("amount"), "event_id", "occurred_at", "correlation_id")
    totals = movements.groupBy("project_id").agg(F.sum("amount").cast("decimal(18,4)").alias("balance"))
    return totals.unionByName(movements, allowMissingColumns=True)


def crossings(batch: DataFrame) -> DataFrame:
    """One event for each time a balance fell below a mark, from the movements and balances of one micro-batch."""
    movements = batch.where("balance IS NULL").drop("balance")
    change = movements.groupBy("project_id").agg(F.sum("amount").alias("change"))
    closing = batch.where("balance IS NOT NULL").select("project_id", F.col("balance").alias("closing"))
    opening = closing.join(change, "project_id").selectExpr("project_id", "closing - change AS opening")
    in_order = Window.partitionBy("project_id").orderBy("occurred_at", "event_id")
    after = F.col("opening") + F.sum("amount").over(in_order)
    steps = movements.join(opening, "project_id").withColumn("after", after)
    fell = steps.withColumn("before", F.expr("after - amount")).withColumn("subject", _mark())
    return fell.where("subject IS NOT NULL").select(
        "subject", _envelope().alias("data"), "project_id", F.col("after").alias("balance"), "occurred_at"
    )


def _mark() -> Column:
    """The mark that a step fell below; null for a step that did not."""
    before, after = F.col("before"), F.col("after")
    depleted = F.when((before > 0) & (after <= 0), DEPLETED)
    return F.coalesce(depleted, F.when((before >= LOW_BALANCE) & (after < LOW_BALANCE), LOW))


def _envelope() -> Column:
    """The event as JSON. Its id is made from the one that caused it, so that a second try has the same id."""
    return F.to_json(
        F.struct(
            F.md5(F.concat("subject", "event_id")).alias("event_id"),
            F.col("subject").alias("event_type"),
            F.date_format("occurred_at", "yyyy-MM-dd'T'HH:mm:ss.SSSSSS'Z'").alias("occurred_at"),
            F.lit("1.0").alias("version"),
            "correlation_id",
            F.struct("project_id", F.col("after").alias("balance")).alias("payload"),
        )
    )
