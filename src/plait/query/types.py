"""Spark's types by their names: the one table of what Plait knows about each.

Everything else derives from it: which types tasks compute with, which can be join keys, which Arrow and numpy types
hold their values (`state/segments/arrow_types.py`).  Decimals have a name for every precision, so they are a rule
beside the table: `digits`.  Types that are in neither travel and rest as they are, but no task looks into them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class SparkType:
    """What is known of a type."""

    name: str
    """As `simpleString` writes it."""
    arrow: str
    """Arrow's name for the type of its values; times are in microseconds."""
    numpy: str | None = None
    """The numpy type of an Arrow buffer of such values; None if they have no fixed number of bytes."""
    whole_digits: int | None = None
    """Of an integral type: the digits of the decimal that Spark takes it for."""
    computed: bool = True
    """Whether tasks compute with its values."""


TYPES = (
    SparkType("tinyint", "int8", "int8", 3),
    SparkType("smallint", "int16", "int16", 5),
    SparkType("int", "int32", "int32", 10),
    SparkType("bigint", "int64", "int64", 20),
    SparkType("float", "float", "float32"),
    SparkType("double", "double", "float64"),
    SparkType("date", "date32", "int32"),
    SparkType("timestamp", "timestamp[us]", "int64"),
    SparkType("timestamp_ntz", "timestamp[us]", "int64"),
    SparkType("boolean", "bool"),
    SparkType("string", "string"),
    SparkType("binary", "binary", computed=False),
)
"""All types with a name of their own; integral ones from narrow to wide."""

_NAMES = frozenset(t.name for t in TYPES)
WHOLE_DIGITS = {t.name: t.whole_digits for t in TYPES if t.whole_digits is not None}
"""Integral types, with the digits of the decimals that Spark takes them for."""
INTEGRAL = tuple(WHOLE_DIGITS)
"""From narrow to wide: a later one holds every value of an earlier one."""
FLOATS = tuple(t.name for t in TYPES if t.numpy is not None and t.numpy.startswith("float"))
TIMES = tuple(t.name for t in TYPES if t.arrow.startswith("timestamp"))
"""Event times can be of these types."""
NATIVE = tuple(t.name for t in TYPES if t.computed)
"""Tasks compare and compute values of these types, and of decimals, as Spark does."""
FIXED = tuple(t.name for t in TYPES if t.numpy is not None or t.arrow == "bool")
"""Values of these types have a fixed width."""
_PLAIN = tuple(t.name for t in TYPES if t.name not in FLOATS)
"""Equal values of these types, and of decimals, are the same in every respect: 0.0 and -0.0 are not,
nor are strings with a collation, whose types have longer names."""


class Digits(NamedTuple):
    """The digits of a decimal type."""

    precision: int
    scale: int

    @property
    def whole(self) -> int:
        """Digits before the point."""
        return self.precision - self.scale


def digits(kind: str) -> Digits | None:
    """The digits of a decimal type; None of another.

    >>> digits("decimal(12,2)"), digits("int")
    (Digits(precision=12, scale=2), None)
    """
    return Digits(*map(int, kind[8:-1].split(","))) if kind.startswith("decimal(") else None


def is_native(kind: str) -> bool:
    """Whether tasks compare values of this type as Spark does.

    >>> is_native("decimal(12,2)"), is_native("binary"), is_native("string collate UNICODE_CI")
    (True, False, False)
    """
    return kind in NATIVE or digits(kind) is not None


def has_plain_equality(kind: str) -> bool:
    """Whether equal values of this type are the same in every respect, for Arrow as for Spark.

    >>> has_plain_equality("binary"), has_plain_equality("double")
    (True, False)
    """
    return kind in _PLAIN or digits(kind) is not None


def is_key_type(kind: str) -> bool:
    """Whether values of this type can be join keys."""
    return kind in _NAMES or digits(kind) is not None


def is_exact_key(kind: str) -> bool:
    """Whether the 64-bit hash of such a key is a bijection of its value, so that equal hashes are equal keys."""
    decimal = digits(kind)
    return kind in FIXED if decimal is None else decimal.precision <= 18
