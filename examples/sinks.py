"""Sinks: one query writes Parquet files, another hands each epoch's rows to a function.

A sink gets the rows of an epoch after the epoch is committed.  After a crash it may get the same epoch again, with
the same number and the same rows.  Code that remembers the number sees every row exactly once.

Run it: python examples/sinks.py
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession

import plait

SCHEMAS = {"orders": "id BIGINT, customer STRING", "payments": "order_id BIGINT, amount DOUBLE"}
SQL = "SELECT o.id, o.customer, p.amount FROM orders o JOIN payments p ON p.order_id = o.id"


def write_streams(folder: Path) -> None:
    """Two epochs."""
    epochs = [
        {
            "orders": {"id": [1, 2], "customer": ["Ada", "Ben"]},
            "payments": {"order_id": [1], "amount": [10.0]},
        },
        {
            "orders": {"id": [3], "customer": ["Cleo"]},
            "payments": {"order_id": [2, 3], "amount": [20.0, 30.0]},
        },
    ]
    for number, streams in enumerate(epochs):
        for name, columns in streams.items():
            file = folder / name / f"{number}.parquet"
            file.parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(pa.table(columns), file)
            os.utime(file, (1_700_000_000 + number, 1_700_000_000 + number))


def main(spark: SparkSession) -> None:
    taken: dict[int, list[int]] = {}

    def take(rows: DataFrame, epoch: int) -> None:
        # Keyed by the epoch's number: a repeated hand-over replaces the first one.
        taken[epoch] = sorted(row.id for row in rows.collect())

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_streams(folder)
        with plait.Engine(spark, checkpoint=str(folder / "checkpoint")) as engine:
            for name, schema in SCHEMAS.items():
                reader = spark.readStream.schema(schema).option("maxFilesPerTrigger", 1)
                engine.stream(name, reader.parquet(str(folder / name)))
            to_files = engine.query("to_files", SQL).sink("parquet", path=str(folder / "out"))
            engine.query("to_function", SQL).foreach_batch(take)
            engine.start(available_now=True).await_termination()

            # The parquet sink's rows can be read back by the handle, or by anything that reads Parquet.
            by_handle = sorted(tuple(row) for row in to_files.results().collect())
            by_arrow = sorted(tuple(row.values()) for row in pq.read_table(folder / "out").to_pylist())
    print(by_handle, taken, sep="\n")
    assert by_handle == by_arrow == [(1, "Ada", 10.0), (2, "Ben", 20.0), (3, "Cleo", 30.0)]
    assert taken == {0: [1], 1: [2, 3]}


if __name__ == "__main__":
    main(plait.session())
