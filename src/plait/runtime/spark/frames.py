"""What Spark's public interface does not tell of a DataFrame, or do with one, and its JVM objects do."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.classic.column import Column


def is_classic(given: object) -> bool:
    """Whether a session or DataFrame has a JVM beside it; those of Spark Connect have none."""
    return hasattr(given, "_jsparkSession") or hasattr(given, "_jdf")


def planned(rows: DataFrame) -> DataFrame:
    """The same rows with their plan cut off: Spark has planned the sources already, once per epoch is enough.

    Otherwise every operation on a micro-batch analyses, optimises and plans all the sources again.
    """
    java: Any = rows._jdf
    cut = java.sparkSession().internalCreateDataFrame(java.queryExecution().toRdd(), java.schema(), False)
    return DataFrame(cut, rows.sparkSession)


def estimated_bytes(rows: DataFrame) -> int:
    """Spark's estimate of the bytes that a DataFrame reads."""
    java: Any = rows._jdf
    return int(java.queryExecution().optimizedPlan().stats().sizeInBytes())


def with_unscaled(rows: DataFrame, names: Collection[str]) -> DataFrame:
    """The same rows, with decimals of at most 18 digits as the 64-bit integers that Spark has them as.

    To hand over a decimal, Spark makes an object of it, and of that another one; an integer is copied.
    """
    java: Any = rows.sparkSession._jvm
    expressions = java.org.apache.spark.sql.classic.ExpressionUtils
    unscaled = java.org.apache.spark.sql.catalyst.expressions.UnscaledValue
    columns = [
        Column(expressions.column(unscaled(expressions.expression(rows[name]._jc)))).alias(name)
        if name in names
        else rows[name]
        for name in rows.columns
    ]
    return rows.select(*columns)


def cloned(spark: SparkSession) -> SparkSession:
    """A session with the same settings, which can be changed without touching the user's."""
    java: Any = spark._jsparkSession
    return SparkSession(spark.sparkContext, java.cloneSession())
