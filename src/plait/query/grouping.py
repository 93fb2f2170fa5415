"""An aggregate as join tasks make it: of the rows they join, one row per group, with values that parts add up to.

Several such rows of one group, of several tasks and epochs, are merged later: by the same functions, except that counts
are summed (`sql/catalyst/maintain.py` says why that is right).  Expressions are over the columns that leave the join.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from plait.query.expr import ColumnRef, Expr, columns_of, replaced

COUNT, SUM, MIN, MAX = "count", "sum", "min", "max"


@dataclass(frozen=True, slots=True)
class GroupKey:
    """A column of the group."""

    name: str
    value: Expr


@dataclass(frozen=True, slots=True)
class GroupValue:
    """One value per group: a function of the argument over the group's rows."""

    name: str
    function: str
    argument: Expr | None
    """None counts rows."""
    type: str

    @property
    def merging(self) -> str:
        """The function by which values of parts become the value of all."""
        return SUM if self.function == COUNT else self.function


@dataclass(frozen=True, slots=True)
class Grouping:
    """Keys, and values per group."""

    keys: tuple[GroupKey, ...]
    values: tuple[GroupValue, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The columns of its rows."""
        return (*(key.name for key in self.keys), *(value.name for value in self.values))

    @property
    def columns(self) -> frozenset[ColumnRef]:
        """What is read of joined rows."""
        read = [key.value for key in self.keys] + [v.argument for v in self.values if v.argument is not None]
        return frozenset(ref for expr in read for ref in columns_of(expr))

    def over(self, names: dict[ColumnRef, str]) -> Grouping:
        """The same over columns that are called so, without an alias."""

        def called(expr: Expr) -> Expr:
            return replaced(expr, lambda ref: ColumnRef("", names[ref], ref.type))

        keys = tuple(replace(key, value=called(key.value)) for key in self.keys)
        return Grouping(
            keys, tuple(v if v.argument is None else replace(v, argument=called(v.argument)) for v in self.values)
        )
