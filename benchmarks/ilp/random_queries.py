"""Random workloads as paper 001 makes them (section VII-C): relations with three attributes, equal rates.

"We simulate an environment consisting of multiple relations that can be joined together": any two relations can be
joined, by one predicate, which the environment draws from their three attributes each.  A query begins with a random
relation and takes one more after the other, joined with one that it has.  Exact duplicates are drawn again.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from itertools import count

from plait.query.expr import ColumnRef
from plait.query.graph import Alias, Equality, JoinGraph, Output
from plait.query.relation import ColumnDef
from plait.share.subjoins import SubJoin, whole
from plait.share.workload import Sizes, Workload, workload

RATE = 100.0
ATTRIBUTES = ("a", "b", "c")
MOST_DRAWS = 50
"""Draws per wanted query; few relations have only so many different queries."""
_COLUMNS = tuple(ColumnDef(name, f"`{name}`", "bigint") for name in ATTRIBUTES)


def random_workload(queries: int, size: int, relations: int, seed: int) -> Workload:
    """Different queries of `size` relations each; every rate is RATE and every selectivity 1/RATE."""
    draw = random.Random(f"{queries} {size} {relations} {seed}")
    predicates: dict[tuple[int, int], tuple[str, str]] = {}
    found: dict[SubJoin, JoinGraph] = {}
    for number in count():
        if len(found) == queries or number == MOST_DRAWS * queries:
            break
        graph = _random_query(draw, size, relations, predicates)
        found.setdefault(whole(graph)[0], graph)
    given = workload({f"q{number}": graph for number, graph in enumerate(found.values())})
    rates = {leaf: RATE for query in given.queries for leaf in query.join.leaves}
    # Selectivities that are not given are one over the larger side's rows: 1/RATE.
    return replace(given, sizes=Sizes(rates, rates))


def fresh(given: Workload) -> Workload:
    """The same workload without anything that an earlier run has remembered."""
    return Workload(
        tuple(replace(query, join=replace(query.join)) for query in given.queries),
        Sizes(given.sizes.arriving, given.sizes.stored),
    )


def _random_query(
    draw: random.Random, size: int, relations: int, predicates: dict[tuple[int, int], tuple[str, str]]
) -> JoinGraph:
    members = [draw.randrange(relations)]
    equalities = []
    while len(members) < size:
        known, new = draw.choice(members), draw.randrange(relations)
        if new not in members:
            members.append(new)
            low, high = sorted((known, new))
            columns = predicates.setdefault((low, high), (draw.choice(ATTRIBUTES), draw.choice(ATTRIBUTES)))
            equalities.append(Equality(_column(low, columns[0]), _column(high, columns[1])))
    outputs = [_column(member, ATTRIBUTES[0]) for member in members]
    return JoinGraph(
        "",
        tuple(Alias(f"r{member}", f"r{member}", None, _COLUMNS) for member in members),
        tuple(equalities),
        tuple(Output(str(ref), ref.type, ref, str(ref), (ref,)) for ref in outputs),
    )


def _column(relation: int, name: str) -> ColumnRef:
    return ColumnRef(f"r{relation}", name, "bigint")


GOALS: Mapping[tuple[int, int], tuple[float, float | None]] = {
    (100, 3): (0.12, 0.12),
    (10, 4): (0.2, 0.4),
    (10, 5): (3.0, 12.0),
    (30, 5): (15.0, 120.0),
}
"""By number and size of queries over 100 relations: seconds that are wanted, and the paper's (with Gurobi)."""
