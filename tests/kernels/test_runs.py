"""Lookups and merges against naive loops."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from plait.kernels.runs import STRIDE, _lookup, fence, group_starts, lookup, lookup_fenced, merge_order

FEW = st.lists(st.integers(0, 20), max_size=60).map(sorted)
MANY = st.lists(st.integers(0, 2**64 - 1), max_size=60).map(sorted)
RUN = st.one_of(FEW, MANY)


def run(values: list[int]) -> np.ndarray:
    return np.array(values, np.uint64)


def oracle_lookup(probes: list[int], values: list[int]) -> list[tuple[int, int]]:
    found = []
    for p in probes:
        lo = sum(v < p for v in values)
        found.append((lo, lo + values.count(p)))
    return found


@given(RUN, RUN)
def test_a_lookup_finds_what_the_naive_loop_finds(probes: list[int], values: list[int]) -> None:
    lo, hi = lookup(run(probes), run(values))
    assert list(zip(lo.tolist(), hi.tolist(), strict=True)) == oracle_lookup(probes, values)


def test_a_lookup_in_long_runs_agrees_with_binary_search() -> None:
    rng = np.random.default_rng(7)
    for size, spread in ((200_000, 50_000), (200_000, 2**63), (1000, 10)):
        values = np.sort(rng.integers(0, spread, size, dtype=np.uint64))
        probes = np.sort(rng.integers(0, spread, 5000, dtype=np.uint64))
        lo, hi = lookup(probes, values)
        assert (lo == np.searchsorted(values, probes, "left")).all()
        assert (hi == np.searchsorted(values, probes, "right")).all()


GROUPS = st.lists(
    st.tuples(
        st.one_of(st.integers(0, 9), st.integers(0, 2**64 - 1)), st.sampled_from((1, 2, 511, 512, 513, 1024, 2000))
    ),
    max_size=12,
)
"""Values with how often they occur: groups that end on, before and behind a fence post, and some that span several."""


@given(GROUPS, RUN, st.integers(0, 40))
def test_a_fence_changes_nothing_about_what_is_found(
    groups: list[tuple[int, int]], more: list[int], noise: int
) -> None:
    repeated = [np.full(times, value, np.uint64) for value, times in groups]
    spread = np.linspace(0, 2.0**63, noise * 37).astype(np.uint64)
    values = np.sort(np.concatenate([run(more), spread, *repeated]))
    near = {v + d for v, _ in groups for d in (-1, 0, 1) if 0 <= v + d < 2**64}
    probes = np.sort(np.concatenate([run(sorted(near)), run(more), values[:: STRIDE // 2], values[-1:]]))
    lo, hi = lookup(probes, values)
    lo_fenced, hi_fenced = lookup_fenced(probes, fence(values), values)
    assert lo_fenced.tolist() == lo.tolist()
    assert hi_fenced.tolist() == hi.tolist()


def test_a_fence_of_long_runs_agrees_with_binary_search() -> None:
    rng = np.random.default_rng(8)
    for size, spread in ((200_000, 50_000), (200_000, 2**63), (STRIDE, 7), (STRIDE + 1, 7), (3 * STRIDE, 2)):
        values = np.sort(rng.integers(0, spread, size, dtype=np.uint64))
        probes = np.sort(np.concatenate([rng.integers(0, spread, 5000, dtype=np.uint64), values[::STRIDE]]))
        lo, hi = lookup_fenced(probes, fence(values), values)
        assert (lo == np.searchsorted(values, probes, "left")).all()
        assert (hi == np.searchsorted(values, probes, "right")).all()


def test_read_only_strided_and_narrow_arrays_share_one_compiled_version() -> None:
    values = run(list(range(100)))
    values.flags.writeable = False
    lookup(values, values)
    versions = len(_lookup.signatures)  # type: ignore[attr-defined]
    lookup(np.arange(0, 100, 2, dtype=np.uint64)[::2], np.arange(100, dtype=np.uint32))
    buffer = np.zeros(81, np.uint8)[1:].view(np.uint64)
    assert not buffer.flags.aligned
    assert lookup(buffer, values)[1].tolist() == [1] * 10
    assert len(_lookup.signatures) == versions == 1  # type: ignore[attr-defined]


@given(st.lists(RUN, max_size=9))
def test_merging_is_a_stable_sort_of_the_concatenation(runs: list[list[int]]) -> None:
    merged = merge_order([run(r) for r in runs])
    everything = run([v for r in runs for v in r])
    assert merged.dtype == np.int64
    assert merged.tolist() == np.argsort(everything, kind="stable").tolist()


def test_of_equal_hashes_the_earlier_run_comes_first() -> None:
    same = run([5, 5])
    assert merge_order([same, same, same]).tolist() == [0, 1, 2, 3, 4, 5]


def test_the_order_of_a_merge_can_be_written_to() -> None:
    for runs in ([], [run([1])], [run([1]), run([0])]):
        order = merge_order(runs)
        order += 1
        assert len(order) == len(runs)


@given(RUN)
def test_group_starts_are_the_offsets_of_the_keys(values: list[int]) -> None:
    starts = group_starts(run(values)).tolist()
    oracle = [i for i, v in enumerate(values) if i == 0 or values[i - 1] != v]
    assert starts == [*oracle, len(values)]
