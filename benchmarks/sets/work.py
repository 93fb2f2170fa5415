"""Measures what many queries cost together: counted lookups and matched rows, seconds of the join, result rows.

Everything runs in this process through the engine's own tasks, state and commit (`LocalEngine`), in one task, with
results dropped.  Three contestants:

    shared     all queries in one engine
    widest     one unfiltered query per join structure, with its widest window, in one engine: what sharing can reach
    alone      one engine per query, added up; of many queries a sample that is scaled up

The first epochs fill the windows and are left out.  Every query's number of results over all epochs must be that of a
plain count.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from benchmarks.sets.workload import START_US, Rows, SetQuery, expected, queries, relations, together, unfiltered
from benchmarks.sets.workload import arrivals as arriving
from plait.config import Config
from plait.runtime.driver.sinks import Noop
from plait.share.planner import Planner
from plait.testing import Clock, LocalEngine

WARM_UP = 3
"""Epochs that fill the widest window."""
ALONE = 20
"""So many queries are run alone, at most."""
MOST_STRUCTURES = 100
"""`widest` is left out where there are more join structures than this: it would only take long."""


@dataclass(frozen=True, slots=True)
class Work:
    """What the counted epochs of one engine took together; seconds are those of the tasks."""

    lookups: float = 0.0
    rows: float = 0.0
    """Rows found."""
    tuples: float = 0.0
    """Joined tuples that were multiplied out."""
    join: float = 0.0
    """Seconds of probing, without making result rows."""
    materialise: float = 0.0
    """Seconds of making result rows."""
    other: float = 0.0
    """Seconds of appending, merging and sampling."""
    epoch: float = 0.0
    """Seconds of the whole epochs, selections included."""
    cpu: float = 0.0
    """Processor seconds of the whole epochs."""
    results: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def times(self, factor: float) -> Work:
        """So many times this."""
        return Work(*(getattr(self, f.name) * factor for f in fields(self)))


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured."""

    counts: tuple[int, ...]
    """Numbers of queries."""
    rows: int
    """Rows per stream and epoch."""
    epochs: int
    """Epochs that count."""
    repeat: int
    """Runs of `shared` and `widest`, by turns, of which the median counts."""


def work(ways: int, scratch: Path, size: Size, say: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Measure joins of so many streams, for every number of queries."""
    arrivals = arriving(size.rows, WARM_UP + size.epochs)
    rows = together(arrivals)
    # What is run first compiles; it does not count.
    few = arriving(10, WARM_UP + 2)
    ran(scratch, queries(2, ways), few, together(few))
    figures, wrong = [], 0
    alone: dict[str, Work] = {}
    for count in size.counts:
        asked = queries(count, ways)
        wide = unfiltered(asked)
        found: dict[str, list[Work]] = {"shared": [], "widest": []}
        for _ in range(size.repeat):
            for who, those in (("shared", asked), ("widest", wide)):
                if who == "widest" and len(wide) > MOST_STRUCTURES:
                    continue
                done, bad = ran(scratch, those, arrivals, rows)
                found[who].append(done)
                wrong += bad
                say(f"  {ways}-way, {count} queries, {who}: {done.join:.2f} s of join, {done.lookups:,.0f} lookups")
        sample = asked[:: max(1, count // ALONE)][:ALONE]
        for query in sample:
            if query.name not in alone:
                alone[query.name], bad = ran(scratch, [query], arrivals, rows)
                wrong += bad
        each = sum((alone[query.name] for query in sample), Work()).times(count / len(sample))
        figures.append(
            {
                "queries": count,
                "structures": len(wide),
                "shared": asdict(_median(found["shared"])),
                "widest": asdict(_median(found["widest"])) if found["widest"] else None,
                "alone": asdict(each),
                "sample": len(sample),
            }
        )
        say(f"  {ways}-way, {count} queries, alone: {each.join:.2f} s of join, {each.lookups:,.0f} lookups")
    return {
        "part": f"work{ways}",
        "title": f"Counted work, {ways}-way joins",
        "kind": "work",
        "ways": ways,
        "rows": size.rows,
        "epochs": size.epochs,
        "warm_up": WARM_UP,
        "repeat": size.repeat,
        "figures": figures,
        "wrong": wrong,
        "equal": wrong == 0,
    }


def ran(scratch: Path, asked: Sequence[SetQuery], arrivals: Sequence[Rows], rows: Rows) -> tuple[Work, int]:
    """What these queries take in one engine, and how many of them have another number of results than they must."""
    planner = Planner({query.name: query.graph for query in asked}, relations(), Config(tasks=1, sync=False))
    predicates = {of.sql: of.expr for query in asked for of in query.selections if of is not None}
    total, results = Work(), Counter[str]()
    checkpoint = tempfile.mkdtemp(prefix="checkpoint-", dir=scratch)
    clock = Clock(START_US)
    try:
        with LocalEngine(
            checkpoint, planner.plan, planner.config, predicates=predicates, clock=clock, planner=planner
        ) as engine:
            engine.change(sinks={query.name: Noop() for query in asked})
            for number, arrived in enumerate(arrivals):
                clock.advance(1.0)
                begun, cpu = time.perf_counter(), time.process_time()
                engine.run(arrived)
                seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
                progress = engine.progress[-1]
                results.update(progress["rows_out"])
                if number >= WARM_UP:
                    total += _epoch(progress, seconds, cpu)
    finally:
        shutil.rmtree(checkpoint, ignore_errors=True)
    return total, sum(results[query.name] != expected(query, rows) for query in asked)


def _epoch(progress: Mapping[str, Any], seconds: float, cpu: float) -> Work:
    counted, spent = progress["edges"].values(), dict(progress["task_seconds"])
    return Work(
        lookups=sum(count["lookups"] for count in counted),
        rows=sum(count["rows"] for count in counted),
        tuples=sum(count["tuples"] for count in counted),
        join=spent.pop("probe", 0.0),
        materialise=spent.pop("materialise", 0.0),
        other=sum(spent.values()),
        epoch=seconds,
        cpu=cpu,
        results=sum(progress["rows_out"].values()),
    )


def _median(runs: Sequence[Work]) -> Work:
    """Of every figure the median of the runs."""
    return Work(*(statistics.median(getattr(run, f.name) for run in runs) for f in fields(Work)))
