"""Evaluates `query.expr` trees on Arrow arrays, with Spark's meaning of every operator.

NaN equals NaN and is greater than any other number, -0.0 equals 0.0, NULL in gives NULL out except for
`<=>`, `isnull`, `isnotnull` and `case`, AND/OR are three-valued, integer overflow is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal

import pyarrow as pa
import pyarrow.compute as pc

from plait.query.decimals import digits
from plait.query.expr import Call, ColumnRef, Expr, Literal

Lookup = Callable[[ColumnRef], pa.Array]

_ARROW = {
    "boolean": pa.bool_(),
    "tinyint": pa.int8(),
    "smallint": pa.int16(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "string": pa.string(),
    "date": pa.date32(),
}

_COMPARE = {
    "=": pc.equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}


def holds(expr: Expr, column: Lookup) -> pa.BooleanArray:
    """Where the condition is true; NULL counts as not."""
    return pc.fill_null(_value(expr, column), False)


def values(expr: Expr, column: Lookup, rows: int) -> pa.Array:
    """The expression's value in each of so many rows."""
    found = _value(expr, column)
    return pa.repeat(found, rows) if isinstance(found, pa.Scalar) else found


def arrow_type(kind: str) -> pa.DataType | None:
    """Of a Spark type that tasks compute with; None of another."""
    decimal = digits(kind)
    return _ARROW.get(kind) if decimal is None else pa.decimal128(*decimal)


def _value(expr: Expr, column: Lookup) -> pa.Array | pa.Scalar:
    if isinstance(expr, ColumnRef):
        return column(expr)
    if isinstance(expr, Literal):
        return _literal(expr)
    args = [_value(arg, column) for arg in expr.args]
    return _call(expr, args)


def _literal(literal: Literal) -> pa.Scalar:
    if literal.type in ("timestamp", "timestamp_ntz"):
        return pa.scalar(literal.value, pa.int64()).cast(pa.timestamp("us"))
    kind = arrow_type(literal.type)
    if isinstance(literal.value, str) and pa.types.is_decimal(kind):
        return pa.scalar(Decimal(literal.value), kind)
    return pa.scalar(literal.value, kind)


def _call(expr: Call, args: list[pa.Array | pa.Scalar]) -> pa.Array | pa.Scalar:
    op = expr.op
    if op in _COMPARE:
        return _compare(op, *map(_plain, args))
    if op == "<=>":
        left, right = map(_plain, args)
        both_null = pc.and_(pc.is_null(left), pc.is_null(right))
        return pc.or_(pc.fill_null(_compare("=", left, right), False), both_null)
    if op == "and":
        return pc.and_kleene(*args)
    if op == "or":
        return pc.or_kleene(*args)
    if op == "not":
        return pc.invert(args[0])
    if op == "isnull":
        return pc.is_null(args[0])
    if op == "isnotnull":
        return pc.is_valid(args[0])
    if op == "shift":
        return pc.add_checked(_plain(args[0]), args[1])
    if op == "cast":
        return args[0].cast(arrow_type(expr.type))
    if op == "unscaled":
        scale = args[0].type.scale
        return pc.multiply(args[0], pa.scalar(Decimal(10**scale), pa.decimal128(scale + 1, 0))).cast(pa.int64())
    if op == "case":
        found = args[-1]
        for condition, then in reversed(list(zip(args[:-1:2], args[1:-1:2], strict=True))):
            found = pc.if_else(pc.fill_null(condition, False), then, found)
        return found
    arithmetic = {"+": pc.add_checked, "-": pc.subtract_checked, "*": pc.multiply_checked}
    return arithmetic[op](*args)


def _plain(value: pa.Array | pa.Scalar) -> pa.Array | pa.Scalar:
    """Timestamps as microseconds: comparisons must not depend on the zone a column is labelled with."""
    return value.cast(pa.timestamp("us")).cast(pa.int64()) if pa.types.is_timestamp(value.type) else value


def _compare(op: str, left: pa.Array | pa.Scalar, right: pa.Array | pa.Scalar) -> pa.Array | pa.Scalar:
    result = _COMPARE[op](left, right)
    if not (pa.types.is_floating(left.type) or pa.types.is_floating(right.type)):
        return result
    # IEEE says false to every comparison with NaN; Spark orders NaN above all numbers and equal to itself.
    left_nan, right_nan = _is_nan(left), _is_nan(right)
    either = pc.or_(left_nan, right_nan)
    ordered = {
        "=": pc.and_(left_nan, right_nan),
        "<": pc.and_(pc.invert(left_nan), right_nan),
        "<=": right_nan,
        ">": pc.and_(left_nan, pc.invert(right_nan)),
        ">=": left_nan,
    }
    return pc.if_else(either, ordered[op], result)


def _is_nan(value: pa.Array | pa.Scalar) -> pa.Array | pa.Scalar:
    return pc.is_nan(value) if pa.types.is_floating(value.type) else pc.and_(pc.is_null(value), False)
