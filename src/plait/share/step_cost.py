"""What a step of a probe order costs, and what keeping a store costs: paper 001's Equation 1, or this engine's prices.

Both models see a step as a `Probe` and give a `Price`.  Beside the step's own cost a price may name things that are
paid for once, however many steps need them: an exchange of the epoch, a way from a source to the partitions of a key.

What a step costs depends on the *set* of relations that have joined before it and on where the tuples stand, never on
the order within the set.  share/candidates.py builds on that.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Protocol

from plait.order.cost import Coefficients, sorted_runs
from plait.stats.counters import StoreForecast

Place = frozenset[Hashable]
"""Attributes by whose values tuples are spread over the tasks."""


@dataclass(frozen=True, slots=True)
class Standing:
    """Where the tuples of a probe order are after a step."""

    place: Place | None = None
    """None at their source, and for costs to which it does not matter."""
    hop: int = 0
    """Exchanges that they have been through."""


@dataclass(frozen=True, slots=True)
class Probe:
    """A step of a probe order, in numbers per epoch."""

    joined: int
    """Relations that have joined before."""
    tuples: float
    """Tuples that probe."""
    found: float
    """Tuples that come out."""
    stored: float
    """Rows of the store that is probed."""
    routed: bool
    """Whether the tuples carry the attributes by which the store is partitioned."""
    place: Place
    """The attributes by which the store is partitioned, as names within the query."""
    edge: tuple[str, tuple[str, ...]] | None = None
    """Of a first step, the way on which new rows reach the store: relation and key columns, () for all tasks."""
    rate: float = 0.0
    """Of a first step, the rows that take this way."""


@dataclass(frozen=True, slots=True)
class Once:
    """Something that is paid for once, whoever needs it."""

    name: tuple[Hashable, ...]
    cost: float


@dataclass(frozen=True, slots=True)
class Price:
    """The cost of a step, where its tuples are afterwards, and what else has to be there."""

    cost: float
    after: Standing
    needs: tuple[Once, ...] = ()


@dataclass(frozen=True, slots=True)
class Kept:
    """A store as cost models see it."""

    arriving: float
    """Rows written per epoch."""
    rows: float
    """Rows at rest."""
    edge: tuple[str, tuple[str, ...]] | None
    """Of a relation's store, the way on which its rows come; None for a MIR, whose rows come from several."""


class StepCost(Protocol):
    """A cost model."""

    @property
    def parallelism(self) -> int:
        """The number of partitions of a store."""

    def step(self, probe: Probe, standing: Standing) -> Price:
        """The price of a step for tuples that stand somewhere."""

    def store(self, kept: Kept) -> tuple[float, tuple[Once, ...]]:
        """The price of keeping a store for an epoch, and what else has to be there."""


@dataclass(frozen=True, slots=True)
class PaperCost:
    """Paper 001, Equation 1: the tuples that are sent.  Stores are free.

    A step sends |⋈ of the relations joined so far| · 1/j · χ tuples.  j is the number of those relations: in an order
    without MIRs the number of the step, as the paper writes it; behind a MIR the share of the results of which the
    driving tuple is the newest is 1/j for relations, not for steps.  χ is 1, or the parallelism of a store that is
    partitioned by something the tuples do not carry.
    """

    parallelism: int = 1

    def step(self, probe: Probe, standing: Standing) -> Price:
        chi = 1 if probe.routed else self.parallelism
        return Price(probe.tuples / probe.joined * chi, standing)

    def store(self, kept: Kept) -> tuple[float, tuple[Once, ...]]:
        return 0.0, ()


@dataclass(frozen=True, slots=True)
class StorePrices:
    """Nanoseconds that a store costs beside its probes.

    Assumed, not fitted: a row is written and later merged about as dearly as it is multiplied out (α_m = 90), merging
    twice in its life; rows at rest cost memory, checksums and their share of passes over state larger than memory.
    """

    write_ns: float = 90.0
    """Per row written."""
    merge_ns: float = 180.0
    """Per row written, for all merges that it goes through."""
    keep_ns: float = 1.0
    """Per row at rest and epoch."""
    runs: float = 4.0
    """Sorted runs per store that a lookup visits."""


@dataclass(frozen=True)
class EngineCost:
    """This engine's prices in nanoseconds per epoch: `order/cost.py`, and what it costs to have a store.

    A step looks up every tuple (α_q · f), makes every match (α_m) and, where tuples stand at another key, sends them
    (α_x).  That is `cost_model="iterative"`; for the factorised probe it is an upper bound.  An exchange (α_h) is paid
    once for all trees of a level.  A source sends its rows once by every key that a store or a first probe wants.
    """

    coefficients: Coefficients = field(default_factory=Coefficients)
    prices: StorePrices = field(default_factory=StorePrices)
    parallelism: int = 2

    def step(self, probe: Probe, standing: Standing) -> Price:
        c = self.coefficients
        copies = 1 if probe.routed else self.parallelism
        lookups = probe.tuples * copies
        store = StoreForecast(keys=probe.stored, rows=probe.stored, runs=self.prices.runs)
        cost = c.alpha_q * sorted_runs(c.rho)(store, lookups) * lookups + c.alpha_m * probe.found
        if probe.edge is not None:
            return Price(cost, Standing(probe.place, 0), (self._sent(probe.edge, probe.rate * copies),))
        if probe.routed and probe.place == standing.place:
            return Price(cost, standing)
        hop = standing.hop + 1
        return Price(cost + c.alpha_x * lookups, Standing(probe.place, hop), (Once(("exchange", hop), c.alpha_h),))

    def store(self, kept: Kept) -> tuple[float, tuple[Once, ...]]:
        cost = (self.prices.write_ns + self.prices.merge_ns) * kept.arriving + self.prices.keep_ns * kept.rows
        if kept.edge is not None:
            return cost, (self._sent(kept.edge, kept.arriving),)
        return cost + self.coefficients.alpha_x * kept.arriving, ()

    def _sent(self, edge: tuple[str, tuple[str, ...]], rows: float) -> Once:
        return Once(("edge", *edge), self.coefficients.alpha_x * rows)
