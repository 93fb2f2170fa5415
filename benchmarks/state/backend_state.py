"""Other ways of keeping state under Plait's operator, for the part `backends`.

`MemoryWork` holds sorted runs in this process's memory.  `RocksWork` has a RocksDB per store, through rocksdict: key →
all rows of the key, 8 bytes per column, read and rewritten as rows are added; Bloom filters, no log.
Both are for one engine in a process: the state is the class's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pyarrow as pa

from plait.kernels import I64, U64
from plait.query.store import HASH, IngestEdge
from plait.runtime.task.join_task import Work
from plait.runtime.task.prober import Span
from plait.state.segments.filter_sets import Sets
from plait.state.segments.run import Found, MemoryRun, Run
from plait.state.segments.segment_reader import Segment
from plait.state.segments.view import View

KEYS_AT_ONCE = 4096
"""Number of keys that RocksDB looks up in one call; their values are held at the same time."""


class MemoryWork(Work):
    """Keeps state in the memory of this process; runs are merged when there are four of a size, as on disk."""

    held: dict[str, list[MemoryRun]] = {}  # noqa: RUF012 - the state itself, of the only engine in the process

    def append(self, edge: IngestEdge, table: pa.Table) -> None:
        """Keep the rows of this epoch."""
        if edge.store is not None:
            store = self.context.plan.store_by_id[edge.store]
            rows = table.select([c.name for c in store.columns])
            self.current.setdefault(store.id, []).append(_view(MemoryRun(table.column(HASH).to_numpy(), rows)))

    def runs_of(self, store: str, sees_current: bool, times: Span = (None, None), floor: int = 0) -> list[View]:
        """All runs of a store, and this epoch's where the rank rule says so."""
        return [*map(_view, self.held.get(store, [])), *(self.current.get(store, []) if sees_current else [])]

    def merge(self) -> None:
        """Make this epoch's rows a part of the state."""
        from plait.kernels.runs import merge_order
        from plait.state.segments.columns import take_table

        for store, runs in self.current.items():
            kept = self.held.setdefault(store, [])
            kept += [view.run for view in runs if isinstance(view.run, MemoryRun)]
            while len(kept) > 3 and len(kept[-4].hashes) < 4 * len(kept[-1].hashes):
                last, kept[-4:] = kept[-4:], []
                order = merge_order([run.hashes for run in last])
                table = take_table(pa.concat_tables([run.table for run in last]).combine_chunks(), order)
                kept.append(MemoryRun(np.concatenate([run.hashes for run in last])[order], table))


def _view(run: Run) -> View:
    """A run as probes see it; these stores have neither filters nor floors."""
    return View(cast(Segment, run), Sets(), 0, {})


class RocksRun:
    """The rows of a store in RocksDB that one lookup finds, numbered through.

    Values are kept up to `keep` bytes; those of further keys are fetched again when their rows are read.
    """

    first = 0

    def __init__(self, database: Any, columns: Sequence[str], keep: float) -> None:
        self._database, self._columns, self._keep = database, list(columns), keep
        self._keys: list[bytes] = []
        self._values: list[bytes | None] = []
        self._ends: I64 = np.empty(0, np.int64)

    @property
    def hashes(self) -> U64:
        """No hashes: RocksDB looks keys up and is not walked through."""
        return np.empty(0, np.uint64)

    @property
    def names(self) -> frozenset[str]:
        """Its columns."""
        return frozenset(self._columns)

    @property
    def width(self) -> float:
        """Number of bytes of a row."""
        return 8.0 * (1 + len(self._columns))

    def find(self, probes: U64) -> Found:
        """Look up all keys, in batches."""
        distinct, back = np.unique(probes, return_inverse=True)
        self._keys, self._values = keys_of(distinct), []
        counts = np.zeros(len(distinct), np.int64)
        kept = 0
        for begin in range(0, len(distinct), KEYS_AT_ONCE):
            values = self._database.get(self._keys[begin : begin + KEYS_AT_ONCE])
            sizes = [0 if value is None else len(value) for value in values]
            counts[begin : begin + len(values)] = np.array(sizes) // (8 * len(self._columns))
            kept += sum(sizes)
            self._values += values if kept <= self._keep else [None] * len(values)
        self._ends = np.cumsum(counts)
        at = np.flatnonzero(counts[back] > 0)
        ends = self._ends[back[at]]
        return Found(at, ends - counts[back[at]], ends, len(probes), float(len(probes)))

    def announce(self, rows: I64) -> None:
        """Do nothing: RocksDB cannot be told what will be read."""

    def take(self, names: Sequence[str], rows: I64) -> list[pa.Array]:
        """The columns of rows that were found."""
        if not len(rows):
            return [pa.array([], pa.int64()) for _ in names]
        owners = np.searchsorted(self._ends, rows, side="right")
        wanted, back = np.unique(owners, return_inverse=True)
        values = [self._values[i] for i in wanted.tolist()]
        if missing := [i for i, value in enumerate(values) if value is None]:
            fetched = self._database.get([self._keys[wanted[i]] for i in missing])
            for i, value in zip(missing, fetched, strict=True):
                values[i] = value
        blob = np.frombuffer(b"".join(v for v in values if v is not None), np.int64).reshape(-1, len(self._columns))
        before = np.concatenate([[0], self._ends])[wanted]
        ends = np.cumsum(self._ends[wanted] - before)
        found = blob[rows - before[back] + (ends - (self._ends[wanted] - before))[back]]
        return [pa.array(np.ascontiguousarray(found[:, self._columns.index(name)])) for name in names]


class RocksWork(MemoryWork):
    """Keeps state in RocksDB, one database per store; `memory` is for the whole state."""

    directory = ""
    memory: int | None = None
    databases: dict[str, Any] = {}  # noqa: RUF012 - open for as long as the only engine of the process

    def database(self, store: str) -> Any:
        """The database of a store, opened if it is not open yet."""
        if store not in self.databases:
            share = None if self.memory is None else self.memory // 2 // len(self.context.plan.stores)
            self.databases[store] = open_database(f"{self.directory}/{len(self.databases)}", share)
        return self.databases[store]

    def runs_of(self, store: str, sees_current: bool, times: Span = (None, None), floor: int = 0) -> list[View]:
        """The database of a store, and this epoch's rows where the rank rule says so."""
        columns = [c.name for c in self.context.plan.store_by_id[store].columns]
        # A probe has three lists of found rows at a time.
        keep = float("inf") if self.memory is None else self.memory / 8
        mine = _view(RocksRun(self.database(store), columns, keep))
        return [mine, *(self.current.get(store, []) if sees_current else [])]

    def merge(self) -> None:
        """Add this epoch's rows to those of their keys."""
        from rocksdict import WriteBatch

        from plait.kernels.runs import group_starts

        for store, runs in self.current.items():
            database = self.database(store)
            for view in runs:
                run = view.run
                assert isinstance(run, MemoryRun)
                bounds = group_starts(run.hashes)
                keys = keys_of(run.hashes[bounds[:-1]])
                rows = np.stack([c.to_numpy() for c in run.table.columns], axis=1).astype(np.int64).tobytes()
                places = (bounds * 8 * run.table.num_columns).tolist()
                for begin in range(0, len(keys), KEYS_AT_ONCE):
                    some = keys[begin : begin + KEYS_AT_ONCE]
                    batch = WriteBatch(raw_mode=True)
                    for i, (key, old) in enumerate(zip(some, database.get(some), strict=True), begin):
                        batch.put(key, (old or b"") + rows[places[i] : places[i + 1]])
                    database.write(batch)


def keys_of(hashes: U64) -> list[bytes]:
    """Hashes as keys of RocksDB, whose order of bytes is that of the numbers."""
    text = hashes.astype(">u8").tobytes()
    return [text[i : i + 8] for i in range(0, len(text), 8)]


def open_database(path: str, memory: int | None) -> Any:
    """Open RocksDB as Flink sets it up: Bloom filters, a block cache, no log."""
    from rocksdict import BlockBasedOptions, Cache, Options, Rdict, WriteOptions

    options = Options(raw_mode=True)
    options.create_if_missing(True)
    table = BlockBasedOptions()
    table.set_bloom_filter(10, False)
    table.set_block_cache(Cache(memory // 2 if memory else 512 << 20))
    options.set_block_based_table_factory(table)
    options.set_write_buffer_size(max(1 << 20, memory // 4 if memory else 64 << 20))
    database = Rdict(path, options)
    writes = WriteOptions()
    writes.disable_wal = True  # type: ignore[method-assign,assignment]
    database.set_write_options(writes)
    return database
