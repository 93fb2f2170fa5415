"""What Spark's public interface does not tell of a DataFrame, or do with one, and its JVM objects do."""

from __future__ import annotations

from typing import Any

from pyspark.sql import DataFrame


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
