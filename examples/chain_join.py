"""A chain join over three keys: order → line → product → supplier.  Each further key costs one more exchange.

Run it: python examples/chain_join.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

import plait

SQL = """
SELECT o.customer, p.title, s.country
FROM orders o, lines l, products p, suppliers s
WHERE o.id = l.order_id
  AND l.product_id = p.id
  AND p.supplier_id = s.id
  AND p.price < 100
"""

SCHEMAS = {
    "orders": "id BIGINT, customer STRING",
    "lines": "order_id BIGINT, product_id INT",
    "products": "id INT, supplier_id STRING, title STRING, price DOUBLE",
    "suppliers": "id STRING, country STRING",
}


def write_streams(folder: Path) -> None:
    """One Parquet file per stream."""
    int32 = pa.int32()
    rows = {
        "orders": pa.table({"id": [1, 2], "customer": ["Ada", "Ben"]}),
        "lines": pa.table({"order_id": [1, 1, 2], "product_id": pa.array([7, 8, 9], int32)}),
        "products": pa.table(
            {
                "id": pa.array([7, 8, 9], int32),
                "supplier_id": ["north", "south", "south"],
                "title": ["lamp", "desk", "pen"],
                "price": [30.0, 300.0, 1.0],
            }
        ),
        "suppliers": pa.table({"id": ["north", "south"], "country": ["NO", "IT"]}),
    }
    for name, table in rows.items():
        (folder / name).mkdir(parents=True)
        pq.write_table(table, folder / name / "0.parquet")


def main(spark: SparkSession) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_streams(folder)
        with plait.Engine(spark, checkpoint=str(folder / "checkpoint")) as engine:
            for name, schema in SCHEMAS.items():
                engine.stream(name, spark.readStream.schema(schema).parquet(str(folder / name)))
            query = engine.query("origins", SQL)
            print(engine.explain())
            engine.start(available_now=True).await_termination()

            # Three keys, three exchanges; `lines` and `products` are stored once per key they are probed by.
            assert engine.plan.hops == 3
            assert [store.id for store in engine.plan.stores if store.relation == "lines"] == [
                "lines[order_id]",
                "lines[product_id]",
            ]
            found = sorted((r.customer, r.title, r.country) for r in query.results().collect())
    print(*found, sep="\n")
    # The desk costs too much.
    assert found == [("Ada", "lamp", "NO"), ("Ben", "pen", "IT")]


if __name__ == "__main__":
    main(plait.session())
