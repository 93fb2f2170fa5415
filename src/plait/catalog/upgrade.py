"""Checkpoints of format 3: one file `catalog.json`, compared for equality.  It becomes version 0 of a catalog.

The old release knew no floors, eras or ids: all rows since the first epoch are there, stores are called as they were,
and bit *i* of a query set is the *i*-th filter that the file lists.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from plait.catalog.catalog import Catalog, QueryEntry, StreamEntry
from plait.catalog.changes import Definition, same_text
from plait.errors import CheckpointError
from plait.query.layout import Layout
from plait.query.relation import Relation
from plait.query.store import Filter
from plait.share.allocate import Wanted, allocate


def upgraded(
    old: Mapping[str, Any],
    relations: Mapping[str, Relation],
    tables: frozenset[str],
    definitions: Mapping[str, Definition],
) -> Catalog:
    """The catalog that says what `catalog.json` said; refused unless the program defines what it was made for."""
    joins = {join: graph for d in definitions.values() for join, graph in d.graphs.items()}
    texts = {join: d.sql for d in definitions.values() for join in d.graphs}
    used = {alias.relation for graph in joins.values() for alias in graph.aliases}
    if joins.keys() != old["queries"].keys() or not all(same_text(texts[j], old["queries"][j]) for j in joins):
        raise _first("other queries are defined")
    known = {name: relations[name] for name in relations if name in used}
    wanted = {join: Wanted(graph, join) for join, graph in joins.items()}
    found = allocate(Layout(), wanted, known, tables=tables)
    layout = found.layout
    stores = {s.id: [[c.name, c.type] for c in s.columns] for s in layout.stores}
    if stores != {name: store["columns"] for name, store in old["stores"].items()}:
        raise _first("the queries are read in another way")
    inputs = tuple(replace(i, filters=_alike(i.filters)) for i in layout.inputs)
    entries = {
        d.name: QueryEntry(
            id=d.id,
            name=d.name,
            sql=d.sql,
            digest=d.digest,
            joins=tuple(d.graphs),
            since="now",
            mode=d.mode,
            floors={join: dict(found.floors[join]) for join in d.graphs},
            admitted=0,
            live_since=0,
            sink=d.sink,
        )
        for d in definitions.values()
    }
    return Catalog(
        version=0,
        streams={n: StreamEntry.of(r, n in tables, 0) for n, r in known.items()},
        queries=entries,
        layout=replace(layout, inputs=inputs),
        positions=tuple(sorted(n for n in known if n not in tables)),
    )


def _alike(filters: tuple[Filter, ...]) -> tuple[Filter, ...]:
    """Filters with one text had one bit: that of the first."""
    first = {f.text: f.id for f in reversed(filters)}
    return tuple(f if first[f.text] == f.id else replace(f, like=(first[f.text],)) for f in filters)


def filters_of(old: Mapping[str, Any], layout: Layout) -> dict[str, tuple[int, ...]]:
    """By stream the filters of the bits that segments of the old format have."""
    found = {}
    for relation, texts in old["filters"].items():
        first = {f.text: f.id for f in reversed(layout.input_by_relation[relation].filters)}
        found[relation] = tuple(first[text] for text in texts)
    return found


def _first(what: str) -> CheckpointError:
    return CheckpointError(
        "UPGRADE_FIRST",
        f"this checkpoint was written by an earlier release, and {what} than it was made for",
        "start once with the queries, streams and settings that it was made for; then change them",
    )
