"""Probing, hop by hop, inside one task: joined tuples in, results and outgoing buckets out.

Between probes on one key nothing is multiplied out: a `Frame` keeps, for every distinct key, the list of driving
tuples and one list of matching rows per probed store (late materialisation, paper 004).  A key without a match in
any store disappears before a single row is read.  Lists are multiplied out once: when a result is complete, when
tuples must travel, when a condition has to see whole tuples — or after every probe with `probe="iterative"`.
Both reading lists and multiplying them out work in pieces of bounded size, also inside one hot key: what a probe
holds in memory depends on `budget`, not on how many partners a key has.

Cost: a probe of g keys into a run of r rows is O(g log(r/g)) with reads going forward only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from plait.kernels.probe import expand, gather_ranges, product_ends
from plait.kernels.runs import group_starts
from plait.query.expr import ColumnRef, columns_of
from plait.query.observed import EdgeCount
from plait.query.plan import ARRIVED, HASH, MASK, Emit, Key, Node, Plan, SlotColumn, Step, Store
from plait.runtime.evaluate import holds
from plait.state.columns import Rows, gather, single, take, take_table
from plait.state.keys import hash_key, homogeneous, null_rows, same_keys
from plait.state.run import Run
from plait.state.segment import microseconds

Hashes = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Slot:
    """What one joined relation contributes: tuple i has row `rows[i]` of `table` (row i if `rows` is None)."""

    table: pa.Table
    rows: Rows | None = None

    def column(self, name: str) -> pa.Array:
        """The column's value in every tuple."""
        values = single(self.table.column(name))
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

    def picked(self, rows: Rows) -> Partial:
        """The tuples `rows`, which must be ascending."""
        return Partial(self.hashes[rows], tuple(slot.picked(rows) for slot in self.slots))


Span = tuple[int | None, int | None]
"""Event times in microseconds, both ends included; None is unbounded."""

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
            arrays = [gather([part[i] for part in picked], places, total) for i in range(len(self.columns))]
            self.table = pa.table(arrays, names=list(self.columns))
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


class _Distinct:
    """Counts keys that come sorted, in pieces: one that goes on in the next piece is one key all the same."""

    def __init__(self) -> None:
        self.last: np.uint64 | None = None

    def new(self, hashes: Hashes) -> int:
        if not len(hashes):
            return 0
        again = self.last is not None and bool(hashes[0] == self.last)
        self.last = hashes[-1]
        return len(hashes) - int(again)


def _alive(frame: Frame, matches: Matches) -> Frame:
    """The keys that have matches, with these as one more list."""
    alive = np.flatnonzero(matches.counts)
    if len(alive) < len(matches.counts):
        frame, matches = frame.restricted(alive), matches.restricted(alive)
    return replace(frame, lists=(*frame.lists, matches))


def _zone(step: Step, frame: Frame) -> Span:
    """The event times that stored rows can have, to be in the window of any of the frame's tuples."""
    if step.zone is None:
        return None, None
    by = step.zone.by
    if by.slot >= len(frame.base.slots):
        # One of the lists, whose rows are not read yet.
        return None, None
    found = pc.min_max(microseconds(frame.base.column(by))).as_py()
    if found["min"] is None:
        # A tuple without event time is in no window.
        return 1, 0
    lower, upper = step.zone.lower_us, step.zone.upper_us
    return None if lower is None else found["min"] + lower, None if upper is None else found["max"] + upper


def _width(table: pa.Table) -> float:
    """Bytes of a row."""
    return 8.0 + float(table.nbytes) / float(max(1, table.num_rows))


def _steps(begin: int, end: int, step: int) -> list[tuple[int, int]]:
    return [(at, min(at + step, end)) for at in range(begin, end, step)]


@dataclass
class Prober:
    """Walks the probe trees of one hop.  `runs`, `ship` and `emit` are what the task gives it to work with."""

    plan: Plan
    iterative: bool
    chunk: int
    budget: int
    """Bytes that the rows in hand may weigh, at each depth of the tree."""
    now_us: int
    runs: Callable[[Step, Span], Sequence[Run]]
    ship: Callable[[Node, pa.Table], None]
    emit: Callable[[Emit, Partial], None]
    counts: dict[int, EdgeCount] = field(default_factory=dict)

    def visit(self, node: Node, frame: Frame) -> None:
        """Probes `node`'s store with the frame's keys and follows the tree from there."""
        count = self.counts.setdefault(node.id, EdgeCount())
        matches = self._look_up(node, frame, count)
        count.lookups += len(frame.hashes)
        frame = _alive(frame, matches)
        if not len(frame.hashes):
            return
        step, store = node.step, self.plan.store_by_id[node.step.store]
        if step.filter is None and step.exact and store.ttl_us is None:
            self._go_on(node, frame, count, _Distinct(), _Distinct())
            return
        hit, alive = _Distinct(), _Distinct()
        for piece in frame.slices(self.budget, 1):
            begun = time.perf_counter_ns()
            *lists, hits = piece.lists
            visible = hits.filtered(self._visible(step, store, node, piece, hits))
            piece = _alive(replace(piece, lists=tuple(lists)), visible)
            count.match_ns += time.perf_counter_ns() - begun
            if len(piece.hashes):
                self._go_on(node, piece, count, hit, alive)

    def _go_on(self, node: Node, frame: Frame, count: EdgeCount, hit: _Distinct, alive: _Distinct) -> None:
        """With the keys that found rows, which are the frame's last list."""
        hits = hit.new(frame.hashes)
        count.hits += hits
        count.rows += int(frame.lists[-1].counts.sum())
        if not node.step.checks and not self.iterative:
            count.alive += hits
            self._follow(node, frame, count)
            return
        for partial in self._expanded(frame, count):
            begun = time.perf_counter_ns()
            passing = self._passing(node.step, partial)
            grouped = self.frame(node, passing)
            count.passed += len(passing.hashes)
            count.alive += alive.new(grouped.hashes)
            count.match_ns += time.perf_counter_ns() - begun
            if len(grouped.hashes):
                self._follow(node, grouped, count)

    def frame(self, node: Node, base: Partial) -> Frame:
        """Groups tuples by the hop's key, unless two different keys fell on one hash."""
        if node.step.exact:
            return Frame.of(base)
        table, key = self._probe_key(node, base)
        return Frame.of(base, grouped=homogeneous(table, base.hashes, key))

    def _expanded(self, frame: Frame, count: EdgeCount) -> Iterator[Partial]:
        """The frame multiplied out, in chunks, counted and timed as work of the probe it follows."""
        pieces = frame.slices(self.budget, len(frame.lists))
        chunks = (partial for piece in pieces for partial in piece.expanded(self.chunk, self.budget))
        while True:
            begun = time.perf_counter_ns()
            partial = next(chunks, None)
            count.match_ns += time.perf_counter_ns() - begun
            if partial is None:
                return
            if frame.lists:
                count.tuples += len(partial.hashes)
            yield partial

    def _follow(self, node: Node, frame: Frame, count: EdgeCount) -> None:
        for emit in node.emits:
            for partial in self._expanded(frame, count):
                self.emit(emit, partial)
        for child in node.children:
            if child.step.hop == node.step.hop:
                self.visit(child, frame)
            else:
                for partial in self._expanded(frame, count):
                    begun = time.perf_counter_ns()
                    self._send(child, partial)
                    count.shipped += len(partial.hashes)
                    count.ship_ns += time.perf_counter_ns() - begun

    def _look_up(self, node: Node, frame: Frame, count: EdgeCount) -> Matches:
        step = node.step
        store = self.plan.store_by_id[step.store]
        # Opening runs comes before the clock: it is not what a lookup costs.
        runs = self.runs(step, _zone(step, frame))
        begun = time.perf_counter_ns()
        found: list[Hits] = []
        for run in runs:
            at, low, high, asked, gallop = run.find(frame.hashes)
            count.runs += asked
            count.gallop += gallop
            if len(at):
                found.append((run, at, low, high))
        slot = len(frame.base.slots) + len(frame.lists)
        matches = Matches.of(len(frame.hashes), self._columns(node, store, slot), found)
        count.lookup_ns += time.perf_counter_ns() - begun
        return matches

    def _columns(self, node: Node, store: Store, slot: int) -> tuple[str, ...]:
        """What is read of a matching row: what later steps and results use, and what visibility depends on."""
        names: dict[str, None] = {}
        for below in node.walk():
            if not below.step.exact or below.step.hop > node.step.hop:
                names.update(dict.fromkeys(c.column for c in below.step.key if c.slot == slot))
            for check in below.step.checks:
                names.update(dict.fromkeys(r.column for r in columns_of(check) if int(r.alias) == slot))
            for emit in below.emits:
                names.update(dict.fromkeys(c.column for c in emit.columns if c.slot == slot))
        if not node.step.exact:
            names.update(dict.fromkeys(store.key.columns))
        if node.step.filter is not None:
            names[MASK] = None
        if store.ttl_us is not None:
            names[ARRIVED] = None
        return tuple(names)

    def _visible(self, step: Step, store: Store, node: Node, frame: Frame, matches: Matches) -> npt.NDArray[np.bool_]:
        """Of the rows whose hash matches: the key is the same, the alias's filter lets it pass, its TTL is not over."""
        table, _ = matches.read()
        keep = np.ones(table.num_rows, np.bool_)
        if step.filter is not None:
            keep &= (table.column(MASK).to_numpy() >> step.filter & 1).astype(np.bool_)
        if store.ttl_us is not None:
            keep &= table.column(ARRIVED).to_numpy() + store.ttl_us > self.now_us
        if not step.exact:
            probes, key = self._probe_key(node, frame.base.picked(frame.starts))
            owners = np.repeat(np.arange(len(matches.counts)), matches.counts)
            pairs = list(zip(key.columns, store.key.columns, strict=True))
            keep &= same_keys(probes, owners, table, np.arange(table.num_rows), pairs)
        return keep

    def _probe_key(self, node: Node, base: Partial) -> tuple[pa.Table, Key]:
        """The looked-up key as columns of the tuples themselves."""
        store = self.plan.store_by_id[node.step.store]
        names = tuple(f"k{i}" for i in range(len(node.step.key)))
        arrays = [base.column(ref) for ref in node.step.key]
        return pa.table(arrays, names=list(names)), Key(names, store.key.types, store.key.exact)

    def _passing(self, step: Step, partial: Partial) -> Partial:
        def column(ref: ColumnRef) -> pa.Array:
            return partial.column(SlotColumn(int(ref.alias), ref.column))

        for check in step.checks:
            keep = np.flatnonzero(holds(check, column).to_numpy(zero_copy_only=False))
            if len(keep) < len(partial.hashes):
                partial = partial.picked(keep)
        return partial

    def _send(self, node: Node, partial: Partial) -> None:
        """Tuples leave for the owners of the next key: only the columns still needed travel."""
        table, key = self._probe_key(node, partial)
        nulls = null_rows(table, key)
        if nulls is not None:
            partial = partial.picked(np.flatnonzero(~nulls))
            table, key = self._probe_key(node, partial)
        hashes = hash_key(table, key)
        order = np.argsort(hashes, kind="stable")
        sorted_partial = [slot.picked(order) for slot in partial.slots]
        arrays, names = [pa.array(hashes[order])], [HASH]
        for ref in node.needs(below=len(partial.slots)):
            arrays.append(sorted_partial[ref.slot].column(ref.column))
            names.append(f"{ref.slot}.{ref.column}")
        self.ship(node, pa.table(arrays, names=names))


def arrived(table: pa.Table, slots: int) -> Partial:
    """Travelled tuples (columns named `slot.column`, sorted by HASH) as a partial of that many slots."""
    split: list[dict[str, pa.ChunkedArray]] = [{} for _ in range(slots)]
    for name in table.column_names:
        if name != HASH:
            slot, _, column = name.partition(".")
            split[int(slot)][column] = table.column(name)
    tables = [pa.table(columns) if columns else pa.table({}) for columns in split]
    return Partial(table.column(HASH).to_numpy(), tuple(Slot(t) for t in tables))
