"""Probing, hop by hop, inside one task: joined tuples in, results and outgoing buckets out.

Between probes on one key nothing is multiplied out: a `Frame` (`frames.py`) keeps lists of matching rows.  A key
without a match in any store disappears before a single row is read.  Lists are multiplied out once: when a result is
complete, when tuples must travel, when a condition has to see whole tuples — or after every probe with
`probe="iterative"`.

Queries that share a tree differ in which rows they see and in what they check.  What decides whether a row is seen
(filter bits, births, arrivals) is read first, alone; a row that no query sees is not read any further.

Cost: a probe of g keys into a run of r rows is O(g log(r/g)) with reads going forward only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from plait.kernels import I64, U64, Flags
from plait.kernels.runs import group_starts
from plait.kernels.search import rows_with
from plait.query.observed import EdgeCount
from plait.query.plan import Emit, Feed, Node, Plan, Seen, Step
from plait.query.store import ARRIVED, HASH, NEW, SET, Key, Store
from plait.runtime.task.frames import Frame, Hits, Matches, with_matches
from plait.runtime.task.judge import Judge
from plait.runtime.task.load import LOOKUP_NS, TUPLE_NS, Load
from plait.runtime.task.partial import Partial
from plait.state.segments.keys import hash_key, homogeneous, null_rows, same_keys
from plait.state.segments.segment import SegmentInfo, microseconds
from plait.state.segments.sieve import Sieve, as_words
from plait.state.segments.view import View

FEWEST_ASKED = 4096
"""Tuples that a store is asked about before they are sorted; for fewer that is not worth a call."""

MOST_ASKED_FOUND = 0.8
"""The share of them up to which those without a partner are left out."""

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


@dataclass
class Prober:
    """Walks the probe trees of one hop.  `runs`, `ship` and `emit` are what the task gives it to work with."""

    plan: Plan
    iterative: bool
    chunk: int
    budget: int
    """Bytes that the rows in hand may weigh, at each depth of the tree."""
    now_us: int
    runs: Callable[[Step, Span, U64 | None], Sequence[View]]
    """What a step sees of its store: the rows that have one of these hashes at least, or all."""
    ship: Callable[[Node, pa.Table], None]
    emit: Callable[[Sequence[Emit], Partial], None]
    feed: Callable[[Feed, Partial], int]
    """Sends complete tuples to a MIR; says how many."""
    epoch: int
    load: Load | None = None
    """Counts what key groups cost; None where nobody needs to know."""
    sees_all: bool = False
    """Whether all that a later hop will see of streams is here already: this task has all keys, and nothing waits."""
    counts: dict[int, EdgeCount] = field(default_factory=dict)
    _sieves: dict[tuple[tuple[Seen, ...], int], Sieve] = field(default_factory=dict)

    def sieve(self, seen: tuple[Seen, ...], width: int) -> Sieve:
        """What each member sees, ready to be asked."""
        return self._sieves.setdefault((seen, width), Sieve(seen, width))

    def visit(self, node: Node, frame: Frame, width: int) -> None:
        """Probes `node`'s store with the frame's keys and goes on from there; sets of the tree have `width` words."""
        frame = frame.of_members(as_words(node.members, width))
        if not len(frame.hashes):
            return
        count = self.counts.setdefault(node.id, EdgeCount())
        step, store = node.step, self.plan.store_by_id[node.step.store]
        # Opening runs comes before the clock: it is not what a lookup costs.
        runs = self.runs(step, _zone(step, frame), frame.hashes)
        matches = self._look_up(node, runs, frame, count)
        count.lookups += len(frame.hashes)
        if self.load is not None and step.by is None:
            self.load.add(frame.hashes, LOOKUP_NS)
        frame = with_matches(frame, matches)
        if not len(frame.hashes):
            return
        if self.load is not None and step.by is None:
            self.load.add_matches(frame.hashes, frame.lists[-1].counts)
        sieve = self.sieve(step.seen, width)
        unseen = not all(sieve.lets_all(run) and not self._ranks(step, run) for run in runs)
        hit, alive = _Distinct(), _Distinct()
        if not unseen and store.ttl_us is None and step.exact:
            self._go_on(node, frame, count, hit, alive, width)
            return
        for piece in frame.slices(self.budget, 1):
            begun = time.perf_counter_ns()
            *lists, hits = piece.lists
            piece = replace(piece, lists=tuple(lists))
            if unseen or store.ttl_us is not None:
                hits = self._seen(sieve, step, store, piece, hits.one_by_one())
            if not step.exact:
                hits = hits.kept(self._same_keys(node, piece, hits), hits.sets)
            piece = with_matches(piece, hits)
            count.match_ns += time.perf_counter_ns() - begun
            if len(piece.hashes):
                self._go_on(node, piece, count, hit, alive, width)

    def _ranks(self, step: Step, run: View) -> bool:
        """Whether rows of a MIR may have members that the driver must not see yet: only those of this epoch do."""
        return step.below is not None and run.min_born == self.epoch

    def _seen(self, sieve: Sieve, step: Step, store: Store, frame: Frame, hits: Matches) -> Matches:
        """Of the rows found, those that some member sees and whose TTL is not over; nothing else of them is read.

        Of this epoch's rows of a MIR, those of which every new member ranks below the driver.
        """
        assert hits.rows is not None
        keep = np.ones(len(hits.rows.rows), np.bool_)
        sets = None if sieve.is_one else np.empty((len(keep), sieve.width), np.uint64)
        aged = (ARRIVED,) if store.ttl_us is not None else ()
        for run, places, rows in hits.rows.by_run():
            assert isinstance(run, View)
            ranks = self._ranks(step, run)
            found, cells = sieve.sifted(run, (*aged, NEW) if ranks else aged, rows)
            if ranks:
                assert step.below is not None
                keep[places] &= cells[NEW].to_numpy() & ~step.below == 0
            if store.ttl_us is not None:
                keep[places] &= cells[ARRIVED].to_numpy() + store.ttl_us > self.now_us
            if sets is not None:
                sets[places] = found
            else:
                keep[places] &= found.any(axis=1)
        if sets is not None:
            if frame.members is not None:
                sets &= frame.members[hits.owners()]
            keep &= sets.any(axis=1)
        return hits.kept(keep, sets)

    def _go_on(self, node: Node, frame: Frame, count: EdgeCount, hit: _Distinct, alive: _Distinct, width: int) -> None:
        """With the keys that found rows, which are the frame's last list."""
        hits = hit.new(frame.hashes)
        count.hits += hits
        count.rows += int(frame.lists[-1].counts.sum())
        if not node.step.judges and not self.iterative:
            count.alive += hits
            self._follow(node, frame, count, width)
            return
        goes_on = any(child.step.hop == node.step.hop for child in node.children)
        for passing in self._expanded(frame, count, Judge(node.step, node.members, width)):
            count.passed += len(passing.hashes)
            if not len(passing.hashes):
                continue
            begun = time.perf_counter_ns()
            grouped = self.frame(node, passing) if goes_on else None
            keys = passing.hashes[group_starts(passing.hashes)[:-1]] if grouped is None else grouped.hashes
            count.alive += alive.new(keys)
            count.match_ns += time.perf_counter_ns() - begun
            self._complete(node, (passing,), count, width)
            if grouped is not None:
                self._visit_children(node, grouped, width)

    def frame(self, node: Node, base: Partial) -> Frame:
        """Groups tuples by the hop's key, unless two different keys fell on one hash."""
        if node.step.exact:
            return Frame.of(base)
        table, key = self._probe_key(node, base)
        return Frame.of(base, grouped=homogeneous(table, base.hashes, key))

    def _expanded(self, frame: Frame, count: EdgeCount, judge: Judge | None = None) -> Iterator[Partial]:
        """The frame multiplied out, in chunks, counted and timed as work of the probe it follows; judged, if wished."""
        pieces = frame.slices(self.budget, len(frame.lists))
        chunks = (partial for piece in pieces for partial in piece.expanded(self.chunk, self.budget, judge))
        while True:
            begun, before = time.perf_counter_ns(), 0 if judge is None else judge.tuples
            partial = next(chunks, None)
            count.match_ns += time.perf_counter_ns() - begun
            if partial is None:
                return
            if frame.lists:
                count.tuples += len(partial.hashes) if judge is None else judge.tuples - before
                if self.load is not None:
                    self.load.add(partial.hashes, TUPLE_NS)
            yield partial

    def _follow(self, node: Node, frame: Frame, count: EdgeCount, width: int) -> None:
        """With tuples that need no judging: those that are complete or travel, then the probes that are made here."""
        if node.emits or node.feeds or any(child.step.hop != node.step.hop for child in node.children):
            self._complete(node, self._expanded(frame, count), count, width)
        self._visit_children(node, frame, width)

    def _complete(self, node: Node, partials: Iterable[Partial], count: EdgeCount, width: int) -> None:
        """Results that are complete, rows of MIRs, and tuples that travel."""
        travelling = [child for child in node.children if child.step.hop != node.step.hop]
        for partial in partials:
            if node.emits:
                self.emit(node.emits, partial)
            for feed in node.feeds:
                begun = time.perf_counter_ns()
                count.shipped += self.feed(feed, partial)
                count.ship_ns += time.perf_counter_ns() - begun
            for child in travelling:
                begun = time.perf_counter_ns()
                count.shipped += self.send(child, partial, width)
                count.ship_ns += time.perf_counter_ns() - begun

    def _visit_children(self, node: Node, frame: Frame, width: int) -> None:
        for child in node.children:
            if child.step.hop == node.step.hop:
                self.visit(child, frame, width)

    def _look_up(self, node: Node, runs: Sequence[View], frame: Frame, count: EdgeCount) -> Matches:
        begun = time.perf_counter_ns()
        found: list[Hits] = []
        for run in runs:
            at, low, high, within, gallop = run.find(frame.hashes)
            count.runs += within
            count.gallop += gallop
            if len(at):
                found.append((run, at, low, high))
        slot = len(frame.base.slots) + len(frame.lists)
        columns = dict.fromkeys(c.column for c in node.reads() if c.slot == slot)
        if not node.step.exact:
            columns |= dict.fromkeys(self._key(node).columns)
        matches = Matches.of(len(frame.hashes), tuple(columns), found)
        count.lookup_ns += time.perf_counter_ns() - begun
        return matches

    def _key(self, node: Node) -> Key:
        """What the store's rows are looked up by."""
        return node.step.by or self.plan.store_by_id[node.step.store].key

    def _same_keys(self, node: Node, frame: Frame, hits: Matches) -> Flags:
        """Of the rows whose hash matches, those whose key does."""
        table, _ = hits.read()
        probes, key = self._probe_key(node, frame.base.picked(frame.starts))
        pairs = list(zip(key.columns, self._key(node).columns, strict=True))
        return same_keys(probes, hits.owners(), table, np.arange(table.num_rows), pairs)

    def _probe_key(self, node: Node, base: Partial) -> tuple[pa.Table, Key]:
        """The looked-up key as columns of the tuples themselves."""
        looked_up = self._key(node)
        names = tuple(f"k{i}" for i in range(len(node.step.key)))
        arrays = [base.column(ref) for ref in node.step.key]
        return pa.table(arrays, names=list(names)), Key(names, looked_up.types, looked_up.exact)

    def send(self, node: Node, partial: Partial, width: int) -> int:
        """Tuples leave for the owners of the next key, only with columns still needed; returns how many.

        Sets travel where tuples may belong to some members only: every task sends them, or none.
        """
        partial = partial.of_members(as_words(node.members, width))
        hashes = partial.hashes
        if not node.step.stays:
            table, key = self._probe_key(node, partial)
            nulls = null_rows(table, key)
            if nulls is not None:
                partial = partial.picked(np.flatnonzero(~nulls))
                table, key = self._probe_key(node, partial)
            hashes = hash_key(table, key)
        sent = len(hashes)
        partners = self._with_partners(node, hashes)
        if partners is not None:
            partial, hashes = partial.picked(partners), hashes[partners]
        order = np.argsort(hashes)
        needs = node.needs(below=len(partial.slots))
        columns = Partial(hashes, tuple(slot.picked(order) for slot in partial.slots)).columns(needs)
        names = [HASH, *(f"{ref.slot}.{ref.column}" for ref in needs)]
        if node.words:
            every = as_words(node.members, width)
            sets = np.broadcast_to(every, (len(order), width)) if partial.sets is None else partial.sets[order] & every
            columns += [pa.array(np.ascontiguousarray(word)) for word in sets.T]
            names += [f"{SET}{word}" for word in range(width)]
        self.ship(node, pa.table([pa.array(hashes[order]), *columns], names=names))
        return sent

    def _with_partners(self, node: Node, hashes: U64) -> I64 | None:
        """The tuples that may find something where they would go; None for all.

        To ask for every tuple whether a small store has its key takes a fraction of sorting the tuples by that key.
        The others count as looked up.
        """
        step = node.step
        mir = self.plan.store_by_id[step.store].mir
        if not self.sees_all or len(hashes) < FEWEST_ASKED or mir is not None or step.by is not None:
            return None
        runs = self.runs(step, (None, None), None)
        if sum(len(run.hashes) for run in runs) > len(hashes):
            return None
        there = np.zeros(len(hashes), np.bool_)
        for run in runs:
            there[rows_with(hashes, run.hashes)] = True
        found = np.flatnonzero(there)
        if len(found) > MOST_ASKED_FOUND * len(hashes):
            return None
        keys = len(np.unique(hashes[found])) / len(found) if len(found) else 1.0
        self.counts.setdefault(node.id, EdgeCount()).lookups += int((len(hashes) - len(found)) * keys)
        return found
