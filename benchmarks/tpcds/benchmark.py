"""`python -m benchmarks tpcds`: Plait against Spark's own joins and DuckDB.

Contestants are interleaved (one round after another), each run in a process of its own.  Every timed run's row count
must equal DuckDB's; with `verify`, one more run of each streaming contestant must give DuckDB's checksum too.
"""

from __future__ import annotations

import signal
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import jobs as race
from benchmarks.options import Options
from benchmarks.tpcds import data
from benchmarks.tpcds import report as tpcds_report
from benchmarks.tpcds.contestants import Job, Result
from benchmarks.tpcds.workloads import CHAIN, FIXED, FOUR, STAR, Workload
from plait.errors import ConfigError

STREAMING = ("plait", "spark", "spark-rocksdb")
RACERS = (*STREAMING, "duckdb")
KNOWN = (*RACERS, "spark-tuned")
"""`spark-tuned` is Spark's joins in the session that `plait.session` gives; run when asked for."""
PARTS = ("four", "star", "chain", "fixed")
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


def settle(options: Options) -> Setup:
    """Fill in the defaults: at SF 10 one repetition, 40 epochs, and neither SELECT * nor the fixed cost.

    >>> settle(Options(sf=10)).epochs, settle(Options(quick=True)).sf
    (40, 0.01)
    """
    sf = options.sf or (0.01 if options.quick else 1.0)
    if not 0.001 <= sf <= 100:
        raise ConfigError("BENCH_SF", f"scale factor {sf:g} is out of range", "give a number from 0.001 to 100")
    large = sf >= 10
    return Setup(
        sf=sf,
        epochs=options.epochs or (3 if options.quick else 40 if large else 20),
        parts=_chosen("part", options.parts, PARTS, ("four", "chain") if large else PARTS),
        who=_chosen("contestant", options.who, KNOWN, RACERS),
        repeat=options.repeat or (1 if large or options.quick else 3),
        verify=options.verify,
        memory=options.memory or HEAP,
        fixed_epochs=6 if options.quick else FIXED_EPOCHS,
    )


def run(out: Path, options: Options, console: Console) -> int:
    """Run it, write tpcds.json, tpcds.md and tpcds.png into `out`; 0 if all results are equal."""
    setup = settle(options)
    # Being told to end must end the contestants too: SystemExit runs the clean-up in `race`.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    parts: list[dict[str, Any]] = []
    table = ""
    for part in measured(out, setup, console):
        parts.append(part)
        # After every part, so that an interrupted run keeps what it has measured.
        document = {"benchmark": "tpcds", "machine": race.machine(), "setup": asdict(setup), "parts": parts}
        table = tpcds_report.write(document, out)
    console.print(table, markup=False, highlight=False)
    return 0 if all(part["equal"] for part in parts) else 1


def measured(out: Path, setup: Setup, console: Console) -> Iterator[dict[str, Any]]:
    """The papers' TPC-DS query, the same with SELECT *, a chain over three keys, and the fixed cost of an epoch."""
    races = {w.name: w for w in (FOUR, STAR, CHAIN)}
    for part in setup.parts:
        yield _race(races[part], out, setup, console) if part in races else _fixed(out, setup, console)


def _race(workload: Workload, out: Path, setup: Setup, console: Console) -> dict[str, Any]:
    console.print(f"{workload.title}: data …", highlight=False)
    folder = data.ensure(workload, out / "data", setup.sf, setup.epochs)
    job = Job("duckdb", workload.name, str(folder), "", setup.epochs, setup.memory, "verify")
    oracle = race.run(job, out / "scratch")
    if oracle.result is None:
        raise ConfigError("BENCH_ORACLE", f"DuckDB could not answer the query: {oracle.failure}", "see the message")
    expected = oracle.result
    outcomes: dict[str, list[race.Outcome]] = {who: [] for who in setup.who}
    for _ in range(setup.repeat):
        for who in setup.who:
            outcomes[who].append(_run(replace(job, who=who, mode="time"), out, console))
    checks = {}
    for who in setup.who if setup.verify else ():
        checks[who] = _run(replace(job, who=who), out, console) if who in STREAMING else oracle
        checked = checks[who].result
        same = checked is not None and (checked.rows, checked.checksum) == (expected.rows, expected.checksum)
        console.print(
            f"  {workload.name} {who}: {'equal to' if same else 'NOT EQUAL to'} DuckDB's rows", highlight=False
        )
    contestants = {who: _summary(outcomes[who], checks.get(who), expected) for who in setup.who}
    return {
        "part": workload.name,
        "title": workload.title,
        "sql": workload.sql.strip(),
        "expected": {"rows": expected.rows, "checksum": expected.checksum},
        "contestants": contestants,
        "equal": all(c["equal"] for c in contestants.values() if c["seconds"] is not None)
        and all(c["seconds"] is not None for who, c in contestants.items() if who == "plait"),
        "curve": _curve(outcomes.get("plait", [])),
        "optimiser_share": _optimiser_share(outcomes.get("plait", [])),
    }


def _summary(runs: list[race.Outcome], check: race.Outcome | None, expected: Result) -> dict[str, Any]:
    """A contestant's line in the table.  `checksum` is None when it was not verified."""
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


def _curve(runs: list[race.Outcome]) -> list[dict[str, float]]:
    """Seconds of each epoch of Plait's, making rows excluded; the median run of several.

    Rows are made by the tasks side by side, so their share of an epoch is their seconds over the number of tasks.
    """
    done = sorted((run.result for run in runs if run.result is not None), key=lambda r: r.seconds)
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
        for p in done[len(done) // 2].epochs
    ]


def _optimiser_share(runs: list[race.Outcome]) -> float | None:
    """Which share of the epochs' time statistics and planning take; the median run."""
    shares = []
    for run in runs:
        epochs = run.result.epochs if run.result is not None else []
        spent = sum(p["optimiser"]["seconds"] + p["task_seconds"].get("sample", 0.0) for p in epochs)
        if epochs:
            shares.append(spent / sum(p["seconds"]["total"] for p in epochs))
    return statistics.median(shares) if shares else None


def _fixed(out: Path, setup: Setup, console: Console) -> dict[str, Any]:
    """Almost no rows: what is left is what an epoch costs in itself.  Medians over the last epochs, in parts."""
    console.print(f"{FIXED.title} …")
    folder = data.ensure(FIXED, out / "data", setup.sf, setup.fixed_epochs)
    triggers: dict[str, dict[str, float]] = {}
    steps: dict[str, dict[str, float]] = {}
    failures = {}
    streaming = [who for who in STREAMING if who in setup.who]
    for who in (*streaming, "spark-stateless"):
        job = Job(who, FIXED.name, str(folder), "", setup.fixed_epochs, setup.memory, "time")
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


def _run(job: Job, out: Path, console: Console) -> race.Outcome:
    outcome = race.run(job, out / "scratch")
    said = (
        f"{outcome.result.seconds:.2f} s, {outcome.result.rows:,} rows"
        if outcome.result
        else f"FAILED: {outcome.failure}"
    )
    what = "checksum run" if job.mode == "verify" else "timed run"
    console.print(f"  {job.workload} {job.who} ({what}): {said}", highlight=False, markup=False, soft_wrap=True)
    return outcome


def _chosen(what: str, wanted: tuple[str, ...], known: tuple[str, ...], default: tuple[str, ...]) -> tuple[str, ...]:
    for name in wanted:
        if name not in known:
            raise ConfigError("BENCH_NAME", f"there is no {what} {name!r}", f"use: {', '.join(known)}")
    return tuple(name for name in known if name in wanted) or default
