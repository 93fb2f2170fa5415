"""What queries save by sharing stores and probes, and which streams make their stores keep rows for ever, as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from plait.query.graph import JoinGraph
from plait.query.layout import shown
from plait.query.observed import EdgeCount
from plait.query.plan import Plan
from plait.query.relation import Relation
from plait.query.store import NO_KEY
from plait.share.retention import unbounded


@dataclass(frozen=True)
class Measured:
    """What is known of a running engine beside its plan."""

    sizes: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """By store, rows and bytes at rest."""
    counts: Mapping[int, EdgeCount] = field(default_factory=dict)
    """By node, what the last epoch counted; empty if that had another plan."""


def savings(plan: Plan, measured: Measured) -> Iterator[str]:
    """Probes and stores of the plan, against those that its queries would have alone; nothing for a single query."""
    if len(plan.queries) < 2:
        return
    yield ""
    yield "What sharing saves, against each query alone"
    together = alone = looked_up = looked_up_alone = 0
    for tree in plan.trees:
        for node in (below for top in tree.nodes for below in top.walk()):
            queries = len({query for i, (query, _) in enumerate(tree.members) if node.members >> i & 1})
            lookups = measured.counts[node.id].lookups if node.id in measured.counts else 0
            together, alone = together + 1, alone + queries
            looked_up, looked_up_alone = looked_up + lookups, looked_up_alone + queries * lookups
    line = f"  probes: {together} instead of {alone}"
    if measured.counts:
        line += f"; keys looked up in the last epoch: {looked_up:,} instead of {looked_up_alone:,}"
    yield line
    own = [{store for _, _, store in query.stores} for query in plan.queries]
    kept = [store for store in plan.stores if store.mir is None]
    line = f"  stores of streams: {len(kept)} instead of {sum(map(len, own))}"
    if measured.sizes:
        rows, size = _total(measured, [store.id for store in kept])
        rows_alone, size_alone = _total(measured, [store for mine in own for store in mine])
        line += f"; {rows:,} rows in {size:,} bytes instead of {rows_alone:,} in {size_alone:,}"
    yield line
    mirs = [store.id for store in plan.stores if store.mir is not None]
    if mirs:
        rows, size = _total(measured, mirs)
        yield f"  intermediate results that are kept for it: {len(mirs)}" + (
            f"; {rows:,} rows in {size:,} bytes" if measured.sizes else ""
        )


def _total(measured: Measured, stores: list[str]) -> tuple[int, int]:
    found = [measured.sizes.get(store, (0, 0)) for store in stores]
    return sum(rows for rows, _ in found), sum(size for _, size in found)


def kept_for_ever(plan: Plan, graphs: Mapping[str, JoinGraph], relations: Mapping[str, Relation]) -> Iterator[str]:
    """A line for every stream whose rows are never let go, with the query and the stream that make it so."""
    for name in dict.fromkeys(store.relation for store in plan.stores if store.mir is None):
        stores = [store for store in plan.stores if store.mir is None and store.relation == name]
        if all(store.keep_us is not None or store.ttl_us is not None for store in stores):
            continue
        if any(store.key == NO_KEY for store in stores) and relations[name].keep == "all":
            yield f"  {name} is kept for ever, as keep='all' says, until it has a TTL"
            continue
        for query, graph in graphs.items():
            mine = [alias.name for alias in graph.aliases if alias.relation == name]
            why = next((why for alias in mine if (why := unbounded(graph, relations, alias))), "")
            if why:
                yield f"  {name} is kept for ever, because in {shown(query)} {why}; a TTL of {name} would end it"
                break
