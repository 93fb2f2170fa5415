"""From a source's rows to buckets: filter and compute in Spark, then drop late rows, hash, sort and cut in Python.

Spark sees `df.where(filters).select(columns)`, so filters and column pruning reach the source.  The Python side
gets only the columns the plan needs.  What changes from epoch to epoch (number of tasks, watermark, clock) arrives
as a local property of the Spark job, so the streaming query itself is planned once.

A stream with several keys is sorted by each of them, and travels as often.  Where one task owns all keys it travels
once, as it came, and is sorted there: `cuts`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql import DataFrame

from plait.kernels import U64
from plait.query.plan import ARRIVED, FOREVER, HASH, MASK, NEEDED, IngestEdge, Input
from plait.runtime.exchange import SCHEMA, Cut, Outbox
from plait.state.columns import in_utc, single, take
from plait.state.keys import hash_key, null_rows

PROPERTY = "plait.epoch"
_SLICE_ROWS = 1 << 20
_SLICE_BYTES = 16 << 20


@dataclass(frozen=True)
class EpochParameters:
    """What bucketising depends on beside the plan."""

    tasks: int
    watermark_ms: int | None
    clock_us: int

    def to_property(self) -> str:
        """Text for `SparkContext.setLocalProperty`."""
        return json.dumps(asdict(self))

    @staticmethod
    def current() -> EpochParameters:
        """The parameters of the job this task belongs to."""
        context = TaskContext.get()
        text = None if context is None else context.getLocalProperty(PROPERTY)
        assert text is not None, "bucketising runs inside an epoch's job"
        return EpochParameters.from_property(text)

    @staticmethod
    def from_property(text: str) -> EpochParameters:
        """The inverse of `to_property`."""
        return EpochParameters(**json.loads(text))


def bucketised(df: DataFrame, source: Input) -> DataFrame:
    """The stream as buckets."""
    # Numbered, because mapInArrow looks its columns up by name, and a dot in one (`1.5D`, `a.b`) would mislead it.
    numbers = {c.name: f"c{i}" for i, c in enumerate(source.columns)}
    # As text, and few steps: each is analysed by itself, for every source of an engine that starts.
    columns = [f"({c.sql}) AS {numbers[c.name]}" for c in source.columns]
    passing = [f"{numbers[name]} IS NOT NULL" for name in source.required]
    if source.needed is not None:
        # NULL is not needed.
        columns.append(f"CASE WHEN {source.needed} THEN true ELSE false END AS `{NEEDED}`")
    if len(source.filters) > 1:
        columns.append(f"{_query_set(source)} AS `{MASK}`")
        if None not in source.filters:
            passing.append(f"`{MASK}` != 0")
    elif source.filters[0] is not None:
        df = df.where(source.filters[0])
    selected = df.selectExpr(*columns)
    return (selected.where(" AND ".join(passing)) if passing else selected).mapInArrow(_bucketise(source), SCHEMA)


def _query_set(source: Input) -> str:
    """SQL for the bits of the filters a row passes."""
    bits = [
        f"CAST({1 << i} AS BIGINT)" if text is None else f"CASE WHEN {text} THEN CAST({1 << i} AS BIGINT) ELSE 0L END"
        for i, text in enumerate(source.filters)
    ]
    return " | ".join(f"({bit})" for bit in bits)


def _bucketise(source: Input) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    names = [c.name for c in source.columns]
    names += ([NEEDED] if source.needed is not None else []) + ([MASK] if len(source.filters) > 1 else [])

    def run(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        named = (batch.rename_columns(names) for batch in batches)
        yield from buckets(named, source, EpochParameters.current())

    return run


def buckets(batches: Iterable[pa.RecordBatch], source: Input, parameters: EpochParameters) -> Iterator[pa.RecordBatch]:
    """The work of one source task: selected rows in, buckets and one descriptor out."""
    counted = _Counts(source.relation)
    for table in map(in_utc, _slices(batches)):
        outbox = Outbox()
        counted.row_bytes = max(counted.row_bytes, table.nbytes / table.num_rows)
        timely = _drop_late(table, source, parameters, counted)
        if source.travels_whole(parameters.tasks):
            outbox.ship_to(0, source.edges[0].id, timely)
        else:
            for edge in source.edges:
                outbox.ship(edge.id, _bucket(timely, source, edge, parameters.clock_us), parameters.tasks)
                if outbox.held >= _SLICE_BYTES:
                    # A large slice is held once, sorted, not once for every edge.
                    yield from outbox.batches()
        yield from outbox.batches()
    outbox = Outbox()
    outbox.note(0, kind="source", **asdict(counted))
    yield from outbox.batches()


def cuts(inputs: Iterable[Input], tasks: int, clock_us: int) -> dict[int, Cut]:
    """By edge, how a task of an epoch sorts the rows that sources send it whole."""

    def cut(source: Input, rows: pa.Table) -> Iterator[tuple[int, pa.Table]]:
        for edge in source.edges:
            bucket = _bucket(rows, source, edge, clock_us)
            if bucket.num_rows:
                yield edge.id, bucket

    return {source.edges[0].id: partial(cut, source) for source in inputs if source.travels_whole(tasks)}


@dataclass
class _Counts:
    """What one source task saw."""

    relation: str
    rows: int = 0
    late: int = 0
    max_event_ms: int | None = None
    row_bytes: float = 0.0
    """Mean bytes of a row in the slice with the widest ones."""


def _slices(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Tables of bounded size, so that a large file, or one of wide rows, costs no more memory than a small one."""
    held: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in chain.from_iterable(map(_pieces, batches)):
        held.append(batch)
        rows += batch.num_rows
        size += batch.nbytes
        if rows >= _SLICE_ROWS or size >= _SLICE_BYTES:
            yield pa.Table.from_batches(held)
            held, rows, size = [], 0, 0
    if rows:
        yield pa.Table.from_batches(held)


def _pieces(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """A batch in pieces of at most a slice; nothing is copied."""
    step = max(1, batch.num_rows * _SLICE_BYTES // max(1, batch.nbytes))
    for begin in range(0, batch.num_rows, step):
        yield batch.slice(begin, step)


def _drop_late(table: pa.Table, source: Input, parameters: EpochParameters, counted: _Counts) -> pa.Table:
    """Spark's rule: late is at or below the watermark; a row without event time is never late."""
    counted.rows += table.num_rows
    if source.time_column is None:
        return table
    times = pc.cast(pc.cast(table.column(source.time_column), pa.timestamp("us")), pa.int64())
    latest = pc.max(times).as_py()
    if latest is not None:
        seen = counted.max_event_ms
        counted.max_event_ms = latest // 1000 if seen is None else max(seen, latest // 1000)
    if parameters.watermark_ms is None:
        return table
    late = pc.fill_null(pc.less_equal(times, parameters.watermark_ms * 1000), False)
    dropped = pc.sum(late).as_py() or 0
    counted.late += dropped
    return table.filter(pc.invert(late)) if dropped else table


def spread(rows: int) -> U64:
    """Hashes at equal distances, from the least to the greatest."""
    return np.arange(rows, dtype=np.uint64) * np.uint64((2**64 - 1) // max(rows, 1))


def _bucket(table: pa.Table, source: Input, edge: IngestEdge, clock_us: int) -> pa.Table:
    """The rows that can be joined on this edge's key, sorted by its hash, with the columns that travel."""
    nulls = null_rows(table, edge.key) if edge.key.columns else None
    if nulls is not None:
        table = table.filter(pa.array(~nulls))
    # Rows that travel without a key are dealt out evenly.
    hashes = hash_key(table, edge.key) if edge.key.columns else spread(table.num_rows)
    order = np.argsort(hashes)
    names = [*source.travelling, *([MASK] if len(source.filters) > 1 else [])]
    arrays = [pa.array(hashes[order]), *take([single(table.column(name)) for name in names], order)]
    if source.ttl_us is not None:
        arrived = np.full(len(order), clock_us, np.int64)
        if source.needed is not None:
            arrived[single(table.column(NEEDED)).to_numpy(zero_copy_only=False)[order]] = FOREVER
        arrays.append(pa.array(arrived))
        names.append(ARRIVED)
    return pa.table(arrays, names=[HASH, *names])
