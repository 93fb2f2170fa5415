"""Measures overall data throughput on Spark: the rows per second that all queries take in, added up (paper 004).

Epochs are small, 1,000 rows of every stream, so that what an epoch costs whatever it joins decides.  Each number of
queries runs in a process and on a checkpoint of its own, through the public surface, with results dropped.  Seconds of
an epoch are from one progress report to the next: Spark's own part is in them.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks import jobs
from benchmarks.epoch_files import complete, date_by_epoch, epoch_file
from benchmarks.sessions import session
from benchmarks.sets.workload import STREAMS, TIME, SetQuery, arrivals, expected, queries

WARM_UP = 8
"""Epochs that compile, fill windows and settle; they are left out."""
KEPT = {"spark.sql.streaming.numRecentProgressUpdates": "10000"}


@dataclass(frozen=True, slots=True)
class SetsJob:
    """One engine with the first `count` queries of so many streams, over the files in `data`."""

    who: str
    count: int
    ways: int
    data: str
    epochs: int
    memory: str


@dataclass(slots=True)
class Result:
    """What a run measured of itself: seconds to register and start, seconds per counted epoch, results by query."""

    registered: float = 0.0
    epochs: list[float] = field(default_factory=list)
    rows_out: dict[str, int] = field(default_factory=dict)
    steps: dict[str, float] = field(default_factory=dict)
    """Median seconds of the driver's steps."""
    tasks: dict[str, float] = field(default_factory=dict)
    """Median seconds of what tasks do."""
    trigger: dict[str, float] = field(default_factory=dict)
    """Median seconds of the parts of a trigger, as Spark names them."""


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured."""

    counts: tuple[int, ...]
    rows: int
    """Rows per stream and epoch."""
    epochs: int
    """Epochs that count."""
    repeat: int
    memory: str


def ensure(folder: Path, rows: int, epochs: int) -> Path:
    """The streams as files, one per epoch, made once."""
    target = folder / f"sets-{rows}-e{epochs}"
    if not target.exists():
        with complete(target) as making:
            for number, arrived in enumerate(arrivals(rows, epochs)):
                for stream, table in arrived.items():
                    (making / stream).mkdir(exist_ok=True)
                    file = epoch_file(making / stream, number)
                    pq.write_table(table, file)
                    date_by_epoch(file, number)
    return target


def throughput(ways: int, out: Path, size: Size, say: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Measure joins of so many streams, for every number of queries, by turns."""
    epochs = WARM_UP + size.epochs
    folder = ensure(out / "data", size.rows, epochs)
    rows = {stream: pq.read_table(folder / stream) for stream in STREAMS}

    def once(count: int) -> Result | None:
        job = SetsJob("plait", count, ways, str(folder), epochs, size.memory)
        outcome = jobs.run(run_engine, job, out / "scratch")
        if not outcome.finished:
            say(f"  {ways}-way, {count} queries: FAILED: {outcome.failure}")
            return None
        result = Result(**outcome.result)
        say(f"  {ways}-way, {count} queries: {statistics.median(result.epochs):.3f} s per epoch")
        return result

    runs = jobs.by_turns(size.counts, size.repeat, once)
    figures = [_figure(queries(count, ways), runs[count], size, rows) for count in size.counts]
    wrong = sum(figure["wrong"] for figure in figures)
    return {
        "part": f"throughput{ways}",
        "title": f"Overall data throughput, {ways}-way joins",
        "kind": "throughput",
        "ways": ways,
        "rows": size.rows,
        "epochs": size.epochs,
        "warm_up": WARM_UP,
        "repeat": size.repeat,
        "figures": figures,
        "wrong": wrong,
        "equal": wrong == 0,
    }


def _figure(asked: list[SetQuery], runs: list[Result | None], size: Size, rows: dict[str, pa.Table]) -> dict[str, Any]:
    """All figures of one number of queries; a run that failed counts as wrong."""
    done = [run for run in runs if run is not None]
    wanted = {query.name: expected(query, rows) for query in asked}
    wrong = len(runs) - len(done) + sum(run.rows_out.get(n, 0) != w for run in done for n, w in wanted.items())
    seconds = statistics.median(s for run in done for s in run.epochs) if done else None
    taken_in = sum(len(query.streams) for query in asked) * size.rows
    last = done[-1] if done else Result()
    return {
        "queries": len(asked),
        "structures": len({query.structure for query in asked}),
        "seconds": seconds,
        "throughput": None if seconds is None else taken_in / seconds,
        "registered": last.registered,
        "results": sum(last.rows_out.values()),
        "steps": last.steps,
        "tasks": last.tasks,
        "trigger": last.trigger,
        "wrong": wrong,
    }


def run_engine(job: SetsJob, work: Path) -> Result:
    """Register the queries, run all epochs, and tell what the counted ones took."""
    import plait

    spark = session(job.who, job.memory, work, KEPT)
    spark.sparkContext.setLogLevel("ERROR")
    config = plait.Config(history=max(128, job.epochs + 8))
    asked = queries(job.count, job.ways)
    result = Result()
    with plait.Engine(spark, checkpoint=str(work / "checkpoint"), config=config) as engine:
        begun = time.perf_counter()
        for stream in sorted({stream for query in asked for stream in query.streams}):
            folder = Path(job.data) / stream
            schema = spark.read.parquet(str(epoch_file(folder, 0))).schema
            frame = spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).parquet(str(folder))
            engine.stream(stream, frame.withWatermark(TIME, "0 seconds"))
        for query in asked:
            engine.query(query.name, query.sql).sink("noop")
        run = engine.start(available_now=True)
        result.registered = time.perf_counter() - begun
        run.await_termination()
        progress = [dict(report) for report in run.recent_progress]
    spark.stop()
    total = Counter[str]()
    for report in progress:
        total.update(report["rows_out"])
    result.rows_out = dict(total)
    counted = progress[WARM_UP:]
    ends = [report["timestamp"] for report in progress[WARM_UP - 1 :]]
    result.epochs = [after - before for before, after in pairwise(ends)]
    result.steps = _medians([report["seconds"] for report in counted])
    result.tasks = _medians([report["task_seconds"] for report in counted])
    result.trigger = _medians([report["spark_seconds"] for report in counted])
    return result


def _medians(epochs: list[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for epoch in epochs for name in epoch)
    return {name: statistics.median(epoch.get(name, 0.0) for epoch in epochs) for name in names}
