"""Graphs and their probe orders become one plan: shared inputs, shared stores, probe trees with shared prefixes.

Contract: the plan is a pure function of its arguments.  Invariant: every probe is *routed* — a step looks into a
store partitioned by exactly the attribute whose value the travelling tuple carries, so no tuple is broadcast and
no relation is gathered in one task.  A relation that is probed by different attributes therefore has one store for
each; paper 001 would keep one store and broadcast (its χ), which costs rows on every hop instead of rows at rest.

Steps that need no exchange between them (same attribute) have the same hop number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from plait.errors import QueryError
from plait.order.orders import Orders
from plait.query.expr import Call, ColumnRef, Expr, Literal, columns_of, rename
from plait.query.graph import Alias, JoinGraph, Window, is_exact_key
from plait.query.plan import Emit, IngestEdge, Input, Key, Node, Plan, ProbeTree, QueryPlan, SlotColumn, Step, Store
from plait.query.relation import ColumnDef, Relation
from plait.share.retention import keep_us

MOST_FILTERS = 62
"""Bits of a query set (a signed 64-bit column)."""


@dataclass
class _Branch:
    """A node while the trees are being merged."""

    children: dict[Step, _Branch] = field(default_factory=dict)
    emits: list[Emit] = field(default_factory=list)


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
    filters = _distinct_filters(graphs)
    roots: dict[_Root, _Branch] = {}
    stores: dict[str, tuple[str, Key]] = {}
    needed: dict[str, set[str]] = {relation: set() for relation in filters}
    for name, graph in graphs.items():
        chooser = _KeyChooser(graph)
        for driver, order in orders[name].items():
            _add_order(name, graph, driver, order, ranks, filters, chooser, roots, stores, needed)

    columns = _physical_columns(graphs)
    kept = _retention(graphs, relations)
    plan_stores = tuple(
        _store(
            store_id, relations[relation], key, columns[relation], needed[relation], filters[relation], kept[relation]
        )
        for store_id, (relation, key) in sorted(stores.items())
    )
    inputs, edge_ids = _inputs(relations, ranks, roots, plan_stores, columns, needed, filters, _required(graphs))
    counter = iter(range(len(edge_ids), 1 << 30))
    trees = tuple(
        ProbeTree(root.relation, root.filter, edge_ids[root.relation, root.key], _freeze(branch, counter))
        for root, branch in roots.items()
    )
    queries = tuple(_query_plan(name, graph, orders[name]) for name, graph in graphs.items())
    return Plan(inputs, plan_stores, trees, queries, tuple(r for r in ranks if r in filters))


class _KeyChooser:
    """Picks the attributes by which an alias is looked up, re-using an earlier choice where it fits."""

    def __init__(self, graph: JoinGraph) -> None:
        self.graph = graph
        self.chosen: dict[str, list[tuple[int, ...]]] = {}

    def choose(self, joined: list[str], target: str) -> tuple[int, ...]:
        """Attributes both sides carry: the widest set shared with one joined alias; the rest becomes checks."""
        available = self.graph.attributes_of(joined) & self.graph.attributes_of([target])
        known = [key for key in self.chosen.get(target, []) if available.issuperset(key)]
        pairs = [tuple(sorted(self.graph.shared(alias, target))) for alias in joined]
        best = max([*known, *pairs], key=len)
        if best not in self.chosen.setdefault(target, []):
            self.chosen[target].append(best)
        return best


def _add_order(
    query: str,
    graph: JoinGraph,
    driver: str,
    order: tuple[str, ...],
    ranks: tuple[str, ...],
    filters: Mapping[str, tuple[str | None, ...]],
    chooser: _KeyChooser,
    roots: dict[_Root, _Branch],
    stores: dict[str, tuple[str, Key]],
    needed: dict[str, set[str]],
) -> None:
    """Thread one probe order into the trees, noting the stores and columns it uses."""
    slots = [driver]
    hop, here = 0, None
    entered = {driver: 1}
    branch: _Branch | None = None
    for target in order:
        attributes = chooser.choose(slots, target)
        hop, here = (hop, here) if attributes == here else (hop + 1, attributes)
        key = _key(graph, target, attributes)
        store = f"{graph.alias(target).relation}[{key}]"
        stores[store] = (graph.alias(target).relation, key)
        sources = [_carrier(graph, slots, attribute) for attribute in attributes]
        step = Step(
            store=store,
            key=tuple(SlotColumn(slots.index(ref.alias), ref.column) for ref in sources),
            hop=hop,
            exact=key.exact,
            sees_current=_rank(graph, ranks, target) < _rank(graph, ranks, driver),
            filter=_filter_bit(filters, graph.alias(target)),
            checks=_checks(graph, slots, target, attributes),
        )
        for ref in sources:
            if not key.exact or hop > entered[ref.alias]:
                needed[graph.alias(ref.alias).relation].add(ref.column)
        if not key.exact:
            needed[graph.alias(target).relation].update(key.columns)
        if branch is None:
            root = _Root(
                graph.alias(driver).relation,
                _filter_bit(filters, graph.alias(driver)),
                _key(graph, driver, attributes),
            )
            branch = roots.setdefault(root, _Branch())
        branch = branch.children.setdefault(step, _Branch())
        slots.append(target)
        entered[target] = hop
        _note_columns(graph, slots, step.checks, needed)
    emitted = _emitted(graph)
    for ref in emitted:
        needed[graph.alias(ref.alias).relation].add(ref.column)
    assert branch is not None
    branch.emits.append(Emit(query, tuple(SlotColumn(slots.index(ref.alias), ref.column) for ref in emitted)))


def _note_columns(graph: JoinGraph, slots: list[str], checks: Iterable[Expr], needed: dict[str, set[str]]) -> None:
    for check in checks:
        for ref in columns_of(check):
            needed[graph.alias(slots[int(ref.alias)]).relation].add(ref.column)


def _key(graph: JoinGraph, alias: str, attributes: tuple[int, ...]) -> Key:
    refs = [graph.column_of(alias, attribute) for attribute in attributes]
    columns = tuple(ref.column for ref in refs if ref is not None)
    types = tuple(ref.type for ref in refs if ref is not None)
    return Key(columns, types, exact=len(types) == 1 and is_exact_key(types[0]))


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


def _emitted(graph: JoinGraph) -> tuple[ColumnRef, ...]:
    """What leaves the join: the outputs themselves, or all that Spark needs to finish the query."""
    if not graph.needs_spark_after:
        return tuple(o.source for o in graph.outputs if o.source is not None)
    late = [ref for c in graph.conditions if c.expr is None for ref in c.refs]
    return tuple(dict.fromkeys([ref for o in graph.outputs for ref in o.refs] + late))


def _query_plan(name: str, graph: JoinGraph, orders: Orders) -> QueryPlan:
    output = tuple((o.name, o.type) for o in graph.outputs)
    after = graph.needs_spark_after
    return QueryPlan(
        name=name,
        sql=graph.sql,
        columns=tuple((str(ref), ref.type) for ref in _emitted(graph)) if after else output,
        where=tuple(c.sql for c in graph.conditions if c.expr is None),
        select=tuple((o.sql, o.name) for o in graph.outputs) if after else (),
        output=output,
        orders=tuple(sorted(orders.items())),
        relations=tuple((a.name, a.relation) for a in graph.aliases),
    )


def _distinct_filters(graphs: Mapping[str, JoinGraph]) -> dict[str, tuple[str | None, ...]]:
    found: dict[str, dict[str | None, None]] = {}
    for graph in graphs.values():
        for alias in graph.aliases:
            found.setdefault(alias.relation, {})[alias.filter] = None
    for relation, distinct in found.items():
        if len(distinct) > MOST_FILTERS:
            raise QueryError(
                "TOO_MANY_FILTERS",
                f"the queries filter stream {relation!r} in {len(distinct)} different ways",
                f"at most {MOST_FILTERS} fit a query set; register the stream a second time under another name",
            )
    return {relation: tuple(texts) for relation, texts in found.items()}


def _filter_bit(filters: Mapping[str, tuple[str | None, ...]], alias: Alias) -> int | None:
    """The alias's bit in the query set; None where all rows that arrive pass."""
    texts = filters[alias.relation]
    return None if len(texts) == 1 or alias.filter is None else texts.index(alias.filter)


def _required(graphs: Mapping[str, JoinGraph]) -> dict[str, tuple[str, ...]]:
    """Per relation, the columns that no alias can use a NULL of."""
    found: dict[str, frozenset[str]] = {}
    for graph in graphs.values():
        for alias in graph.aliases:
            needs = graph.required(alias.name)
            found[alias.relation] = found.get(alias.relation, needs) & needs
    return {relation: tuple(sorted(columns)) for relation, columns in found.items()}


def _physical_columns(graphs: Mapping[str, JoinGraph]) -> dict[str, dict[str, ColumnDef]]:
    found: dict[str, dict[str, ColumnDef]] = {}
    for graph in graphs.values():
        for alias in graph.aliases:
            found.setdefault(alias.relation, {}).update({c.name: c for c in alias.columns})
    return found


def _retention(graphs: Mapping[str, JoinGraph], relations: Mapping[str, Relation]) -> dict[str, int | None]:
    """A store serves all its queries, so it keeps a row for as long as the most patient of them."""
    found: dict[str, list[int | None]] = {}
    for graph in graphs.values():
        for alias, kept in keep_us(graph, relations).items():
            found.setdefault(graph.alias(alias).relation, []).append(kept)
    return {r: None if None in kept else max(k for k in kept if k is not None) for r, kept in found.items()}


def _store(
    store_id: str,
    relation: Relation,
    key: Key,
    columns: Mapping[str, ColumnDef],
    needed: set[str],
    filters: tuple[str | None, ...],
    kept: int | None,
) -> Store:
    names = set(needed)
    if kept is not None and relation.time_column is not None:
        names.add(relation.time_column)
    return Store(
        id=store_id,
        relation=relation.name,
        key=key,
        columns=tuple(_column(relation, columns, name) for name in sorted(names)),
        masked=len(filters) > 1,
        time_column=relation.time_column if kept is not None else None,
        keep_us=kept,
        ttl_us=relation.ttl_us,
    )


def _column(relation: Relation, columns: Mapping[str, ColumnDef], name: str) -> ColumnDef:
    if name in columns:
        return columns[name]
    return ColumnDef(name, "`" + name.replace("`", "``") + "`", relation.type_of(name))


def _inputs(
    relations: Mapping[str, Relation],
    ranks: tuple[str, ...],
    roots: Mapping[_Root, _Branch],
    stores: tuple[Store, ...],
    columns: Mapping[str, Mapping[str, ColumnDef]],
    needed: Mapping[str, set[str]],
    filters: Mapping[str, tuple[str | None, ...]],
    required: Mapping[str, tuple[str, ...]],
) -> tuple[tuple[Input, ...], dict[tuple[str, Key], int]]:
    """One input per relation; one ingest edge for every attribute by which it is stored or first probes."""
    ids: dict[tuple[str, Key], int] = {}
    inputs: list[Input] = []
    for name in (r for r in ranks if r in filters):
        relation = relations[name]
        keys = {s.key: s.id for s in stores if s.relation == name}
        wanted = list(dict.fromkeys([*keys, *(root.key for root in roots if root.relation == name)]))
        edges = []
        for key in wanted:
            ids[name, key] = len(ids)
            edges.append(IngestEdge(ids[name, key], key, keys.get(key)))
        stored = {c.name for s in stores if s.relation == name for c in s.columns}
        travelling = tuple(sorted(stored | needed[name]))
        selected = set(travelling) | {c for key in wanted for c in key.columns}
        if relation.time_column is not None:
            selected.add(relation.time_column)
        inputs.append(
            Input(
                relation=name,
                columns=tuple(_column(relation, columns[name], c) for c in sorted(selected)),
                travelling=travelling,
                filters=filters[name],
                required=required[name],
                time_column=relation.time_column,
                delay_ms=relation.delay_ms,
                ttl_us=relation.ttl_us,
                edges=tuple(edges),
            )
        )
    return tuple(inputs), ids


def _freeze(branch: _Branch, counter: Iterable[int]) -> tuple[Node, ...]:
    ids = iter(counter)
    return tuple(
        Node(next(ids), step, _freeze(child, ids), tuple(child.emits)) for step, child in branch.children.items()
    )
