"""Expansion against itertools.product, chunk by chunk."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.kernels.probe import LIMIT, expand, gather_ranges, product_ends


@st.composite
def lists(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    k, n = draw(st.integers(0, 4)), draw(st.integers(0, 8))
    starts = draw(st.lists(st.integers(0, 100), min_size=k * n, max_size=k * n))
    counts = draw(st.lists(st.integers(0, 4), min_size=k * n, max_size=k * n))
    return np.array(starts, np.int64).reshape(k, n), np.array(counts, np.int64).reshape(k, n)


def oracle_expand(starts: np.ndarray, counts: np.ndarray) -> list[tuple[int, ...]]:
    k, n = starts.shape
    out = []
    for r in range(n):
        ranges = [range(starts[j, r], starts[j, r] + counts[j, r]) for j in range(k)]
        out += [(r, *pick) for pick in itertools.product(*ranges)]
    return out


def as_tuples(rows: np.ndarray, picks: np.ndarray) -> list[tuple[int, ...]]:
    return list(zip(rows.tolist(), *picks.tolist(), strict=True))


@given(lists())
def test_ends_are_the_running_sum_of_products(given_lists: tuple[np.ndarray, np.ndarray]) -> None:
    _, counts = given_lists
    assert product_ends(counts).tolist() == np.cumsum(counts.prod(axis=0)).tolist()


@given(lists(), st.data())
def test_any_interval_of_the_expansion_is_that_of_the_nested_loops(
    given_lists: tuple[np.ndarray, np.ndarray], data: st.DataObject
) -> None:
    starts, counts = given_lists
    ends = product_ends(counts)
    oracle = oracle_expand(starts, counts)
    begin = data.draw(st.integers(0, len(oracle)))
    stop = data.draw(st.integers(begin, len(oracle)))
    rows, picks = expand(starts, counts, ends, begin, stop)
    assert rows.dtype == picks.dtype == np.int64
    assert picks.shape == (starts.shape[0], stop - begin)
    assert as_tuples(rows, picks) == oracle[begin:stop]


@given(lists(), st.integers(1, 7))
def test_chunks_of_any_size_give_the_whole(given_lists: tuple[np.ndarray, np.ndarray], size: int) -> None:
    starts, counts = given_lists
    ends = product_ends(counts)
    total = int(ends[-1]) if len(ends) else 0
    pieces = [expand(starts, counts, ends, at, min(at + size, total)) for at in range(0, total, size)]
    assert [t for piece in pieces for t in as_tuples(*piece)] == oracle_expand(starts, counts)


def test_a_hot_key_is_entered_in_the_middle_without_being_expanded() -> None:
    counts = np.full((3, 1), 1_000_000, np.int64)
    starts = np.array([[10], [20], [30]])
    ends = product_ends(counts)
    assert ends.tolist() == [10**18]
    number = 123_456_654_321_000_999
    rows, picks = expand(starts, counts, ends, number, number + 3)
    assert rows.tolist() == [0, 0, 0]
    assert picks.tolist() == [[123_466] * 3, [654_341] * 3, [1029, 1030, 1031]]


def test_a_product_that_cannot_be_counted_is_refused() -> None:
    with pytest.raises(OverflowError):
        product_ends(np.full((2, 1), 2**32, np.int64))  # wraps to zero in 64 bits
    with pytest.raises(OverflowError):
        product_ends(np.full((1, 3), 2**61, np.int64))
    with pytest.raises(OverflowError):
        product_ends(np.array([[2**40], [2**40], [2**40]]))
    assert product_ends(np.full((1, 2), 2**61, np.int64)).tolist() == [2**61, LIMIT]
    assert product_ends(np.array([[2**40], [2**40], [0]])).tolist() == [0]


def test_rows_beyond_the_end_are_refused() -> None:
    one = np.ones((1, 1), np.int64)
    for begin, stop in ((0, 2), (-1, 1), (1, 0)):
        with pytest.raises(IndexError):
            expand(one, one, np.ones(1, np.int64), begin, stop)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 5)), max_size=20))
def test_ranges_are_concatenated(ranges: list[tuple[int, int]]) -> None:
    lo = np.array([a for a, _ in ranges], np.int64)
    hi = lo + np.array([n for _, n in ranges], np.int64)
    assert gather_ranges(lo, hi).tolist() == [v for a, n in ranges for v in range(a, a + n)]
