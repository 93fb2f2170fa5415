"""One task of one epoch: how it appends and probes.

A task keeps nothing: what it learns leaves as buckets and descriptors, what it writes lies under fresh names, so a
retried or abandoned attempt leaves no trace that counts.  `hops.py` says in which order it does what.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import pyarrow as pa

from plait.config import KEY_GROUPS
from plait.kernels import U64, Flags
from plait.query.observed import Driven
from plait.query.plan import Emit, Feed, Node, ProbeTree, Replay, Step
from plait.query.store import ARRIVED, BORN, HASH, SET, IngestEdge, Store, mask_columns
from plait.runtime.faults import reached
from plait.runtime.task.bucketise import cuts
from plait.runtime.task.epoch_task import EpochTask
from plait.runtime.task.exchange import Inbox, Outbox, merged
from plait.runtime.task.feeding import fed, sets_of
from plait.runtime.task.frames import Frame, arrived
from plait.runtime.task.load import ARRIVED_NS, Load
from plait.runtime.task.notes import (
    KeysNote,
    LoadNote,
    SampleNote,
    SegmentNote,
    SetsNote,
    WorkNote,
    read_note,
)
from plait.runtime.task.partial import Partial, Slot
from plait.runtime.task.pass_report import PassReport
from plait.runtime.task.passes import HashRange, passes_for, reads_at
from plait.runtime.task.prober import Prober, Span
from plait.runtime.task.sampling import front, key_count, passing, sampled, set_sample, smallest
from plait.runtime.task.task_results import TaskResults
from plait.runtime.task.timer import Timer
from plait.runtime.task.upkeep import copy, merge
from plait.state.segments.block_cache import CACHE
from plait.state.segments.block_segment import DeepSegment, writing_deep
from plait.state.segments.columns import single, take_table
from plait.state.segments.filter_sets import Rewritten, Sets
from plait.state.segments.run import METER, MemoryRun, together
from plait.state.segments.searched import searched
from plait.state.segments.segment import Origin, SegmentInfo, microseconds, new_run, write_segment
from plait.state.segments.segment_reader import Segment, open_segment
from plait.state.segments.view import View, viewed, viewed_now

CACHE_SWEEP_EPOCHS = 16
"""A host's cache is cleared of segments that are not live every so many epochs."""

CACHE_MIN_AGE_SECONDS = 600.0
"""Younger segments may be of an epoch that is being run: they stay in the cache."""


@dataclass
class Work:
    """One task of one epoch, from its inbox to its outbox."""

    context: EpochTask
    task: int
    current: dict[str, list[View]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    driven: dict[str, Driven] = field(default_factory=dict)
    """By driving relation."""

    def __post_init__(self) -> None:
        context = self.context
        # How `Config.memory_limit` is shared out: half for blocks read before, a quarter for what has arrived, the
        # rest for what is being joined, sent and merged.
        CACHE.resize(context.memory // 2)
        self.inbox_bytes = context.memory // 4
        self.outbox = Outbox(limit=context.memory // 16)
        self.results = TaskResults(context)
        self.load = Load(context.groups(self.task)) if context.tasks > 1 else None
        self.prober = Prober(
            context.plan,
            context.iterative,
            context.chunk_rows,
            context.memory // 16,
            context.clock_us,
            self.runs,
            self.ship,
            self.emit,
            self.feed,
            context.epoch,
            self.load,
        )
        self._mine: dict[str, list[SegmentInfo]] = {}
        self._opened: dict[str, Segment] = {}
        self._told = PassReport()
        self._range: HashRange | None = None
        self._dense: frozenset[str] = frozenset()
        self._loaded: dict[str, View] = {}
        """What the pass that is under way has put together, by store."""
        self._new_runs: dict[str, str] = {}
        # Writing waits for the disk, and Arrow, xxhash and the system calls do without the interpreter's lock.
        self.pen = ThreadPoolExecutor(1, thread_name_prefix="plait-append")
        self._being_written: list[Future[SegmentInfo]] = []
        self._metered = replace(METER)

    def timed(self, name: str) -> Timer:
        return Timer(self.seconds, name)

    def untimed(self, name: str) -> Timer:
        return Timer(self.seconds, name, -1)

    def received(self, batches: Iterable[pa.RecordBatch]) -> Inbox:
        """What the sources have sent to this task, as sorted buckets."""
        context = self.context
        return Inbox.read(batches, self.inbox_bytes, cuts(context.plan.inputs, context.tasks, context.clock_us))

    def forward(self, notes: list[bytes]) -> None:
        """Passes descriptors on, and keeps in mind which segments of this epoch lie in this task's key groups."""
        for note in notes:
            self.outbox.rows.append((self.task, -1, note))
            match read_note(note):
                case SegmentNote(info):
                    self.current.setdefault(info.store, []).append(self._view(info))

    def append_and_probe(self, inbox: Inbox) -> Iterator[None]:
        """The first hop: stops after every slice of what arrived, for the outbox to be emptied."""
        context = self.context
        if context.home.remote is not None and context.epoch % CACHE_SWEEP_EPOCHS == 0:
            context.home.forget(context.live_paths, time.time() - CACHE_MIN_AGE_SECONDS)
        inputs = {edge.id: edge for i in context.plan.inputs for edge in i.edges}
        groups = context.groups(self.task)
        ranges = list(pairwise(inbox.bounds(self.inbox_bytes, groups)))
        for number, tables in enumerate(inbox.slices(self.inbox_bytes, groups)):
            # No more than one slice waits to be written.
            self.settle()
            self.current.clear()
            for edge, table in tables.items():
                self.append(inputs[edge], table)
                reached("task.append", context.epoch)
            with self.timed("probe"):
                for part in self.passes(tables, 1):
                    for tree in context.plan.trees:
                        if tree.edge in part and tree.replays is None:
                            self.drive(tree, part[tree.edge])
                            reached("task.probe", context.epoch)
                self.replay(ranges[number])
            # The smallest hashes are in the first slice of the first task.
            if context.sampled and self.task == 0 and number == 0:
                with self.timed("sample"):
                    self.sample(tables)
            yield

    def probe_arrived(self, inbox: Inbox, hop: int) -> Iterator[None]:
        """A later hop: stops after every slice of what arrived, for the outbox to be emptied."""
        # The segments of a run follow each other: those of another hop are another run.
        self._new_runs.clear()
        several = inbox.count(self.inbox_bytes) > 1
        # Tuples that search come with all hashes.
        groups = (0, KEY_GROUPS) if hop in self.context.plan.searches else self.context.groups(self.task)
        for tables in inbox.slices(self.inbox_bytes, groups):
            if several and self._being_written:
                self.unload()
            self.append_fed(tables)
            with self.timed("probe"):
                for part in self.passes(self._due(tables, hop), hop):
                    for tree in self.context.plan.trees:
                        for top in tree.nodes:
                            self.continue_from(top, 1, hop, part, tree.width)
            yield

    def append(self, edge: IngestEdge, table: pa.Table) -> None:
        """Adds the bucket to its store: at once for this task's probes, and as a segment written beside them."""
        if edge.store is None:
            return
        plan = self.context.plan
        store = plan.store_by_id[edge.store]
        hashes = table.column(HASH).to_numpy()
        self._append(store, hashes, table.select(self._stored_columns(store)), self._sets(store.relation))

    def append_fed(self, tables: Mapping[int, pa.Table]) -> None:
        """Rows of MIRs that are complete are appended before anybody of their hop probes."""
        plan = self.context.plan
        complete: dict[str, list[pa.Table]] = {}
        for edge, table in tables.items():
            if edge in plan.feed_by_edge:
                complete.setdefault(plan.feed_by_edge[edge].store, []).append(table)
        for name, parts in complete.items():
            store, table = plan.store_by_id[name], merged(parts)
            self._append(store, table.column(HASH).to_numpy(), table.drop_columns(HASH), sets_of(store))
            reached("task.feed", self.context.epoch)

    def _due(self, tables: Mapping[int, pa.Table], hop: int) -> dict[int, pa.Table]:
        """The tuples that probe at a hop; those that have to wait for a later one travel to this task again."""
        plan, due = self.context.plan, {}
        for edge, table in tables.items():
            if edge not in plan.feed_by_edge:
                if plan.hop_by_edge[edge] > hop:
                    self.outbox.ship_to(self.task, edge, table)
                else:
                    due[edge] = table
        return due

    def _append(self, store: Store, hashes: U64, rows: pa.Table, sets: Sets) -> None:
        context = self.context
        if self.load is not None:
            self.load.add(hashes, ARRIVED_NS)
        view = viewed_now(MemoryRun(hashes, rows), sets, context.epoch, context.plan.filter_by_id)
        self.current.setdefault(store.id, []).append(view)
        run = self._new_runs.setdefault(store.id, new_run())
        self._being_written.append(self.pen.submit(self._written, store, hashes, rows, run, sets))

    def _written(self, store: Store, hashes: U64, rows: pa.Table, run: str, sets: Sets) -> SegmentInfo:
        context = self.context
        origin = Origin((context.epoch, context.epoch), sets)
        with self.timed("append"):
            if not context.compress:
                how = {"epoch": context.epoch, "tier": 0}
                return write_segment(
                    context.home, store, rows, hashes, **how, sync=context.sync, run=run, origin=origin
                )
            width = 8 + rows.nbytes / len(hashes)
            with writing_deep(context.home, store, rows.schema, width, context.sync) as out:
                out.write(hashes, rows)
            return out.info(epoch=context.epoch, tier=0, run=run, origin=origin)

    def _view_of_new(self, relation: str, run: MemoryRun) -> View:
        plan = self.context.plan
        return viewed_now(run, self._sets(relation), self.context.epoch, plan.filter_by_id)

    def _sets(self, relation: str) -> Sets:
        """What is known of the filters that this epoch's rows pass."""
        source = self.context.plan.input_by_relation[relation]
        ids = tuple(f.id for f in source.filters)
        return Sets(bits=ids) if source.masked else Sets(passed=ids)

    def _stored_columns(self, store: Store) -> list[str]:
        source = self.context.plan.input_by_relation[store.relation]
        masks = mask_columns(len(source.filters)) if store.masked else ()
        return [*(c.name for c in store.columns), *masks, *([ARRIVED] if store.ttl_us is not None else [])]

    def settle(self) -> list[SegmentInfo]:
        """Waits until all that was appended is on disk, and tells of it."""
        waiting, self._being_written = self._being_written, []
        infos = [written.result() for written in waiting]
        for info in infos:
            self.outbox.note(self.task, SegmentNote(info))
        return infos

    def unload(self) -> None:
        """What was appended is looked up on disk from now on: as much of it as of the tuples may not fit memory."""
        for info in self.settle():
            resting = [view for view in self.current[info.store] if not isinstance(view.run, MemoryRun)]
            self.current[info.store] = [*resting, self._view(info)]

    def passes(self, tables: Mapping[int, pa.Table], hop: int) -> Iterator[Mapping[int, pa.Table]]:
        """The tuples that arrived at a hop, at once or range of hashes by range: what reads the fewest blocks."""
        share = self.context.memory // 2
        context = self.context
        reads = reads_at(context.plan, hop, tables, self._own, self._share_within, context.arriving)
        chosen = passes_for(reads, share * 3 // 4)
        if chosen.count == 1:
            yield tables
            return
        CACHE.resize(share // 4)
        for hashes, part in chosen.cut(tables):
            self._range, self._dense, self._loaded = hashes, chosen.dense, {}
            yield part
        self._range, self._dense, self._loaded = None, frozenset(), {}
        CACHE.resize(share)

    def drive(self, tree: ProbeTree, table: pa.Table) -> None:
        """Sends new tuples of one relation through its probe tree, as far as this hop goes."""
        base = self._arrived(tree, table) if tree.replays is None else arrived(table, 1)
        if not len(base.hashes):
            return
        begun, before = time.perf_counter(), self.results.rows
        if tree.emits:
            self.emit(tree.emits, base)
        self._visit_all(tree.nodes, base, tree.width, 1)
        done = self.driven.setdefault(tree.relation, Driven())
        done.seconds += time.perf_counter() - begun
        done.rows += self.results.rows - before

    def _arrived(self, tree: ProbeTree, table: pa.Table) -> Partial:
        """New tuples as the members of a tree see them: those that nobody sees are left out, or have no member."""
        base = Partial(table.column(HASH).to_numpy(), (Slot(table),))
        view = self._view_of_new(tree.relation, MemoryRun(base.hashes, table))
        sieve = self.prober.sieve(tree.seen, tree.width)
        if sieve.lets_all(view):
            return base
        sets = sieve.of_all(view)
        seen = np.flatnonzero(sets.any(axis=1))
        if not sieve.is_one and 2 * len(seen) > len(sets):
            # Tuples of nobody end with their empty sets: to pick the others would cost every joined tuple a look-up.
            return replace(base, sets=sets)
        return replace(base, sets=None if sieve.is_one else sets).picked(seen)

    def continue_from(self, node: Node, slots: int, hop: int, tables: Mapping[int, pa.Table], width: int) -> None:
        """Finds the nodes at which tuples of this hop arrive and goes on from there."""
        if node.step.hop == hop and node.id in tables:
            self._visit_all((node,), arrived(tables[node.id], slots), width, hop)
        for child in node.children:
            self.continue_from(child, slots + 1, hop, tables, width)

    def _visit_all(self, nodes: tuple[Node, ...], base: Partial, width: int, hop: int) -> None:
        frame: Frame | None = None
        for node in nodes:
            if node.step.hop > hop:
                # New tuples whose first probe is by another key, or has to wait.
                self.prober.send(node, base, width)
                continue
            frame = self.prober.frame(node, base) if frame is None or not node.step.exact else frame
            self.prober.visit(node, frame, width)

    def replay(self, hashes: HashRange) -> None:
        """Queries that begin with what is there: rows at rest of one of their streams drive once, like new ones.

        Those of a slice's range of hashes: they see the rows of tables that come with it.
        """
        trees = [(tree, tree.replays) for tree in self.context.plan.trees if tree.replays is not None]
        for number, (tree, replay) in enumerate(trees):
            for done, table in self._resting(tree, replay, hashes):
                self.drive(tree, table)
                reached("task.replay", self.context.epoch)
                self._told.tell(self.context, self.task, hashes, (number + done) / len(trees))

    def _resting(self, tree: ProbeTree, replay: Replay, hashes: HashRange) -> Iterator[tuple[float, pa.Table]]:
        """Rows of a store that a query sees, in a range of hashes, some at a time, sorted by hash, as if travelled.

        With each part, which share of the range is through with it.
        """
        store = self.context.plan.store_by_id[replay.store]
        low, high = hashes
        floor = min(seen.floor or 0 for seen in tree.seen)
        views = [
            view for info in self._own(store.id) if info.max_born >= floor if len((view := self._view(info)).hashes)
        ]
        names = [*(c.name for c in store.columns), *([ARRIVED] if store.ttl_us is not None else [])]
        rows = sum(len(view.hashes) for view in views)
        width = sum(view.width * len(view.hashes) for view in views) / max(1, rows)
        parts = max(1, math.ceil(rows * width / max(1, self.inbox_bytes)))
        bounds = [low + (high - low) * i // parts for i in range(parts + 1)]
        sieve = self.prober.sieve(tree.seen, tree.width)
        for number, (begin, end) in enumerate(pairwise(bounds)):
            pieces = []
            for view in views:
                found, part = view.run.between(begin, end)
                if len(found):
                    table = view.table(names, part, len(found))
                    keep = self._held(table, store, replay)
                    sets = sieve.of_slice(view, part, len(found))
                    for word in range(tree.width):
                        table = table.append_column(f"{SET}{word}", pa.array(np.ascontiguousarray(sets[:, word])))
                    some = np.flatnonzero(keep & sets.any(axis=1))
                    pieces.append((found[some], take_table(table, some)))
            if pieces:
                run = together(pieces)
                called = [name if name.startswith(SET) else f"0.{name}" for name in run.table.column_names]
                whole = pa.table([pa.array(run.hashes), *run.table.columns], names=[HASH, *called])
                yield (number + 1) / parts, whole

    def _held(self, table: pa.Table, store: Store, replay: Replay) -> Flags:
        """The rows that the query itself would hold."""
        keep = np.ones(table.num_rows, np.bool_)
        if store.ttl_us is not None:
            keep &= table.column(ARRIVED).to_numpy() + store.ttl_us > self.context.clock_us
        if replay.above_us is not None and store.time_column is not None:
            times = microseconds(table.column(store.time_column)).fill_null(np.iinfo(np.int64).min)
            keep &= times.to_numpy() > replay.above_us
        return keep

    def runs(self, step: Step, times: Span, hashes: U64 | None) -> list[View]:
        """The rank rule: all earlier epochs; of this epoch only what ranks below the driving relation.

        Segments without a row in the window, or above the floor, are left out.  By a key that the store is not
        partitioned by, the rows with these hashes are searched.  Without hashes it is all rows, whatever pass is under
        way.
        """
        if step.by is None and hashes is not None:
            return self.runs_of(step.store, step.sees_current, times, step.floor)
        runs = self._seen_of(step.store, step.sees_current, times, step.floor)
        if step.by is None or hashes is None:
            return runs
        return [searched(view, step.by, hashes, self.context.hashes(self.task)) for view in runs]

    def runs_of(self, store: str, sees_current: bool, times: Span = (None, None), floor: int = 0) -> list[View]:
        if store in self._dense and times == (None, None) and self._own(store):
            return [self._together(store), *(self.current.get(store, []) if sees_current else [])]
        return self._seen_of(store, sees_current, times, floor)

    def _seen_of(self, store: str, sees_current: bool, times: Span, floor: int) -> list[View]:
        current = self.current.get(store, []) if sees_current else []
        own = self._own(store)
        mine = [info for info in own if info.overlaps(times) and info.max_born >= floor]
        METER.segments_skipped += len(own) - len(mine)
        return [*(self._view(info) for info in mine), *current]

    def _view(self, info: SegmentInfo) -> View:
        return viewed(self._open(info), info, self.context.plan.filter_by_id)

    def _own(self, store: str) -> list[SegmentInfo]:
        """The live segments with rows of this task's key groups."""
        if store not in self._mine:
            low, high = self.context.groups(self.task)
            infos = self.context.live.get(store, ())
            self._mine[store] = [info for info in infos if info.lo_group < high and info.hi_group > low]
        return self._mine[store]

    def _share_within(self, info: SegmentInfo, hashes: U64) -> float:
        """Which share of some keys may be in a compressed segment, as far as its filter can tell."""
        segment = self._open(info)
        assert isinstance(segment, DeepSegment)
        return segment.may_have(hashes) / max(1, len(hashes))

    def sample(self, tables: Mapping[int, pa.Table]) -> None:
        """Looks the smallest new keys up in all stores on their attribute, and counts the keys of every store."""
        plan = self.context.plan
        for wish in plan.samples:
            if wish.edge not in tables or wish.edge not in self.context.sampled:
                continue
            table = tables[wish.edge]
            source = next(i for i in plan.inputs if any(edge.id == wish.edge for edge in i.edges))
            view = self._view_of_new(source.relation, MemoryRun(table.column(HASH).to_numpy(), table))
            keys, tuples = smallest(passing(view, wish.filters))
            if not len(keys):
                continue
            asked = [(wish.own, (), False), *wish.stores]
            stores = [(store, filters) for store, filters, _ in asked]
            runs = [self.runs_of(store, sees) for store, _, sees in asked]
            found = sampled(wish.edge, wish.filters, keys, tuples, stores, runs)
            self.outbox.note(self.task, SampleNote(found))
        self._sample_sets(tables)
        _, groups = self.context.groups(self.task)
        # Of runs that another number of tasks has written, only what this task owns.
        fronts = {s.id: [front(run.hashes, groups) for run in self.runs_of(s.id, True)] for s in plan.stores}
        counts = {store: key_count(runs, groups / KEY_GROUPS) for store, runs in fronts.items()}
        self.outbox.note(self.task, KeysNote(counts))

    def _sample_sets(self, tables: Mapping[int, pa.Table]) -> None:
        """Which query sets new rows have, and the rows that they meet."""
        plan, share = self.context.plan, self.context.groups(self.task)[1] / KEY_GROUPS
        filters = {i.relation: tuple(f.id for f in i.filters) for i in plan.inputs}
        relation = {edge.id: i.relation for i in plan.inputs for edge in i.edges}
        wanted: dict[int, dict[tuple[str, bool], None]] = {}
        for wish in plan.samples:
            if wish.sets and wish.edge in tables and wish.edge in self.context.sampled:
                wanted.setdefault(wish.edge, {}).update(dict.fromkeys(wish.sets))
        for edge, stores in wanted.items():
            rows = tables[edge]
            view = self._view_of_new(relation[edge], MemoryRun(rows.column(HASH).to_numpy(), rows))
            met = [(s, filters[plan.store_by_id[s].relation], self.runs_of(s, sees)) for s, sees in stores]
            found = set_sample(edge, view, share, filters[relation[edge]], met)
            if found is not None:
                self.outbox.note(self.task, SetsNote(found))

    def _open(self, info: SegmentInfo) -> Segment:
        found = self._opened.get(info.path)
        if found is None:
            found = open_segment(self.context.home, info, self.context.verified_dir)
            self._opened[info.path] = found
        return found

    def _together(self, store: str) -> View:
        """All rows of a store that the pass under way is about, with all that steps can ask of them."""
        assert self._range is not None
        found = self._loaded.get(store)
        if found is None:
            plan = self.context.plan
            of = plan.store_by_id[store]
            names = [*(c.name for c in of.columns), *([BORN] if of.floors else [])]
            names += [ARRIVED] if of.ttl_us is not None else []
            views = [self._view(info) for info in self._own(store)]
            filters = Rewritten(self.context.filters_of(store))
            sets = filters.together(view.sets for view in views)
            pieces = []
            for view in views:
                hashes, part = view.run.between(*self._range)
                table = view.table(names, part, len(hashes))
                cells = {name: single(part.column(name)) for name in part.column_names}
                words = filters.words(sets, view.sets, cells, len(hashes))
                for name, word in zip(mask_columns(len(sets.bits)), words, strict=True):
                    table = table.append_column(name, pa.array(word))
                pieces.append((hashes, table))
            first = min((info.min_born for info in self._own(store)), default=0)
            found = self._loaded[store] = View(together(pieces), sets, first, plan.filter_by_id)
        return found

    def ship(self, node: Node, table: pa.Table) -> None:
        if node.step.by is None:
            self.outbox.ship(node.id, table, self.context.bounds)
        else:
            for task in range(self.context.tasks):
                self.outbox.ship_to(task, node.id, table)

    def feed(self, feed: Feed, partial: Partial) -> int:
        """Complete tuples go to the MIR that they are rows of; returns how many."""
        table = fed(feed, self.context.plan.store_by_id[feed.store], partial, self.context.epoch)
        self.outbox.ship(feed.id, table, self.context.bounds)
        return int(table.num_rows)

    def emit(self, emits: Sequence[Emit], partial: Partial) -> None:
        """Complete tuples go to the results of the queries that they belong to."""
        # Rows are materialised inside the probe's time; take it out so that the parts add up.
        with self.timed("materialise"), self.untimed("probe"):
            self.results.emit(emits, partial)

    def keep_up(self) -> None:
        """What the driver gave to this task beside its tuples: merging, and filling stores from others."""
        with self.timed("merge"):
            merge(self.context, self.task, self.outbox)
        if self.context.copies:
            with self.timed("build"):
                copy(self.context, self.task, self.outbox)

    def finish(self) -> Iterator[pa.RecordBatch]:
        """Closes the results and hands everything to Spark."""
        self.settle()
        with self.timed("materialise"):
            for note in self.results.close():
                self.outbox.note(self.task, note)
        if self.load is not None:
            self.outbox.note(self.task, LoadNote.of(self.load.groups[0], self.load.cost))
        reads = METER.since(self._metered)
        self.outbox.note(self.task, WorkNote(self.prober.counts, self.driven, self.seconds, reads))
        yield from self.outbox.batches()
