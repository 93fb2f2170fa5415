"""DataFrames as Catalyst plans, and Catalyst plans as DataFrames."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from plait.sql.catalyst.handles import name_of, output_of
from plait.sql.catalyst.logical import Logical


def renamed_rows(logical: Logical, frame: DataFrame, attributes: Sequence[Any], more: int = 0) -> Any:
    """A plan of the frame's rows; its first columns are those that `attributes` stand for.

    So many `more` of the frame's last columns follow as they are.
    """
    java: Any = frame._jdf
    plan = java.queryExecution().analyzed()
    output = output_of(plan)
    columns = [logical.alias(f, name_of(a), a.exprId()) for f, a in zip(output, attributes, strict=False)]
    return logical.project([*columns, *output[len(output) - more :]], plan)


def frame_of(spark: SparkSession, plan: Any) -> DataFrame:
    """The rows that a plan gives."""
    jvm: Any = spark._jvm
    java: Any = spark._jsparkSession
    return DataFrame(jvm.org.apache.spark.sql.classic.Dataset.ofRows(java, plan), spark)


def described(frame: DataFrame) -> str:
    """How Spark would run it, as EXPLAIN writes it."""
    java: Any = frame._jdf
    return str(java.queryExecution().toString())
