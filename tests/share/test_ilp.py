"""The joint optimisation of many queries: the paper's examples, both forms of the program, and bad luck."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest

from plait.query.graph import JoinGraph
from plait.query.relation import Relation
from plait.share.candidates import Candidates
from plait.share.greedy import greedy
from plait.share.ilp import solve
from plait.share.ilp_paper import paper_size, solve_paper
from plait.share.join_trees import Trees
from plait.share.lattice import problem
from plait.share.linear import Answer, Program, Solver, highs
from plait.share.optimise import optimise
from plait.share.probe_trees import build_plan
from plait.share.shared_plan import SharedPlan
from plait.share.step_cost import EngineCost, PaperCost, StorePrices
from plait.share.subjoins import Leaf
from plait.share.workload import Sizes, Workload, pair, workload
from tests.share.natural_joins import COSTS, assert_executable, natural, random_graph, random_workload, sized

EXAMPLE_2 = {"q1": natural("R(a), S(a,b), T(b)"), "q2": natural("S(b), T(b,c), U(c)")}


def example_2(*names: str) -> Workload:
    """Section V-2 of the paper: every rate is 100, S ⋈ T has 150 rows and the other joins 100."""
    return sized({name: EXAMPLE_2[name] for name in names}, 100, {"S.b = T.b": 0.015})


def order_of(plan: SharedPlan, query: str, driver: str) -> str:
    return "".join("".join(step.probes) for step in plan.steps[query][driver])


# ---------------------------------------------------------------- the paper's second example


def test_each_query_of_the_paper_alone_sends_475_tuples() -> None:
    for name in EXAMPLE_2:
        assert optimise(example_2(name), cost="paper", mirs=False).cost == pytest.approx(475)


def test_alone_they_avoid_the_large_join() -> None:
    assert order_of(optimise(example_2("q1"), cost="paper", mirs=False), "q1", "S") == "RT"
    assert order_of(optimise(example_2("q2"), cost="paper", mirs=False), "q2", "T") == "US"


def test_both_queries_of_the_paper_together_send_800_instead_of_950() -> None:
    plan = optimise(example_2("q1", "q2"), cost="paper", mirs=False)
    assert plan.cost == pytest.approx(800)
    assert sum(plan.alone.values()) == pytest.approx(950)
    assert plan.saved == pytest.approx(150 / 950)
    assert (plan.status, plan.reasons) == ("optimal", ())
    # S goes to T first for both, and T to S: what each alone would avoid.
    assert {query: order_of(plan, query, "S") for query in EXAMPLE_2} == {"q1": "TR", "q2": "TU"}
    assert {query: order_of(plan, query, "T") for query in EXAMPLE_2} == {"q1": "SR", "q2": "SU"}


def test_algorithm_2_as_written_has_the_same_numbers() -> None:
    for names, cost in ((("q1",), 475), (("q2",), 475), (("q1", "q2"), 800)):
        assert solve_paper(Candidates(example_2(*names), PaperCost(), mirs=False)).cost == pytest.approx(cost)


def test_the_step_costs_of_the_paper() -> None:
    """100 for all first steps, 75 behind S ⋈ T, 50 behind the others."""
    steps = optimise(example_2("q1", "q2"), cost="paper", mirs=False).steps
    assert [step.cost for step in steps["q1"]["S"]] == pytest.approx([100, 75])
    assert [step.cost for step in steps["q1"]["R"]] == pytest.approx([100, 50])


def test_figure_3_needs_both_orders_of_an_intermediate_result() -> None:
    """With MIRs ⟨R, ST⟩ and ⟨U, ST⟩ cost 100 each, and S ⋈ T is computed for both of its members."""
    plan = optimise(
        sized({"q1": natural("R(b), S(b,c), T(c)"), "q2": natural("S(c), T(c,d), U(d)")}, 100), cost="paper"
    )
    (mir,) = plan.mirs
    assert [leaf.relation for leaf in mir.join.leaves] == ["S", "T"]
    assert {name: len(order) for name, order in mir.feeds.items()} == {"m0": 1, "m1": 1}
    assert mir.users == ("q1", "q2")
    assert plan.steps["q1"]["R"][0].probes == ("S", "T")
    # R and U into ST, S into T, T into S, and behind those two, for each query, the rest.
    assert plan.cost == pytest.approx(100 + 100 + 100 + 100 + 4 * 50)


# ---------------------------------------------------------------- both forms


@pytest.mark.parametrize("seed", range(48))
def test_both_forms_have_the_same_optimum(seed: int) -> None:
    given = random_workload(seed)
    cost = COSTS["paper" if seed % 2 else "engine"]
    candidates = Candidates(given, cost, mirs=seed % 3 != 0, copies=seed % 4 < 2)
    found = problem(candidates)
    trees = Trees(found, candidates.parts, candidates.pieces)
    small = solve(found, trees, seconds=60, gap=0.0)
    paper = solve_paper(candidates)
    assert small.reasons == ()
    assert paper.proven
    assert found.choices.flaw(small.selection) is None
    assert small.cost == pytest.approx(paper.cost, rel=1e-6, abs=1e-9)
    assert small.bound <= small.cost <= small.greedy_cost


@pytest.mark.parametrize("seed", range(24))
def test_plans_can_be_executed(seed: int) -> None:
    given = random_workload(seed + 1000, most=5)
    name = "paper" if seed % 2 else "engine"
    plan = optimise(given, cost=COSTS[name], copies=seed % 4 < 2, seconds=0.2)
    assert_executable(plan, given)
    if seed % 4 >= 2:
        stores = [kept.store.of for kept in plan.stores]
        assert len(stores) == len(set(stores)), "one partitioning per store"


@pytest.mark.parametrize("seed", range(12))
def test_the_greedy_plan_is_valid_and_never_better_than_the_best(seed: int) -> None:
    candidates = Candidates(random_workload(seed + 2000, most=4), COSTS["paper"], copies=seed % 2 == 0)
    found = problem(candidates)
    trees = Trees(found, candidates.parts, candidates.pieces)
    first = greedy(found, trees, found.choices.required)
    assert found.choices.flaw(first) is None
    assert found.choices.cost(first) >= solve(found, trees, seconds=30, gap=0.0).cost * (1 - 1e-9)


def test_the_small_form_is_small() -> None:
    given = sized({"q": natural("R(a), S(a,b), T(b,c), U(c,d), V(d)")}, 100)
    candidates = Candidates(given, PaperCost(parallelism=3))
    plan = optimise(given, cost=PaperCost(parallelism=3), seconds=20)
    assert plan.variables < 0.7 * paper_size(candidates).variables


# ---------------------------------------------------------------- what is chosen


def test_equal_queries_under_two_names_cost_as_much_as_one() -> None:
    renamed = natural("u:T(b), v:S(a,b), w:R(a)")
    one = optimise(sized({"q": EXAMPLE_2["q1"]}, 100), cost="paper")
    both = optimise(sized({"q": EXAMPLE_2["q1"], "again": renamed}, 100), cost="paper")
    assert both.cost == pytest.approx(one.cost)
    assert both.saved == pytest.approx(0.5)
    assert set(both.steps["again"]) == {"u", "v", "w"}
    assert [step.store for step in both.steps["q"]["R"]] == [step.store for step in both.steps["again"]["w"]]


def test_queries_without_common_relations_are_solved_apart() -> None:
    apart = {"q": natural("R(a), S(a,b), T(b)"), "other": natural("U(a), V(a,b), W(b)")}
    given = sized(apart, 100)
    plan = optimise(given, cost="paper")
    assert plan.cost == pytest.approx(sum(plan.alone.values()))
    assert plan.saved == pytest.approx(0.0)
    candidates = Candidates(given, PaperCost())
    found = problem(candidates)
    assert solve(found, Trees(found, candidates.parts, candidates.pieces)).parts == 2


def test_a_relation_that_never_gets_rows_costs_nothing() -> None:
    given = sized(EXAMPLE_2, 100)
    still = {**given.sizes.arriving, Leaf("S"): 0.0}
    for cost in COSTS.values():
        plan = optimise(replace(given, sizes=Sizes(still, still)), cost=cost)
        assert_executable(plan, given)
        assert sum(step.cost for step in plan.steps["q1"]["S"]) == 0
    nothing = dict.fromkeys(still, 0.0)
    assert_executable(optimise(replace(given, sizes=Sizes(nothing, nothing)), cost="paper"), given)


@pytest.mark.parametrize("rate", [math.inf, math.nan, 1e300, -1.0])
@pytest.mark.parametrize("copies", [True, False])
def test_whatever_the_statistics_are_there_is_a_plan(rate: float, copies: bool) -> None:
    given = sized({**EXAMPLE_2, "q3": natural("R(a), S(a,b), T(b,c), U(c)")}, rate)
    for cost in COSTS.values():
        assert_executable(optimise(given, cost=cost, copies=copies, seconds=0.5), given)


def test_without_statistics_there_is_a_plan() -> None:
    given = workload(EXAMPLE_2)
    for cost in ("paper", "engine"):
        assert_executable(optimise(given, cost=cost), given)


def test_the_solver_is_not_asked_about_costs_that_are_no_numbers() -> None:
    program = Program()
    program.variable(math.nan)
    with pytest.raises(ValueError, match="not finite"):
        highs(program, None, 1.0, 0.0)


def test_without_queries_there_is_an_empty_plan() -> None:
    plan = optimise(workload({}))
    assert (plan.steps, plan.stores, plan.cost, plan.saved) == ({}, (), 0.0, 0.0)


def test_a_small_intermediate_result_is_kept_for_a_fast_stream() -> None:
    """Figure 8b: R is a thousand times faster than the others, and S ⋈ T ⋈ U is tiny."""
    given = sized({"q": natural("R(a), S(a,b), T(b,c), U(c)")}, 5000)
    fast = {**given.sizes.arriving, Leaf("R"): 5e6}
    tiny = {
        pair((Leaf("S"), "b"), (Leaf("T"), "b")): 1e-6,
        pair((Leaf("T"), "c"), (Leaf("U"), "c")): 1e-6,
        pair((Leaf("R"), "a"), (Leaf("S"), "a")): 1 / 5000,
    }
    for cost in COSTS.values():
        plan = optimise(replace(given, sizes=Sizes(fast, given.sizes.stored, tiny)), cost=cost)
        (step,) = plan.steps["q"]["R"]
        assert sorted(step.probes) == ["S", "T", "U"]


def test_a_store_that_costs_too_much_is_not_kept_twice() -> None:
    """S is probed by a from R and by b from T: by two copies, or by one and a broadcast."""
    given = sized({"q": EXAMPLE_2["q1"]}, 1000)

    def stores_of_s(prices: StorePrices) -> int:
        plan = optimise(given, cost=EngineCost(prices=prices), mirs=False)
        return sum(kept.store.of.leaves == (Leaf("S"),) for kept in plan.stores)

    assert stores_of_s(StorePrices(0, 0, 0)) == 2
    assert stores_of_s(StorePrices(keep_ns=1e6)) == 1


def test_one_partitioning_per_store_as_in_the_paper() -> None:
    given = sized({"q": EXAMPLE_2["q1"]}, 100)
    free = optimise(given, cost=PaperCost(parallelism=4), mirs=False)
    bound = optimise(given, cost=PaperCost(parallelism=4), mirs=False, copies=False)
    # By a or by b: tuples of the other neighbour go to all four partitions of S.
    assert (free.cost, bound.cost) == (pytest.approx(450), pytest.approx(750))
    assert [step.broadcast for order in bound.steps["q"].values() for step in order].count(True) == 1


def test_a_self_join_has_an_order_for_every_alias() -> None:
    given = sized({"q": natural("x:R(a), y:R(a,b), S(b)")}, 100)
    plan = optimise(given, cost="paper")
    assert_executable(plan, given)


def test_orders_become_a_plan_of_the_engine() -> None:
    plan = optimise(workload(EXAMPLE_2), mirs=False)
    columns = tuple((column, "bigint") for column in "abcdef")
    relations = {name: Relation(name, columns) for name in "RSTU"}
    built = build_plan(EXAMPLE_2, relations, plan.orders(), tuple("RSTU"))
    assert {name: dict(built.query_by_name[name].orders) for name in EXAMPLE_2} == plan.orders()


def test_orders_are_refused_for_a_plan_with_mirs() -> None:
    plan = optimise(example_2("q1", "q2"), cost="paper")
    assert plan.mirs
    with pytest.raises(ValueError, match="mirs=False"):
        plan.orders()


# ---------------------------------------------------------------- solvers that do not solve


def late(program: Program, first: Sequence[float] | None, seconds: float, gap: float) -> Answer:
    return Answer(None, -math.inf, proven=False)


def late_with_what_it_was_given(program: Program, first: Sequence[float] | None, seconds: float, gap: float) -> Answer:
    return Answer(first, 0.0, proven=False)


def failing(program: Program, first: Sequence[float] | None, seconds: float, gap: float) -> Answer:
    raise RuntimeError("out of memory")


def all_zeros(program: Program, first: Sequence[float] | None, seconds: float, gap: float) -> Answer:
    return Answer([0.0] * len(program.cost), 0.0, proven=True)


def all_ones(program: Program, first: Sequence[float] | None, seconds: float, gap: float) -> Answer:
    return Answer([1.0] * len(program.cost), 1e300, proven=True)


def no_numbers(program: Program, first: Sequence[float] | None, seconds: float, gap: float) -> Answer:
    return Answer([math.nan] * len(program.cost), math.nan, proven=True)


def too_few(program: Program, first: Sequence[float] | None, seconds: float, gap: float) -> Answer:
    return Answer([1.0], 0.0, proven=True)


@pytest.mark.parametrize(
    ("solver", "sentence"),
    [
        (late, "no plan in time"),
        (late_with_what_it_was_given, "time was over"),
        (failing, "failed (RuntimeError: out of memory)"),
        (all_zeros, "is no plan"),
        (no_numbers, "is no plan"),
        (too_few, "failed"),
    ],
)
def test_a_solver_that_does_not_solve_leaves_the_greedy_plan_and_a_sentence(solver: Solver, sentence: str) -> None:
    given = random_workload(7, most=4)
    plan = optimise(given, cost="paper", solver=solver)
    assert_executable(plan, given)
    assert plan.status == "feasible"
    assert plan.cost == pytest.approx(optimise(given, cost="paper", seconds=0.0).cost)
    assert plan.bound <= plan.cost
    (reason,) = plan.reasons
    assert sentence in reason


@pytest.mark.parametrize("copies", [True, False])
def test_an_answer_that_uses_everything_is_no_better_than_the_greedy_plan(copies: bool) -> None:
    given = random_workload(7, most=4)
    plan = optimise(given, cost="paper", solver=all_ones, copies=copies)
    assert_executable(plan, given)
    assert plan.cost <= optimise(given, cost="paper", seconds=0.0, copies=copies).cost


def test_no_time_at_all_leaves_the_greedy_plan() -> None:
    plan = optimise(example_2("q1", "q2"), cost="paper", seconds=0.0)
    assert plan.status == "feasible"
    assert "before the solver began" in plan.reasons[0]


# ---------------------------------------------------------------- too many candidates


def clique(size: int) -> JoinGraph:
    return natural(", ".join(f"R{n}(a)" for n in range(size)))


def test_a_clique_of_thirteen_is_planned_by_its_own_orders_and_says_so() -> None:
    given = workload({"large": clique(13), "small": natural("R0(a), R1(a), S(a)")})
    begun = time.process_time()
    plan = optimise(given, cost="paper", seconds=1.0)
    assert time.process_time() - begun < 5
    assert_executable(plan, given)
    assert plan.reasons == (
        "query large has too many candidates to be planned with the others: it keeps one order per driver",
    )
    assert all(step.mir is None for order in plan.steps["large"].values() for step in order)


def test_a_query_with_too_many_candidates_keeps_the_orders_it_has() -> None:
    graph = clique(13)
    names = [alias.name for alias in graph.aliases]
    own = {name: tuple(other for other in reversed(names) if other != name) for name in names}
    plan = optimise(workload({"q": graph}), own={"q": own})
    assert plan.orders() == {"q": own}


def test_a_clique_of_seven_is_planned_without_mirs_and_says_so() -> None:
    given = workload({"q": clique(7)})
    plan = optimise(given, cost="paper", seconds=1.0)
    assert_executable(plan, given)
    assert "planned without intermediate results" in plan.reasons[0]
    assert plan.mirs == ()


def test_a_chain_of_self_joins_is_planned() -> None:
    graph = random_graph(random.Random(3), 2)
    names = [f"x{n}" for n in range(8)]
    aliases = tuple(replace(graph.aliases[0], name=name, relation="R", filter=None) for name in names)
    one = graph.equalities[0]
    links = [
        replace(one, left=replace(one.left, alias=x, column="a"), right=replace(one.right, alias=y, column="b"))
        for x, y in pairwise(names)
    ]
    given = workload({"q": replace(graph, aliases=aliases, equalities=tuple(links), windows=(), outputs=())})
    plan = optimise(given, seconds=1.0)
    assert_executable(plan, given)
