"""From a source's rows to buckets: filter and compute in Spark, then drop late rows, hash, sort and cut in Python.

Spark sees `df.where(filters).select(columns)`, so filters and column pruning reach the source.  The Python side
gets only the columns that queries need.  What changes from epoch to epoch arrives as local properties of the Spark
job: the number of tasks, watermark and clock (`EpochParameters`), and what the queries of this epoch need of every
stream (`EpochInputs`).  So the streaming query itself is planned once, and queries come and go within what it selects
(`selections.py`).

A stream with several keys is sorted by each of them, and travels as often.  Where one task owns all keys it travels
once, as it came, and is sorted there: `cuts`.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql import DataFrame

from plait.kernels import I64, U64, Flags
from plait.kernels.sets import latest_of_bits, moved_bits
from plait.query.packed import unpacked
from plait.query.store import (
    ARRIVED,
    CORRUPT,
    FOREVER,
    HASH,
    MASK,
    MASK_BITS,
    NEEDED,
    IngestEdge,
    Input,
    mask_columns,
    watermark_ms,
)
from plait.query.types import digits
from plait.runtime.spark.frames import with_unscaled
from plait.runtime.task.exchange import SCHEMA, Cut, Outbox
from plait.runtime.task.notes import SourceNote
from plait.runtime.task.selections import Selection, with_bits
from plait.state.segments.columns import decimals, in_utc, single, take
from plait.state.segments.keys import hash_key, null_rows

PROPERTY = "plait.epoch"
INPUTS = "plait.inputs"
_SLICE_ROWS = 1 << 20
_SLICE_BYTES = 16 << 20
_LEAST, _MOST = np.iinfo(np.int64).min, np.iinfo(np.int64).max


@dataclass(frozen=True)
class EpochParameters:
    """What bucketising depends on beside the plan."""

    bounds: tuple[int, ...]
    """Which key groups each task owns."""
    clock_us: int
    marks_ms: Mapping[str, int] = field(default_factory=dict)
    """By mark the latest event time less the delay of its stream, where one was seen."""
    policy: str = "min"
    """How the watermark of a query follows from its marks."""
    latest_us: int | None = None
    """An event time beyond this does not move a watermark."""

    def to_property(self) -> str:
        """Text for `SparkContext.setLocalProperty`."""
        return json.dumps(asdict(self))

    @staticmethod
    def current() -> EpochParameters:
        """The parameters of the job this task belongs to."""
        return EpochParameters.from_property(_local_property(PROPERTY))

    @staticmethod
    def from_property(text: str) -> EpochParameters:
        """The inverse of `to_property`."""
        content = json.loads(text)
        return EpochParameters(**{**content, "bounds": tuple(content["bounds"])})


@dataclass(frozen=True)
class EpochInputs:
    """What this epoch's queries need of every stream, by its name: packed, so that a task unpacks its own only."""

    packed: Mapping[str, str]

    @staticmethod
    def of_plan(inputs: Iterable[Input]) -> EpochInputs:
        """Those of streams; rows of a table come with their own."""
        return EpochInputs({i.relation: b64encode(i.packed).decode() for i in inputs if not i.table})

    def to_property(self) -> str:
        """Text for `SparkContext.setLocalProperty`."""
        return json.dumps(self.packed)

    @staticmethod
    def current() -> EpochInputs:
        """Those of the job this task belongs to."""
        return EpochInputs(json.loads(_local_property(INPUTS)))

    def of(self, relation: str) -> Input:
        """What is needed of a stream; a worker that has seen it in an earlier epoch has it already."""
        found = unpacked(Input.from_json, b64decode(self.packed[relation]))
        assert isinstance(found, Input)
        return found


def _local_property(name: str) -> str:
    context = TaskContext.get()
    text = None if context is None else context.getLocalProperty(name)
    assert text is not None, "bucketising runs inside an epoch's job"
    return text


def bucketised(df: DataFrame, relation: str, selection: Selection, fixed: Input | None = None) -> DataFrame:
    """A stream as buckets: what is made of it is told with every epoch, unless it is `fixed`."""
    # Numbered, because mapInArrow looks its columns up by name, and a dot in one (`1.5D`, `a.b`) would mislead it.
    # As text, and few steps: each is analysed by itself, for every source of an engine that starts.
    columns = [f"({c.sql}) AS c{i}" for i, c in enumerate(selection.columns)]
    if selection.needed is not None:
        # NULL is not needed.
        columns.append(f"CASE WHEN {selection.needed} THEN true ELSE false END AS `{NEEDED}`")
    if selection.corrupt is not None:
        columns.append(f"`{selection.corrupt}` IS NOT NULL AS `{CORRUPT}`")
    words = mask_columns(len(selection.bits))
    columns += [f"{_bits(selection.bits, number)} AS `{word}`" for number, word in enumerate(words)]
    passing = ""
    if selection.passing and selection.passing == selection.bits:
        passing = " OR ".join(f"`{word}` != 0" for word in words)
    elif selection.passing is not None:
        # Where nobody reads a stream, it stays a source of the streaming query.
        df = df.where(" OR ".join(f"({text})" for text in selection.passing) or "false")
    selected = df.selectExpr(*columns) if columns else df.selectExpr("0 AS nothing")
    selected = selected.where(passing) if passing else selected
    narrow = {f"c{i}": kind for i, c in enumerate(selection.columns) if (kind := _narrow(c.type)) is not None}
    if narrow:
        kinds = dict(selected.dtypes)
        narrow = {name: kind for name, kind in narrow.items() if kinds[name] == f"decimal({kind[0]},{kind[1]})"}
        selected = with_unscaled(selected, narrow.keys())
    return selected.mapInArrow(_bucketise(relation, selection, fixed, narrow), SCHEMA)


def _narrow(kind: str) -> tuple[int, int] | None:
    """The digits of a decimal that Spark has as a 64-bit integer; None of another type."""
    found = digits(kind)
    return (found.precision, found.scale) if found is not None and found.precision <= 18 else None


def _bits(texts: Sequence[str | None], word: int) -> str:
    """SQL for the bits of the conditions that a row meets, those of one column."""
    bits = [
        f"CAST({1 << i} AS BIGINT)" if text is None else f"CASE WHEN {text} THEN CAST({1 << i} AS BIGINT) ELSE 0L END"
        for i, text in enumerate(texts[word * MASK_BITS : (word + 1) * MASK_BITS])
    ]
    return " | ".join(f"({bit})" for bit in bits)


def _bucketise(
    relation: str, selection: Selection, fixed: Input | None, narrow: Mapping[str, tuple[int, int]]
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    names = selection.names or ["nothing"]

    def run(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        source = fixed or EpochInputs.current().of(relation)
        named = (_with_decimals(batch, narrow).rename_columns(names) for batch in batches)
        rows = chain.from_iterable(
            with_bits(batch, selection, source).to_batches() for batch in named if batch.num_rows
        )
        yield from buckets(rows, source, EpochParameters.current())

    return run


def _with_decimals(batch: pa.RecordBatch, narrow: Mapping[str, tuple[int, int]]) -> pa.RecordBatch:
    """A batch with decimals where it has their unscaled values."""
    if not narrow:
        return batch
    columns = [
        decimals(column, *narrow[name]) if name in narrow else column
        for name, column in zip(batch.schema.names, batch.columns, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


def buckets(batches: Iterable[pa.RecordBatch], source: Input, parameters: EpochParameters) -> Iterator[pa.RecordBatch]:
    """The work of one source task: selected rows in, buckets and one descriptor out."""
    counted = SourceNote(source.relation)
    for table in map(in_utc, _slices(batches)):
        outbox = Outbox()
        counted.row_bytes = max(counted.row_bytes, table.nbytes / table.num_rows)
        timely = _admitted(table, source, parameters, counted)
        if source.travels_whole(len(parameters.bounds) - 1):
            outbox.ship_to(0, source.edges[0].id, timely)
        else:
            for edge in source.edges:
                outbox.ship(edge.id, _bucket(timely, source, edge, parameters.clock_us), parameters.bounds)
                if outbox.held >= _SLICE_BYTES:
                    # A large slice is held once, sorted, not once for every edge.
                    yield from outbox.batches()
        yield from outbox.batches()
    outbox = Outbox()
    outbox.note(0, counted)
    yield from outbox.batches()


def cuts(inputs: Iterable[Input], tasks: int, clock_us: int) -> dict[int, Cut]:
    """By edge, how a task of an epoch sorts the rows that sources send it whole."""

    def cut(source: Input, rows: pa.Table) -> Iterator[tuple[int, pa.Table]]:
        for edge in source.edges:
            bucket = _bucket(rows, source, edge, clock_us)
            if bucket.num_rows:
                yield edge.id, bucket

    return {source.edges[0].id: partial(cut, source) for source in inputs if source.travels_whole(tasks)}


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


def _admitted(table: pa.Table, source: Input, parameters: EpochParameters, counted: SourceNote) -> pa.Table:
    """The rows that some query sees, with their query sets; what is left out is counted."""
    if source.corrupt is not None:
        counted.corrupt += pc.sum(table.column(CORRUPT)).as_py() or 0
    present = _present(table, source.required)
    if present is not None:
        counted.null_key += table.num_rows - int(present.sum())
        table = table.filter(pa.array(present))
    counted.rows += table.num_rows
    found = _bits_of(table, source)
    at = _event_times(table, source, parameters, counted, found)
    until = _late_until(source, parameters)
    late = at is not None and until is not None and bool(len(at)) and int(at.min()) <= int(until.max())
    # Where nothing is late, Spark's bits are the query sets already.
    if not late and (not source.masked or tuple(f.text for f in source.filters) == source.texts):
        return table
    if not source.filters:
        return table.slice(0, 0)
    place = {text: number for number, text in enumerate(source.texts)}
    places = np.array([place[f.text] for f in source.filters])
    never = np.zeros(table.num_rows, np.int64), np.full(len(places), _LEAST)
    words = moved_bits(found, places, MASK_BITS, *(never if at is None or until is None else (at, until)))
    seen = words.any(axis=0)
    counted.late += int((moved_bits(found, places, MASK_BITS, *never).any(axis=0) & ~seen).sum()) if late else 0
    if source.masked:
        table = table.select([name for name in table.column_names if not name.startswith(MASK)])
        for name, word in zip(mask_columns(len(places)), words, strict=True):
            table = table.append_column(name, pa.array(word))
    return table if seen.all() else table.filter(pa.array(seen))


def _bits_of(table: pa.Table, source: Input) -> I64:
    """[words, rows]: which of the source's texts each row meets, as Spark has found."""
    if len(source.texts) <= 1:
        return np.ones((1, table.num_rows), np.int64)
    return np.stack([single(table.column(name)).to_numpy() for name in mask_columns(len(source.texts))])


def _present(table: pa.Table, required: Iterable[str]) -> Flags | None:
    """Which rows have a value in all of these columns; None if all do."""
    holes = [column for name in required if (column := table.column(name)).null_count]
    if not holes:
        return None
    found: Flags = np.logical_and.reduce([pc.is_valid(c).to_numpy() for c in holes])
    return found


def _event_times(
    table: pa.Table, source: Input, parameters: EpochParameters, counted: SourceNote, found: I64
) -> I64 | None:
    """The rows' event times in microseconds, the greatest integer where there is none.  Moves the marks.

    Late rows move marks as well.  None without event times.
    """
    if source.time_column is None or not table.num_rows:
        return None
    times = pc.cast(pc.cast(table.column(source.time_column), pa.timestamp("us")), pa.int64())
    valid = pc.is_valid(times).to_numpy()
    # The least integer stands for no time at all.
    at = np.maximum(pc.fill_null(times, 0).to_numpy(), _LEAST + 1)
    timely = valid
    if parameters.latest_us is not None:
        timely = valid & (at <= parameters.latest_us)
        counted.future += int(valid.sum() - timely.sum())
    if timely.any():
        latest = int(at[timely].max()) // 1000
        counted.max_event_ms = max(latest, counted.max_event_ms or latest)
    place = {text: number for number, text in enumerate(source.texts)}
    by_text: dict[tuple[str, ...], list[int]] = {}
    for mark in source.marks:
        if mark.required not in by_text:
            present = _present(table, mark.required)
            counts = timely if present is None else timely & present
            mine = np.where(counts, at, _LEAST)
            by_text[mark.required] = latest_of_bits(found, len(place), MASK_BITS, mine).tolist()
        last = max(by_text[mark.required][place[text]] for text in mark.texts)
        if last != _LEAST:
            latest = last // 1000 - (source.delay_ms or 0)
            counted.marks_ms[mark.key] = max(latest, counted.marks_ms.get(mark.key, latest))
    return np.where(valid, at, _MOST)


def _late_until(source: Input, parameters: EpochParameters) -> I64 | None:
    """By filter, the watermark of its queries in microseconds, or the least integer; None if nothing can be late.

    Spark's rule: late is at or below the watermark; a row without event time is never late.
    """
    if source.time_column is None or not parameters.marks_ms:
        return None
    found = [watermark_ms(f.marks, parameters.marks_ms, parameters.policy) for f in source.filters]
    limits = [_LEAST if at is None else min(max(at * 1000, _LEAST), _MOST - 1) for at in found]
    return np.array(limits, np.int64) if limits and max(limits) > _LEAST else None


def _passing(table: pa.Table, source: Input, filters: Iterable[int]) -> Flags:
    """Which rows have the bit of one of these filters."""
    passes = np.zeros(table.num_rows, np.bool_)
    words = [single(table.column(name)).to_numpy() for name in mask_columns(len(source.filters))]
    for word, bit in (divmod(source.position(filter), MASK_BITS) for filter in filters):
        passes |= words[word] >> bit & 1 == 1
    return passes


def spread(rows: int) -> U64:
    """Hashes at equal distances, from the least to the greatest."""
    return np.arange(rows, dtype=np.uint64) * np.uint64((2**64 - 1) // max(rows, 1))


def _bucket(table: pa.Table, source: Input, edge: IngestEdge, clock_us: int) -> pa.Table:
    """The rows that can be joined on this edge's key, sorted by its hash, with the columns that travel."""
    if edge.filters is not None and source.masked:
        table = table.filter(pa.array(_passing(table, source, edge.filters)))
    nulls = null_rows(table, edge.key) if edge.key.columns else None
    if nulls is not None:
        table = table.filter(pa.array(~nulls))
    # Rows that travel without a key are dealt out evenly.
    hashes = hash_key(table, edge.key) if edge.key.columns else spread(table.num_rows)
    order = np.argsort(hashes)
    travelling = source.travelling if edge.columns is None else edge.columns
    names = [*travelling, *(mask_columns(len(source.filters)) if source.masked else ())]
    arrays = [pa.array(hashes[order]), *take([single(table.column(name)) for name in names], order)]
    if edge.ttl_us is not None:
        kept = FOREVER if source.ttl_us is None else clock_us + source.ttl_us - edge.ttl_us
        arrived = np.full(len(order), kept, np.int64)
        if source.needed is not None:
            arrived[single(table.column(NEEDED)).to_numpy(zero_copy_only=False)[order]] = FOREVER
        arrays.append(pa.array(arrived))
        names.append(ARRIVED)
    return pa.table(arrays, names=[HASH, *names])
