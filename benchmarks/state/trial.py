"""One run of one contestant under one memory limit, from its folder to what it told before it ended."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.jobs import SOURCE, last_words
from benchmarks.process_tree import Look, run_limited
from benchmarks.state.contestants import StateJob
from plait.errors import ConfigError

SHARED_MEMORY = Path("/dev/shm")
LOOKS_KEPT = 600


@dataclass(slots=True)
class Trial:
    """`outcome` is finished, killed (above its limit), stopped (too slow), or failed; `epochs` are those that ended."""

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
    """From and to block devices, from the start of the process on."""

    @property
    def finished(self) -> bool:
        """Whether it came to its end."""
        return self.outcome == "finished"

    @property
    def state_bytes(self) -> int:
        """State after its last epoch."""
        return int(self.epochs[-1].get("state_bytes", 0)) if self.epochs else 0

    def said(self) -> str:
        """In one line."""
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
    """Run it; its files are gone afterwards.  `beside` is called while it runs, with the job's folder.

    `patience` is in seconds of the query, without the start of the session and the warm-up.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f"state-{job.who}-", dir=scratch))
    tmpfs = _in_memory() if job.who == "plait-memory" else None
    try:
        state = str(tmpfs) if tmpfs else job.state_dir
        return _run_in(dataclasses.replace(job, work=str(work), state_dir=state), work, tmpfs, limit, patience, beside)
    finally:
        for folder in (work, tmpfs):
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)


def _run_in(
    job: StateJob,
    work: Path,
    tmpfs: Path | None,
    limit: int | None,
    patience: float | None,
    beside: Callable[[Path], None],
) -> Trial:
    (work / "job.json").write_text(json.dumps(dataclasses.asdict(job)))
    path = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH")]))
    # Many threads' arenas would hold memory that nobody uses.
    env = os.environ | {"PYSPARK_PYTHON": sys.executable, "PYTHONPATH": path, "MALLOC_ARENA_MAX": "2"}
    ended = run_limited(
        [sys.executable, "-m", "benchmarks.state.contestants", str(work / "job.json")],
        limit,
        work / "log.txt",
        env=env,
        cwd=work,
        patience=patience,
        begins=work / "progress.jsonl",
        tmpfs=tmpfs,
        beside=lambda: beside(work),
    )
    epochs = told(work)
    written = work / "result.json"
    finished = ended.code == 0 and written.exists()
    outcome = "finished" if finished else "killed" if ended.over_limit else "stopped" if ended.late else "failed"
    seconds = json.loads(written.read_text())["seconds"] if finished else epochs[-1]["at"] if epochs else ended.seconds
    if outcome == "stopped":
        seconds = ended.seconds - ended.begun
    return Trial(
        who=job.who,
        limit=limit,
        enforced=ended.enforced,
        outcome=outcome,
        seconds=seconds,
        rows=sum(epoch["rows_out"] for epoch in epochs),
        peak_bytes=ended.peak_bytes,
        peak_held=ended.peak_held,
        oom_kills=ended.oom_kills,
        reclaims=ended.reclaims,
        failure=None if finished else last_words(work / "log.txt", ended.code),
        config=job.config,
        epochs=epochs,
        looks=ended.looks[:: max(len(ended.looks) // LOOKS_KEPT, 1)],
        read_bytes=ended.read_bytes,
        written_bytes=ended.written_bytes,
    )


def told(work: Path) -> list[dict[str, Any]]:
    """The epochs a job has told so far; a line that is being written does not count yet."""
    file = work / "progress.jsonl"
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def _in_memory() -> Path:
    if not SHARED_MEMORY.is_dir():
        raise ConfigError("BENCH_RUN", f"{SHARED_MEMORY} is not there", "leave plait-memory out with --who")
    return Path(tempfile.mkdtemp(prefix="plait-bench-", dir=SHARED_MEMORY))
