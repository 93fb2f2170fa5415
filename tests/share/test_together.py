"""Orders chosen for all queries together: shared beginnings are worth a detour, and only then."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from plait.config import Config
from plait.errors import ConfigError
from plait.order.cost import Coefficients
from plait.order.orders import Orders, fixed
from plait.query.graph import JoinGraph
from plait.query.plan import Plan
from plait.share.planner import Planner
from plait.share.probe_trees import build_plan
from plait.share.step_cost import Probe, Standing
from plait.share.together import InForce, RunningCost, together
from plait.testing import LocalEngine
from tests.share.streams import joined, rows, streams


def nodes(graphs: Mapping[str, JoinGraph], orders: Mapping[str, Orders], names: str) -> int:
    plan = build_plan(graphs, streams(names), orders, tuple(names))
    return probes(plan)


def probes(plan: Plan) -> int:
    """Probes of all trees."""
    return sum(1 for tree in plan.trees for top in tree.nodes for _ in top.walk())


ALONE = {
    "one": joined("a.k = b.k", "b.k = c.k"),
    "two": joined("a.k = b.k", "b.k = d.k"),
}


def test_queries_that_nothing_is_known_of_begin_with_what_they_have_in_common() -> None:
    orders = {
        "one": {"a": ("c", "b"), "b": ("c", "a"), "c": ("a", "b")},
        "two": {"a": ("d", "b"), "b": ("d", "a"), "d": ("b", "a")},
    }
    found = together(ALONE, {}, InForce(orders), Coefficients(), tasks=1, seconds=5, mirs=False)
    assert found.cost < found.before
    # New rows of a probe b for both, and those of b probe a.
    assert {name: (of["a"][0], of["b"][0]) for name, of in found.orders.items()} == {
        "one": ("b", "a"),
        "two": ("b", "a"),
    }
    assert nodes(ALONE, found.orders, "abcd") < nodes(ALONE, orders, "abcd")


def test_orders_that_are_the_best_stay() -> None:
    first = together(
        ALONE, {}, InForce({n: fixed(g) for n, g in ALONE.items()}), Coefficients(), tasks=1, seconds=5, mirs=False
    )
    again = together(ALONE, {}, InForce(first.orders), Coefficients(), tasks=1, seconds=5, mirs=False)
    assert again.orders == first.orders
    assert again.cost == pytest.approx(again.before)


def test_without_time_there_are_orders_all_the_same() -> None:
    orders = {n: fixed(g) for n, g in ALONE.items()}
    found = together(ALONE, {}, InForce(orders), Coefficients(), tasks=2, seconds=0.0, mirs=False)
    assert found.cost <= found.before
    for name, graph in ALONE.items():
        assert {d: sorted([d, *o]) for d, o in found.orders[name].items()} == {
            a.name: sorted(b.name for b in graph.aliases) for a in graph.aliases
        }


@pytest.mark.parametrize("tasks", [1, 2])
def test_tuples_are_never_sent_where_they_carry_no_key_not_even_within_one_task(tasks: int) -> None:
    cost = RunningCost(Coefficients(), parallelism=tasks)
    routed, broadcast = (
        cost.step(Probe(1, 1e6, 1e6, 1e6, routed, frozenset("k"), None), Standing()) for routed in (True, False)
    )
    # As many tuples would find as many rows; but no plan can make that probe.
    assert broadcast.cost > 10 * routed.cost


def test_a_setting_that_is_not_known_lists_those_that_are() -> None:
    with pytest.raises(ConfigError) as told:
        Config(sharing="everything")
    assert "naive, ilp" in f"{told.value.remedy}"


def run(tmp_path: Path, sharing: str) -> Planner:
    """Three queries over four streams; c and d are so selective that each query by itself begins with them."""
    graphs = {
        "one": joined("a.k = b.k", "b.k = c.k"),
        "two": joined("a.k = b.k", "b.k = d.k"),
        "both": joined("a.k = b.k", "b.k = c.k", "c.k = d.k"),
    }
    config = Config(tasks=1, sync=False, replan_epochs=2, sharing=sharing, sharing_seconds=5)
    planner = Planner(graphs, streams("abcd"), config)
    with LocalEngine(tmp_path, planner.plan, config, planner=planner) as engine:
        for epoch in range(6):
            keys = range(200 * epoch, 200 * epoch + 200)
            few = [k for k in keys if k % 3 == 0]
            added = engine.run({"a": rows(*keys), "b": rows(*keys), "c": rows(*few), "d": rows(*few)})
            assert {q: t.num_rows for q, t in added.items()} == dict.fromkeys(graphs, len(few))
    return planner


def test_an_engine_with_shared_orders_gives_the_same_rows_with_fewer_probes(tmp_path: Path) -> None:
    naive, ilp = run(tmp_path / "naive", "naive"), run(tmp_path / "ilp", "ilp")
    assert ilp.failures == 0
    assert probes(ilp.plan) < probes(naive.plan)
