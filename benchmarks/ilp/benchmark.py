"""Measures the joint optimisation of many queries: paper 001's Figure 9, a to f.

    ten       three-way queries over 10 relations: probe cost with and without sharing, size of the program (9a, 9b)
    hundred   the same over 100 relations (9c, 9d)
    speed     seconds from candidates to plan, for more and for larger queries over 100 relations (9e, 9f)

Costs are the paper's (Equation 1), copies of a store are allowed, intermediate results are among the candidates.
Seconds are given as CPU time of the process and as wall time; the first run of each size is not timed.  "Best" is the
cheapest plan that a solve with much more time finds, from the same candidates.
"""

from __future__ import annotations

import importlib.metadata
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.ilp.random_queries import GOALS, fresh, random_workload
from benchmarks.ilp.report import REPORT
from benchmarks.options import Options, chosen
from benchmarks.report import publish
from plait.share.candidates import Candidates
from plait.share.ilp_paper import paper_size
from plait.share.lattice import problem
from plait.share.optimise import plan_of
from plait.share.shared_plan import SharedPlan
from plait.share.step_cost import PaperCost
from plait.share.workload import Workload

PARTS = ("ten", "hundred", "speed")
PARALLELISM = 4
COUNTS, QUICK_COUNTS = (10, 20, 30, 40, 50, 60, 70, 80, 90, 100), (3, 6)
QUICK_SIZES = ((4, 3), (2, 4))
SOLVER_SHARE = 0.4
"""The part of the wanted seconds that the solver may use."""
LONG_SECONDS, QUICK_LONG_SECONDS = 30.0, 0.5
REPEAT = 3


@dataclass(frozen=True, slots=True)
class Setup:
    """Options with every default filled in."""

    quick: bool
    parts: tuple[str, ...]
    repeat: int
    """Workloads that are drawn for each point."""
    long_seconds: float
    highspy: str


def settle(options: Options) -> Setup:
    """Fill in the defaults.

    >>> settle(Options(quick=True)).parts, settle(Options()).repeat
    (('ten', 'hundred', 'speed'), 3)
    """
    return Setup(
        quick=options.quick,
        parts=chosen("part", options.parts, PARTS, PARTS),
        repeat=options.repeat or (1 if options.quick else REPEAT),
        long_seconds=QUICK_LONG_SECONDS if options.quick else LONG_SECONDS,
        highspy=importlib.metadata.version("highspy"),
    )


@dataclass(frozen=True, slots=True)
class Timed:
    """A plan, and what it took."""

    plan: SharedPlan
    candidates_cpu: float
    """Seconds of CPU for the candidates."""
    cpu: float
    """Seconds of CPU from candidates to plan."""
    wall: float


def planned(given: Workload, seconds: float, *, compare: bool = False) -> Timed:
    """Plans a workload from nothing."""
    begun = time.process_time()
    candidates = Candidates(fresh(given), PaperCost(PARALLELISM))
    found = problem(candidates)
    built, wall = time.process_time(), time.perf_counter()
    plan = plan_of(candidates, found, seconds=seconds, compare=compare)
    return Timed(plan, built - begun, time.process_time() - built, time.perf_counter() - wall)


def run(out: Path, options: Options, console: Console) -> int:
    """Run the benchmark and write its report into `out`; 0 if every plan costs no less than proven and saves."""
    setup = settle(options)
    parts = publish("ilp", setup, measured(setup, console), REPORT, out, console)
    return 0 if all(part["equal"] for part in parts) else 1


def measured(setup: Setup, console: Console) -> Iterator[dict[str, Any]]:
    """The chosen parts."""
    for part in setup.parts:
        console.print(f"{part} …", highlight=False)
        yield speed(setup) if part == "speed" else sharing(part, 10 if part == "ten" else 100, setup)


def sharing(part: str, relations: int, setup: Setup) -> dict[str, Any]:
    """Costs and sizes for a growing number of three-way queries."""
    points = []
    for count in QUICK_COUNTS if setup.quick else COUNTS:
        drawn = [random_workload(count, 3, relations, seed) for seed in range(setup.repeat)]
        timed = [planned(given, 5.0, compare=True) for given in drawn]
        sizes = [paper_size(Candidates(given, PaperCost(PARALLELISM))) for given in drawn]
        points.append(
            {
                "queries": count,
                "distinct": _mean([len(given.queries) for given in drawn]),
                "alone": _mean([sum(t.plan.alone.values()) for t in timed]),
                "together": _mean([t.plan.cost for t in timed]),
                "bound": _mean([t.plan.bound for t in timed]),
                "variables": _mean([t.plan.variables for t in timed]),
                "paper_variables": _mean([size.variables for size in sizes]),
                "paper_orders": _mean([size.orders for size in sizes]),
                "cpu": statistics.median(t.cpu for t in timed),
                "candidates_cpu": statistics.median(t.candidates_cpu for t in timed),
                "right": all(_is_right(t.plan) for t in timed),
            }
        )
    return {
        "part": part,
        "title": f"Three-way queries over {relations} relations (Figure 9{'a, 9b' if relations == 10 else 'c, 9d'})",
        "relations": relations,
        "points": points,
        "equal": all(point["right"] for point in points),
    }


def speed(setup: Setup) -> dict[str, Any]:
    """Seconds, and how far each plan is from the best that is known."""
    rows = []
    for count, size in QUICK_SIZES if setup.quick else GOALS:
        goal, paper = GOALS.get((count, size), (1.0, None))
        drawn = [random_workload(count, size, 100, seed) for seed in range(setup.repeat)]
        planned(drawn[0], SOLVER_SHARE * goal)
        timed = [planned(given, SOLVER_SHARE * goal) for given in drawn]
        best = [planned(given, setup.long_seconds).plan for given in drawn[:1]]
        above = [t.plan.cost / b.cost - 1 for t, b in zip(timed, best, strict=False)]
        rows.append(
            {
                "queries": count,
                "size": size,
                "goal": goal,
                "paper": paper,
                "cpu": statistics.median(t.cpu for t in timed),
                "wall": statistics.median(t.wall for t in timed),
                "candidates_cpu": statistics.median(t.candidates_cpu for t in timed),
                "variables": _mean([t.plan.variables for t in timed]),
                "above_best": max(above),
                "above_bound": max(b.cost / b.bound - 1 if b.bound else float("inf") for b in best),
                "right": all(_is_right(t.plan) for t in timed),
            }
        )
    return {
        "part": "speed",
        "title": "Seconds from candidates to plan, over 100 relations (Figure 9e, 9f)",
        "rows": rows,
        "equal": all(row["right"] for row in rows),
    }


def _is_right(plan: SharedPlan) -> bool:
    """Whether a plan has an order for every driver, and costs neither less than possible nor more than apart."""
    orders = [order for drivers in plan.steps.values() for order in drivers.values()]
    alone = sum(plan.alone.values()) if plan.alone else float("inf")
    return all(orders) and plan.bound <= plan.cost * (1 + 1e-9) <= alone * (1 + 1e-6)


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values)
