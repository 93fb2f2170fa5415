"""Many queries, one plan (paper 001): from a workload to the cheapest probe orders that can be found in time.

    Workload  →  candidates (share/candidates.py)  →  sets (share/lattice.py)  →  greedy, then HiGHS (share/ilp.py)
              →  SharedPlan (share/shared_plan.py)

Whatever the statistics and the solver are, there is a plan: the greedy one is complete before the solver is asked, and
the solver's replaces it only if it can be executed and costs less.
"""

from __future__ import annotations

from collections.abc import Mapping

from plait.order.orders import Orders
from plait.share.candidates import Candidates
from plait.share.greedy import greedy
from plait.share.ilp import GAP, SECONDS, solve
from plait.share.join_trees import Trees
from plait.share.lattice import Problem, problem
from plait.share.linear import Solver, highs
from plait.share.shared_plan import SharedPlan, kept_mirs, kept_stores, probe_steps
from plait.share.step_cost import EngineCost, PaperCost, StepCost
from plait.share.workload import Workload

COSTS: dict[str, StepCost] = {"paper": PaperCost(), "engine": EngineCost()}


def optimise(
    workload: Workload,
    *,
    cost: str | StepCost = "engine",
    mirs: bool = True,
    copies: bool = True,
    own: Mapping[str, Orders] | None = None,
    seconds: float = SECONDS,
    gap: float = GAP,
    solver: Solver = highs,
) -> SharedPlan:
    """The plan of a workload.

    `mirs` allows intermediate results to be kept, `copies` a store to be kept by several keys.  `own` are the orders
    of queries that have too many candidates; without them such a query always takes the probe that costs least.
    """
    candidates = Candidates(workload, COSTS[cost] if isinstance(cost, str) else cost, mirs, copies)
    return plan_of(candidates, problem(candidates, own), seconds=seconds, gap=gap, solver=solver)


def plan_of(
    candidates: Candidates,
    problem: Problem,
    *,
    seconds: float = SECONDS,
    gap: float = GAP,
    solver: Solver = highs,
    compare: bool = True,
) -> SharedPlan:
    """The plan of a problem; `compare` also plans each query alone, to tell what sharing saves."""
    queries, parts = candidates.workload.queries, candidates.parts
    trees = Trees(problem, parts, candidates.pieces, candidates.nested)
    solved = solve(problem, trees, seconds=seconds, gap=gap, solver=solver)
    reasons = [
        f"query {name} has too many candidates to be planned with the others: it keeps one order per driver"
        for name in problem.alone
    ]
    if candidates.mirs:
        reasons += [
            f"query {query.name} has too many sub-joins: it is planned without intermediate results of its own"
            for query in queries
            if query.name not in problem.alone and not candidates.considers_mirs(query.join)
        ]
    return SharedPlan(
        steps={query.name: probe_steps(problem, parts, query, solved.selection) for query in queries},
        stores=kept_stores(problem.choices, solved.selection),
        mirs=kept_mirs(problem, parts, queries, solved.selection),
        cost=solved.cost,
        bound=solved.bound,
        alone=_alone(candidates, problem, trees) if compare else {},
        status="feasible" if solved.reasons else "optimal",
        reasons=(*reasons, *solved.reasons),
        variables=solved.variables,
        rows=solved.rows,
    )


def _alone(candidates: Candidates, problem: Problem, trees: Trees) -> dict[str, float]:
    """By query, the cost of the greedy plan for it alone."""
    found = {}
    for query in candidates.workload.queries:
        goals = {
            goal
            for driver in range(len(query.aliases))
            if (goal := problem.goal_of.get((query.join, driver))) is not None
        }
        found[query.name] = problem.choices.cost(greedy(problem, trees, goals))
    return found
