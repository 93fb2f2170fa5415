"""The joint optimisation as plain data: goals to reach, ways to reach them, and things that are paid for once.

    goal        a (sub-)join that must be computed for the new rows of one member: a small acyclic graph whose nodes are
                what has been joined, and whose arcs are probes.  A path from node 0 to an end is a probe order
    resource    something with a cost that is paid once, however many use it: a step, a store, a MIR, an exchange

An arc uses its step; a resource needs other resources; a MIR needs its goals, one for each member.  The cost of a
selection is the cost of everything that it uses, directly or not.  Nothing here knows of relations or of a solver.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

Path = tuple[int, ...]
"""Arcs of a goal, by number, first to last."""
Selection = Mapping[int, Path]
"""A path for each goal that is computed, by the number of the goal."""

TIE = 1e-9
"""Relative difference below which two costs are equal."""


@dataclass(frozen=True, slots=True)
class Resource:
    """Something that is paid for once."""

    name: tuple[Hashable, ...]
    cost: float
    needs: tuple[int, ...] = ()
    """Resources that it cannot do without."""
    goals: tuple[int, ...] = ()
    """Goals that must be computed for it: those of a MIR."""


@dataclass(frozen=True, slots=True)
class Arc:
    """A probe: from one node of a goal to the next."""

    tail: int
    head: int
    step: int
    """The resource that is used."""
    piece: int
    """The members that it joins, as a mask: one, or those of a MIR.  No path joins a member twice."""


@dataclass(frozen=True)
class Goal:
    """What must be computed for one driving member.  Arcs into a node come before those that leave it."""

    arcs: tuple[Arc, ...]
    ends: tuple[int, ...]
    required: bool
    """Whether a query needs it; otherwise it is computed for a MIR that is kept."""
    nodes: int


@dataclass(frozen=True)
class Choices:
    """A problem: a path for every required goal and for those of all MIRs in use, at the least cost."""

    goals: tuple[Goal, ...]
    resources: tuple[Resource, ...]
    rivals: tuple[tuple[int, ...], ...] = ()
    """Resources of which at most one may be used: the partitionings of one store, where it has no copies."""

    @cached_property
    def required(self) -> tuple[int, ...]:
        """The goals that queries need."""
        return tuple(number for number, goal in enumerate(self.goals) if goal.required)

    def used(self, selection: Selection) -> set[int]:
        """The resources of a selection: its steps and what they need."""
        found: set[int] = set()
        waiting = [self.goals[g].arcs[a].step for g, path in selection.items() for a in path]
        while waiting:
            resource = waiting.pop()
            if resource not in found:
                found.add(resource)
                waiting.extend(self.resources[resource].needs)
        return found

    def cost(self, selection: Selection) -> float:
        """The cost of all that a selection uses."""
        return sum(self.resources[r].cost for r in self.used(selection))

    def flaw(self, selection: Selection, goals: Iterable[int] | None = None) -> str | None:
        """What is wrong with a selection for some goals, by default all required ones; None if it can be executed."""
        used = self.used(selection)
        wanted = {*(self.required if goals is None else goals), *(g for r in used for g in self.resources[r].goals)}
        for number in sorted(wanted):
            if number not in selection:
                return f"goal {number} has no probe order"
            goal, at = self.goals[number], 0
            for arc in (goal.arcs[a] for a in selection[number]):
                if arc.tail != at:
                    return f"the probe order of goal {number} is torn"
                at = arc.head
            if at not in goal.ends:
                return f"the probe order of goal {number} is incomplete"
        if any(sum(r in used for r in group) > 1 for group in self.rivals):
            return "a store is partitioned by two attributes"
        return None

    def pruned_to(self, selection: Selection, goals: Iterable[int]) -> dict[int, Path]:
        """The paths of these goals and of the MIRs that they use, directly or not."""
        kept = {g: selection[g] for g in goals}
        while more := self._fed(kept) - kept.keys():
            kept |= {g: selection[g] for g in more}
        return kept

    def _fed(self, selection: Selection) -> set[int]:
        return {g for r in self.used(selection) for g in self.resources[r].goals}

    def components(self) -> list[tuple[int, ...]]:
        """The goals in groups that have nothing in common that costs; each group can be solved by itself."""
        leader = list(range(len(self.goals)))

        def find(goal: int) -> int:
            while leader[goal] != goal:
                leader[goal] = leader[leader[goal]]
                goal = leader[goal]
            return goal

        def join(goals: Iterable[int]) -> None:
            first, *others = goals
            for other in others:
                leader[find(other)] = find(first)

        rival = {r: group[0] for group in self.rivals for r in group}
        users: dict[int, set[int]] = {}
        for number, goal in enumerate(self.goals):
            for step in {arc.step for arc in goal.arcs}:
                for resource in self._closures[step]:
                    if self.resources[resource].cost > 0 or resource in rival or self.resources[resource].goals:
                        users.setdefault(rival.get(resource, resource), set()).add(number)
                    for fed in self.resources[resource].goals:
                        join((number, fed))
        for goals in users.values():
            join(goals)
        groups: dict[int, list[int]] = {}
        for number in range(len(self.goals)):
            groups.setdefault(find(number), []).append(number)
        return [tuple(group) for group in groups.values()]

    @cached_property
    def _closures(self) -> tuple[tuple[int, ...], ...]:
        """By resource: it and all that it needs, directly or not.  Needs come before those who need them."""
        found: list[tuple[int, ...]] = []
        for number, resource in enumerate(self.resources):
            found.append(tuple(dict.fromkeys([number, *(n for need in resource.needs for n in found[need])])))
        return tuple(found)

    def closure(self, resource: int) -> tuple[int, ...]:
        """A resource and all that it needs."""
        return self._closures[resource]
