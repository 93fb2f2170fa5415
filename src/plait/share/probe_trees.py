"""Graphs and their probe orders become one plan: probe trees with shared prefixes over a layout of stores.

Contract: the plan is a pure function of its arguments.  Invariant: every probe is *routed* — a step looks into a
store partitioned by exactly the attribute whose value the travelling tuple carries, so no tuple is broadcast and
no relation is gathered in one task.  A relation that can be probed by different attributes therefore has one store for
each; paper 001 would keep one store and broadcast (its χ), which costs rows on every hop instead of rows at rest.

Steps that need no exchange between them (same attribute) have the same hop number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from plait.order.orders import Orders
from plait.query.expr import Call, ColumnRef, Expr, Literal, columns_of, rename
from plait.query.graph import Alias, JoinGraph, Window
from plait.query.layout import Layout
from plait.query.plan import (
    Emit,
    Node,
    Plan,
    ProbeTree,
    QueryPlan,
    Replay,
    SampleWish,
    SlotColumn,
    Step,
    Store,
    Zone,
    key_of,
)
from plait.query.relation import Relation
from plait.share.allocate import Allocation, Wanted, allocate, emitted


@dataclass
class _Branch:
    """A node while the trees are being merged."""

    children: dict[Step, _Branch] = field(default_factory=dict)
    emits: list[Emit] = field(default_factory=list)
    id: int = -1


@dataclass(frozen=True)
class _Root:
    """What two probe orders must have in common to start in one tree."""

    relation: str
    filter: int | None
    edge: int
    replays: Replay | None = None


@dataclass(frozen=True)
class FirstLook:
    """Of a query that begins with what is there: where rows at rest start, and which of them it would still hold."""

    alias: str
    above_us: Mapping[str, int]
    """By alias: only rows with an event time above this."""


def build_plan(
    graphs: Mapping[str, JoinGraph],
    relations: Mapping[str, Relation],
    orders: Mapping[str, Orders],
    ranks: tuple[str, ...],
) -> Plan:
    """The plan that runs all queries together on a new checkpoint, under these probe orders and ranks."""
    wanted = {name: Wanted(graph, name) for name, graph in graphs.items()}
    return plan_on(allocate(Layout(), wanted, relations), graphs, orders, ranks)


def plan_on(
    base: Allocation,
    graphs: Mapping[str, JoinGraph],
    orders: Mapping[str, Orders],
    ranks: tuple[str, ...],
    looks: Mapping[str, FirstLook] | None = None,
) -> Plan:
    """The plan of some joins on a layout that is there already."""
    layout = base.layout
    used = {i.relation for i in layout.inputs if i.edges}
    # Tables come first: every stream's rows see those of this epoch, and they never drive.
    ranks = tuple(sorted((r for r in ranks if r in used), key=lambda r: r not in layout.tables))
    roots: dict[_Root, _Branch] = {}
    paths: dict[tuple[str, str], list[_Branch]] = {}
    for name, graph in graphs.items():
        at = _Place(base, name, graph, ranks)
        for driver, order in orders[name].items():
            path = paths.setdefault((name, driver), [])
            if graph.alias(driver).relation in layout.tables and not at.only_tables:
                path.extend(_Branch() for _ in order)
                continue
            root = _Root(graph.alias(driver).relation, at.filter_of_new(driver), at.edge(driver, order))
            _grow(roots.setdefault(root, _Branch()), list(at.steps(driver, order)), path)
            end = path[-1] if path else roots[root]
            end.emits.append(_emit(name, graph, [driver, *order], layout))
        look = (looks or {}).get(name)
        if look is not None and len(graph.aliases) > 1:
            order = orders[name][look.alias]
            root = _Root(graph.alias(look.alias).relation, at.filter(look.alias), -1, at.replay(look, order))
            branches: list[_Branch] = []
            _grow(roots.setdefault(root, _Branch()), list(at.steps(look.alias, order, look)), branches)
            branches[-1].emits.append(_emit(name, graph, [look.alias, *order], layout))
    # Trees in ascending rank: the lowest sees only earlier epochs.
    first = sorted(roots, key=lambda root: ranks.index(root.relation))
    ids = iter(range(layout.next_edge, 1 << 30))
    trees = tuple(
        ProbeTree(
            root.relation, root.filter, root.edge, _freeze(roots[root], ids), tuple(roots[root].emits), root.replays
        )
        for root in first
    )
    queries = tuple(
        _query_plan(name, graph, orders[name], {d: paths[name, d] for d in orders[name]}, base)
        for name, graph in graphs.items()
    )
    return Plan(layout.inputs, layout.stores, trees, queries, ranks, _samples(base, graphs, ranks))


def _grow(branch: _Branch, steps: list[Step], path: list[_Branch]) -> None:
    """Follows steps from a branch, adding those that are not there; `path` gets what is gone through."""
    for step in steps:
        branch = branch.children.setdefault(step, _Branch())
        path.append(branch)


@dataclass(frozen=True)
class _Place:
    """A join on an allocation: which stores, filters and floors its aliases have."""

    base: Allocation
    name: str
    graph: JoinGraph
    ranks: tuple[str, ...]

    @property
    def only_tables(self) -> bool:
        return all(a.relation in self.base.layout.tables for a in self.graph.aliases)

    def store(self, alias: str, attributes: tuple[int, ...]) -> Store:
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

    def filter(self, alias: str, store: Store | None = None) -> int | None:
        """What the rows that rest have to pass; None where all of the store do, and always did."""
        if store is not None and not store.mixed:
            return self.filter_of_new(alias)
        return self.base.filters[self.name, alias]

    def floor(self, alias: str, store: Store) -> int | None:
        floor = self.base.floors[self.name][alias]
        return floor if floor > store.first else None

    def replay(self, look: FirstLook, order: tuple[str, ...]) -> Replay:
        store = self.store(look.alias, self._first_key(look.alias, order))
        return Replay(store.id, self.floor(look.alias, store), look.above_us.get(look.alias))

    def steps(self, driver: str, order: tuple[str, ...], look: FirstLook | None = None) -> Iterator[Step]:
        """One probe order as steps.  Of a first look none sees this epoch."""
        graph, slots, hop = self.graph, [driver], 0
        here: tuple[int, ...] | None = None
        for target in order:
            attributes = graph.lookup_key(slots, target, here)
            hop, here = (hop, here) if attributes == here else (hop + 1, attributes)
            store = self.store(target, attributes)
            sources = [_carrier(graph, slots, attribute) for attribute in attributes]
            checks = _checks(graph, slots, target, attributes)
            if look is not None and target in look.above_us and store.time_column is not None:
                checks = (_above(len(slots), store, look.above_us[target]), *checks)
            in_table = graph.alias(target).relation in self.base.layout.tables
            yield Step(
                store=store.id,
                key=tuple(SlotColumn(slots.index(ref.alias), ref.column) for ref in sources),
                hop=hop,
                exact=store.key.exact,
                sees_current=(in_table and (look is not None or not self.only_tables))
                or (look is None and _rank(graph, self.ranks, target) < _rank(graph, self.ranks, driver)),
                filter=self.filter(target, store),
                checks=checks,
                zone=_zone(graph, slots, target, store.time_column),
                floor=self.floor(target, store),
            )
            slots.append(target)


def _above(slot: int, store: Store, bound_us: int) -> Expr:
    assert store.time_column is not None
    kind = next(c.type for c in store.columns if c.name == store.time_column)
    return Call(">", (ColumnRef(str(slot), store.time_column, kind), Literal(bound_us, kind)), "boolean")


def _carrier(graph: JoinGraph, slots: list[str], attribute: int) -> ColumnRef:
    """The first joined alias that carries the attribute; all that do have the same value."""
    return next(ref for alias in slots if (ref := graph.column_of(alias, attribute)) is not None)


def _rank(graph: JoinGraph, ranks: tuple[str, ...], alias: str) -> tuple[int, int]:
    """Relations by the driver policy; aliases of one relation (a self-join) by written order."""
    position = [a.name for a in graph.aliases].index(alias)
    return ranks.index(graph.alias(alias).relation), position


def _checks(graph: JoinGraph, slots: list[str], target: str, attributes: tuple[int, ...]) -> tuple[Expr, ...]:
    """What must hold beyond the looked-up key once `target` has joined: cycles, windows, other conditions."""
    names = {alias: str(i) for i, alias in enumerate([*slots, target])}
    found: list[Expr] = []
    shared = graph.attributes_of(slots) & graph.attributes_of([target])
    for attribute in sorted(shared - set(attributes)):
        own = graph.column_of(target, attribute)
        assert own is not None
        found.append(Call("=", (_carrier(graph, slots, attribute), own), "boolean"))
    for window in graph.windows:
        if target in (window.left.alias, window.right.alias):
            found.extend(_window_checks(window))
    found.extend(c.expr for c in graph.conditions if c.expr is not None)
    ready = [e for e in found if _aliases(e) <= names.keys() and (target in _aliases(e))]
    return tuple(rename(e, names) for e in ready)


def _aliases(expr: Expr) -> set[str]:
    return {ref.alias for ref in columns_of(expr)}


def _window_checks(window: Window) -> list[Expr]:
    """lower ≤ left − right ≤ upper, as comparisons with a shifted timestamp."""
    bounds = ((">=", window.lower_us), ("<=", window.upper_us))
    return [
        Call(op, (window.left, Call("shift", (window.right, Literal(us, "bigint")), window.right.type)), "boolean")
        for op, us in bounds
        if us is not None
    ]


def _zone(graph: JoinGraph, slots: list[str], target: str, time_column: str | None) -> Zone | None:
    """The first window between `target` and what has joined already."""
    for window in graph.windows:
        for own, other, lower, upper in (
            (window.left, window.right, window.lower_us, window.upper_us),
            (window.right, window.left, _negative(window.upper_us), _negative(window.lower_us)),
        ):
            if own.alias == target and own.column == time_column and other.alias in slots:
                return Zone(SlotColumn(slots.index(other.alias), other.column), lower, upper)
    return None


def _negative(value: int | None) -> int | None:
    return None if value is None else -value


def _emit(name: str, graph: JoinGraph, slots: list[str], base: Layout) -> Emit:
    columns = emitted(graph)
    there = {i.relation: set(i.travelling) for i in base.inputs}
    assert all(ref.column in there[graph.alias(ref.alias).relation] for ref in columns), "the layout lacks a column"
    names = {alias: str(slot) for slot, alias in enumerate(slots)}
    made = [o.source or o.expr for o in graph.outputs] if graph.computes_outputs else []
    return Emit(
        name,
        tuple(SlotColumn(slots.index(ref.alias), ref.column) for ref in columns),
        tuple(rename(expr, names) for expr in made if expr is not None),
    )


def _query_plan(
    name: str, graph: JoinGraph, orders: Orders, paths: Mapping[str, list[_Branch]], base: Allocation
) -> QueryPlan:
    output = tuple((o.name, o.type) for o in graph.outputs)
    after = graph.needs_spark_after
    columns = tuple((str(ref), ref.type) for ref in emitted(graph)) if after else output
    assert graph.grouping is None or not graph.computes_outputs, "groups are made of columns"
    return QueryPlan(
        name=name,
        sql=graph.sql,
        columns=columns,
        where=tuple(c.sql for c in graph.conditions if c.expr is None),
        select=tuple((o.sql, o.name) for o in graph.outputs) if after else (),
        output=output,
        orders=tuple(sorted(orders.items())),
        nodes=tuple((driver, tuple(branch.id for branch in paths[driver])) for driver in sorted(orders)),
        relations=tuple((a.name, a.relation) for a in graph.aliases),
        grouping=None if graph.grouping is None else graph.grouping.over(_names(graph, columns)),
        stores=tuple((a, key, store) for (join, a, key), store in base.stores.items() if join == name),
        filters=tuple((a.name, _new_filter(base, name, a)) for a in graph.aliases),
        marks=base.marks[name],
    )


def _names(graph: JoinGraph, columns: tuple[tuple[str, str], ...]) -> dict[ColumnRef, str]:
    return {ref: name for ref, (name, _) in zip(emitted(graph), columns, strict=True)}


def _new_filter(base: Allocation, name: str, alias: Alias) -> int | None:
    wanted = base.filters[name, alias.name]
    return None if base.layout.input_by_relation[alias.relation].implied(wanted) else wanted


def _samples(base: Allocation, graphs: Mapping[str, JoinGraph], ranks: tuple[str, ...]) -> tuple[SampleWish, ...]:
    """For every input and key: the stores of all aliases that can be looked up by it directly."""
    found: dict[tuple[int, int | None, str], dict[tuple[str, int | None, bool], None]] = {}
    for name, graph in graphs.items():
        at = _Place(base, name, graph, ranks)
        for alias in graph.aliases:
            for attributes in graph.keys_of(alias.name):
                own = at.store(alias.name, attributes)
                edge = base.layout.edge_by_store[own.id].id, _new_filter(base, name, alias), own.id
                for other in graph.aliases:
                    if other.name != alias.name and attributes in graph.keys_of(other.name):
                        sees = _rank(graph, ranks, other.name) < _rank(graph, ranks, alias.name)
                        store = at.store(other.name, attributes)
                        found.setdefault(edge, {})[store.id, _new_filter(base, name, other), sees] = None
    return tuple(SampleWish(*edge, tuple(stores)) for edge, stores in found.items())


def _freeze(branch: _Branch, ids: Iterable[int]) -> tuple[Node, ...]:
    counter = iter(ids)
    nodes = []
    for step, child in branch.children.items():
        child.id = next(counter)
        nodes.append(Node(child.id, step, _freeze(child, counter), tuple(child.emits)))
    return tuple(nodes)
