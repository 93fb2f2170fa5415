"""Expressions that a join task can evaluate itself: frozen trees of columns, literals and calls.

Anything Catalyst can say but these nodes cannot stays SQL text and is left to Spark (`sql/answer/residual.py`).
The meaning of every operator is Spark's: NaN equals NaN and is greater than all, NULL in gives NULL out,
`<=>` is null-safe, integer arithmetic that overflows is an error.  What can fail is evaluated only for the rows for
which Spark evaluates it.

    = <=> < <= > >= in             in(x, y, z) is x = y OR x = z
    and or not isnull isnotnull isnan
    case coalesce greatest least   case(c1, v1, c2, v2, …, e) is the value of the first condition that holds, else e
    + - * neg abs                  fail where integers overflow; followed by % (`+%`, `neg%`) they wrap around
    / div mod                      fail where the divisor is zero; followed by ? (`/?`, `div?`) they are NULL there
    & | ^ ~                        bits of integers
    shift micros seconds floordiv  shift(t, n) is n microseconds after t; micros(t) and seconds(t) are since 1970, the
                                   one an integer, the other a double; floordiv rounds down
    addday subday days             addday(d, n) is n days after d; days(d, e) is d − e
    concat concatws                concatws(s, x, y) leaves NULLs out and puts s between
    day year month dayofmonth      day(t) is the date in UTC; the others are parts of a date
    datetext                       a date as Spark prints it
    cast                           without loss, but for integers that become the nearest float; or to a string
    narrow                         an integer in a narrower type: fails where it does not fit; `narrow%` wraps around
    unscaled                       all digits of a decimal as an integer
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from plait.query.types import INTEGRAL

Scalar = bool | int | float | str | None

_OVERFLOWING = ("+", "-", "*", "neg", "abs")
_DIVIDING = ("/", "div", "mod")
_FAILING = (*_DIVIDING, "narrow", "shift", "unscaled")


@dataclass(frozen=True, slots=True)
class ColumnRef:
    """A physical column of an alias."""

    alias: str
    column: str
    type: str

    def __str__(self) -> str:
        return f"{self.alias}.{self.column}"


@dataclass(frozen=True, slots=True)
class Literal:
    """A constant: numbers as they are, decimals as text, dates in days, timestamps in microseconds since 1970."""

    value: Scalar
    type: str

    def __str__(self) -> str:
        return repr(self.value)


@dataclass(frozen=True, slots=True)
class Call:
    """An operator applied to arguments; `type` is its result's."""

    op: str
    args: tuple[Expr, ...]
    type: str

    def __str__(self) -> str:
        if len(self.args) == 2 and not self.op.isalpha():
            return f"({self.args[0]} {self.op} {self.args[1]})"
        return f"{self.op}({', '.join(map(str, self.args))})"


Expr = ColumnRef | Literal | Call


def columns_of(expr: Expr) -> tuple[ColumnRef, ...]:
    """The columns an expression reads, first use first."""
    if isinstance(expr, ColumnRef):
        return (expr,)
    if isinstance(expr, Literal):
        return ()
    return tuple(dict.fromkeys(ref for arg in expr.args for ref in columns_of(arg)))


def may_fail(expr: Expr) -> bool:
    """Whether evaluating the expression raises for some values.

    >>> may_fail(Call("+", (Literal(1, "int"), Literal(2, "int")), "int"))
    True
    >>> may_fail(Call("/", (ColumnRef("a", "x", "double"), Literal(9.0, "double")), "double"))
    False
    """
    if not isinstance(expr, Call):
        return False
    integral = expr.type in INTEGRAL
    divisor = expr.args[-1]
    fails = expr.op in _FAILING or (integral and expr.op in _OVERFLOWING)
    if expr.op in _DIVIDING and isinstance(divisor, Literal):
        fails = divisor.value in (0, -1)
    return fails or any(map(may_fail, expr.args))


def replaced(expr: Expr, column: Callable[[ColumnRef], ColumnRef]) -> Expr:
    """The same expression over other columns."""
    if isinstance(expr, ColumnRef):
        return column(expr)
    if isinstance(expr, Literal):
        return expr
    return Call(expr.op, tuple(replaced(arg, column) for arg in expr.args), expr.type)


def rename(expr: Expr, names: Mapping[str, str]) -> Expr:
    """The same expression over other alias names."""
    return replaced(expr, lambda ref: ColumnRef(names[ref.alias], ref.column, ref.type))


def to_json(expr: Expr) -> Any:
    """A JSON value; `from_json` gives the expression back."""
    if isinstance(expr, ColumnRef):
        return {"alias": expr.alias, "column": expr.column, "type": expr.type}
    if isinstance(expr, Literal):
        return {"value": expr.value, "type": expr.type}
    return {"op": expr.op, "args": [to_json(a) for a in expr.args], "type": expr.type}


def from_json(value: Any) -> Expr:
    """The inverse of `to_json`.

    >>> e = Call("<", (ColumnRef("a", "x", "int"), Literal(3, "int")), "boolean")
    >>> from_json(to_json(e)) == e
    True
    """
    if "alias" in value:
        return ColumnRef(value["alias"], value["column"], value["type"])
    if "op" in value:
        return Call(value["op"], tuple(from_json(a) for a in value["args"]), value["type"])
    return Literal(value["value"], value["type"])
