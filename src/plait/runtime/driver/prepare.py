"""The step `prepare`: what the tasks of an epoch must know is fixed before any of them runs.

Which segments are live and which are over, which merges and copies are done on the way, how many tasks there are: all
follow from what is in force and from how long the last epoch took.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from plait.config import KEY_GROUPS, bytes_of
from plait.runtime.driver.driver import Driver, Epoch
from plait.runtime.driver.offsets import make_durable
from plait.runtime.driver.sinks import Parquet
from plait.runtime.driver.troubled import left_out
from plait.runtime.driver.watermarks import horizons_us
from plait.runtime.spark.frames import estimated_bytes
from plait.runtime.task.bucketise import INPUTS, PROPERTY, EpochInputs, EpochParameters
from plait.runtime.task.epoch_task import EpochTask
from plait.runtime.task.task_memory import compress_above, task_memory
from plait.state.log.passes import FOLDER
from plait.state.segments.segment import SegmentInfo
from plait.state.segments.store_build import Copy
from plait.state.segments.tiers import choose_merges, expired

BYTES_PER_SECOND = 8e6
"""Source bytes that a task joins per second.  Only used to guess the first epoch's work from Spark's size estimate."""
BUILD_BYTES_PER_SECOND = 64e6
"""Bytes of a store that are copied into another per second, all tasks together."""
IDLE_MERGE_SECONDS = 0.05
"""Merging that a task may do even where epochs take no time."""


def prepare(epoch: Epoch) -> None:
    """Fixes what the epoch works on: tasks, clock, live segments, and the merges it does on the way."""
    driver, services = epoch.driver, epoch.driver.services
    config, live, plan = services.config, driver.now.live, epoch.plan
    if epoch.batch is not None:
        epoch.await_durable = make_durable(services.checkpoint, epoch.batch)
    if driver.feedback.work is None:
        driver.feedback.work = _expected_work(epoch)
    clock_us = max(live.clock_us, services.clock())
    horizons = horizons_us(plan, live.marks_ms, services.watermark_policy)
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
    above = compress_above(config)
    scaling = driver.feedback.scaling = driver.scaled()
    epoch.task = EpochTask(
        plan=plan,
        epoch=epoch.number,
        bounds=scaling.bounds,
        home=services.checkpoint.home,
        results=services.checkpoint.results,
        verified_dir=services.verified_dir,
        live=segments,
        merges=choose_merges(segments, config.fan_in, scaling.tasks, above),
        # Tier 0 is what is read most: in the page cache if it fits, in blocks if not even that does.
        compress=_tier_0(segments, config.fan_in) > above,
        kept=frozenset(q.name for q in plan.queries if services.sinks[q.name].reads_rows or q.select or q.where),
        apart=frozenset(
            q.name for q in plan.queries if isinstance(services.sinks[q.name], Parquet) or q.select or q.where
        ),
        horizons=horizons,
        clock_us=clock_us,
        iterative=config.probe == "iterative",
        chunk_rows=config.chunk_rows,
        sync=config.sync,
        memory=task_memory(config, scaling.tasks, services.executor_cores),
        merge_seconds=_merge_seconds(driver),
        sampled=driver.now.samples,
        arriving=driver.now.arriving,
        left_out=left_out(services, [query.name for query in plan.queries]),
        most_rows=_most_rows(driver),
        most_bytes=bytes_of("parked_bytes", config.parked_bytes),
        copies=_copies(driver, segments),
        passes=services.checkpoint.files.where(FOLDER) if services.checkpoint.files.local else None,
    )
    latest_us = None if config.max_future_us is None else clock_us + config.max_future_us
    parameters = EpochParameters(scaling.bounds, clock_us, live.marks_ms, services.watermark_policy, latest_us)
    context = services.spark.sparkContext
    context.setLocalProperty(PROPERTY, parameters.to_property())
    context.setLocalProperty(INPUTS, EpochInputs.of_plan(plan.inputs).to_property())


def _most_rows(driver: Driver) -> dict[str, int]:
    """By join the rows beyond which it is parked.  An answer needs all of its rows, also while it is."""
    found = {}
    for query in driver.now.catalog.queries.values():
        for join in query.joins:
            if query.budget.rows is not None and driver.services.sources.source(join) is None:
                found[join] = query.budget.rows
    return found


def _expected_work(epoch: Epoch) -> float:
    """Seconds that tasks will work for the first epoch of a run, by the size of what arrives."""
    tables = epoch.driver.services.tables.get(epoch.number)
    arriving = [df for df in (epoch.buckets, tables) if df is not None]
    return sum(map(estimated_bytes, arriving)) / BYTES_PER_SECOND


def _merge_seconds(driver: Driver) -> float:
    """How long merging may take: its share of what the last epoch took."""
    return max(IDLE_MERGE_SECONDS, driver.services.config.merge_share * driver.feedback.seconds)


def _tier_0(live: Mapping[str, Sequence[SegmentInfo]], fan_in: int) -> int:
    """Bytes that tier 0 comes to when it is full, by what the last epoch has added."""
    new = [info for infos in live.values() for info in infos if info.tier == 0]
    last = max((info.epoch for info in new), default=0)
    return fan_in * sum(info.live_bytes for info in new if info.epoch == last)


def _copies(driver: Driver, segments: Mapping[str, Sequence[SegmentInfo]]) -> tuple[Copy, ...]:
    """The next key groups of every build: as many as may be copied in the time that merging may take."""
    found = []
    budget = BUILD_BYTES_PER_SECOND * _merge_seconds(driver)
    for build in driver.now.catalog.builds:
        begin = driver.now.live.builds.get(build.store, 0)
        if begin >= KEY_GROUPS:
            continue
        size = sum(info.live_bytes for info in segments.get(build.source, ()))
        groups = KEY_GROUPS if size <= budget else max(1, int(KEY_GROUPS * budget / size))
        found.append(Copy(build.store, build.source, build.before, begin, min(KEY_GROUPS, begin + groups)))
    return tuple(found)
