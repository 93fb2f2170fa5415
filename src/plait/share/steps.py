"""One probe order of one join as steps: which store is looked into by which key, and what must hold afterwards.

Contract.  A step says *where* the order goes (`Step`, without anything that depends on filters or windows) and *what*
this query makes of the rows found there (`Judgement`).  Orders of several queries that go the same way share the
step; their judgements stay apart, member by member of the tree (`probe_trees.py`).

Invariant.  A probe is *routed*: a step looks into a store partitioned by exactly the attribute whose value the
travelling tuple carries.  Where there is no such store, tuples are *broadcast*: they go to every task, each of which
searches its part of another store of the same stream (`Step.by`).  No relation is gathered in one task.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from plait.query.expr import Call, ColumnRef, Expr, Literal
from plait.query.graph import JoinGraph
from plait.query.plan import Replay, Step, Zone
from plait.query.store import Store, Use, key_of
from plait.share.allocate import Allocation
from plait.share.joined import Bound, Joined, bounds, carrier, checks, zone
from plait.share.needs import needed_columns


@dataclass(frozen=True)
class FirstLook:
    """Of a query that begins with what is there: where rows at rest start, and which of them it would still hold."""

    alias: str
    above_us: Mapping[str, int]
    """By alias: only rows with an event time above this."""


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
class Probed:
    """A MIR that a query may look up instead of the aliases it holds there."""

    store: Store
    use: Use
    fed: int
    """The hop at which the last rows of this epoch are appended."""


@dataclass(frozen=True)
class At:
    """Where tuples are while they follow an order."""

    hop: int
    here: tuple[int, ...]
    """The attributes that they are spread by,"""
    start: tuple[int, ...]
    """and those that they were spread by at their source: tuples that never left need no column of that key."""

    def stays(self, attributes: tuple[int, ...], hop: int) -> bool:
        """Whether tuples that look up by these attributes, at that hop, have the hash already."""
        waits = hop > self.hop or (self.here == self.start and hop > 1)
        return attributes == self.here and waits


@dataclass(frozen=True)
class Walk:
    """A probe order, step by step."""

    start: tuple[int, ...]
    """The attributes by which new tuples of the driver are spread."""
    steps: tuple[tuple[Step, Judgement], ...]
    joined: Joined
    end: tuple[int, ...]
    """The attributes by which joined tuples are spread."""

    @property
    def hop(self) -> int:
        """The last."""
        return max((step.hop for step, _ in self.steps), default=1)


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
        if not self.graph.is_stored_by(alias, attributes):
            # All have the same rows; the first is by the widest key.
            attributes = self.graph.keys_of(alias)[0]
        key = key_of(self.graph, alias, attributes)
        return self.base.layout.store_by_id[self.base.stores[self.name, alias, key.columns]]

    def edge(self, driver: str, start: tuple[int, ...]) -> int:
        """The edge on which the new tuples of a driver travel, spread by these attributes."""
        if start:
            return self.base.layout.edge_by_store[self.store(driver, start).id].id
        source = self.base.layout.input_by_relation[self.graph.alias(driver).relation]
        return next(edge.id for edge in source.edges if edge.store is None)

    @cached_property
    def at_rest(self) -> frozenset[ColumnRef]:
        """The columns that stores have of this join's aliases."""
        return needed_columns(self.graph)

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

    def replay(self, look: FirstLook, start: tuple[int, ...]) -> tuple[Replay, Judgement]:
        """The rows at rest that drive in a first look, and what the query makes of them."""
        store = self.store(look.alias, start)
        seen = Judgement(self.base.filters[self.name, look.alias], self._floor(look.alias, store))
        return Replay(store.id, look.above_us.get(look.alias)), seen

    def walk(
        self, driver: str, order: tuple[str, ...], look: FirstLook | None = None, mirs: Sequence[Probed] = ()
    ) -> Walk:
        """One probe order as steps; where it goes through all members of a MIR in a row, as one into that.

        Of a first look none sees this epoch.
        """
        joined = Joined(((driver,),))
        start = self._start(driver, order, mirs)
        at = At(1, start, start)
        steps: list[tuple[Step, Judgement]] = []
        while len(joined.aliases) <= len(order):
            left = order[len(joined.aliases) - 1 :]
            mir = self._whole(joined, left, at.here, mirs)
            if mir is None:
                step, judgement, here = self._into_relation(joined, left[0], at, look)
                joined = joined.then(left[0])
            else:
                step, judgement, here = self._into_mir(joined, mir, at)
                joined = joined.then(*mir.use.aliases)
            # Who left the source's key and comes back to it needs its column.
            at = At(step.hop, here, start if at.start == at.here == here else ())
            steps.append((step, judgement))
        return Walk(start, tuple(steps), joined, at.here)

    def _start(self, driver: str, order: tuple[str, ...], mirs: Sequence[Probed]) -> tuple[int, ...]:
        """The key by which the first probe looks up; any, if new tuples are not spread by that."""
        if not order:
            return ()
        alone, keys = Joined(((driver,),)), self.graph.keys_of(driver)
        for key in keys:
            first = self._whole(alone, order, key, mirs)
            if first is not None and self._mir_key(first) == key:
                return key
        if self._whole(alone, order, keys[0], mirs) is not None:
            return keys[0]
        first_key = self.graph.lookup_key([driver], order[0], None)
        return first_key if first_key in keys else keys[0]

    def _into_relation(
        self, before: Joined, target: str, at: At, look: FirstLook | None
    ) -> tuple[Step, Judgement, tuple[int, ...]]:
        graph, driver = self.graph, before.slots[0][0]
        attributes = graph.lookup_key(before.aliases, target, at.here)
        by = None if graph.is_stored_by(target, attributes) else key_of(graph, target, attributes)
        hop = at.hop if attributes == at.here and by is None else at.hop + 1
        store, after = self.store(target, attributes), before.then(target)
        in_table = graph.alias(target).relation in self.base.layout.tables
        step = Step(
            store=store.id,
            key=tuple(before.column(carrier(graph, before.aliases, t)) for t in attributes),
            hop=hop,
            exact=(by or store.key).exact,
            sees_current=(in_table and (look is not None or not self.only_tables))
            or (look is None and rank(graph, self.ranks, target) < rank(graph, self.ranks, driver)),
            stays=at.stays(attributes, hop),
            by=by,
        )
        shared = graph.attributes_of(before.aliases) & graph.attributes_of([target])
        equal = [
            (carrier(graph, before.aliases, t), carrier(graph, [target], t)) for t in sorted(shared - set(attributes))
        ]
        found = checks(graph, before, after, equal)
        if look is not None and target in look.above_us and store.time_column is not None:
            found = [_above(len(before.slots), store, look.above_us[target]), *found]
        judgement = Judgement(
            filter=self._filter(target, store),
            floor=self._floor(target, store),
            checks=tuple(found),
            bounds=tuple(bounds(graph, before, after)),
            zone=zone(graph, before, target, store.time_column),
        )
        # Whoever was broadcast is where the row is that was found: no key's owner.
        return step, judgement, attributes if by is None else ()

    def _into_mir(self, before: Joined, mir: Probed, at: At) -> tuple[Step, Judgement, tuple[int, ...]]:
        graph, driver = self.graph, before.slots[0][0]
        attributes, after = self._mir_key(mir), before.then(*mir.use.aliases)
        own = rank(graph, self.ranks, driver)
        below = sum(1 << i for i, alias in enumerate(mir.use.aliases) if rank(graph, self.ranks, alias) < own)
        # Whoever may not see this epoch's rows need not wait for them.
        hop = max(at.hop if attributes == at.here else at.hop + 1, mir.fed if below else 0)
        keys = [carrier(graph, self._resting(before.aliases, t) or before.aliases, t) for t in attributes]
        step = Step(
            store=mir.store.id,
            key=tuple(before.column(ref) for ref in keys),
            hop=hop,
            exact=mir.store.key.exact,
            sees_current=bool(below),
            below=below,
            stays=at.stays(attributes, hop),
        )
        judgement = Judgement(
            filter=mir.use.filter,
            floor=None,
            checks=tuple(checks(graph, before, after, self._closing(before, mir))),
            bounds=tuple(bounds(graph, before, after)),
        )
        return step, judgement, attributes

    def _whole(
        self, before: Joined, left: tuple[str, ...], here: tuple[int, ...], mirs: Sequence[Probed]
    ) -> Probed | None:
        """The largest MIR that the order goes through next, and that can be looked up by what has joined."""
        carried = self.graph.attributes_of(before.aliases)
        for mir in sorted(mirs, key=lambda mir: (-len(mir.use.aliases), mir.store.id)):
            key = self._mir_key(mir)
            if (
                set(left[: len(mir.use.aliases)]) == set(mir.use.aliases)
                and carried.issuperset(key)
                and (key == here or all(self._resting(before.aliases, attribute) for attribute in key))
                and all(one in self.at_rest and other in self.at_rest for one, other in self._closing(before, mir))
            ):
                return mir
        return None

    def _closing(self, before: Joined, mir: Probed) -> list[tuple[ColumnRef, ColumnRef]]:
        """Columns that must be equal beyond the key once a MIR has joined; of those at rest, if there are."""
        graph, members = self.graph, mir.use.aliases
        shared = graph.attributes_of(before.aliases) & graph.attributes_of(members)
        return [
            (
                carrier(graph, self._resting(before.aliases, t) or before.aliases, t),
                carrier(graph, self._resting(members, t) or members, t),
            )
            for t in sorted(shared - set(self._mir_key(mir)))
        ]

    def _resting(self, aliases: Sequence[str], attribute: int) -> list[str]:
        """Those of some aliases that carry an attribute in a column that stores have."""
        return [alias for alias in aliases if self.graph.column_of(alias, attribute) in self.at_rest]

    def _mir_key(self, mir: Probed) -> tuple[int, ...]:
        return mir_key(self.graph, mir.store, mir.use)


def mir_key(graph: JoinGraph, store: Store, use: Use) -> tuple[int, ...]:
    """The attributes that the key of a MIR is for a query."""
    found = []
    for name in store.key.columns:
        member, _, column = name.partition(".")
        alias = use.aliases[int(member)]
        found.append(next(t for t, refs in enumerate(graph.attributes) if any(_is(r, alias, column) for r in refs)))
    return tuple(found)


def _is(ref: ColumnRef, alias: str, column: str) -> bool:
    return (ref.alias, ref.column) == (alias, column)


def rank(graph: JoinGraph, ranks: tuple[str, ...], alias: str) -> tuple[int, int]:
    """Relations by the driver policy; aliases of one relation (a self-join) by written order."""
    position = [a.name for a in graph.aliases].index(alias)
    return ranks.index(graph.alias(alias).relation), position


def _above(slot: int, store: Store, bound_us: int) -> Expr:
    assert store.time_column is not None
    kind = next(c.type for c in store.columns if c.name == store.time_column)
    return Call(">", (ColumnRef(str(slot), store.time_column, kind), Literal(bound_us, kind)), "boolean")
