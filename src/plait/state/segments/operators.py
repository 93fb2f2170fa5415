"""What every operator of `query.expr` makes of Arrow values, with Spark's meaning; `evaluate.py` walks the trees.

Contract: arguments are arrays of one length, or scalars; timestamps are microseconds, as 64-bit integers.  NULL in
gives NULL out except where the operator is about NULLs.  An operator that fails in Spark's ANSI mode raises
`ArrowInvalid` (`overflow`, `divide by zero`, `remainder by zero`); it looks only at rows without NULLs.
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from functools import partial, reduce
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from plait.query.expr import Call
from plait.query.types import INTEGRAL
from plait.state.segments.arrow_types import inner_type

Value = Any
"""An Arrow array or scalar; pyarrow has no types."""

_COMPARE = {
    "=": pc.equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}
_LEAST = {kind: -(2 ** (kind.bit_width - 1)) for kind in map(inner_type, INTEGRAL)}
_MICROS = 1_000_000


def applied(call: Call, args: list[Value]) -> Value:
    """The operator's value; logic, COALESCE and CASE are `evaluate.py`'s."""
    return _OPERATORS[call.op](call, *args)


def compared(op: str, left: Value, right: Value) -> Value:
    """Spark's comparison: NaN equals NaN and is greater than any other number, −0.0 equals 0.0."""
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


def _is_nan(value: Value) -> Value:
    return pc.is_nan(value) if pa.types.is_floating(value.type) else pc.and_(pc.is_null(value), False)


def _null_safe_equal(_call: Call, left: Value, right: Value) -> Value:
    both_null = pc.and_(pc.is_null(left), pc.is_null(right))
    return pc.or_(pc.fill_null(compared("=", left, right), False), both_null)


def _in(_call: Call, value: Value, *members: Value) -> Value:
    return reduce(pc.or_kleene, (compared("=", value, member) for member in members))


def _extreme(op: str, _call: Call, *args: Value) -> Value:
    """The greatest or least that is not NULL; of equal ones (−0.0 and 0.0) the first."""

    def chosen(best: Value, other: Value) -> Value:
        better = pc.or_kleene(pc.is_null(best), pc.fill_null(compared(op, other, best), False))
        return pc.if_else(pc.and_(better, pc.is_valid(other)), other, best)

    return reduce(chosen, args)


def _fixed(function: Callable[..., Value], call: Call, *args: Value) -> Value:
    """Arrow's arithmetic, in the type that Spark gives it: of decimals Arrow's own may be wider."""
    found = function(*args)
    kind = inner_type(call.type)
    return found if found.type == kind else found.cast(kind)


def _refused(bad: Value, what: str) -> None:
    found = bad.as_py() if isinstance(bad, pa.Scalar) else pc.any(bad).as_py()
    if found:
        raise pa.ArrowInvalid(what)


def _divisor(fails: str | None, left: Value, right: Value) -> Value:
    """The divisor, NULL where it is zero; with `fails`, zero is an error where there is something to divide."""
    zero = pc.equal(right, pa.scalar(0, right.type))
    if fails is not None:
        _refused(pc.and_(zero, pc.is_valid(left)), fails)
    return pc.if_else(pc.fill_null(zero, False), pa.scalar(None, right.type), right)


def _divided(fails: str | None, _call: Call, left: Value, right: Value) -> Value:
    return pc.divide(left, _divisor(fails, left, right))


def _integer_divided(fails: str | None, _call: Call, left: Value, right: Value) -> Value:
    """Rounded towards zero.  The least number divided by −1 overflows, or wraps around to itself."""
    divisor = _divisor(fails, left, right)
    overflows = pc.and_(pc.equal(left, _LEAST[left.type]), pc.equal(divisor, pa.scalar(-1, right.type)))
    if fails is not None:
        _refused(overflows, "overflow")
    return pc.divide(left, pc.if_else(pc.fill_null(overflows, False), pa.scalar(1, right.type), divisor))


def _remainder(fails: str | None, _call: Call, left: Value, right: Value) -> Value:
    """With the sign of the dividend.  −1 and 1 leave the same remainder, and 1 never overflows."""
    divisor = _divisor(fails, left, right)
    if pa.types.is_floating(right.type):
        return _by_numpy(np.fmod, left, divisor)
    divisor = pc.if_else(pc.equal(divisor, pa.scalar(-1, right.type)), pa.scalar(1, right.type), divisor)
    return pc.subtract(left, pc.multiply(pc.divide(left, divisor), divisor))


def _by_numpy(function: Any, left: Value, right: Value) -> Value:
    """A function of two floating-point numbers that Arrow does not have."""
    kind, missing = right.type, pc.or_(pc.is_null(left), pc.is_null(right))
    if isinstance(missing, pa.Scalar):
        return pa.scalar(None if missing.as_py() else function(*(v.as_py() for v in (left, right))), kind)
    sides = [
        np.float64(v.as_py() or 0) if isinstance(v, pa.Scalar) else pc.fill_null(v, 0).to_numpy() for v in (left, right)
    ]
    with np.errstate(all="ignore"):
        found = function(*(np.asarray(side, kind.to_pandas_dtype()) for side in sides))
    return pc.if_else(missing, pa.scalar(None, kind), pa.array(found, kind))


def _narrowed(call: Call, value: Value) -> Value:
    """An integer in a type that may be too narrow for it."""
    kind = inner_type(call.type)
    least = _LEAST[kind]
    outside = pc.or_(pc.less(value, pa.scalar(least, value.type)), pc.greater(value, pa.scalar(-1 - least, value.type)))
    _refused(outside, "cast overflow")
    return value.cast(kind, safe=False)


def _day(_call: Call, micros: Value) -> Value:
    """The day in UTC."""
    return _floor_divided(_call, micros, pa.scalar(86_400 * _MICROS, pa.int64())).cast(pa.int32()).cast(pa.date32())


def _civil(days: int) -> tuple[int, int, int]:
    """Year, month and day of a number of days since 1970, in the calendar that Spark has for all times.

    >>> _civil(0), _civil(-1), _civil(19_782)
    ((1970, 1, 1), (1969, 12, 31), (2024, 2, 29))
    """
    # A year that begins in March ends with its leap day.
    era, day = divmod(days + 719_468, 146_097)
    year = (day - day // 1460 + day // 36_524 - day // 146_096) // 365
    day -= 365 * year + year // 4 - year // 100
    month = (5 * day + 2) // 153
    return (
        400 * era + year + (month >= 10),
        month + 3 if month < 10 else month - 9,
        day - (153 * month + 2) // 5 + 1,
    )


def _date_text(days: int) -> str:
    year, month, day = _civil(days)
    sign = "-" if year < 0 else "+" if year > 9999 else ""
    return f"{sign}{abs(year):04d}-{month:02d}-{day:02d}"


def _of_days(function: Callable[[int], Any], call: Call, dates: Value) -> Value:
    """A function of dates, computed once for each."""
    kind = inner_type(call.type)
    if isinstance(dates, pa.Scalar):
        return pa.scalar(function(dates.cast(pa.int32()).as_py()) if dates.is_valid else None, kind)
    known = dates.cast(pa.int32()).dictionary_encode()
    return pa.array([function(day) for day in known.dictionary.to_pylist()], kind).take(known.indices)


def _checked(function: Callable[..., Value], _call: Call, value: Value) -> Value:
    """Negation or absolute value, which the least integer has none of."""
    if value.type in _LEAST:
        _refused(pc.equal(value, pa.scalar(_LEAST[value.type], value.type)), "overflow")
    return function(value)


def _floor_divided(_call: Call, value: Value, by: pa.Scalar) -> Value:
    found = pc.divide(value, by)
    less = pc.less(pc.subtract(value, pc.multiply(found, by)), 0)
    return pc.if_else(less, pc.subtract(found, 1), found)


def _cast(call: Call, value: Value) -> Value:
    kind = inner_type(call.type)
    # Large integers become the nearest float or double, as Spark's do; nothing else that is translated loses digits.
    return value.cast(kind, safe=not pa.types.is_floating(kind))


def _unscaled(_call: Call, value: Value) -> Value:
    scale = value.type.scale
    return pc.multiply(value, pa.scalar(Decimal(10**scale), pa.decimal128(scale + 1, 0))).cast(pa.int64())


def _days(function: Callable[..., Value], call: Call, *args: Value) -> Value:
    return function(*(arg.cast(pa.int32()) for arg in args)).cast(inner_type(call.type))


def _concat(_call: Call, *args: Value) -> Value:
    return pc.binary_join_element_wise(*args, "", null_handling="emit_null")


def _concat_ws(call: Call, separator: Value, *args: Value) -> Value:
    """Arrow's own way of leaving NULLs out loses rows that have nothing else (pyarrow 26)."""
    found = args[0]
    for arg in args[1:]:
        found = pc.coalesce(_concat(call, found, separator, arg), found, arg)
    return pc.if_else(pc.is_null(separator), pa.scalar(None, found.type), pc.coalesce(found, ""))


def _plain(function: Callable[..., Value]) -> Callable[..., Value]:
    return lambda _call, *args: function(*args)


_OPERATORS: dict[str, Callable[..., Value]] = {
    **{op: partial(lambda op, _call, left, right: compared(op, left, right), op) for op in _COMPARE},
    "<=>": _null_safe_equal,
    "in": _in,
    "greatest": partial(_extreme, ">"),
    "least": partial(_extreme, "<"),
    "not": _plain(pc.invert),
    "isnull": _plain(pc.is_null),
    "isnotnull": _plain(pc.is_valid),
    "isnan": lambda _call, value: pc.fill_null(pc.is_nan(value), False),
    "+": partial(_fixed, pc.add_checked),
    "-": partial(_fixed, pc.subtract_checked),
    "*": partial(_fixed, pc.multiply_checked),
    "+%": partial(_fixed, pc.add),
    "-%": partial(_fixed, pc.subtract),
    "*%": partial(_fixed, pc.multiply),
    "/": partial(_divided, "divide by zero"),
    "/?": partial(_divided, None),
    "div": partial(_integer_divided, "divide by zero"),
    "div?": partial(_integer_divided, None),
    "mod": partial(_remainder, "remainder by zero"),
    "mod?": partial(_remainder, None),
    "neg": partial(_checked, pc.negate),
    "neg%": _plain(pc.negate),
    "abs": partial(_checked, pc.abs),
    "abs%": _plain(pc.abs),
    "&": _plain(pc.bit_wise_and),
    "|": _plain(pc.bit_wise_or),
    "^": _plain(pc.bit_wise_xor),
    "~": _plain(pc.bit_wise_not),
    "shift": _plain(pc.add_checked),
    "floordiv": _floor_divided,
    "micros": lambda _call, value: value,
    "seconds": lambda _call, value: pc.divide(value.cast(pa.float64(), safe=False), float(_MICROS)),
    "addday": partial(_days, pc.add),
    "subday": partial(_days, pc.subtract),
    "days": partial(_days, pc.subtract),
    "concat": _concat,
    "concatws": _concat_ws,
    "cast": _cast,
    "narrow": _narrowed,
    "narrow%": lambda call, value: value.cast(inner_type(call.type), safe=False),
    "day": _day,
    "datetext": partial(_of_days, _date_text),
    "year": partial(_of_days, lambda days: _civil(days)[0]),
    "month": partial(_of_days, lambda days: _civil(days)[1]),
    "dayofmonth": partial(_of_days, lambda days: _civil(days)[2]),
    "unscaled": _unscaled,
}
