"""Re-optimisation, decided: what runs, what it runs on and what was observed in, a decision with its reasons out.

    replan(catalog, layout, statistics, config) → Decision         (paper 000, Algorithm 1; paper 001, section 5)

Every driver's order is chosen anew for the period that is forecast, once for all queries of the same structure.  An
order is adopted only if it is expected to be cheaper by `replan_gain`; otherwise nothing is built and nothing changes.
With `Config(sharing="ilp")` the orders of all structures are then chosen once more, together, and with them the
intermediate results that are worth keeping (`together.py`).
Every switch is recorded with both orders, their forecast costs, and the statistic that tipped it: the one without
whose change the gain would have been smallest.

When a forecast cannot be used (nothing arrived, a pair of streams was never seen together, a number is not finite),
orders stay, and `said` tells why.

Contract: `replan` leaves its arguments as they are; `planner.py` keeps statistics from period to period.  A decision
has other probe trees and ranks only, on the same allocation: stores, inputs, edges stay.  MIRs that it wants, or does
not want any more, are for `admission.py` to allocate.  No row is lost or doubled by
a switch, because each epoch runs under one plan and the rank rule holds in every plan.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from plait.config import Config
from plait.order.cost import Coefficients, DriverView, driver_view
from plait.order.drivers import POLICIES, StreamStats
from plait.order.orders import ORDERERS, Orders
from plait.query.graph import JoinGraph
from plait.query.plan import Plan
from plait.query.progress import Switch
from plait.query.relation import Relation
from plait.share.allocate import Allocation
from plait.share.mirs import Keep, keeps_of
from plait.share.probe_trees import plan_on
from plait.share.steps import FirstLook
from plait.share.structure import Group, groups_of
from plait.share.together import InForce, Together, for_all, for_leads, is_same, together
from plait.stats.counters import History, Name, QueryForecast, spanning

MOST_SUSPECTED = 8
"""Statistics, those that changed most, among which the one that tipped a switch is looked for."""

HORIZON_PERIODS = 8
"""Periods within which what it costs to fill a store must be gained."""

MOST_PLANNED = 13
"""Streams of a query up to which orders are chosen: what is kept and done grows like 2 to that number."""

Views = Mapping[tuple[str, str], DriverView]
"""By query and driver what its next period is expected to be like."""


@dataclass(frozen=True)
class Running:
    """The catalog, as far as plans depend on it: joins of live queries, and relations in order of registration."""

    graphs: Mapping[str, JoinGraph]
    relations: Mapping[str, Relation]
    owners: Mapping[str, str] = field(default_factory=dict)
    """As in `Allocation`."""

    @property
    def joins(self) -> dict[str, JoinGraph]:
        """Those with an order to choose: a stream that is read by itself has none."""
        return {name: graph for name, graph in self.graphs.items() if len(graph.aliases) > 1}

    @cached_property
    def groups(self) -> dict[str, Group]:
        """Joins of the same structure, by the one that leads."""
        return groups_of(self.joins, self.owners)

    @property
    def leads(self) -> dict[str, JoinGraph]:
        """The joins that orders are chosen for: those of the same structure follow."""
        return {name: self.graphs[name] for name in self.groups}

    def followed(self, orders: Mapping[str, Orders]) -> dict[str, Orders]:
        """Orders in which every join follows the lead of its group."""
        found = {name: dict(of) for name, of in orders.items()}
        for lead, group in self.groups.items():
            for name in group.members:
                found[name] = group.orders_of(name, found[lead])
        return found

    @property
    def used(self) -> tuple[str, ...]:
        """The relations that some query reads."""
        used = {alias.relation for graph in self.graphs.values() for alias in graph.aliases}
        return tuple(name for name in self.relations if name in used)


@dataclass(frozen=True)
class Arrangement:
    """The layout that joins run on, and how: orders, ranks, and the plan that follows from both."""

    allocation: Allocation
    orders: Mapping[str, Orders]
    ranks: tuple[str, ...]
    plan: Plan
    looks: Mapping[str, FirstLook] = field(default_factory=dict)
    """Of queries whose first epoch is the next one, and which begin with what is there."""
    fills: frozenset[str] = frozenset()
    """MIRs that the next epoch fills with the past."""


def arranged(
    catalog: Running,
    allocation: Allocation,
    orders: Mapping[str, Orders],
    ranks: tuple[str, ...],
    looks: Mapping[str, FirstLook],
    fills: frozenset[str] = frozenset(),
) -> Arrangement:
    """These orders and ranks, planned."""
    known = (*ranks, *(i.relation for i in allocation.layout.inputs if i.relation not in ranks))
    plan = plan_on(allocation, catalog.graphs, orders, known, looks, fills=fills)
    return Arrangement(allocation, orders, ranks, plan, looks, fills)


@dataclass(frozen=True)
class Statistics:
    """What is known after a period."""

    epoch: int
    """The last of the period."""
    history: History
    values: Mapping[Name, float]
    """The forecast of every series for the next period."""
    basis: Mapping[Name, float]
    """What `values` were at the last switch; empty before the first period."""
    coefficients: Coefficients
    exchanged: bool = True
    """Whether tuples that travel go from task to task; in a single task no exchange is paid for."""
    seen: Mapping[str, float] = field(default_factory=dict)
    """Rows by relation, of all periods."""
    made: Mapping[str, float] = field(default_factory=dict)
    """Results by query, of all periods."""
    views: Views = field(default_factory=dict)
    """Those of earlier periods."""

    @property
    def prices(self) -> Coefficients:
        """What the next period's work costs."""
        return self.coefficients if self.exchanged else replace(self.coefficients, alpha_h=0.0)


@dataclass(frozen=True)
class Decision:
    """What the next period runs with, and why."""

    layout: Arrangement
    """The same object if nothing changes."""
    switches: tuple[Switch, ...]
    said: str
    """The reason, in a sentence."""
    views: Views
    """Of all queries for which there is a forecast."""
    basis: Mapping[Name, float]
    """The statistics that the next ones are compared with: those of the last switch."""
    keeps: tuple[Keep, ...] | None = None
    """The MIRs that are wanted from the next epoch on; None: those that are there."""


def replan(catalog: Running, layout: Arrangement, statistics: Statistics, config: Config) -> Decision:
    """Orders and ranks for the next period: others than those in force only where that is expected to pay."""
    epoch = statistics.epoch
    if not all(math.isfinite(value) for value in statistics.values.values()):
        said = f"the plan is kept after epoch {epoch}: a forecast is not a finite number"
        return Decision(layout, (), said, statistics.views, statistics.basis)
    views, unknown = _views(catalog, layout, statistics, config)
    switches = _switches(catalog, layout, statistics, config, views)
    reasons: tuple[str, ...] = ()
    keeps: tuple[Keep, ...] | None = None
    if config.sharing == "ilp" and config.orderer == "dp_pick" and not unknown and not layout.fills:
        switches, keeps, reasons = _chosen_together(catalog, layout, statistics, config, switches)
    orders = {name: dict(of) for name, of in layout.orders.items()}
    for switch in switches:
        orders[switch.query][switch.driver] = switch.new
    if switches:
        orders = catalog.followed(orders)
    views = {**statistics.views, **views}
    ranks = _ranks(catalog, statistics, config, views)
    if config.orderer == "fixed":
        said = f"orders are kept: {why_fixed(config)}"
    elif unknown:
        said = f"orders are kept after epoch {epoch}: {unknown}"
    elif not switches:
        said = f"orders are kept after epoch {epoch}: no other is cheaper by {config.replan_gain:.0%}"
    else:
        said = f"{len(switches)} of the orders were replaced after epoch {epoch}"
    said = "; ".join((said, *reasons))
    if switches or ranks != layout.ranks:
        layout = arranged(catalog, layout.allocation, orders, ranks, layout.looks, layout.fills)
    basis = statistics.values if switches or not statistics.basis else statistics.basis
    return Decision(layout, switches, said, views, basis, keeps)


def why_never(config: Config) -> str:
    """The setting by which no period ever ends; empty if there is none."""
    if config.replan_seconds is None and config.replan_epochs == 0:
        return "replan_epochs = 0"
    return "replan_seconds = 0" if config.replan_seconds == 0 else ""


def why_fixed(config: Config) -> str:
    """The setting by which orders are kept."""
    return why_never(config) or f"orderer = {config.orderer}"


def _views(
    catalog: Running, layout: Arrangement, statistics: Statistics, config: Config
) -> tuple[dict[tuple[str, str], DriverView], str]:
    """What every driver's next period is expected to be like, and what is still unknown."""
    found: dict[tuple[str, str], DriverView] = {}
    unknown = ""
    for name, graph in catalog.leads.items():
        if len(graph.aliases) > MOST_PLANNED:
            unknown = f"{name} joins {len(graph.aliases)} streams, and orders are chosen for up to {MOST_PLANNED}"
            continue
        forecast = statistics.history.forecast(name, graph, layout.plan, statistics.values)
        if forecast is None:
            unknown = f"some streams of {name} have not been seen together yet"
            continue
        for driver in forecast.aliases:
            found[name, driver] = _view(graph, driver, forecast, statistics, config)
    return found, unknown


def _view(graph: JoinGraph, driver: str, forecast: QueryForecast, statistics: Statistics, config: Config) -> DriverView:
    model = config.probe if config.cost_model == "engine" else config.cost_model
    return driver_view(graph, driver, forecast, statistics.prices, model=model, variant=config.cost_variant)


def _switches(
    catalog: Running, layout: Arrangement, statistics: Statistics, config: Config, views: Views
) -> tuple[Switch, ...]:
    """The orders to be replaced."""
    found = []
    for (name, driver), view in views.items():
        old = layout.orders[name][driver]
        new = ORDERERS[config.orderer](view, old)
        before, after = view.cost(old), view.cost(new)
        if new != old and _pays(config, before, after):
            tipped = _tipped(name, catalog.graphs[name], driver, (old, new), layout.plan, statistics, config)
            found.append(Switch(statistics.epoch, name, driver, old, new, before, after, tipped))
    return tuple(found)


def _chosen_together(
    catalog: Running, layout: Arrangement, statistics: Statistics, config: Config, alone: tuple[Switch, ...]
) -> tuple[tuple[Switch, ...], tuple[Keep, ...] | None, tuple[str, ...]]:
    """The orders to be replaced, and the MIRs to be kept, if all queries are looked at together.

    `alone` are the switches of each query by itself.  The joint optimiser's prices are coarser, so what it finds must
    beat them by its own measure; filling a MIR must pay within `HORIZON_PERIODS`.  Where MIRs are in force, orders
    change with them only.
    """
    leads = catalog.leads
    kept = keeps_of(layout.allocation.layout, catalog.joins)
    orders = {name: dict(layout.orders[name]) for name in leads}
    for switch in () if kept else alone:
        orders[switch.query][switch.driver] = switch.new
    forecasts = {
        name: statistics.history.forecast(name, graph, layout.plan, statistics.values) for name, graph in leads.items()
    }
    now = InForce(orders, [for_leads(keep, leads) for keep in kept])
    tasks = 2 if statistics.exchanged else 1
    found = together(leads, forecasts, now, statistics.prices, tasks=tasks, seconds=config.sharing_seconds)
    gain = (found.before - found.cost) * HORIZON_PERIODS * max(1, config.replan_epochs)
    if not _pays(config, found.before, found.cost) or gain <= found.building:
        return () if kept else alone, None, found.reasons
    known = {(switch.query, switch.driver, switch.new): switch for switch in alone}
    tipped = "what several queries have in common, or is worth keeping"
    switches = [
        known.get((name, driver, new))
        or Switch(statistics.epoch, name, driver, old, new, found.before, found.cost, tipped)
        for name, mine in found.orders.items()
        for driver, new in mine.items()
        if new != (old := layout.orders[name][driver])
    ]
    wanted = tuple(for_all(keep, catalog.groups) for keep in found.keeps)
    same = len(wanted) == len(kept) and all(any(is_same(keep, old) for old in kept) for keep in wanted)
    if same:
        return tuple(switches), None, found.reasons
    return tuple(switches), wanted, (_told(catalog, wanted, found), *found.reasons)


def _told(catalog: Running, wanted: Sequence[Keep], found: Together) -> str:
    """What is kept from now on, and what that is expected to cost and to save."""
    names = []
    for keep in wanted:
        query, aliases = keep.uses[0]
        relations = " ⋈ ".join(catalog.graphs[query].alias(alias).relation for alias in aliases)
        names.append(f"{relations} by {', '.join(column for _, column in keep.key)}")
    milliseconds = [f"{ns / 1e6:.3g}" for ns in (found.before, found.cost, found.building)]
    return (
        f"intermediate results that are kept: {'; '.join(names) or 'none any more'} (from {milliseconds[0]} to "
        f"{milliseconds[1]} ms an epoch, {milliseconds[2]} ms once to fill them)"
    )


def _pays(config: Config, before: float, after: float) -> bool:
    """Whether a new order is worth it.  Heuristic orderers are taken at their word: they do not minimise cost."""
    if config.orderer in ("selectivity_first", "greedy"):
        return True
    return math.isfinite(after) and before - after > config.replan_gain * before


def _tipped(
    query: str,
    graph: JoinGraph,
    driver: str,
    orders: tuple[tuple[str, ...], tuple[str, ...]],
    plan: Plan,
    statistics: Statistics,
    config: Config,
) -> str:
    """Takes back one statistic at a time to what it was at the last switch: which one makes the gain smallest?"""
    basis, values = statistics.basis, statistics.values
    if not basis:
        return "these are the first statistics"
    old, new = orders
    parents = spanning(graph, driver)
    names: list[Name] = [(kind, query, parents[a], a) for kind in ("γ", "μ") for a in old]
    names += [(kind, store.id) for kind in ("κ", "rows", "runs") for store in plan.stores]
    changed = [n for n in names if n in basis and n in values and _change(n, basis, values)]
    changed.sort(key=lambda n: -_change(n, basis, values))
    least, found = float("inf"), "all statistics changed a little"
    for name in changed[:MOST_SUSPECTED]:
        was, now = basis[name], values[name]
        forecast = statistics.history.forecast(query, graph, plan, {**values, name: was})
        assert forecast is not None
        view = _view(graph, driver, forecast, statistics, config)
        gain = view.cost(old) - view.cost(new)
        if gain < least:
            kind, *where = name
            what = f"{kind}({where[1]} → {where[2]})" if len(where) == 3 else f"{kind}({where[0]})"
            least, found = gain, f"{what} goes from {was:.4g} to {now:.4g}"
    return found


def _change(name: Name, before: Mapping[Name, float], after: Mapping[Name, float]) -> float:
    """By which factor a statistic has changed, as a logarithm; 0 if by less than 2 %."""
    was, now = max(before[name], 1e-9), max(after[name], 1e-9)
    change = abs(math.log(now / was))
    return change if change > 0.02 else 0.0


def _ranks(catalog: Running, statistics: Statistics, config: Config, views: Views) -> tuple[str, ...]:
    streams = {name: _stream_stats(name, catalog, statistics, views) for name in catalog.used}
    return POLICIES[config.driver_policy](streams, statistics.epoch + 1)


def _stream_stats(relation: str, catalog: Running, statistics: Statistics, views: Views) -> StreamStats:
    """What one new tuple of a stream is expected to find, over all queries and aliases it drives."""
    found = 0.0
    for (query, driver), view in views.items():
        if catalog.graphs[query].alias(driver).relation == relation:
            everything = (1 << len(view.names)) - 1
            per_key = view.alive[everything] * view.width[everything]
            found += per_key / max(statistics.values.get(("tuples", query, driver), 1.0), 1.0)
    mine = [q for q, graph in catalog.graphs.items() if any(a.relation == relation for a in graph.aliases)]
    made = sum(statistics.made.get(query, 0.0) for query in mine)
    return StreamStats(
        # Rounded to two digits: streams that differ by less are equal and keep the order of registration.
        buffer=float(f"{statistics.values.get(('λ', relation), 0.0):.1e}"),
        results=float(f"{found:.1e}"),
        sigma=made / max(statistics.seen.get(relation, 0.0), 1.0),
        latest_ms=statistics.history.last.max_event_ms.get(relation),
    )
