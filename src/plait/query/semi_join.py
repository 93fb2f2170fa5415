"""A question that can be told from the rows themselves: which rows of one source have a partner in another."""

from __future__ import annotations

from dataclasses import dataclass

from plait.query.expr import Call, ColumnRef, Expr, columns_of
from plait.query.types import has_plain_equality

OWN, OTHER = "own", "other"
"""Whose columns a condition reads: of the rows that are asked about, of those that may be their partners."""


@dataclass(frozen=True, slots=True)
class Partners:
    """What makes a row of another source the partner of a row, and whether rows with partners are wanted."""

    other: str
    """The source's name."""
    key: tuple[str, str]
    """Columns that must be equal: the row's, the other's."""
    condition: Expr | None = None
    """What must hold besides."""
    wanted: bool = True

    @property
    def columns(self) -> list[str]:
        """What is read of the other."""
        read = () if self.condition is None else columns_of(self.condition)
        return list(dict.fromkeys((self.key[1], *(ref.column for ref in read if ref.alias == OTHER))))


def key_of(condition: Expr) -> tuple[str, str] | None:
    """The columns that a condition makes equal, if they are one of each side and of a type with plain equality."""
    if not isinstance(condition, Call) or condition.op != "=":
        return None
    sides = {arg.alias: arg for arg in condition.args if isinstance(arg, ColumnRef)}
    if len(sides) < 2 or not all(has_plain_equality(ref.type) for ref in sides.values()):
        return None
    return sides[OWN].column, sides[OTHER].column
