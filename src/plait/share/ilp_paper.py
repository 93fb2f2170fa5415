"""Algorithm 2 of paper 001 as it is written: a variable for every decorated probe order and for every prefix.

It is here to be read beside the paper, and to be compared with: share/ilp.py has the same optimum and far fewer
variables.  Three readings of the paper are made explicit:

* A chosen order with a MIR needs, for each member of the MIR, an order that computes it: −x + Σ x′ ≥ 0.  The paper's
  −k·x with k "the number of probe orders required" would force the orders of all partitionings at once.
* Step j's input is the join of the first j relations; Equation 1 has ⋈ up to j − 1, which would make first steps free.
* In its second example the shared plan costs 800 (it only says that it costs less than 950).

Beyond the paper, what costs something by itself (a store, an exchange) has a variable that is at least that of every
order which needs it, so that both forms can be compared under any cost model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from plait.share.candidates import Candidates, Head, Option, Store, probe_orders
from plait.share.linear import Program, Solver, highs
from plait.share.step_cost import Once, Standing
from plait.share.subjoins import SubJoin

Decorated = tuple[Option, ...]
"""A probe order with a partitioning for every store."""


@dataclass(frozen=True)
class PaperPlan:
    """The optimum of Algorithm 2."""

    cost: float
    chosen: tuple[Decorated, ...]
    proven: bool
    variables: int
    orders: int
    """Decorated probe orders of all queries and MIRs."""


@dataclass(frozen=True, slots=True)
class PaperSize:
    """How large the program of Algorithm 2 is."""

    variables: int
    orders: int


def paper_size(candidates: Candidates) -> PaperSize:
    """The size of the program, which is built and not solved."""
    builder = _built(candidates)
    return PaperSize(len(builder.program.cost), len(builder.orders))


def _built(candidates: Candidates) -> _Builder:
    builder = _Builder(candidates)
    for query in candidates.workload.queries:
        builder.add(query.join, required=True)
    builder.exclude()
    return builder


def solve_paper(candidates: Candidates, *, seconds: float = 60.0, solver: Solver = highs) -> PaperPlan:
    """Builds and solves the program."""
    builder = _built(candidates)
    answer = solver(builder.program, None, seconds, 0.0)
    assert answer.values is not None, "there is always a plan"
    chosen = builder.chosen(answer.values)
    return PaperPlan(builder.cost(chosen), chosen, answer.proven, len(builder.program.cost), len(builder.orders))


def apply_partitioning(candidates: Candidates, join: SubJoin, order: Head) -> Iterator[Decorated]:
    """Line 3 of Algorithm 2: a probe order with every partitioning of every store that it probes."""

    def decorated(joined: int, standing: Standing, rest: Head) -> Iterator[Decorated]:
        if not rest:
            yield ()
            return
        for option in candidates.options(join, driver, joined, standing, rest[0], prune=False):
            for following in decorated(joined | rest[0], option.price.after, rest[1:]):
                yield (option, *following)

    driver = order[0].bit_length() - 1
    return decorated(order[0], Standing(), order[1:])


@dataclass
class _Builder:
    candidates: Candidates
    program: Program = field(default_factory=Program)
    orders: list[tuple[Decorated, int]] = field(default_factory=list)
    """Every decorated order of every query and MIR, with its variable x."""
    _of: dict[SubJoin, dict[int, list[int]]] = field(default_factory=dict)
    """By query or MIR and driving member: the variables of its orders."""
    _required: set[SubJoin] = field(default_factory=set)
    _prefix: dict[tuple[object, ...], int] = field(default_factory=dict)
    _once: dict[tuple[object, ...], int] = field(default_factory=dict)

    def add(self, join: SubJoin, *, required: bool) -> dict[int, list[int]]:
        """The orders of a query or MIR; a query's must be chosen from, once per starting relation."""
        if join not in self._of:
            mine: dict[int, list[int]] = {}
            for driver, heads in probe_orders(self.candidates, join).items():
                decorated = chain.from_iterable(apply_partitioning(self.candidates, join, head) for head in heads)
                mine[driver] = [self._order(order) for order in decorated]
            self._of[join] = mine
        if required and join not in self._required:
            self._required.add(join)
            for xs in self._of[join].values():
                # probe_order_constraint: x_1 + … + x_n = 1
                self.program.row([(x, 1.0) for x in xs], 1.0, 1.0)
        return self._of[join]

    def _order(self, order: Decorated) -> int:
        program, x = self.program, self.program.variable()
        self.orders.append((order, x))
        for mir in {option.store.of for option in order if len(option.store.of.leaves) > 1}:
            for xs in self.add(mir, required=False).values():
                program.row([(x, -1.0), *((other, 1.0) for other in xs)], 0.0, float("inf"))
        # cost_constraint: −PCost(σ)·x + Σ StepCost(ρ_i)·y_i ≥ 0, here over PCost(σ).
        total = sum(option.price.cost for option in order)
        if total > 0:
            steps = [(self._step(prefix), prefix[-1].price.cost / total) for prefix in _prefixes(order)]
            program.row([(x, -1.0), *((y, share) for y, share in steps if share > 0)], -1e-9, float("inf"))
        for once in dict.fromkeys(_needs(self.candidates, order)):
            # The paper's stores cost nothing and need no variable, unless they exclude each other.
            if once.cost > 0 or (once.name[0] == "store" and not self.candidates.copies):
                program.row([(self._paid(once), 1.0), (x, -1.0)], 0.0, 1.0)
        return x

    def _step(self, prefix: Decorated) -> int:
        """The variable of a step; equal prefixes of whatever queries have the same."""
        name = tuple(option.name for option in prefix)
        if name not in self._prefix:
            self._prefix[name] = self.program.variable(prefix[-1].price.cost)
        return self._prefix[name]

    def _paid(self, once: Once) -> int:
        if once.name not in self._once:
            self._once[once.name] = self.program.variable(once.cost)
        return self._once[once.name]

    def exclude(self) -> None:
        """Without copies: one partitioning per store."""
        rivals: dict[object, list[int]] = {}
        if not self.candidates.copies:
            for name, variable in self._once.items():
                if name[0] == "store":
                    rivals.setdefault(name[1], []).append(variable)
        for variables in rivals.values():
            self.program.row([(variable, 1.0) for variable in variables], 0.0, 1.0)

    def chosen(self, values: Sequence[float]) -> tuple[Decorated, ...]:
        """Of the orders that the solver set, those that queries need, directly or for a MIR; one per starting point."""
        orders = {x: order for order, x in self.orders if values[x] > 0.5}
        found: list[Decorated] = []
        waiting, seen = list(self._required), set(self._required)
        while waiting:
            for xs in self._of[waiting.pop()].values():
                order = next(orders[x] for x in xs if x in orders)
                found.append(order)
                for option in order:
                    if len(option.store.of.leaves) > 1 and option.store.of not in seen:
                        seen.add(option.store.of)
                        waiting.append(option.store.of)
        return tuple(found)

    def cost(self, orders: tuple[Decorated, ...]) -> float:
        """What these orders cost: every distinct step once, and what they need."""
        steps = {
            tuple(option.name for option in prefix): prefix[-1].price.cost
            for order in orders
            for prefix in _prefixes(order)
        }
        others = {once.name: once.cost for order in orders for once in _needs(self.candidates, order)}
        return sum(steps.values()) + sum(others.values())


def _prefixes(order: Decorated) -> Iterator[Decorated]:
    return (order[: n + 1] for n in range(len(order)))


def _needs(candidates: Candidates, order: Decorated) -> Iterator[Once]:
    """What an order needs beside its steps."""
    for option in order:
        cost, needs = candidates.kept(option.store)
        yield Once(_name(option.store), cost)
        yield from needs
        yield from option.price.needs


def _name(store: Store) -> tuple[object, ...]:
    return ("store", store.of, store.key)
