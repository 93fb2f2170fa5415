"""What all plans of these queries have in common: inputs, edges from the sources, stores and their columns.

Contract: a layout is a pure function of the graphs and relations, never of probe orders or ranks.  Orders and ranks can
so change between two epochs while the sources go on cutting the same buckets and every store keeps its whole past.

Invariant: a store exists for every key by which any probe order may look its relation up, and holds every column that
any order may need.  That is the price of re-ordering: a key column of a relation in the middle is kept even if today's
order does not carry it on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from plait.errors import QueryError
from plait.query.expr import ColumnRef, columns_of
from plait.query.graph import Alias, JoinGraph
from plait.query.plan import NO_KEY, IngestEdge, Input, Key, Store, filter_bit, key_of, store_id
from plait.query.relation import ColumnDef, Relation
from plait.share.retention import keep_us, with_ttls

MOST_FILTERS = 62
"""Bits of a query set (a signed 64-bit column)."""

Filters = Mapping[str, tuple[str | None, ...]]
"""Per relation the distinct filters of its aliases; the position is the filter's bit in the query set."""


@dataclass(frozen=True)
class Layout:
    """Inputs and stores, and how to find them."""

    inputs: tuple[Input, ...]
    stores: tuple[Store, ...]
    filters: Filters

    def edge(self, relation: str, key: Key) -> int:
        """The edge on which new tuples of a relation travel to the owners of a key."""
        source = next(i for i in self.inputs if i.relation == relation)
        return next(edge.id for edge in source.edges if edge.key == key)

    def time_column(self, relation: str) -> str | None:
        """By which the segments of a relation know their event times."""
        return next((store.time_column for store in self.stores if store.relation == relation), None)

    def filter_bit(self, alias: Alias) -> int | None:
        """The alias's bit in the query set; None where all rows that arrive pass."""
        return filter_bit(self.filters[alias.relation], alias.filter)


def layout(graphs: Mapping[str, JoinGraph], relations: Mapping[str, Relation]) -> Layout:
    """The layout for these queries; inputs are in the order of registration."""
    relations = with_ttls(graphs, relations)
    filters = _distinct_filters(graphs)
    columns = _physical_columns(graphs)
    kept = _retention(graphs, relations)
    needed: dict[str, set[str]] = {relation: set() for relation in filters}
    keys: dict[str, dict[str, Key]] = {relation: {} for relation in filters}
    for graph in graphs.values():
        for ref in needed_columns(graph):
            needed[graph.alias(ref.alias).relation].add(ref.column)
        for alias in graph.aliases:
            for attributes in graph.keys_of(alias.name):
                key = key_of(graph, alias.name, attributes)
                keys[alias.relation].setdefault(store_id(alias.relation, key), key)
    used = [relations[name] for name in relations if name in filters]
    stores = tuple(
        _store(relation, key, columns[relation.name], needed[relation.name], filters[relation.name], kept)
        for relation in sorted(used, key=lambda r: r.name)
        for _, key in sorted(keys[relation.name].items())
    )
    scanned = {graph.aliases[0].relation for graph in graphs.values() if len(graph.aliases) == 1}
    return Layout(_inputs(used, stores, scanned, columns, needed, filters, _required(graphs)), stores, filters)


def emitted(graph: JoinGraph) -> tuple[ColumnRef, ...]:
    """What leaves the join: the outputs themselves, or all that Spark needs to finish the query."""
    if not graph.needs_spark_after:
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
        # A stream that is read by itself needs no state.
        for alias, kept in keep_us(graph, relations).items() if len(graph.aliases) > 1 else ():
            found.setdefault(graph.alias(alias).relation, []).append(kept)
    return {r: None if None in kept else max(k for k in kept if k is not None) for r, kept in found.items()}


def _store(
    relation: Relation,
    key: Key,
    columns: Mapping[str, ColumnDef],
    needed: Iterable[str],
    filters: tuple[str | None, ...],
    retention: Mapping[str, int | None],
) -> Store:
    names = set(needed)
    kept = retention[relation.name]
    if kept is not None and relation.time_column is not None:
        names.add(relation.time_column)
    return Store(
        id=store_id(relation.name, key),
        relation=relation.name,
        key=key,
        columns=tuple(_column(relation, columns, name) for name in sorted(names)),
        masked=len(filters) > 1,
        # Also where rows are kept for ever: segments then know their event times, and a window leaves out the others.
        time_column=relation.time_column if relation.time_column in names else None,
        keep_us=kept,
        ttl_us=relation.ttl_us,
    )


def _column(relation: Relation, columns: Mapping[str, ColumnDef], name: str) -> ColumnDef:
    if name in columns:
        return columns[name]
    return ColumnDef(name, "`" + name.replace("`", "``") + "`", relation.type_of(name))


def _inputs(
    used: Iterable[Relation],
    stores: tuple[Store, ...],
    scanned: set[str],
    columns: Mapping[str, Mapping[str, ColumnDef]],
    needed: Mapping[str, set[str]],
    filters: Filters,
    required: Mapping[str, tuple[str, ...]],
) -> tuple[Input, ...]:
    """One input per relation; one ingest edge per store: a driver's first probe is by a key it is stored by.

    One more, without key, where a query reads the relation by itself: rows without a key are part of its answer.
    """
    inputs: list[Input] = []
    number = 0
    for relation in used:
        mine = [s for s in stores if s.relation == relation.name]
        edges = tuple(IngestEdge(number + i, store.key, store.id) for i, store in enumerate(mine))
        if relation.name in scanned:
            edges += (IngestEdge(number + len(edges), NO_KEY, None),)
        number += len(edges)
        travelling = tuple(sorted({c.name for s in mine for c in s.columns} | needed[relation.name]))
        selected = set(travelling) | {c for store in mine for c in store.key.columns}
        if relation.time_column is not None:
            selected.add(relation.time_column)
        inputs.append(
            Input(
                relation=relation.name,
                columns=tuple(_column(relation, columns[relation.name], c) for c in sorted(selected)),
                travelling=travelling,
                filters=filters[relation.name],
                required=required[relation.name],
                time_column=relation.time_column,
                delay_ms=relation.delay_ms,
                ttl_us=relation.ttl_us,
                edges=edges,
                needed=relation.needed,
            )
        )
    return tuple(inputs)
