"""Many epochs: kept rows stay exactly right while their files are merged, and the checkpoint does not grow."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plait.config import Config
from plait.runtime.answers.live_results import LiveResults
from plait.runtime.driver import result_merge
from plait.runtime.driver.result_merge import FAN_IN, FULL_BYTES, MOST_BYTES, choose
from plait.runtime.driver.sinks import Keep, Memory, Noop
from plait.runtime.task.file_sets import query_table
from plait.share.planner import Planner
from plait.state.files.storage import LocalFiles
from plait.state.log.inspect import Inspection
from plait.state.log.manifest import ManifestLog, ResultFile, manifest_name
from plait.testing import LocalEngine
from tests.share.streams import joined, rows, streams
from tests.state.test_manifest import manifest, of_format_3

QUERIES = {"pair": joined("a.k = b.k"), "other": joined("a.m = b.m"), "again": joined("a.k = b.k")}
"""The last one shares the files of the first."""
CONFIG = Config(sync=False, tasks=1, replan_epochs=0, snapshot_every=4, gc_grace_seconds=0)
PLAN = Planner(dict(QUERIES), streams("ab", ttl_us=1), CONFIG).plan
"""The TTL lets a row meet those of its own epoch only: the state stays small."""


def arrivals(number: int) -> pa.Table:
    """Ten rows of an epoch, with ids of their own; every seventh epoch has none."""
    if number % 7 == 3:
        return rows()
    table = rows(*((i % 4, i % 3 + number % 2) for i in range(10)))
    ids = pa.array([number * 10 + i for i in range(10)], pa.int64())
    return table.set_column(0, "id", ids)


def expected(number: int) -> dict[str, Counter[tuple[int, int]]]:
    """What an epoch adds to each query."""
    new = arrivals(number).to_pylist()
    return {
        query: Counter((a["id"], b["id"]) for a in new for b in new if a[key] == b[key])
        for query, key in (("pair", "k"), ("other", "m"), ("again", "k"))
    }


class Ticking:
    """Every epoch is a second after the one before, also after a restart."""

    def __init__(self, begin: int) -> None:
        self.now = 1_600_000_000_000_000 + begin * 1_000_000

    def __call__(self) -> int:
        self.now += 1_000_000
        return self.now


def started(directory: Path, **changes: Any) -> LocalEngine:
    settings = {"snapshot_every": CONFIG.snapshot_every, "gc_grace_seconds": 0.0, **changes}
    config = Config(sync=False, tasks=1, replan_epochs=0, **settings)
    last = ManifestLog(LocalFiles(str(directory), False)).last()
    return LocalEngine(directory, PLAN, config, clock=Ticking(-1 if last is None else last))  # type: ignore[arg-type]


def step(engine: LocalEngine) -> None:
    number = engine.live.epoch + 1
    engine.run({"a": arrivals(number), "b": arrivals(number)})


def kept(directory: Path) -> dict[str, Counter[tuple[int, int]]]:
    """The rows in force, as somebody sees them who only has the files."""
    log = ManifestLog(LocalFiles(str(directory), False))
    found: dict[str, Counter[tuple[int, int]]] = {query: Counter() for query in QUERIES}
    for query, files in log.results().items():
        for file in files:
            table = query_table(str(directory / "results" / file.path), file.bit)
            assert table.num_rows == file.rows
            found[query].update(zip(*(table.column(c).to_pylist() for c in ("a_id", "b_id")), strict=True))
    return found


def check(directory: Path, epochs: int) -> None:
    """Kept rows are those of all epochs; what is in memory and what is in the log agree."""
    total: dict[str, Counter[tuple[int, int]]] = {query: Counter() for query in QUERIES}
    for number in range(epochs):
        for query, found in expected(number).items():
            total[query] += found
    assert kept(directory) == total


def count(directory: Path) -> dict[str, int]:
    folders = ("log", "receipts", "results", "state", "fence")
    return {f: sum(len(names) for _, _, names in os.walk(directory / f)) for f in folders}


def bound(epochs: int) -> dict[str, int]:
    """Files that there may be: fewer than FAN_IN per tier, and what a few epochs leave until garbage is collected."""
    tiers, n = 1, epochs
    while n >= FAN_IN:
        tiers, n = tiers + 1, n // FAN_IN
    waiting = 3 * CONFIG.snapshot_every
    results = len(QUERIES) * ((FAN_IN + 1) * tiers + 2 * waiting)
    return {"log": waiting, "receipts": 0, "results": results, "state": 80, "fence": 12}


# ---------------------------------------------------------------- what is merged


def small(*tiers: int, size: int = 1000, **more: Any) -> list[ResultFile]:
    return [ResultFile("q", f"{i}", 1, size, "", tier=tier, passing=False, **more) for i, tier in enumerate(tiers)]


def test_the_lowest_tier_that_has_enough_small_files_is_merged() -> None:
    assert choose([]) == []
    assert choose(small(*[0] * (FAN_IN - 1), *[1] * (FAN_IN - 1))) == []
    both = small(*[0] * FAN_IN, *[1] * FAN_IN)
    assert choose(both) == both[:FAN_IN]
    assert choose(both[1:]) == both[FAN_IN:]
    assert choose(both[FAN_IN:][::-1]) == both[FAN_IN:][::-1]


def test_large_files_and_those_of_others_are_left_alone() -> None:
    assert choose(small(*[0] * 20, size=FULL_BYTES)) == []
    assert choose(small(*[0] * 20, whole=True)) == []
    assert choose(small(*[0] * 20, grouped=True)) == []
    chosen = choose(small(*[0] * 40, size=FULL_BYTES - 1))
    assert FAN_IN <= len(chosen) < 40
    assert sum(file.bytes for file in chosen) <= MOST_BYTES


@settings(deadline=None, derandomize=True, database=None, max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 10 << 20)), max_size=400))
def test_after_any_epochs_there_are_few_small_files(epochs: list[tuple[int, int]]) -> None:
    """Of a model: each epoch adds some files of some size, and one merge is done."""
    live: list[ResultFile] = []
    for number, (new, size) in enumerate(epochs):
        if chosen := choose(live):
            assert len(chosen) >= 2
            total = sum(file.bytes for file in chosen)
            assert total <= MOST_BYTES
            live = [file for file in live if file not in chosen]
            live.append(ResultFile("q", f"m{number}", 1, total, "", tier=chosen[0].tier + 1, passing=False))
        live += [ResultFile("q", f"{number}/{i}", 1, size, "", passing=False) for i in range(new)]
    written = sum(new for new, _ in epochs)
    tiers = 1 + max((file.tier for file in live), default=0)
    assert sum(file.bytes < FULL_BYTES for file in live) <= FAN_IN * tiers + 2 * 5
    assert FAN_IN ** (tiers - 1) <= max(1, written)


# ---------------------------------------------------------------- a long life


def test_after_many_epochs_the_checkpoint_has_few_files_and_all_rows(tmp_path: Path) -> None:
    with started(tmp_path) as engine:
        for number in range(400):
            step(engine)
            if number % 50 == 49:
                found, most = count(tmp_path), bound(number)
                assert all(found[folder] <= most[folder] for folder in found), (number, found, most)
        live = LiveResults.read(engine.checkpoint.log)
        assert live.files == engine.results.files
        assert len(engine.driver.now.rows.known) <= len(live.paths()) + 2 * CONFIG.snapshot_every
        assert max(file.tier for files in live.files.values() for file in files) >= 2
    check(tmp_path, 400)


def test_a_row_is_copied_once_per_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copied = 0

    def counted(*args: Any) -> list[ResultFile]:
        nonlocal copied
        made = merged(*args)
        copied += sum(file.rows for file in made)
        return made

    merged = result_merge.merged_files
    monkeypatch.setattr(result_merge, "merged_files", counted)
    with started(tmp_path) as engine:
        for _ in range(150):
            step(engine)
        files = engine.results.files
        total = sum(file.rows for found in files.values() for file in found)
        assert copied == sum(file.rows * file.tier for found in files.values() for file in found)
        assert copied <= 3 * total


def test_files_that_were_merged_can_be_read_until_the_grace_period_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1e9]
    monkeypatch.setattr("time.time", lambda: now[0])
    with started(tmp_path, gc_grace_seconds=100.0) as engine:
        for _ in range(8):
            step(engine)
        old = engine.results.files["pair"]
        for path in (tmp_path / "results").rglob("*.parquet"):
            # They were written long ago, but are replaced only now.
            os.utime(path, (1, 1))
        now[0] += 1000
        for _ in range(8):
            step(engine)
        live = engine.results
        assert not set(old) & set(live.files["pair"])
        assert all((tmp_path / "results" / file.path).exists() for file in old)
        now[0] += 101
        for _ in range(8):
            step(engine)
        assert not any((tmp_path / "results" / file.path).exists() for file in old)
        assert not {file.path for file in old} & live.gone.keys()
    check(tmp_path, 24)


def test_rows_that_nobody_keeps_leave_no_files_at_all(tmp_path: Path) -> None:
    with started(tmp_path) as engine:
        engine.change(sinks={query: Noop() for query in QUERIES})
        for _ in range(100):
            step(engine)
        found = count(tmp_path)
        assert found["results"] == 0
        assert found["log"] <= 2 * CONFIG.snapshot_every


class Sent(Noop):
    """A sink that takes rows and keeps none."""

    reads_rows = True
    delivers = True


def test_rows_that_a_sink_has_taken_go_and_those_of_its_last_epoch_stay_if_it_is_left(tmp_path: Path) -> None:
    with started(tmp_path) as engine:
        engine.change(sinks={"pair": Sent(), "other": Keep(), "again": Keep()})
        for _ in range(20):
            step(engine)
        files = engine.checkpoint.log.results()
        assert len(files["pair"]) == 1
        assert sum(file.rows for file in files["other"]) == sum(sum(expected(n)["other"].values()) for n in range(20))
    # The next sink keeps rows: also those that may not have got to the one before.
    with started(tmp_path) as engine:
        assert engine.checkpoint.log.results() == files
        for _ in range(20):
            step(engine)
    total: Counter[tuple[int, int]] = Counter()
    for number in range(19, 40):
        total += expected(number)["pair"]
    assert kept(tmp_path)["pair"] == total


def test_what_format_3_does_not_say_receipts_and_sinks_tell(tmp_path: Path) -> None:
    files = LocalFiles(str(tmp_path), False)
    files.make_directory("log")
    files.make_directory("receipts")
    log = ManifestLog(files)
    for epoch in range(3):
        found = tuple(ResultFile(query, f"{query}{epoch}", 1, 1, "") for query in ("sent", "kept", "shown"))
        files.put_if_absent(manifest_name(epoch), of_format_3(manifest(epoch, results=found)))
        log.record_receipt(epoch, ["sent", "shown"] if epoch < 2 else ["shown"])
    sinks: dict[str, Any] = {"sent": Sent(), "kept": Keep(), "shown": Memory("shown", lambda: None)}  # type: ignore[arg-type, return-value]

    def in_force() -> dict[str, list[str]]:
        live = LiveResults.read(log, sinks)
        return {query: [file.path for file in found] for query, found in live.files.items()}

    # The last epoch of `sent` has no receipt: it is still to be handed over.
    all_rows = {"kept": ["kept0", "kept1", "kept2"], "shown": ["shown0", "shown1", "shown2"]}
    assert in_force() == {"sent": ["sent2"], **all_rows}
    log.record_receipt(2, ["sent"])
    log.append(manifest(3))
    assert in_force() == all_rows


def test_a_restart_reads_the_newest_snapshot_and_what_follows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with started(tmp_path, gc_grace_seconds=3600.0) as engine:
        for _ in range(90):
            step(engine)
    assert count(tmp_path)["log"] == 90
    read: list[int] = []
    plain = ManifestLog.read

    def counted(log: ManifestLog, epoch: int) -> Any:
        read.append(epoch)
        return plain(log, epoch)

    monkeypatch.setattr(ManifestLog, "read", counted)
    with started(tmp_path) as engine:
        assert engine.live.epoch == 89
        assert set(read) == {88, 89}
        step(engine)
    check(tmp_path, 91)


def test_a_damaged_file_is_not_merged_and_does_not_stop_the_engine(tmp_path: Path) -> None:
    with started(tmp_path) as engine:
        step(engine)
        first = engine.results.files["pair"][0]
        path = tmp_path / "results" / first.path
        good = path.read_bytes()
        path.write_bytes(good[:100] + bytes([good[100] ^ 1]) + good[101:])
        for _ in range(40):
            step(engine)
        left = engine.results.files["pair"]
        assert first in left
        assert any(file.tier for file in left)
        codes = [finding.code for finding in Inspection(str(tmp_path)).findings()]
        assert "RESULT_CORRUPT" in codes
        path.write_bytes(good)
    # The next run takes it for what it is again.
    with started(tmp_path) as engine:
        for _ in range(9):
            step(engine)
        assert first not in engine.results.files["pair"]
    check(tmp_path, 50)


# ---------------------------------------------------------------- killed, again and again

POINTS = ("results.merge", "commit.2", "commit.3", "task.end")


def _live(directory: Path, epochs: int, tasks: int, killed: str, once: str) -> None:
    """In a process of its own: runs until so many epochs are committed, unless it is killed."""
    os.environ.update(PLAIT_FAULT=killed, PLAIT_FAULT_ONCE=once)
    with started(directory) as engine:
        engine.change(tasks=tasks)
        while engine.live.epoch + 1 < epochs:
            step(engine)


FIRED: Counter[str] = Counter()
"""How often processes were killed where."""

lives = st.lists(
    st.tuples(st.integers(1, 12), st.integers(1, 3), st.lists(st.sampled_from(POINTS), max_size=3, unique=True)),
    min_size=3,
    max_size=8,
)
"""Epochs until the next restart, tasks, and where the process is killed on the way."""


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@settings(
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=8,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(lives, st.randoms(use_true_random=False))
def test_oracle_kept_rows_survive_merges_kills_and_restarts(
    lives: list[tuple[int, int, list[str]]], choose: Any
) -> None:
    with tempfile.TemporaryDirectory(prefix="plait-long-") as base:
        directory, epochs = Path(base) / "checkpoint", 0
        for number, (more, tasks, points) in enumerate(lives):
            killed = ",".join(f"{point}@{epochs + choose.randrange(more)}" for point in points)
            epochs += more
            survived = False
            while not survived:
                args = (directory, epochs, tasks, killed, f"{base}/{number}-")
                process = multiprocessing.get_context("fork").Process(target=_live, args=args)
                process.start()
                process.join()
                assert process.exitcode in (0, -signal.SIGKILL), process.exitcode
                survived = process.exitcode == 0
                done = ManifestLog(LocalFiles(str(directory), False)).last()
                assert not survived or done == epochs - 1
                check(directory, 0 if done is None else done + 1)
            found, most = count(directory), bound(epochs)
            # What a killed process has written is collected by the next one.
            assert found["results"] <= most["results"], (found, most)
            assert found["log"] <= most["log"]
        FIRED.update(name.partition("-")[2].partition("@")[0] for name in os.listdir(base) if "@" in name)


def test_processes_were_killed_at_every_point() -> None:
    """Looks at what the test before has met: otherwise it would show nothing."""
    if not FIRED:
        pytest.skip("the test before did not run")
    assert set(FIRED) == set(POINTS)
