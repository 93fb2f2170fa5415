"""The contestants of the benchmark `state`, each run as a job in a process of its own.

Every epoch is told as it ends, so that a run that is killed has told how far it came.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.jobs import Progress
from benchmarks.sessions import ROCKSDB, session
from benchmarks.state.soak_data import SOAK
from benchmarks.tpcds.contestants import streams
from benchmarks.tpcds.workloads import WORKLOADS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from plait.run import Run

LOOK_EVERY_SECONDS = 0.2
KEPT = ("epoch", "rows_in", "state_rows", "state_bytes", "segments", "seconds", "task_seconds", "state")
"""Keys of Plait's progress reports that are told, where a report has them."""
QUERIES = WORKLOADS | {SOAK.name: SOAK}


@dataclass(frozen=True, slots=True)
class StateJob:
    """One run of one contestant over the files in `data`, with a Java heap of `heap`."""

    who: str
    workload: str
    data: str
    heap: str
    state_dir: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    """Fields of `plait.Config`."""
    settings: dict[str, str] = field(default_factory=dict)
    """More of the session's settings."""
    total_rows: int | None = None
    """Number of rows of all streams after which to stop; None reads what is there at the start."""
    rocksdb_mb: int | None = None
    """Memory of RocksDB for memtables and block cache; None leaves Spark's defaults."""


class Told(Progress):
    """The epochs told so far, with the time and the number of input rows."""

    def __init__(self, work: Path) -> None:
        super().__init__(work)
        self.began = time.time()
        self.rows_in = 0

    def tell(self, epoch: dict[str, Any]) -> bool:
        """Write one epoch; False if it had been told before."""
        new = super().tell(epoch)
        self.rows_in += sum(epoch["rows_in"].values()) if new else 0
        return new


def plait(job: StateJob, work: Path) -> float:
    """Run Plait with its state on disk, or on tmpfs (`state_dir`)."""
    import plait
    from plait.runtime.spark.session import SETTINGS

    options = SETTINGS["spark.driver.extraJavaOptions"].replace("-XX:+UseParallelGC", _resident(job.heap))
    more = {"spark.driver.extraJavaOptions": options}
    spark = session(job.who, job.heap, work, _settings(job) | more)
    config = plait.Config(history=100_000, **job.config)

    def once(data: Path, checkpoint: Path, told: Told | None) -> None:
        where = f"{job.state_dir}/{checkpoint.name}" if job.state_dir else None
        with plait.Engine(spark, checkpoint=str(checkpoint), config=replace(config, state_dir=where)) as engine:
            for table, frame in streams(spark, QUERIES[job.workload], data).items():
                engine.stream(table, frame)
            engine.query("q", QUERIES[job.workload].sql).sink("noop")
            endless = told is not None and job.total_rows is not None
            run = engine.start(available_now=not endless)
            while not run.await_termination(LOOK_EVERY_SECONDS):
                if told is not None and _tell_plait(run, told) and endless:
                    run.stop()
            if told is not None:
                _tell_plait(run, told)

    def _tell_plait(run: Run, told: Told) -> bool:
        for report in ended(run.recent_progress):
            epoch = {key: report[key] for key in KEPT if key in report}
            at = report["timestamp"] - told.began
            told.tell(epoch | {"at": at, "rows_out": sum(report["rows_out"].values())})
        return job.total_rows is not None and told.rows_in >= job.total_rows

    return _measure(job, work, spark, once)


def ended(reports: Iterable[dict[str, Any]]) -> Iterable[dict[str, Any]]:
    """The reports of epochs that are over; the newest may be at its last step, and is told at the next look.

    >>> list(ended([{"seconds": {"total": 1.0}}, {"seconds": {"join": 0.5}}]))
    [{'seconds': {'total': 1.0}}]
    """
    return takewhile(lambda report: "total" in report["seconds"], reports)


def spark_chain(job: StateJob, work: Path) -> float:
    """Run Spark's own chained stream-stream joins, in memory or on RocksDB."""
    settings = _settings(job) | {"spark.driver.extraJavaOptions": _resident(job.heap)}
    if job.who == "spark-rocksdb":
        settings |= ROCKSDB
        if job.rocksdb_mb is not None:
            prefix = "spark.sql.streaming.stateStore.rocksdb"
            settings |= {f"{prefix}.boundedMemoryUsage": "true", f"{prefix}.maxMemoryUsageMB": str(job.rocksdb_mb)}
    spark = session(job.who, job.heap, work, settings)

    def once(data: Path, checkpoint: Path, told: Told | None) -> None:
        for table, frame in streams(spark, QUERIES[job.workload], data).items():
            frame.createOrReplaceTempView(table)
        writer = spark.sql(QUERIES[job.workload].sql).writeStream.format("noop").trigger(availableNow=True)
        query = writer.option("checkpointLocation", str(checkpoint)).start()
        ended = False
        while not ended:
            ended = bool(query.awaitTermination(LOOK_EVERY_SECONDS))  # type: ignore[arg-type]
            for progress in query.recentProgress if told is not None else ():
                assert told is not None
                told.tell(_spark_epoch(json.loads(progress.json), told.began))

    return _measure(job, work, spark, once)


def _spark_epoch(progress: dict[str, Any], began: float) -> dict[str, Any]:
    """One of Spark's progress reports with the keys of Plait's."""
    seconds = progress["durationMs"].get("triggerExecution", 0) / 1000
    started = datetime.fromisoformat(progress["timestamp"]).timestamp()
    stores = progress.get("stateOperators", [])
    on_disk = sum(store.get("customMetrics", {}).get("rocksdbSstFileSize", 0) for store in stores)
    return {
        "epoch": progress["batchId"],
        "at": started + seconds - began,
        "rows_in": {"all": progress["numInputRows"]},
        "rows_out": max(progress["sink"]["numOutputRows"], 0),
        "state_rows": sum(store["numRowsTotal"] for store in stores),
        "state_bytes": on_disk or sum(store["memoryUsedBytes"] for store in stores),
        "seconds": {"total": seconds},
    }


CONTESTANTS: dict[str, Callable[[StateJob, Path], float]] = {
    "plait": plait,
    "plait-memory": plait,
    "spark-rocksdb": spark_chain,
    "spark": spark_chain,
}


def contest(job: StateJob, work: Path) -> dict[str, float]:
    """Run the contestant that the job names; gives its seconds."""
    return {"seconds": CONTESTANTS[job.who](job, work)}


def _measure(job: StateJob, work: Path, spark: SparkSession, once: Callable[[Path, Path, Told | None], None]) -> float:
    spark.sparkContext.setLogLevel("ERROR")
    data = Path(job.data)
    once(data / "warm", work / "warm", None)
    told = Told(work)
    began = time.perf_counter()
    once(data, work / "checkpoint", told)
    seconds = time.perf_counter() - began
    spark.stop()
    told.close()
    return seconds


def _settings(job: StateJob) -> dict[str, str]:
    # The progress is read five times a second, so few reports need to be kept.
    return {"spark.sql.streaming.numRecentProgressUpdates": "8", **job.settings}


def _resident(heap: str) -> str:
    """Java options for a heap that is resident from the start: what a run adds to a measured base is not garbage then.

    The serial collector is what Java itself chooses on small machines: it needs the least beside the heap.
    """
    return f"-Xms{heap} -XX:+AlwaysPreTouch -XX:+UseSerialGC"
