"""Which stores the queries need, given those that are there: one layout from another.

Contract.  `allocate` is a pure function of the layout before, the queries that are wanted, the streams, and what is
known of the rows at rest.  What is there stays and keeps its ids; what is wanted is added; what nobody refers to any
more is dropped; what has to be filled from another store is named as a build.  Probe orders and ranks play no part:
they change between two epochs while the sources go on cutting the same buckets.

Invariant.  A query that is admitted has, per alias, a *floor*: the epoch of birth from which on every row that the
alias can use is in every store that any of its probe orders may look into.  A store that it uses says so by its *eras*;
so plans may change, and never change an answer.  A store holds every column that any order may need.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import count

from plait.query.expr import ColumnRef, columns_of
from plait.query.graph import Alias, JoinGraph
from plait.query.layout import Build, Layout, StoreHistory
from plait.query.plan import (
    NO_KEY,
    Era,
    Filter,
    IngestEdge,
    Input,
    Key,
    Mark,
    Reach,
    Store,
    key_of,
    store_id,
)
from plait.query.relation import ColumnDef, Relation
from plait.share.retention import keep_us, with_ttls

MOST_ERAS = 16
"""Eras that a store remembers; what is older may serve new queries less than it could."""

RAW = Reach((), None)
"""Rows of a stream that is kept whole are needed by nobody in particular."""


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


@dataclass(frozen=True)
class _Need:
    """What an alias needs of a store by one key."""

    join: str
    alias: str
    key: Key
    columns: frozenset[str]
    required: frozenset[str]
    filter: Filter
    reach: Reach
    live: bool = False
    mine: frozenset[str] = frozenset()


@dataclass
class _Draft:
    """A store while it is being allocated."""

    id: str
    relation: str
    key: Key
    before: Store | None
    source: Store | None = None
    """The store that it is to be filled from."""
    needs: list[_Need] = field(default_factory=list)
    floors: set[int] = field(default_factory=set)


def allocate(
    before: Layout,
    wanted: Mapping[str, Wanted],
    relations: Mapping[str, Relation],
    *,
    epoch: int = 0,
    version: int = 0,
    history: Mapping[str, StoreHistory] | None = None,
    tables: frozenset[str] = frozenset(),
) -> Allocation:
    """The layout from epoch `epoch` on; inputs are in the order of registration."""
    graphs = {name: w.graph for name, w in wanted.items()}
    relations = with_ttls(graphs, relations)
    marks, every_mark = _marks(graphs, relations)
    filters, next_filter = _filters(before, graphs, relations, marks)
    found = _Stores(before, epoch, version, history or {}, tables, relations)
    found.relation_of = {(name, a.name): a.relation for name, g in graphs.items() for a in g.aliases}
    by_alias = {
        (name, a.name): _filter_of(filters[a.relation], a, relations[a.relation], marks[name]).id
        for name, graph in graphs.items()
        for a in graph.aliases
    }
    needs = {name: _needs(name, w, relations, filters, marks[name]) for name, w in wanted.items()}
    floors = _floors(found, wanted, needs)
    stores = {
        (need.join, need.alias, need.key.columns): found.use(need, floors[name][need.alias])
        for name, mine in needs.items()
        for need in mine
    }
    for relation in relations.values():
        if relation.keep == "all" and relation.name not in tables:
            found.raw(relation, filters[relation.name])
    return _laid_out(
        found, before, wanted, relations, filters, every_mark, next_filter, floors, stores, by_alias, marks
    )


def emitted(graph: JoinGraph) -> tuple[ColumnRef, ...]:
    """What is read of joined rows: the outputs themselves, or all that tasks or Spark compute them from."""
    if not graph.needs_spark_after and not graph.computes_outputs:
        return tuple(o.source for o in graph.outputs if o.source is not None)
    late = [ref for c in graph.conditions if c.expr is None for ref in c.refs]
    return tuple(dict.fromkeys([ref for o in graph.outputs for ref in o.refs] + late))


def needed_columns(graph: JoinGraph) -> frozenset[ColumnRef]:
    """The columns that some probe order reads after the source has hashed its keys."""
    found = set(emitted(graph))
    found |= {ref for c in graph.conditions if c.expr is not None for ref in columns_of(c.expr)}
    found |= {ref for w in graph.windows for ref in (w.left, w.right)}
    for attribute in _compared(graph):
        found |= set(_carriers(graph, attribute))
    # With several keys tuples leave one for another, or close a cycle: all but leaves may be asked for theirs again.
    if len({key for a in graph.aliases for key in graph.keys_of(a.name)}) > 1:
        for alias in graph.aliases:
            if not _is_leaf(graph, alias.name):
                keys = {attribute for key in graph.keys_of(alias.name) for attribute in key}
                found |= {ref for t in keys if (ref := graph.column_of(alias.name, t)) is not None}
    return frozenset(found)


def _carriers(graph: JoinGraph, attribute: int) -> list[ColumnRef]:
    found = [graph.column_of(alias.name, attribute) for alias in graph.aliases]
    return [ref for ref in found if ref is not None]


def _compared(graph: JoinGraph) -> set[int]:
    """Attributes of keys whose hash does not decide: they are compared after every lookup."""
    keys = {(a.name, key) for a in graph.aliases for key in graph.keys_of(a.name)}
    return {attribute for alias, key in keys if not key_of(graph, alias, key).exact for attribute in key}


def _is_leaf(graph: JoinGraph, alias: str) -> bool:
    """Whether an alias meets one other only: then its key is never looked up again after it has joined."""
    keys = graph.keys_of(alias)
    return len(keys) == 1 and all(len(_carriers(graph, attribute)) == 2 for attribute in keys[0])


# ---------------------------------------------------------------- filters and marks


def _marks(
    graphs: Mapping[str, JoinGraph], relations: Mapping[str, Relation]
) -> tuple[dict[str, tuple[str, ...]], dict[str, dict[str, Mark]]]:
    """By join the marks of its watermark, and all marks by relation.

    A watermark depends on the rows that a query can use, and on no others: a neighbour with another filter sees
    other rows, and must not make any late.
    """
    of: dict[str, tuple[str, ...]] = {}
    every: dict[str, dict[str, Mark]] = {}
    for name, graph in graphs.items():
        keys = []
        for relation in dict.fromkeys(a.relation for a in graph.aliases):
            if relations[relation].delay_ms is None:
                continue
            mine = [a for a in graph.aliases if a.relation == relation]
            texts = tuple(sorted({a.filter for a in mine}, key=lambda text: (text is not None, text or "")))
            if None in texts:
                texts = (None,)
            required = tuple(sorted(frozenset.intersection(*(graph.required(a.name) for a in mine))))
            digest = hashlib.sha256(json.dumps([texts, required]).encode()).hexdigest()[:8]
            mark = Mark(f"{relation}:{digest}", texts, required)
            every.setdefault(relation, {})[mark.key] = mark
            keys.append(mark.key)
        of[name] = tuple(sorted(keys))
    return of, every


def _filters(
    before: Layout,
    graphs: Mapping[str, JoinGraph],
    relations: Mapping[str, Relation],
    marks: Mapping[str, tuple[str, ...]],
) -> tuple[dict[str, tuple[Filter, ...]], int]:
    """By relation the filters in use, those that are there first, with their ids; and the next id to be given."""
    number = count(before.next_filter)
    asked: dict[str, dict[tuple[str | None, tuple[str, ...]], Alias | None]] = {name: {} for name in relations}
    for name, graph in graphs.items():
        for alias in graph.aliases:
            relation = relations[alias.relation]
            asked[alias.relation].setdefault(_filter_key(alias, relation, marks[name]), alias)
    for relation in relations.values():
        if relation.keep == "all":
            asked[relation.name].setdefault((None, ()), None)
    found: dict[str, tuple[Filter, ...]] = {}
    last = before.next_filter
    for name, wanted in asked.items():
        old = before.input_by_relation[name].filters if name in before.input_by_relation else ()
        kept = [f for f in old if (f.text, f.marks) in wanted]
        known = {(f.text, f.marks) for f in kept}
        new = []
        for (text, over), asking in wanted.items():
            if (text, over) not in known:
                # First one that nothing is late for: it has the most rows.
                like = tuple(f.id for f in sorted(old, key=lambda f: len(f.marks)) if f.text == text)
                expr = None if asking is None else asking.condition
                new.append(Filter(next(number), text, over, expr, like))
                last = new[-1].id + 1
        found[name] = (*kept, *new)
    return found, last


def _filter_key(alias: Alias, relation: Relation, marks: tuple[str, ...]) -> tuple[str | None, tuple[str, ...]]:
    return alias.filter, marks if relation.time_column is not None else ()


def _filter_of(filters: Iterable[Filter], alias: Alias, relation: Relation, marks: tuple[str, ...]) -> Filter:
    text, over = _filter_key(alias, relation, marks)
    return next(f for f in filters if (f.text, f.marks) == (text, over))


def _needs(
    name: str,
    of: Wanted,
    relations: Mapping[str, Relation],
    filters: Mapping[str, tuple[Filter, ...]],
    marks: tuple[str, ...],
) -> list[_Need]:
    """What the aliases of a join need, key by key."""
    graph = of.graph
    columns: dict[str, set[str]] = {a.name: set() for a in graph.aliases}
    for ref in needed_columns(graph):
        columns[ref.alias].add(ref.column)
    kept = keep_us(graph, relations) if len(graph.aliases) > 1 else {}
    found = []
    for alias in graph.aliases:
        relation = relations[alias.relation]
        reach = Reach(marks, kept.get(alias.name))
        if reach.keep_us is not None and relation.time_column is not None:
            columns[alias.name].add(relation.time_column)
        for attributes in graph.keys_of(alias.name):
            found.append(
                _Need(
                    join=name,
                    alias=alias.name,
                    key=key_of(graph, alias.name, attributes),
                    columns=frozenset(columns[alias.name]),
                    required=graph.required(alias.name),
                    filter=_filter_of(filters[alias.relation], alias, relation, marks),
                    reach=reach,
                    live=of.live,
                    mine=of.stores,
                )
            )
    return found


# ---------------------------------------------------------------- floors and stores


def _floors(
    found: _Stores, wanted: Mapping[str, Wanted], needs: Mapping[str, list[_Need]]
) -> dict[str, dict[str, int]]:
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


@dataclass
class _Stores:
    """The stores that are there, and those that are added to them."""

    before: Layout
    epoch: int
    version: int
    history: Mapping[str, StoreHistory]
    tables: frozenset[str]
    relations: Mapping[str, Relation]
    drafts: dict[str, _Draft] = field(default_factory=dict)
    relation_of: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """By join and alias."""

    def floor(self, needs: Iterable[_Need], relation: str, least: int) -> int:
        """The lowest floor from `least` on that an alias can have, by all its keys.

        Each key has a store that is there, or one that can be built from it.
        """
        mine = [s for s in self.before.stores if s.relation == relation]
        floor, before = least, -1
        while floor != before:
            before = floor
            for need in needs:
                here = [self.usable(store, need, floor) for store in mine if store.key == need.key]
                built = [self.usable(store, need, floor, need.key) for store in mine if not self._is_building(store)]
                floor = min([*here, *built], default=self.epoch)
        return floor

    def usable(self, store: Store, need: _Need, floor: int, key: Key | None = None) -> int:
        """The lowest floor from `floor` on that a store can serve: it has the rows, and can tell their births apart."""
        floor = max(floor, self.covered(store, need, key))
        for first, last in sorted(self.history.get(store.id, StoreHistory()).spans):
            if first < floor <= last:
                floor = last + 1
        return min(floor, self.epoch)

    def covered(self, store: Store, need: _Need, key: Key | None = None) -> int:
        """The epoch of birth from which on a store has all rows that a need is about.

        With a `key`, whether another store could be filled from it.
        """
        columns = need.columns | (frozenset(key.columns) if key is not None else frozenset())
        floor = self.epoch
        own = frozenset(store.key.columns) if key is not None else frozenset()
        for era in reversed(store.eras):
            if not (
                columns <= set(era.columns)
                and (frozenset(era.required) | own) <= need.required
                and self.admits(store.relation, era, need.filter)
            ):
                break
            floor = era.since
        floor = max(floor, store.lowest)
        past = self.history.get(store.id, StoreHistory())
        ends = [*(era.since for era in store.eras[1:]), self.epoch + 1]
        newer = [era for era, end in zip(store.eras, ends, strict=True) if end > floor]
        kept = store.id in need.mine or all(_outlives(era.reach, need.reach) for era in newer)
        if floor < self.epoch and not kept:
            floor = max(floor, past.let_go + 1)
        return min(floor, self.epoch)

    def admits(self, relation: str, era: Era, wanted: Filter) -> bool:
        """Whether all rows that pass a filter are in an era, and can be told from the others."""
        texts = {f.id: f.text for f in self.before.input_by_relation[relation].filters}
        there = {texts[f] for f in era.filters if f in texts}
        if wanted.text in there:
            return True
        known = wanted.expr is not None and {ref.column for ref in columns_of(wanted.expr)} <= set(era.columns)
        return None in there and known

    def _is_building(self, store: Store) -> bool:
        return any(build.store == store.id for build in self.before.builds)

    def use(self, need: _Need, floor: int) -> str:
        """The store in which an alias with this floor is looked up: one that is there, or a new one."""
        relation = self.relation_of[need.join, need.alias]
        there = [s for s in self.before.stores if s.relation == relation and s.key == need.key]
        # The newest that is complete, so that older ones fall out of use; of a table the one whose rows were seen.
        table = relation in self.tables
        there.sort(key=lambda s: (table and s.id in need.mine, s.since), reverse=True)
        fit = [s for s in there if self._fits(s, need, floor) and not (need.live and self._is_building(s))]
        if fit:
            draft = self.drafts.setdefault(fit[0].id, _Draft(fit[0].id, relation, need.key, fit[0]))
        else:
            draft = self._new(need, relation, floor)
        draft.needs.append(need)
        draft.floors.add(floor)
        return draft.id

    def _fits(self, store: Store, need: _Need, floor: int) -> bool:
        if store.relation in self.tables:
            return self.covered(store, need) <= store.since
        # It has been kept complete for those who use it since their admission.
        return store.id in need.mine or self.usable(store, need, floor) <= floor

    def _new(self, need: _Need, relation: str, floor: int) -> _Draft:
        name = store_id(relation, need.key)
        new = name if not self.version else f"{name}@{self.version}"
        if new in self.drafts:
            return self.drafts[new]
        sources = [s for s in self.before.stores if s.relation == relation and not self._is_building(s)]
        fit = [s for s in sources if self.usable(s, need, floor, need.key) <= floor]
        source = min(fit, key=lambda s: (len(s.columns), s.id), default=None) if floor < self.epoch else None
        assert source is not None or floor >= self.epoch or relation in self.tables, (
            f"{name} has no past from {floor} on"
        )
        return self.drafts.setdefault(new, _Draft(new, relation, need.key, None, source))

    def raw(self, relation: Relation, filters: tuple[Filter, ...]) -> None:
        """The store of all rows of a stream, as they are."""
        everything = frozenset(name for name, _ in relation.columns)
        whole = next(f for f in filters if (f.text, f.marks) == (None, ()))
        need = _Need("", "", NO_KEY, everything, frozenset(), whole, RAW)
        there = [s for s in self.before.stores if s.relation == relation.name and s.key == NO_KEY]
        name = store_id(relation.name, NO_KEY)
        new = name if not self.version else f"{name}@{self.version}"
        found = there[-1] if there else None
        draft = self.drafts.setdefault(found.id if found else new, _Draft(new, relation.name, NO_KEY, found))
        draft.id = found.id if found else new
        draft.needs.append(need)


def _outlives(kept: Iterable[Reach], needed: Reach) -> bool:
    """Whether rows were kept at least as long as a query would have kept them."""
    known = {reach.marks: reach.keep_us for reach in kept}
    if None in known.values() or not known:
        return True
    mine = known.get(needed.marks)
    return mine is not None and needed.keep_us is not None and mine >= needed.keep_us


# ---------------------------------------------------------------- the layout itself


def _laid_out(
    found: _Stores,
    before: Layout,
    wanted: Mapping[str, Wanted],
    relations: Mapping[str, Relation],
    filters: Mapping[str, tuple[Filter, ...]],
    marks: Mapping[str, dict[str, Mark]],
    next_filter: int,
    floors: Mapping[str, Mapping[str, int]],
    stores: Mapping[tuple[str, str, tuple[str, ...]], str],
    by_alias: Mapping[tuple[str, str], int],
    of: Mapping[str, tuple[str, ...]],
) -> Allocation:
    graphs = {name: w.graph for name, w in wanted.items()}
    columns = _physical_columns(graphs)
    required = _required(graphs, relations)
    needed: dict[str, set[str]] = {}
    for draft in found.drafts.values():
        if draft.key != NO_KEY:
            needed.setdefault(draft.relation, set()).update(*(need.columns for need in draft.needs))
    for w in wanted.values():
        for ref in needed_columns(w.graph):
            needed.setdefault(w.graph.alias(ref.alias).relation, set()).add(ref.column)
    builds = _builds(found, before)
    for build in builds:
        # The source must go on telling apart what is copied from what arrives in both.
        source = found.drafts.get(build.source)
        if source is None:
            old = before.store_by_id[build.source]
            source = found.drafts.setdefault(old.id, _Draft(old.id, old.relation, old.key, old))
        source.floors |= {build.before, *found.drafts[build.store].floors}
    made = {
        draft.id: _store(draft, found, relations[draft.relation], columns, needed, filters, required, builds)
        for draft in found.drafts.values()
    }
    ordered = tuple(sorted(made.values(), key=lambda s: (s.relation, s.id)))
    scanned = {g.aliases[0].relation for g in graphs.values() if len(g.aliases) == 1}
    edges = count(before.next_edge)
    inputs = tuple(
        _input(
            relation,
            ordered,
            scanned,
            columns,
            needed,
            filters,
            required,
            marks,
            before,
            edges,
            relation.name in found.tables,
        )
        for relation in relations.values()
    )
    layout = Layout(
        inputs=inputs,
        stores=ordered,
        builds=builds,
        next_edge=next(edges),
        next_filter=next_filter,
        tables=found.tables & frozenset(relations),
    )
    building = {build.store for build in builds}
    waiting = frozenset(join for (join, _, _), store in stores.items() if store in building)
    late = {name: frozenset(w.query for n, w in wanted.items() if n in waiting) for name, w in wanted.items()}
    return Allocation(
        layout=layout,
        floors=floors,
        stores=stores,
        filters=by_alias,
        marks=of,
        waiting=frozenset(name for name, w in wanted.items() if w.query in late[name]),
    )


def _builds(found: _Stores, before: Layout) -> tuple[Build, ...]:
    # A build whose users need nothing of the past any more is given up.
    going = [b for b in before.builds if b.store in found.drafts and min(found.drafts[b.store].floors) < b.before]
    new = [Build(d.id, d.source.id, found.epoch) for d in found.drafts.values() if d.source is not None]
    return (*going, *new)


def _required(graphs: Mapping[str, JoinGraph], relations: Mapping[str, Relation]) -> dict[str, tuple[str, ...]]:
    """Per relation, the columns that no alias can use a NULL of."""
    found: dict[str, frozenset[str]] = {}
    for graph in graphs.values():
        for alias in graph.aliases:
            needs = graph.required(alias.name)
            found[alias.relation] = found.get(alias.relation, needs) & needs
    return {r: () if relations[r].keep == "all" else tuple(sorted(columns)) for r, columns in found.items()}


def _physical_columns(graphs: Mapping[str, JoinGraph]) -> dict[str, dict[str, ColumnDef]]:
    found: dict[str, dict[str, ColumnDef]] = {}
    for graph in graphs.values():
        for alias in graph.aliases:
            found.setdefault(alias.relation, {}).update({c.name: c for c in alias.columns})
    return found


def _store(
    draft: _Draft,
    found: _Stores,
    relation: Relation,
    columns: Mapping[str, Mapping[str, ColumnDef]],
    needed: Mapping[str, set[str]],
    filters: Mapping[str, tuple[Filter, ...]],
    required: Mapping[str, tuple[str, ...]],
    builds: Iterable[Build],
) -> Store:
    if draft.key == NO_KEY:
        names = {name for name, _ in relation.columns}
    elif draft.needs:
        names = set(needed[relation.name])
    else:
        # Only the source of a build: it stays what it is until that is done.
        assert draft.before is not None
        names = {column.name for column in draft.before.columns}
    before = draft.before
    # What is being copied must not expire before those who wait for it could let it go.
    copies = [found.drafts[build.store] for build in builds if build.source == draft.id]
    mine = [need.reach for user in (draft, *copies) for need in user.needs]
    reach = _reaches([*mine, *(() if draft.needs or before is None else before.reach)])
    kept = None if any(r.keep_us is None for r in reach) else max(r.keep_us for r in reach if r.keep_us is not None)
    # Segments of rows that are kept for ever know their event times too: a window leaves the others out.
    time = relation.time_column if relation.time_column in names else None
    era = Era(
        since=found.epoch,
        columns=tuple(sorted(names)),
        filters=tuple(f.id for f in filters[relation.name]),
        required=required.get(relation.name, ()),
        reach=reach,
    )
    source = draft.source or before
    past = source.eras if source is not None else ()
    # New filters that can be told from what rows of an era have are filters of that era.
    told = [tuple(f.id for f in filters[relation.name] if found.admits(relation.name, era, f)) for era in past]
    past = tuple(replace(era, filters=ids) for era, ids in zip(past, told, strict=True))
    own = frozenset(source.key.columns) if draft.source is not None and source is not None else frozenset()
    known = columns.get(relation.name, {})
    first = found.epoch if source is None else source.first
    return Store(
        id=draft.id,
        relation=relation.name,
        key=draft.key,
        columns=tuple(_column(relation, known, before, name) for name in sorted(names)),
        masked=len(filters[relation.name]) > 1,
        time_column=time,
        keep_us=kept,
        ttl_us=relation.ttl_us if before is None or before.ttl_us is None else before.ttl_us,
        reach=reach,
        since=found.epoch if before is None else before.since,
        eras=_with_era(past, era, own, {f.id for f in filters[relation.name]}),
        floors=_told_apart(draft.floors, first),
        lowest=_lowest(draft, builds),
        first=first,
        mixed=source is not None and (source.mixed or _filter_ids(found.before, relation.name) != set(era.filters)),
    )


def _filter_ids(layout: Layout, relation: str) -> set[int]:
    return {f.id for f in layout.input_by_relation[relation].filters}


def _lowest(draft: _Draft, builds: Iterable[Build]) -> int:
    """The lowest floor of those who use a store; a store that is kept whole, or copied, loses nothing."""
    before = 0 if draft.before is None else draft.before.lowest
    if draft.key == NO_KEY or any(build.source == draft.id for build in builds) or not draft.needs:
        return before
    return max(before, min(draft.floors))


def _told_apart(floors: set[int], first: int) -> tuple[int, ...]:
    """The floors that lie behind the store's first row."""
    return tuple(sorted(f for f in floors if f > first))


def _with_era(past: Iterable[Era], new: Era, own: frozenset[str], filters: set[int]) -> tuple[Era, ...]:
    """The eras of a store: of old ones, what is still there of it."""
    found: list[Era] = []
    for era in past:
        kept = replace(
            era,
            columns=tuple(c for c in era.columns if c in new.columns),
            filters=tuple(f for f in era.filters if f in filters),
            required=tuple(sorted(frozenset(era.required) | own)),
        )
        if era.since < new.since:
            found.append(kept)
    found.append(new)
    merged = [era for i, era in enumerate(found) if not i or replace(era, since=0) != replace(found[i - 1], since=0)]
    return tuple(merged[-MOST_ERAS:])


def _reaches(reaches: Iterable[Reach]) -> tuple[Reach, ...]:
    """One per watermark, the longest."""
    found: dict[tuple[str, ...], int | None] = {}
    for reach in reaches:
        known = found.get(reach.marks, reach.keep_us)
        found[reach.marks] = None if known is None or reach.keep_us is None else max(known, reach.keep_us)
    return tuple(Reach(marks, kept) for marks, kept in sorted(found.items()))


def _column(relation: Relation, columns: Mapping[str, ColumnDef], before: Store | None, name: str) -> ColumnDef:
    if name in columns:
        return columns[name]
    old = None if before is None else next((c for c in before.columns if c.name == name), None)
    return old or ColumnDef(name, "`" + name.replace("`", "``") + "`", relation.type_of(name))


def _input(
    relation: Relation,
    stores: tuple[Store, ...],
    scanned: set[str],
    columns: Mapping[str, Mapping[str, ColumnDef]],
    needed: Mapping[str, set[str]],
    filters: Mapping[str, tuple[Filter, ...]],
    required: Mapping[str, tuple[str, ...]],
    marks: Mapping[str, dict[str, Mark]],
    before: Layout,
    edges: Iterable[int],
    is_table: bool,
) -> Input:
    """One ingest edge per store: a driver's first probe is by a key it is stored by.

    One more, without key, where a query reads the relation by itself: rows without a key are part of its answer.
    """
    number = iter(edges)
    mine = [s for s in stores if s.relation == relation.name]
    old = before.input_by_relation[relation.name].edges if relation.name in before.input_by_relation else ()
    known = {edge.store: edge.id for edge in old}
    made = [IngestEdge(known[s.id] if s.id in known else next(number), s.key, s.id, s.ttl_us) for s in mine]
    if relation.name in scanned:
        made.append(IngestEdge(known[None] if None in known else next(number), NO_KEY, None))
    travelling = sorted({c.name for s in mine for c in s.columns} | needed.get(relation.name, set()))
    selected = set(travelling) | {c for store in mine for c in store.key.columns}
    if relation.time_column is not None and made:
        selected.add(relation.time_column)
    # What is missing in these is counted, so they are looked at where rows are counted.
    selected |= set(required.get(relation.name, ()))
    selected |= {column for mark in marks.get(relation.name, {}).values() for column in mark.required}
    defs = columns.get(relation.name, {})
    kept = {c.name: c for s in mine for c in s.columns}
    return Input(
        relation=relation.name,
        columns=tuple(kept[c] if c in kept else _column(relation, defs, None, c) for c in sorted(selected)),
        travelling=tuple(travelling),
        filters=filters[relation.name],
        required=required.get(relation.name, ()),
        time_column=relation.time_column,
        delay_ms=relation.delay_ms,
        ttl_us=relation.ttl_us,
        edges=tuple(made),
        needed=relation.needed,
        marks=tuple(marks.get(relation.name, {}).values()),
        corrupt=relation.corrupt if made else None,
        table=is_table,
    )
