"""Deep segments: rows in compressed blocks, for state that does not fit memory.

    blocks    record batches as Arrow IPC messages, each LZ4-compressed as one piece; HASH is not among the columns
    schema    of the blocks, as an Arrow IPC message
    hashes    uncompressed, so that lookups work on the memory map as in a flat segment
    fence     every 512th hash: which page of the hashes to touch
    filter    a Bloom filter over the hashes: which keys need not be looked up at all
    offsets, sizes, sums   where each block ends, how large it is uncompressed, and its xxh3-64
    index     JSON that says where all that is; its length in the last 8 bytes

Contract.  Everything behind the blocks is covered by the checksum in the manifest; a block by its own sum, compared
whenever it is read from the file.  So opening costs what the hashes weigh, not the rows, and a bit that flips on disk
is found however late.

Cost.  A lookup: one question to the filter, then one page of hashes.  A row that is read: its block with all columns,
unless that is in the cache; compressing column by column would cost more than it saves, because what a block of wide
rows holds of one column is a few hundred bytes.  Probes and rows come in ascending order, so reads go forward.  The map
is declared random, so that a page costs a page and not the operating system's read-ahead; what will be touched is
announced (WILLNEED) before it is.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from plait.errors import CorruptionError
from plait.kernels import I64, U64, Flags
from plait.kernels.filters import ask_filter, build_filter
from plait.kernels.runs import STRIDE, fence, lookup_fenced
from plait.query.store import Store
from plait.state.files.checksummed_file import ChecksummedFile
from plait.state.files.mapped_file import announce
from plait.state.files.segment_home import SegmentHome
from plait.state.files.storage import RESTORE
from plait.state.segments.block_cache import CACHE
from plait.state.segments.columns import schema_in_utc, single, take
from plait.state.segments.other_keys import Index, called, hashes_by, index_of, searched_in
from plait.state.segments.run import METER, NOTHING, Found, ends_of, first_from, within
from plait.state.segments.segment import Origin, SegmentInfo, Summary, new_path, writing

BLOCK_BYTES = 64 << 10
"""Of rows in memory per block: decompressing one costs about as much as finding it on disk."""

_CODEC = pa.Codec("lz4_raw")
_MOST_ROWS = 8192
_SHRINKS = 2.0
"""How many times smaller rows are in a deep segment, about."""
_TOGETHER = 64
"""Blocks that rows are taken from at a time."""


def blocks_in(size: int) -> int:
    """The number of blocks in so many bytes of a deep segment, about."""
    return math.ceil(_SHRINKS * size / BLOCK_BYTES)


class DeepWriter:
    """Writes a deep segment piece by piece, in hash order: made by `writing_deep`."""

    def __init__(self, path: str, out: ChecksummedFile, summary: Summary, schema: pa.Schema, width: float) -> None:
        self.path = path
        self.width = width
        self.block_rows = max(1, min(_MOST_ROWS, round(BLOCK_BYTES / max(1.0, width))))
        self.meta = 0
        self._out, self._summary = out, summary
        self._schema = pa.schema([pa.field(f.name, f.type) for f in schema])
        self._hashes: list[U64] = []
        self._others: dict[str, list[tuple[U64, Flags | None]]] = {}
        """Hashes by the other keys that the store is searched by, and where they are NULL."""
        self._held: list[pa.Table] = []
        self._ends: list[int] = []
        self._sizes: list[int] = []
        self._sums: list[int] = []

    @property
    def rows(self) -> int:
        """Written so far."""
        return self._summary.rows

    @property
    def bytes(self) -> int:
        """Written so far, the hashes that are still held included."""
        return self._out.size + 8 * self.rows

    def write(self, hashes: U64, table: pa.Table) -> None:
        """Adds rows that follow those before in hash order."""
        self._summary.add(hashes, table)
        self._hashes.append(hashes)
        for key in searched_in(table, self._summary.store):
            self._others.setdefault(called(key.columns), []).append(hashes_by(table, key))
        if self._schema.names:
            self._held.append(table.select(self._schema.names).cast(self._schema))
            self._write_blocks(sum(t.num_rows for t in self._held) // self.block_rows)

    def _write_blocks(self, count: int) -> None:
        if not count:
            return
        table = pa.concat_tables(self._held).combine_chunks()
        for begin in range(0, count * self.block_rows, self.block_rows):
            # Serialising cuts the slice out: a block carries its own rows only.
            (batch,) = table.slice(begin, self.block_rows).combine_chunks().to_batches()
            message = batch.serialize()
            block = _CODEC.compress(message)
            self._out.write(block)
            self._ends.append(self._out.size)
            self._sizes.append(message.size)
            self._sums.append(xxhash.xxh3_64_intdigest(block))
        rest = table.slice(count * self.block_rows)
        self._held = [rest] if rest.num_rows else []

    def finish(self) -> None:
        """Writes what stands behind the blocks."""
        self._write_blocks(math.ceil(sum(t.num_rows for t in self._held) / self.block_rows))
        out = self._out
        self.meta = out.size
        out.digest.reset()
        hashes = np.concatenate(self._hashes)
        schema = self._schema.serialize()
        index: dict[str, Any] = {"schema": [out.size, schema.size], "block_rows": self.block_rows, "width": self.width}
        out.write(schema)
        index["ends"] = ends_of(hashes)
        parts = {
            "hashes": hashes,
            "fence": fence(hashes),
            "filter": build_filter(hashes),
            "offsets": np.array([0, *self._ends], np.uint64),
            "sizes": np.array(self._sizes, np.uint64),
            "sums": np.array(self._sums, np.uint64),
        }
        for name, pieces in self._others.items():
            nulls = np.concatenate([np.zeros(len(h), np.bool_) if n is None else n for h, n in pieces])
            by, numbers = index_of(np.concatenate([h for h, _ in pieces]), nulls if nulls.any() else None)
            parts |= {f"hash by{name}": by, f"row by{name}": numbers.astype(np.uint64)}
        for name, words in parts.items():
            out.write(b"\0" * (-out.size % 64))
            index[name] = [out.size, len(words)]
            out.write(words.tobytes())
        text = json.dumps(index).encode()
        out.write(text + struct.pack("<Q", len(text)))

    def info(self, *, epoch: int, tier: int, run: str, origin: Origin | None = None) -> SegmentInfo:
        """The segment, once it is complete."""
        told = {"epoch": epoch, "tier": tier}
        return self._summary.info(self.path, self._out, **told, run=run, meta=self.meta, origin=origin)


@contextmanager
def writing_deep(home: SegmentHome, store: Store, schema: pa.Schema, width: float, sync: bool) -> Iterator[DeepWriter]:
    """A new deep segment that exists when the block ends well, and not at all when it does not."""
    path = new_path(store, "deep")
    with writing(home, path, sync) as out:
        writer = DeepWriter(path, out, Summary(store), schema, width)
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
    sizes: U64
    sums: U64
    schema: pa.Schema
    block_rows: int
    width: float
    first: int = 0
    copied: bool = False
    """The file is a copy: one that is damaged is deleted, so that another comes."""
    indexes: Mapping[str, Index] = field(default_factory=dict)
    """By other keys."""

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
            sizes=words("sizes"),
            sums=words("sums"),
            schema=schema_in_utc(pa.ipc.read_schema(content.slice(*index["schema"]))),
            block_rows=index["block_rows"],
            width=index["width"],
            copied=copied,
            indexes={
                name.removeprefix("hash by"): (words(name), words(name.replace("hash", "row", 1)))
                for name in index
                if name.startswith("hash by")
            },
        )

    def check(self) -> None:
        """Compares every block with its sum."""
        for block in range(len(self.sums)):
            self._verified(block)

    @property
    def names(self) -> frozenset[str]:
        """Its columns."""
        return frozenset(self.schema.names)

    @property
    def hashes(self) -> U64:
        """The hashes of its rows."""
        return self.all_hashes[self.first :]

    def trimmed(self, first: int) -> DeepSegment:
        """Without the rows before number `first`."""
        return self if first == self.first else replace(self, first=first)

    def index(self, columns: Sequence[str]) -> Index | None:
        """The index by other columns, if there is one; it has the rows before `first` as well."""
        return self.indexes.get(called(columns))

    def may_have(self, probes: U64) -> int:
        """How many of these sorted hashes the filter does not deny."""
        self._announce_filter()
        return len(ask_filter(self.filter, *self.ends, probes))

    def find(self, probes: U64) -> Found:
        """Looks sorted probes up: those within the range of the hashes and not denied by the filter."""
        low_end = int(self.all_hashes[self.first]) if self.first else self.ends[0]
        begin, end = within(probes, low_end, self.ends[1])
        if begin == end:
            return NOTHING
        asked = probes[begin:end]
        self._announce_filter()
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

    def _announce_filter(self) -> None:
        announce(self.content, np.array([self.filter_at]), np.array([self.filter_at + self.filter.nbytes]))

    def _announce_blocks(self, blocks: I64) -> None:
        announce(self.content, self.offsets[blocks].astype(np.int64), self.offsets[blocks + 1].astype(np.int64))

    def take(self, names: Sequence[str], rows: I64) -> list[pa.Array]:
        """Columns of the rows with these numbers, which come block by block."""
        if not names:
            return []
        if not len(rows):
            return [pa.array([], self.schema.field(name).type) for name in names]
        blocks = rows // self.block_rows
        cuts = np.concatenate(([0], np.flatnonzero(np.diff(blocks)) + 1))
        wanted = blocks[cuts]
        parts: list[list[pa.Array]] = [[] for _ in names]
        found = self._blocks(wanted)
        for begin in range(0, len(wanted), _TOGETHER):
            near = wanted[begin : begin + _TOGETHER]
            table = pa.Table.from_batches(list(islice(found, len(near)))).select(names).combine_chunks()
            until = cuts[begin + len(near)] if begin + len(near) < len(cuts) else len(rows)
            places = np.cumsum([0, *(self._rows_of(n) for n in near[:-1].tolist())])
            inside = rows[cuts[begin] : until]
            which = np.repeat(np.arange(len(near)), np.diff([*cuts[begin : begin + len(near)], until]))
            inside = inside - (near * self.block_rows)[which] + places[which]
            for part, values in zip(parts, take([single(c) for c in table.columns], inside), strict=True):
                part.append(values)
        return [pa.concat_arrays(part) if len(part) > 1 else part[0] for part in parts]

    def _rows_of(self, block: int) -> int:
        return min(self.block_rows, len(self.all_hashes) - block * self.block_rows)

    def slice(self, begin: int, end: int) -> pa.Table:
        """All columns of the rows `begin` … `end` − 1.  Made for merges, which pass once: nothing is cached."""
        if not self.schema.names:
            return pa.table({})
        wanted = np.arange(begin // self.block_rows, (end - 1) // self.block_rows + 1)
        batches = list(self._blocks(wanted, keep=False))
        return pa.Table.from_batches(batches).slice(begin - int(wanted[0]) * self.block_rows, end - begin)

    def between(self, begin: int, end: int) -> tuple[U64, pa.Table]:
        """The rows with hashes from `begin` to before `end`."""
        low, high = (self.first + first_from(self.hashes, value) for value in (begin, end))
        if low == high:
            return self.all_hashes[:0], self.schema.empty_table()
        announce(self.content, np.array([self.hashes_at + 8 * low]), np.array([self.hashes_at + 8 * high]))
        return self.all_hashes[low:high], self.slice(low, high)

    def _blocks(self, wanted: I64, keep: bool = True) -> Iterator[pa.RecordBatch]:
        """The blocks with these numbers, each when its turn comes."""
        if not keep:
            self._announce_blocks(wanted)
        for block in wanted.tolist():
            key = (self.path, block)
            batch = CACHE.get(key) if keep else None
            if batch is None:
                batch = self._read(block)
                if keep:
                    CACHE.put(key, batch, int(self.sizes[block]))
            else:
                METER.blocks_cached += 1
            yield batch

    def _read(self, block: int) -> pa.RecordBatch:
        content = self._verified(block)
        METER.block_bytes += content.size
        METER.blocks_read += 1
        return pa.ipc.read_record_batch(_CODEC.decompress(content, int(self.sizes[block])), self.schema)

    def _verified(self, block: int) -> pa.Buffer:
        """A block's bytes, which are those written, or an error."""
        begin, end = int(self.offsets[block]), int(self.offsets[block + 1])
        content = self.content.slice(begin, end - begin)
        if xxhash.xxh3_64_intdigest(content) != int(self.sums[block]):
            if self.copied:
                # The next attempt gets another copy.
                with contextlib.suppress(OSError):
                    os.unlink(self.path)
            raise CorruptionError(
                "SEGMENT_CORRUPT", f"block {block} of segment {self.path} is not what was committed", RESTORE
            )
        return content
