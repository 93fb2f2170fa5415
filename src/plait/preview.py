"""What adding a query would mean, without adding it: floors, stores to be built, probes, and the expected cost.

Contract.  Nothing is changed, on disk or in the engine: the query is read and admitted to a catalog that is dropped.

The cost is a forecast by plain rules, for orientation: every new tuple of a stream probes each node of its trees once
(one partner each), at the prices that this engine has measured (`order/cost.py: Coefficients`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from plait.admission import Admission
from plait.explain import explain
from plait.explain_forest import forest
from plait.order.cost import Coefficients
from plait.query.plan import Plan
from plait.state.log.manifest import LiveState
from plait.state.segments.tiers import runs_per_lookup


@dataclass(frozen=True)
class PlannedBuild:
    """A store that would be filled from another one, before the query is live."""

    store: str
    source: str
    rows: int
    bytes: int


@dataclass(frozen=True)
class Preview:
    """What adding a query would mean."""

    name: str
    since: str
    mode: str
    live: bool
    """Whether it is live at once; else when its builds are done."""
    in_place: bool | None
    """Whether Spark's streaming query goes on as it is; None if none runs."""
    floors: Mapping[str, int]
    """By alias the first epoch whose rows it sees."""
    stores: tuple[str, ...]
    """That it would use."""
    new_stores: tuple[str, ...]
    """Those of them that are not there."""
    builds: tuple[PlannedBuild, ...]
    first_pass_rows: int
    """Rows at rest that drive once, with `since="state"`."""
    probes: int
    """Nodes of probe trees that all queries need together."""
    new_probes: int
    """How many more that is than now."""
    exchanges: int
    """Per epoch, of all queries together."""
    new_exchanges: int
    epoch_seconds: float | None
    """How much more task time an epoch is expected to need; None while nothing is known of the streams' rates."""
    plan: str
    """The query's joins and probe trees, as text."""

    @property
    def json(self) -> dict[str, Any]:
        """A JSON value."""
        return asdict(self)

    @property
    def text(self) -> str:
        """For people."""
        lines = [f"{self.name} would be {self.mode}, since={self.since}"]
        floors = ", ".join(f"{alias} from epoch {floor} on" for alias, floor in self.floors.items())
        lines.append(f"  sees rows of {floors}")
        lines.append("  is live with the next epoch" if self.live else "  is live when these stores are built")
        for build in self.builds:
            lines.append(f"  builds {build.store} from {build.source}: {build.rows:,} rows, {build.bytes:,} bytes")
        fresh = [store for store in self.new_stores if store not in {build.store for build in self.builds}]
        lines += [f"  begins {store}, empty" for store in fresh]
        if self.first_pass_rows:
            lines.append(f"  goes once over {self.first_pass_rows:,} rows at rest")
        if self.in_place is not None:
            how = (
                "between two epochs, in place" if self.in_place else "by stopping and starting Spark's streaming query"
            )
            lines.append(f"  is admitted {how}")
        lines.append(
            f"  needs {self.new_probes} more probes ({self.probes} in all), {self.new_exchanges} more exchanges"
        )
        cost = "unknown: no epoch has told how fast rows arrive"
        if self.epoch_seconds is not None:
            cost = f"{1e3 * self.epoch_seconds:.1f} ms of task time per epoch, if every row finds one partner"
        return "\n".join([*lines, f"  expected cost: {cost}", "", self.plan])


def preview(
    name: str,
    before: Plan | None,
    admitted: Admission,
    built: Admission,
    live: LiveState,
    rates: Mapping[str, float],
    in_place: bool | None,
) -> Preview:
    """Of a query that is `admitted`, and whose stores are `built` then; `before` is the plan without it.

    `rates` are rows per epoch by stream, where they are known.
    """
    assert built.in_force is not None
    assert built.planner is not None
    catalog, plan = admitted.now.catalog, built.in_force.plan
    entry = catalog.queries[name]
    stores = sorted({store for of in entry.stores.values() for some in of.values() for store in some})
    there = set(live.segments) | ({store.id for store in before.stores} if before else set())
    sizes = {s: (sum(i.rows for i in infos), sum(i.live_bytes for i in infos)) for s, infos in live.segments.items()}
    builds = [
        PlannedBuild(build.store, build.source, *sizes.get(build.source, (0, 0)))
        for build in catalog.layout.builds
        if build.store in stores and build.store not in there
    ]
    looks = {tree.replays.store for tree in plan.trees if tree.replays and _has(tree.members, entry.joins)}
    prices = built.planner.coefficients
    seconds = None
    if rates:
        seconds = max(0.0, _seconds(plan, live, rates, prices) - _seconds(before, live, rates, prices))
    return Preview(
        name=name,
        since=entry.since,
        mode=entry.mode,
        live=entry.live_since is not None,
        in_place=in_place,
        floors={alias: floor for floors in entry.floors.values() for alias, floor in floors.items()},
        stores=tuple(stores),
        new_stores=tuple(store for store in stores if store not in there),
        builds=tuple(builds),
        first_pass_rows=sum(sizes.get(store, (0, 0))[0] for store in looks),
        probes=_probes(plan),
        new_probes=_probes(plan) - _probes(before),
        exchanges=plan.hops,
        new_exchanges=plan.hops - (0 if before is None else before.hops),
        epoch_seconds=seconds,
        plan="\n".join(_plan_text(built, entry.joins)),
    )


def _plan_text(built: Admission, joins: tuple[str, ...]) -> Iterable[str]:
    """The joins of a query, and the probe trees of all."""
    assert built.in_force is not None
    plan, graphs = built.in_force.plan, built.in_force.graphs
    mine = {join: graphs[join] for join in joins}
    whole = explain(plan, mine, built.asked.relations, "text").split("\n\n")
    return ["\n\n".join(part for part in whole if part.startswith("Query ")), "", "Probe trees", *forest(plan)]


def _has(members: Iterable[tuple[str, str]], joins: Iterable[str]) -> bool:
    return not {query for query, _ in members}.isdisjoint(joins)


def _probes(plan: Plan | None) -> int:
    trees = () if plan is None else plan.trees
    return sum(1 for tree in trees if tree.replays is None for top in tree.nodes for _ in top.walk())


def _seconds(plan: Plan | None, live: LiveState, rates: Mapping[str, float], prices: Coefficients) -> float:
    """Task time of an epoch's probes."""
    ns = 0.0
    for tree in () if plan is None else plan.trees:
        for node in (node for top in tree.nodes for node in top.walk() if tree.replays is None):
            runs = max(1.0, runs_per_lookup(live.segments.get(node.step.store, ())))
            travels = prices.alpha_x if node.step.hop > 1 else 0.0
            ns += rates.get(tree.relation, 0.0) * (prices.alpha_q * runs + prices.alpha_m + travels)
    return ns / 1e9
