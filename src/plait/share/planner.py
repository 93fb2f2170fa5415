"""The planner: observed epochs in, now and then a better plan out.  It holds what changes; `replan.py` decides.

Every period T the statistics join the history, the next period is forecast, and `replan` is asked.  When it cannot use
the forecast, or fails, the last good plan stays, and `said` tells why.

What was learnt survives a restart: `memory` and `knowledge` give it away as JSON values, `recall` takes it in again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from plait.config import Config
from plait.order.cost import Coefficients
from plait.order.orders import Orders, fixed
from plait.query.graph import JoinGraph
from plait.query.layout import Layout
from plait.query.observed import Observed
from plait.query.plan import Plan
from plait.query.progress import Estimate, OptimiserReport, Switch
from plait.query.relation import Relation
from plait.share.allocate import Allocation, Wanted, allocate
from plait.share.mirs import Keep
from plait.share.replan import Arrangement, Running, Statistics, Views, arranged, replan, why_fixed, why_never
from plait.share.steps import FirstLook
from plait.share.store_choice import StoreKey, StoreUse
from plait.stats.counters import History, Name, Period, gamma_mu

SWITCHES_KEPT = 64

Counted = dict[tuple[str, str, frozenset[str], str], tuple[float, float]]
"""(γ, μ) of probes, by query, driver, what was probed before, and target."""


class Planner:
    """The plan in force, and what it takes to replace it."""

    def __init__(
        self,
        graphs: Mapping[str, JoinGraph],
        relations: Mapping[str, Relation],
        config: Config,
        allocation: Allocation | None = None,
        looks: Mapping[str, FirstLook] | None = None,
        orders: Mapping[str, Orders] | None = None,
        fills: frozenset[str] = frozenset(),
    ) -> None:
        """`allocation` is what the joins run on; None allocates for a new checkpoint.

        `looks` are of queries whose first epoch is the next one, and which begin with what is there; `fills` are MIRs
        that the next epoch fills with the past.
        """
        self.config = config
        if allocation is None:
            wanted = {name: Wanted(graph, name) for name, graph in graphs.items()}
            allocation = allocate(Layout(), wanted, relations, apart=config.sharing == "independent")
        self.catalog = Running(graphs, relations, allocation.owners)
        orders = orders or {name: fixed(graph) for name, graph in graphs.items()}
        if config.orderer != "fixed":
            orders = self.catalog.followed(orders)
        self.layout = arranged(self.catalog, allocation, orders, self.catalog.used, looks or {}, fills)
        self.wishes: tuple[Keep, ...] | None = None
        """The MIRs that it wants; None: those that are there."""
        self.coefficients = Coefficients()
        self.history = History(config.history_periods, smoothing=config.cost_variant != "no_smoothing")
        self.switches: deque[Switch] = deque(maxlen=SWITCHES_KEPT)
        self.said = "no period has ended yet" if self.adaptive else f"orders are kept: {why_fixed(config)}"
        """Why the plan is what it is, in a sentence."""
        self.failures = 0
        """How often planning raised an error, and the plan was kept."""
        self._period = Period()
        self._begun: float | None = None
        self._basis: Mapping[Name, float] = {}
        self._views: Views = {}
        self._seen: dict[str, float] = {}
        self._made: dict[str, float] = {}
        self._learnt = False
        self._report: OptimiserReport | None = None
        self._unsampled: frozenset[int] = frozenset()
        self._renumbered = False
        """Whether the nodes of the last epoch's plan are not those of the plan in force."""
        self._exchanged = True
        self._counted: Counted = {}

    @property
    def plan(self) -> Plan:
        """The plan in force."""
        return self.layout.plan

    @property
    def orders(self) -> Mapping[str, Orders]:
        """The probe orders in force, by query and driver."""
        return self.layout.orders

    @property
    def ranks(self) -> tuple[str, ...]:
        """The relations by driver rank."""
        return self.layout.ranks

    @property
    def graphs(self) -> Mapping[str, JoinGraph]:
        """The joins that are planned."""
        return self.catalog.graphs

    def looked(self) -> None:
        """The epoch of the first looks is committed, and MIRs are filled."""
        if self.layout.looks or self.layout.fills:
            self._renumbered = True
            self._arrange(replace(self.layout, looks={}, fills=frozenset()))

    def _arrange(self, layout: Arrangement) -> None:
        self.layout = arranged(self.catalog, layout.allocation, layout.orders, layout.ranks, layout.looks, layout.fills)

    @property
    def adaptive(self) -> bool:
        """Whether anything is ever re-chosen."""
        chosen = (self.config.orderer, self.config.driver_policy) != ("fixed", "registration")
        return bool(self.catalog.joins) and chosen and not why_never(self.config)

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
        # What was counted under the plan of first looks belongs to no node of this one.
        self._period.add(replace(observed, edges={}) if self._renumbered else observed)
        self._renumbered = False
        self._exchanged = observed.exchanged
        if not self._is_over(now):
            return False
        before = self.layout
        try:
            self._replan(observed.epoch)
        except Exception as error:
            # The epoch is committed: an optimiser that fails may cost speed, never the run.
            self.failures += 1
            kept = f"the plan is kept after epoch {observed.epoch}"
            self.said = f"{kept}: the optimiser failed ({type(error).__name__}: {error})"
        self._period, self._begun, self._report = Period(), now, None
        return self.layout is not before

    def _is_over(self, now: float) -> bool:
        if self.config.replan_seconds is not None:
            return self._begun is not None and now - self._begun >= self.config.replan_seconds
        return self._period.epochs >= self.config.replan_epochs

    def _replan(self, epoch: int) -> None:
        """Closes the period; adopts what is decided."""
        period = self._period
        for total, rows in ((self._seen, period.rows_in), (self._made, period.rows_out)):
            for name, number in rows.items():
                total[name] = total.get(name, 0.0) + number
        if not any(period.rows_in.values()):
            self.said = f"the plan is kept after epoch {epoch}: nothing arrived in this period"
            return
        self._learnt = True
        self._unsampled = frozenset(w.edge for w in self.plan.samples) - {edge for edge, _ in period.samples}
        self._counted = _counted(period, self.plan)
        self.history.close(period, self.catalog.leads, self.plan)
        self.coefficients = self.coefficients.blended(self.coefficients.fitted(period.edges.values()))
        statistics = Statistics(
            epoch=epoch,
            history=self.history,
            values=self.history.next_values(),
            basis=self._basis,
            coefficients=self.coefficients,
            exchanged=self._exchanged,
            seen=self._seen,
            made=self._made,
            views=self._views,
        )
        decision = replan(self.catalog, self.layout, statistics, self.config)
        self.layout, self.said = decision.layout, decision.said
        self._views, self._basis = decision.views, decision.basis
        self.switches.extend(decision.switches)
        self.wishes = decision.keeps

    def store_uses(self) -> dict[StoreKey, StoreUse] | None:
        """What an epoch of the plan in force is expected to do with each store; None while that is not known."""
        if any((lead, a.name) not in self._views for lead, graph in self.catalog.leads.items() for a in graph.aliases):
            return None
        plan, latest = self.plan, self.history.latest
        uses = {store.id: StoreUse(latest(("λ", store.relation), 0.0)) for store in plan.stores if store.mir is None}
        nodes = {node.id: node for node in plan.nodes()}
        for (lead, driver), view in self._views.items():
            if lead not in self.catalog.leads:
                continue
            joined, keys = 1 << view.driver, latest(("keys", lead, driver), 0.0)
            for target, id in zip(self.orders[lead][driver], dict(plan.query_by_name[lead].nodes)[driver], strict=True):
                after = joined | 1 << view.names.index(target)
                if id in nodes and nodes[id].step.store in uses:
                    store = nodes[id].step.store
                    lookups, found = keys * view.alive[joined], keys * view.alive[after] * view.width[after]
                    uses[store] = uses[store].with_step(lookups, found)
                joined = after
        for source in plan.inputs:
            begun = {tree.edge for tree in plan.trees if tree.nodes and any(n.step.hop == 1 for n in tree.nodes)}
            for edge in source.edges:
                if edge.store in uses and edge.id in begun:
                    uses[edge.store] = replace(uses[edge.store], driving=uses[edge.store].rows_in)
        known = plan.store_by_id
        return {(known[id].relation, known[id].key.columns): use for id, use in uses.items()}

    @property
    def tasks(self) -> int:
        """Among how many tasks tuples travel, about."""
        return 2 if self._exchanged else 1

    def report(self) -> OptimiserReport:
        """For `run.last_progress`: the switches so far, the reason, and estimates against what was counted.

        It changes when a period ends; until then it is the same object.
        """
        if self._report is None:
            self._report = OptimiserReport(
                orderer=self.config.orderer,
                policy=self.config.driver_policy,
                said=self.said,
                switches=tuple(self.switches),
                coefficients=asdict(self.coefficients),
                estimates=tuple(self.estimates()),
                failures=self.failures,
            )
        return self._report

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

    def goes_on_from(self, before: Planner) -> None:
        """Of the planner before, on another layout of the same run: what it has done, and why."""
        self.switches.extend(before.switches)
        self.failures, self.said = before.failures, before.said

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
        recalled = dict(self.orders)
        # Queries come and go: of those that are still here, what was learnt is used.
        for query, graph in self.graphs.items() if self.config.orderer != "fixed" else ():
            mine = orders.get(query, {})
            if all(d in mine and _is_order(graph, d, mine[d]) for d in fixed(graph)):
                recalled[query] = mine
        if self.config.orderer != "fixed":
            recalled = self.catalog.followed(recalled)
        self.coefficients, self._seen, self._made = coefficients, seen, made
        for name, values in series.items():
            self.history.series[name] = deque(values, maxlen=self.history.length)
        by_rank = sorted(self.ranks, key=lambda r: ranks.index(r) if r in ranks else len(ranks))
        self._arrange(replace(self.layout, orders=recalled, ranks=tuple(by_rank)))
        self.said = "orders are those of the last run"


def _counted(period: Period, plan: Plan) -> Counted:
    """Of every probe of a period."""
    found: Counted = {}
    for query in plan.queries:
        for (driver, order), (_, nodes) in zip(query.orders, query.nodes, strict=True):
            for i, (target, node) in enumerate(zip(order, nodes, strict=True)):
                counted = gamma_mu(period.edges[node]) if node in period.edges else None
                if counted is not None:
                    found[query.name, driver, frozenset(order[:i]), target] = counted
    return found


def _is_order(graph: JoinGraph, driver: str, order: tuple[str, ...]) -> bool:
    """Whether this is a probe order of the graph: everyone else once, each by a key of those before."""
    names = {a.name for a in graph.aliases}
    if set(order) != names - {driver} or len(order) != len(names) - 1:
        return False
    joined = [driver]
    for name in order:
        if not graph.can_search(joined, name):
            return False
        joined.append(name)
    return True
