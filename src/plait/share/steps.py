"""One probe order of one join as steps: which store is looked into by which key, and what must hold afterwards.

Contract.  A step says *where* the order goes (`Step`, without anything that depends on filters or windows) and *what*
this query makes of the rows found there (`Judgement`).  Orders of several queries that go the same way share the
step; their judgements stay apart, member by member of the tree (`probe_trees.py`).

Invariant.  Every probe is *routed*: a step looks into a store partitioned by exactly the attribute whose value the
travelling tuple carries, so no tuple is broadcast and no relation is gathered in one task.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from plait.query.expr import Call, ColumnRef, Expr, Literal, columns_of, rename
from plait.query.graph import JoinGraph, Window
from plait.query.plan import Replay, SlotColumn, Step, Store, Zone, key_of
from plait.share.allocate import Allocation


@dataclass(frozen=True)
class FirstLook:
    """Of a query that begins with what is there: where rows at rest start, and which of them it would still hold."""

    alias: str
    above_us: Mapping[str, int]
    """By alias: only rows with an event time above this."""


@dataclass(frozen=True)
class Bound:
    """A window between two slots: `lower ≤ left − right ≤ upper` in microseconds; None is unbounded."""

    left: SlotColumn
    right: SlotColumn
    lower_us: int | None
    upper_us: int | None


@dataclass(frozen=True)
class Judgement:
    """What one query makes of the rows that a step finds."""

    filter: int | None
    """What they have to pass; None where all rows of the store do."""
    floor: int | None
    """The first epoch of birth that it sees; None where the store has no older rows."""
    checks: tuple[Expr, ...] = ()
    bounds: tuple[Bound, ...] = ()
    zone: Zone | None = None


@dataclass(frozen=True)
class Place:
    """A join on an allocation: which stores, filters and floors its aliases have."""

    base: Allocation
    name: str
    graph: JoinGraph
    ranks: tuple[str, ...]

    @property
    def only_tables(self) -> bool:
        """Whether nothing of it can change."""
        return all(a.relation in self.base.layout.tables for a in self.graph.aliases)

    def store(self, alias: str, attributes: tuple[int, ...]) -> Store:
        """The store in which an alias is looked up by these attributes."""
        key = key_of(self.graph, alias, attributes)
        return self.base.layout.store_by_id[self.base.stores[self.name, alias, key.columns]]

    def edge(self, driver: str, order: tuple[str, ...]) -> int:
        """The edge on which the new tuples of a driver travel to their first probe."""
        if order:
            return self.base.layout.edge_by_store[self.store(driver, self._first_key(driver, order)).id].id
        source = self.base.layout.input_by_relation[self.graph.alias(driver).relation]
        return next(edge.id for edge in source.edges if edge.store is None)

    def _first_key(self, driver: str, order: tuple[str, ...]) -> tuple[int, ...]:
        return self.graph.lookup_key([driver], order[0], None)

    def filter_of_new(self, alias: str) -> int | None:
        """What the rows that arrive have to pass; None where all do."""
        source = self.base.layout.input_by_relation[self.graph.alias(alias).relation]
        wanted = self.base.filters[self.name, alias]
        return None if source.implied(wanted) else wanted

    def _filter(self, alias: str, store: Store) -> int | None:
        """What the rows that rest have to pass; None where all of the store do, and always did."""
        return self.base.filters[self.name, alias] if store.mixed else self.filter_of_new(alias)

    def _floor(self, alias: str, store: Store) -> int | None:
        floor = self.base.floors[self.name][alias]
        return floor if floor > store.first else None

    def new_rows(self, driver: str) -> Judgement:
        """What the query makes of the rows that arrive."""
        return Judgement(self.filter_of_new(driver), None)

    def replay(self, look: FirstLook, order: tuple[str, ...]) -> tuple[Replay, Judgement]:
        """The rows at rest that drive in a first look, and what the query makes of them."""
        store = self.store(look.alias, self._first_key(look.alias, order))
        seen = Judgement(self.base.filters[self.name, look.alias], self._floor(look.alias, store))
        return Replay(store.id, look.above_us.get(look.alias)), seen

    def steps(
        self, driver: str, order: tuple[str, ...], look: FirstLook | None = None
    ) -> Iterator[tuple[Step, Judgement]]:
        """One probe order as steps.  Of a first look none sees this epoch."""
        graph, slots, hop = self.graph, [driver], 0
        here: tuple[int, ...] | None = None
        for target in order:
            attributes = graph.lookup_key(slots, target, here)
            hop, here = (hop, here) if attributes == here else (hop + 1, attributes)
            store = self.store(target, attributes)
            sources = [_carrier(graph, slots, attribute) for attribute in attributes]
            in_table = graph.alias(target).relation in self.base.layout.tables
            yield (
                Step(
                    store=store.id,
                    key=tuple(SlotColumn(slots.index(ref.alias), ref.column) for ref in sources),
                    hop=hop,
                    exact=store.key.exact,
                    sees_current=(in_table and (look is not None or not self.only_tables))
                    or (look is None and rank(graph, self.ranks, target) < rank(graph, self.ranks, driver)),
                ),
                self._judgement(slots, target, attributes, store, look),
            )
            slots.append(target)

    def _judgement(
        self, slots: list[str], target: str, attributes: tuple[int, ...], store: Store, look: FirstLook | None
    ) -> Judgement:
        checks = _checks(self.graph, slots, target, attributes)
        if look is not None and target in look.above_us and store.time_column is not None:
            checks = (_above(len(slots), store, look.above_us[target]), *checks)
        return Judgement(
            filter=self._filter(target, store),
            floor=self._floor(target, store),
            checks=checks,
            bounds=tuple(_bounds(self.graph, slots, target)),
            zone=_zone(self.graph, slots, target, store.time_column),
        )


def rank(graph: JoinGraph, ranks: tuple[str, ...], alias: str) -> tuple[int, int]:
    """Relations by the driver policy; aliases of one relation (a self-join) by written order."""
    position = [a.name for a in graph.aliases].index(alias)
    return ranks.index(graph.alias(alias).relation), position


def _above(slot: int, store: Store, bound_us: int) -> Expr:
    assert store.time_column is not None
    kind = next(c.type for c in store.columns if c.name == store.time_column)
    return Call(">", (ColumnRef(str(slot), store.time_column, kind), Literal(bound_us, kind)), "boolean")


def _carrier(graph: JoinGraph, slots: list[str], attribute: int) -> ColumnRef:
    """The first joined alias that carries the attribute; all that do have the same value."""
    return next(ref for alias in slots if (ref := graph.column_of(alias, attribute)) is not None)


def _checks(graph: JoinGraph, slots: list[str], target: str, attributes: tuple[int, ...]) -> tuple[Expr, ...]:
    """What must hold beyond the looked-up key once `target` has joined: cycles, and conditions that are no windows."""
    names = {alias: str(i) for i, alias in enumerate([*slots, target])}
    found: list[Expr] = []
    shared = graph.attributes_of(slots) & graph.attributes_of([target])
    for attribute in sorted(shared - set(attributes)):
        own = graph.column_of(target, attribute)
        assert own is not None
        found.append(Call("=", (_carrier(graph, slots, attribute), own), "boolean"))
    found.extend(c.expr for c in graph.conditions if c.expr is not None)
    ready = [e for e in found if _aliases(e) <= names.keys() and (target in _aliases(e))]
    return tuple(rename(e, names) for e in ready)


def _aliases(expr: Expr) -> set[str]:
    return {ref.alias for ref in columns_of(expr)}


def _bounds(graph: JoinGraph, slots: list[str], target: str) -> Iterator[Bound]:
    """The windows between `target`, which is on the left, and what has joined already: one for two event times."""
    found: dict[tuple[SlotColumn, SlotColumn], list[tuple[int | None, int | None]]] = {}
    for own, other, lower, upper in _windows_of(graph, target):
        if other.alias in slots:
            there = SlotColumn(slots.index(other.alias), other.column)
            found.setdefault((SlotColumn(len(slots), own.column), there), []).append((lower, upper))
    for (left, right), bounds in found.items():
        lowers, uppers = ([bound for bound in side if bound is not None] for side in zip(*bounds, strict=True))
        yield Bound(left, right, max(lowers, default=None), min(uppers, default=None))


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


def _zone(graph: JoinGraph, slots: list[str], target: str, time_column: str | None) -> Zone | None:
    """The first window between `target` and what has joined already."""
    for own, other, lower, upper in _windows_of(graph, target):
        if own.column == time_column and other.alias in slots:
            return Zone(SlotColumn(slots.index(other.alias), other.column), lower, upper)
    return None


def _negative(value: int | None) -> int | None:
    return None if value is None else -value
