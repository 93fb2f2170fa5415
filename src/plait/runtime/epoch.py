"""A row's way: one micro-batch, from buckets to observed results, as one visible tuple of steps.

    source → bucketise → exchange → append to its store → probe by the plan, hop by hop → materialise
           → commit (manifest) → sinks → observe → next epoch's plan
                                 └──→ answers, while the next epoch is joined

Bucketising runs in the source's own tasks (runtime/bucketise.py, part of the streaming query); exchange, append,
probe and materialise are one Spark job, built by `join` (runtime/task.py); the rest is the driver's.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

import xxhash
from pyspark.sql import DataFrame, SparkSession

from plait.config import Config
from plait.errors import CheckpointError, PlaitError
from plait.query.observed import KeyCount, Observed
from plait.query.plan import Plan
from plait.runtime import commit as commits
from plait.runtime.answers import Sources
from plait.runtime.behind import Behind
from plait.runtime.bucketise import PROPERTY, EpochParameters
from plait.runtime.deliver import arrive, deliver
from plait.runtime.exchange import SCHEMA, exchange, planned
from plait.runtime.faults import reached
from plait.runtime.memory import compress_above, task_memory
from plait.runtime.passes import arriving
from plait.runtime.result_merge import merge_results
from plait.runtime.rows import ResultRows
from plait.runtime.sinks import Sink
from plait.runtime.state_account import StateAccount
from plait.runtime.task import every_hop, first_hop, later_hop
from plait.runtime.work import EpochTask
from plait.state.checkpoint import Checkpoint, collect_garbage
from plait.state.manifest import LiveState, Manifest, ResultFile, Retention, results_after
from plait.state.segment import SegmentInfo
from plait.state.tiers import Merge, choose_merges, expired, runs_per_lookup


def system_clock() -> int:
    """The machine's time in microseconds."""
    return time.time_ns() // 1000


EXCHANGE_SECONDS = 0.1
"""What Spark needs for an exchange between tasks, however little travels."""
BYTES_PER_SECOND = 8e6
"""What a task joins of what Spark expects of sources, until the first epoch of a run has told: columns that are read of
compressed files, or for ever where Spark knows nothing."""
_IDLE_MERGE_SECONDS = 0.05
"""Merging that a task may do even where epochs take no time."""


class Planner(Protocol):
    """What the driver needs of the optimiser (share/reoptimise.py): it sees each epoch, and may change the plan."""

    plan: Plan

    @property
    def samples(self) -> frozenset[int]: ...

    def observe(self, observed: Observed, now: float) -> bool: ...

    def report(self) -> dict[str, Any]: ...

    def memory(self) -> dict[str, Any] | None: ...


@dataclass
class Driver:
    """What lives from epoch to epoch on the driver: all of it can be rebuilt from the checkpoint."""

    spark: SparkSession
    plan: Plan
    checkpoint: Checkpoint
    config: Config
    sinks: dict[str, Sink]
    rows: ResultRows
    live: LiveState
    verified_dir: str | None
    watermark_policy: str = "min"
    clock: Callable[[], int] = system_clock
    """Microseconds since 1970: what TTLs are measured by."""
    planner: Planner | None = None
    """None keeps the plan for ever."""
    sources: Sources = field(default_factory=Sources)
    """What is kept for queries of which Spark does a part."""
    behind: Behind = field(default_factory=Behind)
    """Their answers, on the way to sinks."""
    tables: DataFrame | None = None
    """The buckets of tables: they arrive with the first epoch."""
    state: StateAccount = field(default_factory=StateAccount)
    progress: deque[dict[str, Any]] = field(default_factory=deque)
    failure: PlaitError | None = None
    working: threading.RLock = field(default_factory=threading.RLock)
    """Held by whoever runs an epoch; a sink may stop the run that it is called by."""
    executor_cores: str | None = None
    """Spark's setting, where it has one."""
    last_seconds: float = 0.0
    """What the last epoch took: merging gets its share of as much."""
    arriving: Mapping[int, float] = field(default_factory=dict)
    """Which share of its keys got as far as a node of the plan, in the last epoch."""
    last_work: float | None = None
    """Seconds that the tasks of the last epoch worked, all together; before the first, as many as are expected."""

    @property
    def tasks(self) -> int:
        """Join tasks of the next epoch: one, where exchanges would take longer than more tasks save."""
        if self.config.tasks is not None:
            return self.config.tasks
        saved = (self.last_work or 0.0) * (1 - 1 / self.parallel)
        return 1 if saved < (self.plan.hops - 1) * EXCHANGE_SECONDS else self.parallel

    @property
    def parallel(self) -> int:
        """Tasks that run at the same time."""
        return int(self.spark.sparkContext.defaultParallelism)


@dataclass
class Epoch:
    """One micro-batch on its way through `STEPS`."""

    number: int
    buckets: DataFrame
    driver: Driver
    seconds: dict[str, float] = field(default_factory=dict)
    task: EpochTask | None = None
    dropped: list[SegmentInfo] = field(default_factory=list)
    account: commits.Collected = field(default_factory=commits.Collected)
    manifest: Manifest | None = None


def refuse_gap(checkpoint: Checkpoint) -> None:
    """Raises if Spark has committed an epoch that Plait has not: a manifest is gone, and Spark would not say so."""
    names = checkpoint.files.names("spark/commits")
    newest = max((int(name) for name in names if name.isdigit()), default=-1)
    last = checkpoint.log.last()
    if newest > (-1 if last is None else last):
        raise _gap(f"Spark has committed epoch {newest}", last)


def _gap(what: str, last: int | None) -> CheckpointError:
    there = "no manifest is there" if last is None else f"the last manifest is that of epoch {last}"
    return CheckpointError(
        "EPOCH_GAP",
        f"{what}, but {there}",
        "restore the whole checkpoint directory, Spark's part and Plait's, from one copy",
    )


def run_epoch(driver: Driver, buckets: DataFrame, number: int) -> None:
    """Called by Spark for every micro-batch, in order; again for one that Spark has not seen committed."""
    epoch = Epoch(number, buckets, driver)
    begun = time.perf_counter()
    done = driver.checkpoint.log.read(number) if number <= driver.live.epoch else None
    if done is not None:
        _same_input(epoch, done)
        epoch.manifest = done
        deliver(epoch)
        driver.behind.wait()
        return
    if number != driver.live.epoch + 1:
        raise _gap(f"Spark asks for epoch {number}", driver.checkpoint.log.last())
    for step in STEPS:
        start = time.perf_counter()
        step(epoch)
        epoch.seconds[step.__name__] = time.perf_counter() - start
    driver.last_work = _work(epoch)
    epoch.seconds["total"] = driver.last_seconds = time.perf_counter() - begun


def prepare(epoch: Epoch) -> None:
    """Fixes what the epoch works on: tasks, clock, live segments, and the merges it does on the way."""
    driver = epoch.driver
    if driver.last_work is None:
        driver.last_work = _expected_work(epoch)
    live, plan = driver.live, driver.plan
    clock_us = max(live.clock_us, driver.clock())
    segments: dict[str, tuple[SegmentInfo, ...]] = {}
    for store, infos in live.segments.items():
        over = [i for i in infos if expired(i, plan.store_by_id[store], live.watermark_ms, clock_us)]
        epoch.dropped.extend(over)
        segments[store] = tuple(i for i in infos if i not in over)
    above = compress_above(driver.config)
    epoch.task = EpochTask(
        plan=plan,
        epoch=epoch.number,
        tasks=driver.tasks,
        home=driver.checkpoint.home,
        results=driver.checkpoint.results,
        verified_dir=driver.verified_dir,
        live=segments,
        merges=choose_merges(segments, driver.config.fan_in, driver.tasks, above),
        # Tier 0 is what is read most: in the page cache if it fits, in blocks if not even that does.
        compress=_tier_0(segments, driver.config.fan_in) > above,
        kept=frozenset(q.name for q in plan.queries if driver.sinks[q.name].reads_rows or q.select or q.where),
        watermark_ms=live.watermark_ms,
        clock_us=clock_us,
        iterative=driver.config.probe == "iterative",
        chunk_rows=driver.config.chunk_rows,
        sync=driver.config.sync,
        memory=task_memory(driver.config, driver.tasks, driver.executor_cores),
        merge_seconds=max(_IDLE_MERGE_SECONDS, driver.config.merge_share * driver.last_seconds),
        sampled=driver.planner.samples if driver.planner is not None else frozenset(),
        arriving=driver.arriving,
    )
    parameters = EpochParameters(driver.tasks, live.watermark_ms, clock_us)
    driver.spark.sparkContext.setLocalProperty(PROPERTY, parameters.to_property())


def join(epoch: Epoch) -> None:
    """Exchange, append, probe and materialise: one Spark job, one exchange per hop."""
    assert epoch.task is not None
    task = epoch.task
    buckets = planned(epoch.buckets)
    if epoch.number == 0 and epoch.driver.tables is not None:
        buckets = buckets.union(epoch.driver.tables)
    rows = exchange(buckets, task.tasks)
    if task.tasks == 1:
        rows = rows.mapInArrow(every_hop(task), SCHEMA)
    else:
        rows = rows.mapInArrow(first_hop(task), SCHEMA)
        for hop in range(2, task.plan.hops + 1):
            rows = exchange(rows, task.tasks).mapInArrow(later_hop(task, hop), SCHEMA)
    notes = [bytes(row.payload) for row in rows.collect()]
    reached("commit.1", epoch.number)
    epoch.account = commits.collected(notes, task.plan)


def finish(epoch: Epoch) -> None:
    """Spark's part: what only Spark can evaluate of this epoch's rows; now and then, merging what queries keep."""
    driver, account = epoch.driver, epoch.account
    for query in driver.plan.queries:
        kept = driver.sources.source(query.name)
        if kept is not None:
            residual, source = kept
            account.results += driver.sources.merged(driver.rows, residual, source)
        elif query.select or query.where:
            candidates = [file for file in account.results if file.query == query.name]
            others = [file for file in account.results if file.query != query.name]
            finished = driver.rows.finished(query, candidates)
            account.results = others + finished
            account.rows_out[query.name] = sum(file.rows for file in finished)
        else:
            continue
        reached("finish", epoch.number)


def commit(epoch: Epoch) -> None:
    """The manifest makes the epoch part of the answer."""
    driver, account, task = epoch.driver, epoch.account, epoch.task
    assert task is not None
    seen = dict(driver.live.max_event_ms)
    for relation, event in account.max_event_ms.items():
        seen[relation] = max(event, seen.get(relation, event))
    manifest = Manifest(
        epoch=epoch.number,
        token=driver.checkpoint.token,
        plan=driver.plan.digest,
        source=_source_digest(driver.checkpoint, epoch.number),
        clock_us=task.clock_us,
        watermark_ms=commits.watermark(driver.plan, seen, driver.live.watermark_ms, driver.watermark_policy),
        max_event_ms=seen,
        added=tuple(account.added),
        removed=(*account.removed, *(info.path for info in epoch.dropped)),
        results=tuple(replace(f, passing=not driver.sinks[f.query].keeps_rows) for f in account.results),
        rows_in=account.rows_in,
        rows_late=account.rows_late,
        rows_out=account.rows_out,
        snapshot=None,
        retention={s.id: Retention(s.time_column, s.keep_us, s.ttl_us) for s in driver.plan.stores},
        before_ms=driver.live.watermark_ms,
        merged=tuple(account.merged_results),
        replaced=tuple(account.replaced),
    )
    if epoch.number % driver.config.snapshot_every == 0:
        after = driver.live.after(manifest)
        manifest = _with_snapshot(manifest, after, results_after(driver.sources.live.files, manifest))
    before = driver.live
    driver.live = commits.commit(driver.checkpoint, before, manifest)
    driver.state.committed(before, driver.live)
    driver.sources.live.committed(manifest)
    # What this run has just written need not be read back.
    driver.rows.known.update(file.path for file in (*account.results, *account.merged_results))
    epoch.manifest = manifest


def observe(epoch: Epoch) -> None:
    """What the epoch did, for people, for the optimiser, and for the next epoch; old files are collected."""
    driver, account = epoch.driver, epoch.account
    plan = driver.plan
    optimiser = _adapt(epoch)
    lookups = {node: count.lookups for node, count in account.edges.items()}
    driver.arriving = arriving(plan, lookups) if driver.plan is plan else {}
    live = [info for infos in driver.live.segments.values() for info in infos]
    remote = driver.checkpoint.home.remote is not None
    counted = {name: account.seconds[name] for name in sorted(account.seconds)}
    driver.progress.append(
        {
            "epoch": epoch.number,
            "timestamp": time.time(),
            "rows_in": account.rows_in,
            "rows_out": account.rows_out,
            "rows_late": account.rows_late,
            "state_rows": sum(info.rows for info in live),
            "state_bytes": sum(info.live_bytes for info in live),
            "state": driver.state.report(driver.live, account, epoch.number, _pending(epoch), remote),
            "segments": {store: len(infos) for store, infos in sorted(driver.live.segments.items())},
            "watermark_ms": driver.live.watermark_ms,
            "tasks": epoch.task.tasks if epoch.task is not None else driver.tasks,
            "seconds": epoch.seconds,
            "task_seconds": counted,
            "edges": {str(node): asdict(count) for node, count in account.edges.items()},
            "driven": account.driven,
            "ranks": list(plan.ranks),
            "orders": {q.name: {alias: list(order) for alias, order in q.orders} for q in plan.queries},
            "optimiser": optimiser,
        }
    )
    driver.state.shrink(driver.checkpoint.home, driver.live)
    if epoch.number % driver.config.snapshot_every == 0:
        grace, now = driver.config.gc_grace_seconds, time.time()
        collect_garbage(driver.checkpoint, driver.live, driver.sources.live.kept(now - grace), grace, now)
        driver.rows.known.intersection_update(driver.sources.live.paths())


def _expected_work(epoch: Epoch) -> float:
    """Seconds that tasks will work for the first epoch of a run, by the size of what arrives."""
    tables = epoch.driver.tables if epoch.number == 0 else None
    arriving: list[Any] = [df._jdf for df in (epoch.buckets, tables) if df is not None]
    return sum(int(df.queryExecution().optimizedPlan().stats().sizeInBytes()) for df in arriving) / BYTES_PER_SECOND


def _work(epoch: Epoch) -> float:
    """Seconds that tasks worked, as far as more tasks would share it: segments are written beside the join."""
    return sum(seconds for name, seconds in epoch.account.seconds.items() if name != "append")


def _tier_0(live: Mapping[str, Sequence[SegmentInfo]], fan_in: int) -> int:
    """Bytes that tier 0 comes to when it is full, by what the last epoch has added."""
    new = [info for infos in live.values() for info in infos if info.tier == 0]
    last = max((info.epoch for info in new), default=0)
    return fan_in * sum(info.live_bytes for info in new if info.epoch == last)


def _pending(epoch: Epoch) -> tuple[Merge, ...]:
    """The merges that are begun or due after this epoch."""
    assert epoch.task is not None
    return choose_merges(epoch.driver.live.segments, epoch.driver.config.fan_in, epoch.task.tasks)


def _adapt(epoch: Epoch) -> dict[str, Any]:
    """Shows the optimiser the epoch; if it has a better plan, that is the next epoch's.  Its report, and its time."""
    driver, account = epoch.driver, epoch.account
    if driver.planner is None:
        return {}
    begun = time.perf_counter()
    arrived: dict[str, int] = {}
    for info in account.added:
        if info.tier == 0 and info.epoch == epoch.number:
            arrived[info.store] = arrived.get(info.store, 0) + info.keys
    stores = {}
    for store in driver.plan.stores:
        infos = driver.live.segments.get(store.id, ())
        stores[store.id] = KeyCount(
            keys=account.keys.get(store.id, float(sum(i.keys for i in infos))) if infos else 0.0,
            arrived=arrived.get(store.id, 0),
            rows=sum(i.rows for i in infos),
            runs=runs_per_lookup(infos),
        )
    observed = Observed(
        epoch=epoch.number,
        rows_in=account.rows_in,
        rows_out=account.rows_out,
        edges=account.edges,
        stores=stores,
        samples=account.samples,
        max_event_ms=driver.live.max_event_ms,
        exchanged=epoch.task is None or epoch.task.tasks > 1,
    )
    if driver.planner.observe(observed, time.monotonic()):
        driver.plan = driver.planner.plan
        driver.rows = replace(driver.rows, plan=driver.plan)
    if (learnt := driver.planner.memory()) is not None:
        driver.checkpoint.put_statistics(learnt)
    report = driver.planner.report()
    return {**report, "seconds": time.perf_counter() - begun}


STEPS: tuple[Callable[[Epoch], None], ...] = (prepare, join, finish, merge_results, arrive, commit, deliver, observe)
"""The order of work in an epoch.  `join` holds exchange → append → probe → materialise, hop by hop."""


def _with_snapshot(manifest: Manifest, after: LiveState, results: Mapping[str, Sequence[ResultFile]]) -> Manifest:
    return replace(
        manifest,
        snapshot=tuple(info for infos in after.segments.values() for info in infos),
        snapshot_results=tuple(file for files in results.values() for file in files),
    )


def _source_digest(checkpoint: Checkpoint, number: int) -> str:
    """Ties the manifest to the very offsets Spark logged for this epoch."""
    offsets = checkpoint.files.read(f"spark/offsets/{number}")
    return "" if offsets is None else xxhash.xxh3_128_hexdigest(offsets)


def _same_input(epoch: Epoch, done: Manifest) -> None:
    """A replayed epoch must be the one that was committed; a tampered Spark checkpoint would lose or repeat rows."""
    now = _source_digest(epoch.driver.checkpoint, epoch.number)
    if done.source and now != done.source:
        raise CheckpointError(
            "OFFSETS_CHANGED",
            f"epoch {epoch.number} was committed with other source offsets than Spark replays now",
            "restore the whole checkpoint directory, Spark's part and Plait's, from one copy",
        )
