"""A good selection without a solver: each query takes what costs least beside what the others pay already.

A query is put in by routing its goals one after the other, each along the path that adds least, or as the best tree of
MIRs (share/join_trees.py), whichever is cheaper.  The first time, trees are made of steps that many queries could use;
then every query is taken out and put back, and every goal alone, until nothing changes.  A MIR is priced with all that
feeds it, unless it is there.

It is the solver's first solution, and the plan where there is no solver's.  A round costs O(goals · arcs).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from plait.share.choices import TIE, Choices, Path, Selection
from plait.share.join_trees import Trees
from plait.share.lattice import Problem
from plait.share.subjoins import SubJoin

MOST_ROUNDS = 10
"""Rounds of improvement; most inputs need three."""


def greedy(
    problem: Problem,
    trees: Trees,
    goals: Collection[int],
    *,
    rounds: int = MOST_ROUNDS,
    late: Callable[[], bool] = lambda: False,
) -> dict[int, Path]:
    """A valid selection for these required goals; `late` tells when to stop improving."""
    choices = problem.choices
    groups = queries_of(problem, goals)
    router = Router(choices, popularity(choices, goals))
    for join, mine in groups:
        router.put_query(join, mine, trees, hopeful=True)
    if choices.rivals:
        router = Router(choices, router.popularity, banned=losers(choices, router.paths))
        for join, mine in groups:
            router.put_query(join, mine, trees, hopeful=True)
    for _ in range(rounds):
        before = router.total
        for join, mine in groups:
            if late():
                break
            if len(groups) > 1:
                router.put_again(mine, partial(router.put_query, join, mine, trees))
            for goal in mine:
                router.put_again([goal], partial(router.put, goal))
        if late() or router.total >= before * (1 - TIE):
            break
    return choices.pruned_to(router.paths, goals)


def queries_of(problem: Problem, goals: Collection[int]) -> list[tuple[SubJoin, list[int]]]:
    """The goals of each query."""
    found: dict[SubJoin, list[int]] = {}
    for goal in sorted(goals):
        found.setdefault(problem.tasks[goal].join, []).append(goal)
    return list(found.items())


def popularity(choices: Choices, goals: Collection[int]) -> Counter[int]:
    """By step, the number of goals that could use it."""
    return Counter(step for goal in goals for step in {arc.step for arc in choices.goals[goal].arcs})


def losers(choices: Choices, selection: Selection) -> frozenset[int]:
    """All partitionings of a store but the one that most of the goals took when they were free."""
    votes: Counter[int] = Counter()
    for goal, path in selection.items():
        for arc in path:
            votes.update(choices.closure(choices.goals[goal].arcs[arc].step))
    return frozenset(r for group in choices.rivals for r in group if r != max(group, key=lambda g: votes[g]))


@dataclass
class Router:
    """The paths so far, how many use each resource, and what all together cost."""

    choices: Choices
    popularity: Counter[int]
    banned: frozenset[int] = frozenset()
    paths: dict[int, Path] = field(default_factory=dict)
    users: Counter[int] = field(default_factory=Counter)
    total: float = 0.0
    _added: dict[int, float] = field(default_factory=dict)
    """What each resource adds to the cost; forgotten whenever the selection changes."""
    _routes: dict[int, tuple[float, Path]] = field(default_factory=dict)

    def put_query(self, join: SubJoin, goals: Sequence[int], trees: Trees, *, hopeful: bool = False) -> None:
        """Adds the goals of a query, as single paths or as a tree.

        If `hopeful`, the tree is made of steps that others could use too, as if all of them shared their costs.
        """
        before = dict(self.paths)
        for goal in goals:
            self.put(goal)
        if trees.has_trees(join):
            apart, total = dict(self.paths), self.total
            self.restore(before)
            price = self._hoped_price if hopeful else self._own_price
            tree = trees.best(join, price, self.paths)
            for goal, arcs in tree:
                if goal not in self.paths:
                    self.put(goal, arcs)
            self.drop_unused()
            # Without finite prices there is no tree.
            if not tree or self.total > total * (1 + TIE):
                self.restore(apart)

    def put_again(self, goals: Iterable[int], put: Callable[[], None]) -> None:
        """Takes goals out and puts them back; the old paths stay if that is not cheaper."""
        total, paths = self.total, dict(self.paths)
        for goal in goals:
            self.take(goal)
        self.drop_unused()
        put()
        if self.total >= total * (1 - TIE):
            self.restore(paths)

    def put(self, goal: int, arcs: Sequence[int] | None = None) -> None:
        """Gives a goal the path that adds least, by some of its arcs or all, and computes what that path needs."""
        path = self._route(goal)[1] if arcs is None else self._cheapest(goal, arcs)[1]
        self.paths[goal] = path
        steps = [self.choices.goals[goal].arcs[arc].step for arc in path]
        for step in steps:
            self._use(step, 1)
        for step in steps:
            for resource in self.choices.closure(step):
                for fed in self.choices.resources[resource].goals:
                    if fed not in self.paths:
                        self.put(fed)

    def take(self, goal: int) -> None:
        """Without the path of a goal."""
        for arc in self.paths.pop(goal):
            self._use(self.choices.goals[goal].arcs[arc].step, -1)

    def drop_unused(self) -> None:
        """Goals of MIRs that nobody uses are not computed."""
        while True:
            wanted = {g for r, n in self.users.items() if n > 0 for g in self.choices.resources[r].goals}
            unused = [g for g in self.paths if not self.choices.goals[g].required and g not in wanted]
            if not unused:
                return
            for goal in unused:
                self.take(goal)

    def restore(self, paths: Mapping[int, Path]) -> None:
        """These paths and no others."""
        for goal in [g for g, path in self.paths.items() if paths.get(g) != path]:
            self.take(goal)
        for goal, path in paths.items():
            if goal not in self.paths:
                self.paths[goal] = path
                for arc in path:
                    self._use(self.choices.goals[goal].arcs[arc].step, 1)

    def _use(self, resource: int, times: int) -> None:
        for needed in self.choices.closure(resource):
            before = self.users[needed]
            self.users[needed] = before + times
            if not before or not before + times:
                self.total += self.choices.resources[needed].cost * times
                self._added.clear()
                self._routes.clear()

    # ------------------------------------------------------------ prices

    def _route(self, goal: int) -> tuple[float, Path]:
        known = self._routes.get(goal)
        if known is None:
            known = self._routes[goal] = self._cheapest(goal, range(len(self.choices.goals[goal].arcs)))
        return known

    def _cheapest(self, goal: int, arcs: Iterable[int]) -> tuple[float, Path]:
        """The path that adds least, and what it adds: arcs come in an order in which one pass is enough."""
        of = self.choices.goals[goal]
        cost = [math.inf] * of.nodes
        came = [-1] * of.nodes
        cost[0] = 0.0
        for number in arcs:
            arc = of.arcs[number]
            reached = cost[arc.tail] + self._marginal(arc.step)
            if reached < cost[arc.head] or (came[arc.head] < 0 and (came[arc.tail] >= 0 or not arc.tail)):
                cost[arc.head], came[arc.head] = reached, number
        at = min((end for end in of.ends if came[end] >= 0), key=lambda end: cost[end])
        total, path = cost[at], []
        while at:
            path.append(came[at])
            at = of.arcs[came[at]].tail
        return total, tuple(reversed(path))

    def _marginal(self, resource: int) -> float:
        """What using a resource adds to the cost."""
        known = self._added.get(resource)
        if known is not None:
            return known
        if resource in self.banned:
            found = math.inf
        elif self.users[resource]:
            found = 0.0
        else:
            of = self.choices.resources[resource]
            found = of.cost
            for need in of.needs:
                found += self._marginal(need)
            for goal in of.goals:
                if goal not in self.paths:
                    found += self._route(goal)[0]
        self._added[resource] = found
        return found

    def _hoped_price(self, step: int) -> float:
        """What a step adds if all goals that could use it did."""
        return self._own_price(step) / max(self.popularity[step], 1)

    def _own_price(self, step: int) -> float:
        """What a step adds, apart from feeding MIRs."""
        found = 0.0
        for resource in self.choices.closure(step):
            if resource in self.banned:
                return math.inf
            if not self.users[resource]:
                found += self.choices.resources[resource].cost
        return found
