"""A run seen as its store is today, whatever its store was when the run was written.

Rows are asked for columns by name.  Beside the columns that the run has, a view knows the births of its rows (BORN),
and that they never expire where there was no TTL (ARRIVED).  A column that the store got later is NULL: its rows are
older than the floor of every query that reads it.  What its rows' filter bits mean is for a sieve to ask (`sieve.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from plait.kernels import I64, U64
from plait.query.store import ARRIVED, BORN, FOREVER, Filter
from plait.state.segments.columns import single
from plait.state.segments.filter_sets import Sets
from plait.state.segments.run import Found, MemoryRun
from plait.state.segments.segment import SegmentInfo
from plait.state.segments.segment_reader import Segment


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """A run, and what is known of its rows beside their columns."""

    run: Segment
    sets: Sets
    min_born: int
    """The first epoch in which a row arrived: of all rows, unless they have BORN."""
    filters: Mapping[int, Filter]

    @property
    def hashes(self) -> U64:
        """The run's."""
        return self.run.hashes

    @property
    def first(self) -> int:
        """The run's."""
        return self.run.first

    @property
    def width(self) -> float:
        """The run's."""
        return self.run.width

    def find(self, probes: U64) -> Found:
        """The run's."""
        return self.run.find(probes)

    def announce(self, rows: I64) -> None:
        """The run's."""
        self.run.announce(rows)

    def take(self, names: Sequence[str], rows: I64) -> list[pa.Array]:
        """Columns of the rows with these numbers."""
        there = self.run.names
        wanted = [name for name in names if name in there]
        found = dict(zip(wanted, self.run.take(wanted, rows), strict=True))
        return [self._column(name, found, len(rows)) for name in names]

    def table(self, names: Sequence[str], rows: pa.Table, count: int) -> pa.Table:
        """These columns of a slice of the run with so many rows."""
        found = {name: single(rows.column(name)) for name in rows.column_names}
        columns = [self._column(name, found, count) for name in names]
        return pa.table(columns, names=list(names)) if names else pa.table({})

    def _column(self, name: str, found: Mapping[str, pa.Array], rows: int) -> pa.Array:
        if name in found:
            return found[name]
        if name == BORN:
            return pa.array(np.full(rows, self.min_born, np.int64))
        return pa.array(np.full(rows, FOREVER, np.int64)) if name == ARRIVED else pa.nulls(rows)


def viewed(run: Segment, info: SegmentInfo, filters: Mapping[int, Filter]) -> View:
    """A segment of a store.  One that cannot tell its rows' births apart counts as of its first."""
    return View(run, info.sets, info.min_born, filters)


def viewed_now(run: MemoryRun, sets: Sets, epoch: int, filters: Mapping[int, Filter]) -> View:
    """Rows that arrive in an epoch."""
    return View(run, sets, epoch, filters)
