"""What a join needs of its relations, whatever its probe orders will be: columns, keys, filters and how long rows stay.

Contract.  Pure functions of a join graph.  `needed_columns` is a superset of what any order reads, so that orders
change between two epochs while the sources go on cutting the same buckets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from plait.query.expr import ColumnRef, columns_of
from plait.query.graph import JoinGraph
from plait.query.relation import Relation
from plait.query.store import Filter, Key, Reach, key_of
from plait.share.filters import filter_of
from plait.share.retention import keep_us


@dataclass(frozen=True)
class Need:
    """What an alias needs of a store by one key."""

    join: str
    alias: str
    key: Key
    columns: frozenset[str]
    required: frozenset[str]
    filter: Filter
    reach: Reach
    live: bool = False
    """Whether its query is being run, and cannot wait for a build."""
    mine: frozenset[str] = frozenset()
    """Stores that its query has used since its admission."""
    owner: str = ""
    """Its query, or the group of queries, that shares stores with no others; empty: it shares with all."""


def needs_of(
    name: str,
    graph: JoinGraph,
    relations: Mapping[str, Relation],
    filters: Mapping[str, tuple[Filter, ...]],
    marks: tuple[str, ...],
    *,
    live: bool = False,
    mine: frozenset[str] = frozenset(),
    owner: str = "",
) -> list[Need]:
    """What the aliases of a join need, key by key."""
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
                Need(
                    join=name,
                    alias=alias.name,
                    key=key_of(graph, alias.name, attributes),
                    columns=frozenset(columns[alias.name]),
                    required=graph.required(alias.name),
                    filter=filter_of(filters[alias.relation], alias, relation, marks),
                    reach=reach,
                    live=live,
                    mine=mine,
                    owner=owner,
                )
            )
    return found


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
    if len({key for a in graph.aliases for key in graph.every_key_of(a.name)}) > 1:
        for alias in graph.aliases:
            if not _is_leaf(graph, alias.name):
                keys = {attribute for key in graph.every_key_of(alias.name) for attribute in key}
                found |= {ref for t in keys if (ref := graph.column_of(alias.name, t)) is not None}
    return frozenset(found)


def _carriers(graph: JoinGraph, attribute: int) -> list[ColumnRef]:
    found = [graph.column_of(alias.name, attribute) for alias in graph.aliases]
    return [ref for ref in found if ref is not None]


def _compared(graph: JoinGraph) -> set[int]:
    """Attributes of keys whose hash does not decide: they are compared after every lookup."""
    keys = {(a.name, key) for a in graph.aliases for key in graph.every_key_of(a.name)}
    return {attribute for alias, key in keys if not key_of(graph, alias, key).exact for attribute in key}


def _is_leaf(graph: JoinGraph, alias: str) -> bool:
    """Whether an alias meets one other only: then its key is never looked up again after it has joined."""
    keys = graph.every_key_of(alias)
    return len(keys) == 1 and all(len(_carriers(graph, attribute)) == 2 for attribute in keys[0])
