"""Starting again on a checkpoint: it continues exactly, or says why it does not and can still be used."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

import plait
from plait.errors import CheckpointError, StreamError
from plait.testing import run_epochs
from tests.oracle import bag
from tests.spark.pair import SQL, Pair, told

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module")
def made(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A checkpoint with three epochs, and a fourth still to come.  Copied by every test that damages it."""
    pair = Pair(spark, tmp_path_factory.mktemp("made")).arrive(3)
    assert pair.run() == [0, 1, 2]
    return pair.arrive()


def test_a_different_number_of_tasks_and_order_of_streams_continue_exactly(spark: SparkSession, tmp_path: Path) -> None:
    pair = Pair(spark, tmp_path, {"fan_in": 2}).arrive(2)
    assert pair.run(tasks=2) == [0, 1]
    pair.arrive(2)
    assert pair.run(tasks=1, probe="iterative") == [2, 3]
    pair.arrive()
    # Spark's checkpoint knows its sources by position only.
    frames = dict(reversed(pair.frames().items()))
    with plait.Engine(spark, checkpoint=f"file://{pair.checkpoint}", config=plait.Config(tasks=5, fan_in=2)) as engine:
        for name, frame in frames.items():
            engine.stream(name, frame)
        query = engine.query("q", f"  {SQL.replace(' FROM', chr(10) + '  FROM')}")
        assert [progress["tasks"] for progress in run_epochs(engine)] == [5]
        assert bag(query.results().toArrow()) == pair.expected()


def test_a_second_driver_is_refused_while_the_first_lives(made: Pair, tmp_path: Path) -> None:
    pair = made.copy(tmp_path)
    hold = (
        "import sys, time; from plait.config import Config; from plait.state.log.checkpoint import Checkpoint\n"
        "held = Checkpoint(sys.argv[1], Config()).open(); print('held', flush=True); time.sleep(1000)"
    )
    first = subprocess.Popen([sys.executable, "-c", hold, str(pair.checkpoint)], stdout=subprocess.PIPE, text=True)
    with first:
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"
        error = pair.refused("CHECKPOINT_IN_USE")
        assert f"pid {first.pid}" in error.cause
        first.send_signal(signal.SIGKILL)
    with pair.engine() as engine:
        # Not in the same process either.
        pair.refused("CHECKPOINT_IN_USE")
        run_epochs(engine)
    assert pair.run() == []


def test_nobody_loses_a_query_or_a_stream_by_a_forgotten_line(spark: SparkSession, tmp_path: Path) -> None:
    pair = Pair(spark, tmp_path).arrive()
    texts = {"q": SQL, "p": "SELECT a.v FROM a JOIN b ON CAST(a.k AS INT) = CAST(b.w AS STRING)"}
    with pair.engine(texts) as engine:
        run_epochs(engine)

    def refused(code: str, queries: dict[str, str], *shown: str) -> None:
        with pytest.raises(CheckpointError) as caught, pair.engine(queries) as engine:
            engine.start(available_now=True)
        error = told(caught.value, code)
        assert all(text in error.cause for text in shown), error.cause

    other = SQL.replace("b.w", "a.k")
    refused("QUERY_EXISTS", {**texts, "q": other}, "'q'", f"old: {SQL}", f"new: {other}")
    refused("QUERY_MISSING", {"q": SQL}, "'p'", texts["p"])

    original = pair.a
    for schema, old, new in (
        ("k long, v string", "v bigint", "v string"),
        ("k int, v long", "k bigint", "k int"),
    ):
        pair.a = type(original)(spark, original.directory, schema)
        refused("SCHEMA_CHANGED", texts, "'a'", old, new)
    pair.a = original

    pair.arrive()
    with pair.engine({**texts, "more": SQL}) as engine:
        assert [progress["epoch"] for progress in run_epochs(engine)] == [1]
        assert bag(plait.QueryHandle(engine, "q").results().toArrow()) == pair.expected()
    # Columns may be added, and not be taken away again.
    pair.a = type(original)(spark, original.directory, "k long, v long, more date")
    with pair.engine({**texts, "more": SQL}) as engine:
        assert run_epochs(engine) == []
    pair.a = original
    refused("SCHEMA_CHANGED", {**texts, "more": SQL}, "'a'", "more date")


@contextmanager
def settings_of(spark: SparkSession, values: dict[str, str]) -> Iterator[None]:
    """A session with other settings for a while."""
    before = {name: spark.conf.get(name, None) for name in values}
    for name, value in values.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name, old in before.items():
            spark.conf.unset(name)
            if old is not None:
                spark.conf.set(name, old)


def test_settings_that_change_what_sql_means_are_refused_with_the_remedy(spark: SparkSession, tmp_path: Path) -> None:
    zone, ansi = "spark.sql.session.timeZone", "spark.sql.ansi.enabled"
    legacy = "spark.sql.legacy.castComplexTypesToString.enabled"
    # The key of p depends on the zone, that of r on ANSI: a number is compared with a text.
    texts = {
        "q": SQL,
        "p": "SELECT a.v FROM a JOIN b ON to_date(timestamp_seconds(a.k * 3600)) = to_date(timestamp_seconds(b.w))",
        "r": "SELECT a.v FROM a JOIN b ON CAST(a.k AS INT) = CAST(b.w AS STRING)",
    }
    pair = Pair(spark, tmp_path).arrive()
    with settings_of(spark, {zone: "Etc/UTC", ansi: "true"}):
        with pair.engine(texts) as engine:
            run_epochs(engine)

        def refused(changed: dict[str, str], *shown: str) -> None:
            with settings_of(spark, changed), pytest.raises(CheckpointError) as caught, pair.engine(texts) as engine:
                engine.start(available_now=True)
            error = told(caught.value, "SETTINGS_CHANGED")
            assert all(text in str(error) for text in shown), str(error)

        refused({zone: "Asia/Tokyo"}, f"{zone} was UTC and is Asia/Tokyo", f'spark.conf.set("{zone}", "UTC")')
        refused({ansi: "false"}, f"{ansi} was true and is false", f'spark.conf.set("{ansi}", "true")')
        refused({legacy: "true"}, f"{legacy} was not set and is true", f'spark.conf.unset("{legacy}")')
        refused({zone: "+02:00", "spark.sql.caseSensitive": "true"}, "is +02:00", "spark.sql.caseSensitive was false")
        pair.arrive()
        # Another name of the zone, another way to write a truth value, and a default that is set, are no change.
        with settings_of(spark, {zone: "GMT", ansi: "TRUE", legacy: "false"}), pair.engine(texts) as engine:
            assert [progress["epoch"] for progress in run_epochs(engine)] == [1]
            assert bag(plait.QueryHandle(engine, "q").results().toArrow()) == pair.expected()

        # A checkpoint of a release that recorded none takes those of its next start.
        (pair.checkpoint / "settings.json").unlink()
        with settings_of(spark, {"spark.sql.caseSensitive": "true"}), pair.engine(texts) as engine:
            run_epochs(engine)
        refused({}, "spark.sql.caseSensitive was true and is false")
        record = pair.checkpoint / "settings.json"
        record.write_bytes(record.read_bytes().replace(b"UTC", b"XTC"))
        with pytest.raises(CheckpointError) as caught, pair.engine(texts) as engine:
            engine.start(available_now=True)
        assert "settings.json" in told(caught.value, "CHECKPOINT_CORRUPT").cause


def test_other_offsets_than_those_committed_are_refused(made: Pair, tmp_path: Path) -> None:
    pair = made.copy(tmp_path)
    kept = tmp_path / "spark"
    shutil.copytree(pair.checkpoint / "spark", kept)

    def restore() -> None:
        shutil.rmtree(pair.checkpoint / "spark", ignore_errors=True)
        shutil.copytree(kept, pair.checkpoint / "spark")

    def forget(*names: str) -> None:
        for name in names:
            (pair.checkpoint / "spark" / name).unlink()
            (pair.checkpoint / "spark" / name).with_name(f".{Path(name).name}.crc").unlink(missing_ok=True)

    # Spark would plan epoch 2 anew, and read the files of epoch 3 with it, or those of epoch 2 again.
    forget("offsets/2", "commits/2")
    assert "epoch 2" in pair.refused("OFFSETS_CHANGED").cause
    restore()
    # The same epoch, but with the offsets of another.
    forget("commits/2")
    offsets = pair.checkpoint / "spark" / "offsets"
    (offsets / ".2.crc").unlink(missing_ok=True)
    (offsets / "2").write_bytes((offsets / "1").read_bytes())
    assert "epoch 2" in pair.refused("OFFSETS_CHANGED").cause
    # Spark begins from the beginning, and plans the same epochs again: what is committed is not computed twice.
    shutil.rmtree(pair.checkpoint / "spark")
    assert pair.run() == [3]


def test_spark_ahead_of_the_manifests_is_refused(made: Pair, tmp_path: Path) -> None:
    pair = made.copy(tmp_path)
    log = pair.checkpoint / "log"
    lost = {path: path.read_bytes() for path in sorted(log.glob("*.json"))[1:]}
    commits = {path: path.read_bytes() for path in (pair.checkpoint / "spark" / "commits").glob("[0-9]*")}
    for path in lost:
        path.unlink()
    error = pair.refused("EPOCH_GAP")
    assert "Spark has committed batch 2" in error.cause
    with pair.engine() as engine, pytest.raises(CheckpointError, match="EPOCH_GAP"):
        plait.QueryHandle(engine, "q").results()
    # Without its commits Spark asks for the epoch it planned last.
    for path in commits:
        path.unlink()
    assert "Spark asks for batch 2" in pair.refused("EPOCH_GAP").cause
    for path, data in {**lost, **commits}.items():
        path.write_bytes(data)
    assert pair.run() == [3]


def test_a_run_stopped_in_the_middle_of_an_epoch_commits_it_and_has_not_failed(made: Pair, tmp_path: Path) -> None:
    pair = made.copy(tmp_path)
    called, stopping = threading.Event(), threading.Event()
    seen: list[tuple[int, int]] = []

    def slow(rows: DataFrame, epoch: int) -> None:
        called.set()
        assert stopping.wait(60)
        seen.append((epoch, rows.count()))

    with pair.engine() as engine:
        query = plait.QueryHandle(engine, "q").foreach_batch(slow)
        run = engine.start(every="1 second")
        with pytest.raises(StreamError, match="RUNNING"):
            engine.start()
        assert called.wait(120)
        threading.Timer(0.5, stopping.set).start()
        run.stop()
        assert not run.is_active
        # The running epoch came to its end, and being stopped is no failure.
        rows = (pair.expected() - pair.expected(3)).total()
        assert seen == [(3, rows)]
        assert run.exception is None
        assert run.await_termination()
        query.foreach_batch(lambda rows, epoch: seen.append((epoch, rows.count())))
        assert run_epochs(engine) == []
        assert seen == [(3, rows)]
    for use in (lambda: engine.start(), lambda: engine.query("r", SQL), lambda: engine.stream("c", made.a.frame())):
        with pytest.raises(StreamError, match="CLOSED"):
            use()
    assert pair.run() == []


def test_a_run_that_is_not_waited_for_is_cancelled_and_goes_on_later(made: Pair, tmp_path: Path) -> None:
    pair = made.copy(tmp_path)
    called = threading.Event()
    seen: list[int] = []

    def endless(rows: DataFrame, epoch: int) -> None:
        called.set()
        # A job that only ends by being cancelled.
        rows.sparkSession.range(2).selectExpr("java_method('java.lang.Thread', 'sleep', 600000L)").collect()

    with pair.engine() as engine:
        query = plait.QueryHandle(engine, "q").foreach_batch(endless)
        run = engine.start(every="1 second")
        assert called.wait(300)
        run.stop(wait=False)
        assert not run.is_active
        assert run.exception is None
        query.foreach_batch(lambda rows, epoch: seen.append(epoch))
        run_epochs(engine)
        assert seen == [3]
    assert pair.run() == []


def test_a_sink_may_stop_its_own_run(made: Pair, tmp_path: Path) -> None:
    pair = made.copy(tmp_path)
    runs: list[plait.Run] = []
    begun = threading.Event()

    def stop(rows: DataFrame, epoch: int) -> None:
        assert begun.wait(60)
        runs[0].stop()

    with pair.engine() as engine:
        plait.QueryHandle(engine, "q").foreach_batch(stop)
        runs.append(engine.start(every="1 second"))
        begun.set()
        assert runs[0].await_termination(120)
        assert runs[0].exception is None
    assert pair.run() == []
