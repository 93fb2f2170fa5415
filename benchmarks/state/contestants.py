"""One run of `python -m benchmarks state`, as a process of its own: `python -m benchmarks.state.contestants JOB.json`.

Every epoch is told in `progress.jsonl` as it ends, so that a run that is killed has told how far it came; one that
ends well writes `result.json`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.state.soak_data import SOAK
from benchmarks.tpcds.contestants import CORES, ROCKSDB, streams
from benchmarks.tpcds.workloads import WORKLOADS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from plait.engine import Run

LOOK_EVERY_SECONDS = 0.2
KEPT = ("epoch", "rows_in", "state_rows", "state_bytes", "segments", "seconds", "task_seconds", "state")
"""Of Plait's reports; what a report lacks is left out."""
QUERIES = WORKLOADS | {SOAK.name: SOAK}


@dataclass(frozen=True, slots=True)
class StateJob:
    """`total_rows` is None to read what is there now, else the number of rows of all streams after which to stop."""

    who: str
    workload: str
    data: str
    work: str
    heap: str
    state_dir: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    """Fields of `plait.Config`."""
    settings: dict[str, str] = field(default_factory=dict)
    """More of the session's settings."""
    total_rows: int | None = None
    rocksdb_mb: int | None = None
    """What RocksDB may use for memtables and block cache; None leaves Spark's defaults."""
    warm: bool = True


class Told:
    """progress.jsonl, each epoch once."""

    def __init__(self, file: Path) -> None:
        self._file = file.open("a", buffering=1)
        self._last = -1
        self.began = time.time()
        self.rows_in = 0

    def tell(self, epoch: dict[str, Any]) -> None:
        """One epoch; again is nothing."""
        if epoch["epoch"] > self._last:
            self._last = epoch["epoch"]
            self.rows_in += sum(epoch["rows_in"].values())
            self._file.write(json.dumps(epoch, default=str) + "\n")


def plait(job: StateJob) -> float:
    """Plait: on disk, or with its state on tmpfs (`state_dir`)."""
    import plait
    from plait.runtime.session import SETTINGS

    options = SETTINGS["spark.driver.extraJavaOptions"].replace("-XX:+UseParallelGC", _resident(job.heap))
    more = {"spark.driver.extraJavaOptions": options}
    spark = plait.session(app=f"bench-{job.who}", master=f"local[{CORES}]", settings=_settings(job) | more)
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

    return _measure(job, spark, once)


def ended(reports: Iterable[dict[str, Any]]) -> Iterable[dict[str, Any]]:
    """The reports of epochs that are over: the newest may be at its last step, and be told at the next look.

    >>> list(ended([{"seconds": {"total": 1.0}}, {"seconds": {"join": 0.5}}]))
    [{'seconds': {'total': 1.0}}]
    """
    return takewhile(lambda report: "total" in report["seconds"], reports)


def spark_chain(job: StateJob) -> float:
    """Spark's own chained stream-stream joins, in memory or on RocksDB."""
    from pyspark.sql import SparkSession

    settings = _settings(job) | {"spark.driver.extraJavaOptions": _resident(job.heap)}
    if job.who == "spark-rocksdb":
        settings |= ROCKSDB
        if job.rocksdb_mb is not None:
            prefix = "spark.sql.streaming.stateStore.rocksdb"
            settings |= {f"{prefix}.boundedMemoryUsage": "true", f"{prefix}.maxMemoryUsageMB": str(job.rocksdb_mb)}
    builder = SparkSession.builder.appName(f"bench-{job.who}").master(f"local[{CORES}]")
    for key, value in settings.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()

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

    return _measure(job, spark, once)


def _spark_epoch(progress: dict[str, Any], began: float) -> dict[str, Any]:
    """Spark's report in the words of Plait's."""
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


CONTESTANTS: dict[str, Callable[[StateJob], float]] = {
    "plait": plait,
    "plait-memory": plait,
    "spark-rocksdb": spark_chain,
    "spark": spark_chain,
}


def _measure(job: StateJob, spark: SparkSession, once: Callable[[Path, Path, Told | None], None]) -> float:
    spark.sparkContext.setLogLevel("ERROR")
    data, work = Path(job.data), Path(job.work)
    if job.warm:
        once(data / "warm", work / "warm", None)
    told = Told(work / "progress.jsonl")
    began = time.perf_counter()
    once(data, work / "checkpoint", told)
    seconds = time.perf_counter() - began
    spark.stop()
    return seconds


def _settings(job: StateJob) -> dict[str, str]:
    return {
        "spark.driver.memory": job.heap,
        "spark.ui.enabled": "false",
        "spark.sql.shuffle.partitions": str(CORES),
        # All that is looked at comes within a fifth of a second.
        "spark.sql.streaming.numRecentProgressUpdates": "8",
        "spark.sql.warehouse.dir": f"{job.work}/warehouse",
        "spark.local.dir": f"{job.work}/local",
        **job.settings,
    }


def _resident(heap: str) -> str:
    """The whole heap is there from the start, so that what a run adds to a measured base is not Java's garbage.

    The serial collector is what Java itself chooses on small machines: it needs the least beside the heap.
    """
    return f"-Xms{heap} -XX:+AlwaysPreTouch -XX:+UseSerialGC"


def main(file: str) -> None:
    """Run the job in `file`."""
    job = StateJob(**json.loads(Path(file).read_text()))
    seconds = CONTESTANTS[job.who](job)
    Path(job.work, "result.json").write_text(json.dumps({"seconds": seconds}))


if __name__ == "__main__":
    main(sys.argv[1])
