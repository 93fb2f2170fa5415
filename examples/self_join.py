"""A self-join: one stream under two names.  Both names share one store, and each pair appears once.

Run it: python examples/self_join.py
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

import plait

SQL = """
SELECT a.id AS first, b.id AS second, a.card
FROM payments a JOIN payments b
  ON a.card = b.card AND a.id < b.id
WHERE a.amount > 100
"""
SCHEMA = "id BIGINT, card STRING, amount DOUBLE"


def write_stream(folder: Path) -> None:
    """Two epochs: pairs inside an epoch and across epochs."""
    epochs = [
        {"id": [1, 2, 3], "card": ["x", "x", "y"], "amount": [500.0, 20.0, 900.0]},
        {"id": [4, 5], "card": ["x", "y"], "amount": [700.0, 5.0]},
    ]
    folder.mkdir(parents=True)
    for number, columns in enumerate(epochs):
        file = folder / f"{number}.parquet"
        pq.write_table(pa.table(columns), file)
        os.utime(file, (1_700_000_000 + number, 1_700_000_000 + number))


def main(spark: SparkSession) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_stream(folder / "payments")
        with plait.Engine(spark, checkpoint=str(folder / "checkpoint")) as engine:
            reader = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1)
            engine.stream("payments", reader.parquet(str(folder / "payments")))
            query = engine.query("pairs", SQL)
            print(engine.explain())
            engine.start(available_now=True).await_termination()

            # One relation, one key: one store, although the query names the stream twice.
            assert [store.id for store in engine.plan.stores] == ["payments[card]"]
            found = sorted((r.first, r.second, r.card) for r in query.results().collect())
    print(*found, sep="\n")
    assert found == [(1, 2, "x"), (1, 4, "x"), (3, 5, "y")]


if __name__ == "__main__":
    main(plait.session())
