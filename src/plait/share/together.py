"""Many queries planned together while they run (paper 001): the joint optimiser on what is observed.

Queries that join different streams, or on different keys, can still go a part of their way together: probes with which
several of them begin are made once, and a part of their joins may be kept in a store of its own (a MIR), so that
whoever needs it looks it up at once.  `share/replan.py` asks here when `Config.sharing` is `ilp`.

Filters and windows do not keep queries apart: they share probes whatever these are (query sets), so the optimiser is
shown the bare structures.  Stores of streams are there already, chosen by `store_choice.py`, and cost nothing
more; those of MIRs cost what they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from plait.order.cost import Coefficients
from plait.order.orders import Orders
from plait.query.graph import JoinGraph
from plait.query.store import key_of
from plait.share.candidates import Candidates
from plait.share.choices import Path
from plait.share.lattice import Problem, problem
from plait.share.mirs import CannotKeep, Keep, order_through
from plait.share.optimise import plan_of
from plait.share.shared_plan import KeptMir, SharedPlan
from plait.share.step_cost import EngineCost, Kept, Once, Price, Probe, Standing
from plait.share.structure import Group
from plait.share.workload import Query, workload
from plait.stats.counters import QueryForecast

UNROUTED_NS = 1e10
"""Price of a probe by a key that tuples do not carry: it cannot be executed, and must never be cheapest."""


@dataclass(frozen=True)
class RunningCost(EngineCost):
    """The engine's prices where the stores of streams, and the ways to them, are there whatever the orders are."""

    def store(self, kept: Kept) -> tuple[float, tuple[Once, ...]]:
        """Of a MIR's store; that of a stream costs nothing more."""
        return (0.0, ()) if kept.edge is not None else super().store(kept)

    def step(self, probe: Probe, standing: Standing) -> Price:
        """Tuples go where the store is that they carry the key of, and nowhere else, even if there is one task only."""
        price = super().step(probe, standing)
        return price if probe.routed else replace(price, cost=price.cost + UNROUTED_NS)

    def _sent(self, edge: tuple[str, tuple[str, ...]], rows: float) -> Once:
        return Once(("edge", *edge), 0.0)


@dataclass(frozen=True)
class Together:
    """Orders for the leads, MIRs to be kept, and how they compare, in the optimiser's nanoseconds per epoch."""

    orders: Mapping[str, Orders]
    """By query and driver; the members of a MIR that is probed stand in a row."""
    keeps: tuple[Keep, ...]
    """For the leads alone: `for_all` adds those that follow them."""
    cost: float
    before: float
    """Of the orders and MIRs in force."""
    building: float = 0.0
    """Nanoseconds, once: filling MIRs that are not there."""
    reasons: tuple[str, ...] = ()
    """Why they may not be the best, a sentence each."""


@dataclass(frozen=True)
class InForce:
    """What the optimiser's plan has to beat."""

    orders: Mapping[str, Orders]
    keeps: Sequence[Keep] = ()


def together(
    leads: Mapping[str, JoinGraph],
    forecasts: Mapping[str, QueryForecast | None],
    now: InForce,
    coefficients: Coefficients,
    *,
    tasks: int = 2,
    seconds: float = 0.5,
    mirs: bool = True,
) -> Together:
    """The cheapest orders and MIRs for these queries that are found in time; those in force if nothing better is."""
    bare = {name: _bare(graph) for name, graph in leads.items()}
    stored = _stored(leads)
    cost = RunningCost(coefficients, parallelism=max(1, tasks))
    # Rows of a MIR come from probes of its members' own stores (`share/feeds.py`).
    candidates = Candidates(workload(bare, forecasts), cost, mirs=mirs, nested=False, stored=stored)
    built = problem(candidates, now.orders)
    before = cost_of(built, candidates.workload.queries, now)
    plan = plan_of(candidates, built, seconds=seconds, compare=False)
    keeps, kept = keeps_of_plan(plan)
    if plan.cost >= before:
        return Together(now.orders, tuple(now.keeps), before, before, reasons=plan.reasons)
    new = [mir for keep, mir in zip(keeps, kept, strict=True) if not any(is_same(keep, old) for old in now.keeps)]
    sizes = candidates.workload.sizes
    building = sum((coefficients.alpha_m + cost.prices.write_ns) * sizes.rows(mir.join) for mir in new)
    building += sum(coefficients.alpha_q * sizes.at_rest(leaf) for mir in new for leaf in mir.join.leaves)
    return Together(_orders(plan, leads, now), keeps, plan.cost, before, building, plan.reasons)


def _bare(graph: JoinGraph) -> JoinGraph:
    """The structure alone."""
    return replace(
        graph,
        aliases=tuple(replace(alias, filter=None) for alias in graph.aliases),
        windows=(),
        conditions=(),
        grouping=None,
    )


def _stored(leads: Mapping[str, JoinGraph]) -> frozenset[tuple[str, tuple[str, ...]]] | None:
    """The stores of relations, where some that an order could use are left out."""
    if all(graph.stored is None for graph in leads.values()):
        return None
    return frozenset(
        (alias.relation, tuple(sorted(key_of(graph, alias.name, key).columns)))
        for graph in leads.values()
        for alias in graph.aliases
        for key in graph.keys_of(alias.name)
    )


def _orders(plan: SharedPlan, leads: Mapping[str, JoinGraph], now: InForce) -> dict[str, Orders]:
    """Orders of aliases, which can be followed while a MIR is not there yet."""
    found: dict[str, Orders] = {}
    for query, drivers in plan.steps.items():
        for driver, order in drivers.items():
            try:
                mine = order_through(leads[query], driver, [step.probes for step in order])
            except CannotKeep:
                # A store that this query does not have: its order stays.
                mine = now.orders[query][driver]
            found.setdefault(query, {})[driver] = mine
    return found


def keeps_of_plan(plan: SharedPlan) -> tuple[tuple[Keep, ...], tuple[KeptMir, ...]]:
    """The MIRs that the steps of a plan probe, one per key, and what each of them is."""
    found: dict[tuple[object, object], list[tuple[str, tuple[str, ...]]]] = {}
    for query, drivers in plan.steps.items():
        for order in drivers.values():
            for step in order:
                if step.mir is not None:
                    uses = found.setdefault((step.mir, step.store.key), [])
                    taken = {alias for name, aliases in uses if name == query for alias in aliases}
                    if (query, step.probes) not in uses and not taken.intersection(step.probes):
                        uses.append((query, step.probes))
    by_join = {mir.join: mir for mir in plan.mirs}
    keeps, kept = [], []
    for (join, key), uses in found.items():
        mir = next(m for j, m in by_join.items() if j == join)
        number = {name: i for i, name in enumerate(mir.members)}
        feeds = tuple(
            tuple(number[name] for step in mir.feeds[driver] for name in step.probes) for driver in mir.members
        )
        assert isinstance(key, tuple)
        keeps.append(Keep(tuple(uses), key, feeds))
        kept.append(mir)
    return tuple(keeps), tuple(kept)


def is_same(one: Keep, other: Keep) -> bool:
    """Whether the first is the same sub-join, by the same key, for no other queries than the second."""
    return one.key == other.key and set(one.uses) <= set(other.uses)


def for_all(keep: Keep, groups: Mapping[str, Group]) -> Keep:
    """For the leads that use a MIR, and for all queries that follow them."""
    uses = [
        (name, tuple(called[alias] for alias in aliases))
        for lead, aliases in keep.uses
        for name, called in groups[lead].members.items()
    ]
    return replace(keep, uses=tuple(dict.fromkeys(uses)))


def for_leads(keep: Keep, leads: Mapping[str, JoinGraph]) -> Keep:
    """Of the uses of a MIR, those of leads."""
    return replace(keep, uses=tuple(use for use in keep.uses if use[0] in leads))


# ---------------------------------------------------------------- what is in force, by the same prices


@dataclass
class _Way:
    """The cheapest way through a goal so far."""

    cost: float = 0.0
    path: Path = ()
    used: frozenset[int] = field(default_factory=frozenset)


def cost_of(problem: Problem, queries: tuple[Query, ...], now: InForce) -> float:
    """What all queries cost together as they run, each probe by the cheapest of its keys; infinite if that is unknown.

    MIRs that are kept are fed by the orders that feed them best.
    """
    parts = {
        name: [frozenset(aliases) for keep in now.keeps for query, aliases in keep.uses if query == name]
        for name in now.orders
    }
    selection: dict[int, Path] = {}
    for query in queries:
        for driver, alias in enumerate(query.aliases):
            goal = problem.goal_of.get((query.join, driver))
            if goal is None:
                continue
            order = now.orders[query.name][alias]
            pieces = [
                sum(1 << query.aliases.index(name) for name in piece) for piece in in_pieces(order, parts[query.name])
            ]
            path = _path(problem, goal, pieces)
            if path is None:
                return float("inf")
            selection[goal] = path
    return problem.choices.cost(_with_feeds(problem, selection))


def in_pieces(order: tuple[str, ...], parts: Sequence[frozenset[str]]) -> list[tuple[str, ...]]:
    """An order as what is probed at once: aliases, and MIRs whose members stand in a row."""
    found: list[tuple[str, ...]] = []
    at = 0
    while at < len(order):
        sizes = [len(part) for part in parts if frozenset(order[at : at + len(part)]) == part]
        size = max(sizes, default=1)
        found.append(order[at : at + size])
        at += size
    return found


def _with_feeds(problem: Problem, selection: dict[int, Path]) -> dict[int, Path]:
    """With the cheapest way to feed each MIR that is used."""
    choices = problem.choices
    while missing := {g for r in choices.used(selection) for g in choices.resources[r].goals} - selection.keys():
        for goal in missing:
            path = _path(problem, goal, None)
            assert path is not None, "every goal can be reached"
            selection[goal] = path
    return selection


def _path(problem: Problem, goal: int, pieces: list[int] | None) -> Path | None:
    """The cheapest way through a goal that joins these pieces one after the other; by any single members if None."""
    choices = problem.choices
    arcs, resources = choices.goals[goal].arcs, choices.resources
    best: dict[int, _Way] = {0: _Way()}
    rounds = len(pieces) if pieces is not None else len(problem.tasks[goal].join.leaves) - 1
    for number in range(rounds):
        following: dict[int, _Way] = {}
        for arc_number, arc in enumerate(arcs):
            fits = arc.piece == pieces[number] if pieces is not None else arc.piece.bit_count() == 1
            if fits and arc.tail in best:
                way = best[arc.tail]
                new = frozenset(choices.closure(arc.step)) - way.used
                cost = way.cost + sum(resources[r].cost for r in new)
                if arc.head not in following or cost < following[arc.head].cost:
                    following[arc.head] = _Way(cost, (*way.path, arc_number), way.used | new)
        best = following
    return min(best.values(), key=lambda way: way.cost).path if best else None
