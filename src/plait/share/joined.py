"""Joined tuples while a probe order is followed: where the columns of each alias are, and what must hold among them.

An alias that was looked up by itself has a slot of its own; those that a MIR holds share one, and their columns are
told apart by the number of the member (`query/plan.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from plait.query.expr import Call, ColumnRef, Expr, columns_of, replaced
from plait.query.graph import JoinGraph, Window
from plait.query.plan import SlotColumn, Zone


def member_column(member: int, column: str) -> str:
    """What a column of a member is called in the store of a MIR."""
    return f"{member}.{column}"


@dataclass(frozen=True)
class Bound:
    """A window between two slots: `lower ≤ left − right ≤ upper` in microseconds; None is unbounded."""

    left: SlotColumn
    right: SlotColumn
    lower_us: int | None
    upper_us: int | None


@dataclass(frozen=True)
class Joined:
    """The aliases that have joined, slot by slot."""

    slots: tuple[tuple[str, ...], ...]
    """Several in one slot are the members of a MIR, in its order."""
    _places: Mapping[str, tuple[int, int | None]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        places = {
            alias: (slot, None if len(aliases) == 1 else member)
            for slot, aliases in enumerate(self.slots)
            for member, alias in enumerate(aliases)
        }
        object.__setattr__(self, "_places", places)

    @property
    def aliases(self) -> tuple[str, ...]:
        """All of them."""
        return tuple(alias for aliases in self.slots for alias in aliases)

    def __contains__(self, alias: str) -> bool:
        return alias in self._places

    def slot(self, alias: str) -> int:
        """Where an alias is."""
        return self._places[alias][0]

    def column(self, ref: ColumnRef) -> SlotColumn:
        """Where a column is."""
        slot, member = self._places[ref.alias]
        return SlotColumn(slot, ref.column if member is None else member_column(member, ref.column))

    def moved(self, expr: Expr) -> Expr:
        """The same expression over slots."""

        def moved(ref: ColumnRef) -> ColumnRef:
            place = self.column(ref)
            return ColumnRef(str(place.slot), place.column, ref.type)

        return replaced(expr, moved)

    def then(self, *aliases: str) -> Joined:
        """One slot more."""
        return Joined((*self.slots, aliases))


def carrier(graph: JoinGraph, aliases: Sequence[str], attribute: int) -> ColumnRef:
    """The first of some aliases that carries the attribute; all that do have the same value."""
    return next(ref for alias in aliases if (ref := graph.column_of(alias, attribute)) is not None)


def checks(graph: JoinGraph, before: Joined, after: Joined, equal: Sequence[tuple[ColumnRef, ColumnRef]]) -> list[Expr]:
    """What must hold beyond the looked-up key once the last slot has joined, and is no window.

    `equal` are cycles.  What holds among the members of a MIR was judged before they were kept.
    """
    targets = set(after.slots[-1])
    found: list[Expr] = [Call("=", pair, "boolean") for pair in equal]
    found.extend(c.expr for c in graph.conditions if c.expr is not None)

    def is_ready(expr: Expr) -> bool:
        aliases = {ref.alias for ref in columns_of(expr)}
        known = all(alias in after for alias in aliases)
        return known and bool(aliases & targets) and (len(targets) == 1 or any(a in before for a in aliases))

    return [after.moved(expr) for expr in found if is_ready(expr)]


def bounds(graph: JoinGraph, before: Joined, after: Joined) -> Iterator[Bound]:
    """The windows between the last slot, on the left, and what has joined before: one for two event times."""
    found: dict[tuple[SlotColumn, SlotColumn], list[tuple[int | None, int | None]]] = {}
    for target in after.slots[-1]:
        for own, other, lower, upper in _windows_of(graph, target):
            if other.alias in before:
                found.setdefault((after.column(own), after.column(other)), []).append((lower, upper))
    for (left, right), lengths in found.items():
        lowers, uppers = ([bound for bound in side if bound is not None] for side in zip(*lengths, strict=True))
        yield Bound(left, right, max(lowers, default=None), min(uppers, default=None))


def zone(graph: JoinGraph, before: Joined, target: str, time_column: str | None) -> Zone | None:
    """The first window between `target` and what has joined already."""
    for own, other, lower, upper in _windows_of(graph, target):
        if own.column == time_column and other.alias in before:
            return Zone(before.column(other), lower, upper)
    return None


def _windows_of(graph: JoinGraph, target: str) -> Iterator[tuple[ColumnRef, ColumnRef, int | None, int | None]]:
    """Windows of an alias as `lower ≤ own − other ≤ upper`."""
    for window in graph.windows:
        for own, other, lower, upper in _both_ways(window):
            if own.alias == target:
                yield own, other, lower, upper


def _both_ways(window: Window) -> list[tuple[ColumnRef, ColumnRef, int | None, int | None]]:
    return [
        (window.left, window.right, window.lower_us, window.upper_us),
        (window.right, window.left, _negative(window.upper_us), _negative(window.lower_us)),
    ]


def _negative(value: int | None) -> int | None:
    return None if value is None else -value
