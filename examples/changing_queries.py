"""Other questions on the same checkpoint: queries are added and replaced between runs, and find the past they ask for.

Run it: python examples/changing_queries.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

import plait

SCHEMAS = {"orders": "id BIGINT, customer STRING, city STRING", "payments": "order_id BIGINT, amount DOUBLE"}

PAID = "SELECT o.id, p.amount FROM orders o JOIN payments p ON p.order_id = o.id"
PAID_BY_WHOM = "SELECT o.id, o.customer, p.amount FROM orders o JOIN payments p ON p.order_id = o.id"
OSLO = "SELECT o.customer, p.amount FROM orders o JOIN payments p ON p.order_id = o.id WHERE o.city = 'Oslo'"


def write(file: Path, **columns: list[int] | list[float] | list[str]) -> None:
    """A file that Spark finds on its next look."""
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), file)


def open_engine(spark: SparkSession, folder: Path) -> plait.Engine:
    """Both streams.  All columns of all orders are kept, for questions that nobody has asked yet."""
    engine = plait.Engine(spark, checkpoint=str(folder / "checkpoint"))
    for name, schema in SCHEMAS.items():
        frame = spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).parquet(str(folder / name))
        engine.stream(name, frame, keep="all" if name == "orders" else "used")
    return engine


def rows_of(query: plait.QueryHandle) -> list[tuple[object, ...]]:
    """All rows that a query has given so far."""
    return sorted(tuple(row) for row in query.results().collect())


def main(spark: SparkSession) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write(folder / "orders" / "0.parquet", id=[1, 2], customer=["Ada", "Ben"], city=["Oslo", "Rome"])
        write(folder / "payments" / "0.parquet", order_id=[1], amount=[10.0])
        with open_engine(spark, folder) as engine:
            paid = engine.query("paid", PAID)
            engine.start(available_now=True).await_termination()
            first = rows_of(paid)

        # Day 2: the city of an order matters now.  A store with it is filled from all orders beside the first epoch.
        write(folder / "payments" / "1.parquet", order_id=[2], amount=[20.0])
        with open_engine(spark, folder) as engine:
            engine.replace("paid", PAID_BY_WHOM)
            oslo = engine.query("oslo", OSLO, since="state")
            engine.start(available_now=True).await_termination()
            print(engine.explain())
            status, floors = oslo.status, oslo.floors

        # The program of day 2 starts again: nothing is replaced a second time.
        write(folder / "orders" / "1.parquet", id=[3], customer=["Cleo"], city=["Oslo"])
        write(folder / "payments" / "2.parquet", order_id=[3, 1], amount=[30.0, 5.0])
        with open_engine(spark, folder) as engine:
            paid = engine.replace("paid", PAID_BY_WHOM)
            oslo = engine.query("oslo", OSLO, since="state")
            engine.start(available_now=True).await_termination()
            found = {"paid": rows_of(paid), "oslo": rows_of(oslo)}
            since = {"paid": paid.live_since, "oslo": oslo.live_since}
    print(first, status, floors, since, *found.items(), sep="\n")
    assert first == [(1, 10.0)]
    assert (status, floors) == ("live", {"o": 0, "p": 0})
    # Both wait for the store while it is filled, and begin with the epoch after it.
    assert since == {"paid": 2, "oslo": 2}
    # The replaced query gives results with at least one new row, whose partners may be old …
    assert found["paid"] == [(1, "Ada", 5.0), (3, "Cleo", 30.0)]
    # … and the other one also what is among old rows.
    assert found["oslo"] == [("Ada", 5.0), ("Ada", 10.0), ("Cleo", 30.0)]


if __name__ == "__main__":
    main(plait.session())
