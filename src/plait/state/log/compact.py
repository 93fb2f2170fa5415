"""Compaction by hand: every store becomes one run, and what has expired goes.  Offline: it holds the checkpoint's lock.

Contract.  Store by store: merge, commit an amendment of the last manifest, delete what was replaced.  A crash in
between leaves the stores that are done compacted and the others as they were.  Rows, results and receipts are not
touched, and an engine that starts afterwards goes on as if nothing had happened.

A checkpoint behind a URI has no lock, only the fence.  A driver that was about to commit may still do so; then
`ManifestLog.live` refuses the amendment, and what it has replaced is still there: garbage collection deletes it later.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from plait.errors import CheckpointError
from plait.query.layout import Layout
from plait.query.store import NO_KEY, Filter, Store
from plait.state.log.checkpoint import Checkpoint
from plait.state.log.manifest import LiveState, Manifest, Retention
from plait.state.segments.segment import SegmentInfo, new_run
from plait.state.segments.tiers import Merge, merge_some


@dataclass(frozen=True)
class Compacted:
    """What compaction made of one store."""

    store: str
    segments: tuple[int, int]
    """Before and after; likewise below."""
    rows: tuple[int, int]
    bytes: tuple[int, int]


def compact(checkpoint: Checkpoint, now_us: int, compress: bool, layout: Layout | None = None) -> Iterator[Compacted]:
    """Compacts an open checkpoint, one store at a time.

    With its layout, rows and bits that serve nobody any more go as well.
    """
    live = checkpoint.log.live()
    if live.epoch < 0:
        raise CheckpointError("NO_STATE", f"{checkpoint.path} has no committed epoch", "run the engine first")
    if live.legacy and layout is not None:
        raise CheckpointError(
            "UPGRADE_FIRST",
            f"{checkpoint.path} was written by an earlier release, and is not upgraded yet",
            "start the engine on it once, and let it commit an epoch",
        )
    now_us = max(now_us, live.clock_us)
    for store in sorted(live.segments):
        before = live.segments[store]
        kept = live.retention.get(store, Retention(None, None, None))
        of, filters = _store(layout, store, kept)
        if of is None:
            # Nobody uses it: the next epoch drops it.
            continue
        tier = max(1, *(info.tier for info in before))
        if len({info.run for info in before}) == 1 and all(i.deep == compress and not i.first for i in before):
            continue
        merge = Merge(store, before, tier, new_run(), 0, compress)
        done = merge_some(
            checkpoint.home,
            of,
            merge,
            epoch=live.epoch,
            horizon_us=kept.horizon_us,
            now_us=now_us,
            sync=checkpoint.config.sync,
            filters=filters,
        )
        live = _commit(checkpoint, live, store, tuple(done.added), done.let_go)
        for path in done.removed if checkpoint.files.local else ():
            checkpoint.home.delete(path)
        after = live.segments.get(store, ())
        yield Compacted(store, *(_both(before, after, count) for count in ("segments", "rows", "bytes")))


def _store(layout: Layout | None, name: str, kept: Retention) -> tuple[Store | None, tuple[Filter, ...] | None]:
    """What merging needs of a store, and the filters in use."""
    if layout is None:
        return Store(name, "", NO_KEY, (), False, kept.time_column, None, kept.ttl_us), None
    found = layout.store_by_id.get(name)
    return found, None if found is None else found.filters(layout.input_by_relation)


def _both(before: tuple[SegmentInfo, ...], after: tuple[SegmentInfo, ...], what: str) -> tuple[int, int]:
    def count(infos: tuple[SegmentInfo, ...]) -> int:
        return len(infos) if what == "segments" else sum(getattr(info, what) for info in infos)

    return count(before), count(after)


def _commit(
    checkpoint: Checkpoint, live: LiveState, store: str, infos: tuple[SegmentInfo, ...], let_go: int
) -> LiveState:
    segments = {**live.segments, store: infos}
    last = checkpoint.log.read(live.epoch)
    assert last is not None, "the last manifest was there a moment ago"
    amended: Manifest = replace(
        last,
        token=checkpoint.token,
        added=(),
        removed=(),
        snapshot=tuple(info for found in segments.values() for info in found),
        let_go={**live.let_go, store: max(let_go, live.let_go.get(store, -1))},
    )
    checkpoint.check_fence()
    checkpoint.log.amend(amended)
    return live.after(amended)
