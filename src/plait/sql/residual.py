"""What Spark still does to joined rows: conditions and output columns that a join task cannot evaluate."""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from plait.query.plan import QueryPlan


def finish(df: DataFrame, plan: QueryPlan) -> DataFrame:
    """Apply the query's remaining conditions and select its outputs; columns of `df` are called `alias.column`."""
    for condition in plan.where:
        df = df.where(F.expr(condition))
    if not plan.select:
        return df
    return df.select(*(F.expr(sql).alias(name) for sql, name in plan.select))
