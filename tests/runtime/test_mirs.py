"""Intermediate results that are kept (MIRs): with them every query has the rows that it has without."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from random import Random

import pyarrow as pa
import pytest
from hypothesis import given, settings

from plait.catalog.catalog import Catalog, QueryEntry
from plait.config import Config
from plait.order.orders import Orders
from plait.query.expr import Call, ColumnRef
from plait.query.graph import Alias, Condition, Equality, JoinGraph, Output, Window
from plait.query.layout import Layout
from plait.query.plan import Node, Plan, Step
from plait.query.relation import ColumnDef, Relation
from plait.share.allocate import Wanted, allocate
from plait.share.mirs import Keep
from plait.share.planner import Planner
from plait.share.probe_trees import build_plan, plan_on
from plait.state.log import catalog_versions
from plait.state.log.inspect import Inspection
from plait.testing import LocalEngine, state_tables
from tests.oracle import Bag, Oracle, bag
from tests.random_joins import Case, Query, cases, fewer_stores
from tests.random_mirs import Kept, check_mirs

COMMON = settings(deadline=None, derandomize=True, database=None)


@settings(COMMON, max_examples=40)
@given(
    cases(most_aliases=5, kinds=("integral", "string", "double"), spread=(3, 6), rows=(24, 12, 40), epochs=(6, 4, 3))
)
def test_mirs_come_and_go_and_every_query_equals_the_oracle(case: Case) -> None:
    check_mirs(case)


@settings(COMMON, max_examples=25)
@given(cases(kinds=("integral",), spread=(3, 6), windows=True, most_aliases=4, most_queries=2, alike=(1, 2)))
def test_queries_with_other_filters_and_windows_share_a_mir(case: Case) -> None:
    check_mirs(case)


@settings(COMMON, max_examples=20)
@given(cases(kinds=("integral", "string"), spread=(3, 6), ttl=True, most_aliases=4, most_queries=2))
def test_a_row_of_a_mir_ends_with_the_first_ttl_of_its_members(case: Case) -> None:
    check_mirs(case)


@settings(COMMON, max_examples=12)
@given(cases(kinds=("integral",), spread=(3, 6), most_aliases=5, most_queries=2, shapes=("cycle", "tree")))
def test_mirs_are_fed_and_looked_up_where_stores_are_left_out(case: Case) -> None:
    check_mirs(fewer_stores(case, searches=False))


# ---------------------------------------------------------------- the rank rule, member by member

COLUMNS = (("id", "bigint"), ("k", "bigint"), ("m", "bigint"))
SCHEMA = pa.schema([(name, pa.int64()) for name, _ in COLUMNS])


def joined(relations: dict[str, str], *equalities: str) -> JoinGraph:
    """`joined({"x": "a", …}, "x.k = y.k", …)`: aliases of streams; out come their ids."""
    sides = [[ColumnRef(*side.split("."), "bigint") for side in text.split(" = ")] for text in equalities]
    columns = tuple(ColumnDef(c, f"`{c}`", t) for c, t in COLUMNS)
    outputs = [ColumnRef(alias, "id", "bigint") for alias in relations]
    return JoinGraph(
        "",
        tuple(Alias(alias, relation, None, columns) for alias, relation in relations.items()),
        tuple(Equality(*pair) for pair in sides),
        tuple(Output(f"{r.alias}_id", r.type, r, str(r), (r,)) for r in outputs),
    )


def sql(graph: JoinGraph) -> str:
    ids = ", ".join(f"{alias.name}.id" for alias in graph.aliases)
    tables = ", ".join(f"{alias.relation} {alias.name}" for alias in graph.aliases)
    return f"SELECT {ids} FROM {tables} WHERE {' AND '.join(map(str, graph.equalities))}"


CHAIN = joined({"x": "a", "y": "b", "z": "c"}, "x.k = y.k", "y.m = z.m")
"""x in front of the MIR of y and z."""
SELF = joined({"x": "a", "y": "a", "z": "a"}, "x.k = y.k", "y.m = z.m")
MIDDLE = joined({"x": "a", "y": "b", "z": "a"}, "x.k = y.k", "y.m = z.m")
ORDERS: Orders = {"x": ("y", "z"), "y": ("x", "z"), "z": ("y", "x")}
YOUNGER = Condition(
    "y.id < z.id",
    (ColumnRef("y", "id", "bigint"), ColumnRef("z", "id", "bigint")),
    Call("<", (ColumnRef("y", "id", "bigint"), ColumnRef("z", "id", "bigint")), "boolean"),
)
TIME = {alias: ColumnRef(alias, "m", "bigint") for alias in "xyz"}
KEEP = Keep((("q", ("y", "z")),), ((0, "k"),))


def rows(epoch: int, count: int = 8) -> pa.Table:
    numbers = range(epoch * count, (epoch + 1) * count)
    columns = [list(numbers), [n % 3 for n in numbers], [n % 2 for n in numbers]]
    return pa.table([pa.array(column, pa.int64()) for column in columns], schema=SCHEMA)


def with_steps(plan: Plan, changed: Callable[[Step], Step]) -> Plan:
    """The plan with other lookups into MIRs."""

    def new(node: Node) -> Node:
        step = node.step if node.step.below is None else changed(node.step)
        return replace(node, step=step, children=tuple(map(new, node.children)))

    return replace(plan, trees=tuple(replace(t, nodes=tuple(map(new, t.nodes))) for t in plan.trees))


def after_each_epoch(
    directory: Path, graph: JoinGraph, plans: Sequence[Plan], tasks: int = 3
) -> Iterator[tuple[Bag, Bag]]:
    """The query's rows, and the oracle's, when every stream brings rows in every epoch."""
    names = sorted({alias.relation for alias in graph.aliases})
    found = bag([])
    with LocalEngine(directory, plans[0], Config(tasks=tasks, sync=False, fan_in=2)) as engine, Oracle() as oracle:
        for epoch, plan in enumerate(plans):
            engine.change(plan)
            found += bag(engine.run({name: rows(epoch) for name in names})["q"])
            oracle.load({name: pa.concat_tables(rows(e) for e in range(epoch + 1)) for name in names})
            yield found, oracle.bag(sql(graph))


def is_right(directory: Path, graph: JoinGraph, plans: Sequence[Plan], tasks: int = 3) -> bool:
    return all(found == expected for found, expected in after_each_epoch(directory, graph, plans, tasks))


def relations_of(graph: JoinGraph) -> dict[str, Relation]:
    return {alias.relation: Relation(alias.relation, COLUMNS) for alias in graph.aliases}


def planned(graph: JoinGraph, ranks: Sequence[str] | None = None) -> Plan:
    relations = relations_of(graph)
    return build_plan({"q": graph}, relations, {"q": ORDERS}, tuple(ranks or relations), [KEEP])


def lookups(plan: Plan) -> list[Step]:
    return [node.step for node in plan.nodes() if node.step.below is not None]


@pytest.mark.parametrize("ranks", list(permutations("abc")), ids="".join)
@pytest.mark.parametrize("tasks", [1, 3])
def test_under_every_ranking_a_driver_sees_a_row_of_a_mir_if_all_its_new_members_rank_below(
    tmp_path: Path, ranks: tuple[str, ...], tasks: int
) -> None:
    plan = planned(CHAIN, ranks)
    (step,) = lookups(plan)
    assert step.below == sum(1 << i for i, name in enumerate("bc") if ranks.index(name) < ranks.index("a"))
    # Only who may see this epoch's rows waits for them.
    assert step.hop == (1 if step.below == 0 else 2)
    assert is_right(tmp_path, CHAIN, [plan] * 4, tasks)


@pytest.mark.parametrize("graph", [SELF, MIDDLE], ids=["one stream", "the driver is a member too"])
@pytest.mark.parametrize("tasks", [1, 3])
def test_aliases_of_one_stream_rank_by_the_order_in_which_they_are_written(
    tmp_path: Path, graph: JoinGraph, tasks: int
) -> None:
    for number, ranks in enumerate(permutations(relations_of(graph))):
        assert is_right(tmp_path / str(number), graph, [planned(graph, ranks)] * 4, tasks)


@pytest.mark.parametrize("below", [0, 1, 2, 3])
def test_a_broken_rank_rule_loses_or_repeats_results(tmp_path: Path, below: int) -> None:
    for number, ranks in enumerate(permutations("abc")):
        plan = planned(CHAIN, ranks)
        broken = with_steps(plan, lambda step: replace(step, below=below, sees_current=bool(below), hop=2, stays=True))
        assert is_right(tmp_path / str(number), CHAIN, [broken] * 3) == (lookups(plan)[0].below == below)


def test_who_does_not_wait_for_this_epochs_rows_misses_them(tmp_path: Path) -> None:
    plan = planned(CHAIN, "bca")
    hasty = with_steps(plan, lambda step: replace(step, hop=1, stays=False))
    assert not is_right(tmp_path, CHAIN, [hasty] * 3)


# ---------------------------------------------------------------- a life of a MIR


def case_of(graph: JoinGraph) -> Kept:
    relations = relations_of(graph)
    query = Query(graph, sql(graph))
    return Kept(Case(relations, dict.fromkeys(relations, SCHEMA), {"q": query}, {}, [], [], 0), Random(0))


def test_a_mir_over_rows_that_are_there_is_filled_in_one_epoch_and_looked_up_from_the_next_on(tmp_path: Path) -> None:
    kept = case_of(CHAIN)
    plans = []
    for epoch in range(6):
        if epoch == 2:
            kept.keep([KEEP], epoch)
        if epoch == 5:
            kept.keep([], epoch)
        plans.append(kept.plan("bca", {"q": ORDERS}, epoch))
    assert [len(lookups(plan)) for plan in plans] == [0, 0, 0, 1, 1, 0]
    assert [any(tree.replays for tree in plan.trees) for plan in plans] == [False, False, True, False, False, False]
    assert is_right(tmp_path / "whole", CHAIN, plans)
    unfilled = [replace(plan, trees=tuple(t for t in plan.trees if t.replays is None)) for plan in plans]
    assert not is_right(tmp_path / "empty", CHAIN, unfilled)


@pytest.mark.parametrize("tasks", [1, 3])
def test_each_use_of_a_mir_has_the_rows_since_its_own_floor(tmp_path: Path, tasks: int) -> None:
    relations = relations_of(CHAIN)
    first = allocate(Layout(), {"q": Wanted(CHAIN, "q")}, relations)
    later = replace(CHAIN, conditions=(YOUNGER,))
    orders = {"q": ORDERS, "p": ORDERS}
    wanted = {
        "q": Wanted(CHAIN, "q", floors=first.floors["q"], live=True, stores=frozenset(first.stores.values())),
        "p": Wanted(later, "p", since="new"),
    }
    keep = Keep((("q", ("y", "z")), ("p", ("y", "z"))), ((0, "k"),))
    second = allocate(first.layout, wanted, relations, epoch=2, version=1, keeps=[keep])
    both = {"q": CHAIN, "p": later}
    assert second.floors["p"] == {"x": 2, "y": 2, "z": 2}
    plans = [plan_on(first, {"q": CHAIN}, orders, tuple("bca"))] * 2
    plans += [plan_on(second, both, orders, tuple("bca"), fills=second.layout.fills(e)) for e in range(2, 6)]
    assert [len(lookups(plan)) for plan in plans] == [0, 0, 0, 1, 1, 1]
    found = {"q": bag([]), "p": bag([])}
    with LocalEngine(tmp_path, plans[-1], Config(tasks=tasks, sync=False, fan_in=2)) as engine, Oracle() as oracle:
        for epoch, plan in enumerate(plans):
            engine.change(plan)
            for name, table in engine.run({name: rows(epoch) for name in "abc"}).items():
                found[name] += bag(table)
            oracle.load({name: pa.concat_tables(rows(e) for e in range(epoch + 1)) for name in "abc"})
            assert found["q"] == oracle.bag(sql(CHAIN))
            if epoch >= 2:
                oracle.load({name: pa.concat_tables(rows(e) for e in range(2, epoch + 1)) for name in "abc"})
                assert found["p"] == oracle.bag(f"{sql(later)} AND y.id < z.id")


def test_a_row_of_a_mir_ends_when_the_first_of_its_members_cannot_be_reached_any_more(tmp_path: Path) -> None:
    second = 1_000_000
    # y is reached by x for 2 s; z, by y, for 1 s, and by x for 3 s.
    windows = (
        Window(TIME["x"], TIME["y"], -2 * second, 2 * second),
        Window(TIME["y"], TIME["z"], -second, second),
    )
    graph = replace(joined({"x": "a", "y": "b", "z": "c"}, "x.k = y.k", "y.k = z.k"), windows=windows)
    timed = {n: Relation(n, COLUMNS, time_column="m", delay_ms=0) for n in "abc"}
    plan = build_plan({"q": graph}, timed, {"q": ORDERS}, tuple("bca"), [KEEP])
    mir = next(store.id for store in plan.stores if store.mir is not None)

    def at(k: int, seconds: float) -> pa.Table:
        columns = [[0], [k], [round(seconds * second)]]
        return pa.table([pa.array(column, pa.int64()) for column in columns], schema=SCHEMA)

    def kept(engine: LocalEngine) -> int:
        return sum(info.rows for info in engine.live.segments.get(mir, ()))

    with LocalEngine(tmp_path, plan, Config(tasks=2, sync=False, max_future=None)) as engine:
        engine.run({"a": at(9, 9), "b": at(1, 10), "c": at(1, 10.5)})
        assert kept(engine) == 1
        everybody = {name: at(ord(name), 11.999) for name in "abc"}
        engine.run(everybody)
        # The watermark is 1 ms short of y's 12 s.
        assert engine.run({"a": at(1, 12)})["q"].num_rows == 1
        assert kept(engine) == 1
        engine.run({name: at(ord(name), 12) for name in "abc"})
        engine.run({})
        assert kept(engine) == 0


def test_a_mir_holds_the_sub_join_once_and_goes_with_its_plan(tmp_path: Path) -> None:
    plan, without = planned(CHAIN), build_plan({"q": CHAIN}, relations_of(CHAIN), {"q": ORDERS}, tuple("abc"))
    mir = next(store.id for store in plan.stores if store.mir is not None)
    with LocalEngine(tmp_path, plan, Config(tasks=2, sync=False, fan_in=2)) as engine, Oracle() as oracle:
        for epoch in range(5):
            engine.run({name: rows(epoch) for name in "abc"})
            tables = {name: pa.concat_tables(rows(e) for e in range(epoch + 1)) for name in "abc"}
            oracle.load(tables)
            state = state_tables(engine)[mir]
            expected = oracle.bag("SELECT b.id, c.id FROM b, c WHERE b.m = c.m")
            assert bag(state.select(["0.id", "1.id"])) == expected
        assert any(info.tier for info in engine.live.segments[mir]), "nothing was merged"
        engine.change(without)
        engine.run({})
        assert mir not in engine.live.segments


def test_a_layout_with_mirs_survives_json() -> None:
    kept = case_of(CHAIN)
    kept.keep([KEEP], 3)
    assert Layout.from_json(kept.layout.to_json()) == kept.layout
    plan = kept.plan("abc", {"q": ORDERS}, 3)
    assert Plan.from_json(plan.to_json()) == plan
    assert kept.layout.fills(3) == {kept.layout.mirs[0].id}
    assert not kept.layout.fills(4)


def test_an_epoch_that_dies_while_it_feeds_a_mir_leaves_nothing_that_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = case_of(CHAIN)
    plans = [kept.plan("bca", {"q": ORDERS}, 0)]
    kept.keep([KEEP], 1)
    plans += [kept.plan("bca", {"q": ORDERS}, epoch) for epoch in range(1, 4)]

    class Died(Exception):
        pass

    def die(point: str, epoch: int) -> None:
        if point == "task.feed" and len(fed) < epoch:
            fed.append(point)
            raise Died

    fed: list[str] = []
    found = bag([])
    monkeypatch.setattr("plait.runtime.task.join_task.reached", die)
    for epoch, plan in enumerate(plans):
        while True:
            with LocalEngine(tmp_path, plan, Config(tasks=2, sync=False)) as engine:
                try:
                    found += bag(engine.run({name: rows(epoch) for name in "abc"})["q"])
                    break
                except Died:
                    continue
    assert len(fed) == 3
    with Oracle() as oracle:
        oracle.load({name: pa.concat_tables(rows(e) for e in range(len(plans))) for name in "abc"})
        assert found == oracle.bag(sql(CHAIN))


def test_a_planner_fills_a_mir_once_and_goes_on_choosing_orders(tmp_path: Path) -> None:
    relations, config = relations_of(CHAIN), Config(tasks=2, sync=False, replan_epochs=1)
    wanted = {"q": Wanted(CHAIN, "q")}
    before = allocate(Layout(), wanted, relations)
    found = bag([])
    lives = {"q": replace(wanted["q"], floors=before.floors["q"], live=True)}
    after = allocate(before.layout, lives, relations, epoch=2, version=1, keeps=[KEEP])
    planners = [
        Planner({"q": CHAIN}, relations, config, before, orders={"q": ORDERS}),
        Planner({"q": CHAIN}, relations, config, after, orders={"q": ORDERS}, fills=after.layout.fills(2)),
    ]
    filled = []
    for first, planner in zip((0, 2), planners, strict=True):
        with LocalEngine(tmp_path, planner.plan, config, planner=planner) as engine, Oracle() as oracle:
            for epoch in range(first, first + (2, 5)[first > 0]):
                filled.append(any(tree.replays for tree in engine.plan.trees))
                found += bag(engine.run({name: rows(epoch) for name in "abc"})["q"])
                oracle.load({name: pa.concat_tables(rows(e) for e in range(epoch + 1)) for name in "abc"})
                assert found == oracle.bag(sql(CHAIN))
    assert filled == [False, False, True, False, False, False, False]
    assert lookups(planners[1].plan)


def test_a_checkpoint_with_a_mir_is_sound_and_says_who_uses_it(tmp_path: Path) -> None:
    window = replace(CHAIN, windows=(Window(TIME["x"], TIME["y"], -10, 10), Window(TIME["y"], TIME["z"], -10, 10)))
    timed = {n: Relation(n, COLUMNS, time_column="m", delay_ms=0) for n in "abc"}
    base = allocate(Layout(), {"q": Wanted(window, "q")}, timed, keeps=[KEEP])
    mir = base.layout.mirs[0].id
    plan = plan_on(base, {"q": window}, {"q": ORDERS}, tuple("bca"))
    entry = QueryEntry("q", "q", "", "", ("q",), "now", "append", dict(base.floors), 0, 0)
    catalog = Catalog(version=0, queries={"q": entry}, layout=base.layout)
    with LocalEngine(tmp_path, plan, Config(tasks=2, sync=False, fan_in=2)) as engine:
        catalog_versions.put(engine.checkpoint.files, 0, catalog.to_json())
        for epoch in range(5):
            engine.run({name: rows(epoch) for name in "abc"})
    inspection = Inspection(str(tmp_path))
    assert list(inspection.findings()) == []
    assert inspection.catalog()["stores"][mir]["joins"] == ["b", "c"]
    assert inspection.usage(mir).readers == {"q.y": 0, "q.z": 0}
    assert mir in {store.store for store in inspection.report().stores}
