"""Decimal types, by Spark's names for them."""

from __future__ import annotations

from typing import NamedTuple


class Digits(NamedTuple):
    """Of a decimal type."""

    precision: int
    scale: int

    @property
    def whole(self) -> int:
        """Before the point."""
        return self.precision - self.scale


def digits(kind: str) -> Digits | None:
    """The digits of a decimal type; None of another.

    >>> digits("decimal(12,2)"), digits("int")
    (Digits(precision=12, scale=2), None)
    """
    return Digits(*map(int, kind[8:-1].split(","))) if kind.startswith("decimal(") else None
