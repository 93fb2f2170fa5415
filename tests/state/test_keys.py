"""Keys hash and compare as Spark compares them."""

from __future__ import annotations

from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.kernels.hashing import mix64
from plait.state.segments.keys import hash_key, homogeneous, null_rows, same_keys
from tests.state.rows import KEYS, key, sorted_rows


def hashes(values: list[object], kind: pa.DataType, spark: str = "bigint") -> list[int]:
    return [int(h) for h in hash_key(pa.table({"k": pa.array(values, kind)}), key(("k", spark)))]


@pytest.mark.parametrize("kind", KEYS)
def test_slices_and_chunks_hash_as_the_whole(kind: str) -> None:
    arrow, values = KEYS[kind]
    whole = pa.record_batch({"k": pa.array(values * 3, arrow)})
    expected = hash_key(whole, key(("k", kind)))
    assert len(set(expected.tolist())) == len(set(values))
    for begin in range(16):
        for length in (0, 1, 3, 15 - begin):
            part = whole.slice(begin, length)
            assert hash_key(part, key(("k", kind))).tolist() == expected[begin : begin + length].tolist()
    chunked = pa.Table.from_batches([whole.slice(1, 4), whole.slice(0, 0), whole.slice(5)])
    assert hash_key(chunked, key(("k", kind))).tolist() == expected[1:].tolist()
    empty = pa.table({"k": pa.chunked_array([], arrow)})
    assert hash_key(empty, key(("k", kind))).tolist() == []


def test_an_integer_hashes_the_same_in_every_width() -> None:
    for value in (-128, -1, 0, 5, 127):
        widths = [hashes([value], t) for t in (pa.int8(), pa.int16(), pa.int32(), pa.int64())]
        assert all(w == widths[0] for w in widths)
        assert widths[0] == mix64(np.array([value], np.int64).view(np.uint64)).tolist()


def test_all_zeros_are_one_and_all_nans_are_one() -> None:
    odd = np.array([0x7FF8000000000001, 0xFFF0000000000123, 0x7FF8000000000000], np.uint64).view(np.float64)
    assert len(set(hashes(list(odd), pa.float64()))) == 1
    assert hashes([-0.0, 0.0], pa.float64())[0] == hashes([0.0], pa.float64())[0]
    assert hashes([-0.0, 1.5], pa.float32()) == hashes([0.0, 1.5], pa.float64())
    assert hashes([float("nan")], pa.float32()) == hashes([float("nan")], pa.float64())


def test_hashing_leaves_its_input_alone() -> None:
    column = np.array([-0.0, 1.0])
    hash_key(pa.table({"k": pa.array(column)}), key(("k", "double")))
    assert np.signbit(column[0])


def test_a_decimal_hashes_by_its_unscaled_value_whatever_its_precision() -> None:
    values: list[object] = [Decimal("-12.34"), Decimal("0.00"), Decimal("99.99")]
    kinds = [pa.decimal32(6, 2), pa.decimal64(10, 2), pa.decimal128(10, 2), pa.decimal128(30, 2)]
    found = [hashes(values, kind) for kind in kinds]
    assert all(f == found[0] for f in found)
    wide = [Decimal(2**64 + 5), Decimal(5), Decimal(-(2**64) + 5), Decimal(2**63), Decimal(-(2**63))]
    assert len(set(hashes(list(wide), pa.decimal128(38, 0)))) == 5


def test_text_hashes_the_same_in_both_layouts() -> None:
    values: list[object] = ["", "a", "żółć", "a much longer text"]
    assert hashes(values, pa.string()) == hashes(values, pa.large_string())
    assert hashes([str(v).encode() for v in values], pa.binary()) == hashes(values, pa.string())


def test_a_composite_key_depends_on_the_order_of_its_columns() -> None:
    table = pa.table({"a": [1, 2], "b": ["x", "y"]})
    one = hash_key(table, key(("a", "bigint"), ("b", "string")))
    other = hash_key(table, key(("b", "string"), ("a", "bigint")))
    assert not (one == other).any()


def test_null_rows_are_found_in_any_column() -> None:
    table = pa.table({"a": [1, None, 3, 4], "b": ["x", "y", None, "z"]})
    both = key(("a", "bigint"), ("b", "string"))
    assert null_rows(table, both).tolist() == [False, True, True, False]  # type: ignore[union-attr]
    assert null_rows(table.slice(1).to_batches()[0], both).tolist() == [True, True, False]  # type: ignore[union-attr]
    assert null_rows(table.slice(3), both) is None
    assert null_rows(pa.table({"a": [float("nan")]}), key(("a", "double"))) is None


def test_a_null_key_is_never_hashed() -> None:
    with pytest.raises(AssertionError, match="key column k holds NULL"):
        hashes([1, None], pa.int64())


def test_a_type_that_cannot_be_a_key_is_refused() -> None:
    with pytest.raises(TypeError, match="cannot be join keys"):
        hashes([[1]], pa.list_(pa.int64()))


@pytest.mark.parametrize("kind", KEYS)
def test_equality_is_that_of_the_values(kind: str) -> None:
    arrow, values = KEYS[kind]
    table = pa.table({"k": pa.array([*values, None], arrow)})
    left, right = (a.ravel() for a in np.meshgrid(np.arange(6), np.arange(6)))
    for other in (table, pa.concat_tables([table.slice(0, 2), table.slice(2)])):
        found = same_keys(table, left, other, right, [("k", "k")])
        oracle = [i < 5 and j < 5 and values[i] == values[j] for i, j in zip(left, right, strict=True)]
        assert found.tolist() == oracle


def test_equality_is_sparks_for_floats_widths_and_layouts() -> None:
    left = pa.table({
        "d": [float("nan"), -0.0, 1.0], "i": pa.array([1, -2, 3], pa.int8()), "s": pa.array(["a", "b", "c"]),
        "n": pa.array([Decimal(1), Decimal(-2), Decimal(3)], pa.decimal128(10, 0)),
    })  # fmt: skip
    right = pa.table({
        "d2": pa.array([float("nan"), 0.0, 1.5], pa.float32()), "i2": pa.array([1, -2, 4], pa.int64()),
        "s2": pa.array(["a", "b", "d"], pa.large_string()),
        "n2": pa.array([Decimal(1), Decimal(-2), Decimal(2**64 + 3)], pa.decimal128(38, 0)),
    })  # fmt: skip
    rows = np.arange(3)
    for pair in (("d", "d2"), ("i", "i2"), ("s", "s2"), ("n", "n2")):
        assert same_keys(left, rows, right, rows, [pair]).tolist() == [True, True, False], pair
        assert same_keys(right, rows, left, rows, [pair[::-1]]).tolist() == [True, True, False], pair
    assert same_keys(left, rows[:0], right, rows[:0], [("s", "s2")]).tolist() == []


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("xyz")), min_size=1, max_size=20), st.data())
def test_homogeneous_means_that_neighbours_of_equal_hash_have_equal_keys(
    pairs: list[tuple[str, str]], data: st.DataObject
) -> None:
    table = pa.table({"a": [a for a, _ in pairs], "b": [b for _, b in pairs]})
    drawn = data.draw(st.lists(st.integers(0, 3), min_size=len(pairs), max_size=len(pairs)))
    hashes_ = np.sort(np.array(drawn, np.uint64))
    oracle = all(
        hashes_[i] != hashes_[i + 1] or pairs[i] == pairs[i + 1] for i in range(len(pairs) - 1)
    )  # fmt: skip
    assert homogeneous(table, hashes_, key(("a", "string"), ("b", "string"))) is oracle


def test_rows_sorted_by_a_good_hash_are_homogeneous() -> None:
    by = key(("k", "string"))
    rows, hashed = sorted_rows(pa.table({"k": [f"key {i % 100}" for i in range(1000)]}), by)
    assert homogeneous(rows, hashed, by)
    # An exact key is not even looked at: its column may have stayed behind.
    assert homogeneous(pa.table({"v": [1, 2]}), np.zeros(2, np.uint64), key(("k", "int")))
