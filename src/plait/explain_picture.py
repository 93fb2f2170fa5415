"""The forest of probe trees as a picture, for Graphviz: from new rows on the left to the queries on the right.

A box is a probe; one that several queries share is filled, and says how many.  A dashed line is an exchange between
tasks.  Queries with the same results are one box.  A cylinder is an intermediate result that is kept.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from plait.explain_forest import named
from plait.query.layout import shown
from plait.query.plan import Emit, Node, Plan, ProbeTree

SHARED = "#d8ebe2"
"""The colour of what is done once for several queries."""


def picture(plan: Plan) -> Iterator[str]:
    """The text of a Graphviz file."""
    yield "digraph plait {"
    yield "  rankdir=LR; node [shape=box, fontname=Helvetica, fontsize=11]; edge [fontname=Helvetica, fontsize=9];"
    for store in plan.stores:
        if store.mir is not None:
            yield f'  {json.dumps(store.id)} [shape=cylinder, style=filled, fillcolor="{SHARED}"];'
    for relation in dict.fromkeys(tree.relation for tree in plan.trees):
        yield f"  {_new(relation)} [shape=plaintext];"
    results: dict[str, None] = {}
    for tree in plan.trees:
        yield from _results(_new(tree.relation), tree.emits, results)
        for node in tree.nodes:
            yield from _probe(tree, _new(tree.relation), 1, node, results)
    for name in results:
        yield f"  {name} [style=rounded, penwidth=2];"
    yield "}"


def _new(relation: str) -> str:
    return json.dumps("new " + relation)


def _probe(tree: ProbeTree, source: str, hop: int, node: Node, results: dict[str, None]) -> Iterator[str]:
    here, step = f"n{node.id}", node.step
    queries = len({tree.members[i][0] for i in range(len(tree.members)) if node.members >> i & 1})
    shared = f', style=filled, fillcolor="{SHARED}"' if queries > 1 else ""
    label = json.dumps(step.store)[1:-1] + (f"\\nfor {queries} queries" if queries > 1 else "")
    yield f'  {here} [label="{label}"{shared}];'
    yield f"  {source} -> {here}" + (' [style=dashed, label="exchange"];' if step.hop != hop else ";")
    yield from _results(here, node.emits, results)
    for feed in node.feeds:
        yield f"  {here} -> {json.dumps(feed.store)} [style=dotted];"
    for child in node.children:
        yield from _probe(tree, here, step.hop, child, results)


def _results(source: str, emits: Sequence[Emit], results: dict[str, None]) -> Iterator[str]:
    if emits:
        box = json.dumps(named(list(dict.fromkeys(shown(emit.query) for emit in emits))))
        results[box] = None
        yield f"  {source} -> {box};"
