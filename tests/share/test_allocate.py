"""The layout is the same for all orders and ranks, and holds whatever any of them reads."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, pairwise, permutations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plait.order.orders import Orders, fixed
from plait.query.graph import JoinGraph
from plait.query.layout import Layout
from plait.query.plan import Node, Plan
from plait.query.relation import Relation
from plait.query.store import store_id
from plait.share.allocate import Wanted, allocate
from plait.share.lay_out import MOST_ERAS
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
        reads += [(c.slot, c.column) for c in step.judged()]
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
    assert len({(w.edge, w.filters) for w in plan.samples}) == len(plan.samples)
    for wish in plan.samples:
        assert edges[wish.edge][1].store == wish.own
        for store, _, _ in wish.stores:
            assert len(plan.store_by_id[store].key.columns) == len(edges[wish.edge][1].key.columns)
    asked = {(w.own, store) for w in plan.samples for store, _, _ in w.stores}
    for tree in plan.trees:
        for top in tree.nodes:
            assert (edges[tree.edge][1].store, top.step.store) in asked


# ---------------------------------------------------------------- one layout from another


def wanted(floors: dict[str, dict[str, int]] | None = None, **graphs: JoinGraph) -> dict[str, Wanted]:
    """Queries by name; those with floors live already."""
    known = floors or {}
    return {n: Wanted(g, n, known.get(n), live=n in known) for n, g in graphs.items()}


def filtered(graph: JoinGraph, alias: str, text: str) -> JoinGraph:
    """The same with a filter on one alias."""
    aliases = tuple(replace(a, filter=text) if a.name == alias else a for a in graph.aliases)
    return replace(graph, aliases=aliases)


def test_the_same_queries_change_nothing() -> None:
    relations = streams("abc")
    first = allocate(Layout(), wanted(q=joined("a.k = b.k", "b.m = c.m")), relations)
    again = allocate(
        first.layout,
        wanted({"q": dict(first.floors["q"])}, q=joined("a.k = b.k", "b.m = c.m")),
        relations,
        epoch=7,
        version=1,
    )
    assert again.layout == first.layout
    assert Layout.from_json(first.layout.to_json()) == first.layout


def test_no_id_is_given_twice() -> None:
    relations, layout = streams("ab"), Layout()
    seen: set[int] = set()
    edges: set[int] = set()
    for version in range(6):
        graph = filtered(joined("a.k = b.k"), "a", f"k > {version}")
        layout = allocate(layout, wanted(**{f"q{version}": graph}), relations, epoch=version, version=version).layout
        mine = {f.id for i in layout.inputs if i.relation == "a" for f in i.filters}
        assert not mine & seen
        seen |= mine
        edges |= {edge.id for i in layout.inputs for edge in i.edges}
    # The store itself stays, and so does its edge.
    assert [s.id for s in layout.stores] == ["a[k]", "b[k]"]
    assert len(edges) == 2


def test_what_nobody_refers_to_is_dropped_and_comes_back_under_another_id() -> None:
    relations = streams("abc")
    both = allocate(Layout(), wanted(p=joined("a.k = b.k"), q=joined("b.m = c.m")), relations)
    one = allocate(
        both.layout, wanted({"p": dict(both.floors["p"])}, p=joined("a.k = b.k")), relations, epoch=3, version=1
    )
    assert [s.id for s in one.layout.stores] == ["a[k]", "b[k]"]
    back = allocate(
        one.layout,
        wanted({"p": dict(both.floors["p"])}, p=joined("a.k = b.k"), q=joined("b.m = c.m")),
        relations,
        epoch=5,
        version=2,
    )
    assert [s.id for s in back.layout.stores] == ["a[k]", "b[k]", "b[m]@2", "c[m]@2"]
    # The rows of b are there since the first epoch, though not by m, and without that column since epoch 3.
    assert back.floors["q"] == {"b": 5, "c": 5}


def test_a_store_by_another_key_is_built_from_one_that_has_all_it_needs() -> None:
    relations = streams("abc")
    chain, more = joined("a.k = b.k", "b.m = c.m"), joined("a.k = b.k", "b.m = c.m", "b.id = c.id")
    first = allocate(Layout(), wanted(p=chain), relations)
    floors = {"p": dict(first.floors["p"])}
    last = allocate(first.layout, wanted(floors, p=chain, q=more), relations, epoch=9, version=1)
    # b has all columns by other keys; of c, m was hashed and not kept.
    assert last.floors["q"] == {"a": 0, "b": 0, "c": 9}
    assert [(b.store, b.before) for b in last.layout.builds] == [("b[m, id]@1", 9)]
    assert last.waiting == {"q"}
    # Rows without k are in no store of b, and a query that needs no k would miss them.
    other = allocate(first.layout, wanted(floors, p=chain, q=joined("a.m = b.m")), relations, epoch=9, version=1)
    assert other.floors["q"] == {"a": 9, "b": 9}


def test_a_stream_that_is_kept_whole_has_every_past() -> None:
    relations = {n: replace(r, keep="all") for n, r in streams("ab").items()}
    first = allocate(Layout(), wanted(p=joined("a.k = b.k")), relations)
    assert [s.id for s in first.layout.stores] == ["a[]", "a[k]", "b[]", "b[k]"]
    later = allocate(first.layout, wanted(q=joined("a.m = b.m")), relations, epoch=8, version=1)
    assert later.floors["q"] == {"a": 0, "b": 0}
    assert {(b.store, b.source) for b in later.layout.builds} == {("a[m]@1", "a[]"), ("b[m]@1", "b[]")}


def test_rows_that_another_filter_kept_out_raise_the_floor() -> None:
    relations = streams("ab")
    narrow = filtered(joined("a.k = b.k"), "a", "k > 1")
    first = allocate(Layout(), wanted(p=narrow), relations)
    floors = {"p": dict(first.floors["p"])}
    more = allocate(first.layout, wanted(floors, p=narrow, q=joined("a.k = b.k")), relations, epoch=6, version=1)
    assert more.floors["q"] == {"a": 6, "b": 0}
    a = more.layout.store_by_id["a[k]"]
    assert [era.since for era in a.eras] == [0, 6]
    assert (a.floors, a.lowest) == ((6,), 0)


def test_more_filters_than_a_word_has_bits_are_no_refusal() -> None:
    graphs = {f"q{i}": filtered(joined("a.k = b.k"), "a", f"k > {i}") for i in range(130)}
    found = allocate(Layout(), wanted(**graphs), streams("ab")).layout
    assert len(found.input_by_relation["a"].filters) == 130


def test_any_number_of_changes_leaves_the_floors_of_those_who_live() -> None:
    relations, base = streams("ab"), joined("a.k = b.k")
    layout, floors, graphs = Layout(), {}, {"p": base}
    used: dict[str, frozenset[str]] = {}
    for version in range(3 * MOST_ERAS):
        asked = {
            name: Wanted(graph, name, floors.get(name), live=name in floors, stores=used.get(name, frozenset()))
            for name, graph in graphs.items()
        }
        found = allocate(layout, asked, relations, epoch=3 * version, version=version)
        assert all(found.floors[name] == mine for name, mine in floors.items())
        layout, floors = found.layout, {name: dict(mine) for name, mine in found.floors.items()}
        used = {name: frozenset(s for (join, _, _), s in found.stores.items() if join == name) for name in graphs}
        assert all(len(store.eras) <= MOST_ERAS for store in layout.stores)
        graphs[f"q{version}"] = filtered(base, "a", f"k > {version}")
    assert floors["p"] == {"a": 0, "b": 0}


def test_independent_queries_have_nothing_in_common() -> None:
    graph, narrow = joined("a.k = b.k", "b.m = c.m"), joined("a.k = b.k")
    graphs = {"p": graph, "q": graph, "n": narrow}
    plan = build_plan(graphs, streams("abc"), {n: fixed(g) for n, g in graphs.items()}, tuple("abc"), apart=True)
    of = {q.name: {store for _, _, store in q.stores} for q in plan.queries}
    assert not of["p"] & of["q"]
    assert not of["p"] & of["n"]
    assert {store.owner for store in plan.stores} == {"p", "q", "n"}
    assert all(len(tree.members) == 1 for tree in plan.trees)
    stores = {store.id: store for store in plan.stores}
    assert {c.name for s in of["n"] for c in stores[s].columns if stores[s].relation == "b"} < {
        c.name for s in of["p"] for c in stores[s].columns if stores[s].relation == "b"
    }


def test_live_queries_keep_their_stores_when_sharing_changes_and_new_ones_get_their_own() -> None:
    chain, relations = joined("a.k = b.k", "b.m = c.m"), streams("abc")
    first = allocate(Layout(), wanted(p=chain), relations)
    going = Wanted(chain, "p", first.floors["p"], live=True, stores=frozenset(first.stores.values()))
    apart = allocate(first.layout, {"p": going, "q": Wanted(chain, "q")}, relations, epoch=9, version=1, apart=True)
    mine = {store for (join, _, _), store in apart.stores.items() if join == "p"}
    new = {store for (join, _, _), store in apart.stores.items() if join == "q"}
    assert mine == set(first.stores.values())
    assert not new & mine
    # By the same key a copy takes the hashes over, so stores without the columns of their keys can be copied too.
    assert apart.floors["q"] == {"a": 0, "b": 0, "c": 0}
    assert {build.store for build in apart.layout.builds} == new
    assert apart.waiting == {"q"}
    lives = {
        n: Wanted(chain, n, apart.floors[n], live=True, stores=frozenset(of)) for n, of in (("p", mine), ("q", new))
    }
    back = allocate(
        replace(apart.layout, builds=()), {**lives, "r": Wanted(chain, "r")}, relations, epoch=20, version=2
    )
    assert {store for (join, _, _), store in back.stores.items() if join == "r"} == mine
    assert {store for (join, _, _), store in back.stores.items() if join == "q"} == new
