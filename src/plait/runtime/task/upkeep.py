"""Upkeep of state on the way: merges, and stores that are filled from others, a bounded share of every epoch."""

from __future__ import annotations

import time

from plait.runtime.faults import reached
from plait.runtime.task.epoch_task import EpochTask
from plait.runtime.task.exchange import Outbox
from plait.runtime.task.notes import CopyNote, MergeNote
from plait.state.segments.store_build import copied
from plait.state.segments.tiers import PART_BYTES, merge_some


def merge(context: EpochTask, task: int, outbox: Outbox) -> None:
    """Compaction the driver gave to this task, as far as its time goes."""
    until = time.perf_counter() + context.merge_seconds
    for merge in context.merges:
        if merge.task != task:
            continue
        done = merge_some(
            context.home,
            context.plan.store_by_id[merge.store],
            merge,
            epoch=context.epoch,
            horizon_us=context.horizons.get(merge.store),
            now_us=context.clock_us,
            sync=context.sync,
            verified_dir=context.verified_dir,
            part_bytes=min(PART_BYTES, context.memory // 32),
            more=lambda: time.perf_counter() < until,
            filters=context.filters_of(merge.store),
        )
        added, removed = tuple(done.added), tuple(done.removed)
        outbox.note(task, MergeNote(merge.store, added, removed, done.written, done.let_go))
        reached("task.merge", context.epoch)
        if time.perf_counter() >= until:
            break


def copy(context: EpochTask, task: int, outbox: Outbox) -> None:
    """The part that this task has in filling stores from others."""
    plan = context.plan
    for copy in context.copies if task < context.tasks else ():
        source = plan.store_by_id[copy.source]
        begin = copy.begin + (copy.end - copy.begin) * task // context.tasks
        end = copy.begin + (copy.end - copy.begin) * (task + 1) // context.tasks
        live = context.live.get(copy.source, ())
        done = copied(
            context.home,
            plan.store_by_id[copy.store],
            [info for info in live if info.lo_group < end and info.hi_group > begin],
            (begin, end),
            before=copy.before,
            epoch=context.epoch,
            source_ttl_us=source.ttl_us,
            horizon_us=context.horizons.get(copy.store),
            now_us=context.clock_us,
            filters=context.filters_of(copy.store),
            part_bytes=min(PART_BYTES, context.memory // 32),
            deep=context.compress,
            sync=context.sync,
            verified_dir=context.verified_dir,
            same_key=source.key == plan.store_by_id[copy.store].key,
        )
        outbox.note(task, CopyNote(copy.store, tuple(done.added), done.let_go))
        reached("task.build", context.epoch)
