"""Many epochs on Spark: kept rows of every type stay exactly right while their files are merged."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import plait
from plait.runtime.answers import result_reader as rows
from plait.runtime.driver import result_merge
from plait.state.log.manifest import ResultFile
from plait.testing import ScriptedStream, run_epochs
from tests.golden import EPOCHS, Golden, restored
from tests.oracle import bag, batch_join
from tests.spark.pair import Pair
from tests.spark.test_golden import KEPT

pytestmark = pytest.mark.spark


@pytest.fixture(autouse=True)
def utc(spark: SparkSession) -> Iterator[None]:
    """Times are compared with an oracle that knows no zones."""
    before = spark.conf.get("spark.sql.session.timeZone", "UTC") or "UTC"
    spark.conf.set("spark.sql.session.timeZone", "UTC")
    yield
    spark.conf.set("spark.sql.session.timeZone", before)


def files_of(engine: plait.Engine, query: str) -> tuple[ResultFile, ...]:
    return engine.checkpoint.log.results().get(query, ())


SCHEMA = "k long, at timestamp, day date, price decimal(10,2), name string, raw binary, share double"
_BEGIN = datetime(2026, 1, 1, tzinfo=UTC)


def typed(epoch: int) -> list[tuple[Any, ...]]:
    """Rows with values of every kind, some of them NULL."""
    found = []
    for i in range(epoch * 4, epoch * 4 + 4):
        at = _BEGIN + timedelta(seconds=i, microseconds=i) if i % 5 else None
        day = (_BEGIN + timedelta(days=i)).date() if i % 3 else None
        found.append((i % 7, at, day, Decimal(i) / 4, None if i % 4 == 0 else f"é{i}", bytes([i % 256]), i / 3))
    return found


QUERIES = {
    "joined": "SELECT a.at, a.day, a.price, b.name, b.raw, a.share FROM a JOIN b ON a.k = b.k",
    # In the files of the first, with sets.
    "some": "SELECT a.at, a.day, a.price, b.name, b.raw, a.share FROM a JOIN b ON a.k = b.k WHERE a.price >= 2",
    # Only Spark can evaluate these; small answers are written by Arrow, large ones by Spark.
    "told": "SELECT reverse(concat_ws('-', a.name, b.name)) AS names, a.at, b.day, a.price FROM a JOIN b ON a.k = b.k",
}


def test_oracle_rows_of_every_type_survive_merges_of_their_files(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = {name: ScriptedStream(spark, tmp_path / name, SCHEMA) for name in "ab"}
    by_spark: list[str] = []
    written = rows.ResultRows.written

    def counted(self: rows.ResultRows, query: str, *args: Any, **more: Any) -> list[ResultFile]:
        by_spark.append(query)
        return written(self, query, *args, **more)

    monkeypatch.setattr(rows.ResultRows, "written", counted)
    monkeypatch.setattr(result_merge, "FAN_IN", 3)
    done = 0
    for small in (rows.SMALL_BYTES, 0, rows.SMALL_BYTES):
        monkeypatch.setattr(rows, "SMALL_BYTES", small)
        for _ in range(5):
            for stream in streams.values():
                stream.add(typed(done))
            done += 1
        config = plait.Config(tasks=2, snapshot_every=2, gc_grace_seconds=0, sync=False)
        with plait.Engine(spark, str(tmp_path / "checkpoint"), config) as engine:
            for name, stream in streams.items():
                engine.stream(name, stream.frame())
            queries = {name: engine.query(name, sql) for name, sql in QUERIES.items()}
            run_epochs(engine)
            tables = {name: stream.table() for name, stream in streams.items()}
            for name, query in queries.items():
                assert bag(query.results().toArrow()) == batch_join(tables, QUERIES[name]), name
                assert len(files_of(engine, name)) <= 10
                assert any(file.tier for file in files_of(engine, name))
            assert any(file.bit is not None and file.tier for file in files_of(engine, "some"))
    # Five epochs were written by Spark; files of two kinds were merged by it as well.
    assert by_spark.count("told") > 5


def test_the_memory_sink_verifies_no_file_twice_and_frames_outlive_merges(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verified: list[str] = []
    verify = rows._verify

    def counted(files: Any, name: str, file: ResultFile) -> None:
        verified.append(name)
        verify(files, name, file)

    monkeypatch.setattr(rows, "_verify", counted)
    pair = Pair(spark, tmp_path, {"sync": False, "snapshot_every": 4}).arrive(12)
    with pair.engine() as engine:
        query = plait.QueryHandle(engine, "q").sink("memory")
        run_epochs(engine)
        assert verified == []
        assert bag(spark.table("q").toArrow()) == pair.expected()
        early, then = query.results(), pair.expected()
        before = {file.path for file in files_of(engine, "q")}
        pair.arrive(12)
        verified.clear()
        run_epochs(engine)
        assert verified == []
        assert bag(spark.table("q").toArrow()) == pair.expected()
        # Two files per epoch, and what a user holds may read those that have been merged since.
        assert len(files_of(engine, "q")) < 24
        assert not before <= {file.path for file in files_of(engine, "q")}
        assert bag(early.toArrow()) == then
        assert len(engine._desk.known) <= len(files_of(engine, "q")) + 2 * 16


@pytest.mark.parametrize("kept", KEPT, ids=lambda path: path.name.removesuffix(".tar.gz"))
def test_an_old_checkpoint_gets_rid_of_its_history(spark: SparkSession, tmp_path: Path, kept: Path) -> None:
    golden: Golden = restored(spark, kept, tmp_path)
    golden.arrive(EPOCHS, 34)
    with golden.engine() as engine:
        run_epochs(engine)
        assert engine.checkpoint.log.epochs() == [32, 33]
        assert len(list((golden.checkpoint / "results").rglob("*.parquet"))) < 5 * 2 * 12
