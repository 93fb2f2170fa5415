"""Several queries on one engine: streams are read once, stores are shared, and so are equal beginnings of the work.

Run it: python examples/several_queries.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

import plait

SCHEMAS = {
    "orders": "id BIGINT, customer STRING",
    "payments": "order_id BIGINT, amount DOUBLE",
    "parcels": "order_id BIGINT, city STRING",
}

QUERIES = {
    "paid": """
        SELECT o.id, o.customer, p.amount
        FROM orders o JOIN payments p ON p.order_id = o.id
    """,
    "delivered": """
        SELECT o.id, p.amount, c.city
        FROM orders o JOIN payments p ON p.order_id = o.id JOIN parcels c ON c.order_id = o.id
    """,
    "large": """
        SELECT o.id, p.amount
        FROM orders o JOIN payments p ON p.order_id = o.id
        WHERE p.amount > 100
    """,
}


def write_streams(folder: Path) -> None:
    """One Parquet file per stream."""
    rows = {
        "orders": {"id": [1, 2, 3], "customer": ["Ada", "Ben", "Cleo"]},
        "payments": {"order_id": [1, 2, 3], "amount": [500.0, 20.0, 7.0]},
        "parcels": {"order_id": [2, 3], "city": ["Oslo", "Rome"]},
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
            handles = {name: engine.query(name, sql) for name, sql in QUERIES.items()}
            print(engine.explain())
            run = engine.start(available_now=True)
            run.await_termination()

            # Three queries, but each stream is stored once.
            assert [s.id for s in engine.plan.stores] == ["orders[id]", "parcels[order_id]", "payments[order_id]"]
            # A new order looks into the payments once for all three together, although `large` filters them.
            (tree,) = (t for t in engine.plan.trees if t.relation == "orders")
            (shared,) = tree.nodes
            assert [e.query for e in shared.emits] == ["paid", "large"]
            assert [e.query for child in shared.children for e in child.emits] == ["delivered"]
            # Every row of every stream was read once.
            assert run.last_progress["rows_in"] == {"orders": 3, "payments": 3, "parcels": 2}
            found = {name: sorted(tuple(row) for row in q.results().collect()) for name, q in handles.items()}
    print(*found.items(), sep="\n")
    assert found == {
        "paid": [(1, "Ada", 500.0), (2, "Ben", 20.0), (3, "Cleo", 7.0)],
        "delivered": [(2, 20.0, "Oslo"), (3, 7.0, "Rome")],
        "large": [(1, 500.0)],
    }


if __name__ == "__main__":
    main(plait.session())
