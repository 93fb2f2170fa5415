"""The result of the joint optimisation, as a value: who probes what, in which order, by which key, and what is kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from plait.order.orders import Orders
from plait.share.candidates import Option, Store
from plait.share.choices import Choices, Path, Selection
from plait.share.lattice import Problem, Task
from plait.share.subjoins import Parts, SubJoin, bits
from plait.share.workload import Query


@dataclass(frozen=True, slots=True)
class ProbeStep:
    """One probe of a probe order."""

    probes: tuple[str, ...]
    """The aliases that it joins: one, or the members of a MIR in the MIR's order."""
    store: Store
    """Where it looks: whose rows, partitioned by which of their columns."""
    key: tuple[tuple[str, str], ...]
    """The same key as (alias, column)."""
    broadcast: bool
    """Whether it goes to every task, because its tuples do not carry the key."""
    tuples: float
    """Tuples that probe, per epoch."""
    cost: float

    @property
    def mir(self) -> SubJoin | None:
        """The MIR that it probes; None for a relation."""
        return self.store.of if len(self.store.of.leaves) > 1 else None

    def __str__(self) -> str:
        return f"{self.store}{' (broadcast)' if self.broadcast else ''}"


ProbeOrder = tuple[ProbeStep, ...]


@dataclass(frozen=True, slots=True)
class KeptStore:
    """A store of the plan."""

    store: Store
    cost: float
    """Of keeping it for an epoch, beside what it shares with others."""


@dataclass(frozen=True, slots=True)
class KeptMir:
    """A MIR of the plan, and how it is computed."""

    join: SubJoin
    members: tuple[str, ...]
    """Names for its members, which `feeds` use."""
    feeds: Mapping[str, ProbeOrder]
    """By driving member."""
    users: tuple[str, ...]
    """Queries that probe it, directly or in computing a MIR that they probe."""


@dataclass(frozen=True)
class SharedPlan:
    """Probe orders for all queries together."""

    steps: Mapping[str, Mapping[str, ProbeOrder]]
    """By query and driving alias."""
    stores: tuple[KeptStore, ...]
    mirs: tuple[KeptMir, ...]
    cost: float
    bound: float
    """No plan of these candidates costs less, as far as the solver has proven."""
    alone: Mapping[str, float]
    """What each query would cost by itself, with stores and MIRs of its own."""
    status: str
    """`optimal` (within the gap that was allowed), or `feasible`."""
    reasons: tuple[str, ...]
    """What there is to say on how the plan came about, a sentence each."""
    variables: int = 0
    rows: int = 0

    @property
    def saved(self) -> float:
        """The share of the queries' own costs that sharing saves."""
        apart = sum(self.alone.values())
        return 1 - self.cost / apart if apart else 0.0

    def orders(self) -> dict[str, Orders]:
        """The probe orders as the planner takes them; only for plans without MIRs."""
        if self.mirs:
            raise ValueError("the plan has MIRs, which are no aliases; optimise with mirs=False for orders of aliases")
        return {
            query: {driver: tuple(step.probes[0] for step in order) for driver, order in drivers.items()}
            for query, drivers in self.steps.items()
        }


def probe_steps(problem: Problem, parts: Parts, query: Query, selection: Selection) -> dict[str, ProbeOrder]:
    """By driving alias, the probe order that a selection gives a query."""
    choices = problem.choices
    found = {}
    for driver, alias in enumerate(query.aliases):
        goal, names = _driven(problem, query.join, driver, query.aliases)
        found[alias] = _named(problem.tasks[goal], selection[goal], choices, goal, parts, names)
    return found


def kept_mirs(problem: Problem, parts: Parts, queries: Sequence[Query], selection: Selection) -> tuple[KeptMir, ...]:
    """The MIRs that a selection uses, small ones first."""
    users = _users(problem, queries, selection)
    found = []
    for join in sorted(users, key=lambda join: (len(join.leaves), str(join))):
        names = tuple(f"m{position}" for position in range(len(join.leaves)))
        feeds = {}
        for driver, name in enumerate(names):
            goal, placed = _driven(problem, join, driver, names)
            feeds[name] = _named(problem.tasks[goal], selection[goal], problem.choices, goal, parts, placed)
        found.append(KeptMir(join, names, feeds, tuple(users[join])))
    return tuple(found)


def kept_stores(choices: Choices, selection: Selection) -> tuple[KeptStore, ...]:
    """The stores that a selection uses."""
    found = []
    for number in choices.used(selection):
        kind, *what = choices.resources[number].name
        if kind == "store":
            of, key = what
            assert isinstance(of, SubJoin)
            assert isinstance(key, tuple)
            found.append(KeptStore(Store(of, key), choices.resources[number].cost))
    return tuple(sorted(found, key=lambda kept: (len(kept.store.of.leaves), str(kept.store))))


def _users(problem: Problem, queries: Sequence[Query], selection: Selection) -> dict[SubJoin, dict[str, None]]:
    """By MIR, the queries that need it."""
    choices = problem.choices
    needed: dict[int, set[SubJoin]] = {}

    def mirs_of(goal: int) -> set[SubJoin]:
        if goal not in needed:
            needed[goal] = found = set()
            for arc in selection[goal]:
                for resource in choices.closure(choices.goals[goal].arcs[arc].step):
                    kind, join, *_ = choices.resources[resource].name
                    if kind == "mir" and isinstance(join, SubJoin):
                        found |= {join}.union(*map(mirs_of, choices.resources[resource].goals))
        return needed[goal]

    users: dict[SubJoin, dict[str, None]] = {}
    for query in queries:
        for driver in range(len(query.aliases)):
            for join in mirs_of(_driven(problem, query.join, driver, query.aliases)[0]):
                users.setdefault(join, {})[query.name] = None
    return users


def _driven(problem: Problem, join: SubJoin, driver: int, names: Sequence[str]) -> tuple[int, tuple[str, ...]]:
    """The goal of a driving member, and the names of the members as that goal numbers them.

    Members that can change places have one goal: it is that of the first of them.
    """
    for order in (tuple(range(len(names))), *join.automorphisms):
        goal = problem.goal_of.get((join, order[driver]))
        if goal is not None:
            return goal, tuple(names[order.index(position)] for position in range(len(names)))
    raise AssertionError("every driver has a goal")


def _named(task: Task, path: Path, choices: Choices, goal: int, parts: Parts, names: Sequence[str]) -> ProbeOrder:
    """A path with the names of a query's aliases."""
    steps = [choices.resources[choices.goals[goal].arcs[arc].step] for arc in path]
    return tuple(_step(task, arc, step.cost, parts, names) for arc, step in zip(path, steps, strict=True))


def _step(task: Task, arc: int, cost: float, parts: Parts, names: Sequence[str]) -> ProbeStep:
    option: Option = task.options[arc]
    part = parts.part(task.join, option.piece)
    order = option.places or tuple(range(len(part.places)))
    aliases = tuple(names[part.places[order[i]]] for i in range(len(order)))
    assert len(aliases) == sum(1 for _ in bits(option.piece))
    return ProbeStep(
        probes=aliases,
        store=option.store,
        key=tuple((aliases[i], column) for i, column in option.store.key),
        broadcast=not option.routed,
        tuples=option.tuples,
        cost=cost,
    )
