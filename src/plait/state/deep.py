"""Deep segments: rows in compressed blocks, for state that does not fit memory.

    blocks    an Arrow IPC file of many record batches, LZ4-compressed buffer by buffer; HASH is not among the columns
    hashes    uncompressed, so that lookups work on the memory map as in a flat segment
    fence     every 512th hash: which page of the hashes to touch
    filter    a Bloom filter over the hashes: which keys need not be looked up at all
    offsets, sums   where each block ends, and its xxh3-64
    index     JSON that says where all that is; its length in the last 8 bytes

Contract.  Everything behind the blocks is covered by the checksum in the manifest; a block by its own sum, compared
whenever it is read from the file.  So opening costs what the hashes weigh, not the rows, and a bit that flips on disk
is found however late.

Cost.  A lookup: one question to the filter, then one page of hashes.  A row that is read: its block, unless that is
in the cache.  Probes and rows come in ascending order, so reads go forward.  The map is declared random, so that a
page costs a page and not the operating system's read-ahead; what will be touched is announced (WILLNEED) before it is.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from plait.errors import CorruptionError
from plait.kernels import I64, U64
from plait.kernels.filters import ask_filter, build_filter
from plait.kernels.runs import STRIDE, fence, lookup_fenced
from plait.query.plan import Store
from plait.state.cache import CACHE
from plait.state.columns import single, take
from plait.state.files import RESTORE
from plait.state.home import SegmentHome
from plait.state.mapped import announce
from plait.state.run import METER, NOTHING, Found, ends_of, within
from plait.state.segment import SegmentInfo, Summary, Tee, new_path, writing

BLOCK_BYTES = 32 << 10
"""Of rows in memory per block: decompressing one costs about as much as finding it on disk."""

_MOST_ROWS = 8192
_TOGETHER = 64
"""Blocks that rows are taken from at a time."""


class DeepWriter:
    """Writes a deep segment piece by piece, in hash order: made by `writing_deep`."""

    def __init__(self, path: str, tee: Tee, summary: Summary, schema: pa.Schema, width: float) -> None:
        self.path = path
        self.width = width
        self.block_rows = max(1, min(_MOST_ROWS, round(BLOCK_BYTES / max(1.0, width))))
        self.meta = 0
        self._tee, self._summary = tee, summary
        self._schema = pa.schema([pa.field(f.name, f.type) for f in schema])
        self._hashes: list[U64] = []
        self._held: list[pa.Table] = []
        self._ends: list[int] = []
        self._sums: list[int] = []
        self._block = tee.digest = xxhash.xxh3_64()
        options = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
        self._writer = pa.ipc.new_file(pa.PythonFile(tee, mode="w"), self._schema, options=options)

    @property
    def rows(self) -> int:
        """Written so far."""
        return self._summary.rows

    @property
    def bytes(self) -> int:
        """Written so far, the hashes that are still held included."""
        return self._tee.size + 8 * self.rows

    def write(self, hashes: U64, table: pa.Table) -> None:
        """Adds rows that follow those before in hash order."""
        self._summary.add(hashes, table)
        self._hashes.append(hashes)
        if self._schema.names:
            self._held.append(table.select(self._schema.names).cast(self._schema))
            self._write_blocks(sum(t.num_rows for t in self._held) // self.block_rows)

    def _write_blocks(self, count: int) -> None:
        if not count:
            return
        table = pa.concat_tables(self._held).combine_chunks()
        for begin in range(0, count * self.block_rows, self.block_rows):
            # combine_chunks cuts the slice out: a batch carries its own rows only.
            for batch in table.slice(begin, self.block_rows).combine_chunks().to_batches():
                self._writer.write_batch(batch)
            self._ends.append(self._tee.size)
            self._sums.append(self._block.intdigest())
            self._block.reset()
        rest = table.slice(count * self.block_rows)
        self._held = [rest] if rest.num_rows else []

    def finish(self) -> None:
        """Writes what stands behind the blocks."""
        self._write_blocks(math.ceil(sum(t.num_rows for t in self._held) / self.block_rows))
        tee = self._tee
        self.meta = tee.size
        tee.digest = xxhash.xxh3_128()
        self._writer.close()
        hashes = np.concatenate(self._hashes)
        index: dict[str, Any] = {"ipc": tee.size, "block_rows": self.block_rows, "width": self.width}
        index["ends"] = ends_of(hashes)
        parts = {
            "hashes": hashes,
            "fence": fence(hashes),
            "filter": build_filter(hashes),
            "offsets": np.array([0, *self._ends], np.uint64),
            "sums": np.array(self._sums, np.uint64),
        }
        for name, words in parts.items():
            tee.write(b"\0" * (-tee.size % 64))
            index[name] = [tee.size, len(words)]
            tee.write(words.tobytes())
        text = json.dumps(index).encode()
        tee.write(text + struct.pack("<Q", len(text)))

    def info(self, *, epoch: int, tier: int, run: str) -> SegmentInfo:
        """The segment, once it is complete."""
        return self._summary.info(self.path, self._tee, epoch=epoch, tier=tier, run=run, meta=self.meta)


@contextmanager
def writing_deep(home: SegmentHome, store: Store, schema: pa.Schema, width: float, sync: bool) -> Iterator[DeepWriter]:
    """A new deep segment that exists when the block ends well, and not at all when it does not."""
    path = new_path(store, "deep")
    with writing(home, path, sync) as tee:
        writer = DeepWriter(path, tee, Summary(store), schema, width)
        yield writer
        writer.finish()


@dataclass(frozen=True, slots=True, eq=False)
class DeepSegment:
    """An open deep segment, from row `first` on."""

    path: str
    content: pa.Buffer
    ends: tuple[int, int]
    """The first and the last hash, those before `first` included."""
    hashes_at: int
    """Where the hashes begin in the file."""
    filter_at: int
    all_hashes: U64
    fence: U64
    filter: U64
    offsets: U64
    sums: U64
    block_rows: int
    width: float
    ipc: int
    first: int = 0
    copied: bool = False
    """The file is a copy: one that is damaged is deleted, so that another comes."""
    _readers: dict[tuple[str, ...], pa.ipc.RecordBatchFileReader] = field(default_factory=dict)
    _weights: dict[tuple[str, ...], int] = field(default_factory=dict)
    """What a block of these columns weighs in memory: blocks of a segment are alike, and Arrow is slow to tell."""

    @classmethod
    def of(cls, path: str, content: pa.Buffer, copied: bool = False) -> DeepSegment:
        """Opens verified bytes."""
        (length,) = struct.unpack("<Q", content.slice(content.size - 8).to_pybytes())
        index = json.loads(content.slice(content.size - 8 - length, length).to_pybytes())

        def words(name: str) -> U64:
            begin, count = index[name]
            return np.frombuffer(content, np.uint64, count, begin)

        return cls(
            path=path,
            content=content,
            ends=tuple(index["ends"]),
            hashes_at=index["hashes"][0],
            filter_at=index["filter"][0],
            all_hashes=words("hashes"),
            fence=words("fence"),
            filter=words("filter"),
            offsets=words("offsets"),
            sums=words("sums"),
            block_rows=index["block_rows"],
            width=index["width"],
            ipc=index["ipc"],
            copied=copied,
        )

    def check(self) -> None:
        """Compares every block with its sum."""
        for block in range(len(self.sums)):
            self._compare(block)

    @property
    def hashes(self) -> U64:
        """The hashes of its rows."""
        return self.all_hashes[self.first :]

    def trimmed(self, first: int) -> DeepSegment:
        """Without the rows before number `first`."""
        return self if first == self.first else replace(self, first=first)

    def find(self, probes: U64) -> Found:
        """Looks sorted probes up: those within the range of the hashes and not denied by the filter."""
        low_end = int(self.all_hashes[self.first]) if self.first else self.ends[0]
        begin, end = within(probes, low_end, self.ends[1])
        if begin == end:
            return NOTHING
        asked = probes[begin:end]
        announce(self.content, np.array([self.filter_at]), np.array([self.filter_at + self.filter.nbytes]))
        passed = ask_filter(self.filter, *self.ends, asked)
        # The hash before a fence post is on the page before; most are in the middle of one.
        pages = np.unique(np.maximum(np.searchsorted(self.fence, asked[passed]), 1)) - 1
        announce(self.content, self.hashes_at + pages * (8 * STRIDE), self.hashes_at + (pages + 1) * (8 * STRIDE))
        low, high = lookup_fenced(asked[passed], self.fence, self.all_hashes)
        hit = np.flatnonzero(high > low)
        METER.filter_asked += len(asked)
        METER.filter_passed += len(passed)
        METER.filter_found += len(hit)
        gallop = len(passed) * math.log2(1 + len(self.all_hashes) / max(1, len(passed)))
        return Found(begin + passed[hit], low[hit], high[hit], len(asked), gallop)

    def announce(self, rows: I64) -> None:
        """Has the blocks of these rows fetched while others are worked on."""
        if len(self.sums) and len(rows):
            blocks = rows // self.block_rows
            self._announce_blocks(blocks[np.concatenate(([True], blocks[1:] != blocks[:-1]))])

    def _announce_blocks(self, blocks: I64) -> None:
        announce(self.content, self.offsets[blocks].astype(np.int64), self.offsets[blocks + 1].astype(np.int64))

    def take(self, names: Sequence[str], rows: I64) -> list[pa.Array]:
        """Columns of the rows with these numbers, which come block by block."""
        if not names:
            return []
        if not len(rows):
            return [pa.array([], self._schema.field(name).type) for name in names]
        blocks = rows // self.block_rows
        cuts = np.concatenate(([0], np.flatnonzero(np.diff(blocks)) + 1))
        wanted = blocks[cuts]
        parts: list[list[pa.Array]] = [[] for _ in names]
        found = self._blocks(names, wanted)
        for begin in range(0, len(wanted), _TOGETHER):
            near = wanted[begin : begin + _TOGETHER]
            table = pa.Table.from_batches(list(islice(found, len(near))))
            until = cuts[begin + len(near)] if begin + len(near) < len(cuts) else len(rows)
            places = np.cumsum([0, *(self._rows_of(n) for n in near[:-1].tolist())])
            inside = rows[cuts[begin] : until]
            which = np.repeat(np.arange(len(near)), np.diff([*cuts[begin : begin + len(near)], until]))
            inside = inside - (near * self.block_rows)[which] + places[which]
            for part, name in zip(parts, names, strict=True):
                part.append(take(single(table.column(name)), inside))
        return [pa.concat_arrays(part) if len(part) > 1 else part[0] for part in parts]

    def _rows_of(self, block: int) -> int:
        return min(self.block_rows, len(self.all_hashes) - block * self.block_rows)

    def slice(self, begin: int, end: int) -> pa.Table:
        """All columns of the rows `begin` … `end` − 1.  Made for merges, which pass once: nothing is cached."""
        names = self._schema.names
        if not names:
            return pa.table({})
        wanted = np.arange(begin // self.block_rows, (end - 1) // self.block_rows + 1)
        batches = list(self._blocks(names, wanted, keep=False))
        return pa.Table.from_batches(batches).slice(begin - int(wanted[0]) * self.block_rows, end - begin)

    @property
    def _schema(self) -> pa.Schema:
        return self._reader(()).schema

    def _reader(self, names: tuple[str, ...]) -> pa.ipc.RecordBatchFileReader:
        """A reader of some columns; of all for ()."""
        found = self._readers.get(names)
        if found is None:
            fields = [self._schema.get_field_index(name) for name in names] if names else None
            options = pa.ipc.IpcReadOptions(use_threads=False, included_fields=fields)
            found = self._readers[names] = pa.ipc.open_file(self.content.slice(0, self.ipc), options=options)
        return found

    def _blocks(self, names: Sequence[str], wanted: I64, keep: bool = True) -> Iterator[pa.RecordBatch]:
        """The blocks with these numbers, each when its turn comes."""
        columns = tuple(sorted(set(names)))
        if not keep:
            self._announce_blocks(wanted)
        for block in wanted.tolist():
            key = (self.path, block, columns)
            batch = CACHE.get(key) if keep else None
            if batch is None:
                batch = self._read(columns, block)
                if keep:
                    if columns not in self._weights:
                        self._weights[columns] = batch.nbytes
                    CACHE.put(key, batch, self._weights[columns])
            else:
                METER.blocks_cached += 1
            yield batch

    def _read(self, columns: tuple[str, ...], block: int) -> pa.RecordBatch:
        METER.block_bytes += self._compare(block)
        METER.blocks_read += 1
        return self._reader(columns).get_batch(block)

    def _compare(self, block: int) -> int:
        """Raises if a block's bytes are not those written; how many they are."""
        begin, end = int(self.offsets[block]), int(self.offsets[block + 1])
        if xxhash.xxh3_64_intdigest(self.content.slice(begin, end - begin)) != int(self.sums[block]):
            if self.copied:
                # The next attempt gets another copy.
                with contextlib.suppress(OSError):
                    os.unlink(self.path)
            raise CorruptionError(
                "SEGMENT_CORRUPT", f"block {block} of segment {self.path} is not what was committed", RESTORE
            )
        return end - begin
