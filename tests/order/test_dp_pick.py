"""dpPick gives the minimum of the enumeration, and looks at far fewer steps than there are sequences."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.order.cost import MODELS, DriverView, sequence_cost
from plait.order.dp_pick import dp_pick, probe_sequences
from plait.query.graph import JoinGraph
from tests.order.views import chain, clique, cycle, graph, graphs, pairwise_clique, random_view, star, view

QUICK = settings(deadline=None, derandomize=True, database=None, max_examples=300)


def orders_from(join: JoinGraph, driver: str) -> set[tuple[str, ...]]:
    """All orders of one driver, by the paper's enumeration."""
    return {tuple(end for _, end in s) for s in probe_sequences(join) if s[0][0] == driver}


def assert_is_the_minimum(found: DriverView, least: float) -> None:
    order, cost = dp_pick(found)
    assert cost == pytest.approx(least)
    assert found.cost(order) == pytest.approx(cost)
    assert sequence_cost(found, order) == pytest.approx(cost)


@QUICK
@given(graphs(), st.data(), st.integers(0, 2**32 - 1), st.sampled_from(MODELS))
def test_oracle_no_sequence_is_cheaper_than_the_one_picked(
    join: JoinGraph, data: st.DataObject, seed: int, model: str
) -> None:
    driver = data.draw(st.integers(0, len(join.aliases) - 1))
    found = random_view(join, driver, seed, model)
    order, _ = dp_pick(found)
    every = orders_from(join, found.names[driver])
    assert order in every
    assert_is_the_minimum(found, min(sequence_cost(found, o) for o in every))


@pytest.mark.parametrize("join", [clique(6), pairwise_clique(6)], ids=["one key", "a key per pair"])
@pytest.mark.parametrize("model", MODELS)
def test_oracle_six_relations_in_a_clique(join: JoinGraph, model: str) -> None:
    every = orders_from(join, "c")
    assert len(every) == math.factorial(5)
    for seed in range(3):
        found = random_view(join, 2, seed, model)
        assert_is_the_minimum(found, min(found.cost(o) for o in every))


def test_an_exchange_is_worth_avoiding_while_it_is_dear() -> None:
    # a meets b and c on k; b meets d on m.  d drops most, but is an exchange away, and c is an exchange back.
    join = graph("a.k = b.k", "a.k = c.k", "b.m = d.m")
    gamma = {"b": 0.95, "c": 0.9, "d": 0.1}
    assert dp_pick(view(join, "a", gamma, alpha_x=100.0))[0] == ("c", "b", "d")
    assert dp_pick(view(join, "a", gamma, lookup=10.0, alpha_x=0.0, alpha_m=0.0))[0] == ("b", "d", "c")


def test_prices_that_are_no_numbers_give_some_order_and_no_error() -> None:
    join = graph("a.k = b.k", "b.m = c.m", "c.n = d.n")
    for bad in (math.nan, math.inf):
        poisoned = replace(view(join, "b", dict.fromkeys("acd", 0.5)), lookup_ns=[bad] * 4)
        order, cost = dp_pick(poisoned)
        assert order in orders_from(join, "b")
        assert not cost < math.inf


def test_two_relations_leave_nothing_to_choose() -> None:
    assert dp_pick(view(clique(2), "b", {"a": 0.5}, lookup=3.0)) == (("a",), 3.0)


# ---------------------------------------------------------------- how much it looks at


@dataclass(frozen=True)
class Counting(DriverView):
    """A view that knows what it was asked."""

    steps: Counter[tuple[int, int, tuple[int, ...] | None]] = field(default_factory=Counter)

    def step(self, joined: int, target: int, here: tuple[int, ...] | None) -> tuple[float, tuple[int, ...]]:
        self.steps[joined, target, here] += 1
        return super().step(joined, target, here)


def counting(join: JoinGraph, seed: int, model: str) -> Counting:
    plain = random_view(join, 0, seed, model)
    return Counting(**{name: getattr(plain, name) for name in plain.__dataclass_fields__})


@pytest.mark.parametrize("size", [4, 8, 12])
@pytest.mark.parametrize("model", MODELS)
def test_a_clique_takes_one_look_per_set_and_target_where_sequences_are_factorially_many(size: int, model: str) -> None:
    found = counting(clique(size), 7, model)
    order, cost = dp_pick(found)
    assert sorted(order) == sorted(found.names[1:])
    assert found.cost(order) == pytest.approx(cost)
    found = counting(clique(size), 7, model)
    dp_pick(found)
    assert max(found.steps.values()) == 1, "a step was priced twice"
    assert found.steps.total() <= size * 2 ** (size - 1)
    assert len({joined for joined, _, _ in found.steps}) <= 2 ** (size - 1)


@pytest.mark.parametrize("join", [chain(12), cycle(12), star(12)], ids=["chain", "cycle", "star"])
def test_several_keys_cost_one_look_per_set_target_and_key(join: JoinGraph) -> None:
    found = counting(join, 3, "iterative")
    dp_pick(found)
    assert max(found.steps.values()) == 1
    assert found.steps.total() <= 12 * 2**11 * len(join.attributes)


# ---------------------------------------------------------------- the paper's enumeration


@pytest.mark.parametrize(
    ("join", "sequences", "orders"),
    [
        (clique(2), 2, 2),
        # 1·3 pairs, then 2·2, then 3·1: from each of the four.
        (clique(4), 4 * 36, 24),
        (pairwise_clique(4), 4 * 36, 24),
        # From an end one way, from the second 3 (where the step to the end goes among two others).
        (chain(4), 1 + 3 + 3 + 1, 8),
        # From the middle 3!, from each leaf 2!.
        (star(4), 6 + 3 * 2, 12),
        # Left or right, left or right, and the last is met from both sides.
        (cycle(4), 4 * 8, 16),
        (cycle(3), 3 * 4, 6),
    ],
)
def test_known_shapes_have_known_numbers_of_sequences(join: JoinGraph, sequences: int, orders: int) -> None:
    found = list(probe_sequences(join))
    assert len(found) == len(set(found)) == sequences
    assert len({(s[0][0], *(end for _, end in s)) for s in found}) == orders


@settings(QUICK, max_examples=60)
@given(graphs(most=5))
def test_every_sequence_probes_every_alias_once_by_one_that_has_joined(join: JoinGraph) -> None:
    starts = set()
    for sequence in probe_sequences(join):
        joined = [sequence[0][0]]
        for carrier, target in sequence:
            assert carrier in joined
            assert target not in joined
            assert join.shared(carrier, target)
            joined.append(target)
        assert len(joined) == len(join.aliases)
        starts.add(joined[0])
    assert starts == {a.name for a in join.aliases}
