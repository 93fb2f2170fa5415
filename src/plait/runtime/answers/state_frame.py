"""State as a DataFrame: the live rows of one stream, read from a checkpoint by Spark's own tasks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import cast

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from plait.errors import CheckpointError
from plait.state.files.segment_home import SegmentHome
from plait.state.log.inspect import Inspection
from plait.state.segments.segment import SegmentInfo
from plait.state.segments.segment_reader import open_segment

_ROWS = 1 << 16
"""Rows handed to Spark at a time."""


def read_state(spark: SparkSession, checkpoint: str, stream: str, state_dir: str | None = None) -> DataFrame:
    """The rows of a stream that are kept after the last committed epoch, with the columns that its queries need.

    A key that is only ever looked up by its hash is not among them.  Rows that have expired stay until they are merged
    away.  `state_dir` is needed only if the engine ran with `Config.state_dir`.
    """
    inspection = Inspection(checkpoint, state_dir)
    # A join that is kept is no stream.
    stores = {name: of for name, of in inspection.catalog()["stores"].items() if not of.get("joins")}
    names = sorted(name for name in stores if name.partition("[")[0] == stream)
    if not names:
        known = sorted({name.partition("[")[0] for name in stores})
        raise CheckpointError(
            "STORE",
            f"the checkpoint has no state of a stream {stream!r}",
            f"use one of: {', '.join(known) or 'none yet'}",
        )
    # A stream may be stored by several keys: the one with most of the past is asked.
    live = inspection.live().segments
    store = max(names, key=lambda name: (sum(info.rows for info in live.get(name, ())), len(stores[name]["columns"])))
    columns = [(name, kind) for name, kind in stores[store]["columns"]]
    segments = live.get(store, ())
    if not columns:
        raise CheckpointError(
            "STORE", f"no column of {stream!r} is kept: its queries need the hash of its key only", "select a column"
        )
    # Numbered, because mapInArrow looks columns up by name, and a dot in one would mislead it.
    schema = ", ".join(f"c{i} {kind}" for i, (_, kind) in enumerate(columns))
    rows = [(json.dumps(info.to_json()),) for info in segments]
    listed = spark.createDataFrame(rows, "segment string").repartition(max(1, min(len(rows), 64)))
    types = to_arrow_schema(cast(StructType, StructType.fromDDL(schema)), timezone="UTC")
    read = listed.mapInArrow(_reader(inspection.home, [name for name, _ in columns], types), schema)
    return read.toDF(*(name for name, _ in columns))


def _reader(
    home: SegmentHome, columns: list[str], types: pa.Schema
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Rows of segments; a column that a segment does not have, since it is older, is NULL."""

    def read(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for text in batch.column(0).to_pylist():
                info = SegmentInfo.from_json(json.loads(text))
                segment = open_segment(home, info)
                for begin in range(info.first, info.first + info.rows, _ROWS):
                    count = min(_ROWS, info.first + info.rows - begin)
                    rows = segment.slice(begin, begin + count)
                    arrays = [
                        rows.column(name) if name in rows.column_names else pa.nulls(count, field.type)
                        for name, field in zip(columns, types, strict=True)
                    ]
                    yield from pa.table(arrays, names=types.names).combine_chunks().to_batches()

    return read
