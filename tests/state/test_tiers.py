"""Tiers: few runs, all rows, none that has expired."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from plait.config import Config
from plait.kernels.hashing import even_bounds
from plait.order.orders import fixed
from plait.query.expr import ColumnRef
from plait.query.graph import Alias, Equality, JoinGraph, Output
from plait.query.relation import ColumnDef, Relation
from plait.query.store import ARRIVED
from plait.share.probe_trees import build_plan
from plait.state.segments.segment import SegmentInfo
from plait.state.segments.tiers import Merge, choose_merges, expired, lane, live_rows, runs_per_lookup
from plait.testing import LocalEngine
from tests.state.rows import info, store


@pytest.mark.parametrize("tasks", [1, 2, 3, 7, 100, 1024])
def test_a_lane_is_the_task_that_owns_the_middle(tasks: int) -> None:
    bounds = even_bounds(tasks)
    for group in range(1024):
        t = lane([info(lo_group=group, hi_group=group + 1)], tasks)
        assert bounds[t] <= group < bounds[t + 1]
    for t in range(tasks):
        low, high = bounds[t], bounds[t + 1]
        assert lane([info(lo_group=low, hi_group=high)], tasks) == t
        # A run of several segments is where all of it is.
        middle = (low + high) // 2
        pieces = [info(1, lo_group=middle, hi_group=high), info(0, lo_group=low, hi_group=max(middle, low + 1))]
        assert lane(pieces, tasks) == t


def chosen(live: dict[str, list[SegmentInfo]], *how: Any) -> list[tuple[str, tuple[SegmentInfo, ...], int, int]]:
    return [(m.store, m.inputs, m.tier, m.task) for m in choose_merges(live, *how)]


def test_a_full_tier_is_merged_whole_and_a_smaller_one_is_left_alone() -> None:
    three = [info(n) for n in range(3)]
    assert choose_merges({"s": three}, 4, 1) == ()
    five = [info(n) for n in range(5)]
    assert chosen({"s": five}, 4, 1) == [("s", tuple(five), 1, 0)]


def test_stores_lanes_and_tiers_are_merged_apart_and_low_tiers_first() -> None:
    low = [info(n, hi_group=512) for n in range(4)]
    high = [info(10 + n, lo_group=512) for n in range(4)]
    deep = [info(20 + n, hi_group=512, tier=1) for n in range(3)]
    other = [info(30 + n, store="a") for n in range(2)]
    live = {"s": low + high + deep, "a": other}
    expected = [("s", tuple(low), 1, 0), ("s", tuple(high), 1, 1), ("a", tuple(other), 1, 1)]
    assert chosen(live, 4, 2) == expected[:2]
    assert chosen(live, 2, 2) == [*expected, ("s", tuple(deep), 2, 0)]


def test_the_choice_does_not_depend_on_the_order_of_the_list() -> None:
    segments = [info(n, tier=n % 2, lo_group=(n % 3) * 300, hi_group=(n % 3) * 300 + 300) for n in range(40)]
    expected = choose_merges({"s": segments}, 4, 3)
    random.Random(1).shuffle(segments)
    assert choose_merges({"s": segments}, 4, 3) == expected


def test_segments_of_one_run_count_as_one() -> None:
    pieces = [info(n, run="r", lo_group=n * 100, hi_group=n * 100 + 100) for n in range(4)]
    assert choose_merges({"s": pieces}, 2, 1) == ()
    other = info(9)
    assert chosen({"s": [*pieces, other]}, 2, 1) == [("s", (*pieces, other), 1, 0)]


def test_a_merge_that_was_begun_goes_on_whatever_else_changes() -> None:
    begun = [info(n, into="x", first=5, rows=5) for n in range(2)]
    grown = [info(10, run="x", tier=1), info(11, tier=1), info(12, tier=1)]
    merges = choose_merges({"s": begun + grown}, 2, 1)
    # The run that is being written is not complete: it rests, whatever its tier has.
    assert [(m.inputs, m.into, m.tier) for m in merges] == [
        (tuple(begun), "x", 1),
        (tuple(grown[1:]), merges[1].into, 2),
    ]
    assert [(m.inputs, m.into) for m in choose_merges({"s": begun + grown}, 64, 3)] == [(tuple(begun), "x")]
    left = [info(0, into="x", first=9, rows=1)]
    assert [m.inputs for m in choose_merges({"s": left + grown}, 64, 1)] == [tuple(left)]
    assert merges[1].into not in {"x", *(i.run for i in grown)}


def test_merges_compress_above_the_limit_only() -> None:
    for tier in (0, 1, 2):
        runs = [info(n, tier=tier, bytes=1000) for n in range(2)]
        assert [m.deep for m in choose_merges({"s": runs}, 2, 1, 1999)] == [True]
        assert [m.deep for m in choose_merges({"s": runs}, 2, 1, 2000)] == [False]
        assert [m.deep for m in choose_merges({"s": runs}, 2, 1)] == [False]
        # Rows that were merged away no longer count.
        short = [info(n, tier=tier, bytes=1000, first=5, rows=5) for n in range(2)]
        assert [m.deep for m in choose_merges({"s": short}, 2, 1, 1000)] == [False]


PER_GROUP = 10


@dataclass
class Simulated:
    """Segments whose rows are spread evenly over their key groups; merges that get `groups` further per epoch."""

    fan_in: int
    live: list[SegmentInfo] = field(default_factory=list)
    serial: int = 0
    merged: int = 0
    appended: int = 0

    def segment(self, low: int, high: int, **how: Any) -> SegmentInfo:
        self.serial += 1
        how = {"run": f"r{self.serial}", "rows": PER_GROUP * (high - low), **how}
        return info(path=f"p{self.serial:06d}", lo_group=low, hi_group=high, bytes=8 * how["rows"], **how)

    def epoch(self, number: int, tasks: int, groups: int) -> None:
        merges = choose_merges({"s": self.live}, self.fan_in, tasks)
        self.check(merges)
        for merge in merges:
            self.step(merge, number, groups)
        bounds = even_bounds(tasks)
        for low, high in pairwise(bounds):
            self.live.append(self.segment(low, high, epoch=number))
            self.appended += self.live[-1].rows
        assert sum(i.rows for i in self.live) == self.appended, "a row is lost, or there twice"

    def check(self, merges: tuple[Merge, ...]) -> None:
        inputs = [i.path for merge in merges for i in merge.inputs]
        assert len(inputs) == len(set(inputs)), "a segment is in two merges"
        going = {i.into for i in self.live} - {None}
        assert going <= {m.into for m in merges}, "a merge that was begun is left lying"
        for merge in merges:
            runs = {i.run for i in merge.inputs}
            assert not runs & going, "a run that still grows is merged"
            for run in runs:
                mine = {i.path for i in self.live if i.run == run}
                assert mine <= {i.path for i in merge.inputs}, "half a run is merged"
            assert len({i.tier for i in merge.inputs}) == 1
            if merge.into in going:
                assert {i.path for i in merge.inputs} == {i.path for i in self.live if i.into == merge.into}
            else:
                assert len(runs) >= self.fan_in

    def step(self, merge: Merge, number: int, groups: int) -> None:
        low = min(i.lo_group for i in merge.inputs)
        cut = low + groups
        taken: list[tuple[int, int, int]] = []
        for i in merge.inputs:
            self.live.remove(i)
            width = i.hi_group - i.lo_group
            moved = max(0, min(cut, i.hi_group) - i.lo_group)
            gone = i.rows * moved // width
            taken.append((i.lo_group, i.lo_group + moved, gone))
            if moved < width:
                lo_group, first, rows = i.lo_group + moved, i.first + gone, i.rows - gone
                self.live.append(replace(i, first=first, rows=rows, lo_group=lo_group, into=merge.into))
        rows = sum(r for _, _, r in taken)
        high = max(b for _, b, r in taken if r)
        self.merged += rows
        self.live.append(self.segment(low, high, epoch=number, tier=merge.tier, run=merge.into, rows=rows))

    def most_runs(self) -> int:
        covering = (len({i.run for i in self.live if i.lo_group <= g < i.hi_group}) for g in range(0, 1024, 64))
        return max(covering)


@pytest.mark.parametrize("fan_in", [2, 4, 10])
@pytest.mark.parametrize("groups", [1024, 100])
def test_runs_stay_logarithmic_over_many_epochs_if_merges_keep_up(fan_in: int, groups: int) -> None:
    state = Simulated(fan_in)
    most = 0
    for number in range(400):
        state.epoch(number, 2, groups)
        most = max(most, state.most_runs())
    tiers_used = max(i.tier for i in state.live) + 1
    assert tiers_used <= np.log(400) / np.log(fan_in) + 2
    # What rests, what is being merged, and what arrives while it is: a merge of a lane takes 512 / groups epochs.
    assert most <= (fan_in + 512 // groups + 1) * tiers_used
    assert state.merged <= state.appended * tiers_used


def test_merges_that_have_fallen_behind_catch_up() -> None:
    state = Simulated(4)
    for number in range(60):
        state.epoch(number, 1, 20)
    behind = state.most_runs()
    assert behind > 12
    for number in range(60, 160):
        state.epoch(number, 1, 1024)
    assert state.most_runs() < 14


def test_merges_go_on_while_the_number_of_tasks_changes() -> None:
    rng = random.Random(5)
    state = Simulated(4)
    tasks, most = 1, 0
    for number in range(400):
        tasks = rng.choice([1, 2, 3, 5, 8, 16]) if rng.random() < 0.1 else tasks
        state.epoch(number, tasks, rng.choice([30, 200, 1024]))
        most = max(most, state.most_runs())
    # A group may meet the runs of two lanes where ranges do not line up.
    assert most <= 2 * 4 * 8


def test_read_amplification_counts_runs_and_not_segments() -> None:
    assert runs_per_lookup([]) == 0
    whole = info(0)
    halves = [info(1, run="h", hi_group=512), info(2, run="h", lo_group=511)]
    assert runs_per_lookup([whole]) == 1
    assert runs_per_lookup([whole, *halves]) == 2
    assert runs_per_lookup([info(3, hi_group=10), info(4, hi_group=30)]) == pytest.approx(40 / 30)


def test_a_segment_expires_when_its_newest_row_does() -> None:
    of = store(time="t", keep_us=5_000)
    assert not expired(info(max_time=10_000), of, None, 0)
    assert not expired(info(max_time=10_000), of, 9_999, 0)
    assert expired(info(max_time=10_000), of, 10_000, 0)
    assert not expired(info(max_time=None), of, 10_000, 0)
    ttl = store(ttl_us=100)
    assert not expired(info(max_arrived=50), ttl, None, 149)
    assert expired(info(max_arrived=50), ttl, None, 150)
    assert not expired(info(max_arrived=None), ttl, None, 10**18)


def test_rows_expire_by_the_rule_of_their_segment() -> None:
    times = [9_999, 10_000, 10_001, None]
    table = pa.table({"t": pa.array(times, pa.timestamp("us")), ARRIVED: pa.array([1, 2, 3, 4], pa.int64())})
    windowed = store(time="t", keep_us=5_000)
    assert live_rows(table, windowed, 10_000, 0).tolist() == [False, False, True, False]  # type: ignore[union-attr]
    assert live_rows(table, windowed, None, 0) is None
    assert live_rows(table.slice(2, 1), windowed, 10_000, 0) is None
    assert live_rows(table, store(), 10**9, 10**18) is None
    assert live_rows(table, store(ttl_us=10), None, 12).tolist() == [False, False, True, True]  # type: ignore[union-attr]
    both = store(time="t", keep_us=5_000, ttl_us=10)
    assert live_rows(table, both, 10_000, 13).tolist() == [False] * 4  # type: ignore[union-attr]


@pytest.mark.parametrize("compress_above", [None, "0"], ids=["flat", "deep"])
def test_a_store_that_keeps_nothing_but_the_hash_is_merged_too(tmp_path: Path, compress_above: str | None) -> None:
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
    with LocalEngine(tmp_path, plan, Config(tasks=1, sync=False, fan_in=2, compress_above=compress_above)) as engine:
        for epoch in range(1, 9):
            found += sum(table.num_rows for table in engine.run({"a": arrived, "b": arrived}).values())
            # Key 1 has 2·n rows on each side, key 2 has n.
            assert found == (2 * epoch) ** 2 + epoch**2
        assert max(i.tier for i in engine.live.segments["b[k]"]) >= 2
        assert any(i.deep for i in engine.live.segments["b[k]"]) == (compress_above is not None)
        assert sum(i.rows for i in engine.live.segments["b[k]"]) == 3 * 8
