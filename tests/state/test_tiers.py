"""Tiers: few runs, all rows, none that has expired."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from plait.config import Config
from plait.kernels.hashing import group_bounds
from plait.order.orders import fixed
from plait.query.expr import ColumnRef
from plait.query.graph import Alias, Equality, JoinGraph, Output
from plait.query.plan import ARRIVED
from plait.query.relation import ColumnDef, Relation
from plait.share.probe_trees import build_plan
from plait.state import tiers
from plait.state.segment import SegmentInfo, open_segment
from plait.state.tiers import Merge, choose_merges, expired, lane, live_rows, merge_segments
from plait.testing import LocalEngine
from tests.state.rows import info, key, store, write


@pytest.mark.parametrize("tasks", [1, 2, 3, 7, 100, 1024])
def test_a_lane_is_the_task_that_owns_the_middle(tasks: int) -> None:
    bounds = group_bounds(tasks).tolist()
    for group in range(1024):
        t = lane(info(lo_group=group, hi_group=group + 1), tasks)
        assert bounds[t] <= group < bounds[t + 1]
    for t in range(tasks):
        assert lane(info(lo_group=bounds[t], hi_group=bounds[t + 1]), tasks) == t


def test_a_full_tier_is_merged_whole_and_a_smaller_one_is_left_alone() -> None:
    three = [info(n) for n in range(3)]
    assert choose_merges({"s": three}, 4, 1) == ()
    five = [info(n) for n in range(5)]
    assert choose_merges({"s": five}, 4, 1) == (Merge("s", tuple(five), 1, 0),)


def test_stores_lanes_and_tiers_are_merged_apart() -> None:
    low = [info(n, hi_group=512) for n in range(4)]
    high = [info(10 + n, lo_group=512) for n in range(4)]
    deep = [info(20 + n, hi_group=512, tier=1) for n in range(3)]
    other = [info(30 + n, store="a") for n in range(2)]
    live = {"s": low + high + deep, "a": other}
    expected = (Merge("s", tuple(low), 1, 0), Merge("s", tuple(high), 1, 1), Merge("a", tuple(other), 1, 1))
    assert choose_merges(live, 4, 2) == expected[:2]
    assert choose_merges(live, 2, 2) == (
        expected[2], expected[0], Merge("s", tuple(deep), 2, 0), expected[1],
    )  # fmt: skip


def test_the_choice_does_not_depend_on_the_order_of_the_list() -> None:
    segments = [info(n, tier=n % 2, lo_group=(n % 3) * 300, hi_group=(n % 3) * 300 + 300) for n in range(40)]
    expected = choose_merges({"s": segments}, 4, 3)
    random.Random(1).shuffle(segments)
    assert choose_merges({"s": segments}, 4, 3) == expected


def simulate(fan_in: int, tasks_at: list[int], size: int = 1000) -> tuple[list[SegmentInfo], int, int]:
    """Append a segment per task and epoch, merging when due; returns live, most runs met by a group, bytes merged."""
    live: list[SegmentInfo] = []
    most = merged = serial = 0
    for epoch, tasks in enumerate(tasks_at):
        bounds = group_bounds(tasks).tolist()
        for merge in choose_merges({"s": live}, fan_in, tasks):
            gone = {i.path for i in merge.inputs}
            live = [i for i in live if i.path not in gone]
            serial += 1
            total = sum(i.bytes for i in merge.inputs)
            merged += total
            live.append(
                info(serial, path=f"m{serial}", epoch=epoch, tier=merge.tier, rows=sum(i.rows for i in merge.inputs),
                     bytes=total, lo_group=min(i.lo_group for i in merge.inputs),
                     hi_group=max(i.hi_group for i in merge.inputs))
            )  # fmt: skip
        for t in range(tasks):
            live.append(info(path=f"e{epoch}-{t}", epoch=epoch, lo_group=bounds[t], hi_group=bounds[t + 1], bytes=size))
        most = max(most, *(sum(i.lo_group <= g < i.hi_group for i in live) for g in range(0, 1024, 128)))
    assert sum(i.rows for i in live) == 10 * sum(tasks_at)
    return live, most, merged


@pytest.mark.parametrize("fan_in", [2, 4, 10])
def test_runs_stay_logarithmic_over_a_thousand_epochs(fan_in: int) -> None:
    live, most, merged = simulate(fan_in, [2] * 1000)
    tiers_used = max(i.tier for i in live) + 1
    assert tiers_used <= np.log(1000) / np.log(fan_in) + 2
    assert most <= fan_in * tiers_used
    assert merged <= 2000 * 1000 * tiers_used


def test_runs_stay_logarithmic_while_the_number_of_tasks_changes() -> None:
    rng = random.Random(5)
    tasks: list[int] = []
    while len(tasks) < 1000:
        tasks += [rng.choice([1, 2, 3, 5, 8, 16])] * rng.randint(1, 60)
    _, most, _ = simulate(4, tasks[:1000])
    # A group may meet the runs of two lanes where ranges do not line up.
    assert most <= 2 * 4 * 8


def test_a_merge_never_outgrows_memory() -> None:
    big = tiers.MERGE_BYTES // 4
    live, _, _ = simulate(4, [1] * 200, size=big // 5)
    assert max(i.bytes for i in live) <= tiers.MERGE_BYTES
    # Full runs are left alone, all others still merge.
    assert len(live) < 200 / 5 + 8
    many = [info(n, bytes=big) for n in range(11)]
    merges = choose_merges({"s": many}, 4, 1)
    assert [len(m.inputs) for m in merges] == [4, 4, 3]
    assert all(sum(i.bytes for i in m.inputs) <= tiers.MERGE_BYTES for m in merges)
    assert choose_merges({"s": [info(n, bytes=big + 1) for n in range(11)]}, 4, 1) == ()


def test_a_segment_expires_when_its_newest_row_does() -> None:
    of = store(time="t", keep_us=5_000)
    assert not expired(info(max_time=10_000), of, None, 0)
    assert not expired(info(max_time=10_000), of, 14, 0)
    assert expired(info(max_time=10_000), of, 15, 0)
    assert not expired(info(max_time=None), of, 15, 0)
    assert not expired(info(max_time=10_000), store(time="t"), 10**9, 0)
    ttl = store(ttl_us=100)
    assert not expired(info(max_arrived=50), ttl, None, 149)
    assert expired(info(max_arrived=50), ttl, None, 150)
    assert not expired(info(max_arrived=None), ttl, None, 10**18)


def test_rows_expire_by_the_rule_of_their_segment() -> None:
    times = [9_999, 10_000, 10_001, None]
    table = pa.table({"t": pa.array(times, pa.timestamp("us")), ARRIVED: pa.array([1, 2, 3, 4], pa.int64())})
    windowed = store(time="t", keep_us=5_000)
    assert live_rows(table, windowed, 15, 0).tolist() == [False, False, True, False]  # type: ignore[union-attr]
    assert live_rows(table, windowed, None, 0) is None
    assert live_rows(table.slice(2, 1), windowed, 15, 0) is None
    assert live_rows(table, store(), 10**9, 10**18) is None
    assert live_rows(table, store(ttl_us=10), None, 12).tolist() == [False, False, True, True]  # type: ignore[union-attr]
    both = store(time="t", keep_us=5_000, ttl_us=10)
    assert live_rows(table, both, 15, 13).tolist() == [False] * 4  # type: ignore[union-attr]


def merge_all(directory: Path, of: object, infos: list[SegmentInfo], **now: object) -> SegmentInfo | None:
    settings = {"epoch": 9, "watermark_ms": None, "now_us": 0, "sync": False, "verified_dir": None, **now}
    return merge_segments(str(directory), of, Merge("s", tuple(infos), 1, 0), **settings)  # type: ignore[arg-type]


def test_a_merge_holds_the_rows_of_its_inputs_in_order(tmp_path: Path) -> None:
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
    merged = merge_all(tmp_path, of, infos)
    assert merged is not None
    read = open_segment(str(tmp_path), merged)
    parts = [open_segment(str(tmp_path), i) for i in infos]
    everything = np.concatenate([p.hashes for p in parts])
    order = np.argsort(everything, kind="stable")
    assert read.hashes.tolist() == everything[order].tolist()
    assert read.table.to_pylist() == pa.concat_tables([p.table for p in parts]).take(order).to_pylist()
    assert (merged.tier, merged.epoch, merged.rows, merged.homogeneous) == (1, 9, 1000, True)
    assert merged.keys == len({r["k"] for t in tables for r in t.to_pylist()})
    assert (merged.lo_group, merged.hi_group) == (min(i.lo_group for i in infos), max(i.hi_group for i in infos))


def test_expired_rows_are_dropped_while_merging(tmp_path: Path) -> None:
    of = store(time="t", keep_us=0)

    def table(times: list[int]) -> pa.Table:
        return pa.table({"k": times, "t": pa.array(times, pa.timestamp("us", "UTC"))})

    infos = [write(tmp_path, of, table(list(range(n, n + 2000)))) for n in (0, 1000, 5000)]
    merged = merge_all(tmp_path, of, infos, watermark_ms=2)
    assert merged is not None
    read = open_segment(str(tmp_path), merged).table
    assert sorted(read.column("k").to_pylist()) == [*range(2001, 3000), *range(5000, 7000)]
    assert (merged.min_time, merged.max_time) == (2001, 6999)
    assert merge_all(tmp_path, of, infos, watermark_ms=7) is None


def test_an_expired_segment_is_dropped_without_being_read(tmp_path: Path) -> None:
    of = store(ttl_us=10)
    old, new = (write(tmp_path, of, pa.table({"k": [1], ARRIVED: [at]})) for at in (0, 100))
    (tmp_path / old.path).unlink()
    merged = merge_all(tmp_path, of, [old, new], now_us=50)
    assert merged is not None
    assert (merged.rows, merged.max_arrived) == (1, 100)


def test_rows_whose_hash_alone_expired_from_one_run_still_merge(tmp_path: Path) -> None:
    of = store(time="t", keep_us=0)
    rows = pa.table({"k": [1, 1, 2], "t": pa.array([1, 5000, 1], pa.timestamp("us"))})
    half = write(tmp_path, of, rows)
    merged = merge_all(tmp_path, of, [half], watermark_ms=1)
    assert merged is not None
    assert open_segment(str(tmp_path), merged).table.column("k").to_pylist() == [1]


def test_a_store_that_keeps_nothing_but_the_hash_is_merged_too(tmp_path: Path) -> None:
    """A stream of which no column comes out and whose key is exact: its tables have rows, but no columns."""
    columns = (("k", "bigint"), ("v", "bigint"))
    relations = {n: Relation(n, columns) for n in "ab"}
    graph = JoinGraph(
        "",
        tuple(Alias(n, n, None, tuple(ColumnDef(c, c, t) for c, t in columns)) for n in "ab"),
        (Equality(ColumnRef("a", "k", "bigint"), ColumnRef("b", "k", "bigint")),),
        (Output("v", "bigint", ColumnRef("a", "v", "bigint"), "a.v", (ColumnRef("a", "v", "bigint"),)),),
    )
    plan = build_plan({"q": graph}, relations, {"q": fixed(graph)}, ("a", "b"))
    assert {s.id: len(s.columns) for s in plan.stores} == {"a[k]": 1, "b[k]": 0}
    arrived = pa.table({"k": pa.array([1, 1, 2], pa.int64()), "v": pa.array([7, 8, 9], pa.int64())})
    found = 0
    with LocalEngine(tmp_path, plan, Config(tasks=1, sync=False, fan_in=2)) as engine:
        for epoch in range(1, 9):
            found += sum(table.num_rows for table in engine.run({"a": arrived, "b": arrived}).values())
            # Key 1 has 2·n rows on each side, key 2 has n.
            assert found == (2 * epoch) ** 2 + epoch**2
        assert max(i.tier for i in engine.live.segments["b[k]"]) >= 2
        assert sum(i.rows for i in engine.live.segments["b[k]"]) == 3 * 8
