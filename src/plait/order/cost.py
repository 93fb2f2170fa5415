"""What a probe order costs (paper 000, sections 3.2 and 4.1), for the engine that runs it.

Paper 000's model is recursive: the i-th probe costs a query, and, if it succeeds, its matches and all that follows,

    C_i = α_q·f(κ) + γ·(α_m·μ·w + C_{i+1})                                          `sequence_cost`

with w = 1.  In an engine that probes with every matched tuple, the tuples of a key multiply from probe to probe:
w = the product of the μ's before.  Unrolled, a probe after the set S of aliases costs α_q·f·alive(S) for its query
and α_m·alive(S + r)·width(S + r) for its matches, where alive(S) is the share of the driver's keys that have partners
in all of S, and width(S) the tuples per such key.  Both depend on the *set* only, never on the order within it; that is
what makes dynamic programming over sets exact (order/dp_pick.py).

What the matches cost depends on the engine:

    recursive    as in the paper, w = 1
    iterative    every probe multiplies its tuples out
    factorised   tuples are multiplied out only where they must be: before an exchange, for a check, at the end

Whenever the key changes, tuples travel: α_x each, and α_h for the exchange itself, however few they are.  By a key that
nothing is stored by, all rows of a store are searched: α_s each, once per epoch, however few the tuples are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from plait.query.graph import JoinGraph
from plait.query.observed import EdgeCount
from plait.query.store import key_of, store_id
from plait.stats.counters import QueryForecast, StoreForecast, products, spanning

LookupCost = Callable[[StoreForecast, float], float]
"""f: how a lookup's cost grows, given the store and the number of lookups made together."""

MODELS = ("recursive", "iterative", "factorised")

FEWEST_LOOKUPS, FEWEST_TUPLES = 10_000, 100_000
"""Below these, in one period, a time tells more about calling the kernels than about their work."""


def hash_table(c: float = 1.0, slots: float = 65536.0) -> LookupCost:
    """Paper 000, Eq. 5: a fixed cost and the chain that is walked, κ / 2m."""
    return lambda store, lookups: c + store.keys / (2 * slots)


def ordered_array() -> LookupCost:
    """Paper 000, Eq. 6: binary search."""
    return lambda store, lookups: math.log2(store.keys + 1)


def sorted_runs(rho: float) -> LookupCost:
    """What our runs cost: each is searched, by galloping from where the last lookup ended.

    `rho` is the price of one doubling in terms of the price of visiting a run; it is fitted (`Coefficients`).
    """

    def f(store: StoreForecast, lookups: float) -> float:
        return store.runs * (1 + rho * math.log2(1 + store.rows / store.runs / max(lookups, 1.0)))

    return f


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Nanoseconds, measured on this machine while it works.

    The defaults are what TPC-DS at scale factor 1 measured on two cores; they hold until there is enough to measure.
    """

    alpha_q: float = 12.0
    """Per run visited by a lookup."""
    rho: float = 0.7
    alpha_m: float = 90.0
    """Per tuple multiplied out."""
    alpha_x: float = 160.0
    """Per tuple that travels."""
    alpha_h: float = 120e6
    """Per exchange: a Spark stage more.  Not fitted; what a chain's further exchanges took on the machine above."""
    alpha_s: float = 6.0
    """Per row that is searched, because it is not stored by the key.  Not fitted."""

    def fitted(self, edges: Iterable[EdgeCount]) -> Coefficients:
        """The coefficients that explain the times of these probes best; unchanged where there is too little to see."""
        seen = list(edges)
        asked = [e for e in seen if e.lookups >= FEWEST_LOOKUPS]
        alpha_q, rho = self.alpha_q, self.rho
        # Least squares of ns ≈ a·runs + b·gallop, both at least 0, relative to the size of each probe.
        rr = sum(e.runs * e.runs / e.lookups for e in asked)
        rg = sum(e.runs * e.gallop / e.lookups for e in asked)
        gg = sum(e.gallop * e.gallop / e.lookups for e in asked)
        rt = sum(e.runs * e.lookup_ns / e.lookups for e in asked)
        gt = sum(e.gallop * e.lookup_ns / e.lookups for e in asked)
        determinant = rr * gg - rg * rg
        if rr > 0 and determinant > 1e-3 * rr * gg:
            a, b = (rt * gg - gt * rg) / determinant, (gt * rr - rt * rg) / determinant
            if a > 0 and b >= 0:
                alpha_q, rho = a, b / a
        if rr > 0 and (alpha_q, rho) == (self.alpha_q, self.rho):
            units = sum(e.runs + rho * e.gallop for e in asked)
            alpha_q = sum(e.lookup_ns for e in asked) / units if units else alpha_q
        tuples = sum(e.tuples for e in seen)
        shipped = sum(e.shipped for e in seen)
        return replace(
            self,
            alpha_q=alpha_q,
            rho=rho,
            alpha_m=sum(e.match_ns for e in seen) / tuples if tuples >= FEWEST_TUPLES else self.alpha_m,
            alpha_x=sum(e.ship_ns for e in seen) / shipped if shipped >= FEWEST_TUPLES else self.alpha_x,
        )

    def work(self, count: EdgeCount) -> float:
        """What a probe cost, in nanoseconds as these coefficients see it: counted, so free of the clock's noise."""
        queries = self.alpha_q * (count.runs + self.rho * count.gallop)
        return queries + self.alpha_m * count.tuples + self.alpha_x * count.shipped

    def blended(self, newer: Coefficients, weight: float = 0.3) -> Coefficients:
        """A step towards newer measurements."""
        return Coefficients(
            *(
                old + weight * (new - old)
                for old, new in (
                    (self.alpha_q, newer.alpha_q),
                    (self.rho, newer.rho),
                    (self.alpha_m, newer.alpha_m),
                    (self.alpha_x, newer.alpha_x),
                    (self.alpha_h, newer.alpha_h),
                    (self.alpha_s, newer.alpha_s),
                )
            )
        )


@dataclass(frozen=True)
class DriverView:
    """All that an orderer must know of one driving alias: costs and set functions, aliases as bits."""

    graph: JoinGraph
    driver: int
    names: tuple[str, ...]
    alive: Sequence[float]
    """By set: the share of the driver's keys that have partners in all of it."""
    width: Sequence[float]
    """By set: tuples per such key."""
    mu: Sequence[float]
    """By alias: rows per successful lookup."""
    rows: Sequence[float]
    """By alias: rows in its store."""
    lookup_ns: Sequence[float]
    """By alias: α_q·f(κ)."""
    alpha_m: float
    alpha_x: float
    model: str
    exchange_ns: float = 0.0
    """An exchange by itself, shared out over the driver's keys."""
    search_ns: Sequence[float] = ()
    """By alias: what searching all its rows costs, shared out over the driver's keys."""
    checked: Mapping[int, bool] = field(default_factory=dict)
    """Aliases whose joining brings a check: their tuples are multiplied out even when factorised."""

    @cached_property
    def neighbours(self) -> tuple[int, ...]:
        """By alias: the set of those it shares an attribute with."""
        return tuple(
            sum(1 << j for j, other in enumerate(self.names) if other != name and self.graph.shared(name, other))
            for name in self.names
        )

    @cached_property
    def _keys(self) -> tuple[tuple[tuple[int, tuple[int, ...]], ...], ...]:
        """By alias: its keys as (set of attributes, key), widest first."""
        return tuple(tuple((sum(1 << t for t in key), key) for key in self.graph.keys_of(name)) for name in self.names)

    @cached_property
    def _searched(self) -> tuple[tuple[tuple[int, tuple[int, ...]], ...], ...]:
        """By alias: the keys by which it could be looked up, stored or not."""
        return tuple(
            tuple((sum(1 << t for t in key), key) for key in self.graph.every_key_of(name)) for name in self.names
        )

    @cached_property
    def _carried(self) -> tuple[int, ...]:
        return tuple(sum(1 << t for t in self.graph.attributes_of([name])) for name in self.names)

    @cached_property
    def _one_key(self) -> tuple[int, ...] | None:
        keys = {key for options in self._searched for _, key in options}
        return next(iter(keys)) if len(keys) == 1 else None

    def key(self, joined: int, target: int, here: tuple[int, ...] | None) -> tuple[int, ...]:
        """`JoinGraph.lookup_key` on sets of bits."""
        if self._one_key is not None:
            return self._one_key
        carried = self._carried_by(joined)
        possible = [key for wanted, key in self._keys[target] if wanted & carried == wanted]
        possible = possible or [key for wanted, key in self._searched[target] if wanted & carried == wanted]
        widest = [key for key in possible if len(key) == len(possible[0])]
        return here if here is not None and here in widest else widest[0]

    def place(self, target: int, key: tuple[int, ...]) -> tuple[int, ...]:
        """Where tuples are once they have looked a target up by a key: at its owner, or nowhere if they searched."""
        return key if self.graph.is_stored_by(self.names[target], key) else ()

    def step(self, joined: int, target: int, here: tuple[int, ...] | None) -> tuple[float, tuple[int, ...]]:
        """Nanoseconds per key of the driver that this probe costs after these, and where its tuples are then."""
        key = self.key(joined, target, here)
        after = joined | 1 << target
        searches = not self.graph.is_stored_by(self.names[target], key)
        cost = self.lookup_ns[target] * self.alive[joined] * self.per_key(joined, key)
        if searches:
            cost = self.search_ns[target]
        if self.model == "recursive":
            cost += self.alpha_m * self.mu[target] * self.alive[after]
        elif self.model == "iterative" or self.checked.get(target, False):
            cost += self.alpha_m * self.alive[after] * self.width[after]
        if searches or (key != here and (here is not None or key not in self._driven_by)):
            per_tuple = self.alpha_x + (self.alpha_m if self.model == "factorised" else 0.0)
            if self.alive[joined]:
                cost += per_tuple * self.alive[joined] * self.width[joined] + self.exchange_ns
        return cost, self.place(target, key)

    def per_key(self, joined: int, key: tuple[int, ...]) -> float:
        """Lookups per surviving key of the driver: one, unless by a key that its partners brought, one per tuple."""
        return 1.0 if self.model == "recursive" or key in self._driven_by else self.width[joined]

    @cached_property
    def _driven_by(self) -> frozenset[tuple[int, ...]]:
        return frozenset(self.graph.keys_of(self.names[self.driver]))

    def following(self, joined: int) -> list[int]:
        """The aliases that can be probed next."""
        return [i for i, near in enumerate(self.neighbours) if not joined >> i & 1 and near & joined]

    def _carried_by(self, joined: int) -> int:
        """The attributes of a set of aliases, as bits."""
        carried = 0
        for i, attributes in enumerate(self._carried):
            if joined >> i & 1:
                carried |= attributes
        return carried

    def cost(self, order: Sequence[str]) -> float:
        """Nanoseconds per key of the driver for a whole order."""
        joined, here, total = 1 << self.driver, None, 0.0
        for name in order:
            target = self.names.index(name)
            cost, here = self.step(joined, target, here)
            total += cost
            joined |= 1 << target
        return total


def sequence_cost(view: DriverView, order: Sequence[str]) -> float:
    """Eq. 8 as the paper writes it, from the first probe to the last.  Equal to `view.cost(order)`."""

    def from_step(i: int, joined: int, here: tuple[int, ...] | None) -> float:
        if i == len(order):
            return 0.0
        if view.alive[joined] == 0:
            return 0.0
        target = view.names.index(order[i])
        after = joined | 1 << target
        key = view.key(joined, target, here)
        gamma = view.alive[after] / view.alive[joined]
        searches = not view.graph.is_stored_by(view.names[target], key)
        matches = 0.0
        if view.model == "recursive":
            matches = view.mu[target]
        elif view.model == "iterative" or view.checked.get(target, False):
            matches = view.width[after]
        travel = 0.0
        if searches or (key != here and (here is not None or key not in view.graph.keys_of(view.names[view.driver]))):
            travel = (view.alpha_x + (view.alpha_m if view.model == "factorised" else 0.0)) * view.width[joined]
            # Paid once, whatever share of the keys has come this far.
            travel += view.exchange_ns / view.alive[joined]
        queries = view.lookup_ns[target] * view.per_key(joined, key)
        if searches:
            queries = view.search_ns[target] / view.alive[joined]
        rest = from_step(i + 1, after, view.place(target, key))
        return travel + queries + gamma * (view.alpha_m * matches + rest)

    return from_step(0, 1 << view.driver, None)


def driver_view(
    graph: JoinGraph,
    driver: str,
    forecast: QueryForecast,
    coefficients: Coefficients,
    *,
    model: str,
    variant: str = "full",
    lookup_cost: LookupCost | None = None,
) -> DriverView:
    """Forecasts become the set functions and prices of one driver."""
    names = forecast.aliases
    n, own = len(names), names.index(driver)
    f = lookup_cost or sorted_runs(coefficients.rho)
    parents = spanning(graph, driver)
    mu = [1.0 if a == driver else forecast.mu[parents[a], a] for a in names]
    stores = [_store(graph, forecast, parents.get(a), a) for a in names]
    asked = forecast.keys[driver]
    lookup_ns = [coefficients.alpha_q * f(store, asked) for store in stores]
    alive, width = [0.0] * (1 << n), [0.0] * (1 << n)
    together, wider = forecast.together[driver], forecast.wider[driver]
    # No success among n keys does not mean that there never is one (rule of succession): otherwise whatever comes after
    # such a probe would be free, and a probe that explodes would look as good as any.
    gammas = {pair: max(g, 1 / (forecast.keys[pair[0]] + 2)) if g == 0 else g for pair, g in forecast.gamma.items()}
    mus = {pair: m or 1.0 for pair, m in forecast.mu.items()}
    alive_product, width_product = products(graph, driver, gammas, mus)
    connected = [bool(w) or bool(a) for a, w in zip(alive_product, width_product, strict=True)]
    for joined in range(1, 1 << n):
        if not joined >> own & 1:
            continue
        # One partner more can only lose keys, whatever the estimates say.
        fewer = (joined ^ 1 << i for i in range(n) if i != own and joined >> i & 1)
        most = min((alive[before] for before in fewer if connected[before]), default=1.0)
        alive[joined] = min(alive_product[joined] * together[joined], most)
        width[joined] = forecast.tuples_per_key[driver] * width_product[joined] * wider.get(joined, 1.0)
    return DriverView(
        graph=graph,
        driver=own,
        names=names,
        alive=alive,
        width=width,
        mu=mu,
        rows=[store.rows for store in stores],
        lookup_ns=[0.0] * n if variant == "match_cost_only" else lookup_ns,
        alpha_m=0.0 if variant == "query_cost_only" else coefficients.alpha_m,
        alpha_x=0.0 if variant == "query_cost_only" else coefficients.alpha_x,
        model=model,
        exchange_ns=coefficients.alpha_h / max(asked, 1.0),
        search_ns=[coefficients.alpha_s * store.rows / max(asked, 1.0) for store in stores],
        checked={i: _has_check(graph, name) for i, name in enumerate(names)},
    )


def _store(graph: JoinGraph, forecast: QueryForecast, parent: str | None, alias: str) -> StoreForecast:
    """The store in which an alias is looked up by the key it shares with its parent; if there is none, its first."""
    direct = parent is not None and graph.can_look_up([parent], alias)
    key = graph.lookup_key([parent], alias, None) if parent is not None and direct else graph.keys_of(alias)[0]
    return forecast.stores[store_id(graph.alias(alias).relation, key_of(graph, alias, key))]


def _has_check(graph: JoinGraph, alias: str) -> bool:
    windows = any(alias in (w.left.alias, w.right.alias) for w in graph.windows)
    return windows or any(alias in {r.alias for r in c.refs} for c in graph.conditions if c.expr is not None)
