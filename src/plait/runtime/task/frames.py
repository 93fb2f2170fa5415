"""Joined tuples inside one task, as far as they are not multiplied out.

A `Partial` is tuples in rows.  A `Frame` groups them by key and keeps, for every distinct key, the list of driving
tuples and one list of matching rows per probed store (late materialisation, paper 004).  Both reading lists and
multiplying them out work in pieces of bounded size, also inside one hot key: what is held in memory depends on a
budget, not on how many partners a key has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from plait.kernels.probe import expand, gather_ranges, product_ends
from plait.kernels.runs import group_starts
from plait.query.plan import HASH, SlotColumn
from plait.state.segments.columns import Rows, gather, single, take, take_table
from plait.state.segments.run import Run

Hashes = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Slot:
    """What one joined relation contributes: tuple i has row `rows[i]` of `table` (row i if `rows` is None)."""

    table: pa.Table
    rows: Rows | None = None

    def column(self, name: str) -> pa.Array:
        """The column's value in every tuple."""
        values = single(self.table.column(name))
        return values if self.rows is None else take([values], self.rows)[0]

    def columns(self, names: Sequence[str]) -> list[pa.Array]:
        """Several columns' values in every tuple."""
        values = [single(self.table.column(name)) for name in names]
        return values if self.rows is None else take(values, self.rows)

    def picked(self, rows: Rows) -> Slot:
        """The slot of the tuples `rows`."""
        return Slot(self.table, rows if self.rows is None else self.rows[rows])


@dataclass(frozen=True)
class Partial:
    """Joined tuples in rows, sorted by the hash of the hop's key."""

    hashes: Hashes
    slots: tuple[Slot, ...]

    def column(self, ref: SlotColumn) -> pa.Array:
        """A column of every tuple."""
        return self.slots[ref.slot].column(ref.column)

    def columns(self, refs: Sequence[SlotColumn]) -> list[pa.Array]:
        """Several columns of every tuple."""
        found: dict[SlotColumn, pa.Array] = {}
        for number, slot in enumerate(self.slots):
            mine = list(dict.fromkeys(ref for ref in refs if ref.slot == number))
            found.update(zip(mine, slot.columns([ref.column for ref in mine]), strict=True))
        return [found[ref] for ref in refs]

    def picked(self, rows: Rows) -> Partial:
        """The tuples `rows`, which must be ascending."""
        return Partial(self.hashes[rows], tuple(slot.picked(rows) for slot in self.slots))


Hits = tuple[Run, Rows, Rows, Rows]
"""A run, the keys that it has rows for, and their rows: from `low` to before `high`."""


@dataclass
class Matches:
    """Rows of one store that match each key: `counts[g]` rows for key g.

    Found rows are read (`read`) only when they are multiplied out, for the keys that are still alive by then.
    """

    counts: Rows
    columns: tuple[str, ...]
    found: list[Hits] = field(default_factory=list)
    table: pa.Table | None = None
    starts: Rows | None = None

    @classmethod
    def of(cls, keys: int, columns: tuple[str, ...], found: list[Hits]) -> Matches:
        """The matches that runs have for a number of keys."""
        counts = np.zeros(keys, np.int64)
        for _, at, low, high in found:
            counts[at] += high - low
        return cls(counts, columns, found)

    def restricted(self, keys: Rows) -> Matches:
        """The matches of some keys only."""
        place = np.full(len(self.counts), -1)
        place[keys] = np.arange(len(keys))
        found = []
        for run, at, low, high in self.found:
            here = np.flatnonzero(place[at] >= 0)
            found.append((run, place[at[here]], low[here], high[here]))
        starts = None if self.starts is None else self.starts[keys]
        return Matches(self.counts[keys], self.columns, found, self.table, starts)

    def between(self, begin: int, end: int) -> Matches:
        """The matches of neighbouring keys."""
        found = []
        for run, at, low, high in self.found:
            a, b = np.searchsorted(at, (begin, end))
            found.append((run, at[a:b] - begin, low[a:b], high[a:b]))
        starts = None if self.starts is None else self.starts[begin:end]
        return Matches(self.counts[begin:end], self.columns, found, self.table, starts)

    def pieces(self, budget: float) -> list[Matches]:
        """The matches of the only key, in pieces that weigh at most `budget` bytes."""
        assert len(self.counts) == 1
        zero = np.zeros(1, np.int64)
        if self.table is not None and self.starts is not None:
            step = max(1, int(budget / _width(self.table)))
            ranges = _steps(0, int(self.counts[0]), step)
            return [Matches(np.array([b - a]), self.columns, [], self.table, self.starts + a) for a, b in ranges]
        return [
            Matches(np.array([b - a]), self.columns, [(run, zero, np.array([a]), np.array([b]))])
            for run, at, low, high in self.found
            if len(at)
            for a, b in _steps(int(low[0]), int(high[0]), max(1, int(budget / run.width)))
        ]

    def weights(self) -> npt.NDArray[np.float64]:
        """Bytes of every key's rows, about."""
        weights = np.zeros(len(self.counts))
        if self.table is not None:
            weights += self.counts * _width(self.table)
        for run, at, low, high in self.found:
            weights[at] += (high - low) * run.width
        return weights

    def read(self) -> tuple[pa.Table, Rows]:
        """The matching rows, those of one key side by side, and where each key's rows start."""
        if self.table is None or self.starts is None:
            ends = np.cumsum(self.counts)
            self.starts = ends - self.counts
            places: list[Rows] = []
            picked: list[list[pa.Array]] = []
            offset = self.starts.copy()
            rows = [gather_ranges(low, high) for _, _, low, high in self.found]
            # All before the first is read, so that the disk has many things to do at a time.
            for (run, _, _, _), wanted in zip(self.found, rows, strict=True):
                run.announce(wanted)
            for (run, at, low, high), wanted in zip(self.found, rows, strict=True):
                places.append(gather_ranges(offset[at], offset[at] + high - low))
                picked.append(run.take(self.columns, wanted))
                offset[at] += high - low
            total = int(ends[-1]) if len(ends) else 0
            self.table = pa.table(gather(_of_one_type(picked), places, total), names=list(self.columns))
            self.found = []
        return self.table, self.starts

    def filtered(self, keep: npt.NDArray[np.bool_]) -> Matches:
        """Only the rows marked in `keep`, in the order of `read`."""
        table, _ = self.read()
        owners = np.repeat(np.arange(len(self.counts)), self.counts)
        counts = np.bincount(owners[keep], minlength=len(self.counts)).astype(np.int64)
        return Matches(counts, self.columns, [], take_table(table, np.flatnonzero(keep)), np.cumsum(counts) - counts)


@dataclass(frozen=True)
class Frame:
    """Tuples grouped by key, with matches not yet multiplied out: slot `len(base.slots) + i` is `lists[i]`."""

    base: Partial
    hashes: Hashes
    starts: Rows
    counts: Rows
    lists: tuple[Matches, ...] = ()

    @classmethod
    def of(cls, base: Partial, grouped: bool = True) -> Frame:
        """Groups tuples by hash; ungrouped, every tuple is a key of its own."""
        bounds = group_starts(base.hashes) if grouped else np.arange(len(base.hashes) + 1, dtype=np.int64)
        starts = bounds[:-1]
        return cls(base, base.hashes[starts], starts, np.diff(bounds))

    def restricted(self, keys: Rows) -> Frame:
        """The frame of some keys only."""
        lists = tuple(m.restricted(keys) for m in self.lists)
        return Frame(self.base, self.hashes[keys], self.starts[keys], self.counts[keys], lists)

    def between(self, begin: int, end: int) -> Frame:
        """The frame of neighbouring keys."""
        lists = tuple(m.between(begin, end) for m in self.lists)
        return Frame(self.base, self.hashes[begin:end], self.starts[begin:end], self.counts[begin:end], lists)

    def slices(self, budget: int, lists: int) -> Iterator[Frame]:
        """The frame in pieces, of which the last `lists` lists weigh at most `budget` bytes, even of one key."""
        weights = sum((m.weights() for m in self.lists[-lists:]), np.zeros(len(self.hashes))) if lists else np.zeros(0)
        if weights.sum() <= budget:
            yield self
            return
        ends = np.cumsum(weights)
        begin, before = 0, 0.0
        while begin < len(ends):
            end = max(begin + 1, int(np.searchsorted(ends, before + budget, side="right")))
            piece = self.between(begin, end)
            if ends[end - 1] - before > budget:
                yield from piece._of_one_key(budget, lists)
            else:
                yield piece
            begin, before = end, float(ends[end - 1])

    def _of_one_key(self, budget: int, lists: int) -> Iterator[Frame]:
        kept = self.lists[: len(self.lists) - lists]
        for pieces in product(*(m.pieces(budget / lists) for m in self.lists[-lists:])):
            # Copies: what one piece reads is not held while the next is at work.
            yield replace(self, lists=(*kept, *(replace(piece) for piece in pieces)))

    def expanded(self, chunk: int, budget: int) -> Iterator[Partial]:
        """All tuples, multiplied out, at most `chunk` at a time, nor more than `budget` bytes of them."""
        if not self.lists and int(self.counts.sum()) == len(self.base.hashes):
            yield self.base
            return
        read = [m.read() for m in self.lists]
        starts = np.stack([self.starts, *(s for _, s in read)])
        counts = np.stack([self.counts, *(m.counts for m in self.lists)])
        ends = product_ends(counts)
        total = int(ends[-1]) if len(ends) else 0
        width = sum(_width(table) for table in (*(s.table for s in self.base.slots), *(t for t, _ in read)))
        chunk = max(1, min(chunk, int(budget / width)))
        for begin in range(0, total, chunk):
            keys, picks = expand(starts, counts, ends, begin, min(begin + chunk, total))
            base = [slot.picked(picks[0]) for slot in self.base.slots]
            more = [Slot(table, picks[i + 1]) for i, (table, _) in enumerate(read)]
            yield Partial(self.hashes[keys], (*base, *more))


def with_matches(frame: Frame, matches: Matches) -> Frame:
    """The keys that have matches, with these as one more list."""
    alive = np.flatnonzero(matches.counts)
    if len(alive) < len(matches.counts):
        frame, matches = frame.restricted(alive), matches.restricted(alive)
    return replace(frame, lists=(*frame.lists, matches))


def _of_one_type(picked: list[list[pa.Array]]) -> list[list[pa.Array]]:
    """A column that some runs do not have is NULL there: in the type that it has in the others."""
    if not any(pa.types.is_null(array.type) for arrays in picked for array in arrays):
        return picked
    kinds = [{a.type for a in column if not pa.types.is_null(a.type)} for column in zip(*picked, strict=True)]
    return [[a.cast(next(iter(k), a.type)) for a, k in zip(arrays, kinds, strict=True)] for arrays in picked]


def _width(table: pa.Table) -> float:
    """Bytes of a row."""
    return 8.0 + float(table.nbytes) / float(max(1, table.num_rows))


def _steps(begin: int, end: int, step: int) -> list[tuple[int, int]]:
    return [(at, min(at + step, end)) for at in range(begin, end, step)]


def arrived(table: pa.Table, slots: int) -> Partial:
    """Travelled tuples (columns named `slot.column`, sorted by HASH) as a partial of that many slots."""
    split: list[dict[str, pa.ChunkedArray]] = [{} for _ in range(slots)]
    for name in table.column_names:
        if name != HASH:
            slot, _, column = name.partition(".")
            split[int(slot)][column] = table.column(name)
    tables = [pa.table(columns) if columns else pa.table({}) for columns in split]
    return Partial(table.column(HASH).to_numpy(), tuple(Slot(t) for t in tables))
