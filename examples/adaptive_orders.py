"""Probe orders that follow the data: written in the wrong order, put right while running, and told why.

Clicks are joined with carts and payments.  Nearly every click has a cart, hardly one a payment, so a new click should
ask the payments first.  The query is written the other way round.

Run it: python examples/adaptive_orders.py
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

import plait

EPOCHS, ROWS = 6, 500
SCHEMAS = {"clicks": "visit BIGINT, page BIGINT", "carts": "visit BIGINT, item BIGINT", "payments": "visit BIGINT"}
QUERY = """
    SELECT c.visit, c.page, k.item
    FROM clicks c JOIN carts k ON k.visit = c.visit JOIN payments p ON p.visit = c.visit
"""


def write_streams(folder: Path) -> None:
    """One Parquet file per stream and epoch: visits come and go, one in fifty pays."""
    for name in SCHEMAS:
        (folder / name).mkdir(parents=True)
    for epoch in range(EPOCHS):
        # Carts and payments of the visits whose clicks come in the next epoch.
        coming, now = range(epoch * ROWS, (epoch + 1) * ROWS), range((epoch - 1) * ROWS, epoch * ROWS)
        rows = {
            "clicks": {"visit": list(now), "page": [v % 7 for v in now]},
            "carts": {"visit": list(coming), "item": [v % 11 for v in coming]},
            "payments": {"visit": [v for v in coming if v % 50 == 0]},
        }
        for name, columns in rows.items():
            file = folder / name / f"{epoch}.parquet"
            pq.write_table(pa.table(columns), file)
            os.utime(file, (1_700_000_000 + epoch,) * 2)


def main(spark: SparkSession) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_streams(folder)
        # Orders are looked at after every second epoch here; the default is every fourth.
        config = plait.Config(replan_epochs=2)
        with plait.Engine(spark, checkpoint=str(folder / "checkpoint"), config=config) as engine:
            for name, schema in SCHEMAS.items():
                stream = spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).parquet(str(folder / name))
                engine.stream(name, stream)
            paid = engine.query("paid", QUERY)
            run = engine.start(available_now=True)
            run.await_termination()

            orders = [report["orders"]["paid"]["c"] for report in run.recent_progress]
            print(*orders, sep="\n")
            print(engine.explain())
            assert orders[0] == ["k", "p"], "as it is written"
            assert orders[-1] == ["p", "k"], "as it is best"
            assert paid.results().count() == ROWS * (EPOCHS - 1) // 50


if __name__ == "__main__":
    main(plait.session())
