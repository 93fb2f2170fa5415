"""Merges: however often they are interrupted, every row that can be reached is in exactly one live segment."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from plait.kernels.hashing import key_group
from plait.kernels.runs import group_starts
from plait.query.store import ARRIVED, Store
from plait.state.files.segment_home import SegmentHome
from plait.state.log.manifest import LiveState, Manifest
from plait.state.segments import block_segment as deep
from plait.state.segments import tiers
from plait.state.segments.segment import SegmentInfo, new_run, write_segment
from plait.state.segments.segment_reader import open_segment
from plait.state.segments.tiers import Merge, Merged, choose_merges, live_rows, merge_some
from tests.state.rows import key, store, write
from tests.state.test_manifest import manifest


def merged(directory: Path, of: Store, infos: list[SegmentInfo], deeply: bool = False, **how: Any) -> Merged:
    settings = {"epoch": 9, "horizon_us": None, "now_us": 0, "sync": False, **how}
    return merge_some(SegmentHome(str(directory)), of, Merge("s", tuple(infos), 1, "x", 0, deeply), **settings)


def one(done: Merged) -> SegmentInfo:
    assert len(done.added) == 1
    return done.added[0]


def rows_of(directory: Path | str, info: SegmentInfo) -> pa.Table:
    return open_segment(SegmentHome(str(directory)), info).slice(info.first, info.first + info.rows)


both = pytest.mark.parametrize("deeply", [False, True], ids=["flat", "deep"])


@both
def test_a_merge_holds_the_rows_of_its_inputs_in_order(tmp_path: Path, deeply: bool) -> None:
    of = store(key(("k", "string")))
    rng = np.random.default_rng(3)
    tables = [
        pa.table({
            "k": [f"key {v}" for v in rng.integers(0, 50, 200)], "run": [run] * 200,
            "nested": [{"a": [i]} if i % 3 else None for i in range(200)],
        })
        for run in range(5)
    ]  # fmt: skip
    infos = [write(tmp_path, of, table, epoch=e) for e, table in enumerate(tables)]
    done = merged(tmp_path, of, infos, deeply)
    info = one(done)
    assert sorted(done.removed) == sorted(i.path for i in infos)
    assert done.written == info.bytes == (tmp_path / info.path).stat().st_size
    parts = [open_segment(SegmentHome(str(tmp_path)), i) for i in infos]
    everything = np.concatenate([p.hashes for p in parts])
    order = np.argsort(everything, kind="stable")
    assert open_segment(SegmentHome(str(tmp_path)), info).hashes.tolist() == everything[order].tolist()
    expected = pa.concat_tables([p.slice(0, 200) for p in parts]).take(order)
    assert rows_of(tmp_path, info).to_pylist() == expected.to_pylist()
    assert (info.tier, info.epoch, info.rows, info.run, info.into, info.deep) == (1, 9, 1000, "x", None, deeply)
    assert info.keys == len({r["k"] for t in tables for r in t.to_pylist()})
    assert (info.lo_group, info.hi_group) == (min(i.lo_group for i in infos), max(i.hi_group for i in infos))


@both
def test_expired_rows_are_dropped_while_merging(tmp_path: Path, deeply: bool) -> None:
    of = store(time="t", keep_us=0)

    def table(times: list[int]) -> pa.Table:
        return pa.table({"k": times, "t": pa.array(times, pa.timestamp("us", "UTC"))})

    infos = [write(tmp_path, of, table(list(range(n, n + 2000)))) for n in (0, 1000, 5000)]
    info = one(merged(tmp_path, of, infos, deeply, horizon_us=2_000))
    assert sorted(rows_of(tmp_path, info).column("k").to_pylist()) == [*range(2001, 3000), *range(5000, 7000)]
    assert (info.min_time, info.max_time) == (2001, 6999)
    gone = merged(tmp_path, of, infos, deeply, horizon_us=7_000)
    assert (gone.added, gone.written, len(gone.removed)) == ([], 0, 3)


def test_an_expired_segment_is_dropped_without_being_read(tmp_path: Path) -> None:
    of = store(ttl_us=10)
    old, new = (write(tmp_path, of, pa.table({"k": [1], ARRIVED: [at]})) for at in (0, 100))
    (tmp_path / old.path).unlink()
    done = merged(tmp_path, of, [old, new], now_us=50)
    assert (one(done).rows, one(done).max_arrived) == (1, 100)
    assert set(done.removed) == {old.path, new.path}


def test_rows_whose_hash_alone_expired_from_one_run_still_merge(tmp_path: Path) -> None:
    of = store(time="t", keep_us=0)
    rows = pa.table({"k": [1, 1, 2], "t": pa.array([1, 5000, 1], pa.timestamp("us"))})
    info = one(merged(tmp_path, of, [write(tmp_path, of, rows)], horizon_us=1_000))
    assert rows_of(tmp_path, info).column("k").to_pylist() == [1]


def test_at_least_one_part_is_merged_and_then_it_stops_when_told(tmp_path: Path) -> None:
    infos = [write(tmp_path, store(), pa.table({"k": np.arange(n, 2000, 2)})) for n in (0, 1)]
    done = merged(tmp_path, store(), infos, part_bytes=1, more=lambda: False)
    new, *old = done.added
    assert new.path not in {i.path for i in infos}
    assert 32 <= new.rows <= 64
    assert sum(i.first for i in old) == new.rows
    assert [i.into for i in old] == ["x", "x"]
    assert set(done.removed) == {i.path for i in infos}


@both
def test_a_merge_ends_a_segment_and_begins_the_next_between_two_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deeply: bool
) -> None:
    monkeypatch.setattr(tiers, "SEGMENT_BYTES", 4000)
    infos = [
        write(tmp_path, store(), pa.table({"k": np.repeat(np.arange(300), 10), "run": [n] * 3000})) for n in (0, 1)
    ]
    done = merged(tmp_path, store(), infos, deeply, part_bytes=1)
    assert len(done.added) > 5
    assert all(i.bytes < 20_000 for i in done.added)
    for before, after in pairwise([open_segment(SegmentHome(str(tmp_path)), i) for i in done.added]):
        assert before.hashes[-1] < after.hashes[0]
    assert sum(i.rows for i in done.added) == 6000
    assert sum(i.keys for i in done.added) == 300


@both
def test_the_rows_of_one_key_are_merged_in_pieces_into_one_segment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deeply: bool
) -> None:
    monkeypatch.setattr(tiers, "SEGMENT_BYTES", 1)
    largest = 0

    def noted(table: pa.Table, *how: Any) -> Any:
        nonlocal largest
        largest = max(largest, table.num_rows)
        return live_rows(table, *how)

    monkeypatch.setattr(tiers, "live_rows", noted)
    infos = [write(tmp_path, store(), pa.table({"k": [1] * 5000 + [2], "run": [n] * 5001})) for n in (0, 1)]
    done = merged(tmp_path, store(), infos, deeply, part_bytes=1000)
    assert sorted(i.rows for i in done.added) == [2, 10_000]
    assert sorted(i.keys for i in done.added) == [1, 1]
    assert largest <= 100


def test_what_a_merge_holds_depends_on_a_part_and_not_on_its_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers, "SEGMENT_BYTES", 256 << 10)
    texts = pa.array([f"a text of some length, number {n}" for n in range(40_000)])
    infos = [write(tmp_path, store(), pa.table({"k": np.arange(n, 160_000, 4), "s": texts})) for n in range(4)]
    held: list[int] = []
    before = pa.total_allocated_bytes()

    def more() -> bool:
        held.append(pa.total_allocated_bytes() - before)
        return True

    done = merged(tmp_path, store(), infos, True, part_bytes=64 << 10, more=more)
    assert len(held) > 100
    assert max(held) < 2 << 20
    assert sum(i.rows for i in done.added) == 160_000


@both
def test_a_store_without_columns_is_merged_into_segments_of_bounded_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deeply: bool
) -> None:
    monkeypatch.setattr(tiers, "SEGMENT_BYTES", 8000)
    hashes = np.sort(np.random.default_rng(0).integers(0, 2**64, 5000, np.uint64))
    how: dict[str, Any] = {"epoch": 0, "tier": 0, "sync": False}
    infos = [write_segment(SegmentHome(str(tmp_path)), store(), pa.table({}), hashes[n::2], **how) for n in (0, 1)]
    done = merged(tmp_path, store(), infos, deeply, part_bytes=1000)
    assert max(i.rows for i in done.added) < 1500
    found = np.concatenate([open_segment(SegmentHome(str(tmp_path)), i).hashes for i in done.added])
    assert found.tolist() == hashes.tolist()


def test_the_segments_of_a_run_do_not_make_parts_smaller(tmp_path: Path) -> None:
    """Only the lowest segment of a run has rows to give: the others must not have a share of the part."""
    rng = np.random.default_rng(5)
    infos: list[SegmentInfo] = []
    for _ in range(2):
        hashes = np.sort(rng.integers(0, 2**64, 20_000, np.uint64))
        run, table = new_run(), pa.table({"k": np.arange(20_000)})
        for begin in range(0, 20_000, 1000):
            piece = table.slice(begin, 1000), hashes[begin : begin + 1000]
            infos.append(
                write_segment(SegmentHome(str(tmp_path)), store(), *piece, epoch=0, tier=0, sync=False, run=run)
            )
    asked = []
    done = merged(tmp_path, store(), infos, part_bytes=16 * 2000, more=lambda: not asked.append(1))
    assert sum(i.rows for i in done.added) == 40_000
    # 20 parts would be right for runs of one segment; where a segment ends, a part does.
    assert len(asked) < 20 + 40 + 5


def test_a_merge_goes_from_flat_to_deep_on_the_way(tmp_path: Path) -> None:
    infos = [write(tmp_path, store(), pa.table({"k": np.arange(n, 600, 2)})) for n in (0, 1)]
    begun = merged(tmp_path, store(), infos, False, part_bytes=1, more=lambda: False)
    done = merged(tmp_path, store(), [i for i in begun.added if i.into], True)
    pieces = [i for i in [*begun.added, *done.added] if i.into is None]
    assert [i.deep for i in pieces] == [False, True]
    assert sorted(v for i in pieces for v in rows_of(tmp_path, i).column("k").to_pylist()) == list(range(600))


# ---------------------------------------------------------------- any merges, in any pieces

SPECIAL = (0, 1, 2**64 - 1, 2**64 - 2, 1 << 54, (1 << 54) - 1, 2**63)
WINDOW = 1000


@dataclass
class Script:
    """What a random test draws: the rest follows from the seed."""

    seed: int
    epochs: int
    fan_in: int
    part_bytes: int
    segment_bytes: int
    block_bytes: int
    compress_above: float
    columns: bool
    windowed: bool


SCRIPTS = st.builds(
    Script,
    seed=st.integers(0, 2**32),
    epochs=st.integers(4, 12),
    fan_in=st.integers(2, 4),
    part_bytes=st.sampled_from((1, 3000, 1 << 20)),
    segment_bytes=st.sampled_from((1, 2000, 1 << 20)),
    block_bytes=st.sampled_from((1, 500, 64 << 10)),
    compress_above=st.sampled_from((0.0, 20_000.0, float("inf"))),
    columns=st.booleans(),
    windowed=st.booleans(),
)


@dataclass
class World:
    """A store over many epochs, next to a list of all rows that were ever put into it."""

    directory: str
    script: Script
    of: Store
    choose: random.Random
    live: LiveState = field(default_factory=LiveState)
    rows: dict[int, tuple[int, int, str | None]] = field(default_factory=dict)
    """By id: hash, event time, text."""
    hashes: list[int] = field(default_factory=list)
    clock: int = 0

    @property
    def home(self) -> SegmentHome:
        return SegmentHome(self.directory)

    @property
    def horizon_us(self) -> int | None:
        return self.clock * 1000 - WINDOW if self.script.windowed else None

    def infos(self) -> list[SegmentInfo]:
        return list(self.live.segments.get(self.of.id, ()))

    def append(self, epoch: int) -> list[SegmentInfo]:
        """A new run, of one segment or several; some keys have many rows."""
        choose = self.choose
        pool = [*SPECIAL, *(choose.randrange(2**64) for _ in range(choose.choice((3, 60))))]
        found: list[int] = []
        for value in choose.sample(pool, choose.randint(1, len(pool))):
            found += [value] * choose.choice((1, 1, 2, 5, choose.choice((1, 20, 150))))
        found.sort()
        ids = range(len(self.rows), len(self.rows) + len(found))
        times = [self.clock * 1000 + choose.randrange(-2 * WINDOW, 2 * WINDOW) for _ in found]
        texts = [None if choose.random() < 0.2 else "x" * choose.randrange(30) for _ in found]
        for i, value, time, text in zip(ids, found, times, texts, strict=True):
            self.rows[i] = (value, time, text)
        self.hashes += found
        columns = {"id": pa.array(ids, pa.int64()), "t": pa.array(times, pa.int64()), "s": pa.array(texts, pa.string())}
        table = pa.table(columns) if self.script.columns else pa.table({})
        hashes = np.array(found, np.uint64)
        starts = group_starts(hashes)[1:-1].tolist()
        cuts = sorted(choose.sample(starts, min(len(starts), choose.choice((0, 0, 1, 3)))))
        run = new_run()
        return [
            write_segment(
                self.home,
                self.of,
                table.slice(a, b - a),
                hashes[a:b],
                epoch=epoch,
                tier=0,
                sync=False,
                run=run,
            )
            for a, b in pairwise([0, *cuts, len(found)])
        ]

    def epoch(self, number: int, append: bool = True, patient: bool = False) -> int:
        """Merges what is due, some of it and as far as chance has it, then appends; returns how many were due."""
        choose, script = self.choose, self.script
        if script.windowed:
            self.clock += choose.choice((0, 0, 1, 3))
        added: list[SegmentInfo] = []
        removed: list[str] = []
        before = {i.path for i in self.infos()}
        tasks = choose.choice((1, 1, 2, 5))
        merges = choose_merges({self.of.id: self.infos()}, script.fan_in, tasks, script.compress_above)
        for merge in merges:
            if not patient and choose.random() < 0.3:
                continue
            left = choose.choice((0, 0, 1, 3, 10**9))
            done = merge_some(
                self.home, self.of, merge, epoch=number, horizon_us=self.horizon_us, now_us=0, sync=False,
                part_bytes=script.part_bytes, more=counting(10**9 if patient else left),
            )  # fmt: skip
            added += done.added
            removed += done.removed
        assert set(removed) <= before, "only what was live is removed"
        if append:
            added += self.append(number)
        written = manifest(number, added=tuple(added), removed=tuple(removed))
        self.live = self.live.after(Manifest.decode(written.encode()))
        for gone in before - {i.path for i in self.infos()}:
            os.unlink(os.path.join(self.directory, gone))
        return len(merges)

    def check(self) -> None:
        infos = self.infos()
        assert len({i.path for i in infos}) == len(infos)
        for info in infos:
            self.check_claims(info)
        self.check_runs(infos)
        if not self.script.columns:
            found = np.concatenate([open_segment(self.home, i).hashes for i in infos])
            assert sorted(found.tolist()) == sorted(self.hashes)
            return
        there: list[int] = []
        for info in infos:
            table = rows_of(self.directory, info)
            hashes = open_segment(self.home, info).hashes.tolist()
            assert table.num_rows == info.rows
            for row, value in zip(table.to_pylist(), hashes, strict=True):
                assert self.rows[row["id"]] == (value, row["t"], row["s"])
                there.append(row["id"])
        assert len(there) == len(set(there)), "a row is there twice"
        reachable = {i for i, (_, time, _) in self.rows.items() if not self.over(time)}
        assert reachable <= set(there), "a row is lost"

    def over(self, time: int) -> bool:
        return self.horizon_us is not None and time <= self.horizon_us

    def check_claims(self, info: SegmentInfo) -> None:
        segment = open_segment(self.home, info)
        hashes = segment.hashes
        assert (segment.first, len(hashes)) == (info.first, info.rows)
        assert info.rows > 0
        assert bool((hashes[1:] >= hashes[:-1]).all())
        assert info.keys == len(np.unique(hashes))
        groups = key_group(hashes)
        assert (info.lo_group, info.hi_group) == (int(groups[0]), int(groups[-1]) + 1)
        assert info.bytes == os.path.getsize(os.path.join(self.directory, info.path))
        if self.script.columns:
            times = rows_of(self.directory, info).column("t").to_pylist()
            assert info.min_time is not None
            assert info.max_time is not None
            assert info.min_time <= min(times)
            assert info.max_time >= max(times)
            assert info.first or (info.min_time, info.max_time) == (min(times), max(times))

    def check_runs(self, infos: list[SegmentInfo]) -> None:
        for run in {i.run for i in infos}:
            pieces = [i for i in infos if i.run == run]
            assert len({i.tier for i in pieces}) == 1
            assert len({i.into for i in pieces}) == 1
            ends = sorted((int(h[0]), int(h[-1])) for h in (open_segment(self.home, i).hashes for i in pieces))
            assert all(before[1] < after[0] for before, after in pairwise(ends)), "a hash is in two pieces of a run"


def counting(parts: int) -> Callable[[], bool]:
    """Lets a merge take so many more parts."""
    left: Iterator[bool] = iter([True] * min(parts, 10**5))
    return lambda: next(left, False)


@settings(deadline=None, derandomize=True, database=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(SCRIPTS)
@example(Script(1, 12, 2, 1, 1, 1, 0.0, True, True))
@example(Script(2, 12, 2, 1, 1, 500, 0.0, False, False))
def test_every_row_is_in_exactly_one_live_segment_however_merges_are_cut(script: Script) -> None:
    of = store(name="s", time="t" if script.columns else None, keep_us=WINDOW if script.windowed else None)
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiers, "SEGMENT_BYTES", script.segment_bytes)
        patch.setattr(deep, "BLOCK_BYTES", script.block_bytes)
        world = World(directory, script, of, random.Random(script.seed))
        for number in range(script.epochs):
            world.epoch(number)
            world.check()
        number = script.epochs
        while world.epoch(number, append=False, patient=True):
            world.check()
            number += 1
            assert number < script.epochs + 20, "merging does not come to an end"
        assert len({i.run for i in world.infos()}) <= 5 * 4 * script.fan_in
