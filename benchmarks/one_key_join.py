"""Streams that are all joined on one key, run epoch by epoch in this process and checked in every epoch.

What `drivers` and `drift` have in common.  `run` sends arrivals through the engine's own tasks, state and commit
(`LocalEngine`) under a planner, and compares the results of every epoch with a plain count: per key, the product of
the streams' rows.  A run that differs ends the benchmark.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from plait.errors import PlaitError
from plait.order.cost import Coefficients
from plait.query.expr import ColumnRef
from plait.query.graph import Alias, Equality, JoinGraph, Output
from plait.query.observed import EdgeCount
from plait.query.plan import Plan
from plait.query.relation import ColumnDef, Relation
from plait.runtime.sinks import Noop
from plait.share.reoptimise import Planner
from plait.testing import Clock, LocalEngine

QUERY = "q"
KEY, VALUE, TIME = "k", "v", "ts"
Keys = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Driven:
    """What one stream did in an epoch as the driver: seconds of probing, its rows made included."""

    stream: str
    seconds: float
    rows: int
    counts: EdgeCount

    def work(self, coefficients: Coefficients) -> float:
        """Seconds of counted work."""
        return coefficients.work(self.counts) / 1e9


@dataclass(frozen=True, slots=True)
class Ran:
    """One epoch: its drivers, first to last, and the probe orders they followed."""

    driven: tuple[Driven, ...]
    orders: Mapping[str, Sequence[str]]

    @property
    def seconds(self) -> float:
        """Probing, all drivers together."""
        return sum(d.seconds for d in self.driven)

    @property
    def rows(self) -> int:
        """Results."""
        return sum(d.rows for d in self.driven)

    def work(self, coefficients: Coefficients) -> float:
        """Seconds of counted work."""
        return sum(d.work(coefficients) for d in self.driven)


def graph(streams: Sequence[str]) -> JoinGraph:
    """All streams equal on KEY; every stream's VALUE comes out.  Aliases are called like the streams."""
    columns = tuple(ColumnDef(name, name, "bigint") for name in (KEY, VALUE))
    aliases = tuple(Alias(s, s, None, columns) for s in streams)
    keys = [ColumnRef(s, KEY, "bigint") for s in streams]
    values = [ColumnRef(s, VALUE, "bigint") for s in streams]
    outputs = tuple(Output(f"{v.alias}_{VALUE}", "bigint", v, str(v), (v,)) for v in values)
    equalities = tuple(Equality(keys[0], key) for key in keys[1:])
    conditions = " AND ".join(str(e) for e in equalities)
    sql = f"SELECT {', '.join(o.sql for o in outputs)} FROM {', '.join(streams)} WHERE {conditions}"
    return JoinGraph(sql, aliases, equalities, outputs)


def relations(streams: Sequence[str], *, delay_ms: int | None = None, ttl_us: int | None = None) -> dict[str, Relation]:
    """The streams; with `delay_ms` they have event times, with `ttl_us` their rows are forgotten."""
    columns = ((KEY, "bigint"), (VALUE, "bigint"))
    if delay_ms is None:
        return {s: Relation(s, columns, ttl_us=ttl_us) for s in streams}
    return {s: Relation(s, (*columns, (TIME, "timestamp")), TIME, delay_ms, ttl_us) for s in streams}


def table(keys: Keys, times_ms: Keys | None = None) -> pa.Table:
    """One stream's rows of one epoch."""
    columns = {KEY: pa.array(keys), VALUE: pa.array(np.arange(len(keys), dtype=np.int64))}
    if times_ms is not None:
        columns[TIME] = pa.array(times_ms * 1000, pa.timestamp("us", "UTC"))
    return pa.table(columns)


def expected(arrivals: Sequence[Mapping[str, pa.Table]], epochs_kept: int | None = None) -> list[int]:
    """Results of every epoch: Π(old + new) − Π old, summed over the keys.

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
    """All epochs once; raises if one of them does not give its number of results.  `scratch` is left as it was."""
    (found,) = side_by_side(scratch, {QUERY: planner}, arrivals, results).values()
    return found


def side_by_side(
    scratch: Path, planners: Mapping[str, Planner], arrivals: Sequence[Mapping[str, pa.Table]], results: Sequence[int]
) -> dict[str, list[Ran]]:
    """`run` for several contestants, epoch by epoch: whatever disturbs the machine disturbs all of them alike.

    Who is first in an epoch goes round.
    """
    found: dict[str, list[Ran]] = {who: [] for who in planners}
    with ExitStack() as opened:
        engines = {who: opened.enter_context(_engine(scratch, planner)) for who, planner in planners.items()}
        for number, (arrived, rows) in enumerate(zip(arrivals, results, strict=True)):
            first = number % len(planners)
            for who in [*planners][first:] + [*planners][:first]:
                found[who].append(_epoch(engines[who], arrived, rows))
    return found


@contextmanager
def _engine(scratch: Path, planner: Planner) -> Iterator[LocalEngine]:
    checkpoint = tempfile.mkdtemp(prefix="one-key-", dir=scratch)
    try:
        with LocalEngine(checkpoint, planner.plan, planner.config, clock=Clock(), planner=planner) as engine:
            engine.driver.sinks = {QUERY: Noop()}
            yield engine
    finally:
        shutil.rmtree(checkpoint, ignore_errors=True)


def _epoch(engine: LocalEngine, arrived: Mapping[str, pa.Table], rows: int) -> Ran:
    """One epoch, a second after the last by the engine's clock."""
    driver = engine.driver
    assert isinstance(driver.clock, Clock)
    driver.clock.advance(1.0)
    plan = driver.plan
    engine.run(arrived)
    progress = driver.progress[-1]
    ran = _ran(plan, progress)
    counted = progress["rows_out"].get(QUERY, 0)
    if not counted == ran.rows == rows:
        config = driver.config
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
