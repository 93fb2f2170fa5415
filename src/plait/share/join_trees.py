"""Binary join trees as a first selection: what a query costs if all of its intermediate results are MIRs.

Routing one goal at a time never finds a tree of MIRs: none of its MIRs pays for a single driver.  So a query is also
tried as a whole.  In a tree every node A ⋈ B is kept (but the root), the new tuples of A probe B's store and those of B
probe A's.  The best tree is found by dynamic programming over connected sets,

    best(S) = min over S = A ∪ B of  best(A) + best(B) + probes of A's new tuples into B + probes of B's into A

at prices beside what is paid already; a MIR that is there costs nothing.  O(3^n) for a clique, O(n³) for a chain.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field

from plait.share.lattice import Problem
from plait.share.subjoins import Parts, SubJoin, bits

Arcs = dict[tuple[int, int], list[int]]
"""By what has joined and what is joined: the arcs of a goal."""


@dataclass
class Trees:
    """Finds trees; remembers what the arcs of goals do."""

    problem: Problem
    parts: Parts
    pieces: Callable[[SubJoin], tuple[int, ...]]
    """`Candidates.pieces`."""
    nested: bool = True
    """Whether MIRs may be computed from other MIRs, as every inner node of a tree is."""
    _has_trees: dict[SubJoin, bool] = field(default_factory=dict)
    _arcs: dict[int, Arcs] = field(default_factory=dict)

    def best(self, join: SubJoin, price: Callable[[int], float], made: Container[int]) -> list[tuple[int, list[int]]]:
        """Goals of the best tree, in the order in which they depend on each other, and the arcs that they may use.

        `price` is what a step adds, `made` are the goals that are computed already.
        """
        split: dict[int, int] = {}
        cost = {1 << i: 0.0 for i in range(len(join.leaves))}
        for mask in join.connected[len(join.leaves) :]:
            part = self.parts.part(join, mask).join
            if all(self.problem.goal_of[part, driver] in made for driver in range(len(part.leaves))):
                cost[mask] = 0.0
                continue
            for left in _halves(mask):
                right = mask ^ left
                if left in cost and right in cost and join.around(left) & right:
                    found = cost[left] + cost[right]
                    found += self._probes(join, left, right, price) + self._probes(join, right, left, price)
                    if found < cost.get(mask, float("inf")):
                        cost[mask], split[mask] = found, left
        return [
            (goal, arcs)
            for mask in sorted(self._inner(join.everything, split), key=int.bit_count)
            for goal, arcs in self._goals(join, mask, split)
        ]

    def has_trees(self, join: SubJoin) -> bool:
        """Whether a query has trees: MIRs are among its candidates, and no members can change places."""
        found = self._has_trees.get(join)
        if found is None:
            pieces = self.pieces(join)
            parts = [self.parts.part(join, mask).join for mask in (*pieces, join.everything)]
            has_mirs = self.nested and any(mask.bit_count() > 1 for mask in pieces)
            found = has_mirs and not any(part.automorphisms for part in parts)
            self._has_trees[join] = found
        return found

    def _probes(self, join: SubJoin, before: int, piece: int, price: Callable[[int], float]) -> float:
        total = 0.0
        for driver in bits(before):
            goal = self.problem.goal_of[join, driver]
            arcs = self.problem.choices.goals[goal].arcs
            total += min(price(arcs[arc].step) for arc in self._arcs_of(goal)[before, piece])
        return total

    def _arcs_of(self, goal: int) -> Arcs:
        found = self._arcs.get(goal)
        if found is None:
            found = self._arcs[goal] = {}
            task = self.problem.tasks[goal]
            for number, (before, option) in enumerate(zip(task.before, task.options, strict=True)):
                found.setdefault((before, option.piece), []).append(number)
        return found

    def _inner(self, mask: int, split: dict[int, int]) -> Iterator[int]:
        """The sets that have to be made, the whole among them."""
        if mask in split:
            yield mask
            yield from self._inner(split[mask], split)
            yield from self._inner(mask ^ split[mask], split)

    def _goals(self, join: SubJoin, mask: int, split: dict[int, int]) -> Iterator[tuple[int, list[int]]]:
        """For every member of a set: its goal, and the arcs that lead along the tree."""
        part = self.parts.part(join, mask)
        for driver in bits(mask):
            goal = self.problem.goal_of[part.join, part.places.index(driver)]
            along, made = _path(mask, driver, split)
            inside = part.mask(made)
            steps = {(part.mask(before), part.mask(piece)) for before, piece in along}
            yield (
                goal,
                sorted(
                    arc
                    for (before, piece), arcs in self._arcs_of(goal).items()
                    if (before, piece) in steps or not (before | piece) & ~inside
                    for arc in arcs
                ),
            )


def _path(mask: int, driver: int, split: dict[int, int]) -> tuple[list[tuple[int, int]], int]:
    """The probes by which a driver climbs to a set, and the set that it starts from: itself, or a MIR that is there."""
    along = []
    while mask in split:
        side = split[mask] if split[mask] >> driver & 1 else mask ^ split[mask]
        along.append((side, mask ^ side))
        mask = side
    return along, mask


def _halves(mask: int) -> Iterator[int]:
    """The proper subsets that hold the lowest member: each way to cut a set in two, once."""
    low = mask & -mask
    rest = mask ^ low
    half = (rest - 1) & rest
    while rest:
        yield half | low
        if not half:
            return
        half = (half - 1) & rest
