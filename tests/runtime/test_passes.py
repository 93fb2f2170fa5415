"""Passes: every tuple is in one of them, with all others of its key, and they are made where they pay."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.config import Config
from plait.kernels import U64
from plait.query.store import HASH
from plait.runtime.task.passes import Passes, Reads, arriving, passes_for, reads_at
from plait.share.planner import Planner
from plait.state.segments import block_segment as deep
from plait.state.segments.segment import SegmentInfo
from tests.share.streams import joined, streams

HASHES = st.lists(st.one_of(st.integers(0, 9), st.integers(0, 2**64 - 1)), max_size=40).map(sorted)
PLAN = Planner({"q": joined("a.k = b.k", "b.k = c.k")}, streams("abc"), Config(sync=False, replan_epochs=0)).plan
MIB = (1 << 20) // deep.BLOCK_BYTES
"""Blocks in a megabyte."""


def tuples(hashes: list[int]) -> pa.Table:
    return pa.table({HASH: np.array(hashes, np.uint64), "row": np.arange(len(hashes))})


@settings(deadline=None, derandomize=True, database=None)
@given(HASHES, HASHES, st.integers(1, 9))
def test_every_tuple_is_in_the_pass_of_its_key(one: list[int], other: list[int], count: int) -> None:
    tables = {1: tuples(one), 2: tuples(other)}
    seen: dict[int, list[int]] = {1: [], 2: []}
    last = 0
    for (begin, end), part in Passes(count).cut(tables):
        assert last <= begin <= end
        last = end
        for edge, table in part.items():
            assert table.num_rows
            assert all(begin <= value < end for value in table.column(HASH).to_pylist())
            seen[edge] += table.column("row").to_pylist()
    assert seen == {1: list(range(len(one))), 2: list(range(len(other)))}


@pytest.mark.parametrize(
    ("reads", "count"),
    [
        ({}, 1),
        ({"a": Reads([5000, 5000], 0, 100 * MIB)}, 1),
        ({"a": Reads([5000, 5000], 100 * MIB)}, 200),
        ({"a": Reads([5000, 5000], 100 * MIB, 20 * MIB)}, 240),
        ({"a": Reads([5000, 5000], 100 * MIB), "b": Reads([5000, 5000], 30 * MIB)}, 230),
        ({"a": Reads([5000], 100 * MIB)}, 1),
        ({"a": Reads([500, 500], 100 * MIB)}, 1),
        ({"a": Reads([50, 50], 8)}, 1),
    ],
    ids=["nothing", "flat", "one store", "its flat part too", "two", "one driver", "few tuples", "fits"],
)
def test_passes_are_made_where_blocks_would_be_read_again(reads: dict[str, Reads], count: int) -> None:
    found = passes_for(reads, 1 << 20)
    assert found.count == count
    assert count == 1 or found.dense == frozenset(reads)


def segment(kind: str, size: int, lo: int, hi: int, run: str = "r") -> SegmentInfo:
    return SegmentInfo("s", f"x.{kind}", 0, 1, run, 10, 10, size, "", lo, hi, None, None, None)


def reads_of_all(live: list[SegmentInfo], table: pa.Table, share: Callable[[SegmentInfo, U64], float]) -> Reads:
    """What a store gives to drivers that all have the same tuples."""
    (reads, *others) = reads_at(PLAN, 1, {tree.edge: table for tree in PLAN.trees}, lambda _: live, share, {}).values()
    assert all(other == reads for other in others)
    return reads


def test_reads_count_what_lies_in_the_range_of_the_tuples() -> None:
    size = 64 * deep.BLOCK_BYTES
    live = [segment("deep", size, 0, 1024), segment("arrow", size, 0, 512)]
    half = tuples([0, 2**63 - 1])
    some = tuples(list(range(0, 2**63, 2**63 // 5000)))
    assert reads_of_all(live, some, lambda *_: 1.0) == Reads([64, 64], deep.blocks_in(size // 2), 64)
    assert reads_of_all(live, half, lambda *_: 1.0) == Reads([1, 1], deep.blocks_in(size // 2), 64)
    # A store that one driver alone looks into is not asked for.
    alone = {PLAN.trees[0].edge: half}
    assert not reads_at(PLAN, 1, alone, lambda _: live, lambda *_: pytest.fail("a filter was asked"), {})
    assert not reads_at(PLAN, 2, alone, lambda _: live, lambda *_: 1.0, {})


def test_keys_that_filters_deny_need_no_blocks() -> None:
    old, new = (segment("deep", blocks * deep.BLOCK_BYTES, 0, 1024, f"of {blocks}") for blocks in (1000, 10))
    many = tuples(list(range(0, 2**64, 2**64 // 5000)))
    asked_with: set[int] = set()

    def reads(shares: dict[str, float]) -> Reads:
        def share(info: SegmentInfo, hashes: U64) -> float:
            asked_with.add(len(hashes))
            return shares["old" if info is old else "new"]

        return reads_of_all([old, new], many, share)

    blocks = deep.blocks_in(1000 * deep.BLOCK_BYTES) + deep.blocks_in(10 * deep.BLOCK_BYTES)
    # All keys are in the newest segment, nearly none in the large old one: no driver needs much of that.
    recent = reads({"old": 0.01, "new": 1.0})
    few = deep.blocks_in(10 * deep.BLOCK_BYTES) + len(many) // 100
    assert all(few * 0.95 < asked <= few for asked in recent.asked)
    assert recent.blocks == blocks
    assert passes_for({"s": recent}, 1 << 20) == Passes()
    # All keys are everywhere: two drivers would read everything twice.
    everywhere = reads({"old": 1.0, "new": 1.0})
    assert all(0.9 * blocks < asked <= blocks for asked in everywhere.asked)
    assert passes_for({"s": everywhere}, 1 << 20).count > 1
    # A few keys stand for all.
    assert all(128 <= count <= 256 for count in asked_with)


def test_of_a_run_one_segment_is_asked_about_keys_in_its_range() -> None:
    quarters = [segment("deep", 10_000 * deep.BLOCK_BYTES, lo, lo + 256) for lo in range(0, 1024, 256)]
    asked: list[tuple[SegmentInfo, int, int]] = []

    def share(info: SegmentInfo, hashes: U64) -> float:
        asked.append((info, int(hashes[0]), int(hashes[-1])))
        return 0.5

    # Tuples come from one half of the hashes, and most from the second quarter.
    few, many = (list(range(lo, lo + 2**62, 2**62 // count)) for lo, count in ((0, 80), (2**62, 160)))
    found = reads_of_all(quarters, tuples(few + many), share)
    assert all(115 < needed <= 120 for needed in found.asked)
    drivers_and_stores = 6
    assert len(asked) == drivers_and_stores
    assert all(info is quarters[1] and 2**62 <= first < last < 2**63 for info, first, last in asked)


def test_keys_that_do_not_get_as_far_as_a_store_need_no_blocks_of_it() -> None:
    lookups = {node.id: 1000 // (depth + 1) for tree in PLAN.trees for depth, node in enumerate(tree.nodes[0].walk())}
    shares = arriving(PLAN, lookups)
    assert sorted(shares.values()) == [0.5] * 3 + [1.0] * 3
    live = [segment("deep", 10_000 * deep.BLOCK_BYTES, 0, 1024)]
    many = tuples(list(range(0, 2**64, 2**64 // 200)))
    tables = {tree.edge: many for tree in PLAN.trees}
    stores = reads_at(PLAN, 1, tables, lambda _: live, lambda *_: 1.0, shares)
    needed = sorted(n for reads in stores.values() for n in reads.asked)
    assert all(95 <= n <= 100 for n in needed[:3])
    assert all(195 <= n <= 200 for n in needed[3:])
    assert arriving(PLAN, {}) == {}
