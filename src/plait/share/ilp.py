"""The joint optimisation as an integer linear program over sets (share/lattice.py), solved part by part.

Every goal has a unit of flow from its first node to an end; that of a MIR's goal is as large as the MIR's variable.  A
resource's variable is at least what any goal sends through the arcs that use it:

    Σ out(start) = 1, or y_mir                             for every goal
    Σ in = Σ out                                           for every other node that is no end
    Σ flow of the arcs by one step        ≤ y_step         for every goal and step that several goals have
    Σ flow of the arcs that join a piece  ≤ y_store, …     for every goal, piece and resource that its steps need
    y_resource ≤ y_need                                    for every need of a store
    Σ y ≤ 1                                                for the partitionings of a store without copies

    min Σ cost · y

A path joins a piece once at most, which is why the flow of *all* its arcs counts together: that bounds the relaxation
far better than one row per arc.  A step that only one goal has needs no variable of its own.  Of the variables only
the flows need to be declared integral: costs push the others to the largest flow below them.

Goals that have nothing in common are solved apart, each within its share of the time.  The greedy selection is the
first solution of each part, and its answer where the solver is late, fails, or answers what is no plan.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from plait.share.choices import Choices, Path, Selection
from plait.share.greedy import MOST_ROUNDS, greedy
from plait.share.join_trees import Trees
from plait.share.lattice import Problem
from plait.share.linear import Program, Solver, highs

GAP = 0.005
"""Relative distance from the best plan at which the solver may stop."""
SECONDS = 2.0
"""Time for all parts together."""
SMALL = 50
"""Arcs of a part below which the solver is faster than any improvement by hand."""
BATCH = 1500
"""Arcs of small parts that are solved together."""


@dataclass(frozen=True)
class Solved:
    """A selection, and how good it is known to be."""

    selection: dict[int, Path]
    cost: float
    bound: float
    """No selection costs less."""
    greedy_cost: float
    reasons: tuple[str, ...]
    """Why the selection may not be the best, a sentence each; empty if it is, within the gap."""
    parts: int
    """Groups of queries that have nothing in common."""
    variables: int
    rows: int


def solve(
    problem: Problem, trees: Trees, *, seconds: float = SECONDS, gap: float = GAP, solver: Solver = highs
) -> Solved:
    """The cheapest selection that is found within the time."""
    choices, deadline = problem.choices, time.monotonic() + seconds
    selection: dict[int, Path] = {}
    first: dict[int, Path] = {}
    reasons: dict[str, None] = {}
    bound, variables, rows = 0.0, 0, 0
    parts = [part for part in choices.components() if any(choices.goals[goal].required for goal in part)]
    batches = _batches(problem, parts)
    for goals in batches:
        start: dict[int, Path] = {}
        for part in goals:
            required = [goal for goal in part if choices.goals[goal].required]
            arcs = sum(len(choices.goals[goal].arcs) for goal in part)
            rounds = 0 if arcs < SMALL else MOST_ROUNDS
            start |= greedy(problem, trees, required, rounds=rounds, late=lambda: time.monotonic() > deadline)
        first |= start
        model = build(choices, [goal for part in goals for goal in part])
        variables, rows = variables + len(model.program.cost), rows + len(model.program.lower)
        left = deadline - time.monotonic()
        # Half of what is left for each, so that one hard part leaves time for the others.
        found, low, reason = _answer(choices, model, start, left if goals is batches[-1] else left / 2, gap, solver)
        selection |= found
        bound += low
        if reason is not None:
            reasons[reason] = None
    cost = choices.cost(selection)
    return Solved(selection, cost, min(bound, cost), choices.cost(first), tuple(reasons), len(parts), variables, rows)


def _batches(problem: Problem, parts: Sequence[tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
    """The parts in the order in which they are solved: first those of several queries, where most is to be gained.

    Small parts go to the solver together, because to call it takes longer than to solve one of them.
    """
    goals, tasks = problem.choices.goals, problem.tasks

    def queries(part: tuple[int, ...]) -> int:
        return len({tasks[goal].join for goal in part if goals[goal].required})

    batches: list[list[tuple[int, ...]]] = []
    room = 0
    for part in sorted(parts, key=lambda part: (-queries(part), part)):
        arcs = sum(len(goals[goal].arcs) for goal in part)
        if arcs > room or arcs >= SMALL:
            batches.append([])
            room = BATCH if arcs < SMALL else 0
        batches[-1].append(part)
        room -= arcs
    return batches


def _answer(
    choices: Choices, model: Model, start: dict[int, Path], seconds: float, gap: float, solver: Solver
) -> tuple[dict[int, Path], float, str | None]:
    """The solver's selection if it is one and better, else `start`; a lower bound; and why it may not be the best."""
    cost = choices.cost(start)
    required = [goal for goal in start if choices.goals[goal].required]
    if seconds <= 0:
        return start, 0.0, "the time was over before the solver began, so the greedy plan is used"
    try:
        answer = solver(model.program, model.values(start), seconds, gap)
        found = None if answer.values is None else model.selection(answer.values)
        bound = float(answer.bound)
    # Whatever a solver does, there is a plan.
    except Exception as error:
        return start, 0.0, f"the solver failed ({type(error).__name__}: {error}), so the greedy plan is used"
    if answer.values is None:
        return start, 0.0, "the solver found no plan in time, so the greedy plan is used"
    if found is None or (flaw := choices.flaw(found, required)) is not None:
        said = "no probe orders" if found is None else flaw
        return start, 0.0, f"the solver's answer is no plan ({said}), so the greedy plan is used"
    if choices.cost(found) > cost:
        found = start
    # No cost is negative, and a bound above the cost of a plan that is there is none.
    bound = min(max(bound, 0.0), choices.cost(found)) if math.isfinite(bound) else 0.0
    reason = None if answer.proven else "the solver's time was over, so the best plan so far is used"
    return found, bound, reason


@dataclass
class Model:
    """The program of some goals, and what its variables mean."""

    choices: Choices
    program: Program = field(default_factory=Program)
    flow: dict[tuple[int, int], int] = field(default_factory=dict)
    """By goal and arc."""
    use: dict[int, int] = field(default_factory=dict)
    """By resource."""

    def values(self, selection: Selection) -> list[float]:
        """A selection as values of the variables."""
        found = [0.0] * len(self.program.cost)
        for resource in self.choices.used(selection):
            if resource in self.use:
                found[self.use[resource]] = 1.0
        for goal, path in selection.items():
            for arc in path:
                found[self.flow[goal, arc]] = 1.0
        return found

    def selection(self, values: Sequence[float]) -> dict[int, Path] | None:
        """The paths along which at least half a unit flows, of all goals that are needed; None if one is torn."""
        found: dict[int, Path] = {}
        goals = {goal for goal, _ in self.flow}
        waiting = [goal for goal in goals if self.choices.goals[goal].required]
        while waiting:
            goal = waiting.pop()
            if goal in found:
                continue
            path = self._path(goal, values)
            if path is None:
                return None
            found[goal] = path
            for arc in path:
                for resource in self.choices.closure(self.choices.goals[goal].arcs[arc].step):
                    waiting += self.choices.resources[resource].goals
        return found

    def _path(self, goal: int, values: Sequence[float]) -> Path | None:
        of, at, path = self.choices.goals[goal], 0, []
        leaving = {arc.tail: n for n, arc in enumerate(of.arcs) if values[self.flow[goal, n]] > 0.5}
        while at not in of.ends:
            if at not in leaving:
                return None
            path.append(leaving[at])
            at = of.arcs[leaving[at]].head
        return tuple(path)


def build(choices: Choices, goals: Sequence[int]) -> Model:
    """The program of goals that have nothing in common with others."""
    model = Model(choices)
    users: dict[int, set[int]] = {}
    for goal in goals:
        for arc in choices.goals[goal].arcs:
            users.setdefault(arc.step, set()).add(goal)
    shared = {step for step, of in users.items() if len(of) > 1 and choices.resources[step].cost > 0}
    rivals = {r for group in choices.rivals for r in group}
    use = _uses(model, rivals)
    told = {step: _told(choices, step, rivals) for step in users}
    supply = {g: r for r, resource in enumerate(choices.resources) for g in resource.goals}
    for goal in goals:
        _flow(model, goal, shared, None if choices.goals[goal].required else use(supply[goal]))
        _links(model, goal, shared, told, use)
    for resource in list(model.use):
        for need in _told(choices, resource, rivals):
            model.program.row(((use(need), 1.0), (use(resource), -1.0)), 0.0, 1.0)
    for group in choices.rivals:
        mine = [(model.use[r], 1.0) for r in group if r in model.use]
        if len(mine) > 1:
            model.program.row(mine, 0.0, 1.0)
    return model


def _uses(model: Model, rivals: set[int]) -> Callable[[int], int]:
    def use(resource: int) -> int:
        if resource not in model.use:
            model.use[resource] = model.program.variable(
                model.choices.resources[resource].cost, integral=resource in rivals
            )
        return model.use[resource]

    return use


def _told(choices: Choices, resource: int, rivals: set[int]) -> list[int]:
    """The needs of a resource that cost something, feed something or exclude others; the rest is looked through."""
    found: list[int] = []
    for need in choices.resources[resource].needs:
        of = choices.resources[need]
        if of.cost > 0 or of.goals or need in rivals:
            found.append(need)
        else:
            found += _told(choices, need, rivals)
    return list(dict.fromkeys(found))


def _flow(model: Model, goal: int, shared: set[int], supply: int | None) -> None:
    """A goal's variables, and the rows that make them a path."""
    of, program = model.choices.goals[goal], model.program
    balance: list[list[tuple[int, float]]] = [[] for _ in range(of.nodes)]
    for number, arc in enumerate(of.arcs):
        own = 0.0 if arc.step in shared else model.choices.resources[arc.step].cost
        flow = model.flow[goal, number] = program.variable(own)
        balance[arc.tail].append((flow, 1.0))
        balance[arc.head].append((flow, -1.0))
    if supply is None:
        program.row(balance[0], 1.0, 1.0)
    else:
        program.row([*balance[0], (supply, -1.0)], 0.0, 0.0)
    for node in range(1, of.nodes):
        if node not in of.ends:
            program.row(balance[node], 0.0, 0.0)


def _links(model: Model, goal: int, shared: set[int], told: Mapping[int, list[int]], use: Callable[[int], int]) -> None:
    """The rows that make resources at least as large as the flow through them."""
    choices, program = model.choices, model.program
    by_step: dict[int, list[int]] = {}
    by_need: dict[tuple[int, int], list[int]] = {}
    for number, arc in enumerate(choices.goals[goal].arcs):
        flow = model.flow[goal, number]
        if arc.step in shared:
            by_step.setdefault(arc.step, []).append(flow)
        for need in told[arc.step]:
            by_need.setdefault((need, arc.piece), []).append(flow)
    for step, flows in by_step.items():
        program.row([(use(step), 1.0), *((flow, -1.0) for flow in flows)], 0.0, 1.0)
    for (need, _), flows in by_need.items():
        program.row([(use(need), 1.0), *((flow, -1.0) for flow in flows)], 0.0, 1.0)
