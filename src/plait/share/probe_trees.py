"""Graphs and their probe orders become one plan: probe trees with shared prefixes over a layout of stores.

Contract: the plan is a pure function of its arguments.  A relation that can be probed by different attributes has one
store for each (`steps.py`: every probe is routed); paper 001 would keep one store and broadcast (its χ), which costs
rows on every hop instead of rows at rest.

Orders that go the same way are one path, whatever their queries' filters, floors, windows and conditions are: a node
holds the judgement of each of its members (paper 004's query sets).  Steps that need no exchange between them (same
attribute) have the same hop number.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from plait.order.orders import Orders
from plait.query.expr import ColumnRef, Expr
from plait.query.graph import Alias, JoinGraph
from plait.query.layout import Layout
from plait.query.plan import (
    Check,
    Emit,
    Feed,
    Node,
    Plan,
    ProbeTree,
    QueryPlan,
    Replay,
    SampleWish,
    Seen,
    SlotColumn,
    Span,
    Step,
    Zone,
)
from plait.query.relation import Relation
from plait.query.store import Store, key_of
from plait.share.allocate import Allocation, Wanted, allocate
from plait.share.feeds import feed_of, feeding
from plait.share.joined import Joined
from plait.share.mirs import Keep
from plait.share.needs import emitted
from plait.share.steps import FirstLook, Judgement, Place, Probed, Walk, rank
from plait.share.structure import Group, alike_groups, groups_of

Bounds = dict[tuple[int | None, int | None], int]
"""The members that have a window of this length."""


@dataclass
class _Branch:
    """A node while the trees are being merged."""

    children: dict[Step, _Branch] = field(default_factory=dict)
    emits: list[Emit] = field(default_factory=list)
    feeds: dict[Feed, list[tuple[int, int]]] = field(default_factory=dict)
    """(member, filter of its use) by what they feed."""
    id: int = -1
    members: int = 0
    seen: dict[tuple[int | None, int | None], int] = field(default_factory=dict)
    """The members by (filter, floor)."""
    checks: dict[Expr, int] = field(default_factory=dict)
    spans: dict[tuple[SlotColumn, SlotColumn], Bounds] = field(default_factory=dict)
    zones: set[Zone | None] = field(default_factory=set)

    def add(self, member: int, judgement: Judgement) -> None:
        """One more member comes through here."""
        bit = 1 << member
        self.members |= bit
        _join(self.seen, (judgement.filter, judgement.floor), bit)
        for check in judgement.checks:
            _join(self.checks, check, bit)
        for bound in judgement.bounds:
            lengths = self.spans.setdefault((bound.left, bound.right), {})
            _join(lengths, (bound.lower_us, bound.upper_us), bit)
        self.zones.add(judgement.zone)

    def seen_by(self) -> tuple[Seen, ...]:
        """What each member sees."""
        return tuple(Seen(filter, floor, members) for (filter, floor), members in self.seen.items())

    def step(self, bare: Step) -> Step:
        """The step with what its members make of the rows found."""
        return replace(
            bare,
            seen=self.seen_by(),
            checks=tuple(Check(e, None if m == self.members else m) for e, m in self.checks.items()),
            spans=tuple(
                Span(left, right, tuple((low, high, members) for (low, high), members in lengths.items()))
                for (left, right), lengths in self.spans.items()
            ),
            zone=_widest(self.zones),
        )


def _join(sets: dict[Any, int], key: Hashable, bit: int) -> None:
    sets[key] = sets.get(key, 0) | bit


def _widest(zones: set[Zone | None]) -> Zone | None:
    """The zone within which all of these lie; None where they are not about the same event time."""
    known = [zone for zone in zones if zone is not None]
    if len(known) < len(zones) or len({zone.by for zone in known}) != 1:
        return None
    lowers, uppers = [z.lower_us for z in known], [z.upper_us for z in known]
    return Zone(
        known[0].by,
        None if None in lowers else min(lower for lower in lowers if lower is not None),
        None if None in uppers else max(upper for upper in uppers if upper is not None),
    )


@dataclass(frozen=True)
class _Root:
    """What two probe orders must have in common to start in one tree."""

    relation: str
    edge: int
    replays: Replay | None = None
    owner: str = ""
    """The query whose tree it is; empty: of all."""


@dataclass
class _Tree:
    """A tree while orders are being merged into it."""

    top: _Branch = field(default_factory=_Branch)
    members: list[tuple[str, str]] = field(default_factory=list)
    paths: list[tuple[tuple[str, ...], ...]] = field(default_factory=list)

    def grow(self, name: str, driver: str, begin: Judgement, walk: Walk) -> tuple[int, list[_Branch]]:
        """Adds an order as one more member; returns its number and the nodes it goes through."""
        member = len(self.members)
        self.members.append((name, driver))
        self.paths.append(walk.joined.slots)
        self.top.add(member, begin)
        branch, path = self.top, []
        for step, judgement in walk.steps:
            branch = branch.children.setdefault(step, _Branch())
            branch.add(member, judgement)
            path.append(branch)
        return member, path

    def grow_to(self, name: str, driver: str, begin: Judgement, walk: Walk, emit: Emit) -> list[_Branch]:
        """Adds an order at whose end a result is complete."""
        member, path = self.grow(name, driver, begin, walk)
        (path[-1] if path else self.top).emits.append(replace(emit, member=member))
        return path


def build_plan(
    graphs: Mapping[str, JoinGraph],
    relations: Mapping[str, Relation],
    orders: Mapping[str, Orders],
    ranks: tuple[str, ...],
    keeps: Sequence[Keep] = (),
    apart: bool = False,
) -> Plan:
    """The plan that runs all queries together on a new checkpoint, under these probe orders and ranks."""
    wanted = {name: Wanted(graph, name) for name, graph in graphs.items()}
    return plan_on(allocate(Layout(), wanted, relations, keeps=keeps, apart=apart), graphs, orders, ranks)


def plan_on(
    base: Allocation,
    graphs: Mapping[str, JoinGraph],
    orders: Mapping[str, Orders],
    ranks: tuple[str, ...],
    looks: Mapping[str, FirstLook] | None = None,
    *,
    fills: frozenset[str] = frozenset(),
    probes: frozenset[tuple[str, str, str]] | None = None,
) -> Plan:
    """The plan of some joins on a layout that is there already.

    All MIRs of the layout are fed.  Those in `fills` are filled with the past in this epoch, and looked up by nobody.
    The others are looked up wherever an order goes through all members in a row; with `probes`, only by these:
    (query, driver, store).
    """
    layout = base.layout
    used = {i.relation for i in layout.inputs if i.edges}
    # Tables come first: every stream's rows see those of this epoch, and they never drive.
    ranks = tuple(sorted((r for r in ranks if r in used), key=lambda r: r not in layout.tables))
    forest = _Forest(base, graphs, ranks)
    mirs = [probed for store in layout.mirs for probed in forest.feed(store, store.id in fills)]
    paths: dict[tuple[str, str], list[_Branch]] = {}
    for name, graph in graphs.items():
        at = Place(base, name, graph, ranks)
        for driver, order in orders[name].items():
            if graph.alias(driver).relation in layout.tables and not at.only_tables:
                paths[name, driver] = [_Branch() for _ in order]
                continue
            mine = [m for m in mirs if m.use.query == name and (probes is None or (name, driver, m.store.id) in probes)]
            walk = at.walk(driver, order, mirs=mine)
            emit = _emit(name, graph, walk.joined, layout)
            path = forest.tree(at, driver, walk).grow_to(name, driver, at.new_rows(driver), walk, emit)
            paths[name, driver] = _by_alias(walk, path)
        look = (looks or {}).get(name)
        if look is not None and len(graph.aliases) > 1:
            walk = at.walk(look.alias, orders[name][look.alias], look)
            begin, tree = forest.resting(at, look, walk)
            tree.grow_to(name, look.alias, begin, walk, _emit(name, graph, walk.joined, layout))
    ids = iter(range(layout.next_edge, 1 << 30))
    # Trees in ascending rank: the lowest sees only earlier epochs.
    first = sorted(forest.roots, key=lambda root: ranks.index(root.relation))
    trees = tuple(_frozen_tree(root, forest.roots[root], ids) for root in first)
    groups = groups_of(graphs, base.owners)
    filters = _filters_of_groups(base, graphs, groups)
    queries = tuple(
        _query_plan(name, graph, orders[name], {d: paths[name, d] for d in orders[name]}, base, filters)
        for name, graph in graphs.items()
    )
    samples = _samples(base, {lead: graphs[lead] for lead in groups}, ranks, filters, groups)
    return Plan(layout.inputs, layout.stores, trees, queries, ranks, samples)


@dataclass
class _Forest:
    """All trees while they grow."""

    base: Allocation
    graphs: Mapping[str, JoinGraph]
    ranks: tuple[str, ...]
    roots: dict[_Root, _Tree] = field(default_factory=dict)

    def tree(self, at: Place, driver: str, walk: Walk) -> _Tree:
        """Where the new tuples of a driver begin."""
        root = _Root(at.graph.alias(driver).relation, at.edge(driver, walk.start), owner=self._owner(at))
        return self.roots.setdefault(root, _Tree())

    def resting(self, at: Place, look: FirstLook, walk: Walk) -> tuple[Judgement, _Tree]:
        """Where rows at rest begin, and which of them a query sees."""
        replays, begin = at.replay(look, walk.start)
        root = _Root(at.graph.alias(look.alias).relation, -1, replays, self._owner(at))
        return begin, self.roots.setdefault(root, _Tree())

    def _owner(self, at: Place) -> str:
        return self.base.owners.get(at.name, "")

    def feed(self, store: Store, fills: bool) -> list[Probed]:
        """The paths that complete rows of a MIR: of every filter, one per driving member.  Who may look it up."""
        assert store.mir is not None
        hop = 1
        for use in store.mir.feeding:
            at = Place(self.base, use.query, self.graphs[use.query], self.ranks)
            for driver, look, walk in feeding(at, store, use, fills):
                if look is None:
                    begin, tree = at.new_rows(driver), self.tree(at, driver, walk)
                else:
                    begin, tree = self.resting(at, look, walk)
                member, path = tree.grow(use.query, driver, begin, walk)
                feed = feed_of(at, store, use, walk, new=look is None)
                path[-1].feeds.setdefault(feed, []).append((member, use.filter))
                hop = max(hop, walk.hop)
        return [] if fills else [Probed(store, use, hop + 1) for use in store.mir.uses]


def _by_alias(walk: Walk, path: list[_Branch]) -> list[_Branch]:
    """The nodes of an order, alias by alias; those that a MIR holds have none of their own."""
    found: list[_Branch] = []
    for aliases, branch in zip(walk.joined.slots[1:], path, strict=True):
        found.extend([branch] if len(aliases) == 1 else [_Branch() for _ in aliases])
    return found


def _frozen_tree(root: _Root, tree: _Tree, ids: Iterator[int]) -> ProbeTree:
    top = tree.top
    bare = ProbeTree(
        relation=root.relation,
        edge=root.edge,
        members=tuple(tree.members),
        seen=top.seen_by(),
        nodes=(),
        emits=tuple(top.emits),
        replays=root.replays,
        paths=tuple(tree.paths),
    )
    # Rows at rest come with their sets always: they are read as if they had travelled.
    varied = len(top.seen) > 1 or root.replays is not None
    return replace(bare, nodes=_frozen_nodes(top, ids, bare.width, varied))


def _frozen_nodes(branch: _Branch, ids: Iterator[int], words: int, varied: bool) -> tuple[Node, ...]:
    """`varied`: tuples that leave the branch may belong to some of its members only."""
    nodes = []
    for bare, child in branch.children.items():
        child.id = next(ids)
        step = child.step(bare)
        below = _frozen_nodes(child, ids, words, varied or step.varies)
        carried = words if varied and child.members.bit_count() > 1 else 0
        feeds = tuple(replace(feed, id=next(ids), members=tuple(mine)) for feed, mine in child.feeds.items())
        nodes.append(Node(child.id, step, below, tuple(child.emits), child.members, carried, feeds))
    return tuple(nodes)


def _emit(name: str, graph: JoinGraph, joined: Joined, base: Layout) -> Emit:
    columns = emitted(graph)
    there = {i.relation: set(i.travelling) for i in base.inputs}
    assert all(ref.column in there[graph.alias(ref.alias).relation] for ref in columns), "the layout lacks a column"
    made = [o.source or o.expr for o in graph.outputs] if graph.computes_outputs else []
    return Emit(
        name,
        tuple(joined.column(ref) for ref in columns),
        tuple(joined.moved(expr) for expr in made if expr is not None),
    )


def _query_plan(
    name: str,
    graph: JoinGraph,
    orders: Orders,
    paths: Mapping[str, list[_Branch]],
    base: Allocation,
    filters: Mapping[tuple[str, str], tuple[int, ...]],
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
        filters=tuple((a.name, filters[name, a.name]) for a in graph.aliases),
        marks=base.marks[name],
    )


def _names(graph: JoinGraph, columns: tuple[tuple[str, str], ...]) -> dict[ColumnRef, str]:
    return {ref: name for ref, (name, _) in zip(emitted(graph), columns, strict=True)}


def _new_filter(base: Allocation, name: str, alias: Alias) -> int | None:
    wanted = base.filters[name, alias.name]
    return None if base.layout.input_by_relation[alias.relation].implied(wanted) else wanted


def _filters_of_groups(
    base: Allocation, graphs: Mapping[str, JoinGraph], groups: Mapping[str, Group]
) -> dict[tuple[str, str], tuple[int, ...]]:
    """By query and alias: rows that some query of its structure can use pass one of these; none where all do."""
    found: dict[tuple[str, str], tuple[int, ...]] = {}
    for lead, group in groups.items():
        for alias in graphs[lead].aliases:
            places = [(query, called[alias.name]) for query, called in group.members.items()]
            asked = {_new_filter(base, query, graphs[query].alias(name)) for query, name in places}
            together = () if None in asked else tuple(sorted(f for f in asked if f is not None))
            found.update(dict.fromkeys(places, together))
    return found


def _samples(
    base: Allocation,
    leads: Mapping[str, JoinGraph],
    ranks: tuple[str, ...],
    filters: Mapping[tuple[str, str], tuple[int, ...]],
    groups: Mapping[str, Group],
) -> tuple[SampleWish, ...]:
    """For every input and key: the stores of all aliases that can be looked up by it directly."""
    sets = _set_wishes(base, leads, ranks, groups)
    found: dict[tuple[int, tuple[int, ...], str], dict[tuple[str, tuple[int, ...], bool], None]] = {}
    for name, graph in leads.items():
        at = Place(base, name, graph, ranks)
        for alias in graph.aliases:
            for attributes in graph.keys_of(alias.name):
                own = at.store(alias.name, attributes)
                edge = base.layout.edge_by_store[own.id].id, filters[name, alias.name], own.id
                for other in graph.aliases:
                    if other.name != alias.name and attributes in graph.keys_of(other.name):
                        sees = rank(graph, ranks, other.name) < rank(graph, ranks, alias.name)
                        store = at.store(other.name, attributes)
                        found.setdefault(edge, {})[store.id, filters[name, other.name], sees] = None
    return tuple(SampleWish(*edge, tuple(stores), tuple(sets.get(edge[0], ()))) for edge, stores in found.items())


def _set_wishes(
    base: Allocation, leads: Mapping[str, JoinGraph], ranks: tuple[str, ...], groups: Mapping[str, Group]
) -> dict[int, dict[tuple[str, bool], None]]:
    """By edge the stores in which query sets are sampled: where several queries have one structure, those of all."""
    found: dict[int, dict[tuple[str, bool], None]] = {}
    for alike in alike_groups({lead: groups[lead] for lead in leads}, leads):
        if sum(len(groups[lead].members) for lead, _ in alike) < 2:
            continue
        places = [(Place(base, lead, leads[lead], ranks), aliases) for lead, aliases in alike]
        for at, mine in places:
            for i, alias in enumerate(mine):
                for attributes in at.graph.keys_of(alias):
                    edge = base.layout.edge_by_store[at.store(alias, attributes).id].id
                    for j, other in enumerate(mine):
                        if i == j or attributes not in at.graph.keys_of(other):
                            continue
                        sees = rank(at.graph, ranks, other) < rank(at.graph, ranks, alias)
                        theirs = key_of(at.graph, other, attributes).columns
                        stores = [base.stores.get((to.name, aliases[j], theirs)) for to, aliases in places]
                        found.setdefault(edge, {}).update(
                            {(store, sees): None for store in stores if store is not None}
                        )
    return found
