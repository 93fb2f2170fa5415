"""Queries in the notation of paper 001, and small random workloads.

`natural("R(a), S(a,b)")` joins R and S on their columns a; `x:R(a)` gives the alias another name than its relation.
"""

from __future__ import annotations

import random
import re
from dataclasses import replace

from plait.query.expr import ColumnRef
from plait.query.graph import Alias, Equality, JoinGraph, Output, Window
from plait.query.relation import ColumnDef
from plait.share.shared_plan import ProbeOrder, SharedPlan
from plait.share.step_cost import EngineCost, PaperCost, StepCost
from plait.share.subjoins import Leaf, SubJoin
from plait.share.workload import Pair, Sizes, Workload, pair, workload


def natural(text: str, *, filters: dict[str, str] | None = None, windows: tuple[Window, ...] = ()) -> JoinGraph:
    """Columns of the same name are equal."""
    found = re.findall(r"(?:(\w+):)?(\w+)\(([\w, ]*)\)", text)
    members = [(alias or relation, relation, re.findall(r"\w+", columns)) for alias, relation, columns in found]
    first: dict[str, ColumnRef] = {}
    equalities = []
    for alias, _, columns in members:
        for column in columns:
            ref = ColumnRef(alias, column, "bigint")
            if column in first:
                equalities.append(Equality(first[column], ref))
            first.setdefault(column, ref)
    aliases = [(alias, relation) for alias, relation, _ in members]
    return graph(aliases, equalities, filters=filters, windows=windows)


def graph(
    aliases: list[tuple[str, str]],
    equalities: list[Equality],
    *,
    filters: dict[str, str] | None = None,
    windows: tuple[Window, ...] = (),
) -> JoinGraph:
    """A join of (alias, relation) pairs."""
    columns = tuple(ColumnDef(c, f"`{c}`", "bigint") for c in "abcdef")
    outputs = [ColumnRef(alias, "a", "bigint") for alias, _ in aliases]
    return JoinGraph(
        "",
        tuple(Alias(alias, relation, (filters or {}).get(alias), columns) for alias, relation in aliases),
        tuple(equalities),
        tuple(Output(f"{r.alias}_a", r.type, r, str(r), (r,)) for r in outputs),
        windows=windows,
    )


def sized(graphs: dict[str, JoinGraph], rate: float, selectivity: dict[str, float] | None = None) -> Workload:
    """All relations at one rate; a selectivity per equality, as in {"S.b = T.b": 0.015}, else one over the rate."""
    found = workload(graphs)
    leaves = {leaf for query in found.queries for leaf in query.join.leaves}
    rates = dict.fromkeys(leaves, rate)
    pairs: dict[Pair, float] = {}
    for text, share in (selectivity or {}).items():
        one, other = (side.split(".") for side in text.split(" = "))
        pairs[pair((Leaf(one[0]), one[1]), (Leaf(other[0]), other[1]))] = share
    return replace(found, sizes=Sizes(rates, rates, pairs))


def random_workload(seed: int, *, most: int = 3) -> Workload:
    """Up to three queries of two to `most` aliases: self-joins, filters, cycles, windows, all kinds of sizes."""
    draw = random.Random(seed)
    graphs = {f"q{n}": random_graph(draw, draw.randint(2, most)) for n in range(draw.randint(1, 3))}
    found = workload(graphs)
    rates = {f"R{n}": float(draw.choice([0, 1, 10, 50, 100, 300])) for n in range(4)}
    selectivity: dict[Pair, float] = {}
    leaves = set()
    for query in found.queries:
        leaves |= set(query.join.leaves)
        for members in query.join.attributes:
            columns = [(query.join.leaves[i], c) for i, c in members]
            for one in columns:
                for other in columns:
                    selectivity.setdefault(pair(one, other), draw.choice([0.001, 0.01, 0.02, 0.1, 0.5]))
    arriving = {leaf: rates[leaf.relation] * (0.5 if leaf.filter else 1.0) for leaf in leaves}
    return replace(found, sizes=Sizes(arriving, arriving, selectivity))


def random_graph(draw: random.Random, size: int) -> JoinGraph:
    """A connected join of `size` aliases over four relations with two columns each."""
    aliases = [(f"x{n}", f"R{draw.randrange(4)}") for n in range(size)]
    pairs = [(draw.randrange(n), n) for n in range(1, size)]
    if size > 2 and draw.random() < 0.3:
        pairs.append((0, size - 1))
    equalities = [Equality(_column(draw, one), _column(draw, other)) for one, other in pairs]
    filters = {alias: "a > 1" for alias, _ in aliases if draw.random() < 0.3}
    time = [ColumnRef(f"x{n}", "f", "timestamp") for n in range(2)]
    windows = (Window(time[0], time[1], -1000, 2000),) if draw.random() < 0.2 else ()
    return graph(aliases, equalities, filters=filters, windows=windows)


def _column(draw: random.Random, alias: int) -> ColumnRef:
    return ColumnRef(f"x{alias}", draw.choice("ab"), "bigint")


COSTS: dict[str, StepCost] = {"paper": PaperCost(parallelism=3), "engine": EngineCost(parallelism=3)}


def assert_executable(plan: SharedPlan, given: Workload) -> None:
    """Every order joins everything once, never as a cross product, and finds the stores and MIRs that it probes."""
    assert set(plan.steps) == {query.name for query in given.queries}
    for query in given.queries:
        assert set(plan.steps[query.name]) == set(query.aliases)
        for driver, order in plan.steps[query.name].items():
            _assert_order(plan, query.join, query.aliases, driver, order)
    for mir in plan.mirs:
        assert set(mir.feeds) == set(mir.members)
        assert mir.users
        for driver, order in mir.feeds.items():
            _assert_order(plan, mir.join, mir.members, driver, order)


def _assert_order(plan: SharedPlan, join: SubJoin, names: tuple[str, ...], driver: str, order: ProbeOrder) -> None:
    joined = {driver}
    stores, mirs = {kept.store for kept in plan.stores}, {mir.join for mir in plan.mirs}
    for step in order:
        assert not joined & set(step.probes)
        assert step.store in stores
        assert step.mir is None or step.mir in mirs
        # The rows of the store are those of the aliases it stands for, in its order.
        relations = [join.leaves[names.index(alias)].relation for alias in step.probes]
        assert relations == [leaf.relation for leaf in step.store.of.leaves]
        classes = [{(names[i], column) for i, column in members} for members in join.attributes]
        met = [c for c in classes if {a for a, _ in c} & joined and {a for a, _ in c} & set(step.probes)]
        assert met, "a cross product"
        carried = [any(column in c for c in met) for column in step.key]
        assert step.broadcast == (not all(carried))
        joined |= set(step.probes)
    assert joined == set(names)
