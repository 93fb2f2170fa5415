"""Random joins with random intermediate results, which come and go between epochs, next to the oracle."""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from plait.config import Config
from plait.order.orders import Orders
from plait.query.graph import JoinGraph
from plait.query.layout import Layout
from plait.query.plan import Plan
from plait.runtime.task.join_task import Work
from plait.share.allocate import Allocation, Wanted, allocate
from plait.share.mirs import CannotKeep, Joins, Keep, uses_of, with_mirs
from plait.share.probe_trees import plan_on
from plait.testing import Clock, LocalEngine
from tests.oracle import Bag, Oracle, bag
from tests.random_joins import Case, Model, Seen


@dataclass
class Kept:
    """A case on a layout whose MIRs change."""

    case: Case
    choose: random.Random
    base: Allocation = field(init=False)
    layout: Layout = field(init=False)
    keeps: tuple[Keep, ...] = ()

    def __post_init__(self) -> None:
        wanted = {name: Wanted(graph, name) for name, graph in self.case.graphs.items()}
        self.base = allocate(Layout(), wanted, self.case.relations)
        self.layout = self.base.layout

    def keep(self, keeps: Sequence[Keep], epoch: int) -> None:
        """These, from an epoch on."""
        bare = replace(self.base.layout, next_filter=self.layout.next_filter)
        base = self.base
        joins = Joins(self.case.graphs, self.case.relations, base.floors, base.filters, base.marks, epoch)
        self.layout, self.keeps = with_mirs(bare, self.layout, keeps, joins), tuple(keeps)

    def draw(self, epoch: int) -> None:
        """Some of those that are there stay, some of their uses go, others come."""
        stay = [keep for keep in self.keeps if self.choose.random() < 0.7]
        stay = [replace(keep, uses=self._some(keep.uses)) for keep in stay]
        new = [self.random_keep() for _ in range(self.choose.choice((0, 1, 1, 2, 3)))]
        self.keep(stay, epoch)
        for one in new:
            try:
                if one is not None:
                    self.keep([*self.keeps, one], epoch)
            except CannotKeep:
                continue

    def _some(self, uses: tuple[tuple[str, tuple[str, ...]], ...]) -> tuple[tuple[str, tuple[str, ...]], ...]:
        return (
            uses if self.choose.random() < 0.7 else tuple(self.choose.sample(uses, self.choose.randint(1, len(uses))))
        )

    def random_keep(self) -> Keep | None:
        """A random connected part of a query that others share, by a key that leads out of it."""
        choose, graphs = self.choose, self.case.graphs
        large = [name for name, graph in graphs.items() if len(graph.aliases) > 2]
        if not large:
            return None
        query = choose.choice(large)
        graph = graphs[query]
        names = [alias.name for alias in graph.aliases]
        part = _grown(graph, [choose.choice(names)], choose.randint(2, len(names) - 1), names, choose)
        out = sorted(graph.attributes_of(part) & graph.attributes_of([n for n in names if n not in part]))
        picked = choose.sample(out, 2 if len(out) > 1 and choose.random() < 0.2 else 1)
        key = []
        for attribute in picked:
            member = choose.choice([a for a in part if graph.column_of(a, attribute) is not None])
            column = graph.column_of(member, attribute)
            assert column is not None
            key.append((part.index(member), column.column))
        uses = uses_of(graphs, query, part, key)
        return Keep(uses if choose.random() < 0.8 else uses[:1], tuple(key))

    def orders(self) -> dict[str, Orders]:
        """Random orders, most of which go through the members of MIRs in a row."""
        parts: dict[str, list[tuple[str, ...]]] = {name: [] for name in self.case.graphs}
        for keep in self.keeps:
            for query, aliases in keep.uses:
                parts[query].append(aliases)
        return {name: self._orders(graph, parts[name]) for name, graph in self.case.graphs.items()}

    def _orders(self, graph: JoinGraph, parts: Sequence[tuple[str, ...]]) -> Orders:
        names = [alias.name for alias in graph.aliases]
        orders: Orders = {}
        for driver in names:
            joined = [driver]
            while len(joined) < len(names):
                one = _grown(graph, joined, len(joined) + 1, names, self.choose, stored=True)[-1]
                whole = [p for p in parts if one in p and not set(p) & set(joined)]
                if whole and self.choose.random() < 0.85:
                    mine = self.choose.choice(whole)
                    joined = _grown(graph, [*joined, one], len(joined) + len(mine), mine, self.choose, stored=True)
                else:
                    joined.append(one)
            orders[driver] = tuple(joined[1:])
        return orders

    def plan(self, ranks: Sequence[str], orders: Mapping[str, Orders], epoch: int) -> Plan:
        """What an epoch runs with."""
        base = replace(self.base, layout=self.layout)
        return plan_on(base, self.case.graphs, orders, tuple(ranks), fills=self.layout.fills(epoch))


def _grown(
    graph: JoinGraph,
    begun: Sequence[str],
    size: int,
    among: Sequence[str],
    choose: random.Random,
    *,
    stored: bool = False,
) -> list[str]:
    """Connected aliases, one more at a time; by keys that are `stored`, as many as there are."""
    found = list(begun)
    while len(found) < size:
        near = [a for a in among if a not in found and graph.attributes_of([a]) & graph.attributes_of(found)]
        near = [a for a in near if not stored or graph.can_look_up(found, a)]
        if not near:
            break
        found.append(choose.choice(near))
    return found


def run_mirs(
    case: Case,
    change: Callable[[Plan], Plan] = lambda plan: plan,
    look: Callable[[LocalEngine, Plan], None] = lambda *_: None,
    steady: bool = False,
) -> Iterator[Seen]:
    """Runs a case epoch by epoch; MIRs, orders, ranks, tasks and settings change all the time (unless `steady`)."""
    choose = random.Random(case.seed)
    ranks = list(case.relations)
    kept = Kept(case, choose)
    clock = Clock()
    totals: dict[str, Bag] = {name: Counter() for name in case.queries}
    model = Model(case)
    with tempfile.TemporaryDirectory(prefix="plait-mirs-") as directory, Oracle() as oracle:
        model.prepare(oracle)
        engine: LocalEngine | None = None
        try:
            for number, arrivals in enumerate(case.arrivals):
                if not number or (not steady and choose.random() < 0.6):
                    kept.draw(number)
                choose.shuffle(ranks)
                plan = change(kept.plan(ranks, kept.orders(), number))
                if engine is None or choose.random() < 0.3:
                    if engine is not None:
                        engine.close()
                    config = Config(
                        sync=False,
                        tasks=1,
                        max_future=None,
                        fan_in=choose.randint(2, 4),
                        snapshot_every=choose.choice((1, 2, 16)),
                        compress_above=choose.choice((None, "0")),
                        merge_share=choose.choice((0.01, 0.9)),
                    )
                    seed = choose.randrange(1000)
                    engine = LocalEngine(
                        directory,
                        plan,
                        config,
                        predicates=case.predicates,
                        clock=clock,
                        seed=seed,
                        work=(None, Work)[seed % 2],
                    )
                engine.change(
                    plan,
                    tasks=choose.randint(1, 5),
                    probe=choose.choice(("factorised", "iterative")),
                    chunk_rows=choose.choice((1, 3, 7, 61) if case.results < 100 else (61, 1 << 18)),
                )
                clock.advance(case.clocks[number])
                added = engine.run(arrivals)
                model.arrive(oracle, arrivals, clock.now_us)
                for name, table in added.items():
                    totals[name] += bag(table)
                look(engine, plan)
                yield Seen(totals, {name: oracle.bag(model.sql(name)) for name in case.queries}, engine.progress[-1])
        finally:
            if engine is not None:
                engine.close()


def check_mirs(case: Case, **how: object) -> None:
    """After every epoch the committed rows are the oracle's."""
    for number, seen in enumerate(run_mirs(case, **how)):  # type: ignore[arg-type]
        for name, expected in seen.expected.items():
            found = seen.results[name]
            assert found == expected, (
                f"{name} after epoch {number}: missing {expected - found}, extra {found - expected}"
            )
