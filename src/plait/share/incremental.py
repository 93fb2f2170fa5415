"""The incremental optimiser: iterative dynamic programming with shared costs (paper 004, section 4, Figures 5 and 7).

It solves the same problem as the program of `ilp.py`, over the same candidates and prices, without a solver:

    eager       a new query first takes the way with the fewest steps, stores and exchanges that nobody has yet,
                whatever they cost: structure only (Figure 5, ①)
    placed      then it and all that share something with it are planned by cost; all others keep their orders
    holistic    where more than a share of the queries came or went since the last time, everything is planned anew

Planning by cost goes on in iterations.  In each, dynamic programming finds for every unfinished goal the best next
`BLOCK` probes at *shared* prices: what a resource costs, divided by the goals that could still use it (the paper's
MaxShared); what is paid already costs nothing.  The cheapest are committed first, so the others see what is paid.  The
next iteration starts from there (T1, T2 of Figure 7b): whoever has gone another way cannot share a step any more.

Contract.  Deterministic, unless the time is over.  There is a complete plan before anything is improved, no step makes
it dearer, and what is decided is carried to the next call by names that do not depend on which queries there are.
Cost: O(iterations · arcs) for the goals that are planned anew, plus one round of improvement.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from plait.share.choices import Choices, Path
from plait.share.greedy import Router, losers, popularity, queries_of
from plait.share.groups import changed_share, never
from plait.share.join_trees import Trees
from plait.share.lattice import Problem
from plait.share.subjoins import SubJoin
from plait.share.workload import Query

BLOCK = 3
"""Probes that one iteration decides: up to four streams are joined by plain dynamic programming."""
ROUNDS = 3
"""Rounds of improvement, query by query."""

GoalName = tuple[SubJoin, int]
"""A sub-join and its driving member: the same goal, whatever else is planned."""
Name = tuple[Hashable, ...]
"""Of a resource."""
Steps = tuple[Name, ...]
"""Steps of a probe order, first to last."""


@dataclass(frozen=True)
class Decided:
    """What the optimiser has decided, for the next call."""

    orders: Mapping[GoalName, Steps] = field(default_factory=dict)
    uses: Mapping[GoalName, frozenset[Name]] = field(default_factory=dict)
    """By goal what it uses that costs something."""
    queries: Mapping[str, SubJoin] = field(default_factory=dict)
    basis: frozenset[str] = frozenset()
    """The queries when everything was last planned anew."""


@dataclass(frozen=True)
class Placed:
    """A selection, and how it came about."""

    selection: dict[int, Path]
    cost: float
    eager_cost: float
    """With every new query where it shares most, whatever that costs."""
    holistic: bool
    touched: tuple[str, ...]
    """The queries that were planned by cost; the orders of all others are what they were, but for improvements."""
    decided: Decided


def place(
    problem: Problem,
    trees: Trees,
    queries: Sequence[Query],
    before: Decided | None = None,
    *,
    share: float = 0.5,
    late: Callable[[], bool] = never,
) -> Placed:
    """Orders for all queries, from those before: what came or went is planned, or everything."""
    choices, before = problem.choices, before or Decided()
    goals = {q.name: _goals(problem, q.join) for q in queries}
    required = sorted({goal for mine in goals.values() for goal in mine})
    banned: frozenset[int] = frozenset()
    if choices.rivals:
        # What most would take if they were free decides by which key a store is partitioned.
        free = replace(problem, choices=replace(choices, rivals=()))
        banned = losers(choices, place(free, Trees(free, trees.parts, trees.pieces), queries, share=0.0).selection)
    router = Router(choices, popularity(choices, required), banned)
    router.restore(_carried(problem, before, banned))
    gone = {name for name, join in before.queries.items() if name not in goals or join != _join(queries, name)}
    new = [q.name for q in queries if before.queries.get(q.name) != q.join]
    lost = {(before.queries[name], driver) for name in gone for driver in range(len(before.queries[name].leaves))}
    shared = {name for goal in lost for name in before.uses.get(goal, ())}
    unused = [goal for goal in router.paths if choices.goals[goal].required and goal not in required]
    for goal in unused:
        router.take(goal)
    router.drop_unused()
    _eager(choices, router, [goal for name in goals for goal in goals[name]])
    eager_cost = choices.cost(choices.pruned_to(router.paths, required))
    # An exchange that is there is everybody's; one that only those had who are gone may have become too dear.
    joined = _uses(choices, router.paths, [goal for name in new for goal in goals[name]])
    shared |= {name for name in joined if name[0] != "exchange"}
    holistic = changed_share(set(goals), before.basis) > share
    touched = [
        q.name
        for q in queries
        if holistic or q.name in new or not shared.isdisjoint(_uses(choices, router.paths, goals[q.name]))
    ]
    mine = sorted({goal for name in touched for goal in goals[name]})
    best = _improved(problem, trees, choices.pruned_to(router.paths, required), mine, required, banned, late)
    if mine and not late():
        kept = choices.pruned_to(best, [goal for goal in required if goal not in set(mine)])
        anew = _iterated(choices, kept, mine, banned)
        other = _improved(problem, trees, choices.pruned_to(anew, required), mine, required, banned, late)
        best = min((best, other), key=choices.cost)
        best = _improved(problem, trees, best, required, required, banned, late)
    return Placed(
        selection=best,
        cost=choices.cost(best),
        eager_cost=eager_cost,
        holistic=holistic,
        touched=tuple(touched),
        decided=decided(problem, queries, best, None if holistic else before.basis),
    )


def decided(
    problem: Problem, queries: Sequence[Query], selection: Mapping[int, Path], basis: frozenset[str] | None = None
) -> Decided:
    """A selection, whoever found it, for the next call; without a `basis` all of it was planned anew."""
    choices, names = problem.choices, {goal: name for name, goal in problem.goal_of.items()}
    return Decided(
        {names[goal]: _steps(choices, goal, path) for goal, path in selection.items()},
        {names[goal]: _uses(choices, selection, [goal]) for goal in selection},
        {q.name: q.join for q in queries},
        frozenset(q.name for q in queries) if basis is None else basis,
    )


def _join(queries: Sequence[Query], name: str) -> SubJoin | None:
    return next((q.join for q in queries if q.name == name), None)


def _goals(problem: Problem, join: SubJoin) -> list[int]:
    drivers = range(len(join.leaves))
    return [goal for driver in drivers if (goal := problem.goal_of.get((join, driver))) is not None]


def _steps(choices: Choices, goal: int, path: Path) -> Steps:
    return tuple(choices.resources[choices.goals[goal].arcs[arc].step].name for arc in path)


def _carried(problem: Problem, before: Decided, banned: frozenset[int]) -> dict[int, Path]:
    """The orders of before that can still be taken, by today's numbers, with all that feeds their MIRs."""
    choices = problem.choices
    found: dict[int, Path] = {}
    for name, steps in before.orders.items():
        goal = problem.goal_of.get(name)
        path = None if goal is None else _along(choices, goal, steps)
        if goal is not None and path is not None and banned.isdisjoint(choices.used({goal: path})):
            found[goal] = path
    while torn := [g for g, path in found.items() if not _fed(choices, g, path) <= found.keys()]:
        for goal in torn:
            del found[goal]
    return found


def _along(choices: Choices, goal: int, steps: Steps) -> Path | None:
    """The path by steps of these names; None if there is none any more."""
    of, at, path = choices.goals[goal], 0, []
    for name in steps:
        here = (n for n, arc in enumerate(of.arcs) if arc.tail == at and choices.resources[arc.step].name == name)
        arc = next(here, None)
        if arc is None:
            return None
        path.append(arc)
        at = of.arcs[arc].head
    return tuple(path) if at in of.ends else None


def _fed(choices: Choices, goal: int, path: Path) -> set[int]:
    """The goals of the MIRs that a path looks up."""
    steps = [choices.goals[goal].arcs[arc].step for arc in path]
    return {g for step in steps for r in choices.closure(step) for g in choices.resources[r].goals}


def _uses(choices: Choices, paths: Mapping[int, Path], goals: Iterable[int]) -> frozenset[Name]:
    """What some goals use that costs something."""
    mine = {goal: paths[goal] for goal in goals if goal in paths}
    return frozenset(choices.resources[r].name for r in choices.used(mine) if choices.resources[r].cost > 0)


def _eager(choices: Choices, router: Router, goals: Iterable[int]) -> None:
    """Structure only: every goal takes the way with the fewest new resources."""
    for goal in goals:
        if goal not in router.paths:
            paid = {r for r, n in router.users.items() if n}
            prices = _Prices(choices, paid, router.paths, router.banned, counts=True)
            router.put(goal, prices.path(goal))


@dataclass
class _Prices:
    """What resources cost beside those that are paid, shared among the goals that could still use them."""

    choices: Choices
    paid: set[int]
    routed: Mapping[int, Path]
    banned: frozenset[int] = frozenset()
    users: Counter[int] = field(default_factory=Counter)
    """By resource the goals that could use it; one where nothing is known."""
    counts: bool = False
    """Whether every resource costs the same."""
    _known: dict[int, float] = field(default_factory=dict)
    _routes: dict[int, tuple[float, Path]] = field(default_factory=dict)

    def price(self, resource: int) -> float:
        """Of a resource and all that it needs, MIRs' goals among them."""
        known = self._known.get(resource)
        if known is None:
            known = math.inf if resource in self.banned else 0.0
            if resource not in self.paid:
                of = self.choices.resources[resource]
                known += 1.0 if self.counts else of.cost / max(1, self.users[resource])
                known += sum(self.price(need) for need in of.needs)
                fed = sum(self.route(goal)[0] for goal in of.goals if goal not in self.routed)
                known += fed if self.counts else fed / max(1, self.users[resource])
            self._known[resource] = known
        return known

    def route(self, goal: int) -> tuple[float, Path]:
        """The cheapest whole path of a goal."""
        known = self._routes.get(goal)
        if known is None:
            known = self._routes[goal] = self.block(goal, 0, len(self.choices.goals[goal].arcs))
        return known

    def path(self, goal: int) -> Path:
        """The cheapest whole path, as arcs."""
        return self.route(goal)[1]

    def block(self, goal: int, start: int, length: int) -> tuple[float, Path]:
        """The cheapest next `length` arcs from a node, or fewer that lead to an end; what they cost."""
        of = self.choices.goals[goal]
        # By node: cost, number of arcs, the arc that leads there, where it comes from.
        reached: dict[int, tuple[float, int, int, int]] = {start: (0.0, 0, -1, -1)}
        for number, arc in enumerate(of.arcs):
            if arc.tail in reached and reached[arc.tail][1] < length:
                cost, arcs = reached[arc.tail][0] + self.price(arc.step), reached[arc.tail][1] + 1
                if arc.head not in reached or cost < reached[arc.head][0]:
                    reached[arc.head] = cost, arcs, number, arc.tail
        ends = [(cost, node) for node, (cost, arcs, _, _) in reached.items() if node in of.ends or arcs == length]
        cost, at = min(ends)
        path: list[int] = []
        while at != start:
            path.append(reached[at][2])
            at = reached[at][3]
        return cost, tuple(reversed(path))


def _iterated(
    choices: Choices, kept: Mapping[int, Path], goals: Sequence[int], banned: frozenset[int]
) -> dict[int, Path]:
    """Iteration by iteration, the next probes of every goal that has not reached its end."""
    paths = dict(kept)
    paid = choices.used(paths)
    begun: dict[int, Path] = dict.fromkeys((goal for goal in goals if goal not in paths), ())
    while begun:
        users = _possible(choices, begun)
        for goal in sorted(begun, key=partial(_first_price, _Prices(choices, paid, paths, banned, users), begun)):
            prices = _Prices(choices, paid, paths, banned, users)
            of, at = choices.goals[goal], _node(choices, goal, begun[goal])
            _, block = prices.block(goal, at, BLOCK)
            begun[goal] += block
            for arc in block:
                paid.update(choices.closure(of.arcs[arc].step))
            if _node(choices, goal, begun[goal]) in of.ends:
                paths[goal] = begun.pop(goal)
        # MIRs that are looked up from now on have to be computed.
        fed = {g for r in paid for g in choices.resources[r].goals}
        begun |= dict.fromkeys(sorted(fed - paths.keys() - begun.keys()), ())
    return paths


def _first_price(prices: _Prices, begun: Mapping[int, Path], goal: int) -> tuple[float, int]:
    return prices.block(goal, _node(prices.choices, goal, begun[goal]), BLOCK)[0], goal


def _node(choices: Choices, goal: int, path: Path) -> int:
    return choices.goals[goal].arcs[path[-1]].head if path else 0


def _possible(choices: Choices, begun: Mapping[int, Path]) -> Counter[int]:
    """By resource, the unfinished goals that can still use it from where they are."""
    found: Counter[int] = Counter()
    for goal, path in begun.items():
        ahead = {_node(choices, goal, path)}
        steps = set()
        for arc in choices.goals[goal].arcs:
            if arc.tail in ahead:
                ahead.add(arc.head)
                steps.add(arc.step)
        found.update({resource for step in steps for resource in choices.closure(step)})
    return found


def _improved(
    problem: Problem,
    trees: Trees,
    selection: dict[int, Path],
    goals: Collection[int],
    required: Sequence[int],
    banned: frozenset[int],
    late: Callable[[], bool],
) -> dict[int, Path]:
    """Queries with these goals are taken out and put back, alone or as a tree of MIRs, while that saves something."""
    choices = problem.choices
    router = Router(choices, popularity(choices, required), banned)
    router.restore(selection)
    for _ in range(ROUNDS):
        before = router.total
        for join, mine in queries_of(problem, goals):
            if late():
                break
            router.put_again(mine, partial(router.put_query, join, mine, trees))
            for goal in mine:
                router.put_again([goal], partial(router.put, goal))
        if late() or router.total >= before * (1 - 1e-9):
            break
    return choices.pruned_to(router.paths, required)
