"""Stop and continue: a second engine on the same checkpoint goes on where the first one committed last.

Run it: python examples/restart.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

import plait

SCHEMAS = {"orders": "id BIGINT, customer STRING", "payments": "order_id BIGINT, amount DOUBLE"}
SQL = "SELECT o.id, o.customer, p.amount FROM orders o JOIN payments p ON p.order_id = o.id"


def write(file: Path, **columns: list[int] | list[float] | list[str]) -> None:
    """A file that Spark finds on its next look."""
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), file)


def run_once(spark: SparkSession, folder: Path, sql: str = SQL) -> tuple[int, list[tuple[int, str, float]]]:
    """Join what is there now; the last epoch's number, and all rows committed so far."""
    with plait.Engine(spark, checkpoint=str(folder / "checkpoint")) as engine:
        for name, schema in SCHEMAS.items():
            engine.stream(name, spark.readStream.schema(schema).parquet(str(folder / name)))
        query = engine.query("paid", sql)
        run = engine.start(available_now=True)
        run.await_termination()
        return run.last_progress["epoch"], sorted(tuple(row) for row in query.results().collect())


def main(spark: SparkSession) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write(folder / "orders" / "0.parquet", id=[1, 2], customer=["Ada", "Ben"])
        write(folder / "payments" / "0.parquet", order_id=[1], amount=[10.0])
        first = run_once(spark, folder)

        # Ben's order is only in the checkpoint now; his payment comes after the restart.
        write(folder / "payments" / "1.parquet", order_id=[2], amount=[20.0])
        second = run_once(spark, folder)

        # A query that lives on the checkpoint does not change by accident: another text is refused, and nothing is
        # touched.  engine.replace(…) would run it instead of the old one; see changing_queries.py.
        try:
            run_once(spark, folder, SQL + " WHERE p.amount > 5")
        except plait.CheckpointError as error:
            refused = error
    print(first, second, refused, sep="\n")
    assert first == (0, [(1, "Ada", 10.0)])
    assert second == (1, [(1, "Ada", 10.0), (2, "Ben", 20.0)])
    assert refused.code == "QUERY_EXISTS"


if __name__ == "__main__":
    main(plait.session())
