"""What is measured.  One process runs one job: `python -m benchmarks.tpcds.contestants JOB.json`.

Each streaming contestant starts its session, runs the query once over a few warm-up rows, and then, timed, over all
epochs: from defining the query to its end, one file per table and epoch.  `time` drops the rows where they are made
(noop); `verify` is not compared in time and sums them up per epoch instead.
DuckDB answers the same query once, in batch, over all files: the practical floor.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.tpcds.checksum import checksum_sql
from benchmarks.tpcds.workloads import WORKLOADS, Workload

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

CORES = 2
STATE_STORES = "org.apache.spark.sql.execution.streaming.state"
ROCKSDB = {
    "spark.sql.streaming.stateStore.providerClass": f"{STATE_STORES}.RocksDBStateStoreProvider",
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
}


@dataclass(frozen=True, slots=True)
class Job:
    """One run of one contestant.  `mode` is time or verify; `work` is an empty folder of its own."""

    who: str
    workload: str
    data: str
    work: str
    epochs: int
    memory: str
    mode: str


@dataclass(slots=True)
class Result:
    """What a run says of itself; `epochs` is what the engine reported of each epoch."""

    seconds: float = 0.0
    rows: int = 0
    checksum: str | None = None
    epochs: list[dict[str, Any]] = field(default_factory=list)


@dataclass(slots=True)
class Tally:
    """A foreachBatch function that adds up row counts and checksums; an epoch handed over twice counts once."""

    epochs: dict[int, tuple[int, int]] = field(default_factory=dict)

    def __call__(self, batch: DataFrame, epoch: int) -> None:
        row = batch.selectExpr("count(*) AS n", f"{checksum_sql(batch.dtypes, 'spark')} AS sum").first()
        assert row is not None
        self.epochs[epoch] = (int(row["n"]), int(row["sum"]))

    @property
    def rows(self) -> int:
        """Rows of all epochs."""
        return sum(n for n, _ in self.epochs.values())

    @property
    def checksum(self) -> str:
        """Checksum of all epochs."""
        return str(sum(s for _, s in self.epochs.values()))


def plait(job: Job) -> Result:
    """Plait, through its public surface."""
    import plait

    spark = _session(job)
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
    result, tally = _measure(job, spark, once)
    result.rows = tally.rows if tally else sum(sum(p["rows_out"].values()) for p in result.epochs)
    return result


def spark_chain(job: Job, more: dict[str, str] | None = None) -> Result:
    """Spark's own chained stream-stream joins: the same SQL over the same streams."""
    spark = _session(job, more)
    workload = WORKLOADS[job.workload]

    def once(data: Path, checkpoint: Path, tally: Tally | None) -> list[dict[str, Any]]:
        for table, frame in streams(spark, workload, data).items():
            frame.createOrReplaceTempView(table)
        return _run_spark_query(spark.sql(workload.sql), checkpoint, tally)

    result, tally = _measure(job, spark, once)
    result.rows = tally.rows if tally else sum(p["sink"]["numOutputRows"] for p in result.epochs)
    return result


def spark_rocksdb(job: Job) -> Result:
    """The same with state in RocksDB."""
    return spark_chain(job, ROCKSDB)


def spark_stateless(job: Job) -> Result:
    """Spark's almost empty trigger: the same sources united, no join, no state."""
    spark = _session(job)
    workload = WORKLOADS[job.workload]

    def once(data: Path, checkpoint: Path, tally: Tally | None) -> list[dict[str, Any]]:
        first, *others = (f.toDF("key", "value") for f in streams(spark, workload, data).values())
        for other in others:
            first = first.union(other)
        return _run_spark_query(first, checkpoint, tally)

    return _measure(job, spark, once)[0]


def duckdb(job: Job) -> Result:
    """DuckDB's one-shot batch query over all files; rows leave as Arrow batches and are dropped."""
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


CONTESTANTS: dict[str, Callable[[Job], Result]] = {
    "plait": plait,
    "spark": spark_chain,
    "spark-rocksdb": spark_rocksdb,
    "spark-tuned": spark_chain,
    "spark-stateless": spark_stateless,
    "duckdb": duckdb,
}


def _measure(
    job: Job, spark: SparkSession, once: Callable[[Path, Path, Tally | None], list[dict[str, Any]]]
) -> tuple[Result, Tally | None]:
    spark.sparkContext.setLogLevel("ERROR")
    data, work = Path(job.data), Path(job.work)
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
    """One file per table and epoch; the schema is read from a file."""
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


def _settings(job: Job) -> dict[str, str]:
    """What all Spark contestants share."""
    return {
        "spark.driver.memory": job.memory,
        "spark.ui.enabled": "false",
        "spark.sql.shuffle.partitions": str(CORES),
        "spark.sql.streaming.numRecentProgressUpdates": "10000",
        "spark.sql.warehouse.dir": f"{job.work}/warehouse",
        "spark.local.dir": f"{job.work}/local",
    }


def _session(job: Job, more: dict[str, str] | None = None) -> SparkSession:
    """Plait in the session it ships; Spark's own joins in a stock one, or (`spark-tuned`) in Plait's."""
    settings = _settings(job) | (more or {})
    if job.who in ("plait", "spark-tuned"):
        from plait import session

        return session(app=f"bench-{job.who}", master=f"local[{CORES}]", settings=settings)
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName(f"bench-{job.who}").master(f"local[{CORES}]")
    for key, value in settings.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def main(file: str) -> None:
    """Run the job in `file` and write its result beside it."""
    job = Job(**json.loads(Path(file).read_text()))
    result = CONTESTANTS[job.who](job)
    Path(job.work, "result.json").write_text(json.dumps(dataclasses.asdict(result), default=str))


if __name__ == "__main__":
    main(sys.argv[1])
