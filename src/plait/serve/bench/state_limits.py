"""Parts `limits` and `sweep` of `plait bench state`: paper 002's Figures 5 to 7 with its own query.

A contestant's processes need memory before much state is there: the *base*, measured for each by a run over the first
epochs only, the Java heap fully resident.  What a run gets is its base and, on top, the *memory for the state*; that
is swept, as shares of the state that Plait ends with when memory is ample.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from plait.config import Config
from plait.errors import ConfigError
from plait.serve.bench import data
from plait.serve.bench.state_run import StateJob
from plait.serve.bench.state_trial import Trial, trial
from plait.serve.bench.workloads import STAR, Workload

if TYPE_CHECKING:
    from plait.serve.bench.state import Setup

WORKLOAD = STAR
RATIOS = (8.0, 4.0, 2.0, 1.0, 0.5)
"""State over memory for the state."""
SWEEP_RATIO = 4.0
MEMORY_LIMITS = ("64m", "128m", "256m", "512m", "1g")
FAN_INS = (2, 4, 8, 16)
CONFIG: dict[str, Any] = {"gc_grace_seconds": 1.0, "snapshot_every": 4, "chunk_rows": 1 << 14}
"""Merged runs go soon: on tmpfs they would be charged as state.  Rows of SELECT * are wide: fewer are made at once."""
BASE_EPOCHS = 2
STEP, BASE_TRIES = 64 << 20, 5
STARTING_SECONDS = 180.0
"""More than the start of Java and the warm-up take on a busy machine; patience runs from the start of the process."""


def limits(out: Path, setup: Setup, console: Console) -> dict[str, Any]:
    """Each contestant under each limit; `equal` if all that ended gave the right rows and Plait always ended."""
    folder = data.ensure(WORKLOAD, out / "data", setup.sf, setup.epochs)
    expected = _expected(WORKLOAD, folder)
    job = StateJob("plait", WORKLOAD.name, str(folder), "", setup.memory, config=CONFIG, settings=setup.settings)
    ample = _said(trial(job, None, out / "scratch"), console)
    _require(ample)
    bases = {who: base(replace(job, who=who), out, console) for who in setup.who if who != "plait-memory"}
    bases |= {"plait-memory": bases.get("plait") or base(job, out, console)} if "plait-memory" in setup.who else {}
    runs: list[dict[str, Any]] = []
    for memory in setup.limits or tuple(int(ample.state_bytes / ratio) for ratio in RATIOS):
        for who in setup.who:
            one = replace(job, who=who, rocksdb_mb=max(memory // 2 >> 20, 16))
            found = trial(one, bases[who] + memory, out / "scratch", patience=STARTING_SECONDS + 40 * ample.seconds)
            runs.append({"memory": memory, **asdict(_said(found, console))})
    return {
        "part": "limits",
        "title": f"Limited memory: {WORKLOAD.title}",
        "expected": expected,
        "state_bytes": ample.state_bytes,
        "ample": asdict(ample),
        "bases": bases,
        "runs": runs,
        "equal": ample.rows == expected
        and all(r["rows"] == expected for r in runs if r["outcome"] == "finished")
        and all(r["outcome"] == "finished" for r in runs if r["who"] == "plait"),
    }


def sweep(out: Path, setup: Setup, console: Console) -> dict[str, Any]:
    """Plait's own settings under one limit: `memory_limit` (its cache and buffers), and `fan_in`."""
    folder = data.ensure(WORKLOAD, out / "data", setup.sf, setup.epochs)
    expected = _expected(WORKLOAD, folder)
    job = StateJob("plait", WORKLOAD.name, str(folder), "", setup.memory, config=CONFIG, settings=setup.settings)
    ample = _said(trial(job, None, out / "scratch"), console)
    _require(ample)
    limit = base(job, out, console) + int(ample.state_bytes / SWEEP_RATIO)
    known = {f.name for f in dataclasses.fields(Config)}
    values: dict[str, tuple[Any, ...]] = {
        "memory_limit": MEMORY_LIMITS[:2] if setup.quick else MEMORY_LIMITS,
        "fan_in": FAN_INS[:2] if setup.quick else FAN_INS,
    }
    lines: dict[str, list[dict[str, Any]]] = {}
    for name, swept in values.items():
        for value in swept if name in known else ():
            found = trial(replace(job, config=CONFIG | {name: value}), limit, out / "scratch")
            lines.setdefault(name, []).append({"value": value, **asdict(_said(found, console))})
    runs = [run for line in lines.values() for run in line]
    return {
        "part": "sweep",
        "title": "Plait's settings under one limit",
        "expected": expected,
        "limit": limit,
        "state_bytes": ample.state_bytes,
        "lines": lines,
        "missing": [name for name in values if name not in known],
        "equal": all(run["outcome"] == "finished" and run["rows"] == expected for run in runs),
    }


def base(job: StateJob, out: Path, console: Console) -> int:
    """The least limit, in steps of 64 MiB, under which a run over the first epochs ends well.

    The search starts from what such a run holds when nothing limits it.
    """
    with tempfile.TemporaryDirectory(prefix="first-", dir=out) as folder:
        _first_epochs(Path(job.data), Path(folder))
        few = replace(job, data=folder)
        free = trial(few, None, out / "scratch")
        _require(free)
        for tries in range(1, BASE_TRIES + 1):
            limit = (free.peak_held // STEP + tries) * STEP
            found = trial(few, limit, out / "scratch", patience=STARTING_SECONDS + 10 * free.seconds)
            if found.finished:
                console.print(f"  {job.who}: base {limit >> 20} MiB (holds {free.peak_held >> 20})", highlight=False)
                return limit
    raise ConfigError(
        "BENCH_RUN", f"{job.who} does not run in {limit >> 20} MiB: {found.failure}", "give less Java heap (--memory)"
    )


def _first_epochs(source: Path, target: Path) -> None:
    """The first files of every table, and those of the warm-up, as links."""
    for file in source.rglob("*.parquet"):
        inside = file.relative_to(source)
        if inside.parts[0] == "warm" or int(file.stem) < BASE_EPOCHS:
            (target / inside).parent.mkdir(parents=True, exist_ok=True)
            os.link(file, target / inside)


def _expected(workload: Workload, folder: Path) -> int:
    """The number of results, by DuckDB."""
    import duckdb

    with duckdb.connect() as connection:
        for table in workload.tables:
            connection.execute(f"CREATE VIEW {table} AS FROM '{folder}/{table}/*.parquet'")
        row = connection.execute(f"SELECT count(*) FROM ({workload.sql})").fetchone()
    assert row is not None
    return int(row[0])


def _require(found: Trial) -> None:
    if not found.finished:
        raise ConfigError("BENCH_RUN", f"{found.who} does not run: {found.failure}", "see the message")


def _said(found: Trial, console: Console) -> Trial:
    under = "no limit" if found.limit is None else f"{found.limit >> 20} MiB"
    console.print(f"  {found.who}, {under}: {found.said()}", highlight=False, markup=False, soft_wrap=True)
    return found
