"""What the joint optimiser knows: the queries as sub-joins, and how large their parts are.

A `Workload` is inert: built from join graphs and forecasts, it refers to neither.  Sizes come from two numbers per
relation and one per pair of columns, so that the same sub-join has the same size in whichever query it is found:

    tuples(d, X) = arriving(d) · Π stored(r) over the others of X · Π selectivities of the equalities in X

With `arriving = stored = rate` that is |⋈ X| of paper 001.  The attributes of a join are taken as independent.  Of an
attribute with m members in X, m − 1 equalities count: those of the spanning tree that loses the fewest rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from plait.query.graph import JoinGraph
from plait.query.store import key_of, store_id
from plait.share.subjoins import Leaf, SubJoin, whole
from plait.stats.counters import QueryForecast

ASSUMED_ROWS = 1000.0
"""Rows of a relation of which nothing is known, arriving in an epoch and stored: all relations are alike."""
MOST_ROWS = 1e15
"""Rows beyond which a statistic is not believed; products of a few of them are still finite."""

JoinColumn = tuple[Leaf, str]
Pair = tuple[JoinColumn, JoinColumn]
"""Two columns that are compared, in ascending order."""


def pair(one: JoinColumn, other: JoinColumn) -> Pair:
    """The name of an equality in `Sizes.selectivity`."""
    return (one, other) if one <= other else (other, one)


@dataclass(frozen=True)
class Query:
    """A query as the optimiser sees it."""

    name: str
    join: SubJoin
    aliases: tuple[str, ...]
    """By position in the join."""


@dataclass(frozen=True)
class Sizes:
    """Rows of relations and selectivities of equalities.  What is missing is assumed, so that a plan can be made.

    A relation has ASSUMED_ROWS, and as many of them at rest as arrive; an equality finds one partner for each tuple of
    the smaller side: its selectivity is one over the rows of the larger.
    """

    arriving: Mapping[Leaf, float] = field(default_factory=dict)
    """New rows per epoch."""
    stored: Mapping[Leaf, float] = field(default_factory=dict)
    """Rows at rest."""
    selectivity: Mapping[Pair, float] = field(default_factory=dict)
    _shares: dict[SubJoin, float] = field(default_factory=dict, init=False, compare=False, repr=False)
    _rows: dict[SubJoin, float] = field(default_factory=dict, init=False, compare=False, repr=False)
    _tuples: dict[tuple[SubJoin, int], float] = field(default_factory=dict, init=False, compare=False, repr=False)

    def rate(self, leaf: Leaf) -> float:
        """New rows per epoch of a relation."""
        return _sane(self.arriving.get(leaf), ASSUMED_ROWS, MOST_ROWS)

    def at_rest(self, leaf: Leaf) -> float:
        """Rows that a relation keeps."""
        return _sane(self.stored.get(leaf), self.rate(leaf), MOST_ROWS)

    def rows(self, join: SubJoin) -> float:
        """Rows of a sub-join at rest."""
        product = self._rows.get(join)
        if product is None:
            product = self._share(join)
            for leaf in join.leaves:
                product *= self.at_rest(leaf)
            self._rows[join] = product
        return product

    def tuples(self, join: SubJoin, driver: int) -> float:
        """Tuples per epoch of a sub-join that new rows of one member have been joined to."""
        product = self._tuples.get((join, driver))
        if product is None:
            product = self._share(join) * self.rate(join.leaves[driver])
            for position, leaf in enumerate(join.leaves):
                if position != driver:
                    product *= self.at_rest(leaf)
            self._tuples[join, driver] = product
        return product

    def _share(self, join: SubJoin) -> float:
        """The product of the selectivities."""
        share = self._shares.get(join)
        if share is None:
            share = 1.0
            for members in join.attributes:
                share *= self._of_attribute([(join.leaves[i], column) for i, column in members])
            self._shares[join] = share
        return share

    def _of_attribute(self, columns: list[JoinColumn]) -> float:
        """Prim's algorithm for the spanning tree of the largest selectivities."""
        share, inside, outside = 1.0, columns[:1], columns[1:]
        while outside:
            found, nearest = max(
                (self._of_pair(one, other), number) for one in inside for number, other in enumerate(outside)
            )
            share *= found
            inside.append(outside.pop(nearest))
        return share

    def _of_pair(self, one: JoinColumn, other: JoinColumn) -> float:
        assumed = 1 / max(self.at_rest(one[0]), self.at_rest(other[0]), 1.0)
        return _sane(self.selectivity.get(pair(one, other)), assumed, 1.0)


@dataclass(frozen=True)
class Workload:
    """Queries and sizes: all that the joint optimiser is given."""

    queries: tuple[Query, ...]
    sizes: Sizes = field(default_factory=Sizes)


def workload(
    graphs: Mapping[str, JoinGraph],
    forecasts: Mapping[str, QueryForecast | None] | None = None,
    arriving: Mapping[str, float] | None = None,
) -> Workload:
    """The optimiser's input, from the join graphs of queries and what is forecast for them.

    `arriving` are rows per epoch by stream, for those that no forecast knows.  A query of one stream joins nothing and
    is left out.
    """
    queries = [Query(name, *whole(graph)) for name, graph in graphs.items() if len(graph.aliases) > 1]
    known = {name: f for name, f in (forecasts or {}).items() if f is not None and name in graphs}
    leaves = {leaf for query in queries for leaf in query.join.leaves}
    rates = {leaf: (arriving or {})[leaf.relation] for leaf in leaves if leaf.relation in (arriving or {})}
    seen: dict[Leaf, list[tuple[float, float]]] = {}
    found: dict[Pair, list[float]] = {}
    for name, forecast in known.items():
        _sizes_of(graphs[name], forecast, seen)
    stored = {leaf: _mean(rest for _, rest in sizes) for leaf, sizes in seen.items()}
    for name, forecast in known.items():
        _selectivities(graphs[name], forecast, stored, found)
    return Workload(
        tuple(queries),
        Sizes(
            rates | {leaf: _mean(rate for rate, _ in sizes) for leaf, sizes in seen.items()},
            stored,
            {columns: _mean(values) for columns, values in found.items()},
        ),
    )


def _leaf(graph: JoinGraph, alias: str) -> Leaf:
    return Leaf(graph.alias(alias).relation, graph.alias(alias).filter or "")


def _sizes_of(graph: JoinGraph, forecast: QueryForecast, seen: dict[Leaf, list[tuple[float, float]]]) -> None:
    """Notes what a query's forecast says of the rows of its aliases."""
    for alias in forecast.aliases:
        key = key_of(graph, alias, graph.keys_of(alias)[0])
        store = forecast.stores.get(store_id(graph.alias(alias).relation, key))
        if store is not None:
            rate = forecast.keys[alias] * forecast.tuples_per_key[alias]
            seen.setdefault(_leaf(graph, alias), []).append((rate, store.rows))


def _selectivities(
    graph: JoinGraph, forecast: QueryForecast, stored: Mapping[Leaf, float], found: dict[Pair, list[float]]
) -> None:
    """Notes γ·μ, the partners of a tuple, as shares of the rows that are looked into.

    Where two aliases share several attributes, each gets the same part of the whole.
    """
    for (one, other), gamma in forecast.gamma.items():
        rows = max(stored.get(_leaf(graph, other), ASSUMED_ROWS), 1.0)
        # No success among n keys does not mean that there never is one (rule of succession), as in order/cost.py.
        success = gamma or 1 / (forecast.keys[one] + 2)
        shared = sorted(graph.shared(one, other))
        share = min(success * (forecast.mu[one, other] or 1.0) / rows, 1.0) ** (1 / len(shared))
        for attribute in shared:
            mine, its = graph.column_of(one, attribute), graph.column_of(other, attribute)
            assert mine is not None
            assert its is not None
            columns = pair((_leaf(graph, one), mine.column), (_leaf(graph, other), its.column))
            found.setdefault(columns, []).append(share)


def _sane(value: float | None, assumed: float, most: float) -> float:
    """A number from 0 to `most`; what is missing, negative or not a number is assumed."""
    return assumed if value is None or not value >= 0 else min(value, most)


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers)
