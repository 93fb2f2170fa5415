"""Measures deployment: how long a query waits until the running engine has it (paper 004, Figure 17).

One thread feeds both streams with files of the paper's rows, others ask for queries of the paper's generator at a
steady rate and drop the oldest beyond a number (SC2).  As in the paper a query sees what arrives from then on
(`since="new"`), so no store has to be built for it.  Requests come from the program (`engine.query`) or as request
files, the way another process asks.  Of every request is known when it was made, when its sender had the answer, and
the first epoch with results of it; when epochs begin is told by the engine's own reports.
"""

from __future__ import annotations

import statistics
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from benchmarks import jobs
from benchmarks.sessions import session
from benchmarks.sets.workload import STREAMS, TIME, arrivals, queries

WHO = ("program", "requests")
WAYS = 2
WARM_UP_SECONDS = 10.0
SLACK_SECONDS = 0.1
"""How much longer than an epoch a sender may wait."""
GOAL_SHARE = 0.95
KEPT = {"spark.sql.streaming.numRecentProgressUpdates": "10000"}


@dataclass(frozen=True, slots=True)
class DeployJob:
    """One engine, and so many requests per second for so long."""

    who: str
    per_second: float
    seconds: float
    most: int
    """Queries that live at a time."""
    rows: int
    """Per stream and second."""
    memory: str


@dataclass(slots=True)
class Deployed:
    """What a run has measured.  Times are seconds since 1970."""

    made: list[float] = field(default_factory=list)
    """By request, when it was made."""
    waited: list[float] = field(default_factory=list)
    """By request, seconds until its sender knew that the query is part of the catalog."""
    live_since: list[int] = field(default_factory=list)
    """By request, the first epoch with results."""
    begun: list[float] = field(default_factory=list)
    """By epoch, when it began."""
    epoch_seconds: list[float] = field(default_factory=list)
    """By epoch."""
    admission_seconds: list[float] = field(default_factory=list)
    """Of admissions between two epochs, as the reports tell of the last one each."""
    restarts: int = 0
    """Changes for which Spark's streaming query was started anew."""
    failed: list[str] = field(default_factory=list)


def deploy(out: Path, size: Sequence[DeployJob], say: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """The part: every contestant at every rate, in a process of its own each."""
    figures = []
    for job in size:
        outcome = jobs.run(measure, job, out / "scratch")
        if not outcome.finished:
            say(f"  {job.who}, {job.per_second:g}/s: FAILED: {outcome.failure}")
            figures.append({"who": job.who, "per_second": job.per_second, "wrong": 1})
            continue
        figures.append(figure(job, Deployed(**outcome.result)))
        say(f"  {job.who}, {job.per_second:g}/s: {figures[-1]['in_next']:.1%} in the next epoch")
    wrong = sum(int(str(each["wrong"])) for each in figures)
    return {
        "part": "deploy",
        "title": "Deployment of queries on a running engine",
        "figures": figures,
        "goal": {"share": GOAL_SHARE, "slack_seconds": SLACK_SECONDS},
        "wrong": wrong,
        "equal": wrong == 0,
    }


def figure(job: DeployJob, found: Deployed) -> dict[str, Any]:
    """What a run comes to.

    >>> job = DeployJob("program", 10, 1, 5, 10, "1g")
    >>> found = Deployed([0.5, 1.5], [0.6, 1.7], [1, 3], [0.0, 1.0, 2.0, 3.0], [1.0] * 4)
    >>> {name: figure(job, found)[name] for name in ("requests", "in_next", "in_time")}
    {'requests': 2, 'in_next': 0.5, 'in_time': 0.5}
    """
    in_next, in_time, late = 0, 0, []
    for made, waited, live in zip(found.made, found.waited, found.live_since, strict=True):
        after = bisect_right(found.begun, made)
        # The epoch that runs when it is made: no sender can be answered before it ends.
        running = found.epoch_seconds[after - 1] if 0 < after <= len(found.epoch_seconds) else 0.0
        in_next += live <= after
        in_time += waited <= running + SLACK_SECONDS
        late.append(live - after)
    count = max(1, len(found.made))
    waits = sorted(found.waited) or [0.0]
    return {
        "who": job.who,
        "per_second": job.per_second,
        "most": job.most,
        "rows": job.rows,
        "requests": len(found.made),
        "in_next": in_next / count,
        "in_time": in_time / count,
        "epochs_late": max(late, default=0),
        "wait_median": statistics.median(waits),
        "wait_95": waits[min(len(waits) - 1, int(0.95 * len(waits)))],
        "epoch_median": statistics.median(found.epoch_seconds) if found.epoch_seconds else None,
        "admission_median": statistics.median(found.admission_seconds) if found.admission_seconds else None,
        "restarts": found.restarts,
        "failed": found.failed[:3],
        "wrong": len(found.failed),
    }


def measure(job: DeployJob, work: Path) -> Deployed:
    """Runs one engine under requests."""
    import plait

    spark = session("plait", job.memory, work, KEPT)
    spark.sparkContext.setLogLevel("ERROR")
    names = STREAMS[:WAYS]
    feed = _Feed(work / "streams", names, job.rows, WARM_UP_SECONDS + job.seconds + 30)
    with plait.Engine(spark, checkpoint=str(work / "checkpoint"), config=plait.Config(history=10_000)) as engine:
        for name in names:
            schema = spark.read.parquet(str(feed.folder / name)).schema
            frame = spark.readStream.schema(schema).parquet(str(feed.folder / name))
            engine.stream(name, frame.withWatermark(TIME, "0 seconds"), keep="all")
        asked = iter(queries(job.most + int(job.per_second * job.seconds) + 1, WAYS))
        first = next(asked)
        engine.query("first", first.sql).sink("noop")
        run = engine.start(every="1 second")
        feed.start()
        time.sleep(WARM_UP_SECONDS)
        sender = _Program(engine) if job.who == "program" else _Requests(str(work / "checkpoint"))
        found = _send(sender, [query.sql for query in asked], job)
        time.sleep(2.0)
        reports = run.recent_progress
        feed.stop()
        run.stop()
    spark.stop()
    for report in reports:
        seconds = report["seconds"]["total"]
        found.epoch_seconds.append(seconds)
        # The report is made at the end of an epoch.
        found.begun.append(report["timestamp"] - seconds)
    found.admission_seconds = [r["changes"]["seconds"] for r in reports if r["changes"]["last"] == "in_place"]
    found.restarts = reports[-1]["changes"]["restarts"] if reports else 0
    if run.exception is not None:
        found.failed.append(str(run.exception))
    return found


def _send(sender: _Program | _Requests, texts: Sequence[str], job: DeployJob) -> Deployed:
    """Requests at a steady rate, each from a thread of its own: a sender that waits holds nobody up."""
    found, lock, threads = Deployed(), threading.Lock(), list[threading.Thread]()
    live: list[str] = []

    def one(name: str, sql: str) -> None:
        made, begun = time.time(), time.perf_counter()
        try:
            since = sender.add(name, sql)
            waited = time.perf_counter() - begun
            with lock:
                found.made.append(made)
                found.waited.append(waited)
                found.live_since.append(since)
                live.append(name)
                gone = live.pop(0) if len(live) > job.most else None
            if gone is not None:
                sender.drop(gone)
        except Exception as error:
            with lock:
                found.failed.append(f"{name}: {error}")

    begun = time.perf_counter()
    for number in range(int(job.per_second * job.seconds)):
        time.sleep(max(0.0, begun + number / job.per_second - time.perf_counter()))
        threads.append(threading.Thread(target=one, args=(f"q{number}", texts[number])))
        threads[-1].start()
    for thread in threads:
        thread.join()
    return found


class _Program:
    """Threads of the program that runs the engine."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def add(self, name: str, sql: str) -> int:
        with self.engine.changes():
            made = self.engine.query(name, sql, since="new").sink("noop")
        assert made.await_live(60), "it is not live in time"
        return int(made.live_since)

    def drop(self, name: str) -> None:
        self.engine.drop(name)


class _Requests:
    """Senders that only know the checkpoint, as `plait add` does."""

    def __init__(self, checkpoint: str) -> None:
        from plait.serve.other_engine import OtherEngine

        self.other = OtherEngine.at(checkpoint)

    def add(self, name: str, sql: str) -> int:
        from plait.state.log.requests import Request

        answer = self.other.change(Request("add", name, sql, since="new", sink={"kind": "noop", "options": {}}), 60.0)
        assert answer is not None, "no answer in time"
        assert answer.epoch is not None, answer
        return answer.epoch

    def drop(self, name: str) -> None:
        from plait.state.log.requests import Request

        self.other.change(Request("drop", name), 60.0)


class _Feed:
    """Writes the rows of every second into the folders of the streams."""

    def __init__(self, folder: Path, names: Sequence[str], rows: int, seconds: float) -> None:
        self.folder, self.names = folder, names
        self._arrivals = iter(arrivals(rows, int(seconds) + 1))
        self._ends = threading.Event()
        self._number = 0
        for name in names:
            (folder / name).mkdir(parents=True)
        self._write()
        self._thread = threading.Thread(target=self._feed, daemon=True)

    def _write(self) -> None:
        arrived = next(self._arrivals, None)
        for name in self.names if arrived is not None else ():
            draft = self.folder / f".{name}-{self._number}"
            pq.write_table((arrived or {})[name], draft)
            draft.rename(self.folder / name / f"{self._number:06d}.parquet")
        self._number += 1

    def _feed(self) -> None:
        while not self._ends.wait(1.0):
            self._write()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ends.set()
        self._thread.join()
