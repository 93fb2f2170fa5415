"""Tiers: how many runs a store has, and which rows in them can still be reached.

Contract.  Every epoch appends runs of tier 0.  A *lane* is the share of a store that one task owns; when a lane has
`fan_in` runs of a tier, all of them are merged into one run of the next (tiered compaction; paper 002's LSM).

Invariant.  After settling, a lane has at most fan_in − 1 runs of each tier, hence O(fan_in · log n) runs after n
epochs — plus *full* runs, which are never merged again: those above MERGE_BYTES / fan_in, so that a merge fits
memory however large the state.  A full run holds neighbouring epochs, so it expires as a whole.

Cost.  A row is rewritten once per tier, O(log n) times at most.  A merge is linear in its rows and holds its output
in memory, at most MERGE_BYTES.  Expired rows are dropped while merging; expired segments without being read.

Rows are unreachable when the watermark has passed their event time by `Store.keep_us`, or when their TTL is over.
A row without event time is in no window, so it is dropped with the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from plait.config import KEY_GROUPS
from plait.kernels import Flags
from plait.kernels.runs import merge_order
from plait.query.plan import ARRIVED, Store
from plait.state.segment import SegmentInfo, microseconds, open_segment, write_segment

MERGE_BYTES = 1 << 30
"""The most that one merge reads, and so what it needs in memory."""


@dataclass(frozen=True)
class Merge:
    """Work for one task: the runs to merge, and the tier of the result."""

    store: str
    inputs: tuple[SegmentInfo, ...]
    tier: int
    task: int


def lane(info: SegmentInfo, tasks: int) -> int:
    """The task that owns the middle of a segment's key groups."""
    middle = (info.lo_group + info.hi_group) // 2
    # The largest t with t·1024 // tasks ≤ middle.
    return ((middle + 1) * tasks - 1) // KEY_GROUPS


def choose_merges(live: Mapping[str, Sequence[SegmentInfo]], fan_in: int, tasks: int) -> tuple[Merge, ...]:
    """The merges due now: a pure function of what is live, the same in whatever order it is listed."""
    merges: list[Merge] = []
    for store in sorted(live):
        lanes: dict[tuple[int, int], list[SegmentInfo]] = {}
        for info in sorted(live[store], key=lambda i: (i.epoch, i.path)):
            if info.bytes <= MERGE_BYTES // fan_in:
                lanes.setdefault((lane(info, tasks), info.tier), []).append(info)
        for (task, tier), runs in sorted(lanes.items(), key=lambda item: item[0]):
            if len(runs) >= fan_in:
                merges += [Merge(store, group, tier + 1, task) for group in _groups(runs) if len(group) > 1]
    return tuple(merges)


def _groups(runs: Sequence[SegmentInfo]) -> list[tuple[SegmentInfo, ...]]:
    """Neighbours together, as many as MERGE_BYTES allows: nearly always one group."""
    groups: list[list[SegmentInfo]] = [[]]
    size = 0
    for info in runs:
        size += info.bytes
        if size > MERGE_BYTES:
            groups.append([])
            size = info.bytes
        groups[-1].append(info)
    return [tuple(group) for group in groups]


def expired(info: SegmentInfo, store: Store, watermark_ms: int | None, now_us: int) -> bool:
    """Whether no row of a segment can be reached any more."""
    if store.keep_us is None or watermark_ms is None or info.max_time is None:
        passed = False
    else:
        passed = info.max_time + store.keep_us <= watermark_ms * 1000
    if store.ttl_us is None or info.max_arrived is None:
        return passed
    return passed or info.max_arrived + store.ttl_us <= now_us


def live_rows(table: pa.Table, store: Store, watermark_ms: int | None, now_us: int) -> Flags | None:
    """Which rows can still be reached; None if all can.  The same rule as `expired`, row by row."""
    alive: Flags | None = None
    if store.keep_us is not None and watermark_ms is not None and store.time_column in table.column_names:
        alive = _above(table.column(store.time_column), watermark_ms * 1000 - store.keep_us)
    if store.ttl_us is not None and ARRIVED in table.column_names:
        young = _above(table.column(ARRIVED), now_us - store.ttl_us)
        alive = young if alive is None else alive & young
    return None if alive is None or alive.all() else alive


def _above(column: Any, bound: int) -> Flags:
    times = microseconds(column)
    if times.null_count:
        times = times.fill_null(np.iinfo(np.int64).min)
    above: Flags = times.to_numpy() > bound
    return above


def merge_segments(
    state_dir: str,
    store: Store,
    merge: Merge,
    *,
    epoch: int,
    watermark_ms: int | None,
    now_us: int,
    sync: bool,
    verified_dir: str | None = None,
) -> SegmentInfo | None:
    """Merge runs into one of `merge.tier`, without the rows that have expired; None if none is left."""
    inputs = [
        open_segment(state_dir, info, verified_dir)
        for info in merge.inputs
        if not expired(info, store, watermark_ms, now_us)
    ]
    if not inputs:
        return None
    order = merge_order([segment.hashes for segment in inputs])
    names = inputs[0].table.column_names
    table = pa.concat_tables([s.table.select(names) for s in inputs], promote_options="permissive").combine_chunks()
    alive = live_rows(table, store, watermark_ms, now_us)
    if alive is not None:
        order = order[alive[order]]
    if len(order) == 0:
        return None
    hashes = np.concatenate([segment.hashes for segment in inputs])[order]
    return write_segment(state_dir, store, table.take(order), hashes, epoch=epoch, tier=merge.tier, sync=sync)
