"""Runs jobs: functions of this package, each called in a process of its own, whose memory and time can be limited.

`run` starts `python -m benchmarks.jobs FILE`.  That process calls the function with the job and a folder of its own,
and writes what it returns to `result.json`.  A job may tell each epoch as it ends (`Progress`), so that one that is
killed has told how far it came.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar, get_type_hints

from benchmarks.memory_group import MemoryGroup, Watched
from benchmarks.process_tree import Ended, run_tree

ROOT = Path(__file__).resolve().parents[1]
PROGRESS, RESULT = "progress.jsonl", "result.json"


class Job(Protocol):
    """A frozen dataclass of plain values, which can be written as JSON; `who` is the contestant."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def who(self) -> str:
        """The contestant that runs."""
        ...


K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
J = TypeVar("J", bound=Job)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended: `how` is finished, killed (above its memory limit), stopped (too slow) or failed.

    `result` is what the function returned, None unless it finished; `epochs` are those that it told.
    """

    how: str
    result: Any
    failure: str | None
    epochs: list[dict[str, Any]]
    ended: Ended

    @property
    def finished(self) -> bool:
        """Whether the job came to its end."""
        return self.how == "finished"


def run(
    function: Callable[[J, Path], Any],
    job: J,
    scratch: Path,
    *,
    make_group: Callable[[], MemoryGroup] = Watched,
    patience: float | None = None,
    beside: Callable[[Path], None] = lambda work: None,
) -> Outcome:
    """Call `function(job, work)` in a fresh process; its folder `work`, made in `scratch`, is gone afterwards.

    Its memory is read by summing up PSS, unless `make_group` makes a group that does more.  It is stopped after
    `patience` seconds, counted from when its progress is opened.  `beside` is called with its folder while it runs.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f"{job.who}-", dir=scratch))
    try:
        call = {"function": f"{function.__module__}:{function.__name__}", "job": dataclasses.asdict(job)}
        (work / "job.json").write_text(json.dumps(call))
        ended = run_tree(
            [sys.executable, "-m", "benchmarks.jobs", str(work / "job.json")],
            make_group(),
            work / "log.txt",
            env=_environment(few_arenas=make_group is not Watched),
            cwd=work,
            patience=patience,
            begins=work / PROGRESS,
            beside=lambda: beside(work),
        )
        return _outcome(work, ended)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _environment(*, few_arenas: bool) -> dict[str, str]:
    """Spark's workers inherit the path, so that they can import Plait and this package too."""
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH")]))
    # Many threads' arenas would hold memory that nobody uses.
    more = {"MALLOC_ARENA_MAX": "2"} if few_arenas else {}
    return os.environ | {"PYSPARK_PYTHON": sys.executable, "PYTHONPATH": path} | more


def _outcome(work: Path, ended: Ended) -> Outcome:
    file = work / RESULT
    if ended.code == 0 and file.exists():
        return Outcome("finished", json.loads(file.read_text()), None, read_progress(work), ended)
    how = "killed" if ended.over_limit else "stopped" if ended.late else "failed"
    return Outcome(how, None, last_words(work / "log.txt", ended.code), read_progress(work), ended)


def by_turns(contestants: Sequence[K], rounds: int, run: Callable[[K], T]) -> dict[K, list[T]]:
    """All contestants once per round, so that whatever disturbs the machine for a while disturbs all of them.

    >>> by_turns(["a", "b"], 2, str.upper)
    {'a': ['A', 'A'], 'b': ['B', 'B']}
    """
    found: dict[K, list[T]] = {who: [] for who in contestants}
    for _ in range(rounds):
        for who in contestants:
            found[who].append(run(who))
    return found


def median_run(runs: Sequence[T], seconds: Callable[[T], float]) -> T:
    """The run with the median time; of two in the middle the faster one.

    >>> median_run([3.0, 1.0, 9.0, 2.0], lambda seconds: seconds)
    2.0
    """
    middle = statistics.median_low([seconds(run) for run in runs])
    return next(run for run in runs if seconds(run) == middle)


class Progress:
    """The file in which a job tells its epochs, each once, as they end."""

    def __init__(self, work: Path) -> None:
        self._file = (work / PROGRESS).open("a", buffering=1)
        self._last = -1

    def tell(self, epoch: dict[str, Any]) -> bool:
        """Write one epoch; False if it had been told before."""
        if epoch["epoch"] <= self._last:
            return False
        self._last = epoch["epoch"]
        self._file.write(json.dumps(epoch, default=str) + "\n")
        return True

    def close(self) -> None:
        """Close the file; every line is written already."""
        self._file.close()


def read_progress(work: Path) -> list[dict[str, Any]]:
    """The epochs that a job has told so far; a line that is being written does not count yet."""
    file = work / PROGRESS
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def last_words(log: Path, code: int) -> str:
    """The last lines that a process printed, for a message."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"exit code {code}: " + " | ".join(lines[-3:])[-600:]


def exit_on_sigterm() -> None:
    """Let SIGTERM raise SystemExit: a running job's processes are ended then, its memory group and folder removed."""
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))


def main(file: Path) -> None:
    """Call the function that `file` names, with its job, and write what it returns beside it."""
    call = json.loads(file.read_text())
    module, _, name = call["function"].partition(":")
    function = getattr(importlib.import_module(module), name)
    job = get_type_hints(function)["job"](**call["job"])
    result = function(job, file.parent)
    plain = dataclasses.asdict(result) if dataclasses.is_dataclass(result) else result  # type: ignore[arg-type]
    # The name appears when the file is complete.
    (file.parent / f"{RESULT}.making").write_text(json.dumps(plain, default=str))
    (file.parent / f"{RESULT}.making").rename(file.parent / RESULT)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
