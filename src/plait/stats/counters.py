"""What was counted, period by period, and what is expected of the next (paper 000, section 4.3).

A *period* adds up epochs that ran under one plan.  When it ends, its statistics join the history, a series each, at
most L long:

    γ[l, r], μ[l, r]   success and matched rows when new tuples of l look r up.  Counted where the plan probes r first,
                       else estimated from the sample
    κ[store]           its keys: κ_old + κ_in − κ_exp
    λ[relation]        rows that arrive; and its keys and tuples per key

A *forecast* is the next value of every series, together with what a product of γ's would miss: per driver the
correlation of its partners, from the sample, or exactly where the plan went through that very set of probes.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from plait.query.graph import JoinGraph
from plait.query.observed import EdgeCount, KeyCount, Observed, Sample
from plait.query.plan import Plan
from plait.query.store import key_of, store_id
from plait.stats.sketch import correlation, fresh_share, pair
from plait.stats.smooth import FEWEST, forecasts

Name = tuple[str, ...]
"""Of a series: ("γ", query, l, r), ("μ", query, l, r), ("κ", store), ("λ", relation), …"""

DAMPED = BOUNDED = frozenset({"γ"})
JUMPING = frozenset({"γ", "μ"})
"""Series that start anew when they jump: a drift must not be smoothed away."""
LEVEL = frozenset({"runs"})
"""Series without trend: compaction makes them go up and down.  Their forecast is the mean of the last periods."""
LEVEL_PERIODS = 8
JUMP = 6.0
"""Steps as large as usual that a series must take at once to have jumped."""


@dataclass
class Period:
    """Epochs under one plan, added up."""

    epochs: int = 0
    rows_in: dict[str, int] = field(default_factory=dict)
    rows_out: dict[str, int] = field(default_factory=dict)
    edges: dict[int, EdgeCount] = field(default_factory=dict)
    samples: dict[tuple[int, tuple[int, ...]], Sample] = field(default_factory=dict)
    stores: dict[str, KeyCount] = field(default_factory=dict)
    max_event_ms: dict[str, int] = field(default_factory=dict)

    def add(self, observed: Observed) -> None:
        """Takes one epoch in."""
        self.epochs += 1
        for total, more in ((self.rows_in, observed.rows_in), (self.rows_out, observed.rows_out)):
            for name, rows in more.items():
                total[name] = total.get(name, 0) + rows
        for node, count in observed.edges.items():
            self.edges.setdefault(node, EdgeCount()).add(count)
        for sample in observed.samples:
            mine = self.samples.setdefault(
                (sample.edge, sample.filters), Sample(sample.edge, sample.filters, sample.stores)
            )
            if mine.stores == sample.stores:
                mine.add(sample)
        for store, keys in observed.stores.items():
            before = self.stores.get(store, KeyCount())
            # Compaction makes the number of runs a sawtooth: what counts is its mean.
            runs = before.runs + (keys.runs - before.runs) / self.epochs
            self.stores[store] = KeyCount(keys.keys, before.arrived + keys.arrived, keys.rows, runs)
        self.max_event_ms |= observed.max_event_ms


@dataclass(frozen=True, slots=True)
class StoreForecast:
    """What a lookup will meet."""

    keys: float
    rows: float
    runs: float


@dataclass(frozen=True)
class QueryForecast:
    """What the next period is expected to be like, for one query.  Aliases are in written order."""

    aliases: tuple[str, ...]
    gamma: Mapping[tuple[str, str], float]
    mu: Mapping[tuple[str, str], float]
    keys: Mapping[str, float]
    """Distinct keys of new tuples per driving alias and period."""
    tuples_per_key: Mapping[str, float]
    stores: Mapping[str, StoreForecast]
    together: Mapping[str, tuple[float, ...]]
    """Per driver and set of aliases (bit i is aliases[i]): survivors over the product of γ's."""
    wider: Mapping[str, Mapping[int, float]]
    """Per driver and set: tuples per surviving key over the product of μ's, where they were counted."""


def gamma_mu(count: EdgeCount) -> tuple[float, float] | None:
    """γ = m / q and μ = s / m of one probe, checks included; None without a query."""
    if not count.lookups:
        return None
    passed = count.passed / count.tuples if count.tuples and count.passed else 1.0
    mu = count.rows / count.hits * passed if count.hits else 1.0
    return min(count.alive / count.lookups, 1.0), mu


@dataclass
class History:
    """The series, and the newest period beside them."""

    length: int
    """L: periods kept per series."""
    smoothing: bool = True
    """Without it the last value is the forecast (paper 000's ablation)."""
    series: dict[Name, deque[float]] = field(default_factory=dict)
    last: Period = field(default_factory=Period)
    _beyond: dict[tuple[str, str], tuple[tuple[float, ...], dict[int, float]]] = field(default_factory=dict)
    """What a product of pairs misses, by query and driver; of the newest period, computed when asked for."""

    def close(self, period: Period, graphs: Mapping[str, JoinGraph], plan: Plan) -> None:
        """A period is over: every statistic it can tell joins its series."""
        self.last = period
        self._beyond = {}
        for store, count in period.stores.items():
            shares = [fresh_share(sample) for sample in period.samples.values() if sample.stores[0][0] == store]
            fresh = count.arrived * (min(shares) if shares else 1.0)
            before = self.latest(("κ", store), 0.0)
            self._note(("κ in", store), fresh)
            self._note(("κ exp", store), max(before + fresh - count.keys, 0.0))
            self._note(("κ", store), count.keys)
            self._note(("rows", store), float(count.rows))
            self._note(("runs", store), float(count.runs))
        for relation, rows in period.rows_in.items():
            self._note(("λ", relation), rows / period.epochs)
        for query, graph in graphs.items():
            for alias in graph.aliases:
                driven = _arrivals(query, graph, alias.name, plan, period)
                if driven is not None:
                    self._note(("keys", query, alias.name), driven[0] / period.epochs)
                    self._note(("tuples", query, alias.name), driven[1])
                for other in graph.aliases:
                    found = _pair(query, graph, alias.name, other.name, plan, period)
                    if found is not None:
                        self._note(("γ", query, alias.name, other.name), found[0])
                        self._note(("μ", query, alias.name, other.name), found[1])

    def _note(self, name: Name, value: float) -> None:
        if not math.isfinite(value):
            return
        series = self.series.setdefault(name, deque(maxlen=self.length))
        if name[0] in JUMPING and is_jump(series, value):
            series.clear()
        series.append(value)

    def latest(self, name: Name, default: float) -> float:
        """The newest value of a series."""
        found = self.series.get(name)
        return found[-1] if found else default

    def next_values(self) -> dict[Name, float]:
        """The forecast of every series: within its bounds, and never wilder than what the series has seen."""
        names = list(self.series)
        if not self.smoothing:
            return {name: self.series[name][-1] for name in names}
        found: dict[Name, float] = {}
        for name in names:
            if name[0] in LEVEL:
                recent = list(self.series[name])[-LEVEL_PERIODS:]
                found[name] = sum(recent) / len(recent)
        for damped in (False, True):
            chosen = [name for name in names if (name[0] in DAMPED) == damped and name not in found]
            values = forecasts([self.series[name] for name in chosen], damped=damped)
            for name, value in zip(chosen, values, strict=True):
                found[name] = _sane(name, value, self.series[name])
        return found

    def forecast(self, query: str, graph: JoinGraph, plan: Plan, values: Mapping[Name, float]) -> QueryForecast | None:
        """What `values` mean for one query; None while a pair of its streams was never seen together."""
        aliases = tuple(a.name for a in graph.aliases)
        adjacent = [(one, other) for one in aliases for other in aliases if one != other and graph.shared(one, other)]
        stored = {a: max(values.get(("rows", store), 1.0) for store in _stores_of(query, a, plan)) for a in aliases}
        gamma, mu = {}, {}
        for one, other in adjacent:
            if ("γ", query, one, other) in values:
                gamma[one, other] = values["γ", query, one, other]
                mu[one, other] = max(values["μ", query, one, other], 0.0)
            elif _is_sampled(graph, one, other):
                return None
            else:
                # No store tells: each finds its share of the rows.
                gamma[one, other], mu[one, other] = 1.0, max(stored[other] / max(stored[one], 1.0), 1.0)
        together, wider = {}, {}
        for driver in aliases:
            if (query, driver) not in self._beyond:
                self._beyond[query, driver] = self._beyond_product(query, graph, driver, plan)
            together[driver], wider[driver] = self._beyond[query, driver]
        stores = {
            store_id(graph.alias(alias).relation, key_of(graph, alias, key)): StoreForecast(
                max(values.get(("κ", store[0]), 1.0), 1.0),
                max(values.get(("rows", store[0]), 1.0), 1.0),
                max(values.get(("runs", store[0]), 1.0), 1.0),
            )
            for alias in aliases
            for key in graph.keys_of(alias)
            if (store := _store_of(query, graph, alias, key, plan)) is not None
        }
        return QueryForecast(
            aliases=aliases,
            gamma=gamma,
            mu=mu,
            keys={a: max(values.get(("keys", query, a), 0.0), 0.0) for a in aliases},
            tuples_per_key={a: max(values.get(("tuples", query, a), 1.0), 1.0) for a in aliases},
            stores=stores,
            together=together,
            wider=wider,
        )

    def _beyond_product(
        self, query: str, graph: JoinGraph, driver: str, plan: Plan
    ) -> tuple[tuple[float, ...], dict[int, float]]:
        """What the product of pairs misses, by set of aliases: from the sample, then from what was counted."""
        aliases = [a.name for a in graph.aliases]
        together = [1.0] * (1 << len(aliases))
        for key in graph.keys_of(driver):
            wish = _sample_of(query, graph, driver, key, plan, self.last)
            if wish is not None:
                stores = [_store_of(query, graph, a, key, plan) if a != driver else None for a in aliases]
                found = correlation(wish, stores)
                together = [a * b for a, b in zip(together, found, strict=True)]
        wider: dict[int, float] = {}
        pairs = [(a, b) for a in aliases for b in aliases if a != b and graph.shared(a, b)]
        latest = {kind: {pair: self.latest((kind, query, *pair), 1.0) for pair in pairs} for kind in ("γ", "μ")}
        gammas_of, mus_of = products(graph, driver, latest["γ"], latest["μ"])
        counted = _path(query, driver, plan, self.last)
        first = counted[0][1].lookups
        joined, alive = 1 << aliases.index(driver), 1.0
        for target, count in counted:
            found_here = gamma_mu(count)
            if found_here is None:
                break
            joined |= 1 << aliases.index(target)
            gammas, mus = gammas_of[joined], mus_of[joined]
            # Behind an exchange keys are others than the driver's; shares of keys go on all the same.
            alive *= found_here[0]
            if gammas > 0:
                together[joined] = alive / gammas
            if count.passed and alive > 0 and mus > 0:
                per_key = count.passed / first / alive
                wider[joined] = per_key / mus / self.latest(("tuples", query, driver), 1.0)
        return tuple(together), wider


def spanning(graph: JoinGraph, driver: str) -> dict[str, str]:
    """For every other alias the one by which the driver reaches it, breadth first in written order."""
    parents: dict[str, str] = {}
    reached = [driver]
    for name in reached:
        for alias in graph.aliases:
            if alias.name not in reached and graph.shared(name, alias.name):
                parents[alias.name] = name
                reached.append(alias.name)
    return parents


def products(
    graph: JoinGraph, driver: str, gamma: Mapping[tuple[str, str], float], mu: Mapping[tuple[str, str], float]
) -> tuple[list[float], list[float]]:
    """By set of aliases (as bits): the product of the γ's, and of the μ's, by which a driver reaches all of it.

    An alias is looked up by all attributes that it shares with the set, so it is reached from those in it that share
    most with it: from its parent in the spanning tree if that is one of them, else (the graph has a cycle) from the one
    that promises the fewest partners.  Sets that are not connected, or lack the driver, have 0.
    """
    names = [a.name for a in graph.aliases]
    own, parents = names.index(driver), spanning(graph, driver)
    nearest = [_nearest(graph, names, alias) for alias in names]
    parent = [own if a == driver else names.index(parents[a]) for a in names]
    alive, width = [0.0] * (1 << len(names)), [0.0] * (1 << len(names))
    # 2: by the spanning tree alone, so that the product is the same for any order; 1: in another way.
    reached = bytearray(1 << len(names))
    alive[1 << own] = width[1 << own] = 1.0
    reached[1 << own] = 2
    for joined in range(1 << len(names)):
        best: tuple[float, float, float] | None = None
        by_tree = 0
        for last in range(len(names)):
            before = joined & ~(1 << last)
            if before == joined or last == own or not reached[before]:
                continue
            closest = next((near & before for near in nearest[last] if near & before), 0)
            has_parent = closest >> parent[last] & 1
            by_tree = has_parent and reached[before] == 2
            for other in [parent[last]] if has_parent else [j for j in range(len(names)) if closest >> j & 1]:
                pair = names[other], names[last]
                one, many = alive[before] * gamma[pair], width[before] * mu[pair]
                if by_tree or best is None or one * many < best[0]:
                    best = one * many, one, many
            if by_tree:
                break
        if best is not None:
            reached[joined] = 2 if by_tree else 1
            _, alive[joined], width[joined] = best
    return alive, width


def _nearest(graph: JoinGraph, names: Sequence[str], alias: str) -> list[int]:
    """The neighbours of an alias, as sets: those that share most attributes with it, then the next, and so on."""
    found: dict[int, int] = {}
    for i, other in enumerate(names):
        if other != alias and (shared := graph.shared(alias, other)):
            found[len(shared)] = found.get(len(shared), 0) | 1 << i
    return [found[much] for much in sorted(found, reverse=True)]


def _path(query: str, driver: str, plan: Plan, period: Period) -> list[tuple[str, EdgeCount]]:
    """The probes of a driver's order, with what they counted."""
    found = plan.query_by_name[query]
    order, nodes = dict(found.orders)[driver], dict(found.nodes)[driver]
    return [(target, period.edges.get(node, EdgeCount())) for target, node in zip(order, nodes, strict=True)]


def _pair(query: str, graph: JoinGraph, one: str, other: str, plan: Plan, period: Period) -> tuple[float, float] | None:
    """(γ, μ) of new tuples of `one` looking `other` up."""
    if one == other or not graph.shared(one, other):
        return None
    path = _path(query, one, plan, period)
    target, count = path[0]
    if target == other and (found := gamma_mu(count)) is not None:
        return found
    if not _is_sampled(graph, one, other):
        # Only a probe behind others tells; what those did to it is part of it.
        return gamma_mu(next(count for target, count in path if target == other))
    key = graph.lookup_key([one], other, None)
    sample = _sample_of(query, graph, one, key, plan, period)
    store = _store_of(query, graph, other, key, plan)
    return None if sample is None or store is None else pair(sample, store)


def _is_sampled(graph: JoinGraph, one: str, other: str) -> bool:
    """Whether new tuples of `one` are spread by a key by which `other` is stored as well."""
    return graph.can_look_up([one], other) and graph.lookup_key([one], other, None) in graph.keys_of(one)


def _stores_of(query: str, alias: str, plan: Plan) -> list[str]:
    return [store for a, _, store in plan.query_by_name[query].stores if a == alias]


def _arrivals(query: str, graph: JoinGraph, alias: str, plan: Plan, period: Period) -> tuple[float, float] | None:
    """Distinct keys of the new tuples of an alias, and tuples per key."""
    key = graph.keys_of(alias)[0]
    store = _store_of(query, graph, alias, key, plan)
    sample = _sample_of(query, graph, alias, key, plan, period)
    if store is None or sample is None or store[0] not in period.stores:
        return None
    asked = sum(counts[0] for counts in sample.patterns.values())
    return float(period.stores[store[0]].arrived), sample.tuples / max(asked, 1)


def _store_of(
    query: str, graph: JoinGraph, alias: str, key: tuple[int, ...], plan: Plan
) -> tuple[str, tuple[int, ...]] | None:
    """The store of an alias by a key, with the alias's filters; None if it cannot be looked up by it."""
    if key not in graph.keys_of(alias):
        return None
    found = plan.query_by_name[query]
    columns = key_of(graph, alias, key).columns
    store = next(store for a, by, store in found.stores if (a, by) == (alias, columns))
    return store, dict(found.filters)[alias]


def _sample_of(
    query: str, graph: JoinGraph, alias: str, key: tuple[int, ...], plan: Plan, period: Period
) -> Sample | None:
    store = _store_of(query, graph, alias, key, plan)
    if store is None:
        return None
    edges = plan.input_by_relation[graph.alias(alias).relation].edges
    edge = next(e.id for e in edges if e.store == store[0])
    return period.samples.get((edge, store[1]))


def _sane(name: Name, value: float, series: Sequence[float]) -> float:
    """A forecast one can plan with: finite, in its range, at most a step of the series' own span outside it."""
    low, high = min(series), max(series)
    if not math.isfinite(value):
        return float(series[-1])
    span = high - low
    value = min(max(value, low - span, low / 2), high + span)
    return min(max(value, 0.0), 1.0) if name[0] in BOUNDED else max(value, 0.0)


def is_jump(series: Sequence[float], value: float) -> bool:
    """Whether a value is far from where its series was going, as the size of its usual steps goes.

    >>> is_jump([0.50, 0.52, 0.51, 0.53], 0.1), is_jump([0.50, 0.52, 0.51, 0.53], 0.55)
    (True, False)
    """
    if len(series) < FEWEST:
        return False
    recent = list(series)
    steps = sorted(abs(b - a) for a, b in pairwise(recent))
    usual = steps[len(steps) // 2]
    return abs(value - recent[-1]) > JUMP * usual + 0.1 * max(abs(recent[-1]), abs(value))
