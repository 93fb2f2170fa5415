"""Candidates as a problem over *sets* of relations: the small form of the joint optimisation.

Algorithm 2 of paper 001 has a variable for every probe order and every decoration of it with partitionings, and one for
every prefix of them.  Here a goal (a query or MIR, and the member whose new rows drive it) is a graph with one node per
set of members that has joined and place where its tuples stand; its arcs are the probes that lead from set to set.

Both have the same optimum.

(a) A choice of probe orders is a path in each goal's graph.  A step of this form is a class of the paper's steps: the
prefixes that join the same sub-join for the same driver and stand at the same place.  All of a class cost the same
(share/step_cost.py), so paying once for the class costs no more than paying for each of its steps.

(b) Conversely, take a best choice of this form.  A node stands for one canonical sub-join with its driver and place,
whatever goal it is in.  Of all used steps that lead to the same node keep one, the same for all goals: it is a
candidate of every query that comes by the node, because they all contain that sub-join.  Sets only grow, so following
the kept steps backwards ends at the driver.  Now every goal reaches a node by one and the same sequence of steps, so no
class has two prefixes, and the paper's form pays the same.  Steps were only dropped, so no other store, MIR or exchange
is needed, and no store got another partitioning.

The number of nodes is that of connected sets (2^(n−1) for a clique, n² for a chain), not that of sequences.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from plait.order.orders import Orders
from plait.share.candidates import Candidates, Option, Store, joinable
from plait.share.choices import Arc, Choices, Goal, Resource
from plait.share.step_cost import Once, Standing
from plait.share.subjoins import SubJoin, bits


@dataclass(frozen=True)
class Task:
    """What a goal means: its sub-join, the member that drives it, and what each of its arcs does."""

    join: SubJoin
    driver: int
    options: tuple[Option, ...]
    """By arc."""
    before: tuple[int, ...]
    """By arc: the members that have joined."""


@dataclass(frozen=True)
class Problem:
    """Choices, and what their numbers stand for."""

    choices: Choices
    tasks: tuple[Task, ...]
    """By goal."""
    goal_of: Mapping[tuple[SubJoin, int], int]
    """By sub-join and driving member."""
    alone: tuple[str, ...]
    """Queries that have too many candidates: one order each, their own."""


def problem(candidates: Candidates, own: Mapping[str, Orders] | None = None) -> Problem:
    """The problem of a workload.  `own` are the orders that queries with too many candidates keep, where known."""
    builder = _Builder(candidates)
    alone = []
    for query in candidates.workload.queries:
        orders = None
        if candidates.explodes(query.join):
            alone.append(query.name)
            known = (own or {}).get(query.name, {})
            orders = {
                driver: [query.aliases.index(alias) for alias in known.get(name, ())]
                for driver, name in enumerate(query.aliases)
            }
        for driver in range(len(query.join.leaves)):
            builder.goal(query.join, driver, required=True, order=None if orders is None else orders[driver])
    return builder.built(tuple(alone))


@dataclass
class _Graph:
    """A goal while it is being built."""

    task: tuple[SubJoin, int]
    required: bool
    arcs: list[Arc] = field(default_factory=list)
    options: list[Option] = field(default_factory=list)
    before: list[int] = field(default_factory=list)
    nodes: dict[tuple[int, Standing], int] = field(default_factory=dict)

    def node(self, joined: int, standing: Standing) -> int:
        return self.nodes.setdefault((joined, standing), len(self.nodes))


@dataclass
class _Builder:
    """Goals and resources while they are being collected."""

    candidates: Candidates
    graphs: list[_Graph] = field(default_factory=list)
    goal_of: dict[tuple[SubJoin, int], int] = field(default_factory=dict)
    resources: list[Resource] = field(default_factory=list)
    number: dict[tuple[Hashable, ...], int] = field(default_factory=dict)
    stores: dict[SubJoin, list[int]] = field(default_factory=dict)

    def goal(self, join: SubJoin, driver: int, *, required: bool, order: list[int] | None = None) -> int:
        """The number of a goal; members that can change places drive the same one."""
        driver = min([driver, *(places[driver] for places in join.automorphisms)])
        known = self.goal_of.get((join, driver))
        if known is None:
            known = self.goal_of[join, driver] = len(self.graphs)
            graph = _Graph((join, driver), required)
            self.graphs.append(graph)
            graph.node(1 << driver, Standing())
            if order is None:
                self._all_orders(graph)
            else:
                self._one_order(graph, order)
        elif required:
            self.graphs[known].required = True
        return known

    def _all_orders(self, graph: _Graph) -> None:
        """Every set in ascending size, and every probe that goes on from it."""
        (join, driver), pieces = graph.task, self.candidates.pieces(graph.task[0])
        reached: list[list[tuple[int, Standing]]] = [[] for _ in range(len(join.leaves) + 1)]
        reached[1].append((1 << driver, Standing()))
        for smaller in reached[:-1]:
            for joined, standing in smaller:
                for piece in joinable(join, joined, pieces):
                    for option in self.candidates.options(join, driver, joined, standing, piece):
                        after = joined | piece, option.price.after
                        if after not in graph.nodes:
                            reached[after[0].bit_count()].append(after)
                        self._arc(graph, (joined, standing), after, option)

    def _one_order(self, graph: _Graph, order: list[int]) -> None:
        """One path: by the given order, or always the probe that costs least."""
        join, driver = graph.task
        joined, standing = 1 << driver, Standing()
        while joined != join.everything:
            following = [1 << i for i in bits(join.around(joined))]
            if order:
                following = [next(1 << i for i in order if 1 << i in following)]
            options = [o for p in following for o in self.candidates.options(join, driver, joined, standing, p)]
            option = min(options, key=lambda o: (o.price.cost, repr(o.store)))
            after = joined | option.piece, option.price.after
            self._arc(graph, (joined, standing), after, option)
            joined, standing = after

    def _arc(self, graph: _Graph, before: tuple[int, Standing], after: tuple[int, Standing], option: Option) -> None:
        step = self.number.get(option.name)
        if step is None:
            needs = (self._store(option.store), *(self._once(once) for once in option.price.needs))
            step = self._resource(option.name, option.price.cost, needs)
        graph.arcs.append(Arc(graph.node(*before), graph.node(*after), step, option.piece))
        graph.options.append(option)
        graph.before.append(before[0])

    def _store(self, store: Store) -> int:
        name = ("store", store.of, store.key)
        if name not in self.number:
            cost, needs = self.candidates.kept(store)
            mir = [self._mir(store.of)] if len(store.of.leaves) > 1 else []
            number = self._resource(name, cost, (*mir, *(self._once(once) for once in needs)))
            self.stores.setdefault(store.of, []).append(number)
        return self.number[name]

    def _mir(self, join: SubJoin) -> int:
        """A MIR, and the goals that compute it: one per member, each smaller than what it is used for."""
        name = ("mir", join)
        if name not in self.number:
            goals = {self.goal(join, driver, required=False) for driver in range(len(join.leaves))}
            self._resource(name, 0.0, (), tuple(sorted(goals)))
        return self.number[name]

    def _once(self, once: Once) -> int:
        known = self.number.get(once.name)
        return self._resource(once.name, once.cost, ()) if known is None else known

    def _resource(
        self, name: tuple[Hashable, ...], cost: float, needs: tuple[int, ...], goals: tuple[int, ...] = ()
    ) -> int:
        self.number[name] = len(self.resources)
        self.resources.append(Resource(name, cost, needs, goals))
        return self.number[name]

    def built(self, alone: tuple[str, ...]) -> Problem:
        goals, tasks = [], []
        for graph in self.graphs:
            join, driver = graph.task
            ends = tuple(n for (joined, _), n in graph.nodes.items() if joined == join.everything)
            goals.append(Goal(tuple(graph.arcs), ends, graph.required, len(graph.nodes)))
            tasks.append(Task(join, driver, tuple(graph.options), tuple(graph.before)))
        rivals = () if self.candidates.copies else tuple(tuple(same) for same in self.stores.values() if len(same) > 1)
        return Problem(Choices(tuple(goals), tuple(self.resources), rivals), tuple(tasks), self.goal_of, alone)
