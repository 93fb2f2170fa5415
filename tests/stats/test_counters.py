"""What a period told, what is forecast from it, and that both are what counting the rows one by one gives."""

from __future__ import annotations

import math
import random
from collections import deque
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from plait.config import Config
from plait.order.cost import Coefficients, driver_view
from plait.order.orders import fixed
from plait.query.expr import Call, ColumnRef, Literal
from plait.query.graph import Alias, Equality, JoinGraph
from plait.query.observed import EdgeCount, KeyCount, Observed, Sample
from plait.share.planner import Planner
from plait.share.probe_trees import build_plan
from plait.stats.counters import History, Period, _sane, gamma_mu, products, spanning
from plait.testing import LocalEngine
from tests.share.streams import joined, observed, rows, streams

STAR = joined("a.k = b.k", "b.k = c.k", "c.k = d.k")
PLAN = build_plan({"q": STAR}, streams("abcd"), {"q": fixed(STAR)}, tuple("abcd"))
RATES = {"a": 0.9, "b": 0.5, "c": 0.2, "d": 0.7}


# ---------------------------------------------------------------- γ and μ of one probe


def test_success_is_keys_that_go_on_over_keys_looked_up_and_matches_are_rows_per_hit() -> None:
    assert gamma_mu(EdgeCount(lookups=10, hits=4, alive=4, rows=12)) == (0.4, 3.0)


def test_checks_count_on_both() -> None:
    # Of 4 hits with 12 rows, 24 tuples were checked, 6 passed, and 2 keys were left.
    assert gamma_mu(EdgeCount(lookups=10, hits=4, alive=2, rows=12, tuples=24, passed=6)) == (0.2, 0.75)


def test_a_probe_without_a_query_tells_nothing_and_one_without_success_no_matches() -> None:
    assert gamma_mu(EdgeCount()) is None
    assert gamma_mu(EdgeCount(lookups=10)) == (0.0, 1.0)


# ---------------------------------------------------------------- a period


def test_epochs_of_a_period_add_up() -> None:
    period = Period()
    for epoch in (1, 2):
        period.add(observed(PLAN, epoch, RATES))
    one = observed(PLAN, 1, RATES)
    assert period.epochs == 2
    assert period.rows_in == dict.fromkeys("abcd", 2000)
    assert period.rows_out == {"q": 20}
    assert {n: (c.lookups, c.alive) for n, c in period.edges.items()} == {
        n: (2 * c.lookups, 2 * c.alive) for n, c in one.edges.items()
    }
    for sample in one.samples:
        mine = period.samples[sample.edge, sample.filters]
        assert mine.tuples == 2 * sample.tuples
        assert mine.patterns == {p: [2 * c for c in counts] for p, counts in sample.patterns.items()}
    assert {(k.keys, k.arrived, k.rows) for k in period.stores.values()} == {(1000, 2000, 1000)}


def test_a_period_leaves_what_it_was_shown_alone() -> None:
    shown, same = observed(PLAN, 1, RATES), observed(PLAN, 1, RATES)
    period = Period()
    period.add(shown)
    period.add(shown)
    assert shown == same


def closed(*periods: dict[str, KeyCount], samples: tuple[Sample, ...] = (), length: int = 60) -> History:
    history = History(length)
    for stores in periods:
        period = Period()
        period.add(Observed(1, stores=stores, samples=list(samples)))
        history.close(period, {}, PLAN)
    return history


# A quarter of the sampled keys were in the store before.
KNOWN = Sample(0, (), (("a[k]", ()), ("b[k]", ())), {0: [50, 0, 0], 1: [20, 20, 0], 2: [25, 0, 25], 3: [5, 5, 5]})


def test_keys_now_are_keys_before_and_fresh_less_expired() -> None:
    history = closed({"a[k]": KeyCount(100, 80)}, {"a[k]": KeyCount(110, 40)}, samples=(KNOWN,))
    assert list(history.series["κ", "a[k]"]) == [100, 110]
    assert list(history.series["κ in", "a[k]"]) == [60, 30]
    assert list(history.series["κ exp", "a[k]"]) == [0, 20]


def test_without_a_sample_every_key_counts_as_fresh() -> None:
    assert list(closed({"b[k]": KeyCount(7, 9)}, samples=(KNOWN,)).series["κ in", "b[k]"]) == [9]


def test_a_series_is_at_most_l_long() -> None:
    history = closed(*({"a[k]": KeyCount(float(i))} for i in range(9)), length=3)
    assert list(history.series["κ", "a[k]"]) == [6, 7, 8]
    history = closed(*({"a[k]": KeyCount(float(i))} for i in range(9)), length=1)
    assert history.next_values()["κ", "a[k]"] == 8


def test_values_that_are_not_finite_do_not_enter_a_series() -> None:
    history = closed(*({"a[k]": KeyCount(v)} for v in (5.0, math.nan, math.inf, 7.0)))
    assert list(history.series["κ", "a[k]"]) == [5, 7]


# ---------------------------------------------------------------- forecasts


def forecast_of(name: tuple[str, ...], *values: float, smoothing: bool = True) -> float:
    history = History(60, smoothing)
    history.series[name] = deque(values)
    return history.next_values()[name]


def test_a_trend_is_followed_and_without_smoothing_the_last_value_is_kept() -> None:
    line = [10.0 * i for i in range(1, 9)]
    assert forecast_of(("κ", "s"), *line) == pytest.approx(90)
    assert forecast_of(("κ", "s"), *line, smoothing=False) == 80


def test_a_success_rate_stays_between_0_and_1() -> None:
    assert forecast_of(("γ", "q", "a", "b"), *(0.6, 0.7, 0.8, 0.9, 1.0)) == 1.0
    assert forecast_of(("γ", "q", "a", "b"), *(0.4, 0.3, 0.2, 0.1, 0.0)) == 0.0
    # Damped: less than the line would give.
    assert 0.5 < forecast_of(("γ", "q", "a", "b"), *(0.1, 0.2, 0.3, 0.4, 0.5)) < 0.6


def test_counts_are_never_forecast_below_0_nor_wilder_than_the_series_has_been() -> None:
    assert forecast_of(("κ", "s"), 100, 60, 20, 5, 1) >= 0
    assert _sane(("κ", "s"), 1e9, [10.0, 12.0]) == 14.0
    assert _sane(("κ", "s"), -1e9, [10.0, 12.0]) == 8.0
    assert _sane(("κ", "s"), math.nan, [10.0, 12.0]) == 12.0


def test_one_value_is_its_own_forecast() -> None:
    assert forecast_of(("μ", "q", "a", "b"), 3.5) == 3.5
    assert forecast_of(("γ", "q", "a", "b"), 0.25) == 0.25


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_poisoned_series_forecasts_from_what_is_sound_in_it(bad: float) -> None:
    assert forecast_of(("κ", "s"), bad, 5.0, 5.0, 5.0, 5.0, 5.0) == 5.0
    assert not math.isfinite(forecast_of(("κ", "s"), bad))


def history_of(**rates: float) -> History:
    history = History(60)
    period = Period()
    period.add(observed(PLAN, 1, {**RATES, **rates}))
    history.close(period, {"q": STAR}, PLAN)
    return history


def test_a_pair_the_plan_probes_is_counted_and_one_it_does_not_is_estimated() -> None:
    history = history_of()
    for one in "abcd":
        for other in "abcd":
            if one != other:
                assert history.latest(("γ", "q", one, other), -1) == pytest.approx(RATES[other], abs=0.002), one + other


def test_without_statistics_there_is_no_forecast() -> None:
    history = History(60)
    assert history.forecast("q", STAR, PLAN, history.next_values()) is None
    history.close(Period(epochs=1), {"q": STAR}, PLAN)
    assert history.forecast("q", STAR, PLAN, history.next_values()) is None


def test_independent_streams_have_no_correlation() -> None:
    history = history_of()
    forecast = history.forecast("q", STAR, PLAN, history.next_values())
    assert forecast is not None
    for driver in "abcd":
        assert forecast.together[driver] == pytest.approx([1.0] * 16, abs=0.03)


def test_every_alias_is_reached_by_a_neighbour_nearest_to_the_driver() -> None:
    chain = joined("a.k = b.k", "b.m = c.m", "c.k = d.k")
    assert spanning(chain, "a") == {"b": "a", "c": "b", "d": "c"}
    assert spanning(chain, "c") == {"b": "c", "d": "c", "a": "b"}
    assert spanning(STAR, "b") == {"a": "b", "c": "b", "d": "b"}


# ---------------------------------------------------------------- against the rows themselves


def forecast_after(tmp_path: Path, join: JoinGraph, epochs: list[dict[str, pa.Table]], **config: object) -> Planner:
    """A planner that has seen these epochs and kept its orders."""
    # Ranks as registered and no gain great enough: the plan stays the one that was counted.
    config = {"replan_epochs": 1, "replan_gain": 1.0, "driver_policy": "registration", **config}
    planner = Planner({"q": join}, streams("abcd"), Config(cost_variant="no_smoothing", **config))
    with LocalEngine(
        tmp_path, planner.plan, Config(tasks=1, sync=False, probe=planner.config.probe), planner=planner
    ) as engine:
        for arrivals in epochs:
            engine.run(arrivals)
    return planner


def alive_by_set(planner: Planner, join: JoinGraph, driver: str) -> dict[frozenset[str], float]:
    values = planner.history.next_values()
    forecast = planner.history.forecast("q", join, planner.plan, values)
    assert forecast is not None
    view = driver_view(join, driver, forecast, Coefficients(), model="factorised")
    return {
        frozenset(n for i, n in enumerate(view.names) if s >> i & 1): view.alive[s]
        for s in range(1 << len(view.names))
        if s >> view.driver & 1
    }


@pytest.mark.parametrize("probe", ["factorised", "iterative"])
def test_oracle_pairs_keys_and_survivors_are_those_of_the_rows(tmp_path: Path, probe: str) -> None:
    choose = random.Random(5)
    state = {"a": [], "b": range(90), "c": [*range(60, 150), *range(60, 150)], "d": range(0, 200, 3)}
    new = [choose.randrange(120) for _ in range(150)]
    first = {n: rows(*keys) for n, keys in state.items()}
    planner = forecast_after(tmp_path, STAR, [first, {"a": rows(*new)}], probe=probe)
    keys = set(new)
    values = planner.history.next_values()
    assert values["keys", "q", "a"] == len(keys)
    assert values["tuples", "q", "a"] == pytest.approx(len(new) / len(keys))
    assert values["κ", "c[k]"] == 90
    assert values["rows", "c[k]"] == 180
    assert values["λ", "a"] == len(new)
    assert values["κ in", "a[k]"] == len(keys)
    found = alive_by_set(planner, STAR, "a")
    for partners, share in found.items():
        inside = [k for k in keys if all(k in set(state[p]) for p in partners if p != "a")]
        counted = sorted(partners - {"a"}) == sorted(planner.orders["q"]["a"][: len(partners) - 1])
        # What was counted is exact; what was sampled has half a key more.
        assert share == pytest.approx(len(inside) / len(keys), abs=1e-9 if counted else 0.02), partners
    assert values["μ", "q", "a", "c"] == 2.0
    assert values["μ", "q", "a", "b"] == 1.0


def of_strict(query: JoinGraph, alias: str) -> JoinGraph:
    """The same with a filter on one alias."""
    aliases = tuple(replace(a, filter="(m > 0)") if a.name == alias else a for a in query.aliases)
    return replace(query, aliases=aliases)


def planned(tmp_path: Path, **graphs: JoinGraph) -> Planner:
    """What is learnt where c has 80 of the 100 keys of a, and a row with m > 0 of 30 of them."""
    positive = Call(">", (ColumnRef("", "m", "bigint"), Literal(0, "bigint")), "boolean")
    planner = Planner(graphs, streams("abcd"), Config(replan_epochs=1))
    config = Config(tasks=1, sync=False)
    with LocalEngine(tmp_path, planner.plan, config, planner=planner, predicates={"(m > 0)": positive}) as engine:
        passing = [(k, 1) for k in range(30)]
        engine.run({"b": rows(*range(100)), "c": rows(*((k, 0) for k in range(80)), *passing), "d": rows(1)})
        engine.run({"a": rows(*range(100))})
    return planner


def test_oracle_an_alias_finds_only_the_rows_that_pass_its_filter(tmp_path: Path) -> None:
    plain = joined("a.k = b.k", "b.k = c.k")
    history = planned(
        tmp_path, plain=plain, strict=of_strict(joined("a.k = b.k", "b.k = c.k", "c.k = d.k"), "c")
    ).history
    found = {q: history.latest(("γ", q, "a", "c"), -1) for q in ("plain", "strict")}
    assert found == {"plain": 0.8, "strict": 0.3}
    assert history.latest(("μ", "strict", "a", "c"), -1) == 1.0
    assert history.latest(("μ", "plain", "a", "c"), -1) == pytest.approx(110 / 80)


def test_queries_of_one_structure_are_counted_as_one_and_get_the_same_orders(tmp_path: Path) -> None:
    plain, strict = joined("a.k = b.k", "b.k = c.k"), of_strict(joined("c.k = b.k", "b.k = a.k"), "c")
    planner = planned(tmp_path, plain=plain, strict=strict)
    assert planner.history.latest(("γ", "plain", "a", "c"), -1) == 0.8
    assert ("γ", "strict", "a", "c") not in planner.history.series
    assert planner.orders["strict"] == planner.orders["plain"]
    assert all(len(tree.members) == 2 for tree in planner.plan.trees)


@pytest.mark.parametrize("probe", ["factorised", "iterative"])
def test_survivors_are_shares_of_the_drivers_keys_also_behind_an_exchange(tmp_path: Path, probe: str) -> None:
    # 100 keys of a find b, and b carries them on to only two values of m: both are in c.
    chain = joined("a.k = b.k", "b.m = c.m")
    first = {"b": rows(*((k, k % 2) for k in range(100))), "c": rows((7, 0), (8, 1)), "a": rows(500)}
    second = {"b": rows((900, 0)), "c": rows((901, 1))}
    planner = forecast_after(tmp_path, chain, [first, second, {"a": rows(*range(100))}], probe=probe)
    found = alive_by_set(planner, chain, "a")
    assert found[frozenset("ab")] == pytest.approx(1.0)
    assert found[frozenset("abc")] == pytest.approx(1.0)


def test_a_hot_key_multiplied_out_in_chunks_succeeds_once(tmp_path: Path) -> None:
    join = joined("a.k = b.k", "b.k = c.k")
    planner = Planner({"q": join}, streams("abc"), Config(replan_epochs=1, probe="iterative"))
    config = Config(tasks=1, sync=False, probe="iterative", chunk_rows=3)
    with LocalEngine(tmp_path, planner.plan, config, planner=planner) as engine:
        engine.run({n: rows(*[1] * 10) for n in "bc"})
        engine.run({"a": rows(1)})
    assert planner.history.latest(("γ", "q", "a", "b"), -1) <= 1.0


def test_keys_are_counted_right_after_the_number_of_tasks_has_changed(tmp_path: Path) -> None:
    planner = Planner({"q": STAR}, streams("abcd"), Config(replan_epochs=1))
    with LocalEngine(tmp_path, planner.plan, Config(tasks=1, sync=False), planner=planner) as engine:
        engine.run({n: rows(*range(400)) for n in "abcd"})
        assert planner.history.latest(("κ", "a[k]"), -1) == 400
        engine.change(tasks=4)
        engine.run({n: rows(*range(400)) for n in "abcd"})
    assert planner.history.latest(("κ", "a[k]"), -1) == pytest.approx(400, rel=0.4)


def test_on_a_cycle_partners_are_counted_by_who_has_joined() -> None:
    """TPC-H Q5: from lineitem, customers are few by their orders, and as many as their nation has by the supplier."""
    sides = (("l", "o", "x"), ("o", "c", "y"), ("c", "s", "z"), ("s", "l", "w"))
    names = ("l", "o", "c", "s")
    graph = JoinGraph(
        sql="",
        aliases=tuple(Alias(n, n, None, ()) for n in names),
        equalities=tuple(Equality(ColumnRef(a, k, "bigint"), ColumnRef(b, k, "bigint")) for a, b, k in sides),
        outputs=(),
    )
    pairs = {pair for a, b, _ in sides for pair in ((a, b), (b, a))}
    many = {pair: 600.0 if pair == ("s", "c") else 1.0 for pair in pairs}
    assert spanning(graph, "l")["c"] == "o"
    _, width = products(graph, "l", dict.fromkeys(pairs, 1.0), many)
    by_bits = {frozenset(n for i, n in enumerate(names) if s >> i & 1): w for s, w in enumerate(width)}
    assert by_bits[frozenset("loc")] == 1
    assert by_bits[frozenset("lsc")] == 600
    assert by_bits[frozenset("losc")] == 1
    assert by_bits[frozenset("lc")] == 0, "not connected"


def test_an_alias_is_reached_by_all_attributes_that_it_shares_with_who_has_joined() -> None:
    """TPC-H Q9: from parts, partsupp is looked up by part and supplier once lineitem has joined, not by part alone."""
    sides = (("p", "l", "part"), ("l", "ps", "part"), ("l", "ps", "supplier"))
    names = ("p", "l", "ps")
    graph = JoinGraph(
        sql="",
        aliases=tuple(Alias(n, n, None, ()) for n in names),
        equalities=tuple(Equality(ColumnRef(a, k, "bigint"), ColumnRef(b, k, "bigint")) for a, b, k in sides),
        outputs=(),
    )
    pairs = {(a, b) for a in names for b in names if a != b}
    many = dict.fromkeys(pairs, 1.0) | {("p", "ps"): 4.0, ("p", "l"): 30.0, ("ps", "l"): 7.5}
    assert spanning(graph, "p")["ps"] == "p"
    _, width = products(graph, "p", dict.fromkeys(pairs, 1.0), many)
    assert width[0b101] == 4, "parts and partsupp"
    assert width[0b111] == 30, "each line has one partsupp, whoever has joined first"
