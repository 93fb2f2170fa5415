"""State that meets a full disk, missing and damaged files, wiped caches: a clear error or a clean continuation."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from plait.config import Config
from plait.errors import CheckpointError, CorruptionError, PlaitError, StorageError
from plait.serve.state_cli import app
from plait.share.planner import Planner
from plait.state.log.checkpoint import Checkpoint
from plait.state.log.compact import compact
from plait.state.log.inspect import Inspection
from plait.state.segments import segment_reader as reader
from plait.state.segments.block_cache import CACHE
from plait.state.segments.segment import SegmentInfo
from plait.testing import Clock, LocalEngine
from tests.runtime.test_state_property import Life, arrivals
from tests.share.streams import joined, streams


def deep_segments(engine: LocalEngine) -> list[SegmentInfo]:
    return [info for infos in engine.live.segments.values() for info in infos if info.deep]


def steps(life: Life, engine: LocalEngine, count: int) -> None:
    for _ in range(count):
        life.step(engine)


@pytest.fixture
def grown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Life, LocalEngine]]:
    """An engine after twelve epochs, most of its state in deep segments; what it has verified is noted."""
    monkeypatch.setattr(reader, "_QUICK", -1)
    life = Life(tmp_path / "checkpoint", merge_share=0.9)
    with life.start() as engine:
        for _ in range(12):
            life.step(engine)
        assert deep_segments(engine)
        yield life, engine


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of its own, of one megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "plait-test", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    try:
        yield folder
    finally:
        # Lazily: segments that were opened are still mapped.
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_disk_that_is_full_during_a_merge_costs_nothing_that_was_committed(tmp_path: Path, disk: Path) -> None:
    life = Life(tmp_path / "checkpoint", state_dir=str(disk), fan_in=64, merge_share=0.9)
    with life.start() as engine:
        for _ in range(8):
            life.step(engine)
        life.check(engine)
        before = engine.live
        free = shutil.disk_usage(disk).free
        (disk / "ballast").write_bytes(bytes(free - 40_000))
        # Room for what arrives, not for the merge of all there is.
        engine.change(fan_in=2)
        with pytest.raises(StorageError, match="STATE_FULL"):
            life.step(engine)
        assert engine.live == before
        # The step told its rows to the oracle before it failed; the same rows come again.
        for seen in life.seen.values():
            seen.pop()
        (disk / "ballast").unlink()
        for _ in range(3):
            life.step(engine)
        life.check(engine)
        assert deep_segments(engine)


def test_a_missing_run_is_named_and_the_engine_goes_on_when_it_is_back(grown: tuple[Life, LocalEngine]) -> None:
    life, engine = grown
    gone = Path(engine.checkpoint.state_dir, max(deep_segments(engine), key=lambda i: i.rows).path)
    aside = gone.with_suffix(".aside")
    gone.rename(aside)
    before = engine.live
    with pytest.raises(CorruptionError, match=f"SEGMENT_MISSING.*{gone.name}"):
        life.step(engine)
    assert engine.live == before
    for seen in life.seen.values():
        seen.pop()
    aside.rename(gone)
    life.step(engine)
    life.check(engine)


def test_a_block_that_rots_under_a_running_engine_is_found_and_nothing_wrong_comes_out(
    grown: tuple[Life, LocalEngine],
) -> None:
    life, engine = grown
    rotten = Path(engine.checkpoint.state_dir, max(deep_segments(engine), key=lambda i: i.rows).path)
    whole = rotten.read_bytes()
    times = os.stat(rotten)
    CACHE.resize(0)
    with rotten.open("r+b") as file:
        # All blocks: whichever is read next, its sum does not fit.
        file.write(bytes(b ^ 1 for b in whole[: next(i.meta for i in deep_segments(engine) if rotten.match(i.path))]))
    os.utime(rotten, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(PlaitError, match=f"SEGMENT_CORRUPT.*{rotten.name}"):
        steps(life, engine, 9)
    life.catalogue(engine)
    assert [f.code for f in Inspection(str(life.directory)).findings()] == ["SEGMENT_CORRUPT"]
    for seen in life.seen.values():
        seen.pop()
    with rotten.open("r+b") as file:
        file.write(whole)
    os.utime(rotten, ns=(times.st_atime_ns, times.st_mtime_ns))
    life.step(engine)
    life.check(engine)


def test_wiping_what_is_known_of_verified_segments_costs_time_only(grown: tuple[Life, LocalEngine]) -> None:
    life, engine = grown
    assert os.listdir(engine.driver.services.verified_dir)
    shutil.rmtree(engine.driver.services.verified_dir)
    for _ in range(4):
        life.step(engine)
    life.check(engine)


def test_compaction_leaves_one_run_per_store_and_the_engine_goes_on(tmp_path: Path) -> None:
    life = Life(tmp_path, fan_in=8)
    with life.start() as engine:
        for _ in range(7):
            life.step(engine)
    life.sound()
    told = CliRunner().invoke(app, ["compact", str(tmp_path)])
    assert told.exit_code == 0, told.output
    assert "a[k]: 7 → 1 segments" in told.output
    life.sound()
    again = CliRunner().invoke(app, ["compact", str(tmp_path)])
    assert "Nothing to do" in again.output
    with life.start() as engine:
        assert all(len(infos) == 1 for infos in engine.live.segments.values())
        for _ in range(5):
            life.step(engine)
        life.check(engine)
    life.sound()


def test_compaction_that_dies_between_two_stores_has_done_the_first(tmp_path: Path) -> None:
    life = Life(tmp_path, fan_in=8)
    with life.start() as engine:
        for _ in range(5):
            life.step(engine)
    with Checkpoint(str(tmp_path), life.start_config()).open() as checkpoint:
        assert next(compact(checkpoint, 0, compress=False)).store == "a[k]"
    with life.start() as engine:
        assert [len(engine.live.segments[s]) for s in ("a[k]", "b[k]")] == [1, 5]
        for _ in range(3):
            life.step(engine)
        life.check(engine)
    life.sound()


def test_compaction_drops_what_has_expired_and_nothing_else(tmp_path: Path) -> None:
    clock = Clock()
    relations = {n: replace(r, ttl_us=10_000_000) for n, r in streams("ab").items()}
    plan = Planner({"q": joined("a.k = b.k")}, relations, Config(sync=False, replan_epochs=0)).plan
    config = Config(sync=False, tasks=1, fan_in=64)
    with LocalEngine(tmp_path, plan, config, clock=clock) as engine:
        for number in range(4):
            engine.run({"a": arrivals(2 * number), "b": arrivals(2 * number + 1)})
            clock.advance(4)
    with Checkpoint(str(tmp_path), config).open() as checkpoint:
        # At second 16: what came at 8 and 12 is not over, what came at 4 is; what came at 0 went as a whole at 12.
        done = list(compact(checkpoint, clock(), compress=True))
    assert [d.rows for d in done] == [(360, 240), (360, 240)]
    with LocalEngine(tmp_path, plan, config, clock=clock) as engine:
        assert engine.run({"b": arrivals(0)})["q"].num_rows > 0


def test_compaction_beside_a_running_engine_is_refused(grown: tuple[Life, LocalEngine]) -> None:
    life, _ = grown
    with pytest.raises(CheckpointError, match="CHECKPOINT_IN_USE"):
        CliRunner().invoke(app, ["compact", str(life.directory)], catch_exceptions=False)


def test_compaction_of_a_checkpoint_without_epochs_is_refused(tmp_path: Path) -> None:
    life = Life(tmp_path)
    life.start().close()
    with pytest.raises(CheckpointError, match="NO_STATE"):
        CliRunner().invoke(app, ["compact", str(tmp_path)], catch_exceptions=False)
