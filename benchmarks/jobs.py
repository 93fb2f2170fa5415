"""Runs jobs, each in a process of its own, and watches the memory of that process and all it starts.

Memory is the sum of PSS (shared pages, such as mapped files, are counted once) where the system tells it, else of RSS;
it is sampled, so a peak shorter than the interval can be missed.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.tpcds.contestants import Job, Result

SAMPLE_EVERY_SECONDS = 1.0
ROOT = Path(__file__).resolve().parents[1]
SOURCE = f"{ROOT / 'src'}{os.pathsep}{ROOT}"
"""What the processes have on their path: Plait and this package."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A job's result, or why there is none; the peak memory of its process tree."""

    job: Job
    result: Result | None
    failure: str | None
    peak_bytes: int


def run(job: Job, scratch: Path) -> Outcome:
    """Run one job to its end in a fresh process; its files are gone afterwards."""
    scratch.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f"{job.workload}-{job.who}-", dir=scratch))
    try:
        return _run_in(dataclasses.replace(job, work=str(work)), work)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _run_in(job: Job, work: Path) -> Outcome:
    file, log = work / "job.json", work / "log.txt"
    file.write_text(json.dumps(dataclasses.asdict(job)))
    path = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYSPARK_PYTHON": sys.executable, "PYTHONPATH": path}
    command = [sys.executable, "-m", "benchmarks.tpcds.contestants", str(file)]
    with log.open("wb") as said:
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, env=environment, cwd=work)
        try:
            peak = _watch_memory(process)
        finally:
            end(process)
    written = work / "result.json"
    if process.returncode == 0 and written.exists():
        return Outcome(job, Result(**json.loads(written.read_text())), None, peak)
    return Outcome(job, None, last_words(log, process.returncode), peak)


def _watch_memory(process: subprocess.Popen[bytes]) -> int:
    peak, began = 0, time.monotonic()
    while True:
        try:
            # Short runs are watched closely, long ones are not disturbed.
            process.wait(min(SAMPLE_EVERY_SECONDS, 0.05 + (time.monotonic() - began) / 10))
            return peak
        except subprocess.TimeoutExpired:
            peak = max(peak, tree_bytes(process.pid))


def tree_bytes(pid: int) -> int:
    """Memory of a process and its descendants, now."""
    import psutil

    total = 0
    try:
        tree: list[Any] = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.Error:
        return 0
    for member in tree:
        try:
            info = member.memory_full_info()
            total += getattr(info, "pss", 0) or info.rss
        except psutil.Error:
            continue
    return total


def end(process: subprocess.Popen[bytes]) -> None:
    """After an interrupt, end what was started and nothing else."""
    if process.poll() is not None:
        return
    import psutil

    for member in psutil.Process(process.pid).children(recursive=True):
        try:
            member.kill()
        except psutil.Error:
            continue
    process.kill()
    process.wait()


def last_words(log: Path, code: int) -> str:
    """The end of what a process said, for a message."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"exit code {code}: " + " | ".join(lines[-3:])[-600:]


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    import importlib.metadata
    import platform

    import psutil

    names = ("pyspark", "duckdb", "pyarrow", "numpy", "numba")
    return {
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in names},
        "when": time.strftime("%Y-%m-%d"),
    }
