"""Bad input of every kind: an error with code, cause and remedy; nothing lost; the checkpoint still usable."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

import plait
from plait.errors import ConfigError, CorruptionError, PlaitError, QueryError, SourceError, StorageError, StreamError
from plait.testing import run_epochs
from tests.oracle import Bag, bag
from tests.spark.pair import Pair, told

pytestmark = pytest.mark.spark


# What is wrong before anything runs.


@pytest.fixture(scope="module")
def idle(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[plait.Engine]:
    """An engine that is never started."""
    home = tmp_path_factory.mktemp("idle")
    with plait.Engine(spark, checkpoint=str(home)) as engine:
        rate = spark.readStream.format("rate").load()
        engine.stream("a", rate.withWatermark("timestamp", "1 minute"))
        engine.stream("b", rate)
        yield engine


@pytest.mark.parametrize(
    ("sql", "code", "words"),
    [
        ("SELECT a.nothing FROM a JOIN b ON a.value = b.value", "UNKNOWN_COLUMN", "a.nothing"),
        ("SELECT a.value FROM a JOIN nowhere n ON a.value = n.value", "UNKNOWN_STREAM", "nowhere"),
        ("SELEC a.value FROM a JOIN b ON a.value = b.value", "SYNTAX", "SELEC"),
        ("SELECT a.value FROM a, b", "CROSS_PRODUCT", "equality"),
        ("SELECT a.value FROM a JOIN b ON a.value = b.value LIMIT 3", "UNSUPPORTED", "LIMIT without ORDER BY"),
        ("SELECT a.value, rand() AS r FROM a", "NON_DETERMINISTIC", ": rand() (line 1, column 17)"),
        ("SELECT a.value FROM a TABLESAMPLE (5 PERCENT)", "UNSUPPORTED", "TABLESAMPLE"),
        ("SELECT a.value\nFROM a WHERE a.timestamp < now()", "NON_DETERMINISTIC", ": now() (line 2, column 28)"),
        (
            "SELECT a.value FROM a JOIN b ON a.value = b.value "
            "AND b.timestamp BETWEEN a.timestamp AND a.timestamp + INTERVAL 1 MINUTE",
            "WATERMARK_MISSING",
            "stream b has no watermark",
        ),
    ],
)
def test_a_query_that_cannot_be_run_is_refused_at_once(idle: plait.Engine, sql: str, code: str, words: str) -> None:
    with pytest.raises(QueryError) as caught:
        idle.query("q", sql)
    assert words in told(caught.value, code).cause


def test_an_engine_is_used_in_the_right_order_with_the_right_things(spark: SparkSession, tmp_path: Path) -> None:
    def refused(code: str, kind: type[PlaitError], use: Callable[[], object]) -> None:
        with pytest.raises(kind) as caught:
            use()
        told(caught.value, code)

    refused("SPARK_CONNECT", StreamError, lambda: plait.Engine(object(), checkpoint=str(tmp_path)))  # type: ignore[arg-type]
    grouped = plait.Config(groups="auto")
    refused("UNPROVEN", ConfigError, lambda: plait.Engine(spark, checkpoint=str(tmp_path), config=grouped))
    rate = spark.readStream.format("rate").load()
    sql = "SELECT a.value FROM a JOIN b ON a.value = b.value"
    with plait.Engine(spark, checkpoint=str(tmp_path)) as engine:
        refused("UNKNOWN_STREAM", QueryError, lambda: engine.query("q", sql))
        refused("NO_STREAM", StreamError, engine.start)
        refused("NO_QUERY", QueryError, engine.explain)
        refused("NOT_STREAMING", StreamError, lambda: engine.stream("a", spark.range(3)))
        refused("NOT_STREAMING", StreamError, lambda: engine.stream("a", "a.parquet"))  # type: ignore[arg-type]
        refused("NAME", StreamError, lambda: engine.stream("../a", rate))
        refused("TTL", StreamError, lambda: engine.stream("a", rate, ttl="soon"))
        engine.stream("a", rate)
        engine.stream("b", rate)
        refused("DUPLICATE_STREAM", StreamError, lambda: engine.stream("a", rate))
        refused("NAME", QueryError, lambda: engine.query("../q", sql))
        query = engine.query("q", sql)
        refused("DUPLICATE_QUERY", QueryError, lambda: engine.query("q", sql))
        refused("SINK", QueryError, lambda: query.sink("carrier_pigeon"))
        refused("SINK", QueryError, lambda: query.sink("parquet"))
        refused("SINK", QueryError, lambda: query.sink("parquet", path="s3://bucket/x"))
        refused("SINK", QueryError, lambda: query.sink("noop", speed=3))
        refused("SINK", QueryError, lambda: query.sink("memory", speed=3))
        refused("SINK", QueryError, lambda: query.foreach_batch("print"))
        refused("TRIGGER", StreamError, lambda: engine.start(available_now=True, every="1 second"))
        refused("TRIGGER", StreamError, lambda: engine.start(every="now and then"))
        query.sink("noop")
        refused("RESULTS_NOT_KEPT", QueryError, query.results)
    # Nothing was started, so nothing was recorded.
    assert not (tmp_path / "catalog").exists()


# What goes wrong on the way in and on the way out.


def test_a_corrupt_source_file_is_named_and_once_replaced_read(spark: SparkSession, tmp_path: Path) -> None:
    pair = Pair(spark, tmp_path).arrive(2)
    bad = Path(pair.a.files[1])
    good = bad.read_bytes()
    bad.write_bytes(b"PAR1" + bytes(len(good)))
    os.utime(bad, (1_600_000_001, 1_600_000_001))
    error = pair.refused("SOURCE_CORRUPT")
    assert isinstance(error, SourceError)
    assert bad.name in error.cause
    bad.write_bytes(good[: len(good) // 2])
    assert bad.name in pair.refused("SOURCE_CORRUPT").cause
    bad.write_bytes(good)
    pair.arrive()
    assert pair.run() == [1, 2]


def test_a_function_that_raises_is_quoted_and_gets_the_epoch_again(spark: SparkSession, tmp_path: Path) -> None:
    pair = Pair(spark, tmp_path).arrive(2)
    seen: dict[int, Bag] = {}
    mended = threading.Event()

    def fussy(rows: DataFrame, epoch: int) -> None:
        if epoch == 1 and not mended.is_set():
            raise ValueError("the warehouse is closed\non Sundays")
        assert epoch not in seen
        seen[epoch] = bag(rows.toArrow())

    def attempt(fails: bool) -> None:
        with pair.engine() as engine:
            plait.QueryHandle(engine, "q").foreach_batch(fussy)
            run = engine.start(available_now=True)
            if not fails:
                run.await_termination()
                return
            with pytest.raises(PlaitError) as caught:
                run.await_termination()
            error = told(caught.value, "SINK_FAILED")
            assert "'q' failed in epoch 1: ValueError: the warehouse is closed" in error.cause
            assert str(run.exception) == str(error)

    attempt(fails=True)
    attempt(fails=True)
    assert seen.keys() == {0}
    pair.arrive()
    mended.set()
    attempt(fails=False)
    assert seen.pop(0) + seen.pop(1) + seen.pop(2) == pair.expected()


def test_a_sink_that_cannot_be_written_gets_the_epoch_again(spark: SparkSession, tmp_path: Path) -> None:
    pair = Pair(spark, tmp_path)
    target = tmp_path / "out"
    target.write_text("a file, not a directory")

    def attempt() -> DataFrame:
        with pair.engine() as engine:
            query = plait.QueryHandle(engine, "q").sink("parquet", path=str(target))
            run_epochs(engine)
            return query.results()

    with pytest.raises(StorageError) as caught:
        attempt()
    assert str(target) in told(caught.value, "SINK_UNWRITABLE").cause
    assert not list((pair.checkpoint / "log").iterdir()), "it is found before anything is run"
    target.unlink()
    assert attempt().count() == 0
    # Something is in the way of a file.
    pair.arrive()
    obstacle = target / f"epoch-{0:012d}-0000.parquet"
    obstacle.mkdir()
    with pytest.raises(StorageError) as caught:
        attempt()
    assert str(target) in told(caught.value, "SINK_UNWRITABLE").cause
    obstacle.rmdir()
    # What waits to be delivered is checked before it is.
    result = next((pair.checkpoint / "results").rglob("*.parquet"))
    good = result.read_bytes()
    result.write_bytes(good[:-9] + bytes(9))
    with pytest.raises(CorruptionError) as corrupt:
        attempt()
    assert result.name in told(corrupt.value, "RESULT_CORRUPT").cause
    assert not list(target.glob("epoch-*"))
    result.write_bytes(good)
    assert bag(attempt().toArrow()) == pair.expected()


# What goes wrong on disk.


@pytest.fixture(scope="module")
def made(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A checkpoint with two epochs, and a third still to come.  Every test damages a copy of its own."""
    pair = Pair(spark, tmp_path_factory.mktemp("made")).arrive(2)
    assert pair.run() == [0, 1]
    return pair.arrive()


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def _entangle(path: Path) -> None:
    """A link to itself: no one can open it, not even root."""
    path.unlink()
    path.symlink_to(path.name)


def _format_of_tomorrow(path: Path) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 99}))


@pytest.mark.parametrize(
    ("files", "damage", "code", "kind"),
    [
        ("state/*/*.arrow", _flip, "SEGMENT_CORRUPT", CorruptionError),
        ("state/*/*.arrow", _truncate, "SEGMENT_TRUNCATED", CorruptionError),
        ("state/*/*.arrow", Path.unlink, "SEGMENT_MISSING", CorruptionError),
        ("state/*/*.arrow", _entangle, "STATE_UNREADABLE", StorageError),
        ("log/*1.json", _flip, "MANIFEST_CORRUPT", CorruptionError),
        ("log/*1.json", _truncate, "MANIFEST_CORRUPT", CorruptionError),
        ("log/*0.json", Path.unlink, "MANIFEST_MISSING", CorruptionError),
        ("catalog/*.json", _flip, "CATALOG_CORRUPT", CorruptionError),
        ("plait.json", _truncate, "CHECKPOINT_CORRUPT", CorruptionError),
        ("plait.json", Path.unlink, "CHECKPOINT_CORRUPT", CorruptionError),
        ("plait.json", _format_of_tomorrow, "FORMAT_NEWER", PlaitError),
        ("results/*/*.parquet", _flip, "RESULT_CORRUPT", CorruptionError),
        ("results/*/*.parquet", Path.unlink, "RESULT_MISSING", CorruptionError),
    ],
)
def test_damaged_bytes_are_noticed_and_restored_bytes_go_on(
    made: Pair, tmp_path: Path, files: str, damage: Callable[[Path], None], code: str, kind: type[PlaitError]
) -> None:
    pair = made.copy(tmp_path)
    damaged = sorted(pair.checkpoint.glob(files))[0]
    good = damaged.read_bytes()
    damage(damaged)
    if files.startswith("results"):
        # Nobody reads committed rows while running; who asks for them is told.
        with pair.engine() as engine:
            run_epochs(engine)
            with pytest.raises(PlaitError) as caught:
                plait.QueryHandle(engine, "q").results()
        error = told(caught.value, code)
    else:
        error = pair.refused(code)
    assert isinstance(error, kind)
    assert str(damaged) in error.cause or "MISSING" in code
    damaged.unlink(missing_ok=True)
    damaged.write_bytes(good)
    assert pair.run() in ([2], [])


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MB of its own."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = shutil.which("mount") and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "plait-test", str(disk)], capture_output=True, check=False
    )
    if not mounted or mounted.returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        yield disk
    finally:
        # Warm Python workers may still have segments on it mapped: it goes when they let go.
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def _fill(disk: Path, spare: int = 0) -> Path:
    """Leaves no more than `spare` bytes free."""
    filler = disk / "filler"
    filler.unlink(missing_ok=True)
    filler.write_bytes(bytes(shutil.disk_usage(disk).free - spare))
    return filler


def test_a_full_and_a_read_only_state_directory_are_reported_and_cost_nothing(
    spark: SparkSession, tmp_path: Path, small_disk: Path
) -> None:
    pair = Pair(spark, tmp_path, {"state_dir": str(small_disk)}).arrive()
    assert pair.run() == [0]
    pair.arrive()
    filler = _fill(small_disk)
    error = pair.refused("STATE_FULL")
    assert isinstance(error, StorageError)
    assert str(small_disk) in error.cause
    filler.unlink()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    assert str(small_disk) in pair.refused("STATE_UNWRITABLE").cause
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    assert pair.run() == [1]
    # Somewhere else there is nothing.
    pair.arrive()
    pair.refused("SEGMENT_MISSING", state_dir=str(tmp_path / "elsewhere"))
    assert pair.run() == [2]


def test_a_full_checkpoint_is_reported_and_costs_nothing(spark: SparkSession, tmp_path: Path, small_disk: Path) -> None:
    pair = Pair(spark, tmp_path, {"state_dir": str(tmp_path / "state")}).arrive()
    pair.checkpoint = small_disk / "checkpoint"
    assert pair.run() == [0]
    pair.arrive()
    _fill(small_disk)
    pair.refused("CHECKPOINT_FULL")
    # Room for the driver, then for what Spark writes before an epoch as well, but never for all.
    for spare in (8192, 40960):
        _fill(small_disk, spare)
        with pytest.raises(StorageError) as caught, pair.engine() as engine:
            run_epochs(engine)
        assert caught.value.code in ("CHECKPOINT_FULL", "RESULTS_FULL", "STATE_FULL"), str(caught.value)
    (small_disk / "filler").unlink()
    # If there was room for all but Spark's own commit, the epoch is not run again.
    assert pair.run() in ([1], [])
