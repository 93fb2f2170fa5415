"""Rows of a run that are looked up by another key than the one the run is sorted by.

Contract.  `searched` gives, of a view, the rows in a range of its own hashes whose other key has one of some hashes: in
the order of the other key's hashes, and otherwise as the view has them.  NULL is no key.

Cost.  A segment with an index by that key (`other_keys.py`) is looked up like any other, and each row found is fetched
from where it is.  Of a segment without, every row of the range is hashed, a few nanoseconds each where they are in
memory, and only the rows found are sorted: so it is with what an epoch has added, until it is merged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from plait.kernels import I64, U64
from plait.kernels.probe import gather_ranges
from plait.kernels.search import rows_with
from plait.query.store import Key
from plait.state.segments.columns import take
from plait.state.segments.other_keys import Index, hashes_by
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
    low, high = (view.first + first_from(view.hashes, value) for value in hashes)
    probes = probes[np.concatenate(([True], probes[1:] != probes[:-1]))] if len(probes) else probes
    index = view.run.index(key.columns)
    by, numbers = _by_hand(view, key, probes, low, high) if index is None else _by_index(index, probes, low, high)
    return Searched(view.run, view.sets, view.min_born, view.filters, by, numbers)


def _by_index(index: Index, probes: U64, low: int, high: int) -> tuple[U64, I64]:
    """Of the rows numbered from `low` to before `high`."""
    found = MemoryRun(index[0], pa.table({})).find(probes)
    places = gather_ranges(found.low, found.high)
    numbers = index[1][places].astype(np.int64)
    mine = (numbers >= low) & (numbers < high)
    return index[0][places[mine]], numbers[mine]


def _by_hand(view: View, key: Key, probes: U64, low: int, high: int) -> tuple[U64, I64]:
    """The same, where nothing tells but the rows."""
    places: list[I64] = []
    found: list[U64] = []
    for begin in range(low, high, _AT_A_TIME) if view.run.names.issuperset(key.columns) else ():
        hashes, nulls = hashes_by(view.run.slice(begin, min(begin + _AT_A_TIME, high)), key)
        mine = rows_with(hashes, probes)
        mine = mine if nulls is None else mine[~nulls[mine]]
        found.append(hashes[mine])
        places.append(begin + mine)
    by = np.concatenate(found) if found else np.empty(0, np.uint64)
    numbers = np.concatenate(places) if places else np.empty(0, np.int64)
    order = np.argsort(by, kind="stable")
    return by[order], numbers[order]
