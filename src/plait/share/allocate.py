"""Which stores the queries need, given those that are there: one layout from another.

Contract.  `allocate` is a pure function of the layout before, the queries that are wanted, the streams, and what is
known of the rows at rest.  What is there stays and keeps its ids; what is wanted is added; what nobody refers to any
more is dropped; what has to be filled from another store is named as a build.  Probe orders and ranks play no part:
they change between two epochs while the sources go on cutting the same buckets.  The parts: `filters` and `needs` of
the joins, their `coverage` by stores, and `lay_out`.

Invariant.  A query that is admitted has, per alias, a *floor*: the epoch of birth from which on every row that the
alias can use is in every store that any of its probe orders may look into.  A store that it uses says so by its *eras*;
so plans may change, and never change an answer.  A store holds every column that any order may need.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from plait.query.graph import JoinGraph
from plait.query.layout import Layout, StoreHistory
from plait.query.relation import Relation
from plait.share.coverage import Stores
from plait.share.filters import filter_of, filters_of, marks_of
from plait.share.lay_out import lay_out
from plait.share.mirs import Joins, Keep, with_mirs
from plait.share.needs import Need, needs_of
from plait.share.retention import with_ttls


@dataclass(frozen=True)
class Wanted:
    """A join of a query, as allocation sees it."""

    graph: JoinGraph
    query: str
    """The query that it is a part of."""
    floors: Mapping[str, int] | None = None
    """Per alias, once it is admitted; None for a new one."""
    since: str = "now"
    one_floor: bool = False
    """Whether all aliases of the query must see the same past."""
    live: bool = False
    """Whether it is being run: it cannot wait for a store to be built."""
    stores: frozenset[str] = frozenset()
    """Those that it has used since its admission: what they have let expire it could not reach any more."""
    by_alias: Mapping[str, frozenset[str]] | None = None
    """The same, alias by alias: another alias may have used a store of the same stream that has other rows."""
    owner: str = ""
    """The group whose stores it uses, or goes over to once they are filled; empty: those of all."""


@dataclass(frozen=True)
class Allocation:
    """A layout, and what it means for each join."""

    layout: Layout
    floors: Mapping[str, Mapping[str, int]]
    """By join and alias."""
    stores: Mapping[tuple[str, str, tuple[str, ...]], str]
    """By join, alias and key columns: the store to look into."""
    filters: Mapping[tuple[str, str], int]
    """By join and alias: what rows have to pass."""
    marks: Mapping[str, tuple[str, ...]]
    """By join: what its watermark is made of."""
    waiting: frozenset[str] = frozenset()
    """Joins that wait for a build."""
    owners: Mapping[str, str] = field(default_factory=dict)
    """By join the group that it shares trees with, or its query, where no query shares anything with another; joins
    that share with all others are left out."""
    prepared: Mapping[tuple[str, str], tuple[str, ...]] = field(default_factory=dict)
    """By join and alias, stores that it goes over to once they are filled."""


def allocate(
    before: Layout,
    wanted: Mapping[str, Wanted],
    relations: Mapping[str, Relation],
    *,
    epoch: int = 0,
    version: int = 0,
    history: Mapping[str, StoreHistory] | None = None,
    tables: frozenset[str] = frozenset(),
    keeps: Sequence[Keep] = (),
    apart: bool = False,
) -> Allocation:
    """The layout from epoch `epoch` on; inputs are in the order of registration.

    `keeps` are the intermediate results that it is to have, for those of their uses that do not wait for a build.
    With `apart`, every query has stores of its own (`sharing="independent"`); those that live keep what they have.
    """
    graphs = {name: w.graph for name, w in wanted.items()}
    owners = {name: owner for name, w in wanted.items() if (owner := w.query if apart else w.owner)}
    relations = with_ttls(graphs, relations)
    begun = {
        name: max((floor for a, floor in w.floors.items() if w.graph.alias(a).relation not in tables), default=0)
        if w.floors is not None
        else epoch
        for name, w in wanted.items()
        if w.since == "new"
    }
    marks, every_mark = marks_of(graphs, relations, begun)
    filters, next_filter = filters_of(before, graphs, relations, marks)
    found = Stores(before, epoch, version, history or {}, tables, relations)
    found.relation_of = {(name, a.name): a.relation for name, g in graphs.items() for a in g.aliases}
    by_alias = {
        (name, a.name): filter_of(filters[a.relation], a, relations[a.relation], marks[name]).id
        for name, graph in graphs.items()
        for a in graph.aliases
    }
    needs = {
        name: needs_of(
            name, w.graph, relations, filters, marks[name], live=w.live, mine=w.stores, owner=owners.get(name, "")
        )
        for name, w in wanted.items()
    }
    needs = {
        name: [replace(need, mine=of.get(need.alias, frozenset())) for need in mine]
        if (of := wanted[name].by_alias) is not None
        else mine
        for name, mine in needs.items()
    }
    if not apart:
        # A table is there once, for all groups.
        of_tables = {(name, a.name) for name, g in graphs.items() for a in g.aliases if a.relation in tables}
        needs = {
            name: [replace(need, owner="") if (name, need.alias) in of_tables else need for need in mine]
            for name, mine in needs.items()
        }
    floors = _floors(found, wanted, needs)
    stores: dict[tuple[str, str, tuple[str, ...]], str] = {}
    # Who lives does not wait for a build, nor who has no past: rows that come meanwhile would be lost to a query that
    # reads a stream by itself.
    past = {
        w.query
        for name, w in wanted.items()
        if any(floors[name][a.name] < epoch for a in w.graph.aliases if a.relation not in tables)
    }
    for name, mine in needs.items():
        waits = wanted[name].query in past and not wanted[name].live
        for alias, floor in floors[name].items():
            asked = [need for need in mine if need.alias == alias]
            for need, store in zip(asked, found.use(asked, floor, waits), strict=True):
                stores[name, alias, need.key.columns] = store
    prepared = {
        (name, alias): stores_to_come
        for name, mine in needs.items()
        if wanted[name].live and not apart
        for alias, floor in floors[name].items()
        if (stores_to_come := tuple(found.prepare([need for need in mine if need.alias == alias], floor)))
    }
    for relation in relations.values():
        if relation.keep == "all" and relation.name not in tables:
            found.raw(relation, filters[relation.name])
    layout = lay_out(found, graphs, relations, filters, every_mark, next_filter)
    building = {build.store for build in layout.builds}
    late = {wanted[join].query for (join, _, _), store in stores.items() if store in building}
    waiting = frozenset(name for name, w in wanted.items() if w.query in late)
    joins = Joins(graphs, relations, floors, by_alias, marks, epoch)
    return Allocation(
        layout=with_mirs(layout, before, [used for keep in keeps if (used := keep.without(waiting)).uses], joins),
        floors=floors,
        stores=stores,
        filters=by_alias,
        marks=marks,
        waiting=waiting,
        owners=owners,
        prepared=prepared,
    )


def _floors(found: Stores, wanted: Mapping[str, Wanted], needs: Mapping[str, list[Need]]) -> dict[str, dict[str, int]]:
    """By join and alias; those of joins that are admitted already stay what they are."""
    floors: dict[str, dict[str, int]] = {}
    for name, w in wanted.items():
        if w.floors is not None:
            floors[name] = dict(w.floors)
            continue
        mine = {a.name: 0 if a.relation in found.tables else found.epoch for a in w.graph.aliases}
        if w.since != "new":
            for alias in w.graph.aliases:
                asked = [need for need in needs[name] if need.alias == alias.name]
                if alias.relation not in found.tables and asked:
                    mine[alias.name] = found.floor(asked, alias.relation, 0)
        floors[name] = mine
    for query in {w.query for w in wanted.values() if w.one_floor and w.floors is None}:
        joins = [name for name, w in wanted.items() if w.query == query]
        aliases = [(n, a) for n in joins for a in wanted[n].graph.aliases if a.relation not in found.tables]
        highest = -1
        while highest < (now := max((floors[n][a.name] for n, a in aliases), default=-1)):
            highest = now
            for n, a in aliases:
                asked = [need for need in needs[n] if need.alias == a.name]
                floors[n][a.name] = found.floor(asked, a.relation, highest) if asked else highest
    return floors
