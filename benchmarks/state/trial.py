"""One run of one contestant under one memory limit, and what it told before it ended."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from benchmarks import jobs
from benchmarks.memory_group import new_group
from benchmarks.process_tree import Look
from benchmarks.state.contestants import StateJob, contest
from plait.errors import ConfigError

SHARED_MEMORY = Path("/dev/shm")
LOOKS_KEPT = 600


class LimitedJob(jobs.Job, Protocol):
    """A job that names the settings of Plait's Config that it runs with."""

    @property
    def config(self) -> dict[str, Any]:
        """Fields of `plait.Config`."""
        ...


J = TypeVar("J", bound=LimitedJob)


@dataclass(slots=True)
class Trial:
    """What one run came to; `outcome` is as in `jobs.Outcome.how`, `epochs` are those that ended."""

    who: str
    limit: int | None
    enforced: str
    outcome: str
    seconds: float
    rows: int
    peak_bytes: int
    peak_held: int
    oom_kills: int
    reclaims: int
    failure: str | None
    config: dict[str, Any] = field(default_factory=dict)
    epochs: list[dict[str, Any]] = field(default_factory=list)
    looks: list[Look] = field(default_factory=list)
    read_bytes: int = 0
    written_bytes: int = 0
    """Bytes from and to block devices, from the start of the process on."""
    wall: float = 0.0
    """Seconds since the first epoch began, reading the input included."""

    @property
    def finished(self) -> bool:
        """Whether the run came to its end."""
        return self.outcome == "finished"

    @property
    def state_bytes(self) -> int:
        """Size of the state after the last epoch."""
        return int(self.epochs[-1].get("state_bytes", 0)) if self.epochs else 0

    def said(self) -> str:
        """The run in one line, for the console."""
        how = self.outcome if self.finished else f"{self.outcome.upper()} after {len(self.epochs)} epochs"
        peak = f"{self.peak_bytes >> 20:,} MiB ({self.peak_held >> 20:,} without page cache)"
        disk = f"disk {self.read_bytes >> 20:,} MiB read, {self.written_bytes >> 20:,} written"
        return f"{how}, {self.seconds:.1f} s, {self.rows:,} rows, peak {peak}, {disk}"


def trial(
    job: StateJob,
    limit: int | None,
    scratch: Path,
    *,
    patience: float | None = None,
    beside: Callable[[Path], None] = lambda work: None,
) -> Trial:
    """Run a contestant; the state of `plait-memory` lies in a folder on tmpfs, which is gone afterwards."""
    if job.who != "plait-memory":
        return run_trial(contest, job, limit, scratch, patience=patience, beside=beside)
    tmpfs = _in_memory()
    try:
        job = dataclasses.replace(job, state_dir=str(tmpfs))
        return run_trial(contest, job, limit, scratch, tmpfs=tmpfs, patience=patience, beside=beside)
    finally:
        shutil.rmtree(tmpfs, ignore_errors=True)


def run_trial(
    function: Callable[[J, Path], Any],
    job: J,
    limit: int | None,
    scratch: Path,
    *,
    tmpfs: Path | None = None,
    patience: float | None = None,
    beside: Callable[[Path], None] = lambda work: None,
) -> Trial:
    """Run a job in a memory group under `limit` bytes; `patience` is in seconds since its first epoch began."""
    found = jobs.run(
        function, job, scratch, make_group=lambda: new_group(limit, tmpfs), patience=patience, beside=beside
    )
    ended, epochs = found.ended, found.epochs
    wall = ended.seconds - ended.begun
    if found.finished:
        seconds = found.result["seconds"]
    else:
        seconds = wall if found.how == "stopped" else epochs[-1]["at"] if epochs else ended.seconds
    return Trial(
        who=job.who,
        limit=limit,
        enforced=ended.enforced,
        outcome=found.how,
        seconds=seconds,
        rows=sum(epoch["rows_out"] for epoch in epochs),
        peak_bytes=ended.peak_bytes,
        peak_held=ended.peak_held,
        oom_kills=ended.oom_kills,
        reclaims=ended.reclaims,
        failure=found.failure,
        config=job.config,
        epochs=epochs,
        looks=ended.looks[:: max(len(ended.looks) // LOOKS_KEPT, 1)],
        read_bytes=ended.read_bytes,
        written_bytes=ended.written_bytes,
        wall=wall,
    )


def _in_memory() -> Path:
    if not SHARED_MEMORY.is_dir():
        raise ConfigError("BENCH_RUN", f"{SHARED_MEMORY} is not there", "leave plait-memory out with --who")
    return Path(tempfile.mkdtemp(prefix="plait-bench-", dir=SHARED_MEMORY))
