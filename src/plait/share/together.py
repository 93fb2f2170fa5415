"""Orders of many queries chosen together (paper 001): the joint optimiser on what is observed of a running engine.

Queries that join different streams, or on different keys, can still go a part of their way together: if both begin
with the same probes, those are made once.  `share/replan.py` asks here when `Config.sharing` is `ilp`; what comes back
are orders for the leads of all groups, and what they cost beside those in force.

Filters and windows do not keep queries apart: they share probes whatever these are (query sets), so the optimiser is
shown the bare structures.  All stores are there already, and are not chosen here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from plait.order.cost import Coefficients
from plait.order.orders import Orders
from plait.query.graph import JoinGraph
from plait.share.candidates import Candidates
from plait.share.choices import Path
from plait.share.lattice import Problem, problem
from plait.share.optimise import plan_of
from plait.share.step_cost import EngineCost, StorePrices
from plait.share.workload import Query, workload
from plait.stats.counters import QueryForecast

NO_STORES = StorePrices(write_ns=0.0, merge_ns=0.0, keep_ns=0.0)
"""Stores cost the same whatever the orders are: all that any order may look into are kept."""


@dataclass(frozen=True)
class Together:
    """Orders for all queries, and how they compare, in the optimiser's nanoseconds per epoch."""

    orders: Mapping[str, Orders]
    cost: float
    before: float
    """Of the orders in force."""
    reasons: tuple[str, ...]
    """Why they may not be the best, a sentence each."""


def together(
    leads: Mapping[str, JoinGraph],
    forecasts: Mapping[str, QueryForecast | None],
    orders: Mapping[str, Orders],
    coefficients: Coefficients,
    tasks: int,
    seconds: float,
) -> Together:
    """The cheapest orders for these queries that are found in time; those in force if nothing better is."""
    bare = {name: _bare(graph) for name, graph in leads.items()}
    cost = EngineCost(coefficients, NO_STORES, max(1, tasks))
    candidates = Candidates(workload(bare, forecasts), cost, mirs=False)
    built = problem(candidates, orders)
    before = cost_of(built, candidates.workload.queries, orders)
    plan = plan_of(candidates, built, seconds=seconds, compare=False)
    found = plan.orders()
    if plan.cost >= before:
        return Together({name: orders[name] for name in leads}, before, before, plan.reasons)
    return Together(found, plan.cost, before, plan.reasons)


def _bare(graph: JoinGraph) -> JoinGraph:
    """The structure alone."""
    return replace(
        graph,
        aliases=tuple(replace(alias, filter=None) for alias in graph.aliases),
        windows=(),
        conditions=(),
        grouping=None,
    )


def cost_of(problem: Problem, queries: tuple[Query, ...], orders: Mapping[str, Orders]) -> float:
    """What all queries cost together with given orders, each probe by the cheapest of its keys."""
    selection: dict[int, Path] = {}
    for query in queries:
        for driver, alias in enumerate(query.aliases):
            goal = problem.goal_of.get((query.join, driver))
            if goal is not None:
                pieces = [1 << query.aliases.index(name) for name in orders[query.name][alias]]
                path = _path(problem, goal, pieces)
                if path is None:
                    return float("inf")
                selection[goal] = path
    return problem.choices.cost(selection)


def _path(problem: Problem, goal: int, pieces: list[int]) -> Path | None:
    """The cheapest way through a goal that joins these pieces one after the other; None if there is none."""
    arcs, resources = problem.choices.goals[goal].arcs, problem.choices.resources
    best: dict[int, tuple[float, Path]] = {0: (0.0, ())}
    for piece in pieces:
        following: dict[int, tuple[float, Path]] = {}
        for number, arc in enumerate(arcs):
            if arc.piece == piece and arc.tail in best:
                cost, path = best[arc.tail]
                cost += sum(resources[r].cost for r in problem.choices.closure(arc.step))
                if arc.head not in following or cost < following[arc.head][0]:
                    following[arc.head] = cost, (*path, number)
        best = following
    return min(best.values())[1] if best else None
