"""Deep segments: the same rows as in memory, whatever is asked of them; and every flipped bit is found."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plait.errors import CorruptionError
from plait.kernels.runs import group_starts
from plait.query.store import Store
from plait.state.files.segment_home import SegmentHome
from plait.state.segments import block_segment as deep
from plait.state.segments import segment_reader as reader
from plait.state.segments.block_cache import CACHE
from plait.state.segments.block_segment import DeepSegment, writing_deep
from plait.state.segments.run import METER, MemoryRun
from plait.state.segments.segment import SegmentInfo
from plait.state.segments.segment_reader import open_segment
from tests.state.rows import everything, key, sorted_rows, store, write_deep

QUICK = settings(
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=40,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
BLOCKS = [1, 300, 64 << 10]


@pytest.fixture(autouse=True)
def _fresh_process() -> Iterator[None]:
    reader._open.clear()
    CACHE.resize(0)
    CACHE.resize(1 << 20)
    yield
    CACHE.resize(64 << 20)


def pair(directory: Path, of: Store, table: pa.Table, pieces: int = 1) -> tuple[MemoryRun, DeepSegment, SegmentInfo]:
    """The same rows in memory and as a deep segment."""
    info = write_deep(directory, of, table, pieces=pieces)
    found = open_segment(SegmentHome(str(directory)), info)
    assert isinstance(found, DeepSegment)
    rows, hashes = sorted_rows(table, of.key)
    return MemoryRun(hashes, rows), found, info


def same(one: Sequence[pa.Array], other: Sequence[pa.Array]) -> bool:
    return [a.type for a in one] == [a.type for a in other] and [a.to_pylist() for a in one] == [
        a.to_pylist() for a in other
    ]


@pytest.mark.parametrize("block_bytes", BLOCKS)
@pytest.mark.parametrize("pieces", [1, 7])
def test_every_type_comes_back_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int, pieces: int
) -> None:
    monkeypatch.setattr(deep, "BLOCK_BYTES", block_bytes)
    memory, segment, info = pair(tmp_path, store(), everything(20), pieces)
    assert segment.hashes.tolist() == memory.hashes.tolist()
    assert (info.rows, info.keys, info.deep, info.max_arrived) == (120, 120, True, 9)
    assert info.bytes == (tmp_path / info.path).stat().st_size
    for begin, end in ((0, 120), (0, 1), (119, 120), (3, 77), (16, 32)):
        found = segment.slice(begin, end)
        found.validate(full=True)
        assert found.schema == memory.slice(begin, end).schema
        assert found.to_pylist() == memory.slice(begin, end).to_pylist()
    names = memory.table.column_names
    for rows in ([], [0], [119], [5, 5, 5], list(range(120)), [119, 0, 60, 60, 1], [7, 3, 7]):
        at = np.array(rows, np.int64)
        assert same(segment.take(names, at), memory.take(names, at))
    blocks = len(segment.sums)
    assert blocks == -(-120 // segment.block_rows)
    assert blocks == (120 if block_bytes == 1 else blocks)


@pytest.mark.parametrize("kind", ["k", "string", "nested", "void", "decimal(38,0)", "boolean", "binary"])
def test_columns_can_be_read_apart_again_and_in_any_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(deep, "BLOCK_BYTES", 1000)
    memory, segment, _ = pair(tmp_path, store(), everything(10))
    at = np.array([0, 2, 2, 40, 41, 59], np.int64)
    for names in ([kind], [kind, "int"], ["int", kind], [kind, kind]):
        for _ in range(2):
            assert same(segment.take(names, at), memory.take(names, at))


HASHES = st.lists(st.one_of(st.integers(0, 12), st.integers(0, 2**64 - 1)), min_size=1, max_size=150).map(sorted)


@pytest.mark.parametrize("columns", [True, False], ids=["columns", "hash only"])
@QUICK
@given(HASHES, HASHES, st.sampled_from(BLOCKS), st.data())
def test_a_deep_segment_answers_as_a_run_in_memory_does(
    tmp_path: Path, columns: bool, values: list[int], probes: list[int], block_bytes: int, data: st.DataObject
) -> None:
    hashes = np.array(values, np.uint64)
    texts = pa.array([None if i % 7 == 3 else "x" * (i % 50) for i in range(len(values))], pa.string())
    table = pa.table({"v": np.arange(len(values)), "s": texts}) if columns else pa.table({})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deep, "BLOCK_BYTES", block_bytes)
        with writing_deep(SegmentHome(str(tmp_path)), store(), table.schema, 20.0, sync=False) as out:
            out.write(hashes, table)
        info = out.info(epoch=0, tier=2, run="r")
    starts = group_starts(hashes)
    first = int(starts[data.draw(st.integers(0, len(starts) - 2))])
    memory = MemoryRun(hashes, table).trimmed(first)
    segment = open_segment(SegmentHome(str(tmp_path)), info).trimmed(first)
    assert (segment.first, segment.hashes.tolist()) == (first, memory.hashes.tolist())
    asked = np.array(sorted([*probes, *values]), np.uint64)
    found, expected = segment.find(asked), memory.find(asked)
    assert found.at.tolist() == expected.at.tolist()
    assert found.low.tolist() == expected.low.tolist()
    assert found.high.tolist() == expected.high.tolist()
    assert found.asked == expected.asked
    low, high = sorted(data.draw(st.tuples(*[st.sampled_from([0, 2**64, *asked.tolist()])] * 2)))
    inside, within = segment.between(low, high)
    assert inside.tolist() == [v for v in memory.hashes.tolist() if low <= v < high]
    assert inside.tolist() == memory.between(low, high)[0].tolist()
    assert not columns or within.to_pylist() == memory.between(low, high)[1].to_pylist()
    rows = np.array(data.draw(st.lists(st.integers(first, len(values) - 1), max_size=30)), np.int64)
    names = ["s", "v"] if columns else []
    assert same(segment.take(names, rows), memory.take(names, rows))
    if not columns:
        return
    begin = data.draw(st.integers(first, len(values) - 1))
    end = data.draw(st.integers(begin + 1, len(values)))
    assert segment.slice(begin, end).to_pylist() == memory.slice(begin, end).to_pylist()


def test_a_store_without_columns_is_asked_for_no_column(tmp_path: Path) -> None:
    with writing_deep(SegmentHome(str(tmp_path)), store(), pa.schema([]), 8.0, sync=False) as out:
        out.write(np.arange(9000, dtype=np.uint64), pa.table({}))
    segment = open_segment(SegmentHome(str(tmp_path)), out.info(epoch=0, tier=2, run="r"))
    assert segment.find(np.array([5, 8999], np.uint64)).low.tolist() == [5, 8999]
    assert segment.take([], np.array([5, 8999], np.int64)) == []
    assert segment.slice(0, 10).num_columns == 0


def test_a_block_that_was_read_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deep, "BLOCK_BYTES", 1000)
    memory, segment, _ = pair(tmp_path, store(), everything(50))
    before = METER.blocks_read, METER.blocks_cached
    at = np.arange(300)
    segment.take(["k", "int"], at)
    assert (METER.blocks_read, METER.blocks_cached) == (before[0] + len(segment.sums), before[1])
    assert same(segment.take(["int", "k"], at), memory.take(["int", "k"], at))
    assert (METER.blocks_read, METER.blocks_cached) == (before[0] + len(segment.sums), before[1] + len(segment.sums))
    # Merges pass once: they leave the cache alone.
    held = CACHE.bytes
    segment.slice(0, 300)
    assert CACHE.bytes == held


def test_a_key_that_is_not_there_is_denied_by_the_filter(tmp_path: Path) -> None:
    _, segment, _ = pair(tmp_path, store(), pa.table({"k": np.arange(20_000)}))
    absent = np.sort(np.random.default_rng(1).integers(0, 2**64, 20_000, np.uint64))
    before = METER.filter_asked, METER.filter_passed, METER.filter_found
    assert len(segment.find(absent).at) == 0
    asked, passed, found = METER.filter_asked - before[0], METER.filter_passed - before[1], METER.filter_found
    assert asked > 19_900
    assert passed < 0.02 * asked
    assert found == before[2]
    assert len(segment.find(segment.hashes).at) == 20_000


# ---------------------------------------------------------------- damage


def regions(data: bytes, info: SegmentInfo) -> dict[str, tuple[int, int]]:
    """Where the parts of a deep segment lie."""
    (length,) = struct.unpack("<Q", data[-8:])
    index: dict[str, Any] = json.loads(data[-8 - length : -8])
    found = {"schema": (info.meta, info.meta + index["schema"][1])}
    for name in ("hashes", "fence", "filter", "offsets", "sizes", "sums"):
        begin, count = index[name]
        found[name] = (begin, begin + 8 * count)
    return {**found, "index": (len(data) - 8 - length, len(data) - 8), "length": (len(data) - 8, len(data))}


PARTS = ["schema", "hashes", "fence", "filter", "offsets", "sizes", "sums", "index", "length"]


@pytest.mark.parametrize("part", PARTS)
def test_a_bit_that_flips_behind_the_blocks_is_found_when_the_segment_is_opened(tmp_path: Path, part: str) -> None:
    info = write_deep(tmp_path, store(), everything(200))
    path = tmp_path / info.path
    good = path.read_bytes()
    begin, end = regions(good, info)[part]
    assert end > begin
    rng = np.random.default_rng(len(part))
    for at in {begin, end - 1, *rng.integers(begin, end, 20).tolist()}:
        bad = bytearray(good)
        bad[at] ^= 1 << int(rng.integers(0, 8))
        path.write_bytes(bad)
        with pytest.raises(CorruptionError, match="SEGMENT_CORRUPT") as error:
            open_segment(SegmentHome(str(tmp_path)), info)
        assert "backup" in error.value.remedy
    path.write_bytes(good)
    assert len(open_segment(SegmentHome(str(tmp_path)), info).hashes) == 1200


def test_a_bit_that_flips_in_a_block_is_found_when_the_block_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deep, "BLOCK_BYTES", 3000)
    memory, good_segment, info = pair(tmp_path, store(), everything(30))
    path = tmp_path / info.path
    good = path.read_bytes()
    offsets, block_rows = good_segment.offsets.astype(np.int64), good_segment.block_rows
    assert len(offsets) > 4
    assert (offsets[0], offsets[-1]) == (0, info.meta), "every byte before the rest is in a block"
    rng = np.random.default_rng(4)
    for block in range(len(offsets) - 1):
        for at in {*offsets[block : block + 2] - [0, 1], *rng.integers(offsets[block], offsets[block + 1], 10)}:
            bad = bytearray(good)
            bad[at] ^= 1 << int(rng.integers(0, 8))
            path.write_bytes(bad)
            segment = open_segment(SegmentHome(str(tmp_path)), info)
            rows = np.arange(block * block_rows, min(180, (block + 1) * block_rows))
            CACHE.resize(0)
            for read in (
                lambda segment=segment, rows=rows: segment.take(["k"], rows[:1]),
                lambda segment=segment, rows=rows: segment.slice(int(rows[0]), int(rows[-1]) + 1),
            ):
                with pytest.raises(CorruptionError, match=f"SEGMENT_CORRUPT.*block {block} of"):
                    read()
            others = np.setdiff1d(np.arange(180), rows)
            assert same(segment.take(["k", "string"], others), memory.take(["k", "string"], others))


def test_a_deep_segment_that_could_not_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    def broken() -> None:
        with writing_deep(SegmentHome(str(tmp_path)), store(), pa.schema([("k", pa.int64())]), 16.0, sync=False) as out:
            out.write(np.array([1, 2], np.uint64), pa.table({"k": [1, 2]}))
            out.write(np.array([3], np.uint64), pa.table({"other": [1]}))

    with pytest.raises(KeyError, match="k"):
        broken()
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


def test_the_claims_of_a_segment_written_in_pieces_are_those_of_its_rows(tmp_path: Path) -> None:
    times = pa.array([None, 5, 9, 2, 7, None], pa.timestamp("us"))
    table = pa.table({"k": ["a", "b", "a", "c", "b", "a"], "t": times})
    of = store(key(("k", "string")), time="t")
    one, many = write_deep(tmp_path, of, table), write_deep(tmp_path, of, table, pieces=6)
    for info in (one, many):
        assert (info.rows, info.keys, info.min_time, info.max_time) == (6, 3, 2, 9)
    assert (one.lo_group, one.hi_group) == (many.lo_group, many.hi_group)
