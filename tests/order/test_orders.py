"""Orderers: the written order; one probe after the other by selectivity or by price; and where that goes wrong."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait import config
from plait.config import Config
from plait.errors import ConfigError
from plait.order.cost import MODELS
from plait.order.dp_pick import dp_pick, probe_sequences
from plait.order.orders import ORDERERS, fixed, greedy, selectivity_first
from plait.query.graph import JoinGraph
from tests.order.views import chain, clique, graph, graphs, random_view, view


def test_a_star_is_probed_in_written_order() -> None:
    assert fixed(graph("a.k = b.k", "a.k = c.k")) == {"a": ("b", "c"), "b": ("a", "c"), "c": ("a", "b")}


def test_a_chain_is_probed_outwards_from_its_driver() -> None:
    orders = fixed(graph("a.x = b.x", "b.y = c.y", "c.z = d.z"))
    assert orders == {"a": ("b", "c", "d"), "b": ("a", "c", "d"), "c": ("b", "a", "d"), "d": ("c", "b", "a")}


def test_an_attribute_shared_by_all_lets_any_two_meet_directly() -> None:
    assert fixed(graph("a.k = b.k", "b.k = c.k"))["c"] == ("a", "b")


def test_every_next_alias_shares_an_attribute_with_one_already_joined() -> None:
    join = graph("a.x = d.x", "b.y = d.y", "c.z = b.z", "e.x = a.x")
    for driver, order in fixed(join).items():
        joined = [driver]
        for alias in order:
            assert any(join.shared(alias, other) for other in joined), (driver, order)
            joined.append(alias)
        assert sorted(joined) == ["a", "b", "c", "d", "e"]


# ---------------------------------------------------------------- one probe after the other


def test_selectivity_first_takes_the_smallest_matching_share_of_a_stream_first() -> None:
    # γ·μ / rows: b 0.9·1/1000, c 0.5·10/100 000, d 0.2·1/10.
    found = view(
        clique(4),
        "a",
        {"b": 0.9, "c": 0.5, "d": 0.2},
        {"c": 10.0},
        rows={"b": 1e3, "c": 1e5, "d": 10.0},
    )
    assert selectivity_first(found) == ("c", "b", "d")


def test_selectivity_first_does_not_see_what_a_lookup_costs() -> None:
    gamma, prices = {"b": 0.5, "c": 0.6}, {"a": 0.0, "b": 1000.0, "c": 1.0}
    found = view(clique(3), "a", gamma, lookup=prices)
    assert selectivity_first(found) == ("b", "c")
    assert greedy(found) == dp_pick(found)[0] == ("c", "b")
    assert found.cost(("b", "c")) > found.cost(("c", "b"))


def test_greedy_takes_the_cheapest_probe_first_and_may_pay_for_it_later() -> None:
    # b is cheap and lets everything pass; c is a little dearer and drops nearly all.
    gamma, prices = {"b": 1.0, "c": 0.01, "d": 1.0}, {"a": 0.0, "b": 10.0, "c": 11.0, "d": 12.0}
    found = view(clique(4), "a", gamma, lookup=prices)
    assert greedy(found) == ("b", "c", "d")
    assert dp_pick(found)[0] == ("c", "b", "d")
    assert found.cost(("c", "b", "d")) < 0.6 * found.cost(("b", "c", "d"))


def test_greedy_counts_the_matches_of_a_probe() -> None:
    found = view(
        clique(3), "a", {"b": 1.0, "c": 1.0}, {"b": 50.0}, lookup={"a": 0, "b": 1.0, "c": 20.0}, model="iterative"
    )
    assert greedy(found) == ("c", "b")
    assert greedy(replace(found, model="factorised")) == ("b", "c")


def test_greedy_counts_the_exchange_before_a_probe() -> None:
    # After b, standing at k: c is at the same key, d is cheaper but an exchange away.
    join = graph("a.k = b.k", "a.k = c.k", "b.m = d.m")
    prices = {"a": 0.0, "b": 1.0, "c": 9.0, "d": 2.0}
    assert greedy(view(join, "a", dict.fromkeys("bcd", 0.5), lookup=prices, alpha_x=100.0)) == ("b", "c", "d")
    assert greedy(view(join, "a", dict.fromkeys("bcd", 0.5), lookup=prices, alpha_x=0.0, alpha_m=0.0)) == (
        "b",
        "d",
        "c",
    )


def test_a_stream_behind_another_waits_for_it() -> None:
    found = view(chain(4), "a", {"b": 0.9, "c": 0.5, "d": 0.0001})
    for order in (selectivity_first(found), greedy(found), dp_pick(found)[0]):
        assert order == ("b", "c", "d")


def test_ties_keep_the_written_order() -> None:
    found = view(clique(4), "c", dict.fromkeys("abd", 0.5))
    assert selectivity_first(found) == greedy(found) == dp_pick(found)[0] == ("a", "b", "d")


@settings(deadline=None, derandomize=True, database=None, max_examples=100)
@given(graphs(most=5), st.data(), st.integers(0, 2**32 - 1), st.sampled_from(MODELS))
def test_every_orderer_gives_an_order_that_can_be_probed(
    join: JoinGraph, data: st.DataObject, seed: int, model: str
) -> None:
    driver = data.draw(st.integers(0, len(join.aliases) - 1))
    found = random_view(join, driver, seed, model)
    possible = {tuple(end for _, end in s) for s in probe_sequences(join) if s[0][0] == found.names[driver]}
    written = fixed(join)[found.names[driver]]
    assert written in possible
    best = dp_pick(found)[1]
    for name, orderer in ORDERERS.items():
        order = orderer(found, written)
        assert order in possible, name
        assert found.cost(order) >= best or math.isclose(found.cost(order), best), name


def test_the_fixed_orderer_keeps_whatever_order_there_is() -> None:
    found = view(clique(3), "a", {"b": 0.5, "c": 0.1})
    assert ORDERERS["fixed"](found, ("b", "c")) == ("b", "c")


# ---------------------------------------------------------------- names


def test_the_known_orderers_are_those_of_the_configuration() -> None:
    assert tuple(ORDERERS) == config.ORDERERS


@pytest.mark.parametrize(
    ("field", "known"),
    [
        ("orderer", config.ORDERERS),
        ("driver_policy", config.DRIVER_POLICIES),
        ("cost_variant", config.COST_VARIANTS),
        ("cost_model", config.COST_MODELS),
    ],
)
def test_an_unknown_name_is_refused_with_the_known_ones(field: str, known: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=f"{field}='best' is not known") as caught:
        Config(**{field: "best"})  # type: ignore[arg-type]
    assert f"use one of: {', '.join(known)}" in str(caught.value)
    for name in known:
        Config(**{field: name})  # type: ignore[arg-type]
