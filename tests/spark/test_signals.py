"""Real signals to real processes: a run stops in an orderly way, or goes on, and loses and repeats nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytestmark = pytest.mark.spark

EPOCHS = 7
PATIENCE = 300
"""Seconds that a process may take on a busy machine."""
ROWS = 50
PIPELINE = """
[engine]
checkpoint = "checkpoint"

[spark]
master = "local[2,3]"
spark.ui.enabled = false

[streams.a]
format = "parquet"
path = "a"
schema = "k BIGINT, v BIGINT"
options = { maxFilesPerTrigger = 1 }

[streams.b]
format = "parquet"
path = "b"
schema = "k BIGINT, w BIGINT"
options = { maxFilesPerTrigger = 1 }

[queries.q]
sql = "SELECT a.v, b.w FROM a JOIN b ON a.k = b.k"

[queries.q.sink]
type = "parquet"
path = "out"
"""


class Piped:
    """`plait run` in a process group of its own; what it prints is read while it runs."""

    def __init__(self, home: Path) -> None:
        command = [sys.executable, "-c", "from plait.serve.cli import main; main()", "run", str(home / "pipeline.toml")]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        self.out: list[str] = []
        self.err: list[str] = []
        pipes = (self.process.stdout, self.out), (self.process.stderr, self.err)
        self.readers = [threading.Thread(target=self._read, args=pipe, daemon=True) for pipe in pipes]
        for reader in self.readers:
            reader.start()

    @staticmethod
    def _read(pipe: Iterator[str], into: list[str]) -> None:
        for line in pipe:
            into.append(line)

    def until(self, text: str, seconds: float = PATIENCE) -> None:
        """Waits for a line that begins so."""
        end = time.monotonic() + seconds
        while not any(line.startswith(text) for line in self.out):
            assert time.monotonic() < end, self.told()
            assert self.process.poll() is None, self.told()
            time.sleep(0.02)

    def ended(self, seconds: float = PATIENCE) -> int:
        """Its exit code."""
        code = self.process.wait(seconds)
        for reader in self.readers:
            reader.join(10)
        return code

    def __enter__(self) -> Piped:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.ended()
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()

    def told(self) -> str:
        return "".join([*self.out, "--- stderr\n", *self.err])

    def epochs(self) -> list[int]:
        return [int(line.split()[1].rstrip(":")) for line in self.out if line.startswith("epoch ")]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "pipeline.toml").write_text(PIPELINE)
    for epoch in range(EPOCHS):
        numbers = list(range(epoch * ROWS, (epoch + 1) * ROWS))
        for stream, value, sign in (("a", "v", 1), ("b", "w", -1)):
            file = tmp_path / stream / f"{epoch:03d}.parquet"
            file.parent.mkdir(exist_ok=True)
            table = pa.table({"k": [n % 37 for n in numbers], value: [sign * n for n in numbers]})
            pq.write_table(table, file)
            os.utime(file, (1_600_000_000 + epoch, 1_600_000_000 + epoch))
    return tmp_path


@pytest.fixture
def running(home: Path) -> Iterator[Piped]:
    """A run that has done some epochs, and has more to do."""
    with Piped(home) as run:
        run.until("epoch 1:")
        yield run


def rows(home: Path) -> list[tuple[int, int]]:
    files = [f for f in (home / "out").glob("*.parquet") if not f.name.startswith((".", "_"))]
    return sorted((row["v"], row["w"]) for f in files for row in pq.ParquetFile(f).read().to_pylist())


def expected() -> list[tuple[int, int]]:
    numbers = range(EPOCHS * ROWS)
    return sorted((v, -w) for v in numbers for w in numbers if v % 37 == w % 37)


def continues(home: Path, done: list[int]) -> None:
    """The next run does the epochs that are left, and then every row is there, once."""
    with Piped(home) as again:
        assert again.ended() == 0, again.told()
    assert again.epochs() == list(range(len(done), EPOCHS)), again.told()
    assert rows(home) == expected()


def committed(home: Path) -> list[int]:
    return sorted(int(f.stem) for f in (home / "checkpoint" / "log").glob("*.json") if "-" not in f.stem)


@pytest.mark.parametrize(
    ("number", "whole_group"),
    [
        (signal.SIGTERM, False),
        pytest.param(signal.SIGINT, True, marks=pytest.mark.soak),
        pytest.param(signal.SIGINT, False, marks=pytest.mark.soak),
    ],
)
def test_a_signal_stops_a_run_after_the_running_epoch_and_the_next_continues(
    home: Path, running: Piped, number: signal.Signals, whole_group: bool
) -> None:
    # A terminal sends Ctrl-C to all processes of the command, `kill` to one.
    (os.killpg if whole_group else os.kill)(running.process.pid, number)
    assert running.ended() == 128 + number, running.told()
    assert any(line.startswith("Stopped; run again") for line in running.out), running.told()
    assert "Traceback" not in running.told()
    assert "Exception" not in running.told()
    done = committed(home)
    assert 2 <= len(done) < EPOCHS
    # Spark may not have noted the last epoch: it is delivered, and not done again.
    noted = sorted(int(f.name) for f in (home / "checkpoint" / "spark" / "commits").iterdir() if f.name.isdigit())
    assert noted in (done, done[:-1])
    continues(home, done)


@pytest.mark.soak
def test_a_driver_that_is_halted_for_a_while_goes_on(home: Path, running: Piped) -> None:
    os.kill(running.process.pid, signal.SIGSTOP)
    time.sleep(10)
    assert running.process.poll() is None
    os.kill(running.process.pid, signal.SIGCONT)
    assert running.ended() == 0, running.told()
    assert "Traceback" not in running.told()
    assert running.epochs() == list(range(EPOCHS))
    assert rows(home) == expected()


def command(process: psutil.Process) -> list[str]:
    """How it was started; nothing of one that has ended."""
    try:
        found: list[str] = process.cmdline()
    except psutil.Error:
        return []
    return found


def test_a_worker_that_dies_of_a_bad_pointer_is_replaced(home: Path, running: Piped) -> None:
    tree = psutil.Process(running.process.pid).children(recursive=True)
    daemons = [p for p in tree if "plait.runtime.spark.daemon" in command(p)]
    # The first of them makes the others.
    workers = [p for p in daemons if p.ppid() in {d.pid for d in daemons}]
    assert workers, [command(p) for p in tree]
    for worker in workers:
        os.kill(worker.pid, signal.SIGSEGV)
    assert running.ended() == 0, running.told()
    assert running.epochs() == list(range(EPOCHS))
    assert rows(home) == expected()


@pytest.mark.soak
def test_a_group_that_is_told_to_end_loses_spark_too_and_the_next_run_continues(home: Path, running: Piped) -> None:
    # systemd tells all processes of a service: Java ends at once, in the middle of an epoch.
    os.killpg(running.process.pid, signal.SIGTERM)
    assert running.ended() in (2, 128 + signal.SIGTERM), running.told()
    with Piped(home) as again:
        assert again.ended() == 0, again.told()
    assert rows(home) == expected()
