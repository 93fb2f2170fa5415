"""Queries that come and go while the engine runs: somebody has a new question, and nobody else notices.

Orders and payments keep arriving.  While they are joined, a second query is added: it finds the rows that are there
already, gets its first results at the next epoch, is replaced by another one, and goes.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

import plait

SCHEMAS = {"orders": "id bigint, customer string", "payments": "order_id bigint, amount double"}
JOIN = "SELECT o.id, o.customer, p.amount FROM orders o JOIN payments p ON p.order_id = o.id"


def arrive(folder: Path, number: int) -> None:
    """One more order, paid at once."""
    rows = {
        "orders": {"id": [number], "customer": [f"customer {number % 2}"]},
        "payments": {"order_id": [number], "amount": [10.0 * number]},
    }
    for name, columns in rows.items():
        draft = folder / f".{name}-{number}"
        pq.write_table(pa.table(columns), draft)
        draft.rename(folder / name / f"{number}.parquet")


def joined(query: plait.QueryHandle, count: int) -> list[int]:
    """The ids of a query's rows, once there are so many."""
    for _ in range(600):
        ids = sorted(row.id for row in query.results().collect())
        if len(ids) >= count:
            return ids
        time.sleep(0.1)
    raise TimeoutError(f"{query.name} has no {count} rows")


def main(spark: SparkSession) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name in SCHEMAS:
            (folder / name).mkdir()
        with plait.Engine(spark, checkpoint=str(folder / "checkpoint")) as engine:
            for name, schema in SCHEMAS.items():
                engine.stream(name, spark.readStream.schema(schema).parquet(str(folder / name)))
            paid = engine.query("paid", JOIN)
            run = engine.start(every="200 milliseconds")
            for number in range(3):
                arrive(folder, number)
            assert joined(paid, 3) == [0, 1, 2]

            # A new question, also about what is there.  `plait add CHECKPOINT large "SELECT …"` does the same from
            # another process.
            large = engine.query("large", f"{JOIN} WHERE p.amount >= 20", since="state")
            large.await_live(60)
            arrive(folder, 3)
            assert joined(large, 2) == [2, 3]

            # The question changes: this one is about what comes from now on.
            small = engine.replace("large", f"{JOIN} WHERE p.amount < 1000", since="new")
            small.await_live(60)
            arrive(folder, 4)
            assert joined(small, 1) == [4]

            # Nobody else has noticed.
            assert joined(paid, 5) == [0, 1, 2, 3, 4]
            engine.drop("large")
            print([(query.name, query.status) for query in engine.queries()])
            run.stop()


if __name__ == "__main__":
    main(plait.session())
