"""Which expressions a join task evaluates itself: Catalyst nodes become `query.expr` trees, or None.

A node is translated only where the task's meaning is exactly Spark's: comparisons, logic, null tests, integer
arithmetic that fails on overflow (ANSI), floating-point arithmetic, widening casts, timestamps shifted by a fixed
time.  A sub-expression over one alias that is not like that becomes a computed column of that alias, if computing it
early cannot fail: `a.x < upper(b.s)` compares two columns.  Everything else is left to Spark.

Of an aggregate's input more is translated (`may_fail`): decimals, as long as Spark's rules for their precision need no
more than 38 digits, and CASE, of which all values are computed.  Where that fails, a task leaves the rows to Spark.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from plait.query.expr import Call, ColumnRef, Expr, Literal
from plait.query.types import FLOATS, INTEGRAL, NATIVE, TIMES, WHOLE_DIGITS, digits, is_native
from plait.sql.catalyst.expressions import Node

COMPARISONS = {
    "EqualTo": "=",
    "EqualNullSafe": "<=>",
    "LessThan": "<",
    "LessThanOrEqual": "<=",
    "GreaterThan": ">",
    "GreaterThanOrEqual": ">=",
}
_LOGIC = {"And": "and", "Or": "or", "Not": "not", "IsNull": "isnull", "IsNotNull": "isnotnull"}
_ARITHMETIC = {"Add": "+", "Subtract": "-", "Multiply": "*"}
_SHIFTS = ("TimestampAddInterval", "TimeAdd")
_FIXED_ZONE = re.compile(r"(UTC|GMT|UT|Z|Etc/\w+)?([+-]\d{1,2}(:?\d{2}){0,2})?", re.IGNORECASE)
_DAY_US = 86_400_000_000

# Nodes that never fail, whatever the row: they may be computed on rows that the join would have dropped.
_TOTAL = frozenset((
    "AttributeReference", "Literal", "And", "Or", "Not", "IsNull", "IsNotNull", "IsNaN", "EqualTo", "EqualNullSafe",
    "LessThan", "LessThanOrEqual", "GreaterThan", "GreaterThanOrEqual", "In", "InSet", "If", "CaseWhen", "Coalesce",
    "Greatest", "Least", "NaNvl", "NullIf", "Upper", "Lower", "Length", "OctetLength", "BitLength", "Concat",
    "ConcatWs", "Substring", "StringTrim", "StringTrimLeft", "StringTrimRight", "StringLPad", "StringRPad",
    "StringReplace", "StringTranslate", "Reverse", "InitCap", "StartsWith", "EndsWith", "Contains", "Like",
    "SubstringIndex", "StringInstr", "StringLocate", "Ascii", "SoundEx", "Levenshtein", "Md5", "Sha1", "Sha2",
    "Crc32", "Murmur3Hash", "XxHash64", "Hex", "Base64", "Year", "Quarter", "Month", "DayOfMonth", "DayOfWeek",
    "DayOfYear", "WeekDay", "WeekOfYear", "YearOfWeek", "Hour", "Minute", "Second", "LastDay", "TruncDate",
    "TruncTimestamp", "DateDiff", "GetStructField", "CreateNamedStruct", "CreateArray", "Size", "ArrayContains",
    "GetJsonObject",
))  # fmt: skip
_WIDER = {kind: place for place, kind in enumerate((*INTEGRAL, *FLOATS))}


def widens(source: str, target: str) -> bool:
    """Whether a cast keeps every value of an integral type."""
    return source in INTEGRAL and target in INTEGRAL and INTEGRAL.index(source) <= INTEGRAL.index(target)


def is_total(node: Node) -> bool:
    """Whether evaluating the node fails for no row, so that it may be computed before the join drops any.

    Spark computes output columns after the join; `1 / b.x` computed before it would fail on a row of b that has no
    partner.
    """
    if node.name == "Cast":
        return _cast_is_total(node) and is_total(node.args[0])
    if node.name in ("Add", "Subtract", "Multiply", "UnaryMinus", "Abs"):
        return node.type in FLOATS and all(map(is_total, node.args))
    return node.name in _TOTAL and all(map(is_total, node.args))


def _cast_is_total(node: Node) -> bool:
    source, target = node.args[0].type, node.type
    if target == "string":
        return is_native(source)
    if source in _WIDER and target in _WIDER:
        return _WIDER[source] <= _WIDER[target]
    if (narrow := digits(source)) is not None and (wide := digits(target)) is not None:
        return wide.scale >= narrow.scale and wide.whole >= narrow.whole
    return (source, target) in {
        ("string", "binary"),
        ("date", "timestamp_ntz"),
        ("date", "timestamp"),
        ("timestamp", "date"),
    }


class Translator:
    """Turns nodes into expressions; `column` makes the physical column of a node over one alias, if there is one.

    With `loose_days`, calendar days count as 24 hours even where the time zone has daylight saving.  Such an
    expression is only good for bounds that are widened afterwards.
    With `may_fail`, an expression may fail on rows on which Spark's does not: it is only good where that can be mended.
    """

    def __init__(
        self, column: Callable[[Node], ColumnRef | None], loose_days: bool = False, may_fail: bool = False
    ) -> None:
        self._column = column
        self._loose_days = loose_days
        self._may_fail = may_fail

    def __call__(self, node: Node) -> Expr | None:
        """The expression, or None if Spark has to evaluate it."""
        if node.name == "AttributeReference":
            return self._column(node) if is_native(node.type) else None
        if node.name == "Literal":
            return literal(node) or (decimal_literal(node) if self._may_fail else None)
        found = self._call(node)
        if found is None and len(node.leaves) == 1 and is_native(node.type) and is_total(node):
            return self._column(node)
        return found

    def _call(self, node: Node) -> Expr | None:
        if node.name in COMPARISONS:
            return self._comparison(node)
        if node.name in _SHIFTS:
            return self._shift(node)
        if node.name in _LOGIC:
            return self._apply(_LOGIC[node.name], node)
        if node.name in _ARITHMETIC and (node.type in FLOATS or (node.type in INTEGRAL and _fails_on_overflow(node))):
            return self._apply(_ARITHMETIC[node.name], node)
        if node.name == "Cast":
            source, target = node.args[0].type, node.type
            exact = widens(source, target) or (target == "double" and (source in INTEGRAL or source == "float"))
            return self._apply("cast", node) if exact or (self._may_fail and widens_decimal(node)) else None
        if self._may_fail and node.name in _ARITHMETIC and keeps_all_digits(node):
            return self._apply(_ARITHMETIC[node.name], node)
        if self._may_fail and node.name == "UnscaledValue":
            # Catalyst sums and averages short decimals as integers.
            return self._apply("unscaled", node)
        if self._may_fail and node.name in ("If", "CaseWhen"):
            return self._case(node)
        return None

    def _case(self, node: Node) -> Expr | None:
        args = list(map(self, node.args))
        if len(args) % 2 == 0:
            args.append(Literal(None, node.type))
        known = tuple(arg for arg in args if arg is not None)
        if len(known) < len(args) or any(value.type != node.type for value in (*known[1::2], known[-1])):
            return None
        return Call("case", known, node.type)

    def _apply(self, op: str, node: Node) -> Expr | None:
        args = tuple(arg for arg in map(self, node.args) if arg is not None)
        return Call(op, args, node.type) if len(args) == len(node.args) else None

    def _comparison(self, node: Node) -> Expr | None:
        left, right = node.args
        if left.name == "SubtractTimestamps" and (moved := self._moved(left, right, node.name)) is not None:
            return moved
        return self._apply(COMPARISONS[node.name], node) if left.type == right.type else None

    def _moved(self, difference: Node, bound: Node, name: str) -> Expr | None:
        """`a - b < i` as `a < b + i`; exact where local time has no gaps, that is without daylight saving."""
        span = interval(bound)
        left, right = map(self, difference.args)
        if span is None or left is None or right is None or left.type != right.type:
            return None
        if not (self._loose_days or _has_fixed_zone(difference)):
            return None
        return Call(COMPARISONS[name], (left, _shifted(right, span)), "boolean")

    def _shift(self, node: Node) -> Expr | None:
        time, span = self(node.args[0]), interval(node.args[1])
        if time is None or span is None or node.type not in TIMES or node.type != time.type:
            return None
        if span[0] and not (self._loose_days or _has_fixed_zone(node)):
            return None
        return _shifted(time, span)


def _shifted(time: Expr, span: tuple[int, int]) -> Call:
    return Call("shift", (time, Literal(span[0] * _DAY_US + span[1], "bigint")), time.type)


def literal(node: Node) -> Literal | None:
    """A constant that a task can hold, or None."""
    if node.type not in NATIVE:
        return None
    return Literal(node.value, node.type)


def decimal_literal(node: Node) -> Literal | None:
    """A decimal constant, or None if it is something else."""
    if digits(node.type) is None:
        return None
    value = node.value
    return Literal(None if value is None else format(value.toJavaBigDecimal(), "f"), node.type)


def keeps_all_digits(node: Node) -> bool:
    """Whether a sum, difference or product of decimals has room for every digit, so that it cannot overflow.

    Where it has not, Spark rounds.
    """
    left, right, result = (digits(kind) for kind in (node.args[0].type, node.args[1].type, node.type))
    if left is None or right is None or result is None:
        return False
    if node.name == "Multiply":
        return result == (left.precision + right.precision + 1, left.scale + right.scale)
    scale = max(left.scale, right.scale)
    return result == (max(left.whole, right.whole) + scale + 1, scale)


def widens_decimal(node: Node) -> bool:
    """Whether a cast to a decimal keeps every value."""
    source, wide = node.args[0].type, digits(node.type)
    if wide is None:
        return False
    return wide.whole >= WHOLE_DIGITS[source] if source in INTEGRAL else _cast_is_total(node)


def interval(node: Node) -> tuple[int, int] | None:
    """A constant interval as (calendar days, microseconds); None if it has months or is no constant."""
    if node.name != "Literal" or not node.type.startswith("interval") or node.value is None:
        return None
    if node.type == "interval":
        period, duration = node.value.extractAsPeriod(), node.value.extractAsDuration()
        return None if period.toTotalMonths() else (int(period.getDays()), int(duration.toNanos()) // 1000)
    if re.search("year|month", node.type):
        return None
    micros = int(node.value)
    days = abs(micros) // _DAY_US * (1 if micros > 0 else -1)
    return days, micros - days * _DAY_US


def _fails_on_overflow(node: Node) -> bool:
    return str(node.unresolved.evalMode().toString()) == "ANSI"


def _has_fixed_zone(node: Node) -> bool:
    """Whether a day always has 24 hours for this operation: no time zone at all, or one without daylight saving."""
    if node.args[0].type == "timestamp_ntz":
        return True
    zone = node.unresolved.timeZoneId()
    return bool(zone.isDefined() and _FIXED_ZONE.fullmatch(zone.get()))
