"""`kill -9` at every step of the commit, of Python workers and of the JVM: the result stays exactly the oracle's.

`crash_driver.py` runs in a process of its own, again and again on one checkpoint, with the same faults in its
environment; each of them kills once.  So every start meets what the kill before it left behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.spark.crash_driver import QUERIES, STREAMS

pytestmark = pytest.mark.spark

DRIVER = Path(__file__).with_name("crash_driver.py")
EPOCHS = 10
ROWS = 30
PATIENCE = 600
"""Seconds after which a driver that neither ends nor dies is given up: only to end a test that hangs."""

WORKERS = ("task.append@0", "task.probe@1", "task.end@7", "task.merge@8", "task.hop@9")
"""Deaths of Python workers.  Spark tries the task again, in the same run."""


@dataclass(frozen=True)
class Home:
    """The directory one driver after the other works in."""

    path: Path

    def manifests(self) -> list[int]:
        return sorted(int(p.stem) for p in (self.path / "checkpoint" / "log").glob("*.json"))

    def receipt(self, epoch: int) -> list[str]:
        path = self.path / "checkpoint" / "receipts" / f"{epoch:012d}.json"
        return json.loads(path.read_bytes().partition(b"\n")[2])["queries"] if path.exists() else []

    def calls(self) -> list[dict[str, Any]]:
        path = self.path / "calls.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def delivered(self, epoch: int) -> list[str]:
        return sorted(p.name for p in (self.path / "chain").glob(f"*-{epoch:012d}-*"))

    def spark_committed(self, epoch: int) -> bool:
        return (self.path / "checkpoint" / "spark" / "commits" / str(epoch)).exists()

    def fired(self) -> set[str]:
        return {p.name for p in (self.path / "once").iterdir()}

    def report(self) -> dict[str, Any]:
        return json.loads((self.path / "report.json").read_text())


def _tasks_wrote_but_nothing_is_committed(home: Home) -> bool:
    return home.manifests() == [] and any((home.path / "checkpoint" / "state").rglob("*.arrow"))


def _the_epoch_is_not_committed(home: Home) -> bool:
    return home.manifests() == [0] and not home.delivered(1)


def _committed_but_no_sink_was_called(home: Home) -> bool:
    return 2 in home.manifests() and not home.receipt(2) and all(c["epoch"] != 2 for c in home.calls())


def _a_sink_was_called_without_receipt(home: Home) -> bool:
    return home.calls()[-1]["epoch"] == 3 and not home.receipt(3)


def _one_sink_has_its_receipt_and_the_other_half_its_files(home: Home) -> bool:
    return home.receipt(4) == ["star"] and home.delivered(4) == ["epoch-000000000004-0000.parquet"]


def _all_receipts_but_not_spark_s_commit(home: Home) -> bool:
    return home.receipt(5) == ["chain", "star"] and not home.spark_committed(5)


def _a_draft_beside_no_file(home: Home) -> bool:
    return [name.startswith(".draft-") for name in home.delivered(6)] == [True]


def _the_run_failed_and_the_driver_lives(home: Home) -> bool:
    _, code, cause, remedy = home.report()["error"]
    return code == "SPARK_LOST" and bool(cause and remedy) and home.receipt(7) == ["chain", "star"]


def _partial_rows_are_written_but_not_committed(home: Home) -> bool:
    return home.manifests()[-1] == 7 and any((home.path / "checkpoint" / "results").rglob("*.parquet"))


DRIVERS: dict[str, Callable[[Home], bool]] = {
    "commit.1@0": _tasks_wrote_but_nothing_is_committed,
    "commit.2@1": _the_epoch_is_not_committed,
    "commit.3@2": _committed_but_no_sink_was_called,
    "commit.4@3": _a_sink_was_called_without_receipt,
    "sink.file@4": _one_sink_has_its_receipt_and_the_other_half_its_files,
    "commit.5@5": _all_receipts_but_not_spark_s_commit,
    "sink.draft@6": _a_draft_beside_no_file,
    "jvm@7": _the_run_failed_and_the_driver_lives,
    "finish@8": _partial_rows_are_written_but_not_committed,
    "results.merge@8": _partial_rows_are_written_but_not_committed,
}
"""Deaths of the driver, one per start, and what each must leave behind."""

SOME = ("commit.2@1", "commit.4@3")
"""Before the commit, and between a sink and its receipt.  The others take four times as long: they are a soak test."""


def _sources(home: Path) -> None:
    rng = np.random.default_rng(5)
    for stream in STREAMS:
        folder = home / "source" / stream
        folder.mkdir(parents=True)
        for epoch in range(EPOCHS):
            keys = {name: rng.integers(0, 60, ROWS) for name in ("k", "m")}
            path = folder / f"{epoch:03d}.parquet"
            pq.write_table(pa.table({**keys, "v": np.arange(ROWS) + epoch * ROWS}), path)
            # Spark takes files in the order of their times.
            os.utime(path, (1_600_000_000 + epoch, 1_600_000_000 + epoch))


def _session(leader: int) -> Iterator[int]:
    """The living processes of a session: the driver, its JVM, its Python workers."""
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdigit() and os.getsid(int(name)) == leader:
                with open(f"/proc/{name}/stat") as stat:
                    if stat.read().rpartition(")")[2].split()[0] != "Z":
                        yield int(name)


def _start(home: Path, faults: str) -> tuple[int, str]:
    """Runs the driver to its end or death; then ends whatever it left running.  Its return code, and what it said."""
    environment = {**os.environ, "PLAIT_FAULT": faults, "PLAIT_FAULT_ONCE": f"{home}/once/"}
    with open(home / "output", "w+b") as output:
        driver = subprocess.Popen(
            [sys.executable, str(DRIVER), str(home)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            code = driver.wait(PATIENCE)
        finally:
            while left := list(_session(driver.pid)):
                for process in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process, signal.SIGKILL)
                time.sleep(0.02)
            driver.wait()
        output.seek(0)
        return code, output.read().decode(errors="replace")[-5000:]


def _oracle(home: Path, query: str) -> Counter[tuple[Any, ...]]:
    with duckdb.connect() as batch:
        for stream in STREAMS:
            batch.execute(f"CREATE VIEW {stream} AS SELECT * FROM '{home}/source/{stream}/*.parquet'")
        return Counter(batch.execute(QUERIES[query]).fetchall())


def _rows(files: list[Path]) -> Counter[tuple[Any, ...]]:
    found: Counter[tuple[Any, ...]] = Counter()
    for file in files:
        found.update(tuple(row.values()) for row in pq.ParquetFile(file).read().to_pylist())
    return found


@pytest.mark.parametrize("points", [SOME, pytest.param(tuple(DRIVERS), marks=pytest.mark.soak)], ids=["some", "all"])
def test_kill_9_anywhere_and_every_result_is_still_there_once(tmp_path: Path, points: tuple[str, ...]) -> None:
    for folder in ("star", "once"):
        (tmp_path / folder).mkdir()
    _sources(tmp_path)
    home = Home(tmp_path)
    faults = ",".join((*WORKERS, *points))

    for point in points:
        left_behind = DRIVERS[point]
        code, said = _start(tmp_path, faults)
        assert code == (3 if point.startswith("jvm") else -signal.SIGKILL), f"at {point}: {code}\n{said}"
        assert point in home.fired(), f"{point} was not where the driver died\n{said}"
        assert left_behind(home), point
    committed = home.manifests()[-1]
    code, said = _start(tmp_path, faults)
    assert code == 0, said

    # Every fault struck, and struck once; the last run did what was left.
    assert home.fired() == {*WORKERS, *points}
    assert home.manifests()[-1] == EPOCHS - 1
    report = home.report()
    assert report["epochs"] == list(range(committed + 1, EPOCHS))

    # Every sink has exactly the oracle's rows.
    assert _rows(sorted((tmp_path / "star").glob("*.parquet"))) == _oracle(tmp_path, "star")
    assert _rows(sorted((tmp_path / "chain").glob("[!.]*.parquet"))) == _oracle(tmp_path, "chain")
    assert Counter((text,) for text in report["told"]) == _oracle(tmp_path, "told")
    assert Counter(map(tuple, report["grouped"])) == _oracle(tmp_path, "grouped")

    # A function is called for every epoch, in order, again only where it had no receipt, and then with the same rows.
    calls = home.calls()
    numbers = [call["epoch"] for call in calls]
    assert numbers == sorted(numbers)
    assert {n: numbers.count(n) for n in range(EPOCHS)} == {n: 2 if n == 3 else 1 for n in range(EPOCHS)}
    assert len({(call["epoch"], call["digest"]) for call in calls}) == EPOCHS

    # What killed tasks wrote was never part of anything, and is gone.
    state = Path(report["state_dir"])
    assert sorted(str(p.relative_to(state)) for p in state.rglob("*.arrow")) == report["live"]
    identity = json.loads((tmp_path / "checkpoint" / "plait.json").read_bytes())["id"]
    assert not list(Path(tempfile.gettempdir()).glob(f"plait-*-{identity}-*"))
