"""A star join: four streams meet on one key.  One exchange, and the whole join happens inside one task.

Run it: python examples/star_join.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

import plait

SQL = """
SELECT c.name, o.total, t.subject, v.page
FROM customers c
JOIN orders  o ON o.customer_id = c.id
JOIN tickets t ON t.customer_id = c.id
JOIN visits  v ON v.customer_id = c.id
"""

SCHEMAS = {
    "customers": "id BIGINT, name STRING",
    "orders": "customer_id BIGINT, total DOUBLE",
    "tickets": "customer_id BIGINT, subject STRING",
    "visits": "customer_id BIGINT, page STRING",
}


def write_streams(folder: Path) -> None:
    """One Parquet file per stream."""
    rows = {
        "customers": {"id": [1, 2, 3], "name": ["Ada", "Ben", "Cleo"]},
        "orders": {"customer_id": [1, 1, 2], "total": [10.0, 20.0, 5.0]},
        "tickets": {"customer_id": [1, 3], "subject": ["refund", "login"]},
        "visits": {"customer_id": [1, 2], "page": ["/home", "/cart"]},
    }
    for name, columns in rows.items():
        (folder / name).mkdir(parents=True)
        pq.write_table(pa.table(columns), folder / name / "0.parquet")


def main(spark: SparkSession) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_streams(folder)
        with plait.Engine(spark, checkpoint=str(folder / "checkpoint")) as engine:
            for name, schema in SCHEMAS.items():
                engine.stream(name, spark.readStream.schema(schema).parquet(str(folder / name)))
            query = engine.query("everything_about", SQL)
            print(engine.explain())
            engine.start(available_now=True).await_termination()

            # All four streams are joined on the customer, so rows are exchanged once.
            assert engine.plan.hops == 1
            found = sorted((r.name, r.total, r.subject, r.page) for r in query.results().collect())
    print(*found, sep="\n")
    # Only Ada has an order, a ticket and a visit.
    assert found == [("Ada", 10.0, "refund", "/home"), ("Ada", 20.0, "refund", "/home")]


if __name__ == "__main__":
    main(plait.session())
