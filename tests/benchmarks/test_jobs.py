"""Jobs: functions in processes of their own, with results, failures, limits and progress."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks import jobs
from benchmarks.memory_group import Watched


@dataclass(frozen=True)
class Wish:
    """A job for these tests."""

    who: str
    numbers: list[int] = field(default_factory=list)
    mib: int = 0


@dataclass
class Sum:
    total: int
    pid: int
    folder: str


def add(job: Wish, work: Path) -> Sum:
    return Sum(sum(job.numbers), os.getpid(), str(work))


def fail(job: Wish, work: Path) -> None:
    raise ValueError(f"{job.who} has no numbers")


def hold(job: Wish, work: Path) -> None:
    held = bytearray(job.mib << 20)
    time.sleep(30 + len(held) * 0)


def dawdle(job: Wish, work: Path) -> None:
    progress = jobs.Progress(work)
    progress.tell({"epoch": 0})
    time.sleep(60)


def import_like_a_worker(job: Wish, work: Path) -> list[str]:
    code = "import benchmarks.jobs, plait; print(benchmarks.__path__[0]); print(plait.__path__[0])"
    return subprocess.check_output([sys.executable, "-c", code], text=True, cwd="/").split()


def test_a_job_runs_in_a_process_and_a_folder_of_its_own(tmp_path: Path) -> None:
    outcome = jobs.run(add, Wish("one", [1, 2]), tmp_path / "scratch")
    assert outcome.finished
    assert (outcome.result["total"], outcome.failure) == (3, None)
    assert outcome.result["pid"] != os.getpid()
    assert Path(outcome.result["folder"]).name.startswith("one-")
    assert list((tmp_path / "scratch").iterdir()) == [], "its files are gone"
    assert outcome.ended.peak_bytes > 0


def test_what_a_job_starts_can_import_plait_and_the_benchmarks(tmp_path: Path) -> None:
    outcome = jobs.run(import_like_a_worker, Wish("one"), tmp_path)
    assert outcome.result == [str(jobs.ROOT / "benchmarks"), str(jobs.ROOT / "src" / "plait")]


def test_a_job_that_fails_says_why(tmp_path: Path) -> None:
    outcome = jobs.run(fail, Wish("two"), tmp_path)
    assert (outcome.how, outcome.result) == ("failed", None)
    assert outcome.failure is not None
    assert "ValueError: two has no numbers" in outcome.failure


def test_a_job_above_its_memory_limit_is_killed(tmp_path: Path) -> None:
    outcome = jobs.run(hold, Wish("three", mib=400), tmp_path, make_group=lambda: Watched(200 << 20))
    assert outcome.how == "killed"
    assert outcome.ended.seconds < 20


def test_a_job_that_takes_too_long_is_stopped_and_has_told_how_far_it_came(tmp_path: Path) -> None:
    seen: list[list[dict[str, Any]]] = []
    outcome = jobs.run(
        dawdle, Wish("four"), tmp_path, patience=0.5, beside=lambda work: seen.append(jobs.read_progress(work))
    )
    assert (outcome.how, outcome.epochs) == ("stopped", [{"epoch": 0}])
    assert [{"epoch": 0}] in seen, "and could be read meanwhile"


def test_sigterm_ends_a_running_job_too_and_leaves_nothing(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    script = (
        "import sys; from pathlib import Path; from benchmarks import jobs; from tests.benchmarks import test_jobs;"
        "jobs.exit_on_sigterm(); jobs.run(test_jobs.dawdle, test_jobs.Wish('five'), Path(sys.argv[1]))"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(jobs.ROOT / "src"), str(jobs.ROOT)))}
    with subprocess.Popen([sys.executable, "-c", script, str(scratch)], env=environment) as process:
        deadline = time.monotonic() + 60
        while not list(scratch.glob(f"*/{jobs.PROGRESS}")):
            assert time.monotonic() < deadline, "the job has begun"
            time.sleep(0.1)
        (child,) = psutil.Process(process.pid).children()
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 128 + signal.SIGTERM
    assert not child.is_running()
    assert list(scratch.iterdir()) == []


def test_an_epoch_is_told_once(tmp_path: Path) -> None:
    progress = jobs.Progress(tmp_path)
    assert [progress.tell({"epoch": number}) for number in (0, 1, 1, 0, 2)] == [True, True, False, False, True]
    progress.close()
    assert jobs.read_progress(tmp_path) == [{"epoch": 0}, {"epoch": 1}, {"epoch": 2}]


def test_a_line_that_is_being_written_is_not_read(tmp_path: Path) -> None:
    assert jobs.read_progress(tmp_path) == []
    (tmp_path / jobs.PROGRESS).write_text('{"epoch": 0}\n{"epo')
    assert jobs.read_progress(tmp_path) == [{"epoch": 0}]


def test_contestants_take_turns() -> None:
    order: list[str] = []
    jobs.by_turns(("a", "b"), 2, order.append)
    assert order == ["a", "b", "a", "b"]
