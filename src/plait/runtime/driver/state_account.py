"""What state costs, epoch by epoch: amplification, filters, blocks — and the files that merges have done with.

A file that a committed epoch has removed is of no use to the engine.  It is kept a while for whoever reads the
checkpoint meanwhile (`plait.read_state`, a backup), but only as long as all of those together stay below a quarter of
the state; the rest goes at once, oldest first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from plait.query.progress import Amplification, BlockReads, CacheReads, FilterReads, PendingMerge, StateReport
from plait.runtime.driver.collect import Collected
from plait.state.files.segment_home import SegmentHome
from plait.state.log.manifest import LiveState
from plait.state.segments.segment import SegmentInfo
from plait.state.segments.tiers import Merge, runs_per_lookup

_KEPT = 0.25
"""Of the state's size: how much may lie around that merges have replaced."""


@dataclass
class StateAccount:
    """What has been written since this engine started, and what lies around."""

    appended: int = 0
    """Bytes that epochs have appended."""
    merged: int = 0
    """Bytes that merges have written."""
    retired: deque[SegmentInfo] = field(default_factory=deque)
    """Segments that merges have replaced and that are still on disk, oldest first."""
    retired_bytes: int = 0

    def committed(self, before: LiveState, after: LiveState) -> None:
        """Takes note of the files that an epoch has removed."""
        alive = {info.path for infos in after.segments.values() for info in infos}
        for info in (info for infos in before.segments.values() for info in infos):
            if info.path not in alive:
                self.retired.append(info)
                self.retired_bytes += info.bytes

    def shrink(self, home: SegmentHome, live: LiveState) -> None:
        """Deletes removed files, down to what may be kept."""
        allowed = _KEPT * sum(info.live_bytes for infos in live.segments.values() for info in infos)
        while self.retired and self.retired_bytes > allowed:
            info = self.retired.popleft()
            self.retired_bytes -= info.bytes
            home.delete(info.path)

    def report(
        self, live: LiveState, account: Collected, epoch: int, merges: Sequence[Merge], remote: bool = False
    ) -> StateReport:
        """What state costs after an epoch, which is taken into account."""
        appended = sum(info.bytes for info in account.added if info.epoch == epoch and info.tier == 0)
        self.appended += appended
        self.merged += account.merged_bytes
        infos = [info for found in live.segments.values() for info in found]
        rows = sum(info.rows for info in infos)
        state = sum(info.live_bytes for info in infos)
        runs = {store: runs_per_lookup(found) for store, found in sorted(live.segments.items())}
        reads = account.reads
        read = sum(runs[store] * sum(i.rows for i in found) for store, found in live.segments.items())
        return StateReport(
            appended_bytes=appended,
            merged_bytes=account.merged_bytes,
            pending_bytes=sum(merge.bytes for merge in merges),
            merges=[PendingMerge(m.store, m.task, m.tier, m.bytes) for m in merges],
            runs=runs,
            deep_bytes=sum(info.live_bytes for info in infos if info.deep),
            amplification=Amplification(
                write=(self.appended + self.merged) / self.appended if self.appended else 1.0,
                read=read / rows if rows else 0.0,
                space=(sum(info.bytes for info in infos) + self.retired_bytes) / state if state else 1.0,
            ),
            skipped=reads.segments_skipped,
            filter=FilterReads(reads.filter_asked, reads.filter_passed, reads.filter_found),
            blocks=BlockReads(reads.blocks_read, reads.blocks_cached, reads.block_bytes),
            cache=CacheReads(reads.cache_hits, reads.cache_misses, reads.cache_bytes, reads.cache_evicted)
            if remote
            else None,
        )
