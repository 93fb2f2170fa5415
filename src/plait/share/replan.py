"""Re-optimisation: observed epochs in, now and then a better plan out (paper 000, Algorithm 1; paper 001, section 5).

Every period T the statistics join the history, the next period is forecast, and each driver's order is chosen anew.  An
order is adopted for the next epoch only if it is expected to be cheaper by `replan_gain`; otherwise nothing is built
and nothing changes.  Every switch is recorded with both orders, their forecast costs, and the statistic that tipped it:
the one without whose change the gain would have been smallest.

When the forecasts cannot be used (nothing arrived, a pair of streams was never seen together, a number is not finite),
the last good plan stays, and `said` tells why.

Contract: a planner changes probe trees and ranks only, on an allocation that it is given; stores, inputs, edges stay.
No row is lost or doubled by a switch, because each epoch runs under one plan and the rank rule holds in every plan.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from plait.config import Config
from plait.order.cost import Coefficients, DriverView, driver_view
from plait.order.drivers import POLICIES, StreamStats
from plait.order.orders import ORDERERS, Orders, fixed
from plait.query.graph import JoinGraph
from plait.query.layout import Layout
from plait.query.observed import Observed
from plait.query.plan import Plan
from plait.query.progress import Estimate, OptimiserReport, Switch
from plait.query.relation import Relation
from plait.share.allocate import Allocation, Wanted, allocate
from plait.share.probe_trees import FirstLook, plan_on
from plait.stats.counters import History, Name, Period, QueryForecast, gamma_mu, spanning

SWITCHES_KEPT = 64

MOST_SUSPECTED = 8
"""Statistics, those that changed most, among which the one that tipped a switch is looked for."""

MOST_PLANNED = 13
"""Streams of a query up to which orders are chosen: what is kept and done grows like 2 to that number."""


@dataclass
class Planner:
    """The plan in force, and what it takes to replace it."""

    graphs: Mapping[str, JoinGraph]
    relations: Mapping[str, Relation]
    config: Config
    allocation: Allocation | None = None
    """What the joins run on; None allocates for a new checkpoint."""
    looks: Mapping[str, FirstLook] = field(default_factory=dict)
    """Of queries whose first epoch is the next one, and which begin with what is there."""
    orders: dict[str, Orders] = field(default_factory=dict)
    coefficients: Coefficients = field(default_factory=Coefficients)
    switches: deque[Switch] = field(default_factory=lambda: deque(maxlen=SWITCHES_KEPT))
    said: str = "no period has ended yet"
    """Why the plan is what it is, in a sentence."""
    failures: int = 0
    """How often planning raised an error, and the plan was kept."""

    def __post_init__(self) -> None:
        config = self.config
        self._order = ORDERERS[config.orderer]
        self._rank = POLICIES[config.driver_policy]
        if self.allocation is None:
            wanted = {name: Wanted(graph, name) for name, graph in self.graphs.items()}
            self.allocation = allocate(Layout(), wanted, self.relations)
        self._on = self.allocation
        # A stream that is read by itself has no order to choose.
        self._joins = {name: graph for name, graph in self.graphs.items() if len(graph.aliases) > 1}
        self.orders = self.orders or {name: fixed(graph) for name, graph in self.graphs.items()}
        self.ranks = self._used()
        self.plan = self._planned()
        self.history = History(config.history_periods, smoothing=config.cost_variant != "no_smoothing")
        self._period = Period()
        self._begun: float | None = None
        self._values: dict[Name, float] = {}
        self._basis: dict[Name, float] = {}
        self._views: dict[tuple[str, str], DriverView] = {}
        self._seen: dict[str, float] = {}
        self._made: dict[str, float] = {}
        self._learnt = False
        self._report: OptimiserReport | None = None
        self._unsampled: frozenset[int] = frozenset()
        self._exchanged = True
        self._counted: dict[tuple[str, str, frozenset[str], str], tuple[float, float]] = {}
        if not self.adaptive:
            self.said = f"orders are kept: {self._why_fixed()}"

    def _used(self) -> tuple[str, ...]:
        """The relations that some query reads."""
        used = {alias.relation for graph in self.graphs.values() for alias in graph.aliases}
        return tuple(name for name in self.relations if name in used)

    def _planned(self) -> Plan:
        known = (*self.ranks, *(i.relation for i in self._on.layout.inputs if i.relation not in self.ranks))
        return plan_on(self._on, self.graphs, self.orders, known, self.looks)

    def looked(self) -> None:
        """The epoch of the first looks is committed."""
        if self.looks:
            self.looks = {}
            self.plan = self._planned()

    @property
    def adaptive(self) -> bool:
        """Whether anything is ever re-chosen."""
        chosen = (self.config.orderer, self.config.driver_policy) != ("fixed", "registration")
        return bool(self._joins) and chosen and not self._why_never()

    @property
    def samples(self) -> frozenset[int]:
        """The edges to be sampled in the next epoch: all in the last of a period, as far as that can be known.

        An input from which nothing arrived just then is sampled in the next period as soon as something does.
        """
        if not self.adaptive:
            return frozenset()
        last = self._period.epochs + 1 >= self.config.replan_epochs
        if last or self.config.replan_seconds is not None:
            return frozenset(wish.edge for wish in self.plan.samples)
        return self._unsampled - {edge for edge, _ in self._period.samples}

    def observe(self, observed: Observed, now: float) -> bool:
        """Takes an epoch in; True if there is a new plan for the next one."""
        if not self.adaptive:
            return False
        self._begun = now if self._begun is None else self._begun
        self._period.add(observed)
        self._exchanged = observed.exchanged
        if not self._is_over(now):
            return False
        changed = self._replan_safely(observed.epoch)
        self._period, self._begun, self._report = Period(), now, None
        return changed

    def report(self) -> OptimiserReport:
        """For `run.last_progress`: the switches so far, the reason, and estimates against what was counted.

        It changes when a period ends; until then it is the same object.
        """
        if self._report is None:
            self._report = self._new_report()
        return self._report

    def _new_report(self) -> OptimiserReport:
        return OptimiserReport(
            orderer=self.config.orderer,
            policy=self.config.driver_policy,
            said=self.said,
            switches=tuple(self.switches),
            coefficients=asdict(self.coefficients),
            estimates=tuple(self.estimates()),
            failures=self.failures,
        )

    def memory(self) -> dict[str, Any] | None:
        """What a restarted engine should know; None if nothing is new since the last call."""
        if not self._learnt:
            return None
        self._learnt = False
        return self.knowledge()

    def knowledge(self) -> dict[str, Any]:
        """All that was learnt so far."""
        return {
            "orders": {query: {d: list(o) for d, o in orders.items()} for query, orders in self.orders.items()},
            "ranks": list(self.ranks),
            "coefficients": asdict(self.coefficients),
            "seen": dict(self._seen),
            "made": dict(self._made),
            "series": [[list(name), list(values)] for name, values in self.history.series.items()],
        }

    def recall(self, memory: Mapping[str, Any]) -> None:
        """Goes on from what an earlier planner of the same queries has learnt; what does not fit is not used."""
        self._report = None
        try:
            orders = {q: {d: tuple(o) for d, o in of.items()} for q, of in memory["orders"].items()}
            ranks = [str(name) for name in memory["ranks"]]
            coefficients = Coefficients(**{k: float(v) for k, v in memory["coefficients"].items()})
            series = {tuple(n): [float(v) for v in values] for n, values in memory["series"]}
            seen, made = ({n: float(rows) for n, rows in memory[k].items()} for k in ("seen", "made"))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            self.said = f"what was learnt before cannot be used ({error}); starting from the written orders"
            return
        # Queries come and go: of those that are still here, what was learnt is used.
        for query, graph in self.graphs.items() if self.config.orderer != "fixed" else ():
            mine = orders.get(query, {})
            if all(d in mine and _is_order(graph, d, mine[d]) for d in fixed(graph)):
                self.orders[query] = mine
        self.ranks = tuple(sorted(self.ranks, key=lambda r: ranks.index(r) if r in ranks else len(ranks)))
        self.coefficients, self._seen, self._made = coefficients, seen, made
        for name, values in series.items():
            self.history.series[name] = deque(values, maxlen=self.history.length)
        self.plan = self._planned()
        self.said = "orders are those of the last run"

    def estimates(self) -> list[Estimate]:
        """Per query, driver and probe of the orders in force: γ and μ as forecast, and as counted last."""
        found: list[Estimate] = []
        for (query, driver), view in self._views.items():
            order = self.orders[query][driver]
            joined = 1 << view.driver
            for i, target in enumerate(order):
                after = joined | 1 << view.names.index(target)
                alive = view.alive[joined]
                counted = self._counted.get((query, driver, frozenset(order[:i]), target))
                found.append(
                    Estimate(
                        query=query,
                        driver=driver,
                        target=target,
                        gamma=view.alive[after] / alive if alive else 0.0,
                        mu=view.mu[view.names.index(target)],
                        gamma_counted=None if counted is None else counted[0],
                        mu_counted=None if counted is None else counted[1],
                    )
                )
                joined = after
        return found

    def _why_never(self) -> str:
        if self.config.replan_seconds is None and self.config.replan_epochs == 0:
            return "replan_epochs = 0"
        return "replan_seconds = 0" if self.config.replan_seconds == 0 else ""

    def _why_fixed(self) -> str:
        return self._why_never() or f"orderer = {self.config.orderer}"

    def _is_over(self, now: float) -> bool:
        if self.config.replan_seconds is not None:
            return self._begun is not None and now - self._begun >= self.config.replan_seconds
        return self._period.epochs >= self.config.replan_epochs

    def _replan_safely(self, epoch: int) -> bool:
        """The epoch is committed: an optimiser that fails may cost speed, never the run."""
        orders, ranks, plan = self.orders, self.ranks, self.plan
        try:
            return self._replan(epoch)
        except Exception as error:
            self.orders, self.ranks, self.plan = orders, ranks, plan
            self.failures += 1
            self.said = f"the plan is kept after epoch {epoch}: the optimiser failed ({type(error).__name__}: {error})"
            return False

    def _replan(self, epoch: int) -> bool:
        """Closes the period; a new plan if it is expected to pay."""
        period = self._period
        for total, rows in ((self._seen, period.rows_in), (self._made, period.rows_out)):
            for name, number in rows.items():
                total[name] = total.get(name, 0.0) + number
        if not any(period.rows_in.values()):
            self.said = f"the plan is kept after epoch {epoch}: nothing arrived in this period"
            return False
        self._learnt = True
        self._unsampled = frozenset(w.edge for w in self.plan.samples) - {edge for edge, _ in period.samples}
        self._counted = _counted(period, self.plan)
        self.history.close(period, self._joins, self.plan)
        self.coefficients = self.coefficients.blended(self.coefficients.fitted(period.edges.values()))
        self._values = self.history.next_values()
        if not all(math.isfinite(v) for v in self._values.values()):
            self.said = f"the plan is kept after epoch {epoch}: a forecast is not a finite number"
            return False
        orders, switched, unknown = self._choose_orders(epoch)
        ranks = self._choose_ranks(epoch)
        if self.config.orderer == "fixed":
            self.said = f"orders are kept: {self._why_fixed()}"
        elif unknown:
            self.said = f"orders are kept after epoch {epoch}: {unknown}"
        elif not switched:
            self.said = f"orders are kept after epoch {epoch}: no other is cheaper by {self.config.replan_gain:.0%}"
        else:
            self.said = f"{len(switched)} of the orders were replaced after epoch {epoch}"
        if not self._basis:
            self._basis = dict(self._values)
        if not switched and ranks == self.ranks:
            return False
        if switched:
            self.switches.extend(switched)
            self._basis = dict(self._values)
        self.orders, self.ranks = orders, ranks
        self.plan = self._planned()
        return True

    def _choose_orders(self, epoch: int) -> tuple[dict[str, Orders], list[Switch], str]:
        """All orders as they should be, what changed, and what is still unknown."""
        orders = {name: dict(of) for name, of in self.orders.items()}
        switched: list[Switch] = []
        unknown = ""
        for name, graph in self._joins.items():
            if len(graph.aliases) > MOST_PLANNED:
                unknown = f"{name} joins {len(graph.aliases)} streams, and orders are chosen for up to {MOST_PLANNED}"
                continue
            forecast = self.history.forecast(name, graph, self.plan, self._values)
            if forecast is None:
                unknown = f"some streams of {name} have not been seen together yet"
                continue
            for driver in forecast.aliases:
                view = self._view(graph, driver, forecast)
                self._views[name, driver] = view
                old = self.orders[name][driver]
                new = self._order(view, old)
                before, after = view.cost(old), view.cost(new)
                if new == old or not self._pays(before, after):
                    continue
                orders[name][driver] = new
                tipped = self._tipped(name, graph, driver, old, new)
                switched.append(Switch(epoch, name, driver, old, new, before, after, tipped))
        return orders, switched, unknown

    def _pays(self, before: float, after: float) -> bool:
        """Whether a new order is worth it.  Heuristic orderers are taken at their word: they do not minimise cost."""
        if self.config.orderer in ("selectivity_first", "greedy"):
            return True
        return math.isfinite(after) and before - after > self.config.replan_gain * before

    def _view(self, graph: JoinGraph, driver: str, forecast: QueryForecast) -> DriverView:
        config = self.config
        model = config.probe if config.cost_model == "engine" else config.cost_model
        prices = self.coefficients if self._exchanged else replace(self.coefficients, alpha_h=0.0)
        return driver_view(graph, driver, forecast, prices, model=model, variant=config.cost_variant)

    def _tipped(self, query: str, graph: JoinGraph, driver: str, old: tuple[str, ...], new: tuple[str, ...]) -> str:
        """Takes back one statistic at a time to what it was at the last switch: which one makes the gain smallest?"""
        if not self._basis:
            return "these are the first statistics"
        parents = spanning(graph, driver)
        names: list[Name] = [(kind, query, parents[a], a) for kind in ("γ", "μ") for a in old]
        names += [(kind, store.id) for kind in ("κ", "rows", "runs") for store in self.plan.stores]
        changed = [n for n in names if n in self._basis and n in self._values and _change(n, self._basis, self._values)]
        changed.sort(key=lambda n: -_change(n, self._basis, self._values))
        least, found = float("inf"), "all statistics changed a little"
        for name in changed[:MOST_SUSPECTED]:
            was, now = self._basis[name], self._values[name]
            forecast = self.history.forecast(query, graph, self.plan, {**self._values, name: was})
            assert forecast is not None
            view = self._view(graph, driver, forecast)
            gain = view.cost(old) - view.cost(new)
            if gain < least:
                kind, *where = name
                what = f"{kind}({where[1]} → {where[2]})" if len(where) == 3 else f"{kind}({where[0]})"
                least, found = gain, f"{what} goes from {was:.4g} to {now:.4g}"
        return found

    def _choose_ranks(self, epoch: int) -> tuple[str, ...]:
        streams = {name: self._stream_stats(name) for name in self._used()}
        return self._rank(streams, epoch + 1)

    def _stream_stats(self, relation: str) -> StreamStats:
        """What one new tuple of a stream is expected to find, over all queries and aliases it drives."""
        found = 0.0
        for (query, driver), view in self._views.items():
            if self.graphs[query].alias(driver).relation == relation:
                everything = (1 << len(view.names)) - 1
                per_key = view.alive[everything] * view.width[everything]
                found += per_key / max(self._values.get(("tuples", query, driver), 1.0), 1.0)
        # Rounded to two digits: streams that differ by less are equal and keep the order of registration.
        results = float(f"{found:.1e}")
        mine = [q for q, graph in self.graphs.items() if any(a.relation == relation for a in graph.aliases)]
        made = sum(self._made.get(query, 0.0) for query in mine)
        return StreamStats(
            buffer=float(f"{self._values.get(('λ', relation), 0.0):.1e}"),
            results=results,
            sigma=made / max(self._seen.get(relation, 0.0), 1.0),
            latest_ms=self.history.last.max_event_ms.get(relation),
        )


def _change(name: Name, before: Mapping[Name, float], after: Mapping[Name, float]) -> float:
    """By which factor a statistic has changed, as a logarithm; 0 if by less than 2 %."""
    was, now = max(before[name], 1e-9), max(after[name], 1e-9)
    change = abs(math.log(now / was))
    return change if change > 0.02 else 0.0


def _counted(period: Period, plan: Plan) -> dict[tuple[str, str, frozenset[str], str], tuple[float, float]]:
    """(γ, μ) of every probe of a period, by query, driver, what was probed before, and target."""
    found = {}
    for query in plan.queries:
        for (driver, order), (_, nodes) in zip(query.orders, query.nodes, strict=True):
            for i, (target, node) in enumerate(zip(order, nodes, strict=True)):
                counted = gamma_mu(period.edges[node]) if node in period.edges else None
                if counted is not None:
                    found[query.name, driver, frozenset(order[:i]), target] = counted
    return found


def _is_order(graph: JoinGraph, driver: str, order: tuple[str, ...]) -> bool:
    """Whether this is a probe order of the graph: everyone else once, each connected with those before."""
    names = {a.name for a in graph.aliases}
    if set(order) != names - {driver} or len(order) != len(names) - 1:
        return False
    joined = [driver]
    for name in order:
        if not graph.attributes_of(joined) & graph.attributes_of([name]):
            return False
        joined.append(name)
    return True
