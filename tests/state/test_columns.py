"""Moving rows of columns, against Arrow's own `take` and plain loops."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from plait.state.segments.columns import from_raw, gather, in_utc, raw, single, take, take_table

ARRAYS = {
    "int8": pa.array([1, -2, 3, 4, 5], pa.int8()),
    "int64": pa.array([1, -2, 2**62, 4, 5], pa.int64()),
    "with NULL": pa.array([1, None, 3, None, 5], pa.int32()),
    "double": pa.array([0.0, -0.0, float("inf"), 1.5, 2.0]),
    "float": pa.array([0.0, 1.5, 2.5, 3.5, 4.5], pa.float32()),
    "boolean": pa.array([True, False, True, True, False]),
    "date": pa.array([dt.date(2024, 1, d) for d in range(1, 6)]),
    "timestamp": pa.array([dt.datetime(2024, 1, d) for d in range(1, 6)], pa.timestamp("us", "UTC")),
    "string": pa.array(["", "a", "bc", "ä", "long enough"]),
    "binary": pa.array([b"", None, b"\0", b"x", b"yz"]),
    "decimal": pa.array([Decimal(n) for n in range(5)], pa.decimal128(38, 2)),
    "list": pa.array([[1], [], None, [2, 3], [4]]),
    "struct": pa.array([{"a": n} for n in range(5)]),
}
PICKS = [[], [0], [4, 4, 0], [2, 1, 3, 0, 4]]


def rows(numbers: list[int]) -> Any:
    return np.array(numbers, np.int64)


@pytest.mark.parametrize("picks", PICKS, ids=str)
@pytest.mark.parametrize("name", ARRAYS)
def test_take_gives_the_rows_asked_for(name: str, picks: list[int]) -> None:
    array = ARRAYS[name]
    (found,) = take([array], rows(picks))
    assert found.equals(array.take(pa.array(picks, pa.int64())))
    # A slice begins in the middle of its buffers.
    part = array.slice(1, 3)
    inside = [p % 3 for p in picks]
    assert take([part], rows(inside))[0].to_pylist() == [part[i].as_py() for i in inside]


def test_take_gives_columns_of_all_types_in_their_order() -> None:
    found = take(list(ARRAYS.values()), rows([3, 0]))
    assert [column.to_pylist() for column in found] == [[a[3].as_py(), a[0].as_py()] for a in ARRAYS.values()]
    assert take([], rows([3, 0])) == []


@pytest.mark.parametrize("name", ARRAYS)
def test_raw_values_make_the_array_again(name: str) -> None:
    array = ARRAYS[name].slice(1)
    values = raw(array)
    if values is not None:
        assert from_raw(array.type, values.copy()).equals(array)
    assert (values is None) == (name in ("with NULL", "boolean", "string", "binary", "list", "struct"))


@pytest.mark.parametrize("name", ARRAYS)
def test_gather_puts_rows_of_several_arrays_in_their_places(name: str) -> None:
    one, other = ARRAYS[name], ARRAYS[name].slice(2)
    picked = [take([one], rows([3, 0])), take([other], rows([1, 2, 0]))]
    (found,) = gather(picked, [rows([4, 1]), rows([0, 2, 3])], 5)
    expected = [other[1], one[0], other[2], other[0], one[3]]
    assert found.to_pylist() == [scalar.as_py() for scalar in expected]
    assert found.type == one.type


def test_gather_of_arrays_with_and_without_null_keeps_the_null() -> None:
    plain, holey = pa.array([1]), pa.array([None, 4])
    (found,) = gather([[plain], [holey]], [rows([1]), rows([0, 2])], 3)
    assert found.to_pylist() == [None, 1, 4]


def test_gather_gives_columns_of_all_types_in_their_order() -> None:
    one = take(list(ARRAYS.values()), rows([3, 0]))
    for places, expected in (([1, 0], [0, 3]), ([0, 1], [3, 0])):
        found = gather([one], [rows(places)], 2)
        assert [c.to_pylist() for c in found] == [[a[i].as_py() for i in expected] for a in ARRAYS.values()]


def test_gather_of_nothing_is_empty() -> None:
    for name in ("int64", "string"):
        assert gather([[ARRAYS[name].slice(0, 0)]], [rows([])], 0)[0].to_pylist() == []


def test_a_column_of_many_or_no_chunks_becomes_one_array() -> None:
    chunked = pa.chunked_array([pa.array([1, 2]), pa.array([3])])
    assert single(chunked).equals(pa.array([1, 2, 3]))
    assert single(pa.chunked_array([], pa.string())).equals(pa.array([], pa.string()))
    assert single(pa.array([1])).equals(pa.array([1]))


def test_a_table_keeps_its_schema_when_rows_are_taken() -> None:
    table = pa.table({"n": ARRAYS["int64"], "s": ARRAYS["string"]})
    taken = take_table(table, rows([4, 0]))
    assert taken.schema == table.schema
    assert taken.to_pydict() == {"n": [5, 1], "s": ["long enough", ""]}
    assert take_table(table, rows([])).schema == table.schema


def test_zones_are_called_utc_however_deep_they_lie_and_no_value_moves() -> None:
    there, utc = pa.timestamp("us", "Etc/UTC"), pa.timestamp("us", "UTC")

    def kinds(zone: pa.DataType) -> list[pa.DataType]:
        struct = pa.struct([("a", zone), ("b", pa.list_(pa.struct([("c", zone)])))])
        return [zone, pa.list_(zone), pa.map_(pa.string(), zone), struct, pa.timestamp("us"), pa.int64()]

    values = [[5, None], [[5], None], [[("k", 5)], None], [{"a": 5, "b": [{"c": 6}]}, None], [5, None], [5, None]]
    tables = [
        pa.table([pa.array(v, k) for v, k in zip(values, kinds(zone), strict=True)], names=list("abcdef"))
        for zone in (there, utc)
    ]
    found = in_utc(tables[0])
    assert found.schema.types == kinds(utc)
    assert found.equals(tables[1])
    assert found.column("a").chunk(0).buffers()[1].address == tables[0].column("a").chunk(0).buffers()[1].address
    assert in_utc(tables[1]) is tables[1]
