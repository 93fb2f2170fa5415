"""Parts `limits` and `sweep` of the benchmark `state`: paper 002's Figures 5 to 7 with its own query.

All contestants get the same limit: the *base*, and on top the *memory for the state*, a share of the state that Plait
ends with when memory is ample.  The base is what Plait's processes hold apart from state, over all epochs: the peak of
their memory without page cache, in a run that nothing limits, whose state lies in files and whose Java heap is resident
from the start.  In that run Plait is told to keep to the buffers that it would choose for itself under the limits, so
that the base is no larger than it needs to be.
Spark has more heap than Plait, which needs memory for Python instead.  Where Spark's own base, measured over the first
epochs, is above Plait's, it gets its own base and the memory for the state: more than Plait.
Whoever takes much longer than Plait under the same limit is stopped, and is told how far it came.
"""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from benchmarks.state.contestants import StateJob
from benchmarks.state.trial import Trial, trial
from benchmarks.tpcds import data
from benchmarks.tpcds.workloads import STAR
from plait.config import Config, bytes_of
from plait.errors import ConfigError

if TYPE_CHECKING:
    from benchmarks.state.benchmark import Setup

WORKLOAD = STAR
RATIOS = (1.0, 2.0, 4.0, 8.0)
"""Sizes of the state over the memory for it."""
GOAL_RATIO = 4.0
"""The goals are about a memory of a quarter of the state."""
MOST_SLOWER = 2.0
"""Goal: Plait takes at most this many times its time with ample memory."""
LEAST_FASTER = 3.0
"""Goal: Spark takes at least this many times Plait's time, under every limit."""
PATIENCE = 3.25
"""A contestant is stopped when it has taken this many times as long as Plait under the same limit."""
CONFIG: dict[str, Any] = {"gc_grace_seconds": 1.0, "snapshot_every": 4, "chunk_rows": 1 << 14}
"""Merged runs go soon: on tmpfs they would be charged as state.  Rows of SELECT * are wide: fewer are made at once."""
IN_MEMORY: dict[str, Any] = {"compress_above": "1t"}
"""State in memory is not compressed, as in the paper's hash tables."""
LEAN = "128m"
"""`memory_limit` of the run that the base is taken from: what Plait would choose by itself in 2 GiB."""
SPARK_HEAP = "1g"
BASE_EPOCHS = 4
SLACK = 64 << 20
"""Bytes added to a base: peaks are sampled, and the kernel charges its own pages too."""
SWEPT: dict[str, tuple[Any, ...]] = {
    "memory_limit": ("64m", LEAN, "256m", "512m"),
    "epochs": (10, 20, 40, 80),
    "fan_in": (2, 4, 8, 16),
    "compress_above": (None, "1t"),
}
"""Values of each setting; `epochs` cuts the same rows into more or fewer pieces, as the size of a memtable would."""


@dataclass(frozen=True, slots=True)
class Measure:
    """The base and the size of the state, which limits are computed from, and the two unlimited runs they come from."""

    ample: Trial
    lean: Trial
    base: int

    @property
    def state_bytes(self) -> int:
        """Size of the state that Plait ends with."""
        return self.ample.state_bytes

    @property
    def seconds(self) -> float:
        """Seconds of the faster run."""
        return min(self.ample.seconds, self.lean.seconds)


def limits(out: Path, setup: Setup, console: Console) -> dict[str, Any]:
    """Run each contestant under each limit; `equal` if all that finished gave the right rows and Plait always did."""
    folder = data.ensure(WORKLOAD, out / "data", setup.sf, setup.epochs)
    expected = data.count_results(WORKLOAD, folder)
    job = _job(folder, setup)
    measure = measured(folder, out, setup.memory, tuple(setup.settings.items()), console)
    bases = dict.fromkeys(setup.who, measure.base)
    bases |= {
        who: max(measure.base, _first_base(replace(job, who=who, heap=SPARK_HEAP, rocksdb_mb=16), out, console))
        for who in setup.who
        if who.startswith("spark")
    }
    free = [asdict(measure.ample), asdict(measure.lean)]
    if "plait-memory" in setup.who:
        free.append(asdict(_said(trial(_under(job, "plait-memory", 0), None, out / "scratch"), console)))
    runs: list[dict[str, Any]] = []
    for memory in setup.limits or tuple(int(measure.state_bytes / ratio) for ratio in RATIOS):
        seconds = measure.seconds
        for who in setup.who:
            patience = PATIENCE * (seconds if who != "plait" else 2 * measure.seconds)
            found = trial(_under(job, who, memory), bases[who] + memory, out / "scratch", patience=patience)
            seconds = found.seconds if who == "plait" and found.finished else seconds
            ratio = measure.state_bytes / memory
            runs.append({"memory": memory, "ratio": ratio, **asdict(_said(found, console))})
    return {
        "part": "limits",
        "title": f"Limited memory: {WORKLOAD.title}",
        "expected": expected,
        "state_bytes": measure.state_bytes,
        "ample_seconds": measure.seconds,
        "ample": free,
        "bases": bases,
        "patience": PATIENCE,
        "runs": runs,
        "met": goals(runs, measure.seconds),
        "equal": all(r["rows"] == expected for r in [*free, *runs] if r["outcome"] == "finished")
        and all(r["outcome"] == "finished" for r in runs if r["who"] == "plait"),
    }


def goals(runs: Sequence[Mapping[str, Any]], ample: float) -> dict[str, bool]:
    """Whether each goal that these runs are about is met; a run that was stopped or died has not beaten Plait.

    >>> plait = {"who": "plait", "memory": 9, "ratio": 4.0, "outcome": "finished", "seconds": 19.0}
    >>> goals([plait, plait | {"who": "spark-rocksdb", "seconds": 50.0}], ample=10.0)
    {'quarter': True, 'spark': False}
    >>> goals([plait, plait | {"who": "plait-memory", "outcome": "killed"}], ample=9.0)
    {'quarter': False, 'memory_dies': True}
    """
    met: dict[str, bool] = {}
    mine = {run["memory"]: run["seconds"] for run in runs if run["who"] == "plait" and run["outcome"] == "finished"}
    for run in runs:
        finished = run["outcome"] == "finished"
        if run["who"] == "spark-rocksdb":
            far = not finished or run["seconds"] >= LEAST_FASTER * mine.get(run["memory"], float("inf"))
            met["spark"] = met.get("spark", True) and far and run["memory"] in mine
        elif abs(run["ratio"] / GOAL_RATIO - 1) < 0.01:
            if run["who"] == "plait":
                met["quarter"] = finished and run["seconds"] <= MOST_SLOWER * ample
            elif run["who"] == "plait-memory":
                met["memory_dies"] = not finished
    return met


def sweep(out: Path, setup: Setup, console: Console) -> dict[str, Any]:
    """Run Plait with other settings and other epochs, one change at a time, with memory for a quarter of the state."""
    folder = data.ensure(WORKLOAD, out / "data", setup.sf, setup.epochs)
    expected = data.count_results(WORKLOAD, folder)
    measure = measured(folder, out, setup.memory, tuple(setup.settings.items()), console)
    limit = measure.base + int(measure.state_bytes / GOAL_RATIO)
    usual: dict[str, Any] = {name: getattr(Config(), name, None) for name in SWEPT}
    usual |= {"memory_limit": LEAN, "epochs": setup.epochs}
    done: dict[str, Trial] = {}

    def run(name: str, value: Any) -> dict[str, Any]:
        chosen = usual | {name: value}
        key = repr(sorted(chosen.items()))
        if key not in done:
            rows = data.ensure(WORKLOAD, out / "data", setup.sf, chosen.pop("epochs"))
            job = replace(_job(rows, setup), config=CONFIG | chosen)
            console.print(f"  {name} = {value}", highlight=False)
            done[key] = trial(job, limit, out / "scratch", patience=2 * PATIENCE * measure.seconds)
            _said(done[key], console)
        return {"value": "auto" if value is None else value, **asdict(done[key])}

    lines = {name: [run(name, value) for value in _few(name, setup)] for name in SWEPT}
    return {
        "part": "sweep",
        "title": "Plait's settings, and the size of an epoch, with a quarter of the state",
        "expected": expected,
        "limit": limit,
        "base": measure.base,
        "state_bytes": measure.state_bytes,
        "usual": usual,
        "lines": lines,
        "equal": all(r["rows"] == expected for line in lines.values() for r in line if r["outcome"] == "finished"),
    }


def _few(name: str, setup: Setup) -> tuple[Any, ...]:
    if not setup.quick:
        return SWEPT[name]
    return (setup.epochs // 2, setup.epochs) if name == "epochs" else SWEPT[name][:2]


@functools.cache
def measured(folder: Path, out: Path, heap: str, settings: tuple[tuple[str, str], ...], console: Console) -> Measure:
    """Run Plait twice with ample memory, by default and with small buffers; only once per process."""
    job = StateJob("plait", WORKLOAD.name, str(folder), heap, config=CONFIG, settings=dict(settings))
    ample = _said(trial(job, None, out / "scratch"), console)
    lean = _said(trial(replace(job, config=CONFIG | {"memory_limit": LEAN}), None, out / "scratch"), console)
    for found in (ample, lean):
        _require(found)
    console.print(f"  base: {lean.peak_held + SLACK >> 20:,} MiB", highlight=False)
    return Measure(ample, lean, lean.peak_held + SLACK)


def _job(folder: Path, setup: Setup) -> StateJob:
    return StateJob("plait", WORKLOAD.name, str(folder), setup.memory, config=CONFIG, settings=setup.settings)


def _under(job: StateJob, who: str, memory: int) -> StateJob:
    """The job of a contestant with `memory` bytes for its state."""
    if who == "plait-memory":
        return replace(job, who=who, config=job.config | IN_MEMORY)
    if who == "spark":
        return replace(job, who=who, heap=f"{(bytes_of('heap', SPARK_HEAP) + memory) >> 20}m")
    if who == "spark-rocksdb":
        return replace(job, who=who, heap=SPARK_HEAP, rocksdb_mb=max(memory // 2 >> 20, 16))
    return replace(job, who=who)


def _first_base(job: StateJob, out: Path, console: Console) -> int:
    """Bytes that a contestant holds while there is little state, in the first epochs."""
    with tempfile.TemporaryDirectory(prefix="first-", dir=out) as folder:
        _first_epochs(Path(job.data), Path(folder))
        free = trial(replace(job, data=folder), None, out / "scratch")
    _require(free)
    console.print(f"  {job.who}: base {free.peak_held + SLACK >> 20:,} MiB", highlight=False)
    return free.peak_held + SLACK


def _first_epochs(source: Path, target: Path) -> None:
    """Link the first files of every table, and those of the warm-up, into another folder."""
    for file in source.rglob("*.parquet"):
        inside = file.relative_to(source)
        if inside.parts[0] == "warm" or int(file.stem) < BASE_EPOCHS:
            (target / inside).parent.mkdir(parents=True, exist_ok=True)
            os.link(file, target / inside)


def _require(found: Trial) -> None:
    if not found.finished:
        raise ConfigError("BENCH_RUN", f"{found.who} does not run: {found.failure}", "see the message")


def _said(found: Trial, console: Console) -> Trial:
    under = "no limit" if found.limit is None else f"{found.limit >> 20:,} MiB"
    console.print(f"  {found.who}, {under}: {found.said()}", highlight=False, markup=False, soft_wrap=True)
    return found
