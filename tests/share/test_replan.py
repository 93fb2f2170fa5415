"""The planner: when it switches and why, when it does not, and that bad statistics leave the last good plan alone."""

from __future__ import annotations

import json
import math
import random
from collections import deque
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plait.config import DRIVER_POLICIES, Config
from plait.order.orders import fixed
from plait.query.observed import EdgeCount, Observed
from plait.share.planner import SWITCHES_KEPT, Planner
from plait.share.probe_trees import build_plan
from plait.share.replan import MOST_PLANNED, Statistics, replan
from plait.stats.counters import Period
from plait.testing import Clock, LocalEngine
from tests.share.streams import joined, observed, rows, streams

STAR = joined("a.k = b.k", "b.k = c.k")
SECOND = 1_000_000
EVEN = {"a": 0.5, "b": 0.5, "c": 0.5}
C_DROPS = {"a": 0.5, "b": 0.9, "c": 0.1}
B_DROPS = {"a": 0.5, "b": 0.1, "c": 0.9}


def planner_of(names: str = "abc", **config: Any) -> Planner:
    given = {"replan_epochs": 1, "cost_variant": "no_smoothing", "driver_policy": "registration", **config}
    return Planner({"q": STAR}, streams(names), Config(**given))


def show(planner: Planner, epoch: int, gamma: dict[str, float], **more: Any) -> bool:
    return planner.observe(observed(planner.plan, epoch, gamma, **more), float(epoch))


# ---------------------------------------------------------------- switching


def test_the_first_plan_is_the_written_order() -> None:
    planner = planner_of()
    assert planner.orders == {"q": fixed(STAR)}
    assert planner.plan == build_plan({"q": STAR}, streams("abc"), {"q": fixed(STAR)}, tuple("abc"))
    assert planner.said == "no period has ended yet"


def test_a_selectivity_that_flips_turns_the_order_round_and_back() -> None:
    planner = planner_of()
    assert show(planner, 1, C_DROPS)
    assert planner.orders["q"]["a"] == ("c", "b")
    assert dict(planner.plan.queries[0].orders)["a"] == ("c", "b")
    assert not show(planner, 2, C_DROPS)
    assert show(planner, 3, B_DROPS)
    assert planner.orders["q"]["a"] == ("b", "c")
    # b and c find most in a's company in whatever order: what drops less comes last for them, too.
    assert planner.orders["q"]["b"] == ("a", "c")


def test_a_switch_is_recorded_with_both_orders_their_costs_and_the_reason() -> None:
    planner = planner_of(replan_gain=0.01)
    show(planner, 1, C_DROPS)
    first = next(s for s in planner.switches if s.driver == "a")
    assert (first.epoch, first.query, first.old, first.new) == (1, "q", ("b", "c"), ("c", "b"))
    assert first.tipped == "these are the first statistics"
    # One lookup for every key and one for what the first probe leaves: 1.9 against 1.1.
    assert first.old_ns / first.new_ns == pytest.approx(1.9 / 1.1, rel=0.01)
    show(planner, 2, {**C_DROPS, "c": 0.99})
    second = [s for s in planner.switches if s.driver == "a"][-1]
    assert (second.epoch, second.old, second.new) == (2, ("c", "b"), ("b", "c"))
    assert second.tipped == "γ(a → c) goes from 0.1 to 0.99"
    assert second.new_ns < second.old_ns
    assert str(second).startswith("after epoch 2: q.a → b → c instead of c → b: ")
    assert str(second).endswith("% less), because γ(a → c) goes from 0.1 to 0.99")


def test_a_store_that_grows_dear_is_named_as_the_reason() -> None:
    planner = planner_of()
    show(planner, 1, {"a": 0.5, "b": 0.55, "c": 0.5})
    before = planner.orders["q"]["a"]
    # As selective as before and with as many keys, but a hundred thousand rows of each: far to gallop.
    show(planner, 2, {"a": 0.5, "b": 0.55, "c": 0.5}, size={before[0]: 10**8})
    assert planner.orders["q"]["a"] == tuple(reversed(before))
    switch = next(s for s in planner.switches if s.driver == "a" and s.epoch == 2)
    assert f"{before[0]}[k]" in switch.tipped


def test_noise_does_not_make_orders_flap() -> None:
    def switches(gain: float) -> int:
        planner, choose = planner_of(replan_gain=gain), random.Random(3)
        for epoch in range(1, 40):
            show(planner, epoch, {n: 0.5 + choose.uniform(-0.02, 0.02) for n in "abc"})
        return len(planner.switches)

    assert switches(0.05) == 0
    # Without hysteresis it would: the test can fail.
    assert switches(0.0) > 10


def test_a_gain_below_the_threshold_is_not_taken() -> None:
    # b 0.5, c 0.4: 1.5 lookups against 1.4, a gain of 6.7 %.
    rates = {"a": 0.5, "b": 0.5, "c": 0.4}
    tight, loose = planner_of(replan_gain=0.08), planner_of(replan_gain=0.05)
    assert not show(tight, 1, rates)
    assert show(loose, 1, rates)
    assert tight.said == "orders are kept after epoch 1: no other is cheaper by 8%"
    assert "replaced after epoch 1" in loose.said


@pytest.mark.parametrize("policy", [p for p in DRIVER_POLICIES if p != "round_robin"])
def test_when_nothing_changes_the_plan_is_the_same_object(policy: str) -> None:
    planner = planner_of(driver_policy=policy)
    show(planner, 1, C_DROPS)
    show(planner, 2, C_DROPS)
    settled = planner.plan
    for epoch in range(3, 12):
        assert not show(planner, epoch, C_DROPS)
        assert planner.plan is settled


def test_a_stream_no_query_reads_does_not_make_the_plan_new() -> None:
    planner = planner_of("abcx")
    first = planner.plan
    assert not show(planner, 1, EVEN)
    assert planner.plan is first


def test_round_robin_makes_a_new_plan_with_the_same_orders() -> None:
    planner = planner_of(driver_policy="round_robin")
    rankings = []
    for epoch in range(1, 7):
        show(planner, epoch, EVEN)
        rankings.append(planner.plan.ranks)
    assert rankings[:3] == rankings[3:]
    assert sorted(r[0] for r in rankings[:3]) == ["a", "b", "c"]
    assert not planner.switches


def test_stores_inputs_and_edges_stay_through_every_switch() -> None:
    planner, choose = planner_of(replan_gain=0.0, driver_policy="output_rate"), random.Random(1)
    first, seen = planner.plan, set()
    for epoch in range(1, 20):
        show(planner, epoch, {n: choose.random() for n in "abc"})
        seen.add(planner.plan.digest)
        assert (planner.plan.inputs, planner.plan.stores) == (first.inputs, first.stores)
    assert len(seen) > 3


def test_smoothing_waits_for_a_trend_where_the_last_value_would_be_believed() -> None:
    smooth, last = planner_of(cost_variant="full"), planner_of(cost_variant="no_smoothing")
    for epoch in range(1, 12):
        for planner in (smooth, last):
            show(planner, epoch, {"a": 0.5, "b": 0.3, "c": 0.5})
    # One odd period: the fitted series has been flat so far.
    assert show(last, 12, {"a": 0.5, "b": 0.8, "c": 0.5})
    for _ in range(3):
        values = smooth.history.next_values()
        assert values["γ", "q", "a", "b"] == pytest.approx(0.3, abs=0.01)
    assert smooth.orders["q"]["a"] == ("b", "c")


def test_old_switches_are_forgotten() -> None:
    planner = planner_of()
    for epoch in range(2 * SWITCHES_KEPT):
        show(planner, epoch, C_DROPS if epoch % 2 else B_DROPS)
    assert len(planner.switches) == SWITCHES_KEPT
    assert planner.switches[-1].epoch == 2 * SWITCHES_KEPT - 1


@pytest.mark.parametrize("orderer", ["greedy", "selectivity_first"])
def test_heuristics_are_taken_at_their_word(orderer: str) -> None:
    planner = planner_of(orderer=orderer, replan_gain=1.0)
    size = {"a": 1000, "b": 10**6, "c": 1000}
    show(planner, 1, {"a": 0.5, "b": 0.5, "c": 0.5}, size=size)
    # The same share of a stream a thousand times larger is more selective, and dearer to look up in.
    assert planner.orders["q"]["a"] == (("c", "b") if orderer == "greedy" else ("b", "c"))
    show(planner, 2, {"a": 0.5, "b": 0.5, "c": 0.5}, size={**size, "b": 10, "c": 10**6})
    assert planner.orders["q"]["a"] == (("b", "c") if orderer == "greedy" else ("c", "b"))


def test_a_decision_follows_from_what_it_is_given_and_changes_none_of_it() -> None:
    planner = planner_of()
    shown = observed(planner.plan, 1, C_DROPS)
    period = Period()
    period.add(shown)
    planner.history.close(period, planner.catalog.joins, planner.plan)
    values = planner.history.next_values()
    statistics = Statistics(1, planner.history, values, {}, planner.coefficients)
    before = deepcopy((planner.layout.orders, planner.layout.ranks, values, planner.history.series))
    first, second = (replan(planner.catalog, planner.layout, statistics, planner.config) for _ in range(2))
    assert (first.layout.orders, first.switches, first.said) == (second.layout.orders, second.switches, second.said)
    assert first.layout.orders["q"]["a"] == ("c", "b")
    assert first.layout.plan == second.layout.plan != planner.plan
    assert first.basis == values
    assert (planner.layout.orders, planner.layout.ranks, values, planner.history.series) == before
    # Nothing else is better now: the layout is the very same.
    again = replan(planner.catalog, first.layout, replace(statistics, basis=first.basis), planner.config)
    assert again.layout is first.layout
    assert not again.switches


# ---------------------------------------------------------------- periods


def test_a_period_is_t_epochs_and_only_its_last_is_sampled() -> None:
    planner = planner_of(replan_epochs=3)
    asked = []
    for epoch in range(1, 7):
        asked.append(len(planner.samples))
        changed = show(planner, epoch, C_DROPS)
        assert changed == (epoch == 3)
    assert asked == [0, 0, 3] * 2
    assert planner.history.last.epochs == 3


@pytest.mark.parametrize("start", [0.0, 1000.0])
def test_a_period_can_be_seconds(start: float) -> None:
    planner = planner_of(replan_seconds=10.0, replan_epochs=1)
    assert planner.samples
    changed = [
        planner.observe(observed(planner.plan, epoch, C_DROPS), start + at)
        for epoch, at in enumerate((0.0, 4.0, 9.9, 10.0, 12.0))
    ]
    assert changed == [False, False, False, True, False]


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"replan_epochs": 0}, "replan_epochs = 0"),
        ({"replan_seconds": 0.0}, "replan_seconds = 0"),
        ({"orderer": "fixed"}, "orderer = fixed"),
    ],
)
def test_a_planner_told_to_keep_its_orders_does_so_and_says_so(config: dict[str, Any], reason: str) -> None:
    planner = planner_of(**config)
    first = planner.plan
    assert planner.said == f"orders are kept: {reason}"
    for epoch in range(1, 9):
        assert not planner.samples
        assert not show(planner, epoch, C_DROPS)
    assert planner.plan is first
    assert planner.history.series == {}


def test_fixed_orders_can_have_ranks_that_change() -> None:
    planner = planner_of(orderer="fixed", driver_policy="round_robin")
    assert planner.samples
    assert show(planner, 1, C_DROPS)
    assert planner.orders == {"q": fixed(STAR)}


def test_one_period_of_history_is_enough() -> None:
    planner = planner_of(history_periods=1, cost_variant="full")
    assert show(planner, 1, C_DROPS)
    assert show(planner, 2, B_DROPS)
    assert planner.orders["q"]["a"] == ("b", "c")
    assert {len(s) for s in planner.history.series.values()} == {1}


def test_an_input_that_was_silent_when_it_was_to_be_sampled_is_sampled_as_soon_as_it_is_back() -> None:
    planner = planner_of(replan_epochs=3)
    edges = {source.relation: source.edges[0].id for source in planner.plan.inputs}
    for epoch in range(1, 4):
        quiet = observed(planner.plan, epoch, C_DROPS)
        quiet.samples = [s for s in quiet.samples if s.edge != edges["b"]] if epoch == 3 else []
        planner.observe(quiet, float(epoch))
    assert planner.samples == {edges["b"]}
    back = observed(planner.plan, 4, C_DROPS)
    back.samples = [s for s in back.samples if s.edge == edges["b"]]
    planner.observe(back, 4.0)
    assert planner.samples == frozenset()


def test_orders_of_very_many_streams_are_kept_and_the_planner_says_so() -> None:
    names = "abcdefghijklmnop"
    many = joined(*(f"a.k = {n}.k" for n in names[1:]))
    planner = Planner({"q": many}, streams(names), Config(replan_epochs=1))
    arrived = Observed(1, dict.fromkeys(names, 10))
    assert not planner.observe(arrived, 1.0)
    assert f"q joins {len(names)} streams, and orders are chosen for up to {MOST_PLANNED}" in planner.said
    assert planner.failures == 0


# ---------------------------------------------------------------- bad input


def settled() -> Planner:
    """After a switch, so that the last good plan is not the first."""
    planner = planner_of(cost_variant="full")
    assert show(planner, 1, C_DROPS)
    return planner


@pytest.mark.parametrize("rows_in", [{}, {"a": 0, "b": 0, "c": 0}])
def test_an_empty_period_keeps_the_last_good_plan_and_says_so(rows_in: dict[str, int]) -> None:
    planner = settled()
    good = planner.plan
    assert not planner.observe(Observed(2, rows_in), 2.0)
    assert planner.plan is good
    assert planner.said == "the plan is kept after epoch 2: nothing arrived in this period"
    # And goes on afterwards.
    assert show(planner, 3, B_DROPS) or show(planner, 4, B_DROPS)


def test_streams_never_seen_together_keep_the_plan_and_say_so() -> None:
    planner = planner_of()
    good = planner.plan
    only_a = observed(planner.plan, 1, C_DROPS)
    only_a.rows_in = {"a": 5, "b": 0, "c": 0}
    only_a.samples, only_a.edges = only_a.samples[:1], {}
    assert not planner.observe(only_a, 1.0)
    assert planner.plan is good
    assert planner.said == "orders are kept after epoch 1: some streams of q have not been seen together yet"


def test_a_stream_that_falls_silent_keeps_its_last_statistics() -> None:
    planner = settled()
    good = planner.plan
    for epoch in range(2, 8):
        quiet = observed(planner.plan, epoch, C_DROPS)
        quiet.rows_in["a"] = 0
        quiet.samples = [s for s in quiet.samples if s.stores[0][0] != "a[k]"]
        for node in dict(planner.plan.queries[0].nodes)["a"]:
            del quiet.edges[node]
        assert not planner.observe(quiet, float(epoch))
    assert planner.plan is good
    assert planner.failures == 0


def test_zero_queries_on_every_edge_keep_the_last_good_plan() -> None:
    planner = settled()
    good = planner.plan
    nothing = observed(planner.plan, 2, C_DROPS)
    nothing.edges = {node: EdgeCount() for node in nothing.edges}
    for sample in nothing.samples:
        sample.patterns = {}
    assert not planner.observe(nothing, 2.0)
    assert planner.plan is good
    assert planner.failures == 0
    first = planner_of()
    nothing.epoch = 1
    assert not first.observe(nothing, 1.0)
    assert "not been seen together" in first.said


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("variant", ["full", "no_smoothing"])
def test_a_forecast_that_is_no_number_keeps_the_last_good_plan_and_says_so(bad: float, variant: str) -> None:
    planner = planner_of(cost_variant=variant)
    assert show(planner, 1, C_DROPS)
    good = planner.plan
    planner.history.series["κ", "gone[k]"] = deque([bad])
    assert not show(planner, 2, B_DROPS)
    assert planner.plan is good
    assert planner.said == "the plan is kept after epoch 2: a forecast is not a finite number"
    assert planner.failures == 0
    json.dumps(planner.report().json)
    del planner.history.series["κ", "gone[k]"]
    assert show(planner, 3, B_DROPS) or show(planner, 4, B_DROPS)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_numbers_that_are_none_among_the_observed_do_no_harm(bad: float) -> None:
    planner = settled()
    good = planner.plan
    for epoch in range(2, 8):
        shown = observed(planner.plan, epoch, C_DROPS)
        for count in shown.stores.values():
            count.keys = bad
        planner.observe(shown, float(epoch))
    assert planner.plan is good
    assert planner.failures == 0


def test_an_optimiser_that_fails_keeps_the_last_good_plan_and_says_so() -> None:
    planner = settled()
    good, orders = planner.plan, planner.orders
    # A sample of stores that are not those of the plan, with counts that do not fit.
    broken = observed(planner.plan, 2, B_DROPS)
    for sample in broken.samples:
        sample.patterns = {2: [1]}
    assert not planner.observe(broken, 2.0)
    assert (planner.plan, planner.orders) == (good, orders)
    assert planner.plan is good
    assert planner.failures == 1
    assert planner.said.startswith("the plan is kept after epoch 2: the optimiser failed (IndexError: ")


def test_a_store_emptied_by_expiry_has_no_keys_and_the_plan_stays(tmp_path: Path) -> None:
    planner = Planner(
        {"q": STAR}, streams("abc", ttl_us=10 * SECOND), Config(replan_epochs=1, driver_policy="registration")
    )
    clock = Clock()
    with LocalEngine(tmp_path, planner.plan, Config(tasks=1, sync=False), clock=clock, planner=planner) as engine:
        for _ in range(5):
            engine.run({"a": rows(*range(50)), "b": rows(*range(40)), "c": rows(*range(4))})
        good = planner.plan
        assert planner.history.latest(("κ", "a[k]"), -1) == 50
        clock.advance(11)
        engine.run({})
        assert planner.said == "the plan is kept after epoch 5: nothing arrived in this period"
        assert planner.plan is good
        for _ in range(3):
            engine.run({"b": rows(1, 2)})
        assert planner.history.latest(("κ", "a[k]"), -1) == 0
        assert planner.history.latest(("rows", "a[k]"), -1) == 0
        assert planner.failures == 0
        assert planner.plan is good
        assert engine.progress[-1]["optimiser"]["said"] == planner.said


# ---------------------------------------------------------------- on rows


def test_the_engine_follows_the_planner_when_the_data_drifts(tmp_path: Path) -> None:
    config = Config(tasks=1, sync=False, replan_epochs=1, history_periods=1)
    planner = Planner({"q": STAR}, streams("abc"), config)
    orders = []
    with LocalEngine(tmp_path, planner.plan, config, planner=planner) as engine:
        for turn in range(8):
            new = range(1000 * turn, 1000 * turn + 100)
            # Of a's next keys b has all and c a tenth; later it is the other way round.
            sizes = (100, 10) if turn < 4 else (10, 100)
            engine.run({n: rows(*new[:size], *range(-100, -size)) for n, size in zip("bc", sizes, strict=True)})
            engine.run({"a": rows(*new)})
            orders.append(tuple(engine.progress[-1]["orders"]["q"]["a"]))
            assert engine.plan is planner.plan
    # The turn after the data has changed the order has, too.
    assert orders[1:4] == [("c", "b")] * 3
    assert orders[5:] == [("b", "c")] * 3
    told = [s for s in engine.progress[-1]["optimiser"]["switches"] if s["driver"] == "a"]
    assert [(s["old"], s["new"]) for s in told] == [(("b", "c"), ("c", "b")), (("c", "b"), ("b", "c"))]
    assert "because γ(a → " in told[1]["text"]


def test_streams_that_take_turns_are_sampled_all_the_same(tmp_path: Path) -> None:
    """Arrivals alternate with the same period as sampling: no stream may be left out for ever."""
    config = Config(tasks=1, sync=False, replan_epochs=2)
    planner = Planner({"q": STAR}, streams("abc"), config)
    with LocalEngine(tmp_path, planner.plan, config, planner=planner) as engine:
        for turn in range(6):
            new = range(100 * turn, 100 * turn + 100)
            engine.run({"b": rows(*new), "c": rows(*new[:10])})
            engine.run({"a": rows(*new)})
    assert "not been seen together" not in planner.said
    assert planner.orders["q"]["a"] == ("c", "b")


# ---------------------------------------------------------------- what it reports


def test_the_report_is_json_and_holds_estimates_of_every_probe() -> None:
    planner = settled()
    show(planner, 2, C_DROPS)
    report = json.loads(json.dumps(planner.report().json))
    assert (report["orderer"], report["policy"], report["failures"]) == ("dp_pick", "registration", 0)
    assert [s["text"] for s in report["switches"]] == [str(s) for s in planner.switches]
    probes = {(e["driver"], e["target"]): e for e in report["estimates"]}
    assert set(probes) == {(x, y) for x in "abc" for y in "abc" if x != y}
    assert probes["a", "c"]["gamma"] == pytest.approx(0.1, abs=0.01)
    assert probes["a", "c"]["gamma_counted"] == pytest.approx(0.1, abs=0.01)
    assert probes["a", "b"]["gamma_counted"] == pytest.approx(0.9, abs=0.01)


def test_right_after_a_switch_no_probe_is_shown_beside_the_counts_of_another() -> None:
    planner = settled()
    for probe in planner.estimates():
        counted = probe.gamma_counted
        assert counted is None or counted == pytest.approx(C_DROPS[probe.target], abs=0.01), probe


# ---------------------------------------------------------------- after a restart


def test_a_new_planner_goes_on_from_what_the_old_one_learnt() -> None:
    old = settled()
    learnt = json.loads(json.dumps(old.memory()))
    assert old.memory() is None, "nothing is new"
    again = planner_of(cost_variant="full")
    again.recall(learnt)
    assert (again.plan, again.orders, again.coefficients) == (old.plan, old.orders, old.coefficients)
    assert again.history.series == old.history.series
    assert again.said == "orders are those of the last run"
    assert not show(again, 2, C_DROPS)
    assert old.memory() is None


@pytest.mark.parametrize(
    "memory",
    [
        {},
        {"orders": None},
        {"ranks": 7},
        {"coefficients": None},
    ],
)
def test_what_cannot_be_recalled_is_not_used_and_the_planner_says_so(memory: dict[str, Any]) -> None:
    whole = json.loads(json.dumps(settled().memory()))
    planner = planner_of()
    first = planner.plan
    planner.recall({**whole, **memory} if memory else {})
    assert planner.plan is first
    assert planner.said.startswith("what was learnt before cannot be used (")


@pytest.mark.parametrize("orders", [{"q": {"a": ["b", "b"], "b": ["a", "c"], "c": ["a", "b"]}}, {"other": {}}])
def test_orders_of_other_queries_are_not_recalled(orders: dict[str, Any]) -> None:
    whole = json.loads(json.dumps(settled().memory()))
    planner = planner_of()
    planner.recall({**whole, "orders": orders})
    assert planner.orders == {"q": fixed(STAR)}


def test_orders_that_are_to_stay_fixed_are_not_those_of_an_earlier_run() -> None:
    learnt = settled().memory()
    assert learnt is not None
    planner = planner_of(orderer="fixed")
    planner.recall(learnt)
    assert planner.orders == {"q": fixed(STAR)}


def test_fixed_orders_beside_ranks_that_change_are_called_fixed() -> None:
    planner = planner_of(orderer="fixed", driver_policy="round_robin")
    for epoch in range(1, 4):
        show(planner, epoch, C_DROPS)
        assert planner.said == "orders are kept: orderer = fixed"
    assert planner.orders == {"q": fixed(STAR)}
