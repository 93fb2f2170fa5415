"""Which output columns a join task computes itself: Catalyst nodes become `query.expr` trees, or None.

A node is translated only where the task's value, and the rows for which it fails, are exactly Spark's, in ANSI mode and
without; `tests/spark/test_outputs.py` compares each with Spark over extreme values.  Expressions are over the streams'
own columns only: so what a query stores, and its digest, do not depend on what this release can translate.

Left to Spark: functions of text but for concatenation (invalid UTF-8, case rules), casts of fractions that lose
something and those that print floats, divisions of decimals, what depends on a time zone, and whatever is not listed
here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from plait.query.expr import Call, ColumnRef, Expr, Literal, may_fail
from plait.query.types import FLOATS, INTEGRAL, TIMES, digits, is_native
from plait.sql.catalyst.expressions import Node
from plait.sql.join.task_expressions import (
    COMPARISONS,
    Translator,
    decimal_literal,
    keeps_all_digits,
    literal,
    widens,
    widens_decimal,
)

_ARITHMETIC = {"Add": "+", "Subtract": "-", "Multiply": "*"}
_DIVISIONS = {"Divide": "/", "IntegralDivide": "div", "Remainder": "mod"}
_DIVIDED = {"/": ("double",), "div": ("bigint",), "mod": (*INTEGRAL, *FLOATS)}
_SIGNS = {"UnaryMinus": "neg", "Abs": "abs"}
_BITS = {"BitwiseAnd": "&", "BitwiseOr": "|", "BitwiseXor": "^", "BitwiseNot": "~"}
_LOGIC = {"And": "and", "Or": "or", "Not": "not"}
_TESTS = {"IsNull": "isnull", "IsNotNull": "isnotnull", "IsNaN": "isnan"}
_CHOICES = {"Coalesce": "coalesce", "Greatest": "greatest", "Least": "least"}
_TEXTS = {"Concat": "concat", "ConcatWs": "concatws"}
_EPOCHS = {"UnixMicros": 1, "UnixMillis": 1_000, "UnixSeconds": 1_000_000}
_DAYS = {"DateAdd": "addday", "DateSub": "subday", "DateDiff": "days"}
_CALENDAR = {"Year": "year", "Month": "month", "DayOfMonth": "dayofmonth"}
_SECONDS = ("UnixTimestamp", "ToUnixTimestamp")
_UTC = re.compile(r"(UTC|GMT|UT|Z|Etc/UTC|Etc/GMT)([+-]0{1,2}(:?00){0,2})?", re.IGNORECASE)
"""Zones in which a day begins where a multiple of 24 hours has passed since 1970."""
_PLAIN_SCALE = 6
"""Decimals with more digits behind the point are printed with an exponent where they are small."""
_SHIFTS = ("TimestampAddInterval", "TimeAdd")
_DEEPEST = 64
"""Levels of an expression that tasks evaluate: each takes a few of Python's frames."""


def output_expr(node: Node, column: Callable[[Node], ColumnRef], depth: int = 0) -> Expr | None:
    """The expression by which tasks compute an output, or None if Spark has to; `column` gives a stream's column."""
    if not is_native(node.type) or depth > _DEEPEST:
        return None
    if node.name == "AttributeReference":
        return column(node)
    if node.name == "Literal":
        return _literal(node)
    if node.name in _SHIFTS:
        # Which intervals have a fixed length is a matter of the time zone: the same rule as for conditions.
        moved = Translator(lambda n: column(n) if n.column is not None else None)(node)
        return moved if isinstance(moved, Call) and moved.op == "shift" else None
    args = tuple(arg for arg in (output_expr(arg, column, depth + 1) for arg in node.args) if arg is not None)
    if len(args) < len(node.args):
        return None
    return _call(node, args)


def _literal(node: Node) -> Expr | None:
    found = literal(node) or decimal_literal(node)
    # NaN differs from itself, and so would a plan that holds it.
    is_nan = found is not None and isinstance(found.value, float) and math.isnan(found.value)
    return None if is_nan else found


def _call(node: Node, args: tuple[Expr, ...]) -> Expr | None:
    kinds, name = {arg.type for arg in args}, node.name
    if name in COMPARISONS:
        return Call(COMPARISONS[name], args, "boolean") if len(kinds) == 1 else None
    if name in _LOGIC:
        return Call(_LOGIC[name], args, "boolean") if kinds == {"boolean"} else None
    if name in _TESTS:
        return Call(_TESTS[name], args, "boolean")
    if name == "In":
        # Behind the first one that is equal, Spark evaluates none.
        fails = any(map(may_fail, args[1:]))
        return Call("in", args, "boolean") if not fails and len(kinds) == 1 and len(args) > 1 else None
    if name in _CHOICES:
        return Call(_CHOICES[name], args, node.type) if kinds == {node.type} else None
    if name in ("If", "CaseWhen"):
        args = args if len(args) % 2 else (*args, Literal(None, node.type))
        fits = {arg.type for arg in (*args[1::2], args[-1])} == {node.type}
        return Call("case", args, node.type) if fits else None
    if name in _TEXTS:
        return Call(_TEXTS[name], args, "string") if kinds == {"string"} and len(args) > 1 else None
    if name in _EPOCHS:
        return _since_1970(args[0], _EPOCHS[name]) if args[0].type == "timestamp" else None
    if name in _SECONDS and args[0].type in TIMES:
        # Rounded towards zero, and whatever the format is.
        return Call("div?", (Call("micros", args[:1], "bigint"), Literal(1_000_000, "bigint")), "bigint")
    if name in _CALENDAR:
        return Call(_CALENDAR[name], args, node.type) if args[0].type == "date" else None
    if name in _DAYS:
        second = ("date",) if name == "DateDiff" else ("tinyint", "smallint", "int")
        return Call(_DAYS[name], args, node.type) if args[0].type == "date" and args[1].type in second else None
    if name == "Cast":
        return _cast(node, args[0])
    return _number(node, args)


def _number(node: Node, args: tuple[Expr, ...]) -> Expr | None:
    """Arithmetic, as the session's mode has it when a value does not fit."""
    name = node.name
    if name in _ARITHMETIC and node.type in FLOATS:
        return _of_one_type(_ARITHMETIC[name], node, args)
    if name in _ARITHMETIC and keeps_all_digits(node):
        return Call(_ARITHMETIC[name], args, node.type)
    if name in _ARITHMETIC and node.type in INTEGRAL and (mode := _mode(node)) is not None:
        return _of_one_type(_ARITHMETIC[name] + ("" if mode == "ANSI" else "%"), node, args)
    if name in _DIVISIONS and node.type in _DIVIDED[_DIVISIONS[name]] and (mode := _mode(node)) is not None:
        return _of_one_type(_DIVISIONS[name] + ("" if mode == "ANSI" else "?"), node, args)
    if name in _SIGNS and (node.type in INTEGRAL or node.type in FLOATS or node.type.startswith("decimal(")):
        fails = bool(node.unresolved.failOnError())
        return _of_one_type(_SIGNS[name] + ("" if fails or node.type not in INTEGRAL else "%"), node, args)
    if name in _BITS and node.type in INTEGRAL:
        return _of_one_type(_BITS[name], node, args)
    return None


def _of_one_type(op: str, node: Node, args: tuple[Expr, ...]) -> Expr | None:
    return Call(op, args, node.type) if {arg.type for arg in args} == {node.type} else None


def _mode(node: Node) -> str | None:
    """`ANSI` or `LEGACY`; None for functions like try_add, which have a third meaning."""
    mode = str(node.unresolved.evalMode().toString())
    return mode if mode in ("ANSI", "LEGACY") else None


def _cast(node: Node, value: Expr) -> Expr | None:
    source, target = value.type, node.type
    exact = widens(source, target) or (source in INTEGRAL and target in FLOATS) or (source, target) == FLOATS
    printed = target == "string" and (source in (*INTEGRAL, "boolean", "string") or _is_printed_plainly(source))
    if exact or printed or widens_decimal(node) or (source == "boolean" and target in INTEGRAL):
        return Call("cast", (value,), target)
    if source in INTEGRAL and target in INTEGRAL and (mode := _mode(node)) is not None:
        return Call("narrow" if mode == "ANSI" else "narrow%", (value,), target)
    if target == "date" and (source == "timestamp_ntz" or (source == "timestamp" and _is_utc(node))):
        return Call("day", (value,), target)
    if (source, target) == ("date", "string"):
        return Call("datetext", (value,), target)
    if source == "timestamp" and target == "bigint":
        return _since_1970(value, 1_000_000)
    if source == "timestamp" and target == "double":
        return Call("seconds", (value,), target)
    return None


def _is_printed_plainly(kind: str) -> bool:
    found = digits(kind)
    return found is not None and found.scale <= _PLAIN_SCALE


def _is_utc(node: Node) -> bool:
    zone = node.unresolved.timeZoneId()
    return bool(zone.isDefined() and _UTC.fullmatch(zone.get()))


def _since_1970(time: Expr, unit: int) -> Call:
    micros = Call("micros", (time,), "bigint")
    return micros if unit == 1 else Call("floordiv", (micros, Literal(unit, "bigint")), "bigint")
