"""`plait demo`: four drifting streams, joined live, then checked against a batch join of the same files."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from plait.serve import demo_data
from plait.serve.progress import watch

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SAME, DIFFERENT, INTERRUPTED = 0, 1, 130


def run_demo(console: Console, epochs: int, rows: int, seed: int) -> int:
    """Generate, join, check; the exit code says whether the check held."""
    import plait

    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="plait-demo-") as folder:
        console.print(f"Generating four streams: {rows:,} rows in {epochs} epochs …", highlight=False)
        data = Path(folder, "streams")
        demo_data.write_streams(data, epochs, rows, seed)
        console.print("Starting Spark …")
        spark = plait.session(app="plait-demo", settings={"spark.ui.enabled": "false"})
        spark.sparkContext.setLogLevel("ERROR")
        try:
            return _join_and_check(console, spark, data, checkpoint=Path(folder, "checkpoint"), began=began)
        finally:
            spark.stop()


def _join_and_check(console: Console, spark: SparkSession, data: Path, checkpoint: Path, began: float) -> int:
    import plait

    batches = {name: spark.read.parquet(str(data / name)) for name in demo_data.STREAMS}
    # A short run: orders are looked at after every second epoch.
    config = plait.Config(replan_epochs=2)
    with plait.Engine(spark, checkpoint=str(checkpoint), config=config) as engine:
        for name, batch in batches.items():
            reader = spark.readStream.schema(batch.schema).option("maxFilesPerTrigger", 1)
            engine.stream(name, reader.parquet(str(data / name)))
        query = engine.query("returns_by_address", demo_data.QUERY)
        console.print("Joining …")
        joining = time.monotonic()
        if watch(engine.start(available_now=True), console):
            console.print("Stopped before the end; nothing was checked.")
            return INTERRUPTED
        joined = time.monotonic() - joining
        console.print("Checking against a batch join of the same files …")
        streamed = fingerprint(query.results())
        for name, batch in batches.items():
            batch.createOrReplaceTempView(name)
        expected = fingerprint(spark.sql(demo_data.QUERY))
    if streamed != expected:
        console.print(
            f"[bold red]DIFFERENT[/]: the stream join gave {streamed[0]:,} rows (checksum {streamed[1]}), "
            f"the batch join {expected[0]:,} (checksum {expected[1]}).",
            soft_wrap=True,
        )
        return DIFFERENT
    console.print(
        f"[bold green]Correct[/]: the {streamed[0]:,} rows of the stream join are exactly those of a batch join over "
        f"the same files (joined in {joined:.1f} s, {time.monotonic() - began:.1f} s in all).",
        highlight=False,
        soft_wrap=True,
    )
    return SAME


def fingerprint(frame: DataFrame) -> tuple[int, int]:
    """Row count and an order-independent checksum: two frames that agree hold the same bag of rows."""
    from pyspark.sql import functions as F

    checksum = F.sum(F.xxhash64(*frame.columns).cast("decimal(38,0)"))
    row = frame.agg(F.count("*").alias("n"), F.coalesce(checksum, F.lit(0)).alias("sum")).first()
    assert row is not None
    return int(row["n"]), int(row["sum"])
