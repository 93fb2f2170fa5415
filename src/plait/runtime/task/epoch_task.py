"""What every task of an epoch must know: fixed by the driver before any of them runs, and the same for all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from plait.config import KEY_GROUPS
from plait.query.plan import Plan
from plait.query.store import Filter
from plait.state.files.segment_home import SegmentHome
from plait.state.files.storage import Files
from plait.state.segments.segment import SegmentInfo
from plait.state.segments.store_build import Copy
from plait.state.segments.tiers import Merge


@dataclass(frozen=True)
class EpochTask:
    """All a task of one epoch must know."""

    plan: Plan
    epoch: int
    bounds: tuple[int, ...]
    """Task t owns the key groups from bounds[t] up to but without bounds[t + 1]."""
    home: SegmentHome
    results: Files
    verified_dir: str | None
    live: Mapping[str, tuple[SegmentInfo, ...]]
    merges: tuple[Merge, ...]
    kept: frozenset[str]
    """Queries whose rows are written; the others' are dropped in the task."""
    apart: frozenset[str]
    """Those that have files of their own: each reads its rows of an epoch once, right away (`shared_results.py`)."""
    horizons: Mapping[str, int]
    """By store the event time, in microseconds, up to which rows cannot be reached any more."""
    clock_us: int
    iterative: bool
    chunk_rows: int
    sync: bool
    memory: int = 1 << 29
    """Bytes that this task's caches and buffers may hold."""
    compress: bool = False
    """Even tier 0 is larger than memory: what is appended is written as deep segments."""
    merge_seconds: float = 0.05
    """How long this task may merge."""
    sampled: frozenset[int] = frozenset()
    """The ingest edges of which task 0 samples the new tuples, for the optimiser."""
    arriving: Mapping[int, float] = field(default_factory=dict)
    """Which share of its keys got as far as a node, in the epoch before."""
    left_out: frozenset[str] = frozenset()
    """Joins of which no rows are wanted: their query has failed, and nobody has resumed it."""
    most_rows: Mapping[str, int] = field(default_factory=dict)
    """By join the rows of an epoch beyond which its query is parked, where there is a limit."""
    most_bytes: int = 0
    """Bytes of rows that can be kept for a parked query."""
    copies: tuple[Copy, ...] = ()
    """What is copied from one store to another in this epoch."""

    passes: str | None = None
    """Where tasks tell how far they are with a first pass over state; None: nowhere."""

    @property
    def tasks(self) -> int:
        """How many there are."""
        return len(self.bounds) - 1

    @property
    def live_paths(self) -> set[str]:
        """Of all live segments."""
        return {info.path for infos in self.live.values() for info in infos}

    def groups(self, task: int) -> tuple[int, int]:
        """The key groups a task owns."""
        return self.bounds[task], self.bounds[task + 1]

    def hashes(self, task: int) -> tuple[int, int]:
        """The range of hashes of the key groups that a task owns: from one to before another."""
        low, high = self.groups(task)
        return low * (2**64 // KEY_GROUPS), high * (2**64 // KEY_GROUPS)

    def filters_of(self, store: str) -> tuple[Filter, ...]:
        """The filters whose bits rows of a store carry."""
        of = self.plan.store_by_id[store]
        found = of.filters(self.plan.input_by_relation)
        # Those of others mean nothing to a store of a group: its rows need not pass them.
        return found if not of.owner or not of.eras else tuple(f for f in found if f.id in of.eras[-1].filters)
