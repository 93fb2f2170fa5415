"""Evaluates `query.expr` trees on Arrow arrays, with Spark's meaning of every operator.

NULL in gives NULL out except for `<=>`, null tests, COALESCE, CASE and the like, AND/OR are three-valued.  An operation
that can fail (`overflow`, `divide by zero`) is evaluated exactly for the rows for which Spark evaluates it: values of a
CASE where their condition is the first that holds, the right side of AND where the left is not false, an argument where
those that Spark evaluates before it are not NULL.  So it fails exactly where Spark does.

Cost: one Arrow kernel or two per operator; where an argument can fail, its columns are also gathered for the rows that
it is evaluated for.
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from plait.query.expr import Call, ColumnRef, Expr, Literal, may_fail
from plait.state.segments.arrow_types import inner_type, result_type
from plait.state.segments.operators import Value, applied

Lookup = Callable[[ColumnRef], pa.Array]

_DIVISIONS = ("/", "/?", "div", "div?", "mod", "mod?")
_NULL_IS_NO_REASON_TO_STOP = ("<=>", "greatest", "least", "concat", "concatws")


def holds(expr: Expr, column: Lookup) -> pa.BooleanArray:
    """Where the condition is true; NULL counts as not."""
    return pc.fill_null(_value(expr, column), False)


def values(expr: Expr, column: Lookup, rows: int) -> pa.Array:
    """The expression's value in each of `rows` rows, in the Arrow type of the expression's own type."""
    if isinstance(expr, ColumnRef):
        return column(expr)
    kind = result_type(expr.type)
    found = _value(expr, column) if rows else pa.array([], inner_type(expr.type))
    found = pa.repeat(found, rows) if isinstance(found, pa.Scalar) else found
    return found if found.type == kind else found.cast(kind)


def _value(expr: Expr, column: Lookup) -> Value:
    if isinstance(expr, ColumnRef):
        return _plain(column(expr), expr.type)
    if isinstance(expr, Literal):
        return _literal(expr)
    if expr.op in ("and", "or"):
        left = _value(expr.args[0], column)
        right = _where(lambda: _undecided(expr.op, left), expr.args[1], column)
        return pc.and_kleene(left, right) if expr.op == "and" else pc.or_kleene(left, right)
    if expr.op == "coalesce":
        found = _value(expr.args[0], column)
        for arg in expr.args[1:]:
            found = pc.coalesce(found, _where(partial(pc.is_null, found), arg, column))
        return found
    if expr.op == "case":
        return _case(expr, column)
    return applied(expr, _arguments(expr, column))


def _case(expr: Call, column: Lookup) -> Value:
    found: Value = pa.scalar(None, inner_type(expr.type))
    left: Value = pa.scalar(True)
    for condition, then in zip(expr.args[:-1:2], expr.args[1:-1:2], strict=True):
        chosen = pc.and_(left, pc.fill_null(_where(partial(_same, left), condition, column), False))
        found = pc.if_else(chosen, _where(partial(_same, chosen), then, column), found)
        left = pc.and_not(left, chosen)
    return pc.if_else(left, _where(partial(_same, left), expr.args[-1], column), found)


def _same(value: Value) -> Value:
    return value


def _undecided(op: str, left: Value) -> Value:
    """Where the left side of AND or OR does not decide alone."""
    return pc.fill_null(left, True) if op == "and" else pc.invert(pc.fill_null(left, False))


def _arguments(expr: Call, column: Lookup) -> list[Value]:
    """Each is evaluated where those before it are not NULL; a divisor comes before what it divides."""
    found: dict[int, Value] = {}
    places = range(len(expr.args))
    for place in reversed(places) if expr.op in _DIVISIONS else places:
        found[place] = _where(partial(_goes_on, expr.op, list(found.values())), expr.args[place], column)
    return [found[place] for place in places]


def _goes_on(op: str, before: list[Value]) -> Value:
    """Where Spark evaluates the next argument: not after NULL, nor after a zero that makes NULL of a division."""
    there: Value = pa.scalar(True)
    for earlier in () if op in _NULL_IS_NO_REASON_TO_STOP else before:
        there = pc.and_(there, pc.is_valid(earlier))
        if op in ("/?", "div?", "mod?"):
            there = pc.and_(there, pc.fill_null(pc.not_equal(earlier, pa.scalar(0, earlier.type)), False))
    return there


def _where(asked: Callable[[], Value], expr: Expr, column: Lookup) -> Value:
    """The value where it is asked for; elsewhere anything, or, if evaluating it can fail, NULL."""
    if not may_fail(expr):
        return _value(expr, column)
    there = asked()
    if isinstance(there, pa.Scalar):
        return _value(expr, column) if there.as_py() else pa.scalar(None, inner_type(expr.type))
    wanted = there.to_numpy(zero_copy_only=False).astype(np.bool_)
    rows = np.flatnonzero(wanted)
    if len(rows) == len(wanted):
        return _value(expr, column)
    if not len(rows):
        return pa.scalar(None, inner_type(expr.type))
    picked = pa.array(rows)
    found = _value(expr, lambda ref: column(ref).take(picked))
    if isinstance(found, pa.Scalar):
        return found
    places = np.zeros(len(wanted), np.int64)
    places[rows] = np.arange(len(rows))
    return found.take(pa.array(places, mask=~wanted))


def _literal(literal: Literal) -> pa.Scalar:
    kind = inner_type(literal.type)
    if isinstance(literal.value, str) and pa.types.is_decimal(kind):
        return pa.scalar(Decimal(literal.value), kind)
    return pa.scalar(literal.value, kind)


def _plain(value: Value, kind: str) -> Value:
    """Timestamps as microseconds: nothing may depend on the zone a column is labelled with."""
    if pa.types.is_null(value.type):
        # Rows that arrived before the column was kept.
        return value.cast(inner_type(kind))
    return value.cast(pa.timestamp("us")).cast(pa.int64()) if pa.types.is_timestamp(value.type) else value
