"""Streams on one checkpoint whose queries change between runs, and the oracle's answer over rows by birth.

`python -m tests.spark.changes_driver DIR` is a program to be killed: on `DIR/checkpoint` it adds a query whose stores
have to be filled.  Where it dies is up to `PLAIT_FAULT`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession

import plait
from plait.runtime.driver import prepare
from plait.runtime.task.result_writer import results_folder
from plait.testing import ScriptedStream, run_epochs
from tests.oracle import Bag, bag, batch_join

SCHEMAS = {
    "a": "k long, m long, v long, s string",
    "b": "k long, m long, w long",
    "c": "k long, x long",
    "t": "k long, ts timestamp, n long",
    "u": "k long, ts timestamp, n long",
}
OTHER = "SELECT a.v, b.w FROM a JOIN b ON a.m = b.m"
BASE = "SELECT a.v, b.w FROM a JOIN b ON a.k = b.k"
ROWS = 12
SLOW = 300
"""Bytes per second at which the stores of a few rows take many epochs to be filled."""


class Changing:
    """Streams of which a file arrives per epoch; every engine on the checkpoint may have other queries."""

    def __init__(self, spark: SparkSession, home: Path, **config: Any) -> None:
        self.spark, self.home = spark, home
        self.checkpoint = home / "checkpoint"
        self.config = {"tasks": 2, "sync": False, "gc_grace_seconds": 0.0, **config}
        self.streams: dict[str, ScriptedStream] = {}
        self.born: dict[str, list[int]] = {}
        """By stream the epoch of each of its files."""
        self.epoch = -1
        self.ran: list[dict[str, Any]] = []

    def stream(self, name: str, schema: str | None = None) -> None:
        """A stream that has files from the next epoch on; one that is there gets another schema."""
        self.streams[name] = ScriptedStream(self.spark, self.home / name, schema or SCHEMAS[name])
        self.born.setdefault(name, [])

    def arrive(self, *names: str, **rows: Sequence[Sequence[Any]]) -> Changing:
        """An epoch's rows of these streams (of a and b, if none is named): given ones, or made ones."""
        self.epoch += 1
        for name in (*names, *rows) or ("a", "b"):
            if name not in self.streams:
                self.stream(name)
            self.streams[name].add(rows[name] if name in rows else made(name, self.epoch))
            self.born[name].append(self.epoch)
        return self

    @contextmanager
    def engine(self, *names: str, keep: Mapping[str, str] | None = None, **config: Any) -> Iterator[plait.Engine]:
        """An engine with these streams, or all."""
        settings = plait.Config(**{**self.config, **config})
        with plait.Engine(self.spark, checkpoint=str(self.checkpoint), config=settings) as engine:
            for name in names or self.streams:
                engine.stream(name, self.frame(name), keep=(keep or {}).get(name, "used"))
            yield engine

    def frame(self, name: str) -> DataFrame:
        """A stream as Spark sees it; one with event times has a watermark."""
        frame = self.streams[name].frame()
        return frame.withWatermark("ts", "1 minute") if "ts" in frame.columns else frame

    def run(self, engine: plait.Engine) -> list[int]:
        """Runs what is available; the epochs it took."""
        self.ran = run_epochs(engine)
        return [progress["epoch"] for progress in self.ran]

    def table(self, name: str, first: int = 0, before: int | None = None) -> pa.Table:
        """The rows of a stream that were born in these epochs."""
        stream = self.streams[name]
        files = zip(stream.files, self.born[name], strict=True)
        wanted = [path for path, born in files if born >= first and (before is None or born < before)]
        tables = [pq.read_table(path, schema=stream.arrow) for path in wanted]
        return pa.concat_tables([stream.arrow.empty_table(), *tables])

    def answer(self, sql: str, floors: Mapping[str, int] | None = None, before: int | None = None) -> Bag:
        """The oracle's answer over rows born at the floors of their streams or later, and before an epoch."""
        return batch_join({name: self.table(name, (floors or {}).get(name, 0), before) for name in self.streams}, sql)

    def since_now(self, sql: str, live: int, floors: Mapping[str, int] | None = None) -> Bag:
        """The answer of a query that began with old partners, in epoch `live`: one row at least is that young."""
        return self.answer(sql, floors) - self.answer(sql, floors, live)

    def kept(self, query: str) -> int:
        """How many result files of a query, by its id, are in the checkpoint."""
        return len(list((self.checkpoint / "results" / results_folder(query)).glob("*.parquet")))


def made(name: str, epoch: int) -> list[tuple[Any, ...]]:
    """Twelve rows; keys meet across epochs, some are NULL."""
    ids = range(epoch * ROWS, epoch * ROWS + ROWS)
    if name == "a":
        return [(i % 7, i % 5 if i % 11 else None, i, "xyzX"[i % 4]) for i in ids]
    if name == "b":
        return [(i % 6 if i % 9 else None, i % 4, -i) for i in ids]
    if name in ("t", "u"):
        # Two minutes of event time per epoch.
        begin = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(minutes=2 * epoch)
        return [(i % 3, begin + timedelta(seconds=9 * (i % ROWS) + (name == "u")), i) for i in ids]
    return [(i % 5, i * 10) for i in ids]


def found(query: plait.QueryHandle) -> Bag:
    """All committed rows of a query."""
    return bag(query.results().toArrow())


class DiedError(RuntimeError):
    """Stands for a death of the process."""


def die_at(monkeypatch: pytest.MonkeyPatch, point: str, epoch: int) -> None:
    """The driver fails at a fault point instead of dying there: what rests on the checkpoint is the same."""

    def reached(here: str, number: int) -> None:
        if (here, number) == (point, epoch):
            raise DiedError(point)

    monkeypatch.setattr("plait.runtime.driver.commit.reached", reached)


def main(home: Path) -> None:
    """Adds a query by another key to a checkpoint, and fills its stores slowly."""
    prepare.BUILD_BYTES_PER_SECOND = SLOW
    # It lives for seconds: compiling well costs more than it gains.
    options = {"spark.driver.extraJavaOptions": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"}
    # A task may fail: Spark runs it again.
    spark = plait.session(app="plait-changes", master="local[2,3]", settings=options)
    changing = Changing(spark, home)
    for name in ("a", "b"):
        changing.stream(name)
    with changing.engine(keep={"a": "all", "b": "all"}) as engine:
        engine.query("q", BASE)
        engine.query("other", OTHER, since="state")
        changing.run(engine)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
