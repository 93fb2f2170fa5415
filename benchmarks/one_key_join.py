"""Streams that are all joined on one key, run epoch by epoch in this process and checked in every epoch.

What `drivers` and `drift` have in common.  `run` sends arrivals through the engine's own tasks, state and commit
(`LocalEngine`) under a planner, and compares the results of every epoch with a plain count: per key, the product of
the streams' rows.  A run that differs ends the benchmark.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from benchmarks.without_spark import QUERY, join_graph, local_engine
from plait.errors import PlaitError
from plait.order.cost import Coefficients
from plait.query.expr import ColumnRef
from plait.query.graph import JoinGraph
from plait.query.observed import EdgeCount
from plait.query.plan import Plan
from plait.query.relation import Relation
from plait.share.planner import Planner
from plait.testing import Clock, LocalEngine

KEY, VALUE, TIME = "k", "v", "ts"
Keys = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Driven:
    """What one stream did in an epoch as the driver; seconds are those of probing, making the rows included."""

    stream: str
    seconds: float
    rows: int
    counts: EdgeCount

    def work(self, coefficients: Coefficients) -> float:
        """Counted work at these prices, in seconds."""
        return coefficients.work(self.counts) / 1e9


@dataclass(frozen=True, slots=True)
class Ran:
    """One epoch: its drivers, first to last, and the probe orders they followed."""

    driven: tuple[Driven, ...]
    orders: Mapping[str, Sequence[str]]

    @property
    def seconds(self) -> float:
        """Seconds of probing, all drivers together."""
        return sum(d.seconds for d in self.driven)

    @property
    def rows(self) -> int:
        """Number of results of the epoch."""
        return sum(d.rows for d in self.driven)

    def work(self, coefficients: Coefficients) -> float:
        """Counted work at these prices, in seconds."""
        return sum(d.work(coefficients) for d in self.driven)


def graph(streams: Sequence[str]) -> JoinGraph:
    """The join of all streams on KEY, which selects the VALUE of each; aliases are named like the streams."""
    values = [ColumnRef(stream, VALUE, "bigint") for stream in streams]
    equalities = " AND ".join(f"{streams[0]}.{KEY} = {stream}.{KEY}" for stream in streams[1:])
    sql = f"SELECT {', '.join(map(str, values))} FROM {', '.join(streams)} WHERE {equalities}"
    aliases = {stream: (stream, (KEY, VALUE)) for stream in streams}
    return join_graph(sql, aliases, streams[0], [(f"{value.alias}_{VALUE}", value) for value in values])


def relations(streams: Sequence[str], *, delay_ms: int | None = None, ttl_us: int | None = None) -> dict[str, Relation]:
    """The streams; with `delay_ms` they have event times, with `ttl_us` their rows expire."""
    columns = ((KEY, "bigint"), (VALUE, "bigint"))
    if delay_ms is None:
        return {s: Relation(s, columns, ttl_us=ttl_us) for s in streams}
    return {s: Relation(s, (*columns, (TIME, "timestamp")), TIME, delay_ms, ttl_us) for s in streams}


def table(keys: Keys, times_ms: Keys | None = None) -> pa.Table:
    """The rows of one stream in one epoch."""
    columns = {KEY: pa.array(keys), VALUE: pa.array(np.arange(len(keys), dtype=np.int64))}
    if times_ms is not None:
        columns[TIME] = pa.array(times_ms * 1000, pa.timestamp("us", "UTC"))
    return pa.table(columns)


def expected(arrivals: Sequence[Mapping[str, pa.Table]], epochs_kept: int | None = None) -> list[int]:
    """The number of results of every epoch: Π(old + new) − Π old, summed over the keys.

    Old are the epochs before, as far as they are not forgotten: a row is seen in `epochs_kept` epochs with its own.

    >>> one = {"a": table(np.array([1, 1])), "b": table(np.array([1, 2]))}
    >>> expected([one, one, one]), expected([one, one, one], epochs_kept=1)
    ([2, 6, 10], [2, 2, 2])
    """
    streams = list(arrivals[0])
    found = [{s: arrived[s].column(KEY).to_numpy() for s in streams} for arrived in arrivals]
    domain = np.unique(np.concatenate([keys for arrived in found for keys in arrived.values()]))
    empty = np.zeros(len(domain), np.int64)
    kept: list[dict[str, Keys]] = []
    old = dict.fromkeys(streams, empty)
    results = []
    for arrived in found:
        if epochs_kept is not None and len(kept) >= epochs_kept:
            oldest = kept.pop(0)
            old = {s: old[s] - oldest[s] for s in streams}
        new = {s: np.bincount(np.searchsorted(domain, arrived[s]), minlength=len(domain)) for s in streams}
        now = {s: old[s] + new[s] for s in streams}
        results.append(int(_product(now.values()).sum() - _product(old.values()).sum()))
        old = now
        if epochs_kept is not None:
            kept.append(new)
    return results


def _product(counts: Iterable[Keys]) -> Keys:
    product: Keys = np.prod(np.stack(list(counts)), axis=0)
    return product


def run(
    scratch: Path, planner: Planner, arrivals: Sequence[Mapping[str, pa.Table]], results: Sequence[int]
) -> list[Ran]:
    """Run all epochs once; an epoch with another number of results than it must have is an error."""
    (found,) = side_by_side(scratch, {QUERY: planner}, arrivals, results).values()
    return found


def side_by_side(
    scratch: Path, planners: Mapping[str, Planner], arrivals: Sequence[Mapping[str, pa.Table]], results: Sequence[int]
) -> dict[str, list[Ran]]:
    """Run several contestants, epoch by epoch: whatever disturbs the machine disturbs all of them alike.

    Each contestant is the first in its turn.
    """
    found: dict[str, list[Ran]] = {who: [] for who in planners}
    with ExitStack() as opened:
        engines = {who: opened.enter_context(local_engine(scratch, planner)) for who, planner in planners.items()}
        for number, (arrived, rows) in enumerate(zip(arrivals, results, strict=True)):
            first = number % len(planners)
            for who in [*planners][first:] + [*planners][:first]:
                found[who].append(_epoch(engines[who], arrived, rows))
    return found


def _epoch(engine: LocalEngine, arrived: Mapping[str, pa.Table], rows: int) -> Ran:
    """Run one epoch, a second after the last by the engine's clock, and check its number of results."""
    services, plan = engine.driver.services, engine.plan
    assert isinstance(services.clock, Clock)
    services.clock.advance(1.0)
    engine.run(arrived)
    progress = engine.progress[-1]
    ran = _ran(plan, progress)
    counted = progress["rows_out"].get(QUERY, 0)
    if not counted == ran.rows == rows:
        config = services.config
        raise PlaitError(
            "BENCH_RESULTS",
            f"epoch {progress['epoch']} gave {counted} results ({ran.rows} by driver) instead of {rows} under "
            f"orderer={config.orderer}, driver_policy={config.driver_policy}, probe={config.probe}",
            "this is an error of the engine or of the benchmark: no figure of this run counts",
        )
    return ran


def _ran(plan: Plan, progress: Mapping[str, object]) -> Ran:
    edges, driven, orders = progress["edges"], progress["driven"], progress["orders"]
    assert isinstance(edges, dict)
    assert isinstance(driven, dict)
    assert isinstance(orders, dict)
    counts: dict[str, EdgeCount] = {relation: EdgeCount() for relation in plan.ranks}
    for tree in plan.trees:
        for node in (below for top in tree.nodes for below in top.walk()):
            counts[tree.relation].add(EdgeCount(**edges.get(str(node.id), {})))
    done = tuple(
        Driven(relation, driven[relation]["seconds"], int(driven[relation]["rows"]), counts[relation])
        for relation in plan.ranks
        if relation in driven
    )
    return Ran(done, orders[QUERY])
