"""Plans of one and of many queries: what is shared, what travels, what is looked up where."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings

from plait.order.orders import fixed
from plait.query.expr import Call, ColumnRef
from plait.query.graph import Alias, Condition, Equality, JoinGraph, Output, Window
from plait.query.plan import Check, Node, Plan, Seen, SlotColumn, Span, Zone
from plait.query.relation import ColumnDef, Relation
from plait.share.probe_trees import build_plan
from tests.random_joins import Case, cases

COLUMNS = (("k", "bigint"), ("m", "int"), ("s", "string"), ("v", "double"), ("ts", "timestamp"))
RELATIONS = {n: Relation(n, COLUMNS) for n in "abcd"}


def ref(text: str) -> ColumnRef:
    alias, column = text.split(".")
    return ColumnRef(alias, column, dict(COLUMNS)[column])


def graph(
    tables: str, *equalities: str, outputs: str = "", filters: dict[str, str] | None = None, less: str = ""
) -> JoinGraph:
    """`graph("a b x=c", "a.k = b.k", …)`: aliases with their relations, keys, output columns, filters by alias."""
    aliases = [(name, rest or name) for name, _, rest in (t.partition("=") for t in tables.split())]
    refs = [tuple(map(ref, text.split(" = "))) for text in equalities]
    pairs = [tuple(map(ref, less.split(" < ")))] if less else []
    columns = tuple(ColumnDef(c, f"`{c}`", t) for c, t in COLUMNS)
    return JoinGraph(
        "",
        tuple(Alias(a, r, (filters or {}).get(a), columns) for a, r in aliases),
        tuple(Equality(*pair) for pair in refs),
        tuple(Output(t, ref(t).type, ref(t), t, (ref(t),)) for t in outputs.split()),
        conditions=tuple(Condition(less, pair, Call("<", pair, "boolean")) for pair in pairs),
    )


def plan(relations: dict[str, Relation] = RELATIONS, **graphs: JoinGraph) -> Plan:
    return build_plan(graphs, relations, {n: fixed(g) for n, g in graphs.items()}, tuple(relations))


def nodes(of: Plan) -> Iterator[Node]:
    for tree in of.trees:
        for top in tree.nodes:
            yield from top.walk()


def test_a_join_on_one_attribute_takes_one_exchange() -> None:
    found = plan(q=graph("a b c d", "a.k = b.k", "b.k = c.k", "c.k = d.k", outputs="a.v d.v"))
    assert found.hops == 1
    assert [s.id for s in found.stores] == ["a[k]", "b[k]", "c[k]", "d[k]"]


def test_every_change_of_attribute_takes_one_more_exchange() -> None:
    found = plan(q=graph("a b c d", "a.k = b.k", "b.m = c.m", "c.s = d.s", outputs="a.v d.v"))
    hops = {t.relation: [n.step.hop for top in t.nodes for n in top.walk()] for t in found.trees}
    assert hops == {"a": [1, 2, 3], "b": [1, 2, 3], "c": [1, 2, 3], "d": [1, 2, 3]}
    # A relation probed by two attributes has a store for each.
    assert [s.id for s in found.stores] == ["a[k]", "b[k]", "b[m]", "c[m]", "c[s]", "d[s]"]


def test_one_column_of_fixed_width_is_decided_by_its_hash_alone() -> None:
    found = plan(q=graph("a b c", "a.k = b.k", "b.s = c.s", outputs="a.v c.v"))
    exact = {s.id: s.key.exact for s in found.stores}
    assert exact == {"a[k]": True, "b[k]": True, "b[s]": False, "c[s]": False}
    # A key that is only hashed is neither kept nor carried.
    assert {s.id: [c.name for c in s.columns] for s in found.stores}["a[k]"] == ["v"]
    assert found.input_by_relation["a"].travelling == ("v",)
    # New tuples of c find b by s, and carry b's k on to a.
    assert found.input_by_relation["b"].travelling == ("k", "s")


def test_two_equalities_between_two_aliases_are_one_composite_key() -> None:
    found = plan(q=graph("a b", "a.k = b.k", "a.s = b.s", outputs="a.v"))
    assert [s.id for s in found.stores] == ["a[k, s]", "b[k, s]"]
    assert not found.stores[0].key.exact


def test_the_equality_that_closes_a_cycle_is_checked() -> None:
    found = plan(q=graph("a b c", "a.k = b.k", "b.m = c.m", "c.s = a.s", outputs="a.v"))
    for tree in found.trees:
        steps = [n.step for top in tree.nodes for n in top.walk()]
        assert sum(len(s.checks) + len(s.key) for s in steps) == 3, tree.relation


def test_a_condition_is_checked_as_soon_as_all_its_aliases_have_joined() -> None:
    found = plan(q=graph("a b c", "a.k = b.k", "b.k = c.k", outputs="c.v", less="a.v < b.v"))
    checks = {t.relation: [len(n.step.checks) for top in t.nodes for n in top.walk()] for t in found.trees}
    assert checks == {"a": [1, 0], "b": [1, 0], "c": [0, 1]}


def test_an_epoch_sees_its_own_rows_of_lower_rank_only() -> None:
    query = graph("a b c", "a.k = b.k", "b.k = c.k", outputs="a.v")
    found = build_plan({"q": query}, RELATIONS, {"q": fixed(query)}, ("c", "a", "b", "d"))
    seen = {
        t.relation: {n.step.store[0]: n.step.sees_current for top in t.nodes for n in top.walk()} for t in found.trees
    }
    assert seen == {"a": {"b": False, "c": True}, "b": {"a": True, "c": True}, "c": {"a": False, "b": False}}
    assert found.ranks == ("c", "a", "b")


def test_aliases_of_one_relation_rank_by_written_order_and_share_its_store() -> None:
    found = plan(q=graph("x=a y=a", "x.k = y.k", outputs="x.v y.v"))
    assert [s.id for s in found.stores] == ["a[k]"]
    assert sorted(n.step.sees_current for n in nodes(found)) == [False, True]
    assert len([i for i in found.inputs if i.edges]) == 1


def test_queries_share_inputs_and_stores() -> None:
    found = plan(
        one=graph("a b", "a.k = b.k", outputs="a.v"),
        two=graph("b c", "b.k = c.k", outputs="c.v"),
        three=graph("b c", "b.m = c.m", outputs="c.v"),
    )
    assert [i.relation for i in found.inputs if i.edges] == ["a", "b", "c"]
    assert [s.id for s in found.stores] == ["a[k]", "b[k]", "b[m]", "c[k]", "c[m]"]


def test_equal_beginnings_of_probe_orders_are_walked_once() -> None:
    one = graph("a b c", "a.k = b.k", "b.k = c.k", outputs="a.v b.v")
    two = graph("a b d", "a.k = b.k", "b.k = d.k", outputs="a.v d.v")
    found = plan(one=one, two=two)
    tree = next(t for t in found.trees if t.relation == "a")
    assert [n.step.store for n in tree.nodes] == ["b[k]"]
    assert [n.step.store for n in tree.nodes[0].children] == ["c[k]", "d[k]"]
    assert len([t for t in found.trees if t.relation == "a"]) == 1


def test_the_same_query_under_other_names_costs_no_further_probe() -> None:
    one = graph("a b", "a.k = b.k", outputs="a.v")
    two = graph("x=a y=b", "x.k = y.k", outputs="y.v")
    both = plan(one=one, two=two)
    assert len(list(nodes(both))) == len(list(nodes(plan(one=one))))
    assert [sorted(e.query for e in n.emits) for n in nodes(both)] == [["one", "two"]] * 2


def test_different_filters_become_bits_and_equal_ones_do_not() -> None:
    narrow = graph("a b", "a.k = b.k", outputs="a.v", filters={"a": "v > 1", "b": "v > 2"})
    wide = graph("a b", "a.k = b.k", outputs="a.v", filters={"b": "v > 2"})
    found = plan(narrow=narrow, wide=wide)
    assert [f.text for f in found.input_by_relation["a"].filters] == ["v > 1", None]
    assert [f.text for f in found.input_by_relation["b"].filters] == ["v > 2"]
    assert {s.id: s.masked for s in found.stores} == {"a[k]": True, "b[k]": False}
    # The wide query lets every row pass, so it looks at no bit; both go through one tree.
    (of_a,), (of_b,) = ([t for t in found.trees if t.relation == r] for r in "ab")
    assert of_a.members == (("narrow", "a"), ("wide", "a"))
    assert of_a.seen == (Seen(0, None, 0b01), Seen(None, None, 0b10))
    assert of_b.seen == (Seen(None, None, 0b11),)
    assert of_b.nodes[0].step.seen == of_a.seen


def test_queries_of_one_structure_share_every_node_whatever_their_filters_windows_and_conditions() -> None:
    relations = {n: Relation(n, COLUMNS, "ts", 1000) for n in "abcd"}
    query = graph("a b", "a.k = b.k", outputs="a.v")
    short, long = (
        JoinGraph("", query.aliases, query.equalities, query.outputs, (Window(ref("a.ts"), ref("b.ts"), -n, n),))
        for n in (5, 50)
    )
    less = graph("x=a y=b", "x.k = y.k", outputs="y.v", less="x.v < y.v", filters={"x": "v > 1"})
    found = plan(relations, short=short, long=long, less=less)
    by_a = found.trees[0]
    assert [len(list(tree.nodes)) for tree in found.trees] == [1, 1]
    (node,) = by_a.nodes
    assert node.members == 0b111
    assert node.step.spans == (Span(SlotColumn(1, "ts"), SlotColumn(0, "ts"), ((-5, 5, 0b01), (-50, 50, 0b10))),)
    (check,) = node.step.checks
    assert check == Check(Call("<", (ColumnRef("0", "v", "double"), ColumnRef("1", "v", "double")), "boolean"), 0b100)
    # One of them has no window, so every segment may have its rows.
    assert node.step.zone is None
    assert plan(relations, short=short, long=long).trees[0].nodes[0].step.zone == Zone(SlotColumn(0, "ts"), -50, 50)


def test_sets_travel_only_where_tuples_may_belong_to_some_queries_only() -> None:
    one = graph("a b c", "a.k = b.k", "b.m = c.m", outputs="a.v c.v")
    two = graph("a b c", "a.k = b.k", "b.m = c.m", outputs="c.v", filters={"b": "v > 1"})
    three = graph("a b d", "a.k = b.k", "b.m = d.m", outputs="d.v")
    alike = plan(one=one, again=one)
    assert {n.words for n in nodes(alike)} == {0}
    found = next(t for t in plan(one=one, two=two, three=three).trees if t.relation == "a")
    (first,) = found.nodes
    assert (first.words, first.step.varies) == (0, True)
    # To c go tuples of two queries, to d those of one: nobody has to be told whose they are.
    assert {c.step.store: (c.words, c.members) for c in first.children} == {"c[m]": (1, 0b011), "d[m]": (0, 0b100)}


def test_a_store_keeps_rows_for_the_most_patient_of_its_queries() -> None:
    relations = {n: Relation(n, COLUMNS, "ts", 1000) for n in "abcd"}
    query = graph("a b", "a.k = b.k", outputs="a.v")
    short, long = (
        JoinGraph("", query.aliases, query.equalities, query.outputs, (Window(ref("a.ts"), ref("b.ts"), -n, n),))
        for n in (5, 50)
    )
    kept = {s.id: (s.keep_us, s.time_column) for s in plan(relations, short=short, long=long).stores}
    assert kept == {"a[k]": (50, "ts"), "b[k]": (50, "ts")}
    kept = {s.id: (s.keep_us, s.time_column) for s in plan(relations, short=short, ever=query).stores}
    assert kept == {"a[k]": (None, "ts"), "b[k]": (None, "ts")}


@settings(deadline=None, derandomize=True, database=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(cases(windows=True, ttl=True))
def test_any_plan_survives_json_and_routes_every_probe(case: Case) -> None:
    found = plan(case.relations, **case.graphs)
    again = Plan.from_json(found.to_json())
    assert again == found
    assert again.digest == found.digest
    ids = [n.id for n in nodes(found)] + [e.id for i in found.inputs for e in i.edges]
    assert len(ids) == len(set(ids))
    for tree in found.trees:
        edge = next(e for i in found.inputs for e in i.edges if e.id == tree.edge)
        for top in tree.nodes:
            assert top.step.hop == 1
            assert len(edge.key.columns) == len(top.step.key)
            for node in top.walk():
                assert all(child.step.hop - node.step.hop in (0, 1) for child in node.children)
                same_hop = [child for child in node.children if child.step.hop == node.step.hop]
                assert all(len(c.step.key) == len(node.step.key) for c in same_hop)
    for name, query in case.graphs.items():
        assert sum(e.query == name for n in nodes(found) for e in n.emits) == len(query.aliases)


def test_a_plan_is_a_pure_function_of_its_arguments() -> None:
    query = graph("a b c", "a.k = b.k", "b.s = c.s", outputs="a.v")
    assert plan(q=query) == plan(q=query)
    assert plan(q=query).digest == plan(q=query).digest


@pytest.mark.parametrize("name", ["ranks", "orders"])
def test_ranks_and_orders_are_values_of_the_plan(name: str) -> None:
    query = graph("a b c", "a.k = b.k", "b.k = c.k", outputs="a.v")
    orders = fixed(query)
    if name == "orders":
        orders = {driver: tuple(reversed(order)) for driver, order in orders.items()}
    ranks = tuple(reversed(RELATIONS)) if name == "ranks" else tuple(RELATIONS)
    changed = build_plan({"q": query}, RELATIONS, {"q": orders}, ranks)
    assert changed.digest != plan(q=query).digest
    assert changed.stores == plan(q=query).stores


def test_outputs_that_tasks_compute_are_expressions_over_slots_and_read_each_column_once() -> None:
    joined = graph("a b c", "a.k = b.k", "b.m = c.m", outputs="a.v c.v")
    total = Call("+", (ref("a.v"), ref("c.v")), "double")
    both = (ref("a.v"), ref("c.v"))
    computed = replace(joined, outputs=(*joined.outputs, Output("total", "double", None, "a.v + c.v", both, total)))
    found = plan(q=computed)
    emits = {e.columns: e.values for node in nodes(found) for e in node.emits}
    # From a the slots are a, b, c; from b they are b, a, c; from c they are c, b, a.
    at = {(SlotColumn(0, "v"), SlotColumn(2, "v")), (SlotColumn(1, "v"), SlotColumn(2, "v"))}
    assert emits.keys() == at | {(SlotColumn(2, "v"), SlotColumn(0, "v"))}
    for (left, right), values in emits.items():
        refs = tuple(ColumnRef(str(c.slot), c.column, "double") for c in (left, right))
        assert values == (*refs, Call("+", refs, "double"))
    (query,) = found.queries
    assert (query.columns, query.select) == ((("a.v", "double"), ("c.v", "double"), ("total", "double")), ())
    assert Plan.from_json(found.to_json()) == found
    # A plan that an earlier release wrote says nothing of computed columns.
    today = plan(q=joined).to_json()
    old = today.replace(', "values": []', "")
    assert "values" not in old
    assert Plan.from_json(old).to_json() == today


def test_one_output_that_only_spark_can_evaluate_leaves_all_to_spark() -> None:
    joined = graph("a b", "a.k = b.k", outputs="a.v b.v")
    both = (ref("a.v"), ref("b.v"))
    total = Output("total", "double", None, "`a.v` + `b.v`", both, Call("+", both, "double"))
    (query,) = plan(q=replace(joined, outputs=(total, Output("odd", "string", None, "odd(`a.v`)", both)))).queries
    assert [name for name, _ in query.columns] == ["a.v", "b.v"]
    assert query.select == (("`a.v` + `b.v`", "total"), ("odd(`a.v`)", "odd"))
