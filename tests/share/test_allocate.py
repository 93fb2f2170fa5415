"""The layout is the same for all orders and ranks, and holds whatever any of them reads."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, pairwise, permutations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plait.order.orders import Orders, fixed
from plait.query.expr import columns_of
from plait.query.graph import JoinGraph
from plait.query.layout import Layout
from plait.query.plan import Node, Plan, store_id
from plait.query.relation import Relation
from plait.share.allocate import Wanted, allocate
from plait.share.probe_trees import build_plan
from tests.random_joins import Case, cases, random_orders
from tests.share.streams import joined, streams

COMMON = settings(deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))


def layout(graphs: dict[str, JoinGraph], relations: dict[str, Relation]) -> Layout:
    """Of a new checkpoint."""
    return allocate(Layout(), {name: Wanted(graph, name) for name, graph in graphs.items()}, relations).layout


def every_order(graph: JoinGraph, driver: str) -> Iterator[tuple[str, ...]]:
    """All orders in which each next alias shares an attribute with one already joined."""
    others = [a.name for a in graph.aliases if a.name != driver]
    for order in permutations(others):
        if all(any(graph.shared(n, j) for j in (driver, *order[:i])) for i, n in enumerate(order)):
            yield order


def missing(plan: Plan) -> list[str]:
    """What a step's key, a check or a result reads that neither travels with the driver nor rests in the store."""
    found: list[str] = []

    def visit(node: Node, relations: list[str], columns: list[set[str]], hops: list[int]) -> None:
        step, store = node.step, plan.store_by_id[node.step.store]
        relations, hops = [*relations, store.relation], [*hops, step.hop]
        columns = [*columns, {c.name for c in store.columns}]
        # An exact key of the hop in which its carrier joined is a hash; any other is a value.
        reads = [(c.slot, c.column) for c in step.key if not step.exact or step.hop > hops[c.slot]]
        reads += [(int(r.alias), r.column) for check in step.checks for r in columns_of(check)]
        reads += [(c.slot, c.column) for emit in node.emits for c in emit.columns]
        reads += [] if step.exact else [(len(columns) - 1, c) for c in store.key.columns]
        found.extend(f"{relations[slot]}.{column}" for slot, column in reads if column not in columns[slot])
        for child in node.children:
            visit(child, relations, columns, hops)

    for tree in plan.trees:
        travelling = set(plan.input_by_relation[tree.relation].travelling)
        for top in tree.nodes:
            visit(top, [tree.relation], [travelling], [1])
    return found


@settings(COMMON, max_examples=30)
@given(cases(windows=True, ttl=True, most_aliases=5), st.integers(0, 2**32 - 1))
def test_stores_inputs_and_edges_are_the_same_under_any_orders_and_ranks(case: Case, seed: int) -> None:
    choose = random.Random(seed)
    base = layout(case.graphs, case.relations)
    for _ in range(5):
        ranks = list(case.relations)
        choose.shuffle(ranks)
        orders = {name: random_orders(graph, choose) for name, graph in case.graphs.items()}
        plan = build_plan(case.graphs, case.relations, orders, tuple(ranks))
        assert (plan.inputs, plan.stores) == (base.inputs, base.stores)
        assert plan.ranks == tuple(r for r in ranks if base.input_by_relation[r].edges)
        assert missing(plan) == []


@settings(COMMON, max_examples=10)
@given(cases(most_aliases=4, most_queries=1))
def test_no_order_of_a_small_query_needs_more_than_the_layout_has(case: Case) -> None:
    graph = case.graphs["q0"]
    written = fixed(graph)
    for driver in written:
        for order in islice(every_order(graph, driver), 24):
            orders: Orders = {**written, driver: order}
            plan = build_plan(case.graphs, case.relations, {"q0": orders}, tuple(case.relations))
            assert missing(plan) == [], order
            assert dict(plan.queries[0].orders)[driver] == order


def test_a_column_that_is_needed_and_not_there_is_found_missing() -> None:
    graph = joined("a.k = b.k", "b.m = c.m")
    plan = build_plan({"q": graph}, streams("abc"), {"q": fixed(graph)}, tuple("abc"))
    assert missing(plan) == []
    stores = tuple(replace(s, columns=tuple(c for c in s.columns if c.name != "m")) for s in plan.stores)
    assert "b.m" in missing(replace(plan, stores=stores))


def test_a_store_is_kept_for_every_key_by_which_some_order_looks_its_stream_up() -> None:
    graph = joined("a.k = b.k", "b.m = c.m", "c.k = d.k")
    found = layout({"q": graph}, streams("abcd"))
    assert [s.id for s in found.stores] == ["a[k]", "b[k]", "b[m]", "c[k]", "c[m]", "d[k]"]
    # Two columns shared with one alias and one with another: two keys, whatever today's order.
    composite = joined("a.k = b.k", "a.m = b.m", "a.k = c.k")
    assert [s.id for s in layout({"q": composite}, streams("abc")).stores] == [
        "a[k, m]",
        "a[k]",
        "b[k, m]",
        "b[k]",
        "c[k]",
    ]


def test_inputs_are_in_the_order_of_registration_and_streams_no_query_reads_have_no_edges() -> None:
    relations = {n: streams("abcx")[n] for n in "cxab"}
    found = layout({"q": joined("a.k = b.k", "b.k = c.k")}, relations)
    assert [i.relation for i in found.inputs] == ["c", "x", "a", "b"]
    assert [i.relation for i in found.inputs if i.edges] == ["c", "a", "b"]
    edges = [edge for source in found.inputs for edge in source.edges]
    assert [edge.id for edge in edges] == list(range(len(edges)))
    assert {edge.store for edge in edges} == {s.id for s in found.stores}


def test_every_store_is_fed_by_an_edge_of_its_own_key() -> None:
    found = layout({"q": joined("a.k = b.k", "b.m = c.m")}, streams("abc"))
    for source in found.inputs:
        for edge in source.edges:
            assert store_id(source.relation, edge.key) == edge.store
            assert found.edge_by_store[edge.store] == edge


@settings(COMMON, max_examples=15)
@given(cases(most_aliases=4), st.integers(0, 2**32 - 1))
def test_the_nodes_of_a_query_are_the_probes_of_its_orders(case: Case, seed: int) -> None:
    orders = {name: random_orders(graph, random.Random(seed)) for name, graph in case.graphs.items()}
    plan = build_plan(case.graphs, case.relations, orders, tuple(case.relations))
    nodes = {node.id: node for tree in plan.trees for top in tree.nodes for node in top.walk()}
    for query in plan.queries:
        graph = case.graphs[query.name]
        assert dict(query.orders) == orders[query.name]
        for driver, ids in query.nodes:
            path = [nodes[i] for i in ids]
            relations = [plan.store_by_id[node.step.store].relation for node in path]
            assert relations == [graph.alias(a).relation for a in orders[query.name][driver]]
            assert all(below in above.children for above, below in pairwise(path))
            assert any(emit.query == query.name for emit in path[-1].emits)


@settings(COMMON, max_examples=15)
@given(cases(most_aliases=4, most_queries=2))
def test_every_input_is_sampled_against_all_stores_on_its_keys(case: Case) -> None:
    plan = build_plan(case.graphs, case.relations, {n: fixed(g) for n, g in case.graphs.items()}, tuple(case.relations))
    edges = {e.id: (i.relation, e) for i in plan.inputs for e in i.edges}
    assert len({(w.edge, w.filter) for w in plan.samples}) == len(plan.samples)
    for wish in plan.samples:
        assert edges[wish.edge][1].store == wish.own
        for store, _, _ in wish.stores:
            assert len(plan.store_by_id[store].key.columns) == len(edges[wish.edge][1].key.columns)
    asked = {(w.own, store) for w in plan.samples for store, _, _ in w.stores}
    for tree in plan.trees:
        for top in tree.nodes:
            assert (edges[tree.edge][1].store, top.step.store) in asked
