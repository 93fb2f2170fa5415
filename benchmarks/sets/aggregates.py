"""Measures many aggregates in one engine on Spark: partial groups written, jobs run, and seconds per epoch.

All join the same two streams on the same key and make the same groups; selections and windows are the generator's of
paper 004.  Every answer goes to a function that collects it.  Contestants: `together`, the default, and `independent`,
`Config(sharing="independent")`, where every query has stores, probes and partial groups of its own.  The last answer
of every query is compared with DuckDB's.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks import jobs
from benchmarks.epoch_files import epoch_file
from benchmarks.sessions import session
from benchmarks.sets.throughput import KEPT, WARM_UP, Size, ensure
from benchmarks.sets.workload import TIME, queries

WHO = ("together", "independent")
GROUPS = 20
_CLASSES = " ".join(f"WHEN A.a5 < {25 * (i + 1)} THEN {i}" for i in range(GROUPS - 1))
KEY = f"CASE {_CLASSES} ELSE {GROUPS - 1} END"
STREAMS = ("A", "B")


@dataclass(frozen=True, slots=True)
class AggregatesJob:
    """One engine with `count` aggregates, over the files in `data`."""

    who: str
    count: int
    data: str
    epochs: int
    memory: str


@dataclass(slots=True)
class Result:
    """What a run measured of itself."""

    epochs: list[float] = field(default_factory=list)
    """Seconds of each counted epoch."""
    answers: float = 0.0
    """Median seconds in which an epoch's answers were made and handed over, beside the next epoch."""
    groups: float = 0.0
    """Partial groups that tasks wrote, per counted epoch."""
    files: float = 0.0
    """Files that these are in, per counted epoch."""
    jobs: float = 0.0
    """Spark's jobs, per epoch."""
    rows: dict[str, list[list[int]]] = field(default_factory=dict)
    """The last answers."""


def texts(count: int) -> dict[str, str]:
    """The queries: of the generator's, the selections and windows.

    >>> len(set(texts(50).values()))
    50
    """
    found = {}
    for query in queries(count, 2):
        where = [f"{s}.{of.sql}" for s, of in zip(query.streams, query.selections, strict=True) if of is not None]
        seconds = f"INTERVAL {query.window} SECONDS"
        found[query.name] = (
            f"SELECT {KEY} AS g, count(*) AS n, sum(B.a4) AS total, min(A.a2) AS least, max(B.a3) AS most "
            f"FROM A JOIN B ON A.a0 = B.a1 AND A.{TIME} BETWEEN B.{TIME} - {seconds} AND B.{TIME} + {seconds} "
            f"WHERE {' AND '.join(where)} GROUP BY {KEY}"
        )
    return found


def expected(folder: Path, count: int) -> dict[str, list[list[int]]]:
    """DuckDB's answers over all rows."""
    import duckdb

    with duckdb.connect(config={"threads": 2}) as connection:
        for stream in STREAMS:
            # Instants as local times: zones need an extension.
            rows = pq.read_table(folder / stream)
            place = rows.column_names.index(TIME)
            rows = rows.set_column(place, TIME, rows.column(TIME).cast(pa.timestamp("us")))
            connection.register(f"{stream}_rows", rows)
            connection.execute(f"CREATE TABLE {stream} AS FROM {stream}_rows")
        return {
            name: sorted([int(value) for value in row] for row in connection.execute(sql).fetchall())
            for name, sql in texts(count).items()
        }


def aggregates(out: Path, size: Size, say: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Measure every number of queries, by turns, together and each for itself."""
    epochs = WARM_UP + size.epochs
    folder = ensure(out / "data", size.rows, epochs)
    contestants = [(who, count) for count in size.counts for who in WHO]

    def once(contestant: tuple[str, int]) -> Result | None:
        who, count = contestant
        outcome = jobs.run(run_engine, AggregatesJob(who, count, str(folder), epochs, size.memory), out / "scratch")
        if not outcome.finished:
            say(f"  {count} aggregates, {who}: FAILED: {outcome.failure}")
            return None
        result = Result(**outcome.result)
        say(f"  {count} aggregates, {who}: {statistics.median(result.epochs):.3f} s per epoch")
        return result

    runs = jobs.by_turns(contestants, size.repeat, once)
    wanted = expected(folder, max(size.counts))
    figures = [_figure(count, {who: runs[who, count] for who in WHO}, wanted) for count in size.counts]
    wrong = sum(figure["wrong"] for figure in figures)
    return {
        "part": "aggregates",
        "title": "Aggregates of many queries",
        "kind": "aggregates",
        "rows": size.rows,
        "epochs": size.epochs,
        "warm_up": WARM_UP,
        "repeat": size.repeat,
        "groups": GROUPS,
        "figures": figures,
        "wrong": wrong,
        "equal": wrong == 0,
    }


def _figure(count: int, runs: dict[str, list[Result | None]], wanted: dict[str, list[list[int]]]) -> dict[str, Any]:
    """All figures of one number of queries; a run that failed counts as wrong."""
    found: dict[str, Any] = {"queries": count, "wrong": 0}
    for who, mine in runs.items():
        done = [run for run in mine if run is not None]
        found["wrong"] += len(mine) - len(done)
        found["wrong"] += sum(run.rows.get(f"q{i}") != wanted[f"q{i}"] for run in done for i in range(count))
        found[who] = None
        if done:
            last = done[-1]
            seconds = statistics.median(s for run in done for s in run.epochs)
            measures = {"answers": last.answers, "groups": last.groups, "files": last.files, "jobs": last.jobs}
            found[who] = {"seconds": seconds, **measures}
    return found


def run_engine(job: AggregatesJob, work: Path) -> Result:
    """Register the aggregates, run all epochs, and tell what the counted ones took."""
    import plait

    spark = session("plait", job.memory, work, KEPT)
    spark.sparkContext.setLogLevel("ERROR")
    config = plait.Config(history=max(128, job.epochs + 8))
    if job.who == "independent":
        config = replace(config, sharing="independent")
    result, answered = Result(), dict[str, Any]()

    def into(name: str) -> Callable[[Any, int], None]:
        def keep(rows: Any, _epoch: int) -> None:
            answered[name] = rows.collect()

        return keep

    with plait.Engine(spark, checkpoint=str(work / "checkpoint"), config=config) as engine:
        for stream in STREAMS:
            folder = Path(job.data) / stream
            schema = spark.read.parquet(str(epoch_file(folder, 0))).schema
            frame = spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).parquet(str(folder))
            engine.stream(stream, frame.withWatermark(TIME, "0 seconds"))
        for name, sql in texts(job.count).items():
            engine.query(name, sql).foreach_batch(into(name))
        before = _jobs(spark)
        run = engine.start(available_now=True)
        run.await_termination()
        result.jobs = (_jobs(spark) - before) / job.epochs
        progress = [dict(report) for report in run.recent_progress]
        counted = range(WARM_UP, job.epochs)
        paths = [_written(engine, epoch) for epoch in counted]
        result.files = statistics.mean(map(len, paths))
        found = [sum(pq.read_metadata(path).num_rows for path in of) for of in paths]
        result.groups = statistics.mean(found)
    spark.stop()
    ends = [report["timestamp"] for report in progress[WARM_UP - 1 :]]
    result.epochs = [after - before for before, after in pairwise(ends)]
    result.answers = statistics.median(report["seconds"].get("answers", 0.0) for report in progress[WARM_UP:])
    result.rows = {name: sorted(map(list, rows)) for name, rows in answered.items()}
    return result


def _jobs(spark: Any) -> int:
    """Spark's jobs so far."""
    return int(spark.sparkContext._jsc.sc().dagScheduler().numTotalJobs())


def _written(engine: Any, epoch: int) -> set[str]:
    """The files with partial groups that tasks wrote in an epoch."""
    manifest, results = engine.checkpoint.log.read(epoch), engine.checkpoint.results
    return {results.where(file.path) for file in manifest.results if file.grouped and not file.whole}
