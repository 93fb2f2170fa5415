"""What travels between tasks: rows of a Spark DataFrame, each a bucket of many tuples or a descriptor.

    task     which task the row is for (the owner of the bucket's key groups)
    edge     the plan's edge it travels on; DESCRIPTOR for the small JSON notes that end at the driver
    payload  Arrow IPC bytes of a bucket, or JSON bytes

Spark's cost per row is so a cost per bucket.  Buckets never rest on disk, so Spark's own checks on shuffle
blocks guard them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import BinaryType, IntegerType, StructField, StructType

from plait.kernels.hashing import owner
from plait.query.plan import HASH

SCHEMA = StructType(
    [StructField("task", IntegerType()), StructField("edge", IntegerType()), StructField("payload", BinaryType())]
)
DESCRIPTOR = -1

_ARROW = pa.schema([("task", pa.int32()), ("edge", pa.int32()), ("payload", pa.binary())])
_BUCKET_BYTES = 8 << 20


def exchange(rows: DataFrame, tasks: int) -> DataFrame:
    """Carries every row to the task it is for."""
    return rows.repartitionById(tasks, F.col("task"))


def planned(rows: DataFrame) -> DataFrame:
    """The same rows with their plan cut off: Spark has planned the sources already, once per epoch is enough.

    Otherwise every operation on a micro-batch analyses, optimises and plans all the sources again.
    """
    java: Any = rows._jdf
    cut = java.sparkSession().internalCreateDataFrame(java.queryExecution().toRdd(), java.schema(), False)
    return DataFrame(cut, rows.sparkSession)


@dataclass
class Outbox:
    """Rows a task sends on."""

    rows: list[tuple[int, int, bytes]] = field(default_factory=list)

    def note(self, task: int, **content: Any) -> None:
        """Sends a descriptor."""
        self.rows.append((task, DESCRIPTOR, json.dumps(content).encode()))

    def ship(self, edge: int, table: pa.Table, tasks: int) -> None:
        """Sends tuples, sorted by HASH, to the owners of their key groups, in buckets of bounded size."""
        if not table.num_rows:
            return
        owners = owner(table.column(HASH).to_numpy(), tasks)
        bounds = np.searchsorted(owners, np.arange(tasks + 1))
        per_row = max(1, table.nbytes // table.num_rows)
        step = max(1, _BUCKET_BYTES // per_row)
        for task in range(tasks):
            for begin in range(int(bounds[task]), int(bounds[task + 1]), step):
                end = min(begin + step, int(bounds[task + 1]))
                self.rows.append((task, edge, encode(table.slice(begin, end - begin))))

    def batches(self) -> Iterator[pa.RecordBatch]:
        """What Spark gets: record batches of bounded size."""
        begin = 0
        while begin < len(self.rows):
            end, size = begin, 0
            while end < len(self.rows) and (end == begin or size + len(self.rows[end][2]) < 4 * _BUCKET_BYTES):
                size += len(self.rows[end][2])
                end += 1
            part = self.rows[begin:end]
            yield pa.record_batch([list(c) for c in zip(*part, strict=True)], schema=_ARROW)
            begin = end


@dataclass
class Inbox:
    """Rows a task received: buckets by edge, descriptors as they are."""

    buckets: dict[int, list[pa.Table]] = field(default_factory=dict)
    notes: list[bytes] = field(default_factory=list)

    @classmethod
    def read(cls, batches: Iterable[pa.RecordBatch]) -> Inbox:
        """Takes in everything that arrived."""
        inbox = cls()
        for batch in batches:
            edges = batch.column(1).to_pylist()
            for edge, payload in zip(edges, batch.column(2), strict=True):
                if edge == DESCRIPTOR:
                    inbox.notes.append(payload.as_py())
                else:
                    inbox.buckets.setdefault(edge, []).append(decode(payload.as_buffer()))
        return inbox


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
