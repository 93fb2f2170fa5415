"""Tiers: how many runs a store has, and which rows in them can still be reached.

Contract.  Every epoch appends runs of tier 0.  A *lane* is the share of a store that one task owns; when a lane has
`fan_in` runs of a tier, all of them are merged into one of the next (tiered compaction; paper 002's LSM).  A merge goes
on from epoch to epoch: each takes as much of it as its time allows, from the lowest hashes up.  What is merged lies
in new segments of the next tier's run; what is not is still in the old ones, which are trimmed from the front
(`SegmentInfo.first`).  Every row is in exactly one live segment at any commit.

Invariant.  With merges keeping up, a lane has at most fan_in − 1 runs of each tier that rest, and fan_in that are
being merged: O(fan_in · log n) runs after n epochs.  If they do not keep up, runs pile up, probing takes longer, and
so does the time that merging may take: it catches up by itself.

Cost.  A row is rewritten once per tier, O(log n) times at most.  A merge holds a part in memory, some megabytes,
however large the runs are.  Space: a merged segment is given up as soon as all of it is taken over, so a merge of
hundreds of gigabytes needs some megabytes of extra space.  Expired rows are dropped while merging, expired segments
without being read; a run spans at most about the time its rows live, so at most about as many expired rows are
kept as live ones.

Rows are unreachable when their event time is not above the store's *horizon*, or when their TTL is over.  The horizon
follows from the watermarks of all queries that use the store.  A row without event time is in no window, so it is
dropped with the rest.  Rows that pass no filter in use any more are dropped as well, and so are their bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa

from plait.config import KEY_GROUPS
from plait.kernels import U64, Flags
from plait.kernels.hashing import key_group
from plait.kernels.runs import group_starts, merge_order
from plait.query.store import ARRIVED, BORN, Filter, Store
from plait.state.files.segment_home import SegmentHome
from plait.state.segments.block_segment import writing_deep
from plait.state.segments.columns import take_table
from plait.state.segments.merged_shape import Shape, shape_of
from plait.state.segments.segment import SegmentInfo, microseconds, write_segment
from plait.state.segments.segment_reader import Segment, open_segment

SEGMENT_BYTES = 32 << 20
"""Where a merge ends one segment and begins the next."""

PART_BYTES = 8 << 20
"""Rows that a merge takes in at a time."""


@dataclass(frozen=True)
class Merge:
    """Work for one task: the segments to merge, and the run and tier of the result."""

    store: str
    inputs: tuple[SegmentInfo, ...]
    tier: int
    into: str
    task: int
    deep: bool = False

    @property
    def bytes(self) -> int:
        """What is left to merge."""
        return sum(info.live_bytes for info in self.inputs)


def lane(infos: Iterable[SegmentInfo], tasks: int) -> int:
    """The task that owns the middle of a run's key groups."""
    groups = [(info.lo_group, info.hi_group) for info in infos]
    middle = (min(low for low, _ in groups) + max(high for _, high in groups)) // 2
    # The largest t with t·1024 // tasks ≤ middle.
    return ((middle + 1) * tasks - 1) // KEY_GROUPS


def state_bytes(live: Mapping[str, Sequence[SegmentInfo]]) -> int:
    """Of all rows that are live."""
    return sum(info.live_bytes for infos in live.values() for info in infos)


def choose_merges(
    live: Mapping[str, Sequence[SegmentInfo]], fan_in: int, tasks: int, compress_above: float = float("inf")
) -> tuple[Merge, ...]:
    """The merges to work on now, those of the lowest tiers first: what was begun goes on, what is due begins.

    A pure function of what is live, the same in whatever order it is listed.
    """
    deep = state_bytes(live) > compress_above
    merges: list[Merge] = []
    for store in sorted(live):
        for inputs in [*_begun(live[store]), *_due(live[store], fan_in, tasks)]:
            into = inputs[0].into or _name(inputs)
            merges.append(Merge(store, inputs, inputs[0].tier + 1, into, lane(inputs, tasks), deep))
    return tuple(sorted(merges, key=lambda m: (m.tier, m.inputs[0].epoch, m.store, m.task)))


def _begun(infos: Sequence[SegmentInfo]) -> list[tuple[SegmentInfo, ...]]:
    going: dict[str, list[SegmentInfo]] = {}
    for info in sorted(infos, key=_age):
        if info.into is not None:
            going.setdefault(info.into, []).append(info)
    return [tuple(inputs) for inputs in going.values()]


def _due(infos: Sequence[SegmentInfo], fan_in: int, tasks: int) -> list[tuple[SegmentInfo, ...]]:
    growing = {info.into for info in infos}
    runs: dict[str, list[SegmentInfo]] = {}
    for info in sorted(infos, key=_age):
        if info.into is None and info.run not in growing:
            runs.setdefault(info.run, []).append(info)
    lanes: dict[tuple[int, int], list[list[SegmentInfo]]] = {}
    for pieces in runs.values():
        lanes.setdefault((lane(pieces, tasks), pieces[0].tier), []).append(pieces)
    return [tuple(i for pieces in found for i in pieces) for found in lanes.values() if len(found) >= fan_in]


def _age(info: SegmentInfo) -> tuple[int, str]:
    return info.epoch, info.path


def _name(inputs: Sequence[SegmentInfo]) -> str:
    """The run that these become: the same whoever asks."""
    return hashlib.sha256(" ".join(sorted(i.run for i in inputs)).encode()).hexdigest()[:16]


def runs_per_lookup(infos: Iterable[SegmentInfo]) -> float:
    """Read amplification: the runs that a lookup goes through, averaged over the key groups that have any."""
    covering = np.zeros(KEY_GROUPS, np.int64)
    runs: dict[str, list[SegmentInfo]] = {}
    for info in infos:
        runs.setdefault(info.run, []).append(info)
    for pieces in runs.values():
        covered = np.zeros(KEY_GROUPS, np.bool_)
        for info in pieces:
            covered[info.lo_group : info.hi_group] = True
        covering += covered
    return float(covering[covering > 0].mean()) if covering.any() else 0.0


def expired(info: SegmentInfo, store: Store, horizon_us: int | None, now_us: int) -> bool:
    """Whether no row of a segment can be reached any more."""
    passed = horizon_us is not None and info.max_time is not None and info.max_time <= horizon_us
    if store.ttl_us is None or info.max_arrived is None:
        return passed
    return passed or info.max_arrived + store.ttl_us <= now_us


def let_go(info: SegmentInfo, horizon_us: int | None) -> int:
    """The latest birth of a row that a query with a longer window misses if a segment is dropped; −1 if there is none.

    What a TTL ends is over for every query.
    """
    return info.max_born if horizon_us is not None and (info.max_time or horizon_us + 1) <= horizon_us else -1


def live_rows(table: pa.Table, store: Store, horizon_us: int | None, now_us: int) -> Flags | None:
    """Which rows can still be reached; None if all can.  The same rule as `expired`, row by row."""
    alive: Flags | None = None
    if horizon_us is not None and store.time_column in table.column_names:
        alive = _above(table.column(store.time_column), horizon_us)
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


@dataclass
class Merged:
    """What one epoch has done of a merge."""

    added: list[SegmentInfo] = field(default_factory=list)
    """New segments, and old ones that have lost rows at the front."""
    removed: list[str] = field(default_factory=list)
    written: int = 0
    """Bytes."""
    let_go: int = -1
    """The latest birth of a row that was dropped because it cannot be reached any more."""


@dataclass
class _Source:
    """An input, and how far it is merged: row `at` is the next."""

    info: SegmentInfo
    run: Segment
    at: int
    end: int

    def hash(self, row: int) -> int:
        return int(self.run.hashes[row - self.run.first])

    def below(self, cut: int | None, most: int) -> int:
        """The first row from `at` on with a hash not below `cut`, which is at most `most` rows away."""
        if cut is None:
            return self.end
        begin = self.at - self.run.first
        return self.at + int(np.searchsorted(self.run.hashes[begin : begin + most + 1], np.uint64(cut)))


def merge_some(
    home: SegmentHome,
    store: Store,
    merge: Merge,
    *,
    epoch: int,
    horizon_us: int | None,
    now_us: int,
    sync: bool,
    verified_dir: str | None = None,
    part_bytes: int = PART_BYTES,
    more: Callable[[], bool] = lambda: True,
    filters: tuple[Filter, ...] | None = None,
) -> Merged:
    """Goes on with a merge as long as there are rows and `more()` says so, without the rows that have expired.

    At least one part is merged.  `more` is asked between parts.  `filters` are those in use: rows that pass none of
    them are dropped.  Without it, columns and query sets stay what they are in the first segment.
    """
    done = Merged()
    sources: list[_Source] = []
    for info in merge.inputs:
        if expired(info, store, horizon_us, now_us):
            done.removed.append(info.path)
            done.let_go = max(done.let_go, let_go(info, horizon_us))
        else:
            run = open_segment(home, info, verified_dir)
            sources.append(_Source(info, run, info.first, info.first + info.rows))
    shape = shape_of(store, [s.info for s in sources], [s.run.names for s in sources], filters, horizon_us)

    def alive(table: pa.Table) -> Flags | None:
        return live_rows(table, store, horizon_us, now_us)

    parts = _parts(_by_run(sources), shape, alive, part_bytes, more, done)
    while (segment := _write(home, store, merge, shape, parts, epoch, sync)) is not None:
        done.added.append(segment)
        done.written += segment.bytes
    for source in sources:
        done.removed.append(source.info.path)
        if source.at < source.end:
            done.added.append(_trimmed(source, merge.into))
    return done


def _trimmed(source: _Source, into: str) -> SegmentInfo:
    info = source.info
    taken = source.run.hashes[: source.at - info.first]
    return replace(
        info,
        first=source.at,
        rows=source.end - source.at,
        keys=info.keys - (len(group_starts(taken)) - 1),
        lo_group=int(key_group(np.array([source.hash(source.at)], np.uint64))[0]),
        into=into,
    )


_Part = tuple[U64, pa.Table, bool]
"""Sorted hashes, their rows (never none), and whether the next part begins with another hash."""


def _by_run(sources: Sequence[_Source]) -> list[list[_Source]]:
    """The segments of each run in hash order: no more than the first of them has rows to give."""
    runs: dict[str, list[_Source]] = {}
    for source in sources:
        runs.setdefault(source.info.run, []).append(source)
    return [sorted(pieces, key=lambda s: s.hash(s.at)) for pieces in runs.values()]


def _parts(
    runs: list[list[_Source]],
    shape: Shape,
    alive: Callable[[pa.Table], Flags | None],
    part_bytes: int,
    more: Callable[[], bool],
    done: Merged,
) -> Iterator[_Part]:
    """The merged rows from the lowest hash up.  When a part is asked for, those before are done with."""
    begun = False
    while runs := [left for pieces in runs if (left := [s for s in pieces if s.at < s.end])]:
        if begun and not more():
            return
        begun = True
        heads = [pieces[0] for pieces in runs]
        counts = [sum(s.end - s.at for s in pieces) for pieces in runs]
        width = sum(s.run.width * n for s, n in zip(heads, counts, strict=True)) / sum(counts)
        rows = max(64, int(part_bytes / width))
        # Each run gives its share of rows; the hash that the first of them reaches is where all are cut.
        quotas = [max(16, rows * n // sum(counts)) for n in counts]
        reached = [_reached(pieces, quota) for pieces, quota in zip(runs, quotas, strict=True)]
        cut = min((value for value in reached if value is not None), default=None)
        lowest = min(s.hash(s.at) for s in heads)
        if cut is None or cut > lowest:
            ranges = [(s, s.at, s.below(cut, quota)) for s, quota in zip(heads, quotas, strict=True)]
            yield from _merged(ranges, shape, alive, True, done)
        else:
            yield from _one_key([s for s in heads if s.hash(s.at) == lowest], lowest, rows, shape, alive, done)


def _reached(pieces: Sequence[_Source], quota: int) -> int | None:
    """The first hash that a run does not give: behind its quota, or in its next segment; None if it gives all."""
    head = pieces[0]
    if head.at + quota < head.end:
        return head.hash(head.at + quota)
    return pieces[1].hash(pieces[1].at) if len(pieces) > 1 else None


def _one_key(
    sources: Sequence[_Source],
    value: int,
    rows: int,
    shape: Shape,
    alive: Callable[[pa.Table], Flags | None],
    done: Merged,
) -> Iterator[_Part]:
    """The rows of one hash that are more than a part takes: piece by piece, whatever their order."""
    for source in sources:
        begin = source.at - source.run.first
        stop = source.at + int(np.searchsorted(source.run.hashes[begin:], np.uint64(value), side="right"))
        while source.at < stop:
            last = source is sources[-1] and source.at + rows >= stop
            yield from _merged([(source, source.at, min(source.at + rows, stop))], shape, alive, last, done)


def _merged(
    ranges: Sequence[tuple[_Source, int, int]],
    shape: Shape,
    alive: Callable[[pa.Table], Flags | None],
    whole: bool,
    done: Merged,
) -> Iterator[_Part]:
    """The rows of some ranges as one part, none if nothing is left of them; the sources move on."""
    ranges = [(s, a, b) for s, a, b in ranges if a < b]
    runs = [s.run.hashes[a - s.run.first : b - s.run.first] for s, a, b in ranges]
    tables = [shape.formed(s.info, s.run.slice(a, b), b - a) for s, a, b in ranges]
    order = merge_order(runs)
    table = pa.concat_tables(tables, promote_options="permissive")
    keep = alive(table)
    if keep is not None:
        births = [np.full(b - a, s.info.max_born) for s, a, b in ranges]
        born = table.column(BORN).to_numpy() if BORN in table.column_names else np.concatenate(births)
        if shape.horizon_us is not None:
            done.let_go = max(done.let_go, int(born[~keep].max()))
        order = order[keep[order]]
    wanted = shape.wanted(table)
    if wanted is not None:
        order = order[wanted[order]]
    for source, _, end in ranges:
        source.at = end
    hashes = np.concatenate(runs)[order]
    if len(order):
        yield hashes, take_table(table.combine_chunks(), order), whole


def _write(
    home: SegmentHome, store: Store, merge: Merge, shape: Shape, parts: Iterator[_Part], epoch: int, sync: bool
) -> SegmentInfo | None:
    """One segment of the result, of as many parts as it takes; None if there are none left."""
    part = next(parts, None)
    if part is None:
        return None
    hashes, table, whole = part
    if merge.deep:
        width = 8 + table.nbytes / len(hashes)
        with writing_deep(home, store, table.schema, width, sync) as out:
            out.write(hashes, table)
            while (not whole or out.bytes < SEGMENT_BYTES) and (part := next(parts, None)) is not None:
                hashes, table, whole = part
                out.write(hashes, table)
        return out.info(epoch=epoch, tier=merge.tier, run=merge.into, origin=shape.origin)
    taken = [(hashes, table)]
    size = hashes.nbytes + table.nbytes
    while (not whole or size < SEGMENT_BYTES) and (part := next(parts, None)) is not None:
        hashes, table, whole = part
        taken.append((hashes, table))
        size += hashes.nbytes + table.nbytes
    hashes = np.concatenate([part[0] for part in taken])
    table = pa.concat_tables([part[1] for part in taken], promote_options="permissive")
    how = {"epoch": epoch, "tier": merge.tier}
    return write_segment(home, store, table, hashes, **how, sync=sync, run=merge.into, origin=shape.origin)
