"""Rows are found by a key that their run is not sorted by: with an index and without, as one by one."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.config import KEY_GROUPS
from plait.kernels.search import rows_with
from plait.query.relation import ColumnDef
from plait.query.store import Key, Store
from plait.state.files.segment_home import SegmentHome
from plait.state.segments.block_segment import writing_deep
from plait.state.segments.filter_sets import Sets
from plait.state.segments.keys import hash_key
from plait.state.segments.run import MemoryRun
from plait.state.segments.searched import searched
from plait.state.segments.segment import write_segment
from plait.state.segments.segment_reader import Segment, open_segment
from plait.state.segments.view import View

OWN = Key(("k",), ("bigint",), True)
OTHERS = (Key(("m",), ("bigint",), True), Key(("m", "name"), ("bigint", "string"), False))
STORE = Store(
    "s", "r", OWN, tuple(ColumnDef(c, c, t) for c, t in (("k", "bigint"), ("m", "bigint"), ("name", "string"))),
    masked=False, time_column=None, keep_us=None, ttl_us=None, searched=OTHERS,
)  # fmt: skip


def some_rows(seed: int, count: int) -> tuple[pa.Table, np.ndarray]:  # type: ignore[type-arg]
    """Rows sorted by their own hash; some have NULL in the other keys."""
    choose = random.Random(seed)
    table = pa.table(
        {
            "k": pa.array([choose.randrange(40) for _ in range(count)], pa.int64()),
            "m": pa.array([choose.choice((None, *range(12))) for _ in range(count)], pa.int64()),
            "name": pa.array([choose.choice((None, "a", "b", "")) for _ in range(count)], pa.string()),
        }
    )
    hashes = hash_key(table, OWN)
    order = np.argsort(hashes, kind="stable")
    return table.take(pa.array(order)), hashes[order]


def written(path: Path, kind: str, table: pa.Table, hashes: np.ndarray) -> Segment:  # type: ignore[type-arg]
    home = SegmentHome(str(path))
    if kind == "memory":
        return MemoryRun(hashes, table)
    if kind == "deep":
        with writing_deep(home, STORE, table.schema, 9000.0, False) as out:
            out.write(hashes[: len(hashes) // 3], table.slice(0, len(hashes) // 3))
            out.write(hashes[len(hashes) // 3 :], table.slice(len(hashes) // 3))
        return open_segment(home, out.info(epoch=0, tier=0, run="a"))
    tier = int(kind == "merged")
    return open_segment(home, write_segment(home, STORE, table, hashes, epoch=0, tier=tier, sync=False))


@pytest.mark.parametrize("kind", ["memory", "fresh", "merged", "deep"])
def test_rows_are_found_by_another_key(kind: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    @settings(deadline=None, derandomize=True, database=None, max_examples=25)
    @given(st.integers(0, 10**6), st.sampled_from((6, 60)), st.sampled_from(OTHERS), st.integers(0, 3))
    def check(seed: int, count: int, key: Key, task: int) -> None:
        table, hashes = some_rows(seed, count)
        run = written(tmp_path_factory.mktemp(kind), kind, table, hashes)
        assert (run.index(key.columns) is None) == (kind in ("memory", "fresh"))
        first = seed % 3
        view = View(run.trimmed(first), Sets(), 0, {})
        asked = pa.table({"m": pa.array([1, 2, 3, 99], pa.int64()), "name": pa.array(["a", "b", "", "a"])})
        # One that is asked for twice is found once.
        probes = np.sort(np.append(hash_key(asked, key), hash_key(asked, key)[:1]))
        low, high = (g * KEY_GROUPS // 4 * (2**64 // KEY_GROUPS) for g in (task, task + 1))
        rows = table.to_pylist()
        wanted = {tuple(row[c] for c in key.columns) for row in asked.to_pylist()}
        expected = [
            row
            for row, own in zip(rows[first:], hashes[first:].tolist(), strict=True)
            if low <= own < high and tuple(row[c] for c in key.columns) in wanted
        ]
        found = searched(view, key, probes, (low, high))
        assert np.array_equal(np.sort(found.hashes), found.hashes)
        taken = found.take(["k", "m", "name"], np.arange(len(found.hashes)))
        read = pa.table(taken, names=["k", "m", "name"])
        assert sorted(map(repr, read.to_pylist())) == sorted(map(repr, expected))
        if read.num_rows:
            assert np.array_equal(hash_key(read, key), found.hashes)
        at = found.find(probes)
        assert int((at.high - at.low)[np.diff(at.at, prepend=-1) > 0].sum()) >= len(expected)

    check()


@settings(deadline=None, derandomize=True, database=None, max_examples=50)
@given(st.lists(st.integers(0, 2**64 - 1)), st.lists(st.integers(0, 2**64 - 1)), st.integers(0, 60))
def test_a_search_finds_what_a_loop_finds(hashes: list[int], probes: list[int], shift: int) -> None:
    some = [value >> shift for value in hashes + probes[:3]]
    asked = sorted(value >> shift for value in probes)
    found = rows_with(np.array(some, np.uint64), np.array(asked, np.uint64))
    assert found.tolist() == [i for i, value in enumerate(some) if value in asked]
