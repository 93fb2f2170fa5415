"""Probing, hop by hop, inside one task: joined tuples in, results and outgoing buckets out.

Between probes on one key nothing is multiplied out: a `Frame` (`frames.py`) keeps lists of matching rows.  A key
without a match in any store disappears before a single row is read.  Lists are multiplied out once: when a result is
complete, when tuples must travel, when a condition has to see whole tuples — or after every probe with
`probe="iterative"`.

Cost: a probe of g keys into a run of r rows is O(g log(r/g)) with reads going forward only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from plait.kernels import U64
from plait.query.expr import ColumnRef, columns_of
from plait.query.observed import EdgeCount
from plait.query.plan import ARRIVED, BORN, HASH, Emit, Key, Node, Plan, SlotColumn, Step, Store, filter_column
from plait.runtime.task.frames import Frame, Hits, Matches, Partial, with_matches
from plait.state.segments.evaluate import holds
from plait.state.segments.keys import hash_key, homogeneous, null_rows, same_keys
from plait.state.segments.segment import microseconds
from plait.state.segments.view import View

Span = tuple[int | None, int | None]
"""Event times in microseconds, both ends included; None is unbounded."""


class _Distinct:
    """Counts keys that come sorted, in pieces: one that goes on in the next piece is one key all the same."""

    def __init__(self) -> None:
        self.last: np.uint64 | None = None

    def new(self, hashes: U64) -> int:
        if not len(hashes):
            return 0
        again = self.last is not None and bool(hashes[0] == self.last)
        self.last = hashes[-1]
        return len(hashes) - int(again)


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


def _asked(step: Step, store: Store, runs: Sequence[View]) -> tuple[str, ...]:
    """What decides whether a row of these runs is seen at all, beside its key: of most runs it is known for all."""
    names: list[str] = []
    if step.filter is not None and not all(run.passes_all(step.filter) for run in runs):
        names.append(filter_column(step.filter))
    if store.ttl_us is not None:
        names.append(ARRIVED)
    if step.floor is not None and any(run.min_born < step.floor for run in runs):
        names.append(BORN)
    return tuple(names)


@dataclass
class Prober:
    """Walks the probe trees of one hop.  `runs`, `ship` and `emit` are what the task gives it to work with."""

    plan: Plan
    iterative: bool
    chunk: int
    budget: int
    """Bytes that the rows in hand may weigh, at each depth of the tree."""
    now_us: int
    runs: Callable[[Step, Span], Sequence[View]]
    ship: Callable[[Node, pa.Table], None]
    emit: Callable[[Emit, Partial], None]
    counts: dict[int, EdgeCount] = field(default_factory=dict)

    def visit(self, node: Node, frame: Frame) -> None:
        """Probes `node`'s store with the frame's keys and follows the tree from there."""
        count = self.counts.setdefault(node.id, EdgeCount())
        step, store = node.step, self.plan.store_by_id[node.step.store]
        # Opening runs comes before the clock: it is not what a lookup costs.
        runs = self.runs(step, _zone(step, frame))
        asked = _asked(step, store, runs)
        matches = self._look_up(node, runs, asked, frame, count)
        count.lookups += len(frame.hashes)
        frame = with_matches(frame, matches)
        if not len(frame.hashes):
            return
        if not asked and step.exact:
            self._go_on(node, frame, count, _Distinct(), _Distinct())
            return
        hit, alive = _Distinct(), _Distinct()
        for piece in frame.slices(self.budget, 1):
            begun = time.perf_counter_ns()
            *lists, hits = piece.lists
            visible = hits.filtered(self._visible(step, store, node, asked, piece, hits))
            piece = with_matches(replace(piece, lists=tuple(lists)), visible)
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

    def _look_up(
        self, node: Node, runs: Sequence[View], asked: tuple[str, ...], frame: Frame, count: EdgeCount
    ) -> Matches:
        begun = time.perf_counter_ns()
        found: list[Hits] = []
        for run in runs:
            at, low, high, within, gallop = run.find(frame.hashes)
            count.runs += within
            count.gallop += gallop
            if len(at):
                found.append((run, at, low, high))
        slot = len(frame.base.slots) + len(frame.lists)
        columns = self._columns(node, self.plan.store_by_id[node.step.store], slot)
        matches = Matches.of(len(frame.hashes), tuple(dict.fromkeys((*columns, *asked))), found)
        count.lookup_ns += time.perf_counter_ns() - begun
        return matches

    def _columns(self, node: Node, store: Store, slot: int) -> tuple[str, ...]:
        """What is read of a matching row: what later steps and results use, and the key where it is compared."""
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
        return tuple(names)

    def _visible(
        self, step: Step, store: Store, node: Node, asked: tuple[str, ...], frame: Frame, matches: Matches
    ) -> npt.NDArray[np.bool_]:
        """Of the rows whose hash matches: the key is the same, the alias's filter lets it pass, its TTL is not over."""
        table, _ = matches.read()
        keep = np.ones(table.num_rows, np.bool_)
        if step.filter is not None and filter_column(step.filter) in asked:
            keep &= table.column(filter_column(step.filter)).to_numpy()
        if store.ttl_us is not None and ARRIVED in asked:
            keep &= table.column(ARRIVED).to_numpy() + store.ttl_us > self.now_us
        if step.floor is not None and BORN in asked:
            keep &= table.column(BORN).to_numpy() >= step.floor
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
        order = np.argsort(hashes)
        needs = node.needs(below=len(partial.slots))
        columns = Partial(hashes, tuple(slot.picked(order) for slot in partial.slots)).columns(needs)
        names = [HASH, *(f"{ref.slot}.{ref.column}" for ref in needs)]
        self.ship(node, pa.table([pa.array(hashes[order]), *columns], names=names))
