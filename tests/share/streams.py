"""A join of a few streams, its epochs as the optimiser would see them, and rows for a `LocalEngine`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import product

import pyarrow as pa

from plait.query.expr import ColumnRef
from plait.query.graph import Alias, Equality, JoinGraph, Output
from plait.query.observed import EdgeCount, KeyCount, Observed, Sample
from plait.query.plan import Plan
from plait.query.relation import ColumnDef, Relation

COLUMNS = (("id", "bigint"), ("k", "bigint"), ("m", "bigint"))
SCHEMA = pa.schema([(name, pa.int64()) for name, _ in COLUMNS])
KEYS = 1000
"""Keys of every input and epoch in `observed`."""


def joined(*equalities: str) -> JoinGraph:
    """`joined("a.k = b.k", …)`: streams called like their aliases; out come their ids."""
    sides = [[ColumnRef(*side.split("."), "bigint") for side in text.split(" = ")] for text in equalities]
    names = sorted({ref.alias for pair in sides for ref in pair})
    columns = tuple(ColumnDef(c, f"`{c}`", t) for c, t in COLUMNS)
    outputs = [ColumnRef(n, "id", "bigint") for n in names]
    return JoinGraph(
        "",
        tuple(Alias(n, n, None, columns) for n in names),
        tuple(Equality(*pair) for pair in sides),
        tuple(Output(f"{r.alias}_id", r.type, r, str(r), (r,)) for r in outputs),
    )


def streams(names: str, ttl_us: int | None = None) -> dict[str, Relation]:
    return {n: Relation(n, COLUMNS, ttl_us=ttl_us) for n in names}


def rows(*keys: tuple[int, int] | int) -> pa.Table:
    """Rows with these k, or (k, m)."""
    pairs = [key if isinstance(key, tuple) else (key, 0) for key in keys]
    columns = [list(range(len(pairs))), [k for k, _ in pairs], [m for _, m in pairs]]
    return pa.table([pa.array(c, pa.int64()) for c in columns], schema=SCHEMA)


def observed(
    plan: Plan,
    epoch: int,
    gamma: Mapping[str, float],
    *,
    size: Mapping[str, int] | None = None,
    mu: float = 1.0,
    rows_in: int = KEYS,
) -> Observed:
    """An epoch of a join on one key, in which every input finds a partner in stream s for `gamma[s]` of its keys.

    The streams are independent; stream s has `size[s]` rows of KEYS keys in one run.
    """
    size = size or {}
    query = plan.queries[0]
    edges: dict[int, EdgeCount] = {}
    for (_, order), (_, nodes) in zip(query.orders, query.nodes, strict=True):
        alive = KEYS
        for target, node in zip(order, nodes, strict=True):
            found = round(alive * gamma[target])
            gallop = alive * math.log2(1 + size.get(target, KEYS) / alive) if alive else 0.0
            edges[node] = EdgeCount(
                lookups=alive, hits=found, alive=found, rows=round(found * mu), runs=alive, gallop=gallop
            )
            edges[node].lookup_ns = round(12 * (alive + 0.6 * gallop))
            alive = found
    samples = []
    for wish in plan.samples:
        partners = [store for store, _, _ in wish.stores]
        sample = Sample(wish.edge, wish.filters, ((wish.own, ()), *((s, ()) for s in partners)), tuples=KEYS)
        for there in product((False, True), repeat=len(partners)):
            share = math.prod(gamma[s[0]] if yes else 1 - gamma[s[0]] for s, yes in zip(partners, there, strict=True))
            counts = [round(KEYS * share * yes * mu) for yes in there]
            pattern = sum(2 << i for i, yes in enumerate(there) if yes)
            sample.patterns[pattern] = [round(KEYS * share), 0, *counts]
        samples.append(sample)
    stores = {s.id: KeyCount(KEYS, KEYS, size.get(s.relation, KEYS), 1) for s in plan.stores}
    arrived = dict.fromkeys(plan.ranks, rows_in)
    return Observed(epoch, arrived, {query.name: 10}, edges, stores, samples)
