"""Rows of a run that are looked up by another key than the one the run is sorted by.

Contract.  `searched` gives, of a view, the rows in a range of its own hashes whose other key has one of some hashes: in
the order of the other key's hashes, and otherwise as the view has them.  NULL is no key.

Cost.  Every row of the range is hashed once, a few nanoseconds each where they are in memory; a compressed segment is
decompressed.  Only the rows found are sorted.  So that is for keys by which few tuples look up, and for state of which
an epoch is no small part; a store by that key costs hashing, sorting, sending, writing and merging every row, once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from plait.kernels import I64, U64
from plait.kernels.search import rows_with
from plait.query.store import Key
from plait.state.segments.columns import take
from plait.state.segments.keys import hash_key, null_rows
from plait.state.segments.run import Found, MemoryRun, first_from
from plait.state.segments.view import View

_AT_A_TIME = 1 << 18
"""Rows that are hashed together."""


@dataclass(frozen=True, slots=True, eq=False)
class Searched(View):
    """Some rows of a view, in the order of another key's hashes; they are numbered from 0."""

    by: U64
    """Their hashes by the other key, ascending."""
    numbers: I64
    """What the view calls them."""

    @property
    def hashes(self) -> U64:
        """By the other key."""
        return self.by

    @property
    def first(self) -> int:
        """The number of the first row."""
        return 0

    def find(self, probes: U64) -> Found:
        """Looks sorted probes up."""
        return MemoryRun(self.by, pa.table({})).find(probes)

    def announce(self, rows: I64) -> None:
        """The view's, row by row in its own order."""
        View.announce(self, np.sort(self.numbers[rows]))

    def take(self, names: Sequence[str], rows: I64) -> list[pa.Array]:
        """Columns of the rows with these numbers."""
        numbers = self.numbers[rows]
        if isinstance(self.run, MemoryRun):
            return View.take(self, names, numbers)
        # Blocks are read one after the other.
        order = np.argsort(numbers, kind="stable")
        back = np.empty(len(order), np.int64)
        back[order] = np.arange(len(order))
        return take(View.take(self, names, numbers[order]), back)


def searched(view: View, key: Key, probes: U64, hashes: tuple[int, int]) -> Searched:
    """The rows of a view, with own hashes from `hashes[0]` to before `hashes[1]`, that some sorted probes look for."""
    low, high = (first_from(view.hashes, value) for value in hashes)
    places: list[I64] = []
    found: list[U64] = []
    for begin in range(low, high, _AT_A_TIME) if view.run.names.issuperset(key.columns) else ():
        count = min(_AT_A_TIME, high - begin)
        rows = view.run.slice(view.first + begin, view.first + begin + count).select(list(key.columns))
        nulls = null_rows(rows, key)
        there = None if nulls is None else np.flatnonzero(~nulls)
        of_rows = hash_key(rows if there is None else rows.take(pa.array(there)), key)
        mine = rows_with(of_rows, probes)
        found.append(of_rows[mine])
        places.append(view.first + begin + (mine if there is None else there[mine]))
    by = np.concatenate(found) if found else np.empty(0, np.uint64)
    numbers = np.concatenate(places) if places else np.empty(0, np.int64)
    order = np.argsort(by, kind="stable")
    return Searched(view.run, view.sets, view.min_born, view.filters, by[order], numbers[order])
