"""The contestants of the benchmark `tpcds`, each run as a job in a process of its own.

A streaming contestant starts its session, runs the query once over a few warm-up rows, and then, timed, over all
epochs: from defining the query to its end, one file per table and epoch.  In mode `time` rows are dropped where they
are made (noop); in mode `verify`, which is not compared in time, they are summed up per epoch.
DuckDB answers the same query once, in batch, over all files: the practical floor.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.sessions import CORES, ROCKSDB, session
from benchmarks.tpcds.checksum import checksum_sql
from benchmarks.tpcds.workloads import WORKLOADS, Workload

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@dataclass(frozen=True, slots=True)
class TpcdsJob:
    """One run of one contestant over the files in `data`; `mode` is time or verify, `memory` the Java heap."""

    who: str
    workload: str
    data: str
    epochs: int
    memory: str
    mode: str


@dataclass(slots=True)
class Result:
    """What a run measured of itself; `epochs` are the engine's own reports."""

    seconds: float = 0.0
    rows: int = 0
    checksum: str | None = None
    epochs: list[dict[str, Any]] = field(default_factory=list)


@dataclass(slots=True)
class Tally:
    """A foreachBatch function that adds up row counts and checksums; an epoch delivered twice counts once."""

    epochs: dict[int, tuple[int, int]] = field(default_factory=dict)

    def __call__(self, batch: DataFrame, epoch: int) -> None:
        row = batch.selectExpr("count(*) AS n", f"{checksum_sql(batch.dtypes, 'spark')} AS sum").first()
        assert row is not None
        self.epochs[epoch] = (int(row["n"]), int(row["sum"]))

    @property
    def rows(self) -> int:
        """Number of rows of all epochs."""
        return sum(n for n, _ in self.epochs.values())

    @property
    def checksum(self) -> str:
        """Checksum over the rows of all epochs."""
        return str(sum(s for _, s in self.epochs.values()))


def plait(job: TpcdsJob, work: Path) -> Result:
    """Run Plait through its public surface."""
    import plait

    spark = _session(job, work)
    config = plait.Config(history=max(128, job.epochs + 8))

    def once(data: Path, checkpoint: Path, tally: Tally | None) -> list[dict[str, Any]]:
        with plait.Engine(spark, checkpoint=str(checkpoint), config=config) as engine:
            for table, frame in streams(spark, workload, data).items():
                engine.stream(table, frame)
            query = engine.query("q", workload.sql)
            if tally is None:
                query.sink("noop")
            else:
                query.sink("foreach_batch", fn=tally)
            run = engine.start(available_now=True)
            run.await_termination()
            return [dict(p) for p in run.recent_progress]

    workload = WORKLOADS[job.workload]
    result, tally = _measure(job, work, spark, once)
    result.rows = tally.rows if tally else sum(sum(p["rows_out"].values()) for p in result.epochs)
    return result


def spark_chain(job: TpcdsJob, work: Path) -> Result:
    """Run Spark's own chained stream-stream joins: the same SQL over the same streams."""
    spark = _session(job, work, ROCKSDB if job.who == "spark-rocksdb" else {})
    workload = WORKLOADS[job.workload]

    def once(data: Path, checkpoint: Path, tally: Tally | None) -> list[dict[str, Any]]:
        for table, frame in streams(spark, workload, data).items():
            frame.createOrReplaceTempView(table)
        return _run_spark_query(spark.sql(workload.sql), checkpoint, tally)

    result, tally = _measure(job, work, spark, once)
    result.rows = tally.rows if tally else sum(p["sink"]["numOutputRows"] for p in result.epochs)
    return result


def spark_stateless(job: TpcdsJob, work: Path) -> Result:
    """Run Spark's almost empty trigger: the same sources united, no join, no state."""
    spark = _session(job, work)
    workload = WORKLOADS[job.workload]

    def once(data: Path, checkpoint: Path, tally: Tally | None) -> list[dict[str, Any]]:
        first, *others = (f.toDF("key", "value") for f in streams(spark, workload, data).values())
        for other in others:
            first = first.union(other)
        return _run_spark_query(first, checkpoint, tally)

    return _measure(job, work, spark, once)[0]


def duckdb(job: TpcdsJob, work: Path) -> Result:
    """Run DuckDB's batch query once over all files; rows leave as Arrow batches and are dropped."""
    import duckdb

    workload = WORKLOADS[job.workload]
    result = Result()
    with duckdb.connect() as connection:
        connection.execute(f"SET threads = {CORES}")
        for table in workload.tables:
            connection.execute(f"CREATE VIEW {table} AS FROM '{job.data}/{table}/*.parquet'")
        if job.mode == "verify":
            columns = [(str(c[0]), str(c[1])) for c in connection.execute(f"DESCRIBE {workload.sql}").fetchall()]
            sql = f"SELECT count(*), {checksum_sql(columns, 'duckdb')} FROM ({workload.sql})"
            row = connection.execute(sql).fetchone()
            assert row is not None
            result.rows, result.checksum = int(row[0]), str(int(row[1]))
            return result
        began = time.perf_counter()
        for batch in connection.execute(workload.sql).to_arrow_reader(1 << 18):
            result.rows += len(batch)
        result.seconds = time.perf_counter() - began
    return result


CONTESTANTS: dict[str, Callable[[TpcdsJob, Path], Result]] = {
    "plait": plait,
    "spark": spark_chain,
    "spark-rocksdb": spark_chain,
    "spark-tuned": spark_chain,
    "spark-stateless": spark_stateless,
    "duckdb": duckdb,
}


def contest(job: TpcdsJob, work: Path) -> Result:
    """Run the contestant that the job names."""
    return CONTESTANTS[job.who](job, work)


def _measure(
    job: TpcdsJob, work: Path, spark: SparkSession, once: Callable[[Path, Path, Tally | None], list[dict[str, Any]]]
) -> tuple[Result, Tally | None]:
    spark.sparkContext.setLogLevel("ERROR")
    data = Path(job.data)
    tally = Tally() if job.mode == "verify" else None
    once(data / "warm", work / "warm", Tally() if tally else None)
    result = Result()
    began = time.perf_counter()
    result.epochs = once(data, work / "checkpoint", tally)
    result.seconds = time.perf_counter() - began
    result.checksum = tally.checksum if tally else None
    spark.stop()
    return result, tally


def streams(spark: SparkSession, workload: Workload, data: Path) -> dict[str, DataFrame]:
    """The tables of a workload as streams of one file per epoch; the schema is read from the first file."""
    frames = {}
    for table in workload.tables:
        schema = spark.read.parquet(str(data / table / "0000.parquet")).schema
        reader = spark.readStream.schema(schema).option("maxFilesPerTrigger", 1)
        frames[table] = reader.parquet(str(data / table))
    return frames


def _run_spark_query(frame: DataFrame, checkpoint: Path, tally: Tally | None) -> list[dict[str, Any]]:
    writer = frame.writeStream.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True)
    query = (writer.format("noop") if tally is None else writer.foreachBatch(tally)).start()
    query.awaitTermination()
    return [json.loads(p.json) for p in query.recentProgress]


def _session(job: TpcdsJob, work: Path, more: Mapping[str, str] | None = None) -> SparkSession:
    """The contestant's session, which keeps the reports of all epochs."""
    kept = {"spark.sql.streaming.numRecentProgressUpdates": "10000"}
    return session(job.who, job.memory, work, kept | dict(more or {}))
