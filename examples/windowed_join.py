"""A join within time: a click belongs to an impression that came at most ten seconds before it.

The watermarks say how late rows may be.  They let Plait drop late rows, and forget rows that no window can reach.

Run it: python examples/windowed_join.py
"""

from __future__ import annotations

import os
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

import plait

SQL = """
SELECT i.ad, i.id AS impression, c.id AS click
FROM impressions i JOIN clicks c
  ON c.ad = i.ad
 AND c.ts BETWEEN i.ts AND i.ts + INTERVAL 10 SECONDS
"""
SCHEMA = "id BIGINT, ad STRING, ts TIMESTAMP"

# (id, ad, second) of every epoch.
EPOCHS: list[dict[str, list[tuple[int, str, int]]]] = [
    {"impressions": [(1, "shoes", 0)], "clicks": [(100, "shoes", 3)]},
    {"impressions": [(2, "hats", 60)], "clicks": [(101, "hats", 65)]},
    # Click 102 is late: the watermark stands at 55 s.  Click 103 comes 20 s after its impression.
    {"impressions": [(3, "gloves", 70)], "clicks": [(102, "shoes", 2), (103, "gloves", 90)]},
]


def write_streams(folder: Path) -> None:
    """One Parquet file per stream and epoch; Spark reads them in order of modification time."""
    start = datetime(2026, 1, 1, tzinfo=UTC)
    for epoch, streams in enumerate(EPOCHS):
        for name, rows in streams.items():
            ids, ads, seconds = zip(*rows, strict=True)
            times = pa.array([start + timedelta(seconds=s) for s in seconds], pa.timestamp("us", "UTC"))
            file = folder / name / f"{epoch}.parquet"
            file.parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(pa.table({"id": list(ids), "ad": list(ads), "ts": times}), file)
            os.utime(file, (1_700_000_000 + epoch, 1_700_000_000 + epoch))


def main(spark: SparkSession) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_streams(folder)
        with plait.Engine(spark, checkpoint=str(folder / "checkpoint")) as engine:
            for name in ("impressions", "clicks"):
                reader = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1)
                engine.stream(name, reader.parquet(str(folder / name)).withWatermark("ts", "5 seconds"))
            query = engine.query("clicked", SQL)
            print(engine.explain())
            run = engine.start(available_now=True)
            run.await_termination()

            found = sorted((r.ad, r.impression, r.click) for r in query.results().collect())
            late = sum(report["rows_late"]["clicks"] for report in run.recent_progress)
            kept = run.last_progress["state_rows"]
    print(*found, f"late clicks: {late}, rows still kept: {kept}", sep="\n")
    assert found == [("hats", 2, 101), ("shoes", 1, 100)]
    assert late == 1
    # Seven rows came; the late one and the two of the first epoch are gone.
    assert kept == 4


if __name__ == "__main__":
    main(plait.session())
