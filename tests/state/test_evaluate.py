"""Expressions against Spark's meaning written down in plain Python: NULL is None, NaN equals itself and is greatest."""

from __future__ import annotations

import datetime as dt
import itertools
import math
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.query.expr import Call, ColumnRef, Expr, Literal
from plait.state.segments.evaluate import _value, holds, values
from tests.oracle import plain

NAN = float("nan")
VALUES: dict[str, list[Any]] = {
    "double": [None, NAN, 0.0, -0.0, 1.5, -1.5, math.inf, -math.inf],
    "float": [None, NAN, 0.0, -0.0, 1.5, math.inf],
    "int": [None, 0, 1, -1, 2**31 - 1],
    "bigint": [None, 0, 1, -(2**63), 2**63 - 1],
    "boolean": [None, False, True],
    "string": [None, "", "a", "A", "ä", "ab"],
    "binary": [None, b"", b"\0", b"\xff", b"a"],
    "date": [None, dt.date(1969, 12, 31), dt.date(2024, 2, 29)],
    "decimal(10,2)": [None, Decimal("0.00"), Decimal("-1.50"), Decimal("99.99")],
    "decimal(38,4)": [None, Decimal("0.0000"), Decimal(10) ** 30],
    "timestamp": [None, dt.datetime(1969, 12, 31, 23), dt.datetime(2024, 1, 1, 0, 0, 0, 1)],
}
ARROW = {
    "double": pa.float64(), "float": pa.float32(), "int": pa.int32(), "bigint": pa.int64(), "boolean": pa.bool_(),
    "string": pa.string(), "binary": pa.binary(), "date": pa.date32(), "decimal(10,2)": pa.decimal128(10, 2),
    "decimal(38,4)": pa.decimal128(38, 4), "timestamp": pa.timestamp("us", "UTC"),
}  # fmt: skip
COMPARISONS = ("=", "<", "<=", ">", ">=", "<=>")


def compare(op: str, left: Any, right: Any) -> bool | None:
    """Spark's comparison."""
    if op == "<=>":
        return left is right or (left is not None and right is not None and compare("=", left, right) is True)
    if left is None or right is None:
        return None

    def key(value: Any) -> Any:
        return (math.isnan(value), 0.0 if math.isnan(value) else value) if isinstance(value, float) else value

    one, other = key(left), key(right)
    return {"=": one == other, "<": one < other, "<=": one <= other, ">": one > other, ">=": one >= other}[op]


def evaluated(expr: Expr, columns: dict[str, pa.Array]) -> Any:
    found = _value(expr, lambda ref: columns[ref.column])
    return found.as_py() if isinstance(found, pa.Scalar) else found.to_pylist()


def column(name: str, kind: str) -> ColumnRef:
    return ColumnRef("0", name, kind)


@pytest.mark.parametrize("op", COMPARISONS)
@pytest.mark.parametrize("kind", VALUES)
def test_comparisons_are_sparks_for_every_pair_of_values(kind: str, op: str) -> None:
    pairs = list(itertools.product(VALUES[kind], repeat=2))
    left, right = (pa.array(list(side), ARROW[kind]) for side in zip(*pairs, strict=True))
    expr = Call(op, (column("x", kind), column("y", kind)), "boolean")
    expected = [compare(op, *pair) for pair in pairs]
    assert evaluated(expr, {"x": left, "y": right}) == expected
    assert holds(expr, lambda ref: {"x": left, "y": right}[ref.column]).to_pylist() == [e is True for e in expected]


@pytest.mark.parametrize("op", COMPARISONS)
@pytest.mark.parametrize("kind", ["double", "float", "int", "bigint", "boolean", "string", "date", "timestamp"])
def test_a_literal_compares_like_a_column_of_it(kind: str, op: str) -> None:
    values = VALUES[kind]
    array = pa.array(values, ARROW[kind])
    for value in values:
        inside = value
        if isinstance(value, dt.date):
            inside = plain(value) if kind == "timestamp" else (value - dt.date(1970, 1, 1)).days
        for flipped in (False, True):
            args: tuple[Expr, ...] = (column("x", kind), Literal(inside, kind))
            expr = Call(op, args[::-1] if flipped else args, "boolean")
            expected = [compare(op, value, v) if flipped else compare(op, v, value) for v in values]
            assert evaluated(expr, {"x": array}) == expected, (value, flipped)


def test_numbers_of_different_width_compare_by_value() -> None:
    columns = {"x": pa.array([1, -1, None], pa.int8()), "y": pa.array([1, 2**40, 0], pa.int64())}
    expr = Call("=", (column("x", "tinyint"), column("y", "bigint")), "boolean")
    assert evaluated(expr, columns) == [True, False, None]


@pytest.mark.parametrize("op", ["and", "or"])
def test_logic_is_three_valued(op: str) -> None:
    three = [True, False, None]
    pairs = list(itertools.product(three, repeat=2))
    columns = {name: pa.array(list(side)) for name, side in zip("xy", zip(*pairs, strict=True), strict=True)}
    strong = op == "or"
    expected = [strong if strong in pair else None if None in pair else not strong for pair in pairs]
    assert evaluated(Call(op, (column("x", "boolean"), column("y", "boolean")), "boolean"), columns) == expected
    assert evaluated(Call("not", (column("x", "boolean"),), "boolean"), {"x": pa.array(three)}) == [False, True, None]


def test_null_tests_are_never_null_and_nan_is_not_null() -> None:
    columns = {"x": pa.array([None, NAN, 1.0])}
    assert evaluated(Call("isnull", (column("x", "double"),), "boolean"), columns) == [True, False, False]
    assert evaluated(Call("isnotnull", (column("x", "double"),), "boolean"), columns) == [False, True, True]


def test_a_case_is_the_first_that_holds_and_null_does_not() -> None:
    columns = {"a": pa.array([True, None, False, True]), "b": pa.array([True, True, None, False])}
    branches = (column("a", "boolean"), Literal(1, "int"), column("b", "boolean"), Literal(2, "int"))
    assert evaluated(Call("case", (*branches, Literal(None, "int")), "int"), columns) == [1, 2, None, 1]
    assert evaluated(Call("case", (*branches, Literal(7, "int")), "int"), columns) == [1, 2, 7, 1]


def test_decimals_keep_every_digit() -> None:
    columns = {
        "d": pa.array([Decimal("99999999.99"), Decimal("-0.01"), None], pa.decimal128(10, 2)),
        "n": pa.array([2**31 - 1, -1, 0], pa.int32()),
    }
    d, one = column("d", "decimal(10,2)"), Literal("1", "decimal(1,0)")
    less = Call("-", (one, d), "decimal(11,2)")
    assert evaluated(less, columns) == [Decimal("-99999998.99"), Decimal("1.01"), None]
    wide = Call("cast", (column("n", "int"),), "decimal(10,0)")
    product = Call("*", (less, wide), "decimal(22,2)")
    assert evaluated(product, columns) == [Decimal("-99999998.99") * (2**31 - 1), Decimal("-1.01"), None]
    assert _value(product, lambda ref: columns[ref.column]).type == pa.decimal128(22, 2)
    assert evaluated(Call("unscaled", (d,), "bigint"), columns) == [9999999999, -1, None]


LEAVES = st.one_of(
    st.sampled_from([column("x", "bigint"), column("y", "bigint")]),
    st.sampled_from([None, 0, 1, 5]).map(lambda value: Literal(value, "bigint")),
)
NUMBERS = st.recursive(
    LEAVES,
    lambda inner: st.builds(lambda op, a, b: Call(op, (a, b), "bigint"), st.sampled_from("+-*"), inner, inner),
    max_leaves=4,
)
CALLS = st.recursive(
    st.one_of(
        st.builds(lambda op, a, b: Call(op, (a, b), "boolean"), st.sampled_from(COMPARISONS), NUMBERS, NUMBERS),
        st.builds(lambda op, a: Call(op, (a,), "boolean"), st.sampled_from(["isnull", "isnotnull"]), NUMBERS),
    ),
    lambda inner: st.one_of(
        st.builds(lambda op, a, b: Call(op, (a, b), "boolean"), st.sampled_from(["and", "or", "<=>"]), inner, inner),
        st.builds(lambda a: Call("not", (a,), "boolean"), inner),
    ),
    max_leaves=6,
)


def naive(expr: Expr, row: dict[str, Any]) -> Any:
    if isinstance(expr, ColumnRef):
        return row[expr.column]
    if isinstance(expr, Literal):
        return expr.value
    args = [naive(arg, row) for arg in expr.args]
    if expr.op in COMPARISONS:
        return compare(expr.op, *args)
    if expr.op in ("isnull", "isnotnull"):
        return (args[0] is None) == (expr.op == "isnull")
    if expr.op == "not":
        return None if args[0] is None else not args[0]
    if expr.op in ("and", "or"):
        strong = expr.op == "or"
        return strong if strong in args else None if None in args else not strong
    if None in args:
        return None
    return {"+": args[0] + args[1], "-": args[0] - args[1], "*": args[0] * args[1]}[expr.op]


@settings(deadline=None, derandomize=True, database=None, max_examples=200)
@given(CALLS, st.lists(st.tuples(*[st.sampled_from([None, -2, 0, 1, 5])] * 2), min_size=1, max_size=6))
def test_any_tree_of_operators_means_what_it_means_row_by_row(expr: Call, rows: list[tuple[Any, Any]]) -> None:
    columns = {name: pa.array(list(side), pa.int64()) for name, side in zip("xy", zip(*rows, strict=True), strict=True)}
    expected = [naive(expr, dict(zip("xy", row, strict=True))) is True for row in rows]
    found = holds(expr, lambda ref: columns[ref.column])
    found = [found.as_py()] * len(rows) if isinstance(found, pa.Scalar) else found.to_pylist()
    assert found == expected


@pytest.mark.parametrize("op", "+-*")
def test_integers_that_overflow_are_an_error(op: str) -> None:
    columns = {"x": pa.array([-(2**63)]), "y": pa.array([2 if op == "*" else -1 if op == "+" else 1])}
    with pytest.raises(pa.ArrowInvalid, match="overflow"):
        evaluated(Call(op, (column("x", "bigint"), column("y", "bigint")), "bigint"), columns)


def test_a_shifted_time_is_compared_in_microseconds_whatever_the_zone() -> None:
    at = dt.datetime(2024, 1, 1)
    columns = {
        "x": pa.array([at, at, None], pa.timestamp("us", "Europe/Berlin")),
        "y": pa.array(
            [at - dt.timedelta(seconds=5), at - dt.timedelta(seconds=5, microseconds=1), at], pa.timestamp("us")
        ),
    }
    bound = Call("shift", (column("y", "timestamp"), Literal(5_000_000, "bigint")), "timestamp")
    assert evaluated(Call("<=", (column("x", "timestamp"), bound), "boolean"), columns) == [True, False, None]


def test_casts_widen() -> None:
    columns = {"x": pa.array([1, -128, None], pa.int8()), "y": pa.array([0.5, NAN], pa.float32())}
    assert evaluated(Call("cast", (column("x", "tinyint"),), "bigint"), columns) == [1, -128, None]
    assert [plain(v) for v in evaluated(Call("cast", (column("y", "float"),), "double"), columns)] == [0.5, "NaN"]


def test_a_large_integer_becomes_the_nearest_double() -> None:
    cast = Call("cast", (column("x", "bigint"),), "double")
    assert evaluated(cast, {"x": pa.array([2**53 + 1, -(2**63)])}) == [2.0**53, -(2.0**63)]


def test_what_is_not_chosen_does_not_fail() -> None:
    columns = {"x": pa.array([6, 7, None, 8]), "y": pa.array([3, 0, 1, None])}
    x, y, zero = column("x", "bigint"), column("y", "bigint"), Literal(0, "bigint")
    quotient = Call("div", (x, y), "bigint")
    is_zero = Call("=", (y, zero), "boolean")
    assert evaluated(Call("case", (is_zero, zero, quotient), "bigint"), columns) == [2, 0, None, None]
    assert evaluated(Call("or", (is_zero, Call(">", (quotient, zero), "boolean")), "boolean"), columns) == [
        True, True, None, None,
    ]  # fmt: skip
    assert evaluated(Call("coalesce", (Call("div?", (x, y), "bigint"), x), "bigint"), columns) == [2, 7, None, 8]
    assert evaluated(Call("coalesce", (Literal(1, "bigint"), quotient), "bigint"), columns) == 1
    with pytest.raises(pa.ArrowInvalid, match="divide by zero"):
        evaluated(Call("coalesce", (quotient, zero), "bigint"), columns)


def test_a_column_that_no_row_has_is_null_in_its_own_type() -> None:
    sums = values(Call("+", (column("x", "int"), Literal(1, "int")), "int"), lambda ref: pa.nulls(2), 2)
    assert (sums.type, sums.to_pylist()) == (pa.int32(), [None, None])


def test_times_leave_an_expression_as_times() -> None:
    at = pa.array([0, None], pa.timestamp("us", "Europe/Berlin"))
    later = values(Call("shift", (column("x", "timestamp"), Literal(5, "bigint")), "timestamp"), lambda ref: at, 2)
    assert (later.type, later.cast(pa.int64()).to_pylist()) == (pa.timestamp("us", "UTC"), [5, None])


@given(st.dates())
def test_parts_of_a_date_are_those_of_the_calendar(day: dt.date) -> None:
    date = column("x", "date")
    columns = {"x": pa.array([day, None, day])}
    for op, kind, wanted in (
        ("year", "int", day.year),
        ("month", "int", day.month),
        ("dayofmonth", "int", day.day),
        ("datetext", "string", day.isoformat()),
    ):
        assert evaluated(Call(op, (date,), kind), columns) == [wanted, None, wanted]
        assert evaluated(Call(op, (Literal(None, "date"),), kind), columns) is None


def test_an_integer_that_does_not_fit_is_an_error_or_wraps_around() -> None:
    x = column("x", "bigint")
    assert evaluated(Call("narrow", (x,), "tinyint"), {"x": pa.array([127, -128, None])}) == [127, -128, None]
    assert evaluated(Call("narrow%", (x,), "tinyint"), {"x": pa.array([128, -129, None])}) == [-128, 127, None]
    for outside in (128, -129):
        with pytest.raises(pa.ArrowInvalid, match="cast overflow"):
            evaluated(Call("narrow", (x,), "tinyint"), {"x": pa.array([outside])})


def test_a_remainder_of_doubles_has_the_sign_of_the_dividend() -> None:
    columns = {"x": pa.array([7.5, -7.5, math.inf, None, 1.0]), "y": pa.array([2.0, 2.0, 2.0, 2.0, math.inf])}
    x, y = column("x", "double"), column("y", "double")
    assert [plain(v) for v in evaluated(Call("mod", (x, y), "double"), columns)] == [1.5, -1.5, "NaN", None, 1.0]
    assert evaluated(Call("mod?", (x, Literal(0.0, "double")), "double"), columns) == [None] * 5
    assert evaluated(Call("mod", (Literal(7.5, "double"), Literal(-2.0, "double")), "double"), columns) == 1.5
