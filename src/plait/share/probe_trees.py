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
from plait.query.graph import JoinGraph, Window
from plait.query.plan import (
    NO_KEY,
    Emit,
    Key,
    Node,
    Plan,
    ProbeTree,
    QueryPlan,
    SampleWish,
    SlotColumn,
    Step,
    Zone,
    key_of,
    store_id,
)
from plait.query.relation import Relation
from plait.share.layout import Layout, emitted, layout


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
    key: Key


def build_plan(
    graphs: Mapping[str, JoinGraph],
    relations: Mapping[str, Relation],
    orders: Mapping[str, Orders],
    ranks: tuple[str, ...],
) -> Plan:
    """The plan that runs all queries together under these probe orders and this ranking of the relations."""
    return plan_on(layout(graphs, relations), graphs, orders, ranks)


def plan_on(
    base: Layout, graphs: Mapping[str, JoinGraph], orders: Mapping[str, Orders], ranks: tuple[str, ...]
) -> Plan:
    """`build_plan` on a layout that is there already: what re-optimisation calls."""
    ranks = tuple(r for r in ranks if r in base.filters)
    roots: dict[_Root, _Branch] = {}
    paths: dict[tuple[str, str], list[_Branch]] = {}
    for name, graph in graphs.items():
        for driver, order in orders[name].items():
            steps = list(_steps(graph, driver, order, ranks, base))
            key = key_of(graph, driver, graph.lookup_key([driver], order[0], None)) if order else NO_KEY
            root = _Root(graph.alias(driver).relation, base.filter_bit(graph.alias(driver)), key)
            branch = roots.setdefault(root, _Branch())
            path = paths.setdefault((name, driver), [])
            for step in steps:
                branch = branch.children.setdefault(step, _Branch())
                path.append(branch)
            branch.emits.append(_emit(name, graph, [driver, *order], base))
    # Whose relation ranks lowest drives first: its tuples see earlier epochs only.
    first = sorted(roots, key=lambda root: ranks.index(root.relation))
    ids = iter(range(sum(len(i.edges) for i in base.inputs), 1 << 30))
    trees = tuple(
        ProbeTree(
            root.relation,
            root.filter,
            base.edge(root.relation, root.key),
            _freeze(roots[root], ids),
            tuple(roots[root].emits),
        )
        for root in first
    )
    queries = tuple(
        _query_plan(name, graph, orders[name], {d: paths[name, d] for d in orders[name]})
        for name, graph in graphs.items()
    )
    return Plan(base.inputs, base.stores, trees, queries, ranks, _samples(base, graphs, ranks))


def _steps(
    graph: JoinGraph, driver: str, order: tuple[str, ...], ranks: tuple[str, ...], base: Layout
) -> Iterator[Step]:
    """One probe order as steps."""
    slots = [driver]
    hop = 0
    here: tuple[int, ...] | None = None
    for target in order:
        attributes = graph.lookup_key(slots, target, here)
        hop, here = (hop, here) if attributes == here else (hop + 1, attributes)
        key = key_of(graph, target, attributes)
        sources = [_carrier(graph, slots, attribute) for attribute in attributes]
        yield Step(
            store=store_id(graph.alias(target).relation, key),
            key=tuple(SlotColumn(slots.index(ref.alias), ref.column) for ref in sources),
            hop=hop,
            exact=key.exact,
            sees_current=_rank(graph, ranks, target) < _rank(graph, ranks, driver),
            filter=base.filter_bit(graph.alias(target)),
            checks=_checks(graph, slots, target, attributes),
            zone=_zone(graph, slots, target, base.time_column(graph.alias(target).relation)),
        )
        slots.append(target)


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
    return Emit(name, tuple(SlotColumn(slots.index(ref.alias), ref.column) for ref in columns))


def _query_plan(name: str, graph: JoinGraph, orders: Orders, paths: Mapping[str, list[_Branch]]) -> QueryPlan:
    output = tuple((o.name, o.type) for o in graph.outputs)
    after = graph.needs_spark_after
    columns = tuple((str(ref), ref.type) for ref in emitted(graph)) if after else output
    names = {ref: name for ref, (name, _) in zip(emitted(graph), columns, strict=True)}
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
        grouping=None if graph.grouping is None else graph.grouping.over(names),
    )


def _samples(base: Layout, graphs: Mapping[str, JoinGraph], ranks: tuple[str, ...]) -> tuple[SampleWish, ...]:
    """For every input and key: the stores of all aliases that can be looked up by it directly."""
    found: dict[tuple[int, int | None, str], dict[tuple[str, int | None, bool], None]] = {}
    for graph in graphs.values():
        for alias in graph.aliases:
            for attributes in graph.keys_of(alias.name):
                key = key_of(graph, alias.name, attributes)
                edge = base.edge(alias.relation, key), base.filter_bit(alias), store_id(alias.relation, key)
                for other in graph.aliases:
                    if other.name != alias.name and attributes in graph.keys_of(other.name):
                        sees = _rank(graph, ranks, other.name) < _rank(graph, ranks, alias.name)
                        store = store_id(other.relation, key_of(graph, other.name, attributes))
                        found.setdefault(edge, {})[store, base.filter_bit(other), sees] = None
    return tuple(SampleWish(*edge, tuple(stores)) for edge, stores in found.items())


def _freeze(branch: _Branch, ids: Iterable[int]) -> tuple[Node, ...]:
    counter = iter(ids)
    nodes = []
    for step, child in branch.children.items():
        child.id = next(counter)
        nodes.append(Node(child.id, step, _freeze(child, counter), tuple(child.emits)))
    return tuple(nodes)
