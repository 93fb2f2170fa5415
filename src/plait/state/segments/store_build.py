"""Filling a store from another one: rows that arrived before it was there are copied, some key groups at a time.

Contract.  A *copy* takes the rows of some key groups of the source that were born before an epoch, hashes them by the
other key and writes them as segments of the new store, which may hold any key group: no row has to travel.  What is
copied is a function of the rows at rest, not of how they are cut into segments, so merges may go on beside it.

Cost.  Reads the key groups once, holds a part of them in memory, and writes what it has read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from plait.config import KEY_GROUPS
from plait.kernels import U64
from plait.query.store import ARRIVED, BORN, FOREVER, HASH, Filter, Store
from plait.state.files.segment_home import SegmentHome
from plait.state.segments.block_segment import writing_deep
from plait.state.segments.columns import take_table
from plait.state.segments.keys import hash_key, null_rows
from plait.state.segments.merged_shape import Shape, shape_of
from plait.state.segments.segment import SegmentInfo, new_run, write_segment
from plait.state.segments.segment_reader import Segment, open_segment
from plait.state.segments.tiers import live_rows

TIER = 1
"""Of the segments that a build writes: they are merged with each other before anything larger."""


@dataclass(frozen=True, slots=True)
class Copy:
    """What one epoch does of a build: the key groups from `begin` to before `end` of the source."""

    store: str
    source: str
    before: int
    begin: int
    end: int


@dataclass
class Copied:
    """What a copy has written."""

    added: list[SegmentInfo] = field(default_factory=list)
    let_go: int = -1
    """The latest birth of a row that was left out because it cannot be reached any more."""


def copied(
    home: SegmentHome,
    store: Store,
    infos: Sequence[SegmentInfo],
    groups: tuple[int, int],
    *,
    before: int,
    epoch: int,
    source_ttl_us: int | None,
    horizon_us: int | None,
    now_us: int,
    filters: tuple[Filter, ...],
    part_bytes: int,
    deep: bool,
    sync: bool,
    verified_dir: str | None = None,
    same_key: bool = False,
) -> Copied:
    """Writes the rows of these segments of the source, in some key groups and born before an epoch, into the store.

    With the `same_key` rows keep their hashes, and need not have the columns of the key.
    """
    low, high = (group * (2**64 // KEY_GROUPS) for group in groups)
    old = [info for info in infos if info.min_born < before]
    runs = [open_segment(home, info, verified_dir) for info in old]
    done = Copied()
    if not old or low == high:
        return done
    shape = shape_of(store, old, [run.names for run in runs], filters)
    run = new_run()
    parts = _parts(list(zip(old, runs, strict=True)), (low, high), part_bytes, shape, store, before, same_key)
    for tables in parts:
        table = pa.concat_tables(tables, promote_options="permissive").combine_chunks()
        if store.ttl_us is not None:
            table = _aged(table, source_ttl_us, store.ttl_us)
        alive = live_rows(table, store, horizon_us, now_us)
        if alive is not None:
            table = table.filter(pa.array(alive))
            # Not all births are told apart any more: it may have been any of them.
            done.let_go = before - 1 if horizon_us is not None else done.let_go
        wanted = shape.wanted(table)
        table = table if wanted is None else table.filter(pa.array(wanted))
        nulls = None if same_key else null_rows(table, store.key)
        table = table if nulls is None else table.filter(pa.array(~nulls))
        if not table.num_rows:
            continue
        hashes = table.column(HASH).to_numpy() if same_key else hash_key(table, store.key)
        order = np.argsort(hashes)
        names = [*shape.columns, *shape.masks, *([BORN] if shape.has_born else [])]
        rows = take_table(table.select(names), order)
        done.added.append(_written(home, store, hashes[order], rows, shape, epoch, run, deep, sync))
        # Each part spans all hashes: pieces of one run must not overlap.
        run = new_run()
    return done


def _parts(
    sources: Sequence[tuple[SegmentInfo, Segment]],
    hashes: tuple[int, int],
    part_bytes: int,
    shape: Shape,
    store: Store,
    before: int,
    same_key: bool,
) -> Iterator[list[pa.Table]]:
    """The rows to be copied, with the columns of the key or their hashes, in parts of bounded size."""
    held: list[pa.Table] = []
    size = 0
    for info, run in sources:
        first, last = (
            run.first + int(np.searchsorted(run.hashes, np.uint64(h))) if h < 2**64 else run.first + len(run.hashes)
            for h in hashes
        )
        step = max(1, int(part_bytes / max(1.0, run.width)))
        for begin in range(first, last, step):
            end = min(begin + step, last)
            rows = run.slice(begin, end)
            formed = shape.formed(info, rows, end - begin)
            if same_key:
                formed = formed.append_column(HASH, pa.array(run.hashes[begin - run.first : end - run.first]))
            for name in store.key.columns if not same_key else ():
                if name not in formed.column_names:
                    formed = formed.append_column(name, rows.column(name))
            if info.max_born >= before:
                born = (
                    rows.column(BORN).to_numpy() if BORN in rows.column_names else np.full(end - begin, info.min_born)
                )
                formed = formed.filter(pa.array(born < before))
            held.append(formed)
            size += formed.nbytes
            if size >= part_bytes:
                yield held
                held, size = [], 0
    if held:
        yield held


def _aged(table: pa.Table, from_us: int | None, to_us: int) -> pa.Table:
    """Arrivals relative to another TTL, so that rows live as long as they would have."""
    at = table.column(ARRIVED).to_numpy()
    if from_us is not None and from_us != to_us:
        at = np.where(at >= FOREVER, at, at + (from_us - to_us))
    return table.set_column(table.column_names.index(ARRIVED), ARRIVED, pa.array(at))


def _written(
    home: SegmentHome,
    store: Store,
    hashes: U64,
    table: pa.Table,
    shape: Shape,
    epoch: int,
    run: str,
    deep: bool,
    sync: bool,
) -> SegmentInfo:
    if not deep:
        how = {"epoch": epoch, "tier": TIER}
        return write_segment(home, store, table, hashes, **how, sync=sync, run=run, origin=shape.origin)
    with writing_deep(home, store, table.schema, 8 + table.nbytes / len(hashes), sync) as out:
        out.write(hashes, table)
    return out.info(epoch=epoch, tier=TIER, run=run, origin=shape.origin)
