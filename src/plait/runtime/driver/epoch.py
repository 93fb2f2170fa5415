"""A row's way: one micro-batch, from buckets to observed results, as one visible tuple of steps.

    source → bucketise → exchange → append to its store → probe by the plan, hop by hop → materialise
           → commit (manifest) → sinks → replan: the next epoch's catalog and plan → observe
                                 └──→ answers, while the next epoch is joined

Bucketising runs in the source's own tasks (runtime/task/bucketise.py, part of the streaming query); exchange, append,
probe and materialise are one Spark job, built by `join` (runtime/task/hops.py); the rest is the driver's.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from pyspark.sql import DataFrame, SparkSession

from plait.config import KEY_GROUPS, Config
from plait.errors import CheckpointError, PlaitError
from plait.query.layout import Build, shown
from plait.query.observed import KeyCount, Observed
from plait.query.plan import Plan, horizon_us, watermark_ms
from plait.runtime.answers.answer import Sources
from plait.runtime.answers.answer_queue import Behind
from plait.runtime.answers.result_reader import ResultRows
from plait.runtime.driver import commit as commits
from plait.runtime.driver.batch_sizes import Batches
from plait.runtime.driver.collect import Collected, collected
from plait.runtime.driver.deliver import arrive, deliver
from plait.runtime.driver.offsets import make_durable, same_source, source_digest
from plait.runtime.driver.result_merge import merge_results
from plait.runtime.driver.sinks import Sink
from plait.runtime.driver.state_account import StateAccount
from plait.runtime.faults import reached
from plait.runtime.task.bucketise import PROPERTY, EpochParameters
from plait.runtime.task.exchange import SCHEMA, exchange, planned
from plait.runtime.task.hops import every_hop, first_hop, later_hop
from plait.runtime.task.join_task import EpochTask
from plait.runtime.task.passes import arriving
from plait.runtime.task.task_memory import compress_above, task_memory
from plait.state.log.checkpoint import Checkpoint, collect_garbage
from plait.state.log.events import add_event
from plait.state.log.manifest import LiveState, Manifest, ResultFile, Retention, results_after
from plait.state.segments.segment import SegmentInfo
from plait.state.segments.store_build import Copy
from plait.state.segments.tiers import Merge, choose_merges, expired, let_go, runs_per_lookup


def system_clock() -> int:
    """The machine's time in microseconds."""
    return time.time_ns() // 1000


EXCHANGE_SECONDS = 0.1
"""What Spark needs for an exchange between tasks, however little travels."""
BYTES_PER_SECOND = 8e6
"""Source bytes that a task joins per second.  Only used to guess the first epoch's work from Spark's size estimate."""
BUILD_BYTES_PER_SECOND = 64e6
"""Bytes of a store that are copied into another per second, all tasks together."""
_IDLE_MERGE_SECONDS = 0.05
"""Merging that a task may do even where epochs take no time."""


class Planner(Protocol):
    """What the driver needs of the optimiser (share/replan.py): it sees each epoch, and may change the plan."""

    plan: Plan

    def looked(self) -> None: ...

    @property
    def samples(self) -> frozenset[int]: ...

    def observe(self, observed: Observed, now: float) -> bool: ...

    def report(self) -> dict[str, Any]: ...

    def memory(self) -> dict[str, Any] | None: ...


class Changes(Protocol):
    """What the driver needs of whoever keeps the catalog (`admission.py`): epochs may make queries live."""

    @property
    def version(self) -> int: ...

    @property
    def builds(self) -> tuple[Build, ...]: ...

    def after(self, live: LiveState) -> Planner | None: ...

    def begins(self, epoch: int) -> tuple[str, ...]: ...

    def report(self) -> dict[str, Any]: ...


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
    changes: Changes | None = None
    """None keeps the queries for ever."""
    sources: Sources = field(default_factory=Sources)
    """What is kept for queries of which Spark does a part."""
    behind: Behind = field(default_factory=Behind)
    """Their answers, on the way to sinks."""
    tables: Mapping[int, DataFrame] = field(default_factory=dict)
    """The buckets of tables, by the epoch in which they arrive."""
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
    batches: Batches = field(default_factory=Batches)
    """How large the batches are that Spark hands to tasks."""
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
    account: Collected = field(default_factory=Collected)
    manifest: Manifest | None = None
    plan: Plan | None = None
    """The plan that it ran with; the driver's may be the next epoch's already."""
    optimiser: dict[str, Any] = field(default_factory=dict)
    await_durable: Callable[[], None] = lambda: None
    """Waits until what the commit relies on of Spark's logs is durable."""


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
    epoch.await_durable = make_durable(driver.checkpoint, epoch.number)
    if driver.last_work is None:
        driver.last_work = _expected_work(epoch)
    live, plan = driver.live, driver.plan
    clock_us = max(live.clock_us, driver.clock())
    horizons = _horizons(plan, live.marks_ms, driver.watermark_policy)
    segments: dict[str, tuple[SegmentInfo, ...]] = {}
    for name, infos in live.segments.items():
        store = plan.store_by_id.get(name)
        # What nobody refers to any more goes as a whole.
        over = [
            i
            for i in infos
            if store is None or i.max_born < store.lowest or expired(i, store, horizons.get(name), clock_us)
        ]
        epoch.dropped.extend(over)
        if store is not None:
            segments[name] = tuple(i for i in infos if i not in over)
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
        horizons=horizons,
        clock_us=clock_us,
        iterative=driver.config.probe == "iterative",
        chunk_rows=driver.config.chunk_rows,
        sync=driver.config.sync,
        memory=task_memory(driver.config, driver.tasks, driver.executor_cores),
        merge_seconds=max(_IDLE_MERGE_SECONDS, driver.config.merge_share * driver.last_seconds),
        sampled=driver.planner.samples if driver.planner is not None else frozenset(),
        arriving=driver.arriving,
        copies=_copies(driver, segments),
    )
    ahead = driver.config.max_future_us
    latest = None if ahead is None else clock_us + ahead
    parameters = EpochParameters(driver.tasks, clock_us, live.marks_ms, driver.watermark_policy, latest)
    driver.spark.sparkContext.setLocalProperty(PROPERTY, parameters.to_property())


def join(epoch: Epoch) -> None:
    """Exchange, append, probe and materialise: one Spark job, one exchange per hop."""
    assert epoch.task is not None
    task = epoch.task
    batches, session = epoch.driver.batches, epoch.buckets.sparkSession
    batches.for_sources(session)
    buckets = planned(epoch.buckets)
    batches.for_buckets(session)
    if epoch.number in epoch.driver.tables:
        buckets = buckets.union(epoch.driver.tables[epoch.number])
    rows = exchange(buckets, task.tasks)
    if task.tasks == 1:
        rows = rows.mapInArrow(every_hop(task), SCHEMA)
    else:
        rows = rows.mapInArrow(first_hop(task), SCHEMA)
        for hop in range(2, task.plan.hops + 1):
            rows = exchange(rows, task.tasks).mapInArrow(later_hop(task, hop), SCHEMA)
    notes = [bytes(row.payload) for row in rows.collect()]
    reached("commit.1", epoch.number)
    epoch.account = collected(notes, task.plan)
    batches.saw(epoch.account.row_bytes)


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
    seen = _latest(driver.live.max_event_ms, account.max_event_ms)
    known = {mark.key for i in driver.plan.inputs for mark in i.marks}
    marks = {k: at for k, at in _latest(driver.live.marks_ms, account.marks_ms).items() if k in known}
    horizons = _horizons(driver.plan, marks, driver.watermark_policy)
    epoch.await_durable()
    manifest = Manifest(
        epoch=epoch.number,
        token=driver.checkpoint.token,
        plan=driver.plan.digest,
        source=source_digest(driver.checkpoint.files, epoch.number),
        clock_us=task.clock_us,
        watermark_ms=_least_watermark(driver.plan, marks, driver.watermark_policy),
        max_event_ms=seen,
        added=(*account.added, *account.copied),
        removed=(*account.removed, *(info.path for info in epoch.dropped)),
        results=tuple(replace(f, passing=not driver.sinks[f.query].keeps_rows) for f in account.results),
        rows_in=account.rows_in,
        rows_late=account.rows_late,
        rows_out=account.rows_out,
        snapshot=None,
        retention={s.id: Retention(s.time_column, horizons.get(s.id), s.ttl_us) for s in driver.plan.stores},
        before_ms=driver.live.watermark_ms,
        catalog=0 if driver.changes is None else driver.changes.version,
        marks_ms=marks,
        let_go=_let_go(epoch),
        builds=_built(epoch),
        merged=tuple(account.merged_results),
        replaced=(*account.replaced, *_of_dropped(driver)),
        before_marks_ms=_marks_before(driver.live),
        begins=() if driver.changes is None else driver.changes.begins(epoch.number),
    )
    if epoch.number % driver.config.snapshot_every == 0 or driver.live.legacy:
        after = driver.live.after(manifest)
        manifest = _with_snapshot(manifest, after, results_after(driver.sources.live.files, manifest))
    before = driver.live
    driver.live = commits.commit(driver.checkpoint, before, manifest)
    driver.state.committed(before, driver.live)
    driver.sources.live.committed(manifest)
    # What this run has just written need not be read back.
    driver.rows.known.update(file.path for file in (*account.results, *account.merged_results))
    epoch.manifest = manifest


def replan(epoch: Epoch) -> None:
    """The next epoch's catalog and plan: builds that are complete make queries live, statistics may change orders."""
    driver = epoch.driver
    epoch.plan = driver.plan
    if driver.planner is None:
        return
    begun = time.perf_counter()
    driver.planner.looked()
    changed = driver.planner.observe(_observed(epoch), time.monotonic())
    # Not only by that: a first look is over after one epoch.
    changed = changed or driver.planner.plan is not driver.plan
    if (learnt := driver.planner.memory()) is not None:
        driver.checkpoint.put_statistics(learnt)
    if driver.changes is not None and (planner := driver.changes.after(driver.live)) is not None:
        driver.planner, changed = planner, True
    if changed:
        driver.plan = driver.planner.plan
        driver.rows = replace(driver.rows, plan=driver.plan)
    epoch.optimiser = {**driver.planner.report(), "seconds": time.perf_counter() - begun}


def observe(epoch: Epoch) -> None:
    """What the epoch did, for people and for the next epoch; old files are collected."""
    driver, account = epoch.driver, epoch.account
    assert epoch.plan is not None
    plan = epoch.plan
    lookups = {node: count.lookups for node, count in account.edges.items()}
    driver.arriving = arriving(plan, lookups) if driver.plan is plan else {}
    live = [info for infos in driver.live.segments.values() for info in infos]
    remote = driver.checkpoint.home.remote is not None
    counted = {name: account.seconds[name] for name in sorted(account.seconds)}
    watermarks = driver.live.marks_ms, driver.watermark_policy
    report = {
        "epoch": epoch.number,
        "timestamp": time.time(),
        "rows_in": account.rows_in,
        "rows_out": {shown(query): rows for query, rows in account.rows_out.items()},
        "rows_late": account.rows_late,
        "rows_null_key": account.rows_null_key,
        "rows_corrupt": account.rows_corrupt,
        "rows_future": account.rows_future,
        "state_rows": sum(info.rows for info in live),
        "state_bytes": sum(info.live_bytes for info in live),
        "state": driver.state.report(driver.live, account, epoch.number, _pending(epoch), remote),
        "segments": {store: len(infos) for store, infos in sorted(driver.live.segments.items())},
        "watermark_ms": driver.live.watermark_ms,
        "watermarks": {shown(query): at for query, at in _watermarks(plan, *watermarks).items()},
        "catalog": {} if driver.changes is None else driver.changes.report(),
        "builds": {store: groups / KEY_GROUPS for store, groups in driver.live.builds.items()},
        "tasks": epoch.task.tasks if epoch.task is not None else driver.tasks,
        "seconds": epoch.seconds,
        "task_seconds": counted,
        "edges": {str(node): asdict(count) for node, count in account.edges.items()},
        "driven": {relation: asdict(done) for relation, done in account.driven.items()},
        "ranks": list(plan.ranks),
        "orders": {shown(q.name): {alias: list(order) for alias, order in q.orders} for q in plan.queries},
        "optimiser": epoch.optimiser,
    }
    driver.progress.append(report)
    add_event(driver.checkpoint.files, report)
    driver.state.shrink(driver.checkpoint.home, driver.live)
    if epoch.number % driver.config.snapshot_every == 0:
        grace, now = driver.config.gc_grace_seconds, time.time()
        collect_garbage(driver.checkpoint, driver.live, driver.sources.live.kept(now - grace), grace, now)
        driver.rows.known.intersection_update(driver.sources.live.paths())


def _expected_work(epoch: Epoch) -> float:
    """Seconds that tasks will work for the first epoch of a run, by the size of what arrives."""
    tables = epoch.driver.tables.get(epoch.number)
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


def _observed(epoch: Epoch) -> Observed:
    """The epoch as the optimiser sees it."""
    driver, account = epoch.driver, epoch.account
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
    return Observed(
        epoch=epoch.number,
        rows_in=account.rows_in,
        rows_out=account.rows_out,
        edges=account.edges,
        stores=stores,
        samples=account.samples,
        max_event_ms=driver.live.max_event_ms,
        exchanged=epoch.task is None or epoch.task.tasks > 1,
    )


def _latest(before: Mapping[str, int], now: Mapping[str, int]) -> dict[str, int]:
    """Times only move forward."""
    return {name: max(d[name] for d in (before, now) if name in d) for name in {**before, **now}}


def _marks_before(live: LiveState) -> dict[str, int]:
    """What watermarks were made of before an epoch; format 3 had one watermark for all."""
    if not live.legacy:
        return live.marks_ms
    return {} if live.watermark_ms is None else dict.fromkeys(live.marks_ms, live.watermark_ms)


def _horizons(plan: Plan, marks_ms: Mapping[str, int], policy: str) -> dict[str, int]:
    """By store the event time up to which rows cannot be reached; stores of which all rows can are left out."""
    found = {store.id: horizon_us(store.reach, marks_ms, policy) for store in plan.stores}
    return {store: horizon for store, horizon in found.items() if horizon is not None}


def _watermarks(plan: Plan, marks_ms: Mapping[str, int], policy: str) -> dict[str, int | None]:
    """By query."""
    return {q.name: watermark_ms(q.marks, marks_ms, policy) for q in plan.queries}


def _least_watermark(plan: Plan, marks_ms: Mapping[str, int], policy: str) -> int | None:
    """Of all queries that have one."""
    known = [at for at in _watermarks(plan, marks_ms, policy).values() if at is not None]
    return min(known, default=None)


def _let_go(epoch: Epoch) -> dict[str, int]:
    """By store the latest birth of a row that was let expire, so far."""
    driver, task = epoch.driver, epoch.task
    assert task is not None
    found = dict(driver.live.let_go)
    dropped = [(info.store, let_go(info, task.horizons.get(info.store))) for info in epoch.dropped]
    for store, birth in (*epoch.account.let_go.items(), *dropped):
        found[store] = max(birth, found.get(store, -1))
    sources = {build.store: build.source for build in (driver.changes.builds if driver.changes else ())}
    for store, source in sources.items():
        found[store] = max(found.get(store, -1), found.get(source, -1))
    return {store: birth for store, birth in found.items() if birth >= 0 and store in driver.plan.store_by_id}


def _copies(driver: Driver, segments: Mapping[str, Sequence[SegmentInfo]]) -> tuple[Copy, ...]:
    """The next key groups of every build: as many as may be copied in the time that merging may take."""
    found = []
    budget = BUILD_BYTES_PER_SECOND * max(_IDLE_MERGE_SECONDS, driver.config.merge_share * driver.last_seconds)
    for build in driver.changes.builds if driver.changes is not None else ():
        begin = driver.live.builds.get(build.store, 0)
        if begin >= KEY_GROUPS:
            continue
        size = sum(info.live_bytes for info in segments.get(build.source, ()))
        groups = KEY_GROUPS if size <= budget else max(1, int(KEY_GROUPS * budget / size))
        found.append(Copy(build.store, build.source, build.before, begin, min(KEY_GROUPS, begin + groups)))
    return tuple(found)


def _built(epoch: Epoch) -> dict[str, int]:
    """By store that is being built, the key groups that are copied after this epoch."""
    assert epoch.task is not None
    changes = epoch.driver.changes
    going = {build.store for build in changes.builds} if changes is not None else set()
    done = {**epoch.driver.live.builds, **{copy.store: copy.end for copy in epoch.task.copies}}
    return {store: groups for store, groups in done.items() if store in going}


def _of_dropped(driver: Driver) -> tuple[str, ...]:
    """Result files in force of queries that are no more: nobody can ask for them."""
    live = driver.sources.live.files
    return tuple(file.path for query, files in live.items() if query not in driver.sinks for file in files)


STEPS: tuple[Callable[[Epoch], None], ...] = (
    prepare,
    join,
    finish,
    merge_results,
    arrive,
    commit,
    deliver,
    replan,
    observe,
)
"""The order of work in an epoch.  `join` holds exchange → append → probe → materialise, hop by hop."""


def _with_snapshot(manifest: Manifest, after: LiveState, results: Mapping[str, Sequence[ResultFile]]) -> Manifest:
    return replace(
        manifest,
        snapshot=tuple(info for infos in after.segments.values() for info in infos),
        snapshot_results=tuple(file for files in results.values() for file in files),
    )


def _same_input(epoch: Epoch, done: Manifest) -> None:
    """A replayed epoch must be the one that was committed; a tampered Spark checkpoint would lose or repeat rows."""
    if not same_source(epoch.driver.checkpoint.files, epoch.number, done.source):
        raise CheckpointError(
            "OFFSETS_CHANGED",
            f"epoch {epoch.number} was committed with other source offsets than Spark replays now",
            "restore the whole checkpoint directory, Spark's part and Plait's, from one copy",
        )
