"""A run: rows sorted by hash that can be looked up and read, wherever they lie.

`MemoryRun` is what arrived in this epoch, or a flat segment under a memory map; `deep.DeepSegment` reads compressed
blocks.  Probing and sampling see this much and no more, so a run's format is its own affair.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import NamedTuple, Protocol

import numpy as np
import pyarrow as pa

from plait.kernels import I64, U64
from plait.kernels.runs import lookup, merge_order
from plait.state.segments.columns import single, take, take_table
from plait.state.segments.other_keys import Index, called


@dataclass(slots=True)
class Meter:
    """What reading state has cost, counted where it happens."""

    filter_asked: int = 0
    """Keys that a Bloom filter was asked about."""
    filter_passed: int = 0
    filter_found: int = 0
    """Of those passed, the keys that were there: the rest were false positives."""
    blocks_read: int = 0
    """Blocks decompressed."""
    blocks_cached: int = 0
    """Blocks found in the cache."""
    block_bytes: int = 0
    """Compressed bytes of the blocks read."""
    segments_skipped: int = 0
    """Segments that a probe did not look into, because their event times are outside its window."""
    cache_hits: int = 0
    """Segments of a remote state that were on this host."""
    cache_misses: int = 0
    cache_bytes: int = 0
    """Downloaded."""
    cache_evicted: int = 0
    """Segments that had to make room."""

    def since(self, before: Meter) -> Meter:
        """What was counted after `before` was copied."""
        return Meter(**{f.name: getattr(self, f.name) - getattr(before, f.name) for f in fields(self)})

    def add(self, other: Meter) -> None:
        """Takes in what another task counted."""
        for f in fields(self):
            setattr(self, f.name, getattr(self, f.name) + getattr(other, f.name))


METER = Meter()
"""Of this process.  A Python worker runs one task at a time, so the difference over a task is the task's own."""


class Found(NamedTuple):
    """The probes that a run has rows for: probe `at[i]` has rows `low[i]` … `high[i]` − 1."""

    at: I64
    low: I64
    high: I64
    asked: int
    """Probes within the range of the run's hashes."""
    gallop: float
    """How far the search went: Σ log2(1 + run length / lookups)."""


class Run(Protocol):
    """Rows in ascending order of their hashes."""

    @property
    def hashes(self) -> U64:
        """The hashes of its rows, which are numbered from `first`."""
        ...

    @property
    def first(self) -> int:
        """The number of its first row; those before are another run's by now."""
        ...

    @property
    def width(self) -> float:
        """Bytes of a row in memory, about."""
        ...

    def find(self, probes: U64) -> Found:
        """Looks sorted probes up."""
        ...

    def announce(self, rows: I64) -> None:
        """These rows will be taken soon: whatever has to be fetched for that may be fetched already."""
        ...

    def take(self, names: Sequence[str], rows: I64) -> list[pa.Array]:
        """Columns of the rows with these numbers."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class MemoryRun:
    """A run whose columns can be addressed: in memory, or under a memory map."""

    hashes: U64
    table: pa.Table
    first: int = 0
    ends: tuple[int, int] | None = None
    """The first and the last hash, where they are known: looking costs a page of the map each."""
    indexes: Mapping[str, Index] = field(default_factory=dict)
    """By other keys."""

    @property
    def names(self) -> frozenset[str]:
        """Its columns."""
        return frozenset(self.table.column_names)

    @property
    def width(self) -> float:
        """Bytes of a row."""
        return 8.0 + float(self.table.nbytes) / max(1, len(self.hashes))

    def find(self, probes: U64) -> Found:
        """Looks sorted probes up, those within the range of the hashes."""
        if not len(self.hashes):
            return NOTHING
        begin, end = within(probes, *(self.ends or ends_of(self.hashes)))
        asked = end - begin
        if not asked:
            return NOTHING
        low, high = lookup(probes[begin:end], self.hashes)
        hit = np.flatnonzero(high > low)
        gallop = asked * math.log2(1 + len(self.hashes) / asked)
        return Found(begin + hit, self.first + low[hit], self.first + high[hit], asked, gallop)

    def announce(self, rows: I64) -> None:
        """Nothing: what is in memory is there, and the operating system reads ahead in a map."""

    def take(self, names: Sequence[str], rows: I64) -> list[pa.Array]:
        """Columns of the rows with these numbers."""
        rows = rows - self.first if self.first else rows
        return take([single(self.table.column(name)) for name in names], rows)

    def index(self, columns: Sequence[str]) -> Index | None:
        """The index by other columns, if there is one; it has the rows before `first` as well."""
        return self.indexes.get(called(columns))

    def slice(self, begin: int, end: int) -> pa.Table:
        """All columns of the rows `begin` … `end` − 1."""
        return self.table.slice(begin - self.first, end - begin)

    def between(self, begin: int, end: int) -> tuple[U64, pa.Table]:
        """The rows with hashes from `begin` to before `end`."""
        low, high = first_from(self.hashes, begin), first_from(self.hashes, end)
        return self.hashes[low:high], self.table.slice(low, high - low)

    def trimmed(self, first: int) -> MemoryRun:
        """Without the rows before number `first`."""
        skip = first - self.first
        return self if not skip else MemoryRun(self.hashes[skip:], self.table.slice(skip), first, indexes=self.indexes)


def together(pieces: Sequence[tuple[U64, pa.Table]]) -> MemoryRun:
    """Rows of several runs, each sorted by hash, as one run in memory."""
    full = [(hashes, table) for hashes, table in pieces if len(hashes)] or list(pieces[:1])
    order = merge_order([hashes for hashes, _ in full])
    names = full[0][1].column_names
    table = pa.concat_tables([table.select(names) for _, table in full], promote_options="permissive")
    return MemoryRun(np.concatenate([hashes for hashes, _ in full])[order], take_table(table.combine_chunks(), order))


def first_from(hashes: U64, value: int) -> int:
    """The place of the first hash that is not below `value`, which may be 2**64."""
    return len(hashes) if value >= 2**64 else int(np.searchsorted(hashes, np.uint64(value)))


def ends_of(hashes: U64) -> tuple[int, int]:
    """The first and the last of them."""
    return int(hashes[0]), int(hashes[-1])


def within(probes: U64, low: int, high: int) -> tuple[int, int]:
    """The range of sorted probes that lies between two hashes, these included."""
    return int(np.searchsorted(probes, np.uint64(low))), int(np.searchsorted(probes, np.uint64(high), side="right"))


_NONE = np.empty(0, np.int64)
NOTHING = Found(_NONE, _NONE, _NONE, 0, 0.0)
