"""Streams as users register them: watermarks, late rows, idle sources, TTL, restarts with another number of tasks."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

import plait
from plait.testing import Clock, ScriptedStream, run_epochs
from tests.oracle import Bag, bag, batch_join
from tests.spark.test_queries import epoch_bags

pytestmark = pytest.mark.spark

START = dt.datetime(2024, 1, 1)
SECONDS = dt.timedelta(seconds=1)
JOIN = "SELECT a.id AS a, b.id AS b FROM a JOIN b ON a.k = b.k"
WINDOW = f"{JOIN} WHERE a.ts BETWEEN b.ts - INTERVAL 4 SECONDS AND b.ts + INTERVAL 2 SECONDS"


def two_streams(
    spark: SparkSession, base: Path, schema: str = "id int, k int, ts timestamp"
) -> dict[str, ScriptedStream]:
    return {name: ScriptedStream(spark, base / name, schema) for name in "ab"}


def engine_on(
    spark: SparkSession, base: Path, streams: dict[str, ScriptedStream], delay: str | None = None, **config: Any
) -> plait.Engine:
    engine = plait.Engine(spark, str(base / "checkpoint"), plait.Config(**{"tasks": 2, **config}))
    for name, stream in streams.items():
        frame = stream.frame()
        engine.stream(name, frame.withWatermark("ts", delay) if delay else frame)
    return engine


def at(*seconds: int) -> list[tuple[int, int, dt.datetime]]:
    """Rows of one key at these seconds, which are their ids as well."""
    return [(s, 1, START + s * SECONDS) for s in seconds]


def sparks_own(
    spark: SparkSession, base: Path, streams: dict[str, ScriptedStream], delay: str
) -> tuple[list[Bag], list[int]]:
    """What Spark's stream-stream join gives per batch, and how many late rows it drops.

    As a single stateful operator: where several may follow each other (the default since Spark 3.5), Spark drops by
    the watermark of the batch before instead.
    """
    session = spark.newSession()
    session.conf.set("spark.sql.streaming.statefulOperator.allowMultiple", "false")
    session.conf.set("spark.sql.streaming.noDataMicroBatches.enabled", "false")
    for name, stream in streams.items():
        reader = session.readStream.schema(stream.schema).option("maxFilesPerTrigger", 1)
        reader.parquet(stream.directory).withWatermark("ts", delay).createOrReplaceTempView(name)
    total: Bag = bag([])
    after: list[Bag] = []

    def take(rows: DataFrame, _: int) -> None:
        total.update(bag(rows.collect()))
        after.append(total.copy())

    writer = session.sql(WINDOW).writeStream.option("checkpointLocation", str(base / "spark")).foreachBatch(take)
    query = writer.trigger(availableNow=True).start()
    query.awaitTermination()
    return after, [sum(s.numRowsDroppedByWatermark for s in p.stateOperators) for p in query.recentProgress]


def test_differential_late_rows_are_dropped_and_counted_as_by_sparks_own_join_and_state_is_removed(
    spark: SparkSession, tmp_path: Path
) -> None:
    streams = two_streams(spark, tmp_path)
    script: list[tuple[list[int], list[int]]] = [
        ([0, 10], [0, 8]),
        # The watermark is 8 − 1 = 7: at it is late.
        ([7, 8, 2], [9, 14]),
        # Idle for an epoch: the other goes on, the watermark stays at min(10, 14) − 1 = 9.
        ([], [9, 11]),
        ([100], [100]),
        ([101, 50], [98]),
    ]
    for ones, others in script:
        streams["a"].add(at(*ones))
        streams["b"].add(at(*others))
    with engine_on(spark, tmp_path, streams, delay="1 second") as engine:
        engine.query("q", WINDOW)
        progress = run_epochs(engine)
        found = epoch_bags(engine, "q", len(script))
    late = [(p["rows_late"]["a"], p["rows_late"]["b"]) for p in progress]
    assert late == [(0, 0), (2, 0), (0, 1), (0, 0), (1, 1)]
    marks = [None if p["watermark_ms"] is None else p["watermark_ms"] // 1000 for p in progress]
    zero = int(START.replace(tzinfo=dt.UTC).timestamp())
    assert [None if m is None else m - zero for m in marks] == [7, 9, 9, 99, 99]
    expected, dropped = sparks_own(spark, tmp_path, streams, "1 second")
    assert found == expected
    assert [sum(pair) for pair in late] == dropped
    assert found[-1] == bag(
        [(0, 0), (10, 8), (8, 8), (8, 9), (10, 9), (10, 14), (8, 11), (10, 11), (100, 100), (101, 100)]
    )
    # One row of a and b each at 100, and 101: everything before has gone.
    assert progress[-1]["state_rows"] == 3


def test_an_idle_source_does_not_block_the_others(spark: SparkSession, tmp_path: Path) -> None:
    streams = {n: ScriptedStream(spark, tmp_path / n, "id int, k int") for n in "abc"}
    streams["a"].add([(1, 1)])
    streams["a"].add([(2, 1)])
    streams["b"].add([(3, 1)])
    with engine_on(spark, tmp_path, streams) as engine:
        pair = engine.query("pair", JOIN)
        triple = engine.query("triple", f"{JOIN} JOIN c ON c.k = a.k")
        progress = run_epochs(engine)
        assert bag(pair.results().collect()) == bag([(1, 3), (2, 3)])
        assert triple.results().count() == 0
        assert [p["rows_in"] for p in progress] == [{"a": 1, "b": 1, "c": 0}, {"a": 1, "b": 0, "c": 0}]
        # The silent one speaks at last.
        streams["c"].add([(9, 1)])
        assert run_epochs(engine)[-1]["rows_out"] == {"pair": 0, "triple": 2}


def test_a_row_lives_as_long_as_its_ttl(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("plait.launching.SteadyClock", lambda _: clock)
    streams = {n: ScriptedStream(spark, tmp_path / n, "id int, k int") for n in "ab"}
    with plait.Engine(spark, str(tmp_path / "checkpoint"), plait.Config(tasks=2)) as engine:
        engine.stream("a", streams["a"].frame(), ttl="10 seconds")
        engine.stream("b", streams["b"].frame())
        q = engine.query("q", JOIN)
        streams["a"].add([(1, 1)])
        assert run_epochs(engine)[-1]["state_rows"] == 1
        clock.advance(9)
        streams["a"].add()
        streams["b"].add([(2, 1)])
        run_epochs(engine)
        clock.advance(1)
        streams["a"].add()
        streams["b"].add([(3, 1)])
        progress = run_epochs(engine)
        assert bag(q.results().collect()) == bag([(1, 2)])
        assert progress[-1]["segments"] == {"b[k]": progress[-1]["segments"]["b[k]"]}
        # The rows of b, which has no TTL, still find new ones of a.
        streams["a"].add([(4, 1)])
        assert run_epochs(engine)[-1]["rows_out"] == {"q": 2}


def test_a_restart_with_another_number_of_tasks_continues_exactly(spark: SparkSession, tmp_path: Path) -> None:
    streams = two_streams(spark, tmp_path, "id int, k int, m string")
    sql = "SELECT x.id AS x, y.id AS y, z.id AS z FROM a x JOIN b y ON x.k = y.k JOIN a z ON z.m = y.m"
    for epoch, tasks in enumerate((1, 4, 2)):
        for stream in streams.values():
            stream.add([(100 * epoch + i, i % 7, str(i % 5)) for i in range(20)])
        config = {
            "tasks": tasks,
            "probe": "iterative" if tasks == 4 else "factorised",
            "snapshot_every": 2,
            "fan_in": 2,
        }
        with engine_on(spark, tmp_path, streams, **config) as engine:
            q = engine.query("q", sql)
            progress = run_epochs(engine)
            assert [(p["epoch"], p["tasks"]) for p in progress] == [(epoch, tasks)]
            found = bag(q.results().collect())
        assert found == batch_join({name: stream.table() for name, stream in streams.items()}, sql)
    # Nothing new: nothing happens.
    with engine_on(spark, tmp_path, streams) as engine:
        q = engine.query("q", sql)
        assert run_epochs(engine) == []
        assert bag(q.results().collect()) == found


PROGRESS = {"epoch", "rows_in", "rows_out", "rows_late", "state_rows", "state_bytes", "segments", "seconds", "orders"}


def test_progress_says_what_the_design_promises(spark: SparkSession, tmp_path: Path) -> None:
    streams = two_streams(spark, tmp_path)
    for stream in streams.values():
        stream.add(at(1, 2))
        stream.add(at(3))
    with engine_on(spark, tmp_path, streams, history=1) as engine:
        engine.query("q", JOIN)
        run = engine.start(available_now=True)
        run.await_termination()
        report = run.last_progress
        assert report is not None
        assert report.keys() >= PROGRESS
        # Only as many reports are kept as the configuration asks for.
        assert run.recent_progress == [report]
    assert report["epoch"] == 1
    assert report["rows_in"] == {"a": 1, "b": 1}
    assert report["rows_out"] == {"q": 5}
    assert report["rows_late"] == {"a": 0, "b": 0}
    assert report["state_rows"] == 6
    assert report["state_bytes"] > 0
    assert set(report["segments"]) == {"a[k]", "b[k]"}
    assert report["orders"] == {"q": {"a": ["b"], "b": ["a"]}}
    assert {"prepare", "join", "commit", "deliver", "total"} <= report["seconds"].keys()
    assert all(seconds >= 0 for seconds in report["seconds"].values())


def test_a_stream_that_never_ends_delivers_while_it_runs(spark: SparkSession, tmp_path: Path) -> None:
    streams = two_streams(spark, tmp_path)
    for stream in streams.values():
        stream.add(at(1))
    with engine_on(spark, tmp_path, streams) as engine:
        seen: list[int] = []
        engine.query("q", JOIN).foreach_batch(lambda rows, epoch: seen.append(rows.count()))
        run = engine.start(every="0 seconds")
        assert not run.await_termination(0.1)
        with pytest.raises(plait.StreamError, match="RUNNING"):
            engine.drop("a")
        for _ in range(600):
            if seen or run.await_termination(0.1):
                break
        run.stop()
        assert not run.is_active
        assert sum(seen) == 1
        assert run.exception is None


def test_little_work_is_done_by_one_task_from_the_first_epoch_on(spark: SparkSession, tmp_path: Path) -> None:
    """Exchanges between hops would cost more than a second task saves; before the first, Spark's estimate tells."""
    streams = {name: ScriptedStream(spark, tmp_path / name, "id int, k int, j int") for name in "abc"}
    for stream in streams.values():
        stream.add([(n, n % 3, n % 5) for n in range(20)])
        stream.add([(n, n % 4, n % 7) for n in range(20, 30)])
    sql = "SELECT a.id AS a, b.id AS b, c.id AS c FROM a JOIN b ON a.k = b.k JOIN c ON b.j = c.j"
    with engine_on(spark, tmp_path, streams, tasks=None) as engine:
        query = engine.query("q", sql)
        run = engine.start(available_now=True)
        run.await_termination()
        assert [report["tasks"] for report in run.recent_progress] == [1, 1]
        assert engine.plan.hops > 1
        tables = {name: stream.table(2) for name, stream in streams.items()}
        assert bag(query.results().collect()) == batch_join(tables, sql)


def test_hadoop_s_settings_are_sent_to_tasks_without_where_they_were_read(spark: SparkSession, tmp_path: Path) -> None:
    streams = two_streams(spark, tmp_path)
    with engine_on(spark, tmp_path, streams) as engine:
        engine.query("q", JOIN)
        engine.start(available_now=True).await_termination()
    settings: Any = spark.sparkContext._jsc.hadoopConfiguration()
    origins = settings.getClass().getDeclaredField("updatingResource")
    origins.setAccessible(True)
    assert settings.size() > 500
    assert origins.get(settings).size() < 50
