"""A checkpoint behind a URI that Spark and Plait both reach: `webhdfs:`, with real sessions and a small service."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import plait
from plait.state.log.inspect import Inspection
from plait.testing import run_epochs
from tests.oracle import bag, batch_join
from tests.spark.pair import SQL, Pair
from tests.webhdfs import WebHdfs

pytestmark = pytest.mark.spark


@pytest.fixture
def service(tmp_path: Path) -> Iterator[WebHdfs]:
    it = WebHdfs(tmp_path / "service")
    yield it
    it.stop()


def shared(spark: SparkSession, service: WebHdfs, tmp_path: Path, **config: Any) -> Pair:
    pair = Pair(spark, tmp_path, {"cache_dir": str(tmp_path / "cache"), "fan_in": 2, **config})
    pair.checkpoint = service.uri("check/point")  # type: ignore[assignment]
    return pair


def segments(service: WebHdfs) -> list[Path]:
    return sorted((service.folder / "check" / "point" / "state").rglob("*.*"))


def test_oracle_epochs_restarts_and_lost_caches_on_a_shared_checkpoint(
    spark: SparkSession, service: WebHdfs, tmp_path: Path
) -> None:
    pair = shared(spark, service, tmp_path).arrive(3)
    assert pair.run() == [0, 1, 2]
    pair.arrive(2)
    # Another host: nothing is cached there.
    assert pair.run(cache_dir=str(tmp_path / "elsewhere"), cache_limit="3k") == [3, 4]
    shutil.rmtree(tmp_path / "cache")
    pair.arrive()
    with pair.engine() as engine:
        (progress,) = run_epochs(engine)
        assert progress["state"]["cache"]["misses"] > 0
        assert bag(plait.QueryHandle(engine, "q").results().toArrow()) == pair.expected()
        # While the engine is open: the cache goes, and more rows come.
        shutil.rmtree(tmp_path / "cache")
        pair.arrive()
        assert [p["epoch"] for p in run_epochs(engine)] == [6]
        assert bag(plait.QueryHandle(engine, "q").results().toArrow()) == pair.expected()
    uri = str(pair.checkpoint)
    assert list(Inspection(uri).findings()) == []
    rows = plait.read_state(spark, uri, "a")
    assert sorted(row.v for row in rows.collect()) == sorted(pair.a.table().column("v").to_pylist())


def test_a_missing_segment_a_second_driver_and_a_service_that_is_down_are_told_and_survived(
    spark: SparkSession, service: WebHdfs, tmp_path: Path
) -> None:
    pair = shared(spark, service, tmp_path).arrive(2)
    with pair.engine() as first:
        run_epochs(first)
        with pair.engine():
            pair.arrive()
            with pytest.raises(plait.PlaitError, match="FENCED"):
                run_epochs(first)
    assert pair.run() == [2]
    pair.arrive()

    aside = tmp_path / "aside"
    (service.folder / "check" / "point" / "state").rename(aside)
    shutil.rmtree(tmp_path / "cache")
    error = pair.refused("SEGMENT_MISSING")
    assert "webhdfs://localhost" in error.cause
    shutil.rmtree(service.folder / "check" / "point" / "state")
    aside.rename(service.folder / "check" / "point" / "state")

    victim = max(segments(service), key=lambda path: path.stat().st_mtime)
    whole = victim.read_bytes()
    for path in segments(service):
        path.write_bytes(bytes(b ^ 1 for b in path.read_bytes()))
    pair.refused("SEGMENT_CORRUPT")
    for path in segments(service):
        path.write_bytes(bytes(b ^ 1 for b in path.read_bytes()))
    assert victim.read_bytes() == whole

    with pair.engine() as engine:
        service.stop()
        with pytest.raises(plait.StorageError, match="STORAGE_UNREACHABLE"):
            run_epochs(engine)
        service.start()
    assert pair.run() == [3]


def test_queries_that_spark_finishes_and_a_parquet_sink_work_on_a_shared_checkpoint(
    spark: SparkSession, service: WebHdfs, tmp_path: Path
) -> None:
    pair = shared(spark, service, tmp_path).arrive(2)
    queries = {"q": SQL, "s": "SELECT concat(a.v, '-', b.w) AS t FROM a JOIN b ON a.k = b.k WHERE a.v + b.w > -15"}
    with pair.engine(queries) as engine:
        plait.QueryHandle(engine, "q").sink("parquet", path=str(tmp_path / "out"))
        assert len(run_epochs(engine)) == 2
        for name, sql in queries.items():
            expected = batch_join({"a": pair.a.table(), "b": pair.b.table()}, sql)
            assert bag(plait.QueryHandle(engine, name).results().toArrow()) == expected


def test_sparks_own_part_works_as_a_stock_session_writes_it(
    spark: SparkSession, service: WebHdfs, tmp_path: Path
) -> None:
    settings = {
        "spark.sql.streaming.checkpointFileManagerClass": (
            "org.apache.spark.sql.execution.streaming.checkpointing.FileContextBasedCheckpointFileManager"
        ),
        "spark.sql.streaming.checkpoint.fileChecksum.enabled": "true",
    }
    before = {key: str(spark.conf.get(key)) for key in settings}
    try:
        for key, value in settings.items():
            spark.conf.set(key, value)
        pair = shared(spark, service, tmp_path).arrive()
        assert pair.run() == [0]
        pair.arrive()
        assert pair.run() == [1]
    finally:
        for key, value in before.items():
            spark.conf.set(key, value)
