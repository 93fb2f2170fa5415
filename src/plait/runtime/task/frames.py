"""Joined tuples inside one task, as far as they are not multiplied out.

A `Partial` (`partial.py`) is tuples in rows.  A `Frame` groups them by key and keeps, for every distinct key, the list
of driving tuples and one list of matching rows per probed store (late materialisation, paper 004).  Both reading lists
and multiplying them out work in pieces of bounded size, also inside one hot key: what is held in memory depends on a
budget, not on how many partners a key has.

Where queries share a tree but not their filters, tuples and rows have sets of members.  A frame knows, per key, the
members that can have a result there: the intersection of the unions of its lists.  Keys and rows without any are
dropped unread; the set of a tuple is exact once it is multiplied out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from plait.kernels import U64
from plait.kernels.multiply import Product
from plait.kernels.probe import expand, gather_ranges, product_ends
from plait.kernels.runs import group_starts
from plait.kernels.sets import union_of
from plait.query.store import HASH, SET
from plait.runtime.task.judge import Judge
from plait.runtime.task.partial import Hashes, Partial, Slot
from plait.state.segments.columns import Rows, gather, take_table
from plait.state.segments.run import Run

Hits = tuple[Run, Rows, Rows, Rows]
"""A run, the keys that it has rows for, and their rows: from `low` to before `high`."""


@dataclass(frozen=True)
class Picked:
    """Rows of several runs, one by one, those of one key side by side; nothing of them has to be read yet."""

    runs: tuple[Run, ...]
    source: Rows
    """The run of each row,"""
    rows: Rows
    """and its number there."""
    width: float
    """Bytes of a row, about."""

    @classmethod
    def of(cls, counts: Rows, found: Sequence[Hits]) -> Picked:
        """The rows that are found for keys with so many matches each."""
        offset = np.cumsum(counts) - counts
        source = np.empty(int(counts.sum()), np.int64)
        rows = np.empty(len(source), np.int64)
        for number, (_, at, low, high) in enumerate(found):
            places = gather_ranges(offset[at], offset[at] + high - low)
            source[places] = number
            rows[places] = gather_ranges(low, high)
            offset[at] += high - low
        weight = sum(run.width * int((high - low).sum()) for run, _, low, high in found)
        return cls(tuple(run for run, _, _, _ in found), source, rows, weight / max(1, len(rows)))

    def picked(self, places: Rows) -> Picked:
        """Some of the rows."""
        return replace(self, source=self.source[places], rows=self.rows[places])

    def by_run(self) -> Iterator[tuple[Run, Rows, Rows]]:
        """Each run that has some of the rows: their places here, and their numbers there.  One run at least."""
        for number, run in enumerate(self.runs):
            places = np.flatnonzero(self.source == number) if len(self.runs) > 1 else np.arange(len(self.rows))
            if len(places) or (number == 0 and not len(self.rows)):
                yield run, places, self.rows[places]

    def read(self, columns: tuple[str, ...]) -> pa.Table:
        """These columns of all rows."""
        return _read(list(self.by_run()), columns, len(self.rows))


def _read(parts: Sequence[tuple[Run, Rows, Rows]], columns: tuple[str, ...], total: int) -> pa.Table:
    """Columns of rows of several runs, each at its place: parts are (run, places, numbers of its rows)."""
    # All before the first is read, so that the disk has many things to do at a time.
    for run, _, rows in parts:
        run.announce(rows)
    picked = _of_one_type([run.take(columns, rows) for run, _, rows in parts])
    return pa.table(gather(picked, [places for _, places, _ in parts], total), names=list(columns))


@dataclass
class Matches:
    """Rows of one store that match each key: `counts[g]` rows for key g.

    They are ranges of runs (`found`) until one has to be looked at by itself, then rows (`rows`), and are read (`read`,
    `table`) only when they are multiplied out, for the keys that are still alive by then.  `starts[g]` is where those
    of key g begin in `rows`, `sets` and `table`.
    """

    counts: Rows
    columns: tuple[str, ...]
    found: list[Hits] = field(default_factory=list)
    table: pa.Table | None = None
    starts: Rows | None = None
    rows: Picked | None = None
    sets: U64 | None = None
    """The members that see each row; None where all see all."""

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
        return replace(self, counts=self.counts[keys], found=found, starts=starts)

    def between(self, begin: int, end: int) -> Matches:
        """The matches of neighbouring keys."""
        found = []
        for run, at, low, high in self.found:
            a, b = np.searchsorted(at, (begin, end))
            found.append((run, at[a:b] - begin, low[a:b], high[a:b]))
        starts = None if self.starts is None else self.starts[begin:end]
        return replace(self, counts=self.counts[begin:end], found=found, starts=starts)

    def pieces(self, budget: float) -> list[Matches]:
        """The matches of the only key, in pieces that weigh at most `budget` bytes."""
        assert len(self.counts) == 1
        zero = np.zeros(1, np.int64)
        if self.starts is not None:
            step = max(1, int(budget / self._row_width))
            ranges = _steps(0, int(self.counts[0]), step)
            return [replace(self, counts=np.array([b - a]), starts=self.starts + a) for a, b in ranges]
        return [
            Matches(np.array([b - a]), self.columns, [(run, zero, np.array([a]), np.array([b]))])
            for run, at, low, high in self.found
            if len(at)
            for a, b in _steps(int(low[0]), int(high[0]), max(1, int(budget / run.width)))
        ]

    @property
    def _row_width(self) -> float:
        if self.table is not None:
            return _width(self.table)
        return 16.0 if self.rows is None else self.rows.width

    def weights(self) -> npt.NDArray[np.float64]:
        """Bytes of every key's rows, about."""
        if self.starts is not None:
            return np.asarray(self.counts * self._row_width, np.float64)
        weights = np.zeros(len(self.counts))
        for run, at, low, high in self.found:
            weights[at] += (high - low) * run.width
        return weights

    def one_by_one(self) -> Matches:
        """The same matches, as rows: none is read, each can be looked at by itself."""
        if self.starts is not None:
            return self
        return Matches(
            self.counts,
            self.columns,
            starts=np.cumsum(self.counts) - self.counts,
            rows=Picked.of(self.counts, self.found),
        )

    def owners(self) -> Rows:
        """The key of each row."""
        return np.repeat(np.arange(len(self.counts)), self.counts)

    def kept(self, keep: npt.NDArray[np.bool_], sets: U64 | None = None) -> Matches:
        """Of matches that are rows, or read, and not restricted since: those marked, with these sets."""
        counts = np.bincount(self.owners()[keep], minlength=len(self.counts)).astype(np.int64)
        places = np.flatnonzero(keep)
        return Matches(
            counts,
            self.columns,
            table=None if self.table is None else take_table(self.table, places),
            starts=np.cumsum(counts) - counts,
            rows=None if self.rows is None else self.rows.picked(places),
            sets=None if sets is None else sets[places],
        )

    def unions(self) -> U64 | None:
        """By key the members that see some of its rows; None where all see all."""
        if self.sets is None or self.starts is None:
            return None
        return union_of(self.sets, self.starts, self.counts)

    def read(self) -> tuple[pa.Table, Rows]:
        """The matching rows, those of one key side by side, and where each key's rows start."""
        if self.table is None:
            ends = np.cumsum(self.counts)
            starts, total = ends - self.counts, int(ends[-1]) if len(ends) else 0
            if self.rows is None:
                self.table = self._read_ranges(starts.copy(), total)
            else:
                if total < len(self.rows.rows):
                    # Some keys were dropped since their rows were looked at.
                    assert self.starts is not None
                    places = gather_ranges(self.starts, self.starts + self.counts)
                    self.rows = self.rows.picked(places)
                    self.sets = None if self.sets is None else self.sets[places]
                self.table = self.rows.read(self.columns)
            self.starts, self.found = starts, []
        assert self.starts is not None
        return self.table, self.starts

    def _read_ranges(self, offset: Rows, total: int) -> pa.Table:
        parts = []
        for run, at, low, high in self.found:
            parts.append((run, gather_ranges(offset[at], offset[at] + high - low), gather_ranges(low, high)))
            offset[at] += high - low
        return _read(parts, self.columns, total)


@dataclass(frozen=True)
class Frame:
    """Tuples grouped by key, with matches not yet multiplied out: slot `len(base.slots) + i` is `lists[i]`."""

    base: Partial
    hashes: Hashes
    starts: Rows
    counts: Rows
    lists: tuple[Matches, ...] = ()
    members: U64 | None = None
    """By key the members that can have a result there; None where all can, and tuples have no sets."""

    @classmethod
    def of(cls, base: Partial, grouped: bool = True) -> Frame:
        """Groups tuples by hash; ungrouped, every tuple is a key of its own."""
        bounds = group_starts(base.hashes) if grouped else np.arange(len(base.hashes) + 1, dtype=np.int64)
        starts, counts = bounds[:-1], np.diff(bounds)
        members = None if base.sets is None else union_of(base.sets, starts, counts)
        return cls(base, base.hashes[starts], starts, counts, (), members)

    def restricted(self, keys: Rows) -> Frame:
        """The frame of some keys only."""
        lists = tuple(m.restricted(keys) for m in self.lists)
        members = None if self.members is None else self.members[keys]
        return Frame(self.base, self.hashes[keys], self.starts[keys], self.counts[keys], lists, members)

    def between(self, begin: int, end: int) -> Frame:
        """The frame of neighbouring keys."""
        lists = tuple(m.between(begin, end) for m in self.lists)
        mine = slice(begin, end)
        members = None if self.members is None else self.members[mine]
        return Frame(self.base, self.hashes[mine], self.starts[mine], self.counts[mine], lists, members)

    def of_members(self, members: U64) -> Frame:
        """Without the keys at which none of these members can have a result."""
        if self.members is None:
            return self
        mine = self.members & members
        alive = mine.any(axis=1)
        frame = replace(self, members=mine)
        return frame if alive.all() else frame.restricted(np.flatnonzero(alive))

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

    def expanded(self, chunk: int, budget: int, judge: Judge | None = None) -> Iterator[Partial]:
        """All tuples that a judge lets pass, multiplied out, at most `chunk` at a time, nor more than `budget` bytes.

        Windows and sets are applied while lists are multiplied out: a tuple of nobody is not written down.
        """
        if not self.lists and judge is None and int(self.counts.sum()) == len(self.base.hashes) and self._is_exact:
            yield self.base
            return
        read = [m.read() for m in self.lists]
        starts = np.stack([self.starts, *(s for _, s in read)])
        counts = np.stack([self.counts, *(m.counts for m in self.lists)])
        ends = product_ends(counts)
        total = int(ends[-1]) if len(ends) else 0
        tables = [table for table, _ in read]
        width = sum(_width(table) for table in (*(s.table for s in self.base.slots), *tables))
        chunk = max(1, min(chunk, int(budget / width)))
        ruled = None if judge is None else judge.ruled(self.base.slots, tables, self.members is not None)
        members, rulers = self.members, () if ruled is None else ruled.rulers
        if members is None and ruled is not None and rulers:
            members = np.broadcast_to(ruled.whole, (len(self.hashes), len(ruled.whole)))
        own = (self.base.sets, *(m.sets for m in self.lists))
        lists = None if members is None else Product(starts, counts, ends, self.hashes, members, own, rulers)
        for begin in range(0, total, chunk):
            stop = min(begin + chunk, total)
            sets: U64 | None = None
            if lists is None:
                keys, picks = expand(starts, counts, ends, begin, stop)
                hashes, had = self.hashes[keys], len(keys)
            else:
                hashes, picks, sets, had = lists.expand(begin, stop)
            if ruled is not None and not ruled.makes_sets:
                sets = None
            base = [slot.picked(picks[0]) for slot in self.base.slots]
            more = [Slot(table, picks[i + 1]) for i, table in enumerate(tables)]
            partial = Partial(hashes, (*base, *more), sets)
            yield partial if judge is None or ruled is None else judge.judged(partial, ruled, had)

    @property
    def _is_exact(self) -> bool:
        """Whether the sets of the base are those of the tuples: no key has lost members since they were grouped."""
        if self.members is None or self.base.sets is None:
            return self.members is None
        return np.array_equal(self.members, union_of(self.base.sets, self.starts, self.counts))


def with_matches(frame: Frame, matches: Matches) -> Frame:
    """The keys that have matches, with these as one more list."""
    unions = matches.unions()
    if unions is not None:
        members = unions if frame.members is None else unions & frame.members
        alive = np.flatnonzero(members.any(axis=1))
        frame = replace(frame, members=members)
    else:
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
    """Travelled tuples (columns named `slot.column`, sorted by HASH, maybe SET) as a partial of that many slots."""
    split: list[dict[str, pa.ChunkedArray]] = [{} for _ in range(slots)]
    words = []
    for name in table.column_names:
        if name.startswith(SET):
            words.append(table.column(name).to_numpy())
        elif name != HASH:
            slot, _, column = name.partition(".")
            split[int(slot)][column] = table.column(name)
    tables = [pa.table(columns) if columns else pa.table({}) for columns in split]
    sets = np.stack(words, axis=1) if words else None
    return Partial(table.column(HASH).to_numpy(), tuple(Slot(t) for t in tables), sets)
