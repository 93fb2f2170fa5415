"""The filters that source rows are marked with, and the marks that watermarks are made of.

Contract.  Pure functions of the layout before and the joins that are wanted.  A filter is told by its text and by the
marks that make a row late for it; one that is there keeps its id, and a new one gets an id that was never given.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from itertools import count

from plait.query.graph import Alias, JoinGraph
from plait.query.layout import Layout
from plait.query.relation import Relation
from plait.query.store import Filter, Mark


def marks_of(
    graphs: Mapping[str, JoinGraph], relations: Mapping[str, Relation], begun: Mapping[str, int]
) -> tuple[dict[str, tuple[str, ...]], dict[str, dict[str, Mark]]]:
    """By join the marks of its watermark, and all marks by relation.

    A watermark depends on the rows that a query can use, and on no others: a neighbour with another filter sees
    other rows, and must not make any late.  Nor must one that was there before a query that has no past: `begun` says
    of such joins with which epoch they began.
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
            meant = [texts, required, *([begun[name]] if begun.get(name) else [])]
            digest = hashlib.sha256(json.dumps(meant).encode()).hexdigest()[:8]
            mark = Mark(f"{relation}:{digest}", texts, required)
            every.setdefault(relation, {})[mark.key] = mark
            keys.append(mark.key)
        of[name] = tuple(sorted(keys))
    return of, every


def filters_of(
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


def filter_of(filters: Iterable[Filter], alias: Alias, relation: Relation, marks: tuple[str, ...]) -> Filter:
    text, over = _filter_key(alias, relation, marks)
    return next(f for f in filters if (f.text, f.marks) == (text, over))
