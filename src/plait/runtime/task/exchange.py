"""What travels between tasks: rows of a Spark DataFrame, each a bucket of many tuples or a descriptor.

    task     which task the row is for (the owner of the bucket's key groups)
    edge     the plan's edge it travels on; DESCRIPTOR for notes (`notes.py`), which end at the driver
    payload  Arrow IPC bytes of a bucket, or JSON bytes

Spark's cost per row is so a cost per bucket.  Buckets never rest on disk, so Spark's own checks on shuffle
blocks guard them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import BinaryType, IntegerType, StructField, StructType

from plait.config import KEY_GROUPS
from plait.kernels.hashing import owner
from plait.kernels.runs import merge_order
from plait.query.store import HASH
from plait.runtime.task.notes import Note, SourceNote, written
from plait.runtime.task.spill import Spill, Spilled
from plait.state.segments.columns import take_table
from plait.state.segments.run import first_from

SCHEMA = StructType(
    [StructField("task", IntegerType()), StructField("edge", IntegerType()), StructField("payload", BinaryType())]
)
DESCRIPTOR = -1

_ARROW = pa.schema([("task", pa.int32()), ("edge", pa.int32()), ("payload", pa.binary())])
_BUCKET_BYTES = 2 << 20
"""Of a bucket, at most: Java holds several copies of those under way."""
_CUT_BYTES = 16 << 20
"""Of rows that have come unsorted, so many at most are sorted at a time."""

Cut = Callable[[pa.Table], Iterable[tuple[int, pa.Table]]]
"""Rows of a source as buckets, each with its edge."""


def exchange(rows: DataFrame, tasks: int) -> DataFrame:
    """Carries every row to the task it is for."""
    return rows.repartitionById(tasks, F.col("task"))


def nothing_arrived(session: SparkSession) -> DataFrame:
    """What the sources of an epoch without rows would send: a note that says so."""
    note = written(SourceNote("")).hex()
    return session.range(1, numPartitions=1).selectExpr("0 AS task", f"{DESCRIPTOR} AS edge", f"X'{note}' AS payload")


@dataclass
class Outbox:
    """Rows a task sends on.  Beyond `limit` bytes, buckets wait on disk until Spark takes them."""

    rows: list[tuple[int, int, bytes | pa.Table | Spilled]] = field(default_factory=list)
    limit: float = float("inf")
    held: int = 0
    spill: Spill = field(default_factory=Spill)

    def note(self, task: int, note: Note) -> None:
        """Sends a note, which ends at the driver."""
        self.rows.append((task, DESCRIPTOR, written(note)))

    def ship(self, edge: int, table: pa.Table, bounds: tuple[int, ...]) -> None:
        """Sends tuples, sorted by HASH, to the owners of their key groups, in buckets of bounded size."""
        if not table.num_rows:
            return
        owners = owner(table.column(HASH).to_numpy(), bounds)
        cuts = np.searchsorted(owners, np.arange(len(bounds)))
        for task, (begin, end) in enumerate(pairwise(cuts.tolist())):
            self.ship_to(task, edge, table.slice(begin, end - begin))

    def ship_to(self, task: int, edge: int, table: pa.Table) -> None:
        """Sends tuples to one task, in buckets of bounded size."""
        step = max(1, _BUCKET_BYTES // max(1, table.nbytes // max(1, table.num_rows)))
        for begin in range(0, table.num_rows, step):
            bucket = table.slice(begin, step)
            self.held += bucket.nbytes
            self.rows.append((task, edge, bucket if self.held <= self.limit else self.spill.add(encode(bucket))))

    def batches(self) -> Iterator[pa.RecordBatch]:
        """What Spark gets: record batches of bounded size.  The outbox is empty afterwards."""
        rows, self.rows = self.rows, []
        begin = 0
        while begin < len(rows):
            part: list[tuple[int, int, bytes]] = []
            size = 0
            while begin < len(rows) and (not part or size + _size(rows[begin][2]) < 4 * _BUCKET_BYTES):
                task, edge, kept = rows[begin]
                part.append((task, edge, self._payload(kept)))
                size += _size(kept)
                begin += 1
            yield pa.record_batch([list(c) for c in zip(*part, strict=True)], schema=_ARROW)
        self.held = 0
        self.spill.clear()

    def delivered(self) -> Inbox:
        """What the next hop gets where it is in the same task: the buckets.  Descriptors stay."""
        inbox = Inbox()
        notes = [row for row in self.rows if row[1] == DESCRIPTOR]
        content = self.spill.mapped()
        self.spill.clear()
        for _, edge, kept in self.rows:
            if edge != DESCRIPTOR:
                assert not isinstance(kept, bytes), "buckets are tables until Spark takes them"
                table = decode(content.slice(kept.begin, kept.size)) if isinstance(kept, Spilled) else kept
                inbox.buckets.setdefault(edge, []).append(table)
                inbox.bytes += table.nbytes
        self.rows, self.held = notes, 0
        return inbox

    def _payload(self, kept: bytes | pa.Table | Spilled) -> bytes:
        if isinstance(kept, pa.Table):
            return encode(kept)
        return self.spill.read(kept) if isinstance(kept, Spilled) else kept


@dataclass
class Inbox:
    """Rows a task received: buckets by edge, descriptors as they are."""

    buckets: dict[int, list[pa.Table]] = field(default_factory=dict)
    notes: list[bytes] = field(default_factory=list)
    bytes: int = 0
    """Of all buckets."""

    @classmethod
    def read(
        cls, batches: Iterable[pa.RecordBatch], limit: float = float("inf"), cuts: Mapping[int, Cut] | None = None
    ) -> Inbox:
        """Takes in everything that arrived; beyond `limit` bytes it goes to disk and is mapped from there.

        Rows on edges with a cut have come unsorted: they are cut into buckets here.
        """
        inbox = cls()
        spill = Spill()
        spilled: list[tuple[int, Spilled]] = []
        at_a_time = min(_CUT_BYTES, limit / (2 * len(cuts))) if cuts else 0
        for edge, kept in _arriving(batches, cuts or {}, at_a_time, inbox.notes):
            is_table = isinstance(kept, pa.Table)
            inbox.bytes += kept.nbytes if is_table else kept.size
            if inbox.bytes <= limit:
                inbox.buckets.setdefault(edge, []).append(kept if is_table else decode(kept))
            else:
                spilled.append((edge, spill.add(encode(kept) if is_table else kept)))
        content = spill.mapped()
        # The map holds the file; without a name it is gone when the map is.
        spill.clear()
        for edge, place in spilled:
            inbox.buckets.setdefault(edge, []).append(decode(content.slice(place.begin, place.size)))
        return inbox

    def count(self, limit: float) -> int:
        """How many slices of about `limit` bytes."""
        return max(1, math.ceil(self.bytes / limit))

    def bounds(self, limit: float, groups: tuple[int, int]) -> list[int]:
        """The hashes between which slices lie."""
        count = self.count(limit)
        low, high = (group * (2**64 // KEY_GROUPS) for group in groups)
        return [low + (high - low) * i // count for i in range(count + 1)]

    def slices(self, limit: float, groups: tuple[int, int]) -> Iterator[dict[int, pa.Table]]:
        """The tuples by edge, sorted by hash: all at once, or range of hashes by range, each about `limit` bytes.

        `groups` are the key groups of this task.  A key's tuples, of all edges, are in one slice.
        """
        bounds = self.bounds(limit, groups)
        for begin, end in pairwise(bounds):
            whole = len(bounds) == 2
            tables = {
                edge: parts if whole else [p for p in (between(b, begin, end) for b in parts) if p.num_rows]
                for edge, parts in self.buckets.items()
            }
            yield {edge: merged(parts) for edge, parts in tables.items() if parts}


def _arriving(
    batches: Iterable[pa.RecordBatch], cuts: Mapping[int, Cut], at_a_time: float, notes: list[bytes]
) -> Iterator[tuple[int, pa.Buffer | pa.Table]]:
    """Buckets with their edges, as they have come or as they are cut, so many bytes at a time; `notes` get the rest."""
    waiting: dict[int, list[pa.Table]] = {}
    for batch in batches:
        for edge, payload in zip(batch.column(1).to_pylist(), batch.column(2), strict=True):
            if edge == DESCRIPTOR:
                notes.append(payload.as_py())
            elif edge not in cuts:
                yield edge, payload.as_buffer()
            else:
                waiting.setdefault(edge, []).append(decode(payload.as_buffer()))
                if sum(table.nbytes for table in waiting[edge]) >= at_a_time:
                    yield from cuts[edge](pa.concat_tables(waiting.pop(edge)).combine_chunks())
    for edge, tables in waiting.items():
        yield from cuts[edge](pa.concat_tables(tables).combine_chunks())


def _size(kept: bytes | pa.Table | Spilled) -> int:
    return int(kept.nbytes) if isinstance(kept, pa.Table) else len(kept)


def between(bucket: pa.Table, begin: int, end: int) -> pa.Table:
    """The tuples of a bucket, which is sorted by hash, with hashes from `begin` to before `end`."""
    hashes = bucket.column(HASH).to_numpy()
    first = first_from(hashes, begin)
    return bucket.slice(first, first_from(hashes, end) - first)


def merged(buckets: list[pa.Table]) -> pa.Table:
    """Sorted buckets as one sorted table."""
    if len(buckets) == 1:
        return buckets[0]
    order = merge_order([bucket.column(HASH).to_numpy() for bucket in buckets])
    # A column that the rows of one bucket are too old to have is NULL there, of no type.
    return take_table(pa.concat_tables(buckets, promote_options="default").combine_chunks(), order)


def encode(table: pa.Table) -> bytes:
    """A bucket as Arrow IPC bytes; a slice is cut out, not carried whole."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def decode(payload: pa.Buffer | bytes) -> pa.Table:
    """The tuples of a bucket."""
    with pa.ipc.open_stream(payload) as reader:
        return reader.read_all()
