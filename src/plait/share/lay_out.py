"""The layout that stores, filters and marks amount to: stores with their eras, builds, and one input per relation.

Contract.  A pure function of what was chosen (`coverage.Stores`) and of the joins.  A store remembers, era by era,
which columns, filters and required columns its rows have: that is what later allocations judge its coverage by.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import count

from plait.query.graph import JoinGraph
from plait.query.layout import Build, Layout
from plait.query.relation import ColumnDef, Relation
from plait.query.store import NO_KEY, Era, Filter, IngestEdge, Input, Key, Mark, Reach, Store, key_of
from plait.share.coverage import Draft, Stores
from plait.share.needs import needed_columns

MOST_ERAS = 16
"""Eras that a store remembers; what is older may serve new queries less than it could."""


@dataclass(frozen=True)
class _Reads:
    """What is read of each relation, by its name."""

    columns: Mapping[str, Mapping[str, ColumnDef]]
    """Columns as the queries compute them."""
    needed: Mapping[str, set[str]]
    """Names of the columns that some join or keyed store needs."""
    required: Mapping[str, tuple[str, ...]]
    """Columns that no alias can use a NULL of."""
    filters: Mapping[str, tuple[Filter, ...]]
    marks: Mapping[str, Mapping[str, Mark]]
    graphs: Mapping[str, JoinGraph]


def lay_out(
    found: Stores,
    graphs: Mapping[str, JoinGraph],
    relations: Mapping[str, Relation],
    filters: Mapping[str, tuple[Filter, ...]],
    marks: Mapping[str, Mapping[str, Mark]],
    next_filter: int,
) -> Layout:
    """The layout of the drafts that were chosen, with one input per relation in the order of registration."""
    before = found.before
    needed: dict[str, set[str]] = {}
    for draft in found.drafts.values():
        if draft.key != NO_KEY:
            needed.setdefault(draft.relation, set()).update(*(need.columns for need in draft.needs))
    for graph in graphs.values():
        for ref in needed_columns(graph):
            needed.setdefault(graph.alias(ref.alias).relation, set()).add(ref.column)
    reads = _Reads(_physical_columns(graphs), needed, _required(graphs, relations), filters, marks, graphs)
    builds = _builds(found, before)
    for build in builds:
        # The source must go on telling apart what is copied from what arrives in both.
        source = found.drafts.get(build.source)
        if source is None:
            old = before.store_by_id[build.source]
            source = found.drafts.setdefault(old.id, Draft(old.id, old.relation, old.key, old, owner=old.owner))
        source.floors |= {build.before, *found.drafts[build.store].floors}
    made = [_store(draft, found, relations[draft.relation], reads, builds) for draft in found.drafts.values()]
    stores = tuple(sorted(made, key=lambda s: (s.relation, s.id)))
    scanned = {g.aliases[0].relation for g in graphs.values() if len(g.aliases) == 1}
    edges = count(before.next_edge)
    return Layout(
        inputs=tuple(_input(relation, found, stores, scanned, reads, edges) for relation in relations.values()),
        stores=stores,
        builds=builds,
        next_edge=next(edges),
        next_filter=next_filter,
        tables=found.tables & frozenset(relations),
    )


def _builds(found: Stores, before: Layout) -> tuple[Build, ...]:
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
    draft: Draft,
    found: Stores,
    relation: Relation,
    reads: _Reads,
    builds: Iterable[Build],
) -> Store:
    filters = reads.filters[relation.name]
    admitted = tuple(f.id for f in filters)
    # What is copied from it stays until it is copied: columns, bits, and rows that nobody else could reach.
    copies = [found.drafts[build.store] for build in builds if build.source == draft.id]
    needs = [need for user in (draft, *copies) for need in user.needs]
    if draft.key == NO_KEY:
        names = {name for name, _ in relation.columns}
    elif draft.needs and draft.owner:
        names = {column for need in needs for column in need.columns}
        admitted = tuple(id for id in admitted if id in {need.filter.id for need in needs})
    elif draft.needs:
        names = set(reads.needed[relation.name])
    else:
        # Only the source of a build: it stays what it is until that is done.
        assert draft.before is not None
        names = {column.name for column in draft.before.columns}
    before = draft.before
    # What is being copied must not expire before those who wait for it could let it go.
    mine = [need.reach for need in needs]
    reach = _reaches([*mine, *(() if draft.needs or before is None else before.reach)])
    kept = None if any(r.keep_us is None for r in reach) else max(r.keep_us for r in reach if r.keep_us is not None)
    # Segments of rows that are kept for ever know their event times too: a window leaves the others out.
    time = relation.time_column if relation.time_column in names else None
    era = Era(
        since=found.epoch,
        columns=tuple(sorted(names)),
        filters=admitted,
        required=reads.required.get(relation.name, ()),
        reach=reach,
    )
    source = draft.source or before
    past = source.eras if source is not None else ()
    # New filters that can be told from what rows of an era have are filters of that era.
    told = [tuple(f.id for f in filters if f.id in admitted and found.admits(relation.name, era, f)) for era in past]
    past = tuple(replace(era, filters=ids) for era, ids in zip(past, told, strict=True))
    own = frozenset(source.key.columns) if draft.source is not None and source is not None else frozenset()
    known = reads.columns.get(relation.name, {})
    first = found.epoch if source is None else source.first
    return Store(
        id=draft.id,
        relation=relation.name,
        key=draft.key,
        columns=tuple(_column(relation, known, before, name) for name in sorted(names)),
        masked=len(filters) > 1,
        time_column=time,
        keep_us=kept,
        ttl_us=relation.ttl_us if before is None or before.ttl_us is None else before.ttl_us,
        reach=reach,
        since=found.epoch if before is None else before.since,
        eras=_with_era(past, era, own, {f.id for f in filters}),
        floors=_told_apart(draft.floors, first),
        lowest=_lowest(draft, builds),
        first=first,
        mixed=source is not None and (source.mixed or _filter_ids(found.before, relation.name) != set(era.filters)),
        owner=draft.owner,
        searched=_searched(draft, reads.graphs),
    )


def _searched(draft: Draft, graphs: Mapping[str, JoinGraph]) -> tuple[Key, ...]:
    """The keys, other than its own, by which joins look a store up."""
    found: dict[tuple[str, ...], Key] = {}
    # What is kept whole is no join's.
    for need in (need for need in draft.needs if need.join in graphs):
        graph = graphs[need.join]
        keys = graph.searched_keys_of(need.alias)
        # As `steps.Place.store` has it.
        if keys and key_of(graph, need.alias, graph.keys_of(need.alias)[0]).columns == need.key.columns:
            found |= {key.columns: key for attributes in keys for key in (key_of(graph, need.alias, attributes),)}
    return tuple(found[columns] for columns in sorted(found))


def _filter_ids(layout: Layout, relation: str) -> set[int]:
    return {f.id for f in layout.input_by_relation[relation].filters}


def _lowest(draft: Draft, builds: Iterable[Build]) -> int:
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


def _edge(store: Store, id: int) -> IngestEdge:
    """To a store of one query alone nothing travels that the others need."""
    if not store.owner:
        return IngestEdge(id, store.key, store.id, store.ttl_us)
    columns = tuple(column.name for column in store.columns)
    return IngestEdge(id, store.key, store.id, store.ttl_us, columns, store.eras[-1].filters)


def _input(
    relation: Relation,
    found: Stores,
    stores: tuple[Store, ...],
    scanned: set[str],
    reads: _Reads,
    edges: Iterable[int],
) -> Input:
    """One ingest edge per store: a driver's first probe is by a key it is stored by.

    One more, without key, where a query reads the relation by itself: rows without a key are part of its answer.
    """
    number = iter(edges)
    mine = [s for s in stores if s.relation == relation.name]
    before = found.before.input_by_relation.get(relation.name)
    old = before.edges if before is not None else ()
    known = {edge.store: edge.id for edge in old}
    made = [_edge(s, known[s.id] if s.id in known else next(number)) for s in mine]
    if relation.name in scanned:
        made.append(IngestEdge(known[None] if None in known else next(number), NO_KEY, None))
    travelling = sorted({c.name for s in mine for c in s.columns} | reads.needed.get(relation.name, set()))
    selected = set(travelling) | {c for store in mine for c in store.key.columns}
    if relation.time_column is not None and made:
        selected.add(relation.time_column)
    # What is missing in these is counted, so they are looked at where rows are counted.
    selected |= set(reads.required.get(relation.name, ()))
    selected |= {column for mark in reads.marks.get(relation.name, {}).values() for column in mark.required}
    defs = reads.columns.get(relation.name, {})
    kept = {c.name: c for s in mine for c in s.columns}
    return Input(
        relation=relation.name,
        columns=tuple(kept[c] if c in kept else _column(relation, defs, None, c) for c in sorted(selected)),
        travelling=tuple(travelling),
        filters=reads.filters[relation.name],
        required=reads.required.get(relation.name, ()),
        time_column=relation.time_column,
        delay_ms=relation.delay_ms,
        ttl_us=relation.ttl_us,
        edges=tuple(made),
        needed=relation.needed,
        marks=tuple(reads.marks.get(relation.name, {}).values()),
        corrupt=relation.corrupt if made else None,
        table=relation.name in found.tables,
    )
