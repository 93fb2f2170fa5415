"""What an order costs: Eq. 8 as written and unrolled, the engine's variants of it by hand, measured α's."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.config import COST_VARIANTS
from plait.order.cost import (
    FEWEST_LOOKUPS,
    MODELS,
    Coefficients,
    DriverView,
    driver_view,
    hash_table,
    ordered_array,
    sequence_cost,
    sorted_runs,
)
from plait.order.dp_pick import probe_sequences
from plait.query.expr import Call, ColumnRef
from plait.query.graph import Condition, JoinGraph, Window
from plait.query.observed import EdgeCount
from plait.stats.counters import QueryForecast, StoreForecast
from tests.order.views import chain, clique, graph, graphs, random_view, view

QUICK = settings(deadline=None, derandomize=True, database=None, max_examples=200)


@QUICK
@given(graphs(most=5), st.data(), st.integers(0, 2**32 - 1), st.sampled_from(MODELS))
def test_oracle_the_unrolled_cost_is_eq_8(join: JoinGraph, data: st.DataObject, seed: int, model: str) -> None:
    driver = data.draw(st.integers(0, len(join.aliases) - 1))
    found = random_view(join, driver, seed, model)
    orders = {tuple(end for _, end in s) for s in probe_sequences(join) if s[0][0] == found.names[driver]}
    for order in orders:
        assert found.cost(order) == pytest.approx(sequence_cost(found, order))


# ---------------------------------------------------------------- by hand

HALF = {"b": 0.5, "c": 0.2}
TWO = {"a": 3.0, "b": 2.0, "c": 7.0}
"""Tuples per key: a's own, and matches in b and c."""
PRICES = {"a": 0.0, "b": 10.0, "c": 100.0}


@pytest.mark.parametrize(
    ("model", "order", "expected"),
    [
        # b for every key, c for the half that found a b; nothing is multiplied out before the end.
        ("factorised", "bc", 10 + 0.5 * 100),
        ("factorised", "cb", 100 + 0.2 * 10),
        # Tuples after b: 3·2 for half of the keys; after c: 3·2·7 for a tenth.
        ("iterative", "bc", 10 + 0.5 * 100 + 5 * (0.5 * 6 + 0.1 * 42)),
        ("iterative", "cb", 100 + 0.2 * 10 + 5 * (0.2 * 21 + 0.1 * 42)),
        # The paper counts the matches of each probe by themselves.
        ("recursive", "bc", 10 + 0.5 * (5 * 2 + 100 + 0.2 * (5 * 7))),
        ("recursive", "cb", 100 + 0.2 * (5 * 7 + 10 + 0.5 * (5 * 2))),
    ],
)
def test_three_streams_on_one_key(model: str, order: str, expected: float) -> None:
    found = view(clique(3), "a", HALF, TWO, lookup=PRICES, model=model, alpha_m=5.0)
    assert found.cost(tuple(order)) == pytest.approx(expected)
    assert sequence_cost(found, tuple(order)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        # Three tuples, two matches each, of half the keys, travel; factorised they are multiplied out for it.
        # Each of them brings a key of its own to be looked up.
        ("factorised", 10 + 0.5 * 6 * 100 + 0.5 * 6 * (50 + 5)),
        ("iterative", 10 + 0.5 * 6 * 100 + 5 * (0.5 * 6 + 0.1 * 42) + 0.5 * 6 * 50),
        ("recursive", 10 + 0.5 * 100 + 5 * (0.5 * 2 + 0.1 * 7) + 0.5 * 6 * 50),
    ],
)
def test_tuples_that_change_their_key_pay_for_the_journey(model: str, expected: float) -> None:
    found = view(chain(3), "a", HALF, TWO, lookup=PRICES, model=model, alpha_m=5.0, alpha_x=50.0)
    assert found.cost(("b", "c")) == pytest.approx(expected)
    assert sequence_cost(found, ("b", "c")) == pytest.approx(expected)


def test_an_exchange_has_a_price_of_its_own_if_anything_travels() -> None:
    free = view(chain(3), "a", HALF, TWO, lookup=PRICES, model="iterative", alpha_m=5.0, alpha_x=50.0)
    dear = replace(free, exchange_ns=1000.0)
    assert dear.cost(("b", "c")) == pytest.approx(free.cost(("b", "c")) + 1000)
    assert sequence_cost(dear, ("b", "c")) == pytest.approx(dear.cost(("b", "c")))
    nothing = replace(view(chain(3), "a", {"b": 0.0, "c": 1.0}, lookup=PRICES), exchange_ns=1000.0)
    assert nothing.cost(("b", "c")) == sequence_cost(nothing, ("b", "c")) == 10.0


def test_a_driver_in_the_middle_travels_once_whichever_side_is_first() -> None:
    found = view(chain(3), "b", {"a": 0.5, "c": 0.2}, {"b": 3.0, "a": 2.0, "c": 7.0}, lookup=1.0, alpha_m=0.0)
    assert found.cost(("a", "c")) == pytest.approx(1 + 0.5 * (1 + 6 * 10))
    assert found.cost(("c", "a")) == pytest.approx(1 + 0.2 * (1 + 21 * 10))


def test_a_check_multiplies_out_even_when_factorised() -> None:
    plain = view(clique(3), "a", HALF, TWO, lookup=PRICES, alpha_m=5.0)
    checked = view(clique(3), "a", HALF, TWO, lookup=PRICES, alpha_m=5.0, checked="b")
    assert checked.cost(("b", "c")) - plain.cost(("b", "c")) == pytest.approx(5 * 0.5 * 6)
    assert checked.cost(("c", "b")) - plain.cost(("c", "b")) == pytest.approx(5 * 0.1 * 42)


def test_after_a_probe_that_never_succeeds_nothing_costs() -> None:
    for model in MODELS:
        found = view(clique(3), "a", {"b": 0.0, "c": 0.5}, TWO, lookup=PRICES, model=model)
        assert found.cost(("b", "c")) == sequence_cost(found, ("b", "c")) == 10.0


# ---------------------------------------------------------------- f(κ)

STORE = StoreForecast(keys=1000.0, rows=8000.0, runs=4.0)


def test_a_hash_table_costs_a_constant_and_half_its_chains() -> None:
    assert hash_table(c=2.0, slots=100.0)(STORE, 1.0) == 2.0 + 1000 / 200


def test_an_ordered_array_costs_the_logarithm_of_its_keys() -> None:
    assert ordered_array()(StoreForecast(1023.0, 1.0, 1.0), 1.0) == 10.0


def test_sorted_runs_cost_each_run_and_the_doublings_between_neighbouring_lookups() -> None:
    f = sorted_runs(rho=0.5)
    # 2000 rows per run: from one of 2000 lookups to the next it is one doubling.
    assert f(STORE, 2000.0) == 4 * (1 + 0.5 * 1)
    assert f(STORE, 2000 / 7) == pytest.approx(4 * (1 + 0.5 * 3))
    assert f(STORE, 0.0) == f(STORE, 1.0) == pytest.approx(4 * (1 + 0.5 * math.log2(2001)))


# ---------------------------------------------------------------- from forecasts to views


def forecast(**changes: object) -> QueryForecast:
    """a, b and c on one key, driven by a."""
    names = ("a", "b", "c")
    pairs = [(x, y) for x in names for y in names if x != y]
    base = QueryForecast(
        aliases=names,
        gamma={(x, y): {"a": 0.9, "b": 0.5, "c": 0.2}[y] for x, y in pairs},
        mu={(x, y): {"a": 1.0, "b": 2.0, "c": 7.0}[y] for x, y in pairs},
        keys={"a": 2000.0, "b": 10.0, "c": 10.0},
        tuples_per_key={"a": 3.0, "b": 1.0, "c": 1.0},
        stores={f"{n}[k]": StoreForecast(1000.0, rows, 4.0) for n, rows in (("a", 1.0), ("b", 8000.0), ("c", 24000.0))},
        together=dict.fromkeys(names, (1.0,) * 8),
        wider={n: {} for n in names},
    )
    return replace(base, **changes)


COEFFICIENTS = Coefficients(alpha_q=10.0, rho=0.5, alpha_m=5.0, alpha_x=50.0, alpha_h=8000.0)


def viewed(found: QueryForecast, variant: str = "full", join: JoinGraph | None = None) -> DriverView:
    return driver_view(join or clique(3), "a", found, COEFFICIENTS, model="iterative", variant=variant)


A, B, C = 1, 2, 4


def test_without_correlation_shares_and_matches_are_products() -> None:
    found = viewed(forecast())
    assert [found.alive[s] for s in (A, A | B, A | C, A | B | C)] == pytest.approx([1.0, 0.5, 0.2, 0.1])
    assert [found.width[s] for s in (A, A | B, A | C, A | B | C)] == pytest.approx([3.0, 6.0, 21.0, 42.0])
    assert (found.driver, found.names, found.mu) == (0, ("a", "b", "c"), [1.0, 2.0, 7.0])
    # 2000 and 6000 rows per run against 2000 lookups.
    assert found.lookup_ns[1:] == pytest.approx([10 * 4 * 1.5, 10 * 4 * 2.0])
    assert found.rows[1:] == [8000.0, 24000.0]
    # An exchange is shared by the 2000 keys of an epoch.
    assert found.exchange_ns == 4.0


def test_a_success_that_was_never_seen_is_rare_and_not_impossible() -> None:
    never = {**forecast().gamma, ("a", "c"): 0.0}
    none = {**forecast().mu, ("a", "c"): 0.0}
    found = viewed(forecast(gamma=never, mu=none))
    # None of 2000 keys: one in 2002 would not surprise, and would have a partner.
    assert found.alive[A | C] == pytest.approx(1 / 2002)
    assert found.width[A | C] == pytest.approx(3.0)
    few = viewed(forecast(gamma=never, keys={"a": 2.0, "b": 10.0, "c": 10.0}))
    assert few.alive[A | C] == pytest.approx(1 / 4), "two keys tell little"


def test_correlation_and_counted_widths_replace_the_products() -> None:
    together = dict.fromkeys("abc", (1.0,) * 7 + (1.5,))
    found = viewed(forecast(together=together, wider={**{n: {} for n in "bc"}, "a": {A | B: 4.0}}))
    assert found.alive[A | B | C] == pytest.approx(0.15)
    assert found.width[A | B] == pytest.approx(24.0)
    assert found.width[A | B | C] == pytest.approx(42.0)


def test_one_partner_more_never_brings_a_key_back_whatever_the_estimates_say() -> None:
    found = viewed(forecast(together=dict.fromkeys("abc", (1.0,) * 7 + (100.0,))))
    assert found.alive[A | B | C] == pytest.approx(0.2)


@pytest.mark.parametrize(("variant", "free"), [("query_cost_only", "matches"), ("match_cost_only", "lookups")])
def test_an_ablation_prices_one_half_only(variant: str, free: str) -> None:
    found, whole = viewed(forecast(), variant), viewed(forecast())
    assert found.cost(("b", "c")) < whole.cost(("b", "c"))
    if free == "matches":
        assert (found.alpha_m, found.alpha_x, found.lookup_ns) == (0.0, 0.0, whole.lookup_ns)
    else:
        assert (found.alpha_m, found.alpha_x, found.lookup_ns) == (5.0, 50.0, [0.0] * 3)


@pytest.mark.parametrize("variant", COST_VARIANTS)
@pytest.mark.parametrize("model", MODELS)
def test_every_model_and_variant_agrees_with_eq_8(model: str, variant: str) -> None:
    found = driver_view(clique(3), "a", forecast(), COEFFICIENTS, model=model, variant=variant)
    for order in (("b", "c"), ("c", "b")):
        assert found.cost(order) == pytest.approx(sequence_cost(found, order))


def test_another_f_can_be_plugged_in() -> None:
    found = driver_view(clique(3), "a", forecast(), COEFFICIENTS, model="recursive", lookup_cost=hash_table(1.0, 500.0))
    assert found.lookup_ns == [20.0] * 3


def test_streams_that_bring_conditions_or_windows_are_checked() -> None:
    v, ts = [[ColumnRef(n, c, t) for n in "abc"] for c, t in (("v", "int"), ("ts", "timestamp"))]
    less = Condition("", (v[0], v[1]), Call("<", (v[0], v[1]), "boolean"))
    left_to_spark = Condition("", (v[0], v[2]))
    join = clique(3)
    assert viewed(forecast(), join=join).checked == {0: False, 1: False, 2: False}
    assert viewed(forecast(), join=replace(join, conditions=(less, left_to_spark))).checked == {
        0: True,
        1: True,
        2: False,
    }
    assert viewed(forecast(), join=replace(join, windows=(Window(ts[1], ts[2], 0, 1),))).checked == {
        0: False,
        1: True,
        2: True,
    }


def test_a_stream_two_edges_away_is_priced_by_its_own_neighbour() -> None:
    join = graph("a.k = b.k", "b.m = c.m")
    found = forecast(
        gamma={("a", "b"): 0.5, ("b", "a"): 0.9, ("b", "c"): 0.3, ("c", "b"): 0.8},
        mu={("a", "b"): 2.0, ("b", "a"): 1.0, ("b", "c"): 5.0, ("c", "b"): 1.0},
        stores=dict.fromkeys(("a[k]", "b[k]", "b[m]", "c[m]"), STORE),
    )
    seen = driver_view(join, "a", found, COEFFICIENTS, model="iterative")
    assert seen.alive[A | B | C] == pytest.approx(0.15)
    assert seen.width[A | B | C] == pytest.approx(30.0)
    back = driver_view(join, "c", found, COEFFICIENTS, model="iterative")
    assert back.alive[A | B | C] == pytest.approx(0.72)


# ---------------------------------------------------------------- measured on this machine


def probe(lookups: int, runs: int, length: int, a: float, rho: float) -> EdgeCount:
    """What a probe of `lookups` keys in `runs` runs of a length would have counted."""
    gallop = lookups * runs * math.log2(1 + length / lookups)
    return EdgeCount(
        lookups=lookups, runs=lookups * runs, gallop=gallop, lookup_ns=round(a * (lookups * runs + rho * gallop))
    )


@settings(QUICK, max_examples=60)
@given(st.floats(1, 100), st.floats(0.05, 5), st.floats(1, 100), st.floats(1, 500))
def test_known_coefficients_are_found_again(alpha_q: float, rho: float, alpha_m: float, alpha_x: float) -> None:
    edges = [
        probe(lookups, runs, length, alpha_q, rho)
        for lookups, runs, length in (
            (20_000, 1, 40_000),
            (500_000, 3, 10_000_000),
            (90_000, 5, 2000),
            (40_000, 2, 30_000_000),
        )
    ]
    edges[0] = replace(edges[0], tuples=70_000, match_ns=round(70_000 * alpha_m))
    edges[1] = replace(edges[1], tuples=80_000, match_ns=round(80_000 * alpha_m))
    edges[2] = replace(edges[2], shipped=900_000, ship_ns=round(900_000 * alpha_x))
    found = Coefficients().fitted(edges)
    assert found.alpha_q == pytest.approx(alpha_q, rel=1e-3)
    assert found.rho == pytest.approx(rho, rel=1e-2)
    assert found.alpha_m == pytest.approx(alpha_m, rel=1e-2)
    assert found.alpha_x == pytest.approx(alpha_x, rel=1e-3)
    assert found.work(edges[3]) == pytest.approx(edges[3].lookup_ns, rel=1e-2)


def test_too_little_work_tells_nothing() -> None:
    few = FEWEST_LOOKUPS - 1
    count = replace(probe(few, 2, 500, 99.0, 1.0), tuples=few, match_ns=10**9, shipped=few, ship_ns=10**9)
    assert Coefficients().fitted([count]) == Coefficients()
    assert Coefficients().fitted([]) == Coefficients()
    assert Coefficients().fitted([EdgeCount()]) == Coefficients()


def test_probes_all_alike_tell_the_price_of_a_run_and_leave_the_rest() -> None:
    old = Coefficients(alpha_q=10.0, rho=0.5)
    found = old.fitted([probe(50_000, 2, 200_000, 30.0, 0.5)] * 3)
    assert found.rho == 0.5
    assert found.alpha_q == pytest.approx(30.0, rel=1e-3)


def test_times_that_contradict_the_model_never_give_a_negative_price() -> None:
    # The more galloping, the faster: a clock's noise.
    edges = [replace(probe(50_000, 1, 50_000 * 4**i, 1.0, 0.0), lookup_ns=1_000_000 // (i + 1)) for i in range(6)]
    found = Coefficients().fitted(edges)
    assert found.alpha_q > 0
    assert found.rho >= 0


def test_work_is_counted_not_timed() -> None:
    count = EdgeCount(runs=10, gallop=4.0, tuples=3, shipped=2, lookup_ns=10**9, match_ns=10**9, ship_ns=10**9)
    assert COEFFICIENTS.work(count) == 10 * (10 + 0.5 * 4) + 5 * 3 + 50 * 2


def test_new_measurements_are_approached_step_by_step() -> None:
    found = Coefficients(0.0, 0.0, 0.0, 0.0, 0.0).blended(Coefficients(10.0, 20.0, 30.0, 40.0, 50.0), weight=0.5)
    assert found == Coefficients(5.0, 10.0, 15.0, 20.0, 25.0)
