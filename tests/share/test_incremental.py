"""The incremental optimiser: never better than the optimum, near it, and near itself however queries come and go."""

from __future__ import annotations

import random

import pytest

from plait.query.graph import JoinGraph
from plait.share.candidates import Candidates
from plait.share.ilp import solve
from plait.share.incremental import Decided, Placed, place
from plait.share.join_trees import Trees
from plait.share.lattice import Problem, problem
from plait.share.step_cost import EngineCost, PaperCost, StepCost
from plait.share.workload import Workload
from tests.share.natural_joins import COSTS, natural, random_workload, sized

NEAR = 1.1
"""At most so many times the optimum, where stores may have copies, as in a running engine."""
NEAR_FRESH = 1.4
"""At most so many times what planning everything anew would cost, after queries have come and gone one by one."""
NEAR_WITHOUT_COPIES = 2.0
"""Where every store has one partitioning, which is decided before the orders are."""


def built(given: Workload, cost: StepCost, mirs: bool = True, copies: bool = True) -> tuple[Problem, Trees]:
    candidates = Candidates(given, cost, mirs=mirs, copies=copies)
    found = problem(candidates)
    return found, Trees(found, candidates.parts, candidates.pieces)


def placed(
    given: Workload, cost: StepCost, before: Decided | None = None, share: float = 0.5, mirs: bool = True
) -> Placed:
    found, trees = built(given, cost, mirs)
    done = place(found, trees, given.queries, before, share=share)
    assert found.choices.flaw(done.selection) is None
    return done


@pytest.mark.parametrize("seed", range(36))
def test_it_is_never_cheaper_than_the_optimum_and_near_it(seed: int) -> None:
    given = random_workload(seed + 5000, most=4)
    copies = seed % 4 < 2
    found, trees = built(given, COSTS["paper" if seed % 2 else "engine"], seed % 3 != 0, copies)
    best = solve(found, trees, seconds=60, gap=0.0)
    done = place(found, trees, given.queries)
    assert best.reasons == ()
    assert found.choices.flaw(done.selection) is None
    assert done.cost == pytest.approx(found.choices.cost(done.selection))
    assert best.cost * (1 - 1e-9) <= done.cost <= best.cost * (NEAR if copies else NEAR_WITHOUT_COPIES) + 1e-9
    assert done.cost <= done.eager_cost * (1 + 1e-9)
    assert done == place(found, trees, given.queries), "the same every time"


PAPER = {"q1": natural("R(a), S(a,b), T(b)"), "q2": natural("S(b), T(b,c), U(c)")}


def test_the_second_example_of_paper_001_costs_800() -> None:
    given = sized(PAPER, 100, {"S.b = T.b": 0.015})
    found, trees = built(given, PaperCost(), mirs=False)
    assert place(found, trees, given.queries).cost == pytest.approx(800)


def test_a_new_query_first_shares_whatever_it_costs_and_is_then_placed_by_cost() -> None:
    """Figure 5: q2 finds S ⋈ T in use; S ⋈ T ten times as large is not worth going through."""
    one = {"q1": natural("S(b), T(b)")}
    both = {**one, "q2": natural("S(a,b), T(b,c), U(c)")}
    for selectivity, shares in ((0.011, True), (0.2, False)):
        first = placed(sized(one, 100, {"S.b = T.b": selectivity}), PaperCost(), mirs=False)
        given = sized(both, 100, {"S.b = T.b": selectivity})
        done = placed(given, PaperCost(), first.decided, share=1.0, mirs=False)
        eager = done.cost == pytest.approx(done.eager_cost)
        assert eager is shares, (done.cost, done.eager_cost)
        assert done.cost <= done.eager_cost
        assert not done.holistic


def test_only_what_shares_with_a_change_is_planned_again() -> None:
    graphs = {
        "a": natural("R(a), S(a,b), T(b)"),
        "b": natural("S(a,b), T(b,c), U(c)"),
        "far": natural("V(d), W(d,e), X(e)"),
        "away": natural("Y(f), Z(f)"),
    }

    def some(*names: str) -> Workload:
        return sized({name: graphs[name] for name in names}, 100, {"S.b = T.b": 0.001})

    first = placed(some("a", "far", "away"), PaperCost())
    assert first.holistic
    done = placed(some(*graphs), PaperCost(), first.decided)
    assert not done.holistic
    assert set(done.touched) == {"a", "b"}
    dropped = placed(some("b", "far", "away"), PaperCost(), done.decided, share=1.0)
    assert set(dropped.touched) == {"b"}
    others = {first.decided.queries[name] for name in ("far", "away")}
    for later in (done, dropped):
        kept = {name: steps for name, steps in later.decided.orders.items() if name[0] in others}
        assert kept == {name: steps for name, steps in first.decided.orders.items() if name[0] in others}


def test_after_many_changes_everything_is_planned_anew() -> None:
    graphs = {f"q{i}": natural(f"R{i}(a), S{i}(a)") for i in range(8)}
    first = placed(sized({n: graphs[n] for n in list(graphs)[:4]}, 100), EngineCost())
    few = placed(sized({n: graphs[n] for n in list(graphs)[:6]}, 100), EngineCost(), first.decided)
    assert not few.holistic
    assert few.decided.basis == first.decided.basis
    many = placed(sized(graphs, 100), EngineCost(), few.decided, share=0.4)
    assert many.holistic
    assert many.decided.basis == frozenset(graphs)


def draw_graph(draw: random.Random) -> JoinGraph:
    names = draw.sample("RSTUV", draw.randint(2, 4))
    keys = [draw.choice("abc") for _ in names[1:]]
    columns: dict[str, set[str]] = {name: set() for name in names}
    for i, key in enumerate(keys):
        columns[names[i]].add(key)
        columns[names[i + 1]].add(key)
    return natural(", ".join(f"{name}({','.join(sorted(of))})" for name, of in columns.items()))


@pytest.mark.parametrize("seed", range(6))
def test_coming_and_going_ends_near_what_a_fresh_run_gives(seed: int) -> None:
    draw = random.Random(seed)
    live: dict[str, JoinGraph] = {}
    decided: Decided | None = None
    cost = COSTS["paper" if seed % 2 else "engine"]
    for step in range(14):
        if len(live) > 1 and draw.random() < 0.4:
            del live[draw.choice(sorted(live))]
        else:
            live[f"q{step}"] = draw_graph(draw)
        given = sized(dict(live), 100, {"R.a = S.a": 0.02})
        done = placed(given, cost, decided)
        decided = done.decided
        assert set(decided.queries) == set(live)
        assert done.cost <= placed(given, cost).cost * NEAR_FRESH


def test_the_time_ends_the_search_with_a_complete_plan() -> None:
    given = random_workload(5001, most=4)
    found, trees = built(given, COSTS["engine"])
    done = place(found, trees, given.queries, late=lambda: True)
    assert found.choices.flaw(done.selection) is None
    assert done.cost == pytest.approx(done.eager_cost)


def test_what_was_decided_for_joins_that_are_gone_is_forgotten() -> None:
    first = placed(sized(PAPER, 100), EngineCost())
    one = {"q1": PAPER["q1"]}
    done = placed(sized(one, 100), EngineCost(), first.decided)
    assert done.cost == pytest.approx(placed(sized(one, 100), EngineCost()).cost)
    assert set(done.decided.queries) == {"q1"}
    assert first.decided.queries["q2"] not in {join for join, _ in done.decided.orders}
