"""The coordinated bottom-k sample: the smallest keys, what other stores have of them, and how many keys there are."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.config import KEY_GROUPS
from plait.query.store import MASK, Filter
from plait.runtime.task.sampling import KEYS, front, key_count, passing, sampled, smallest
from plait.state.segments.filter_sets import Sets
from plait.state.segments.run import MemoryRun
from plait.state.segments.view import View

QUICK = settings(deadline=None, derandomize=True, database=None, max_examples=80)

Row = tuple[int, int]
"""(hash, mask)"""

ROWS = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 7)), max_size=30)
FILTERS = st.sampled_from([(), (0,), (1,), (2,), (0, 2)])
KNOWN = {f: Filter(f, str(f)) for f in range(3)}
STORES = st.lists(st.tuples(FILTERS, st.lists(ROWS, max_size=3)), min_size=1, max_size=4)
"""(filters, runs)"""


def run_of(rows: list[Row]) -> View:
    rows = sorted(rows)
    hashes = np.array([h for h, _ in rows], np.uint64)
    run = MemoryRun(hashes, pa.table({MASK: pa.array([m for _, m in rows], pa.int64())}))
    return View(run, Sets(bits=(0, 1, 2)), 0, KNOWN)


def expected_passing(rows: list[Row], filters: tuple[int, ...]) -> list[int]:
    return sorted(h for h, mask in rows if not filters or any(mask >> bit & 1 for bit in filters))


@QUICK
@given(ROWS, FILTERS, st.integers(1, 6))
def test_oracle_the_smallest_keys_and_the_tuples_that_have_them(
    rows: list[Row], filters: tuple[int, ...], k: int
) -> None:
    keys, tuples = smallest(passing(run_of(rows), filters), k)
    expected = sorted(set(expected_passing(rows, filters)))[:k]
    assert keys.tolist() == expected
    assert tuples == sum(h in expected for h in expected_passing(rows, filters))


@pytest.mark.parametrize("copies", [1, 5, 700])
def test_hot_keys_do_not_crowd_others_out_of_the_sample(copies: int) -> None:
    hashes = np.repeat(np.arange(20, dtype=np.uint64), copies)
    keys, tuples = smallest(hashes, 7)
    assert keys.tolist() == list(range(7))
    assert tuples == 7 * copies
    assert smallest(hashes, 7)[0].tolist() == list(range(7))


@QUICK
@given(ROWS, st.integers(1, 6))
def test_oracle_the_smallest_of_a_run_are_its_smallest_distinct_hashes(rows: list[Row], k: int) -> None:
    assert smallest(run_of(rows).hashes, k)[0].tolist() == sorted({h for h, _ in rows})[:k]


@QUICK
@given(
    st.sets(st.integers(0, 12), min_size=1),
    st.lists(st.tuples(FILTERS, st.lists(ROWS, max_size=3)), min_size=1, max_size=4),
)
def test_oracle_patterns_say_which_stores_have_a_key_and_how_many_rows(
    keys: set[int], stores: list[tuple[tuple[int, ...], list[list[Row]]]]
) -> None:
    named = [(f"s{i}", filters) for i, (filters, _) in enumerate(stores)]
    runs = [[run_of(rows) for rows in parts] for _, parts in stores]
    found = sampled(4, (1,), np.array(sorted(keys), np.uint64), 99, named, runs)
    assert (found.edge, found.filters, found.stores, found.tuples) == (4, (1,), tuple(named), 99)
    expected: dict[int, list[int]] = {}
    have = [Counter(expected_passing([r for rows in parts for r in rows], filters)) for filters, parts in stores]
    for key in keys:
        pattern = sum(1 << i for i, counts in enumerate(have) if counts[key])
        mine = expected.setdefault(pattern, [0] * (1 + len(stores)))
        for i, rows in enumerate([1, *(counts[key] for counts in have)]):
            mine[i] += rows
    assert found.patterns == expected


def test_a_sample_of_more_stores_than_an_integer_has_bits_is_still_right() -> None:
    # Store i has key i only.
    count = 70
    runs = [[run_of([(i, 0)])] for i in range(count)]
    found = sampled(1, (), np.arange(count, dtype=np.uint64), count, [(f"s{i}", ()) for i in range(count)], runs)
    assert sorted(found.patterns) == [1 << i for i in range(count)]


@QUICK
@given(st.lists(ROWS, max_size=4), st.sampled_from([1.0, 0.5, 0.25]))
def test_oracle_few_keys_are_simply_counted(runs: list[list[Row]], share: float) -> None:
    distinct = {h for rows in runs for h, _ in rows}
    assert key_count([run_of(rows).hashes for rows in runs], share) == len(distinct) / share


@pytest.mark.parametrize("share", [1.0, 0.5, 0.125])
@pytest.mark.parametrize("copies", [1, 3])
def test_many_keys_are_estimated_from_the_smallest(share: float, copies: int) -> None:
    random = np.random.default_rng(7)
    hashes = random.integers(0, 1 << 64, 100_000, np.uint64)
    mine = np.sort(np.repeat(hashes[hashes < np.uint64(int(share * 2**64) - 1)], copies))
    runs = [mine[::2], mine[1::2], mine[5::7]]
    # The error of a bottom-k estimate is about 1/√k; four times that is as good as never.
    assert key_count(runs, share) == pytest.approx(100_000, rel=4 / KEYS**0.5)


@pytest.mark.parametrize("groups", [1, 7, 512, 1023, KEY_GROUPS])
def test_oracle_the_front_of_a_run_is_what_the_first_key_groups_own(groups: int) -> None:
    edge = groups << 54
    hashes = [0, 5, edge - 1, edge, edge + 1, 2**64 - 1]
    run = np.array(sorted(h for h in hashes if h < 2**64), np.uint64)
    assert front(run, groups).tolist() == [h for h in run.tolist() if h >> 54 < groups]
    assert front(run[:0], groups).tolist() == []


def test_a_store_without_runs_has_no_keys() -> None:
    assert key_count([], 1.0) == 0.0
    assert key_count([np.empty(0, np.uint64)], 0.5) == 0.0
