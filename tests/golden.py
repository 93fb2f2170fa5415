"""Checkpoints that releases have written, kept in `tests/fixtures/checkpoints/`: each later release must open them.

`python -m tests.golden tests/fixtures/checkpoints/format-N.tar.gz` writes one with the code of today.  It is run
once per format, by the last release that writes that format; the files are never written again.
"""

from __future__ import annotations

import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession

import plait
from plait.testing import ScriptedStream, run_epochs
from tests.oracle import Bag, batch_join

EPOCHS = 19
"""Epochs in the kept checkpoints: the last snapshot is followed by plain manifests, and merges are under way."""

SCHEMAS = {
    "clicks": "id long, user long, page string, ts timestamp",
    "orders": "id long, user long, amount double, ts timestamp",
    "payments": "order_id long, way string, paid decimal(10,2)",
    "regions": "user long, name string",
}

QUERIES = {
    "plain": "SELECT o.id, o.amount, p.way FROM orders o JOIN payments p ON p.order_id = o.id",
    "chain": "SELECT r.name, o.id, p.paid FROM orders o JOIN payments p ON p.order_id = o.id "
    "JOIN regions r ON r.user = o.user",
    "dear": "SELECT o.id, p.way FROM orders o JOIN payments p ON p.order_id = o.id "
    "WHERE o.amount > 50 AND p.way = 'card'",
    "near": "SELECT c.id AS click, o.id AS bought FROM clicks c JOIN orders o ON c.user = o.user "
    "AND o.ts BETWEEN c.ts AND c.ts + INTERVAL 3 MINUTES",
    "ways": "SELECT p.way, count(*) AS n, sum(p.paid) AS total FROM orders o JOIN payments p ON p.order_id = o.id "
    "GROUP BY p.way",
}

PLACE = "/golden"
"""Where the files of the streams lie, as the kept checkpoints have it."""

_BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
_PAGES, _WAYS = ("home", "search", "été", ""), ("card", "cash", "transfer")


def rows(stream: str, epoch: int) -> list[tuple[Any, ...]]:
    """What arrives in an epoch: a minute of event time, every key meets others, some are NULL."""
    at = _BEGIN + timedelta(minutes=epoch)
    ids = range(epoch * 12, epoch * 12 + 12)
    if stream == "clicks":
        return [(i, i % 5, _PAGES[i % 4], at + timedelta(seconds=i % 50)) for i in ids]
    if stream == "orders":
        return [(i, None if i % 11 == 0 else i % 5, i * 7 % 101 + 0.5, at + timedelta(seconds=i % 40)) for i in ids]
    if stream == "payments":
        return [(max(0, i - i % 7 * 3), _WAYS[i % 3], f"{i}.25") for i in ids]
    return [(epoch, f"region {epoch}")] if epoch < 5 else []


def table(stream: str, epochs: int) -> pa.Table:
    """All rows of the first epochs."""
    found = [row for epoch in range(epochs) for row in rows(stream, epoch)]
    schema = _arrow(stream)
    columns = list(zip(*found, strict=True))
    return pa.table([pa.array([_value(v, f) for v in c], f.type) for c, f in zip(columns, schema, strict=True)], schema)


def expected(query: str, epochs: int) -> Bag:
    """The answer after so many epochs; nothing is late, and no partner expires before it has been met."""
    return batch_join({stream: table(stream, epochs) for stream in SCHEMAS}, QUERIES[query])


class Golden:
    """The streams, and the engine, of a kept checkpoint."""

    def __init__(self, spark: SparkSession, home: Path) -> None:
        self.spark = spark
        self.checkpoint = home / "checkpoint"
        self.streams = {name: ScriptedStream(spark, home / name, schema) for name, schema in SCHEMAS.items()}

    def arrive(self, first: int, after: int) -> None:
        """The rows of these epochs arrive: each is a file of its own."""
        for epoch in range(first, after):
            for name, stream in self.streams.items():
                values = rows(name, epoch)
                columns = list(zip(*values, strict=True)) or [()] * len(stream.arrow)
                arrays = [
                    pa.array([_value(v, f) for v in c], f.type) for c, f in zip(columns, stream.arrow, strict=True)
                ]
                stream.add(pa.table(arrays, schema=stream.arrow))

    @contextmanager
    def engine(self, **config: Any) -> Iterator[plait.Engine]:
        """The engine that wrote it, or goes on with it."""
        settings = {"tasks": 2, "fan_in": 2, "compress_above": "4k", "sync": False, "gc_grace_seconds": 0.0}
        with plait.Engine(self.spark, str(self.checkpoint), plait.Config(**{**settings, **config})) as engine:
            for name, stream in self.streams.items():
                frame = stream.frame()
                frame = frame.withWatermark("ts", "2 minutes") if "ts" in frame.columns else frame
                engine.stream(name, frame, ttl="3650 days" if name == "regions" else None)
            for name, sql in QUERIES.items():
                engine.query(name, sql)
            yield engine


def _arrow(stream: str) -> pa.Schema:
    from pyspark.sql.pandas.types import to_arrow_schema
    from pyspark.sql.types import StructType

    return to_arrow_schema(StructType.fromDDL(SCHEMAS[stream]), timezone="UTC")


def _value(value: Any, field: pa.Field) -> Any:
    from decimal import Decimal

    return Decimal(value) if pa.types.is_decimal(field.type) else value


def write(spark: SparkSession, target: Path) -> None:
    """Runs the engine for `EPOCHS` epochs and keeps what it wrote."""
    with tempfile.TemporaryDirectory() as temporary:
        golden = Golden(spark, Path(temporary))
        golden.arrive(0, EPOCHS)
        with golden.engine() as engine:
            assert len(run_epochs(engine)) == EPOCHS
        _move(golden.checkpoint, temporary, PLACE)
        with tarfile.open(target, "x:gz") as archive:
            archive.add(golden.checkpoint, "checkpoint")


def restored(spark: SparkSession, kept: Path, home: Path) -> Golden:
    """A copy of a kept checkpoint, with the files that it has read."""
    with tarfile.open(kept) as archive:
        archive.extractall(home, filter="data")
    golden = Golden(spark, home)
    _move(golden.checkpoint, PLACE, str(home))
    golden.arrive(0, EPOCHS)
    return golden


def _move(checkpoint: Path, old: str, new: str) -> None:
    """Spark's logs of file sources name the files by their whole paths."""
    for log in (checkpoint / "spark" / "sources").rglob("*"):
        if log.name.endswith(".crc"):
            log.unlink()
        elif log.is_file():
            log.write_text(log.read_text().replace(old, new))


if __name__ == "__main__":
    write(plait.session(settings={"spark.sql.session.timeZone": "UTC"}), Path(sys.argv[1]))
