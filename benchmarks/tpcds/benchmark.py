"""Measures Plait against Spark's own joins and DuckDB.

Contestants take turns, each run in a process of its own.  Every timed run's row count must equal DuckDB's; with
`verify`, one more run of each streaming contestant must give DuckDB's checksum too.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import jobs
from benchmarks.options import Options, chosen, scale_factor
from benchmarks.report import publish
from benchmarks.tpcds import data
from benchmarks.tpcds.contestants import Result, TpcdsJob, contest
from benchmarks.tpcds.report import REPORT
from benchmarks.tpcds.workloads import CHAIN, COMPUTED, FIXED, FOUR, STAR, Workload
from plait.errors import ConfigError

STREAMING = ("plait", "spark", "spark-rocksdb")
RACERS = (*STREAMING, "duckdb")
KNOWN = (*RACERS, "spark-tuned")
"""`spark-tuned` is Spark's joins in the session that `plait.session` gives; it runs only when it is named."""
PARTS = ("four", "star", "chain", "fixed")
KNOWN_PARTS = ("four", "star", "chain", "computed", "fixed")
"""`computed` runs only when it is named."""
FIXED_EPOCHS, FIXED_COUNTED = 30, 20
HEAP = "8g"


@dataclass(frozen=True, slots=True)
class Setup:
    """Options with every default filled in."""

    sf: float
    epochs: int
    parts: tuple[str, ...]
    who: tuple[str, ...]
    repeat: int
    verify: bool
    memory: str
    fixed_epochs: int


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a contestant: its result, or why there is none, and the peak memory of its process tree."""

    result: Result | None
    failure: str | None
    peak_bytes: int


def settle(options: Options) -> Setup:
    """Fill in the defaults: at SF 10 one repetition, 40 epochs, and neither SELECT * nor the fixed cost.

    >>> settle(Options(sf=10)).epochs, settle(Options(quick=True)).sf
    (40, 0.01)
    """
    sf = scale_factor(options, full=1.0, quick=0.01)
    large = sf >= 10
    return Setup(
        sf=sf,
        epochs=options.epochs or (3 if options.quick else 40 if large else 20),
        parts=chosen("part", options.parts, KNOWN_PARTS, ("four", "chain") if large else PARTS),
        who=chosen("contestant", options.who, KNOWN, RACERS),
        repeat=options.repeat or (1 if large or options.quick else 3),
        verify=options.verify,
        memory=options.memory or HEAP,
        fixed_epochs=6 if options.quick else FIXED_EPOCHS,
    )


def run(out: Path, options: Options, console: Console) -> int:
    """Run the benchmark and write its report into `out`; 0 if all results are equal."""
    setup = settle(options)
    parts = publish("tpcds", setup, measured(out, setup, console), REPORT, out, console)
    return 0 if all(part["equal"] for part in parts) else 1


def measured(out: Path, setup: Setup, console: Console) -> Iterator[dict[str, Any]]:
    """The papers' TPC-DS query, also with SELECT *, a chain over three keys, also computed, and what an epoch costs."""
    races = {w.name: w for w in (FOUR, STAR, CHAIN, COMPUTED)}
    for part in setup.parts:
        yield _race(races[part], out, setup, console) if part in races else _fixed(out, setup, console)


def _race(workload: Workload, out: Path, setup: Setup, console: Console) -> dict[str, Any]:
    console.print(f"{workload.title}: data …", highlight=False)
    folder = data.ensure(workload, out / "data", setup.sf, setup.epochs)
    job = TpcdsJob("duckdb", workload.name, str(folder), setup.epochs, setup.memory, "verify")
    oracle = _run(job, out, console)
    if oracle.result is None:
        raise ConfigError("BENCH_ORACLE", f"DuckDB could not answer the query: {oracle.failure}", "see the message")
    expected = oracle.result
    runs = jobs.by_turns(setup.who, setup.repeat, lambda who: _run(replace(job, who=who, mode="time"), out, console))
    checks = {}
    for who in setup.who if setup.verify else ():
        checks[who] = oracle if who == "duckdb" else _run(replace(job, who=who), out, console)
        checked = checks[who].result
        same = checked is not None and (checked.rows, checked.checksum) == (expected.rows, expected.checksum)
        console.print(
            f"  {workload.name} {who}: {'equal to' if same else 'NOT EQUAL to'} DuckDB's rows", highlight=False
        )
    contestants = {who: _summary(runs[who], checks.get(who), expected) for who in setup.who}
    return {
        "part": workload.name,
        "title": workload.title,
        "sql": workload.sql.strip(),
        "expected": {"rows": expected.rows, "checksum": expected.checksum},
        "contestants": contestants,
        "equal": all(c["equal"] for c in contestants.values() if c["seconds"] is not None)
        and all(c["seconds"] is not None for who, c in contestants.items() if who == "plait"),
        "curve": _curve(runs.get("plait", [])),
        "optimiser_share": _optimiser_share(runs.get("plait", [])),
    }


def _summary(runs: list[Run], check: Run | None, expected: Result) -> dict[str, Any]:
    """All figures of one contestant; `checksum` is None when it was not verified."""
    done = [run.result for run in runs if run.result is not None]
    checked = check.result if check is not None else None
    failure = next((run.failure for run in (*runs, *([check] if check else [])) if run.failure), None)
    same_rows = all(result.rows == expected.rows for result in done)
    same_sum = check is None or (checked is not None and checked.checksum == expected.checksum)
    return {
        "seconds": statistics.median(r.seconds for r in done) if done else None,
        "all_seconds": [r.seconds for r in done],
        "rows": done[0].rows if done else None,
        "checksum": checked.checksum if checked else None,
        "equal": bool(done) and same_rows and same_sum,
        "peak_bytes": max(run.peak_bytes for run in runs),
        "failure": failure,
    }


def _curve(runs: list[Run]) -> list[dict[str, float]]:
    """Seconds and state of each epoch of Plait's median run, with and without the time in which rows are made.

    Rows are made by the tasks side by side, so their share of an epoch is their seconds over the number of tasks.
    """
    done = [run.result for run in runs if run.result is not None]
    if not done:
        return []
    return [
        {
            "epoch": p["epoch"],
            "state_rows": p["state_rows"],
            "rows_out": sum(p["rows_out"].values()),
            "seconds": p["seconds"]["total"],
            "without_output": p["seconds"]["total"] - p.get("task_seconds", {}).get("materialise", 0.0) / p["tasks"],
        }
        for p in jobs.median_run(done, lambda result: result.seconds).epochs
    ]


def _optimiser_share(runs: list[Run]) -> float | None:
    """The share of the epochs' time that statistics and planning take; the median of the runs."""
    shares = []
    for run in runs:
        epochs = run.result.epochs if run.result is not None else []
        spent = sum(p["optimiser"]["seconds"] + p["task_seconds"].get("sample", 0.0) for p in epochs)
        if epochs:
            shares.append(spent / sum(p["seconds"]["total"] for p in epochs))
    return statistics.median(shares) if shares else None


def _fixed(out: Path, setup: Setup, console: Console) -> dict[str, Any]:
    """Measure epochs with almost no rows, where only the fixed cost is left: medians over the last epochs."""
    console.print(f"{FIXED.title} …")
    folder = data.ensure(FIXED, out / "data", setup.sf, setup.fixed_epochs)
    triggers: dict[str, dict[str, float]] = {}
    steps: dict[str, dict[str, float]] = {}
    failures = {}
    streaming = [who for who in STREAMING if who in setup.who]
    for who in (*streaming, "spark-stateless"):
        job = TpcdsJob(who, FIXED.name, str(folder), setup.fixed_epochs, setup.memory, "time")
        outcome = _run(job, out, console)
        if outcome.result is None:
            failures[who] = outcome.failure
            continue
        last = outcome.result.epochs[-FIXED_COUNTED:]
        if who == "plait":
            triggers[who] = _medians([p["spark_seconds"] for p in last])
            steps = {
                "driver": _medians([p["seconds"] for p in last]),
                "tasks": _medians([p["task_seconds"] for p in last]),
            }
        else:
            triggers[who] = _medians([{k: ms / 1000 for k, ms in p["durationMs"].items()} for p in last])
    return {
        "part": FIXED.name,
        "title": FIXED.title,
        "rows_per_epoch": data.FIXED_ROWS * len(FIXED.tables),
        "epochs": setup.fixed_epochs,
        "triggers": triggers,
        "steps": steps,
        "failures": failures,
        "equal": "plait" not in failures,
    }


def _medians(epochs: list[dict[str, float]]) -> dict[str, float]:
    """The median of each part over the epochs.

    >>> _medians([{"a": 1.0}, {"a": 3.0, "b": 5.0}, {"a": 2.0}])
    {'a': 2.0, 'b': 0.0}
    """
    parts = dict.fromkeys(part for epoch in epochs for part in epoch)
    return {part: statistics.median(epoch.get(part, 0.0) for epoch in epochs) for part in parts}


def _run(job: TpcdsJob, out: Path, console: Console) -> Run:
    outcome = jobs.run(contest, job, out / "scratch")
    result = Result(**outcome.result) if outcome.finished else None
    told = f"{result.seconds:.2f} s, {result.rows:,} rows" if result else f"FAILED: {outcome.failure}"
    what = "checksum run" if job.mode == "verify" else "timed run"
    console.print(f"  {job.workload} {job.who} ({what}): {told}", highlight=False, markup=False, soft_wrap=True)
    return Run(result, outcome.failure, outcome.ended.peak_bytes)
