"""Query groups while they run: queries that share too little get trees and stores of their own, and the same rows."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plait.config import Config
from plait.explain import explain
from plait.order.cost import Coefficients
from plait.query.expr import Call, ColumnRef, Expr, Literal
from plait.query.graph import JoinGraph
from plait.share.regroup import GROUP, Known, Regrouped
from plait.testing import state_tables
from tests.oracle import Bag, Oracle, bag
from tests.random_joins import Case, Model, cases
from tests.runtime.test_changes_property import check as check_changes
from tests.runtime.test_rewiring import Wired
from tests.share.streams import joined, rows, streams

# A process that is killed closes no file; here it lives on.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
COMMON = settings(
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
Regroup = Callable[[Known, Regrouped, Callable[[], bool]], Regrouped]
PREDICATES: dict[str, Expr] = {
    f"m = {m}": Call("=", (ColumnRef("", "m", "bigint"), Literal(m, "bigint")), "boolean") for m in range(8)
}


def selecting(m: int) -> JoinGraph:
    """a and b on k, of each the rows with this m."""
    text = f"m = {m}"
    graph = joined("a.k = b.k")
    aliases = tuple(replace(alias, filter=text, condition=PREDICATES[text]) for alias in graph.aliases)
    return replace(graph, aliases=aliases)


def arrivals(seed: int, count: int = 400, keys: int = 8, kinds: int = 4) -> dict[str, pa.Table]:
    draw = random.Random(seed)
    return {name: rows(*[(draw.randrange(keys), draw.randrange(kinds)) for _ in range(count)]) for name in "ab"}


@pytest.fixture
def fixed_prices(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a loaded machine measures must not decide who shares."""
    monkeypatch.setattr(Coefficients, "blended", lambda self, _: self)


def wired(path: Path, graphs: dict[str, JoinGraph], **config: object) -> Wired:
    given = {"tasks": 2, "sync": False, "replan_epochs": 2, "groups": "auto", **config}
    return Wired(path, graphs, streams("ab"), Config(**given), PREDICATES)  # type: ignore[arg-type]


@pytest.mark.parametrize("tasks", [1, 2])
def test_queries_without_common_rows_go_apart_and_give_the_same_rows(
    tmp_path: Path, fixed_prices: None, tasks: int
) -> None:
    graphs = {f"q{m}": selecting(m) for m in range(4)}
    apart, one = wired(tmp_path / "a", graphs, tasks=tasks), wired(tmp_path / "o", graphs, tasks=tasks, groups="one")
    owners: list[int] = []
    for epoch in range(8):
        new = arrivals(epoch)
        mine, its = apart.engine.run(new), one.engine.run(new)
        assert {q: bag(t) for q, t in mine.items()} == {q: bag(t) for q, t in its.items()}, epoch
        owners.append(len({store.owner for store in apart.engine.plan.stores}))
        if epoch == 4:
            stores = {store.id for store in apart.engine.plan.stores}
            apart.again()
            assert {store.id for store in apart.engine.plan.stores} == stores
    assert apart.planner.failures == 0
    assert owners[0] == 1
    # Every query on stores of its own, the shared ones are gone.
    assert sorted({store.owner[: len(GROUP) + 2] for store in apart.engine.plan.stores}) == [
        f"{GROUP}q{m}" for m in range(4)
    ]
    assert {len(tree.members) for tree in apart.engine.plan.trees} == {1}
    report = apart.engine.progress[-1]["optimiser"]["groups"][0]
    assert sorted(queries for _, queries in report["groups"]) == [("q0",), ("q1",), ("q2",), ("q3",)]
    assert report["together_ns"] > report["apart_ns"]
    text = explain(apart.engine.plan, apart.planner.graphs, streams("ab"), "text", apart.planner.report())
    assert "a ⋈ b: q0 (stores of group q0" in text
    apart.engine.close()
    one.engine.close()


def test_a_store_of_a_group_has_the_rows_of_its_queries_only(tmp_path: Path, fixed_prices: None) -> None:
    graphs = {f"q{m}": selecting(m) for m in range(4)}
    of = wired(tmp_path, graphs)
    per_filter: Counter[int] = Counter()
    for epoch in range(8):
        new = arrivals(epoch)
        of.engine.run(new)
        per_filter.update(new["a"].column("m").to_pylist())
    stores = {store.id: store for store in of.engine.plan.stores}
    tables = {id: table for id, table in state_tables(of.engine).items() if id in stores}
    for id, table in tables.items():
        m = int(stores[id].owner.removeprefix(f"{GROUP}q").partition(".")[0])
        if stores[id].relation == "a":
            assert table.num_rows == per_filter[m]
    assert len(tables) == 8
    of.engine.close()


def test_queries_with_the_same_rows_stay_together(tmp_path: Path, fixed_prices: None) -> None:
    graphs = {"q0": selecting(0), "also": selecting(0), "again": selecting(0), "other": selecting(1)}
    of = wired(tmp_path, graphs)
    for epoch in range(8):
        of.engine.run(arrivals(epoch, kinds=2))
    groups = {frozenset(queries) for _, queries in of.engine.progress[-1]["optimiser"]["groups"][0]["groups"]}
    assert groups == {frozenset({"q0", "also", "again"}), frozenset({"other"})}
    of.engine.close()


def test_few_rows_are_no_reason_to_go_apart(tmp_path: Path, fixed_prices: None) -> None:
    """A store costs something however little arrives."""
    of = wired(tmp_path, {f"q{m}": selecting(m) for m in range(4)})
    for epoch in range(6):
        of.engine.run(arrivals(epoch, count=200, keys=100))
    assert {store.owner for store in of.engine.plan.stores} == {""}
    assert "nothing else is cheaper" in of.engine.progress[-1]["optimiser"]["groups"][0]["said"]
    of.engine.close()


def test_with_one_group_everything_is_shared(tmp_path: Path, fixed_prices: None) -> None:
    of = wired(tmp_path, {f"q{m}": selecting(m) for m in range(4)}, groups="one")
    for epoch in range(6):
        of.engine.run(arrivals(epoch))
    assert {store.owner for store in of.engine.plan.stores} == {""}
    assert of.engine.progress[-1]["optimiser"]["groups"] == []
    of.engine.close()


# ---------------------------------------------------------------- whoever is with whom, answers stay


def drawn(choose: random.Random, seen: Counter[str]) -> Regroup:
    """Groups at random: some go apart, some come together, some stay."""

    def regroup(known: Known, before: Regrouped, late: Callable[[], bool]) -> Regrouped:
        joins = [query for group in known.groups.values() for query in group.members]
        if choose.random() < 0.4:
            return replace(before, owners={q: o for q, o in before.owners.items() if q in joins})
        names = ["", f"{GROUP}x", f"{GROUP}y"]
        owners = {query: owner for query in joins if (owner := choose.choice(names))}
        seen["regrouped"] += owners != before.owners
        return Regrouped(owners)

    return regroup


@pytest.mark.parametrize("examples", [20, pytest.param(150, marks=pytest.mark.soak)])
def test_oracle_whoever_is_grouped_with_whom_after_any_epoch(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, examples: int
) -> None:
    seen: Counter[str] = Counter()

    @settings(COMMON, max_examples=examples)
    @given(cases(most_aliases=3, most_queries=2, alike=(1, 2), windows=True, rows=(16, 12), epochs=(6, 4)))
    def check(case: Case) -> None:
        choose = random.Random(case.seed)
        monkeypatch.setattr("plait.share.planner.regroup", drawn(choose, seen))
        config = Config(
            tasks=choose.randint(1, 3), sync=False, max_future=None, replan_epochs=1,
            groups="auto", sharing=choose.choice(("naive", "auto")), sharing_seconds=0.2, fan_in=choose.randint(2, 4),
            snapshot_every=choose.choice((1, 2, 16)), merge_share=choose.choice((0.01, 0.9)),
            compress_above=choose.choice((None, "0")),
        )  # fmt: skip
        of = Wired(tmp_path_factory.mktemp("grouped"), case.graphs, case.relations, config, case.predicates)
        totals: dict[str, Bag] = {name: Counter() for name in case.queries}
        model = Model(case)
        with Oracle() as oracle:
            model.prepare(oracle)
            for number, new in enumerate(case.arrivals):
                if number and choose.random() < 0.2:
                    of.again()
                of.clock.advance(case.clocks[number])
                added = of.engine.run(new)
                model.arrive(oracle, new, of.clock.now_us)
                for name, table in added.items():
                    totals[name] += bag(table)
                    assert totals[name] == oracle.bag(model.sql(name)), (name, number)
                stores = of.engine.plan.stores
                seen["own stores"] += any(store.owner for store in stores)
                seen["builds"] += bool(of.engine.driver.now.catalog.builds)
                seen["failed"] += of.planner.failures
        of.engine.close()

    check()
    assert seen["failed"] == 0
    # Else nothing was tested.
    assert seen["regrouped"] > 20
    assert seen["own stores"] > 20
    assert seen["builds"] > 5


@pytest.mark.parametrize("examples", [8, pytest.param(100, marks=pytest.mark.soak)])
def test_oracle_groups_change_while_queries_come_and_go(monkeypatch: pytest.MonkeyPatch, examples: int) -> None:
    seen: Counter[str] = Counter()

    @settings(COMMON, max_examples=examples)
    @given(
        cases(most_aliases=3, most_queries=3, alike=(1, 2), rows=(24, 16), spread=(6, 3), epochs=(6,)),
        st.integers(0, 2**32 - 1),
    )
    def check(case: Case, seed: int) -> None:
        monkeypatch.setattr("plait.share.planner.regroup", drawn(random.Random(seed), seen))
        check_changes(case, seed, replan_epochs=1, groups="auto")

    check()
    assert seen["regrouped"] > 5
