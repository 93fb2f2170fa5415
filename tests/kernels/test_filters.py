"""Filters: no hash that was put in is ever denied, and few others pass."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from plait.kernels.filters import BITS, ask_filter, build_filter

TOP = 2**64 - 1
VALUE = st.integers(0, TOP)
NARROW = st.builds(lambda base, steps: [min(base + s, TOP) for s in steps], VALUE, st.lists(st.integers(0, 300)))
HASHES = st.one_of(st.lists(VALUE), NARROW, st.lists(st.sampled_from((0, 1, 2**63, TOP - 1, TOP)))).map(sorted)


def passing(hashes: np.ndarray, probes: np.ndarray) -> np.ndarray:
    return probes[ask_filter(build_filter(hashes), int(hashes[0]), int(hashes[-1]), probes)]


@given(HASHES.filter(bool))
@example([0])
@example([TOP])
@example([0, TOP])
@example([0, 0, 0])
@example([TOP - 1, TOP, TOP])
def test_what_was_put_in_is_never_denied(values: list[int]) -> None:
    hashes = np.array(values, np.uint64)
    assert passing(hashes, hashes).tolist() == values
    once = np.unique(hashes)
    assert passing(hashes, once).tolist() == once.tolist()


@pytest.mark.parametrize("size", [1, 42, 43, 1000, 100_000])
@pytest.mark.parametrize("spread", [2**64, 2**40])
def test_what_was_put_in_is_never_denied_however_much_it_is(size: int, spread: int) -> None:
    hashes = np.sort(np.random.default_rng(size).integers(2**64 - spread, 2**64, size, np.uint64, endpoint=False))
    assert len(passing(hashes, hashes)) == size


@given(HASHES.filter(bool), HASHES)
def test_nothing_outside_its_range_passes_and_indices_ascend(values: list[int], asked: list[int]) -> None:
    hashes, probes = np.array(values, np.uint64), np.array(asked, np.uint64)
    found = ask_filter(build_filter(hashes), values[0], values[-1], probes)
    assert found.dtype == np.int64
    assert (np.diff(found) > 0).all()
    assert all(values[0] <= asked[i] <= values[-1] for i in found)


@pytest.mark.parametrize("size", [100, 3000, 200_000])
def test_few_others_pass(size: int) -> None:
    rng = np.random.default_rng(size)
    hashes = np.sort(rng.integers(0, 2**64, size, np.uint64))
    probes = np.setdiff1d(np.sort(rng.integers(hashes[0], hashes[-1], 200_000, np.uint64)), hashes)
    assert len(passing(hashes, probes)) < 0.02 * len(probes)


def test_a_filter_weighs_what_its_distinct_hashes_do() -> None:
    hashes = np.sort(np.random.default_rng(0).integers(0, 2**64, 10_000, np.uint64))
    words = build_filter(np.repeat(hashes, 5))
    assert len(words) == len(build_filter(hashes))
    assert 8 * len(words) == pytest.approx(10_000 * BITS / 8, abs=64)
