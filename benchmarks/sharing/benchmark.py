"""Measures shared execution of many multi-way joins (paper 001, Figure 7), over TPC-H's tables as streams.

work5, work10   without Spark, in one task: seconds, counted work, bytes of state
five, ten       on Spark: one engine under each `Config.sharing`; of five queries also an engine for each, all at once,
                and Spark's own stream-stream joins

Contestants take turns, each in a process of its own.  Every query's number of results must be DuckDB's.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from rich.console import Console

from benchmarks import jobs
from benchmarks.options import Options, chosen, scale_factor
from benchmarks.report import publish
from benchmarks.sharing.contestants import CONTESTANTS, SHARING, SharingJob, contest
from benchmarks.sharing.report import REPORT
from benchmarks.sharing.work import local
from benchmarks.sharing.workload import SharingQuery, queries, tables_of
from benchmarks.tpch import data
from plait.runtime.spark.java import require_java

COUNTS = {"work5": 5, "work10": 10, "five": 5, "ten": 10}
WHO = {
    "work5": SHARING,
    "work10": SHARING,
    "five": (*SHARING, "engines", "spark", "spark-rocksdb"),
    "ten": SHARING,
}
TITLES = {
    "work5": "Five queries, without Spark",
    "work10": "Ten queries, without Spark",
    "five": "Five queries",
    "ten": "Ten queries",
}
HEAP = "8g"


@dataclass(frozen=True, slots=True)
class Setup:
    """Options with every default filled in."""

    sf: float
    epochs: int
    parts: tuple[str, ...]
    who: tuple[str, ...]
    repeat: int
    memory: str


def settle(options: Options) -> Setup:
    """Fill in the defaults.

    >>> settle(Options(quick=True)).parts, settle(Options()).epochs
    (('work5', 'five'), 20)
    """
    default = ("work5", "five") if options.quick else tuple(COUNTS)
    return Setup(
        sf=scale_factor(options, full=0.1, quick=0.001),
        epochs=options.epochs or (6 if options.quick else 20),
        parts=chosen("part", options.parts, tuple(COUNTS), default),
        who=chosen("contestant", options.who, tuple(CONTESTANTS), tuple(CONTESTANTS)),
        repeat=options.repeat or 1,
        memory=options.memory or ("2g" if options.quick else HEAP),
    )


def run(out: Path, options: Options, console: Console) -> int:
    """Run the benchmark and write its report into `out`; 0 if every query had DuckDB's number of results, else 1."""
    setup = settle(options)
    if any(not part.startswith("work") for part in setup.parts):
        require_java()
    done = publish("sharing", setup, measured(out, setup, console), REPORT, out, console)
    return 0 if all(part["equal"] for part in done) else 1


def measured(out: Path, setup: Setup, console: Console) -> Iterator[dict[str, Any]]:
    """All parts, one after the other."""
    scratch = out / "scratch"
    scratch.mkdir(exist_ok=True)
    for part in setup.parts:
        console.print(f"{part} …", highlight=False)
        asked = queries(COUNTS[part])
        folder = data.ensure(out / "data", setup.sf, setup.epochs)
        expected = counts(folder, asked)
        who = [name for name in WHO[part] if name in setup.who]

        def once(name: str, part: str = part, folder: Path = folder) -> dict[str, Any]:
            found = _local(scratch, name, COUNTS[part], folder, setup) if part.startswith("work") else None
            found = found or _on_spark(scratch, name, COUNTS[part], folder, setup)
            told = f"{found['seconds']:.1f} s" if found["failure"] is None else f"FAILED: {found['failure']}"
            console.print(f"  {name}: {told}", highlight=False, markup=False, soft_wrap=True)
            return found

        runs = jobs.by_turns(who, setup.repeat, once)
        contestants = {name: summary(of, expected) for name, of in runs.items()}
        yield {
            "part": part,
            "title": TITLES[part],
            "queries": {query.name: {"sql": query.sql, "results": expected[query.name]} for query in asked},
            "rows_in": rows_in(folder, asked),
            "contestants": contestants,
            "equal": all(found["equal"] for found in contestants.values()),
        }


def _local(scratch: Path, who: str, count: int, folder: Path, setup: Setup) -> dict[str, Any]:
    asked = queries(count)
    # What is run first compiles; it does not count.
    local(scratch, asked, folder, 1, who)
    found = local(scratch, asked, folder, setup.epochs, who)
    return asdict(found) | {"seconds": sum(found.epochs), "peak": None, "failure": None}


def _on_spark(scratch: Path, who: str, count: int, folder: Path, setup: Setup) -> dict[str, Any]:
    outcome = jobs.run(contest, SharingJob(who, count, str(folder), setup.epochs, setup.memory), scratch)
    if not outcome.finished:
        return {"failure": outcome.failure, "seconds": 0.0}
    result: dict[str, Any] = outcome.result
    return result | {"peak": outcome.ended.peak_held, "failure": None, "state_bytes": result["state_bytes"]}


def summary(runs: Sequence[Mapping[str, Any]], expected: Mapping[str, int]) -> dict[str, Any]:
    """The median run, and whether all had the right number of results; one that failed counts as wrong."""
    done = [run for run in runs if run["failure"] is None]
    equal = len(done) == len(runs) and all(
        run["rows_out"].get(name, 0) == rows for run in done for name, rows in expected.items()
    )
    if not done:
        return {"failure": runs[0]["failure"], "equal": False}
    median = jobs.median_run(done, lambda run: float(run["seconds"]))
    sizes = median["state_bytes"]
    return {
        **median,
        "state_bytes": sizes[-1] if isinstance(sizes, list) else sizes,
        "state_by_epoch": sizes if isinstance(sizes, list) else [],
        "all_seconds": [run["seconds"] for run in done],
        "median_epoch": statistics.median(median["epochs"]),
        "equal": equal,
    }


def counts(folder: Path, asked: Sequence[SharingQuery]) -> dict[str, int]:
    """DuckDB's number of results of every query."""
    import duckdb

    found = {}
    with duckdb.connect() as connection:
        for table in tables_of(asked):
            connection.execute(f"CREATE VIEW {table} AS FROM '{folder}/{table}/*.parquet'")
        for query in asked:
            row = connection.execute(f"SELECT count(*) FROM ({query.sql})").fetchone()
            assert row is not None
            found[query.name] = int(row[0])
    return found


def rows_in(folder: Path, asked: Sequence[SharingQuery]) -> int:
    """Rows of all tables that some query joins, each once."""
    files = (file for table in tables_of(asked) for file in (folder / table).glob("*.parquet"))
    return sum(pq.read_metadata(file).num_rows for file in files)
