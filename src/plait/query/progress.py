"""Progress reports: what an epoch did, for people.  `docs/operations.md` tells what each key of the JSON form means.

Contract.  The fields of `Progress` are the keys of the public report (`run.last_progress`, `events.jsonl`), in this
order.  The JSON form of a report is made once; its `seconds` are the epoch's own, which are still counted after the
report is made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import Any

from plait.query.budget import Budget
from plait.query.layout import Build
from plait.query.observed import Driven, EdgeCount


@dataclass(frozen=True, slots=True)
class Switch:
    """One driver's order was replaced after `epoch`."""

    epoch: int
    query: str
    driver: str
    old: tuple[str, ...]
    new: tuple[str, ...]
    old_ns: float
    """Forecast cost of the old order per key of the driver."""
    new_ns: float
    tipped: str
    """The statistic that tipped it: its name, what it was at the last switch and what it is expected to be."""

    def __str__(self) -> str:
        saved = 100 * (1 - self.new_ns / self.old_ns) if self.old_ns else 0.0
        return (
            f"after epoch {self.epoch}: {self.query}.{self.driver} → {' → '.join(self.new)} instead of "
            f"{' → '.join(self.old)}: {self.new_ns:.0f} instead of {self.old_ns:.0f} ns per key ({saved:.0f} % less), "
            f"because {self.tipped}"
        )


@dataclass(frozen=True, slots=True)
class Estimate:
    """One probe of an order in force: γ and μ as forecast, and as counted in the last period, if it was."""

    query: str
    driver: str
    target: str
    gamma: float
    mu: float
    gamma_counted: float | None
    mu_counted: float | None


@dataclass(frozen=True, slots=True)
class GroupsReport:
    """Who of the queries of one structure runs with whom, and what that is expected to cost per epoch, and why."""

    streams: tuple[str, ...]
    groups: tuple[tuple[str, tuple[str, ...]], ...]
    """(owner of stores, queries); the owner is empty where everything is shared."""
    before_ns: float
    """Of the groups before."""
    after_ns: float
    together_ns: float
    """If all of them shared everything."""
    apart_ns: float
    """If each ran by itself."""
    said: str

    def __str__(self) -> str:
        named = [f"{', '.join(queries)}" + (f" (stores of {owner})" if owner else "") for owner, queries in self.groups]
        together, apart, before, after = (
            f"{ns / 1e6:.3g}" for ns in (self.together_ns, self.apart_ns, self.before_ns, self.after_ns)
        )
        return (
            f"{' ⋈ '.join(self.streams)}: {' | '.join(named)}: {after} ms an epoch instead of {before}; all together "
            f"{together}, each alone {apart}; {self.said}"
        )


@dataclass(frozen=True)
class OptimiserReport:
    """Why the plan is what it is.  It changes when a period ends."""

    orderer: str
    policy: str
    said: str
    """The reason, in a sentence."""
    switches: tuple[Switch, ...] = ()
    coefficients: Mapping[str, float] = field(default_factory=dict)
    estimates: tuple[Estimate, ...] = ()
    failures: int = 0
    """How often planning raised an error, and the plan was kept."""
    groups: tuple[GroupsReport, ...] = ()
    """By structure, where several queries have one and rows were sampled."""

    @cached_property
    def json(self) -> dict[str, Any]:
        """A JSON value; of a switch also its sentence."""
        switches = [{**asdict(switch), "text": str(switch)} for switch in self.switches]
        groups = [{**asdict(group), "text": str(group)} for group in self.groups]
        estimates = [asdict(each) for each in self.estimates]
        return {**_shallow(self), "switches": switches, "estimates": estimates, "groups": groups}


@dataclass(frozen=True)
class Replanned:
    """What the step `replan` of an epoch came to."""

    report: OptimiserReport | None = None
    """None if nothing is ever re-planned."""
    seconds: float = 0.0

    @property
    def json(self) -> dict[str, Any]:
        """A JSON value."""
        return {} if self.report is None else {**self.report.json, "seconds": self.seconds}


@dataclass(frozen=True)
class ScalingReport:
    """Which key groups the tasks of an epoch own, and why."""

    bounds: tuple[int, ...]
    """Task t owns those from bounds[t] up to but without bounds[t + 1]."""
    skew: float
    """What the costliest task has cost lately, relative to the mean."""
    reason: str


@dataclass(frozen=True)
class QueryStatus:
    """A query of the catalog, as far as epochs and reports must know it."""

    status: str
    live_since: int | None
    """Its first epoch; None while it waits for a store."""
    joins: tuple[str, ...]
    floors: Mapping[str, Mapping[str, int]]
    """By join and alias the first epoch whose rows it sees."""
    error: str | None = None
    """Why it is `parked` or `failed`."""
    missed_since: int | None = None
    """The first epoch that it has missed, if it is."""
    stores: frozenset[str] = frozenset()
    """That its joins use, or that are kept for it."""
    budget: Budget = field(default_factory=Budget)
    state_bytes: int = 0
    """Its share of what they hold."""


@dataclass(frozen=True)
class CatalogInForce:
    """The catalog, as far as epochs and reports must know it."""

    version: int = 0
    builds: tuple[Build, ...] = ()
    """Stores that are being filled."""
    queries: Mapping[str, QueryStatus] = field(default_factory=dict)
    """By the name that people call them."""

    def begins(self, epoch: int) -> tuple[str, ...]:
        """The joins of which an epoch is the first."""
        return tuple(join for query in self.queries.values() if query.live_since == epoch for join in query.joins)

    def state_shares(self, sizes: Mapping[str, int]) -> dict[str, float]:
        """By name of a query its share of the state: what n queries use counts one n-th for each of them.

        `sizes` are by store, in bytes.  The shares of all queries add up to what their stores hold.
        """
        users = Counter(store for query in self.queries.values() for store in query.stores)
        return {
            name: sum(sizes.get(store, 0) / users[store] for store in sorted(query.stores))
            for name, query in self.queries.items()
        }

    @property
    def json(self) -> dict[str, Any]:
        """A JSON value: the version, and every query's status."""
        queries: dict[str, dict[str, Any]] = {}
        for name, query in self.queries.items():
            queries[name] = {
                "status": query.status,
                "live_since": query.live_since,
                "floors": query.floors,
                "state_bytes": query.state_bytes,
            }
            if query.error is not None:
                queries[name] |= {"error": query.error, "missed_since": query.missed_since}
        return {"version": self.version, "queries": queries}


@dataclass(frozen=True)
class ChangesReport:
    """How changes of a running engine's queries were admitted, since it was started."""

    in_place: int = 0
    """Changes that the driver admitted between two epochs, within what Spark's streaming query selects anyway."""
    restarts: int = 0
    """Changes for which the streaming query was stopped and started: it has to select something else."""
    last: str | None = None
    """The way of the last one, `in_place` or `restart`."""
    waited_seconds: float = 0.0
    """From the call that asked for the last one until it was part of the catalog."""
    seconds: float = 0.0
    """What that took of the time between two epochs."""

    def after(self, way: str, waited: float, seconds: float) -> ChangesReport:
        """With one more."""
        return ChangesReport(
            self.in_place + (way == "in_place"), self.restarts + (way == "restart"), way, waited, seconds
        )


@dataclass(frozen=True)
class PendingMerge:
    """A merge that is begun or due."""

    store: str
    task: int
    tier: int
    """Of the result."""
    bytes: int
    """What is left of it."""


@dataclass(frozen=True)
class Amplification:
    """How much more than the rows themselves is written, read and kept."""

    write: float
    """Bytes written per byte appended, since this engine started."""
    read: float
    """Runs that a lookup goes through, on average over rows."""
    space: float
    """Bytes on disk per byte in force."""


@dataclass(frozen=True)
class FilterReads:
    """Keys that Bloom filters were asked about."""

    asked: int
    passed: int
    found: int
    """Of those passed, the keys that were there."""


@dataclass(frozen=True)
class BlockReads:
    """Compressed blocks that were needed."""

    read: int
    cached: int
    bytes: int
    """Compressed bytes of those read."""


@dataclass(frozen=True)
class CacheReads:
    """Segments of a remote state that were needed."""

    hits: int
    misses: int
    bytes: int
    """Bytes downloaded."""
    evicted: int


@dataclass(frozen=True)
class StateReport:
    """What state costs."""

    appended_bytes: int
    merged_bytes: int
    """Bytes that merges wrote in this epoch."""
    pending_bytes: int
    """Bytes that wait to be merged."""
    merges: list[PendingMerge]
    runs: dict[str, float]
    """By store the runs that a lookup goes through."""
    deep_bytes: int
    """Bytes in compressed segments."""
    amplification: Amplification
    skipped: int
    """Segments outside of the window."""
    filter: FilterReads
    blocks: BlockReads
    cache: CacheReads | None = None
    """None where state is on this machine."""

    @cached_property
    def json(self) -> dict[str, Any]:
        """A JSON value; without `cache` where there is none."""
        value = asdict(self)
        if self.cache is None:
            del value["cache"]
        return value


@dataclass(frozen=True)
class Progress:
    """What one epoch did, and what is in force after it.  Queries go by the names that people call them."""

    epoch: int
    batch: int | None
    """Spark's number of it; None if no rows had arrived, and Spark knows nothing of it."""
    timestamp: float
    """When it was reported, in seconds since 1970."""
    clock: float
    """The time that TTLs go by, in seconds since 1970."""
    rows_in: Mapping[str, int]
    rows_out: Mapping[str, int]
    rows_late: Mapping[str, int]
    rows_null_key: Mapping[str, int]
    rows_corrupt: Mapping[str, int]
    rows_future: Mapping[str, int]
    state_rows: int
    state_bytes: int
    state: StateReport
    segments: Mapping[str, int]
    watermark_ms: int | None
    watermarks: Mapping[str, int | None]
    catalog: CatalogInForce
    """As of the next epoch."""
    changes: ChangesReport
    builds: Mapping[str, float]
    tasks: int
    scaling: ScalingReport
    seconds: Mapping[str, float]
    """By step; the epoch goes on counting after the report is made."""
    task_seconds: Mapping[str, float]
    edges: Mapping[int, EdgeCount]
    driven: Mapping[str, Driven]
    ranks: Sequence[str]
    orders: Mapping[str, Mapping[str, Sequence[str]]]
    optimiser: Replanned

    @cached_property
    def json(self) -> dict[str, Any]:
        """The public form."""
        return {
            **_shallow(self),
            "state": self.state.json,
            "catalog": self.catalog.json,
            "changes": asdict(self.changes),
            "scaling": {**asdict(self.scaling), "bounds": list(self.scaling.bounds)},
            "edges": {str(node): asdict(count) for node, count in self.edges.items()},
            "driven": {relation: asdict(done) for relation, done in self.driven.items()},
            "optimiser": self.optimiser.json,
        }


def _shallow(report: OptimiserReport | Progress) -> dict[str, Any]:
    """The fields of a report by name; what they hold is shared, not copied."""
    return {f.name: getattr(report, f.name) for f in fields(report)}
