"""The contestants of the benchmark `sharing` on Spark.  A job runs one contestant over all queries.

`independent`     one engine, `Config(sharing="independent")`: each query with stores and probes of its own
`naive`           one engine, `Config(sharing="naive")`
`ilp`             one engine, `Config(sharing="ilp")`
`engines`         an engine and a checkpoint for each query, all running at once in one session
`spark`           Spark's own stream-stream joins, a streaming query for each query, all running at once
`spark-rocksdb`   the same with state in RocksDB, in its best configuration

The session is up and every contestant has run once over one epoch before anything is timed.  Results are dropped
(noop), and counted.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.sessions import ROCKSDB, session
from benchmarks.sharing.workload import SharingQuery, queries, tables_of
from benchmarks.tpch.queries import SCHEMAS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SHARING = ("independent", "naive", "ilp")
KEPT = {"spark.sql.streaming.numRecentProgressUpdates": "10000"}
ROCKSDB_BEST = ROCKSDB | {
    "spark.sql.streaming.join.stateFormatVersion": "4",
    "spark.sql.streaming.join.stateFormatV4.enabled": "true",
    "spark.sql.streaming.stateStore.rocksdb.trackTotalNumberOfRows": "false",
}


@dataclass(frozen=True, slots=True)
class SharingJob:
    """One contestant over the first `count` queries; `memory` is the Java heap."""

    who: str
    count: int
    data: str
    epochs: int
    memory: str


@dataclass(slots=True)
class SharingRun:
    """What a run measured of itself."""

    seconds: float = 0.0
    """From registering the queries to the end of the last epoch."""
    epochs: list[float] = field(default_factory=list)
    """Seconds from one progress report to the next; of several engines at once, those of the one that takes longest."""
    state_bytes: list[int] = field(default_factory=list)
    """After each epoch, all engines together."""
    rows_out: dict[str, int] = field(default_factory=dict)
    stores: int = 0
    mirs: list[str] = field(default_factory=list)
    """Intermediate results that are kept at the end."""
    tasks: dict[str, float] = field(default_factory=dict)
    """Seconds of what tasks do, by its name, all epochs together."""
    steps: dict[str, float] = field(default_factory=dict)
    """Seconds of the driver's steps."""
    said: list[str] = field(default_factory=list)
    """What the optimiser said, once each."""


def streams(spark: SparkSession, data: Path, tables: Sequence[str], epochs: int) -> dict[str, DataFrame]:
    """The tables as streams, one file per trigger; the warm-up reads the first file only."""
    names = "*.parquet" if epochs > 1 else "0000*.parquet"
    reader = spark.readStream.option("maxFilesPerTrigger", 1)
    return {table: reader.schema(SCHEMAS[table]).parquet(str(data / table / names)) for table in tables}


def one_engine(spark: SparkSession, job: SharingJob, epochs: int, work: Path) -> SharingRun:
    """All queries in one engine."""
    return _engines(spark, job, [queries(job.count)], epochs, work, job.who)


def many_engines(spark: SparkSession, job: SharingJob, epochs: int, work: Path) -> SharingRun:
    """An engine for each query, all at once."""
    return _engines(spark, job, [[query] for query in queries(job.count)], epochs, work, "naive")


def _engines(
    spark: SparkSession, job: SharingJob, parts: Sequence[list[SharingQuery]], epochs: int, work: Path, sharing: str
) -> SharingRun:
    import plait

    config = plait.Config(sharing=sharing, history=max(128, epochs + 8))
    begun, clock = time.perf_counter(), time.time()
    engines, runs = [], []
    try:
        for number, asked in enumerate(parts):
            engine = plait.Engine(spark, checkpoint=str(work / f"{number}"), config=config)
            engines.append(engine)
            for table, frame in streams(spark, Path(job.data), tables_of(asked), epochs).items():
                engine.stream(table, frame)
            for query in asked:
                engine.query(query.name, query.sql).sink("noop")
        runs = [engine.start(available_now=True) for engine in engines]
        for run in runs:
            run.await_termination()
        seconds = time.perf_counter() - begun
        reports = [[dict(report) for report in run.recent_progress] for run in runs]
    finally:
        for engine in engines:
            engine.close()
    return _told(seconds, clock, reports)


def _told(seconds: float, clock: float, reports: Sequence[Sequence[Mapping[str, Any]]]) -> SharingRun:
    found = SharingRun(seconds)
    rows, tasks, steps = Counter[str](), Counter[str](), Counter[str]()
    for mine in reports:
        for report in mine:
            rows.update(report["rows_out"])
            tasks.update(report["task_seconds"])
            steps.update(report["seconds"])
        found.said += list(dict.fromkeys(report["optimiser"].get("said", "") for report in mine))
        found.stores += len(mine[-1]["segments"])
        found.mirs += [store for store in mine[-1]["segments"] if " ⋈ " in store]
    spans = [[b - a for a, b in pairwise([clock, *(report["timestamp"] for report in mine)])] for mine in reports]
    found.epochs = max(spans, key=sum)
    found.state_bytes = [
        sum(mine[min(epoch, len(mine) - 1)]["state_bytes"] for mine in reports)
        for epoch in range(max(len(mine) for mine in reports))
    ]
    found.rows_out, found.tasks, found.steps = dict(rows), dict(tasks), dict(steps)
    return found


def spark_joins(spark: SparkSession, job: SharingJob, epochs: int, work: Path) -> SharingRun:
    """Spark's chained stream-stream joins, a streaming query for each query, all at once."""
    asked = queries(job.count)
    begun = time.perf_counter()
    for table, frame in streams(spark, Path(job.data), tables_of(asked), epochs).items():
        frame.createOrReplaceTempView(table)
    running = [
        spark.sql(query.sql)
        .writeStream.format("noop")
        .option("checkpointLocation", str(work / query.name))
        .trigger(availableNow=True)
        .start()
        for query in asked
    ]
    for one in running:
        one.awaitTermination()
    seconds = time.perf_counter() - begun
    reports = [[json.loads(report.json) for report in one.recentProgress] for one in running]
    found = SharingRun(seconds)
    for query, mine in zip(asked, reports, strict=True):
        found.rows_out[query.name] = sum(report["sink"]["numOutputRows"] for report in mine)
        found.stores += len(mine[-1]["stateOperators"])
    spans = [[report["durationMs"]["triggerExecution"] / 1000 for report in mine] for mine in reports]
    found.epochs = max(spans, key=sum)
    found.state_bytes = [
        sum(_spark_state(mine[min(epoch, len(mine) - 1)]) for mine in reports)
        for epoch in range(max(len(mine) for mine in reports))
    ]
    return found


def _spark_state(report: Mapping[str, Any]) -> int:
    """Bytes of the state of a streaming query: in memory as Spark estimates it, of RocksDB those of its files."""
    return sum(
        operator["customMetrics"].get("rocksdbSstFileSize", operator["memoryUsedBytes"])
        for operator in report["stateOperators"]
    )


CONTESTANTS = {
    **dict.fromkeys(SHARING, one_engine),
    "engines": many_engines,
    "spark": spark_joins,
    "spark-rocksdb": spark_joins,
}


def contest(job: SharingJob, work: Path) -> dict[str, Any]:
    """Run the contestant that the job names; gives a `SharingRun` as a dict."""
    name = job.who if job.who.startswith("spark") else f"plait-{job.who}"
    spark = session(name, job.memory, work, KEPT | (ROCKSDB_BEST if job.who == "spark-rocksdb" else {}))
    spark.sparkContext.setLogLevel("OFF")
    contestant = CONTESTANTS[job.who]
    contestant(spark, job, 1, work / "warm")
    run = contestant(spark, job, job.epochs, work / "checkpoint")
    spark.stop()
    return asdict(run)
