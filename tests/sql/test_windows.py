"""Bounds on event time, without Spark: every spelling of a comparison, merging, and the refusals."""

from __future__ import annotations

import pytest

from plait.errors import QueryError
from plait.query.expr import Call, ColumnRef, Expr, Literal
from plait.query.graph import Window
from plait.query.relation import Relation
from plait.sql.join.windows import Bound, is_window, merge, read_bound, refuse_missing_watermarks

A = ColumnRef("a", "ts", "timestamp")
B = ColumnRef("b", "ts", "timestamp")
ORDER = ("a", "b")


def stream(name: str, time: str | None = "ts", ttl: int | None = None) -> Relation:
    return Relation(name, (("ts", "timestamp"), ("at", "timestamp")), time, None if time is None else 1000, ttl)


def shift(time: Expr, micros: int) -> Call:
    return Call("shift", (time, Literal(micros, "bigint")), "timestamp")


def compare(left: Expr, op: str, right: Expr) -> Call:
    return Call(op, (left, right), "boolean")


@pytest.mark.parametrize(
    ("expr", "lower", "upper"),
    [
        (compare(A, ">=", shift(B, -10)), -10, None),
        (compare(A, ">", shift(B, -10)), -9, None),
        (compare(A, "<=", shift(B, 5)), None, 5),
        (compare(A, "<", shift(B, 5)), None, 4),
        (compare(shift(A, 3), "<=", shift(B, 5)), None, 2),
        (compare(B, "<=", shift(A, 10)), -10, None),
        (compare(shift(B, 5), ">", A), None, 4),
        (compare(A, ">=", B), 0, None),
        (compare(A, "=", shift(B, 7)), 7, 7),
        (compare(A, "<=", shift(shift(B, 7), -2)), None, 5),
    ],
)
def test_every_spelling_of_a_comparison_is_a_bound_in_alias_order(
    expr: Expr, lower: int | None, upper: int | None
) -> None:
    bound = read_bound(expr, ORDER)
    assert bound is not None
    assert (bound.left, bound.right, bound.lower_us, bound.upper_us) == (A, B, lower, upper)


@pytest.mark.parametrize(
    "expr",
    [
        compare(ColumnRef("a", "x", "int"), "<", ColumnRef("b", "x", "int")),
        compare(A, "<", ColumnRef("a", "at", "timestamp")),
        compare(A, "<", Literal(5, "timestamp")),
        compare(A, "<=>", B),
        Call("not", (compare(A, "<", B),), "boolean"),
        A,
    ],
)
def test_what_does_not_compare_two_streams_times_is_no_bound(expr: Expr) -> None:
    assert read_bound(expr, ORDER) is None


def test_bounds_of_a_pair_merge_to_the_tightest_window() -> None:
    bounds = [Bound(A, B, -10, None, True), Bound(A, B, None, 5, True), Bound(A, B, -3, 9, True)]
    assert merge(bounds) == (Window(A, B, -3, 5),)


def test_bounds_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(QueryError, match="EMPTY"):
        merge([Bound(A, B, 10, None, True), Bound(A, B, None, 5, True)])


def test_a_widened_bound_lets_more_through_on_both_sides() -> None:
    assert Bound(A, B, -1, 1, True).widened(10) == Bound(A, B, -11, 11, True)
    assert Bound(A, B, None, 1, True).widened(10) == Bound(A, B, None, 11, True)


def test_only_event_times_make_a_window() -> None:
    bound = Bound(A, B, 0, None, False)
    assert is_window(bound, {"a": stream("s"), "b": stream("t")})
    assert not is_window(bound, {"a": stream("s"), "b": stream("t", None)})
    assert not is_window(bound, {"a": stream("s"), "b": stream("t", "at")})


def test_a_time_range_without_a_watermark_is_refused_and_names_the_stream() -> None:
    bounds = [Bound(A, B, -10, None, True), Bound(A, B, None, 0, False)]
    with pytest.raises(QueryError) as caught:
        refuse_missing_watermarks(bounds, {"a": stream("orders"), "b": stream("lines", None)})
    assert caught.value.code == "WATERMARK_MISSING"
    assert "lines" in caught.value.cause
    assert "orders" not in caught.value.cause
    assert 'withWatermark("ts"' in caught.value.remedy


def test_a_time_range_over_columns_that_are_no_event_times_is_refused() -> None:
    bounds = [Bound(A, B, -10, 10, True)]
    with pytest.raises(QueryError, match="WATERMARK_MISSING"):
        refuse_missing_watermarks(bounds, {"a": stream("orders", "at"), "b": stream("lines", "at")})


@pytest.mark.parametrize(
    ("bounds", "other"),
    [
        ([Bound(A, B, -10, None, True)], stream("lines", None)),
        ([Bound(A, B, 0, None, False), Bound(A, B, None, 0, False)], stream("lines", None)),
        ([Bound(A, B, -10, 10, True)], stream("lines", None, ttl=5)),
        ([Bound(A, B, -10, 10, True)], stream("lines", "at")),
    ],
)
def test_one_sided_plain_and_ttl_bounded_comparisons_stay_conditions(bounds: list[Bound], other: Relation) -> None:
    refuse_missing_watermarks(bounds, {"a": stream("orders"), "b": other})
