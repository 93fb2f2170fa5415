"""Sources that Spark knows by name: put into finished DataFrames, added, dropped and reordered on one checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import plait
from plait.config import Config
from plait.errors import CheckpointError, PlaitError, StreamError
from plait.runtime.driver.source_log import (
    FILE,
    SourceNames,
    can_change_streams,
    choose_sources,
    recorded,
    refuse_fixed,
)
from plait.runtime.spark.named_sources import (
    EVOLUTION,
    named,
    renamed,
    source_names,
    starting,
    supports_names,
    unnamed,
)
from plait.state.log.checkpoint import Checkpoint
from plait.testing import ScriptedStream, run_epochs
from tests.golden import EPOCHS, Golden, restored
from tests.oracle import bag, batch_join
from tests.spark.pair import SQL, Pair

pytestmark = pytest.mark.spark

Rows = list[tuple[int, int, str]]


class Files:
    """File streams of one column, and streaming queries of Spark alone over unions of them."""

    def __init__(self, spark: SparkSession, home: Path) -> None:
        self.spark, self.home = spark, home
        self.streams: dict[str, ScriptedStream] = {}

    def arrive(self, **rows: int) -> None:
        """A file with one row arrives in each of these streams."""
        for name, value in rows.items():
            if name not in self.streams:
                self.streams[name] = ScriptedStream(self.spark, self.home / name, "v long")
            self.streams[name].add([(value,)])

    def frame(self, name: str) -> DataFrame:
        """A stream, with a column that tells which."""
        return self.streams[name].frame().withColumn("s", F.lit(name))

    def run(self, *names: str, by_name: bool = True, fail_in: int | None = None, every: str | None = None) -> Rows:
        """The rows that a query over all files there are gets: epoch, value, stream."""
        frames = [named(self.frame(n), n) if by_name else self.frame(n) for n in names]
        return self.run_frames(*frames, by_name=by_name, fail_in=fail_in, every=every)

    def run_frames(
        self, *frames: DataFrame, by_name: bool = True, fail_in: int | None = None, every: str | None = None
    ) -> Rows:
        """The same for any DataFrames of these columns."""
        got: Rows = []

        def take(rows: DataFrame, epoch: int) -> None:
            if epoch == fail_in:
                raise RuntimeError("as told")
            got.extend((epoch, row.v, row.s) for row in rows.collect())

        united = frames[0]
        for frame in frames[1:]:
            united = united.union(frame)
        writer = united.writeStream.foreachBatch(take).option("checkpointLocation", str(self.home / "checkpoint"))
        writer = writer.trigger(availableNow=True) if every is None else writer.trigger(processingTime=every)
        with starting(self.spark, by_name):
            query = writer.start()
        try:
            if every is None:
                query.awaitTermination()
            else:
                query.processAllAvailable()
        except Exception:
            if fail_in is None:
                raise
        finally:
            query.stop()
        return sorted(got)

    @property
    def offsets(self) -> list[str]:
        """The lines of Spark's newest offsets, without the settings."""
        logged = [path for path in (self.home / "checkpoint" / "offsets").iterdir() if path.name.isdigit()]
        lines = max(logged, key=lambda path: int(path.name)).read_text().split("\n")
        return [lines[0], *sorted(lines[2:])]


@pytest.fixture
def files(spark: SparkSession, tmp_path: Path) -> Files:
    return Files(spark, tmp_path)


@pytest.fixture
def evolving(spark: SparkSession) -> Iterator[None]:
    """A session in which users name their readers."""
    spark.conf.set(EVOLUTION, "true")
    yield
    spark.conf.unset(EVOLUTION)


def without_name(frame: DataFrame) -> str:
    """A plan as text, without the part that naming changes."""
    plan: Any = frame._jdf
    return str(plan.queryExecution().analyzed().treeString()).replace(' name="s"', "").replace(" name=<Unassigned>", "")


def refused(code: str, caught: pytest.ExceptionInfo[PlaitError]) -> PlaitError:
    assert caught.value.code == code, caught.value
    assert caught.value.remedy
    return caught.value


def test_a_source_is_named_below_whatever_stands_above_it_and_nothing_else_changes(files: Files) -> None:
    spark = files.spark
    files.arrive(a=1)
    rate = spark.readStream.format("rate").option("rowsPerSecond", "7").load()
    steps = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 3).load()
    json_files = spark.readStream.schema("v long, t timestamp").option("maxFilesPerTrigger", 5).json(str(files.home))
    json_files.createOrReplaceTempView("json_files")
    jvm: Any = spark._jvm
    memory = jvm.org.apache.spark.sql.execution.streaming.runtime.MemoryStream
    in_memory = DataFrame(memory.apply(jvm.org.apache.spark.sql.Encoders.LONG(), spark._jsparkSession).toDF(), spark)
    watermarked = rate.withWatermark("timestamp", "3 minutes")
    frames = [
        files.frame("a"),
        rate,
        steps,
        in_memory,
        json_files.where("v > 1").select("v", F.col("v") * 1.5),
        watermarked.withColumnRenamed("timestamp", "ts").where("value > 3"),
        json_files.join(spark.range(3).withColumnRenamed("id", "v"), "v"),
        json_files.withWatermark("t", "1 minute").groupBy(F.window("t", "1 minute")).count(),
        spark.sql("WITH big AS (SELECT * FROM json_files WHERE v > 5) SELECT v + 1 AS w FROM big"),
        json_files.mapInArrow(lambda batches: batches, "v long, t timestamp"),
        json_files.dropDuplicates(["v"]),
        json_files.selectExpr("CAST(v AS DECIMAL(10,2)) * CAST(v AS DECIMAL(8,3)) AS d", "explode(array(v, 2)) AS e"),
    ]
    for frame in frames:
        assert source_names(frame) == (None,)
        result = named(frame, "s")
        assert source_names(result) == ("s",)
        assert result.isStreaming
        assert result.schema == frame.schema
        # Columns keep their ids and options their values: all of the plan's text but the name is the same.
        assert without_name(result) == without_name(frame)
        assert source_names(unnamed(result)) == (None,)
    # Metadata too: the watermark is where it was, and columns of the old frame are columns of the new one.
    result = named(watermarked, "s")
    assert result.schema["timestamp"].metadata == {"spark.watermarkDelayMs": 180_000}
    assert named(json_files, "s").where(json_files["v"] > 1).select(json_files.t).columns == ["t"]
    assert "[rowsPerSecond=7]" in without_name(named(rate, "s"))


def test_several_sources_are_numbered_and_a_users_name_is_kept(files: Files, evolving: None) -> None:
    spark = files.spark
    reader = spark.readStream.schema("v long")
    mine, other = (reader.name(name).json(str(files.home)) for name in ("mine", "other"))
    plain = unnamed(mine)
    assert source_names(named(plain.union(plain.where("v > 1")), "s")) == ("s", "s_2")
    assert source_names(named(plain.union(mine).union(plain), "s")) == ("s", "mine", "s_2")
    assert source_names(named(mine.union(plain), "MINE")) == ("mine", "MINE_2")
    assert source_names(named(mine.union(other), "s")) == ("mine", "other")
    assert source_names(renamed(mine.union(other), ["x", "y"])) == ("x", "y")
    with pytest.raises(PlaitError) as caught:
        named(mine.union(mine), "s")
    assert "mine, mine" in refused("DUPLICATE_SOURCE", caught).cause
    with pytest.raises(PlaitError) as caught:
        named(plain, "not/a/folder")
    refused("NAME", caught)


def test_a_source_that_cannot_be_named_is_refused_with_the_remedy(spark: SparkSession) -> None:
    jvm: Any = spark._jvm
    batch: Any = spark.range(1)._jdf
    output, nothing = batch.queryExecution().analyzed().output(), jvm.PythonUtils.toSeq([])
    leaf = jvm.org.apache.spark.sql.catalyst.plans.logical.LocalRelation(
        output, nothing, True, jvm.scala.Option.empty()
    )
    frame = DataFrame(jvm.org.apache.spark.sql.classic.Dataset.ofRows(spark._jsparkSession, leaf), spark)
    assert frame.isStreaming
    with pytest.raises(StreamError) as caught:
        named(frame, "s")
    error = refused("SOURCE_UNNAMED", caught)
    assert "LocalRelation" in error.cause
    assert ".name(" in error.remedy
    assert unnamed(frame) is frame


def test_the_settings_are_the_users_again_once_a_query_has_started(spark: SparkSession, files: Files) -> None:
    keys = (EVOLUTION, "spark.sql.streaming.offsetLog.formatVersion")
    with starting(spark, by_name=True):
        assert [spark.conf.get(key) for key in keys] == ["true", "2"]
    assert [spark.conf.get(key, None) for key in keys] == [None, None]
    spark.conf.set(EVOLUTION, "true")
    with starting(spark, by_name=False):
        assert spark.conf.get(EVOLUTION) == "false"
    with pytest.raises(PlaitError), starting(spark, by_name=False):
        raise PlaitError("START", "a start that fails")
    assert spark.conf.get(EVOLUTION) == "true"
    spark.conf.unset(EVOLUTION)
    # Readers without a name are still welcome.
    files.arrive(a=1)
    assert files.frame("a").isStreaming


@pytest.mark.parametrize("every", [None, "0 seconds"])
def test_sources_are_added_and_reordered_on_a_checkpoint_and_every_row_is_read_once(
    files: Files, every: str | None
) -> None:
    files.arrive(a=1, b=10)
    assert files.run("a", "b", every=every) == [(0, 1, "a"), (0, 10, "b")]
    assert files.offsets == ["v2", 'a:{"logOffset":0}', 'b:{"logOffset":0}']
    files.arrive(a=2, b=20, c=100)
    assert files.run("c", "b", "a", every=every) == [(1, 2, "a"), (1, 20, "b"), (1, 100, "c")]
    files.arrive(a=3)
    assert files.run("b", "a", "c", every=every) == [(2, 3, "a")]
    assert files.offsets == ["v2", 'a:{"logOffset":2}', 'b:{"logOffset":1}', 'c:{"logOffset":0}']
    sources = files.home / "checkpoint" / "sources"
    assert sorted(path.name for path in sources.iterdir()) == ["a", "b", "c"]


def test_a_source_in_a_with_clause_is_named_once_and_read_by_all_that_refer_to_it(files: Files) -> None:
    files.arrive(a=1)
    files.frame("a").createOrReplaceTempView("a_view")
    frame = files.spark.sql("WITH t AS (SELECT v, s FROM a_view) SELECT * FROM t UNION ALL SELECT v + 5, s FROM t")
    assert source_names(named(frame, "x")) == ("x",)
    assert files.run_frames(named(frame, "x")) == [(0, 1, "a"), (0, 6, "a")]
    files.arrive(a=2)
    assert files.run_frames(named(frame, "x")) == [(1, 2, "a"), (1, 7, "a")]
    assert files.offsets == ["v2", 'x:{"logOffset":1}']


def test_a_source_that_is_added_to_an_unfinished_epoch_is_read_from_the_next_one(files: Files) -> None:
    files.arrive(a=1)
    assert files.run("a") == [(0, 1, "a")]
    files.arrive(a=2, c=100)
    assert files.run("a", fail_in=1) == []
    assert files.run("c", "a") == [(1, 2, "a"), (2, 100, "c")]


def test_why_a_name_is_never_given_again_and_a_source_is_dropped_after_a_commit_only(files: Files) -> None:
    files.arrive(a=1, b=10, c=100)
    assert len(files.run("a", "b", "c")) == 3
    for value in (2, 3):
        files.arrive(a=value)
        assert files.run("a", "c") == [(value - 1, value, "a")]
    # Two epochs later Spark has forgotten how far it had read `b`.
    assert files.run("a", "b", "c") == [(3, 10, "b")]
    files.arrive(a=4, c=200)
    assert files.run("a", "b", "c", fail_in=4) == []
    # And 200 is lost: the epoch that had begun with it was run without, and the next one goes on after it.
    assert files.run("a", "b") == [(4, 4, "a")]
    files.arrive(c=300)
    assert files.run("a", "b", "c") == [(5, 300, "c")]


def test_names_are_allocated_once_and_never_given_again() -> None:
    first = SourceNames().assign({"a": (None,), "b": (None, "mine")})
    assert first.streams == {"a": ("a",), "b": ("b", "mine")}
    assert first.assign({"b": ("mine", None), "a": (None,)}).streams == {"a": ("a",), "b": ("mine", "b")}
    without = first.assign({"a": (None,)})
    assert without.retired == {"b", "mine"}
    again = without.assign({"a": (None,), "b": (None,), "B_3": (None, None)})
    assert again.streams == {"a": ("a",), "b": ("b_2",), "B_3": ("B_3", "B_3_2")}
    # What users call their sources goes first, whatever the order of the streams.
    assert SourceNames().assign({"a": (None,), "b": ("a",)}).streams == {"a": ("a_2",), "b": ("a",)}


@pytest.mark.parametrize(
    ("code", "given", "shown"),
    [
        ("DUPLICATE_SOURCE", {"a": (None,), "b": ("b",), "c": ("A",)}, "another stream"),
        ("DUPLICATE_SOURCE", {"a": (None,), "b": ("Old",)}, "a stream that was dropped"),
        ("SOURCES_CHANGED", {"a": ("other",)}, "from other"),
        ("SOURCES_CHANGED", {"a": (None, None)}, "one without a name, one without a name"),
    ],
)
def test_names_that_would_repeat_or_lose_rows_are_refused(
    code: str, given: dict[str, tuple[str | None, ...]], shown: str
) -> None:
    with pytest.raises(PlaitError) as caught:
        SourceNames({"a": ("a",)}, frozenset({"old"})).assign(given)
    assert shown in refused(code, caught).cause


def offsets_of(checkpoint: Path, epoch: int) -> list[str]:
    lines = (checkpoint / "spark" / "offsets" / str(epoch)).read_text().split("\n")
    # In no order: Spark keeps them in a map.
    return [lines[0], *sorted(lines[2:])]


@pytest.mark.parametrize("continuous", [False, True])
def test_an_engine_begins_a_new_checkpoint_with_named_sources(
    spark: SparkSession, tmp_path: Path, continuous: bool
) -> None:
    pair = Pair(spark, tmp_path).arrive(2)
    if continuous:
        with pair.engine() as engine:
            run = engine.start(every="0 seconds")
            run._now.query.processAllAvailable()
            run.stop()
            assert bag(plait.QueryHandle(engine, "q").results().toArrow()) == pair.expected()
    else:
        assert pair.run() == [0, 1]
    assert offsets_of(pair.checkpoint, 1) == ["v2", 'a:{"logOffset":1}', 'b:{"logOffset":1}']
    assert sorted(path.name for path in (pair.checkpoint / "spark" / "sources").iterdir()) == ["a", "b"]
    with Checkpoint(str(pair.checkpoint), Config()).open() as checkpoint:
        assert recorded(checkpoint) == SourceNames({"a": ("a",), "b": ("b",)})
        assert can_change_streams(checkpoint, spark)
        refuse_fixed(checkpoint, spark, ["a", "b"], ["a", "b", "c"])
    assert spark.conf.get(EVOLUTION, None) is None
    pair.arrive()
    assert pair.run() == [2]
    damaged = pair.checkpoint / FILE
    damaged.write_bytes(damaged.read_bytes().replace(b'"a"', b'"c"'))
    pair.refused("CHECKPOINT_CORRUPT")


def test_a_third_stream_joins_an_engines_checkpoint_from_its_beginning(spark: SparkSession, tmp_path: Path) -> None:
    """What the catalog refuses today is asked of the sources alone: the streaming query goes on with one more."""
    pair = Pair(spark, tmp_path).arrive(2)
    assert pair.run() == [0, 1]
    pair.arrive()
    third = ScriptedStream(spark, tmp_path / "c", "k long, w long")
    third.add([(1, 1), (2, 2)])
    got: list[tuple[int, str]] = []

    def take(rows: DataFrame, epoch: int) -> None:
        got.extend((epoch, row.s) for row in rows.collect())

    with Checkpoint(str(pair.checkpoint), Config()).open() as checkpoint:
        frames = {"c": third.frame(), **pair.frames()}
        sources = choose_sources(checkpoint, spark, frames)
        sources.record(checkpoint)
        assert recorded(checkpoint) == SourceNames({"a": ("a",), "b": ("b",), "c": ("c",)})
        assert not choose_sources(checkpoint, spark, frames).changed
        united = [frame.select(F.lit(name).alias("s")) for name, frame in sources.frames.items()]
        query = united[0].union(united[1]).union(united[2]).writeStream.foreachBatch(take).trigger(availableNow=True)
        with sources.starting(spark):
            started = query.option("checkpointLocation", checkpoint.spark_dir).start()
        started.awaitTermination()
        assert sorted(got) == [(2, "a")] * 20 + [(2, "b")] * 20 + [(2, "c")] * 2
        # Spark has an epoch that Plait has not committed: not the time to drop a stream.
        with pytest.raises(CheckpointError) as caught:
            choose_sources(checkpoint, spark, pair.frames())
        error = refused("EPOCH_UNFINISHED", caught)
        assert "rows of c" in error.cause
    with Checkpoint(str(pair.copy(tmp_path / "twin").checkpoint), Config()).open() as checkpoint:
        for log in ("offsets", "commits"):
            (tmp_path / "twin" / "checkpoint" / "spark" / log / "2").unlink()
        sources = choose_sources(checkpoint, spark, pair.frames())
        assert sources.names == SourceNames({"a": ("a",), "b": ("b",)}, frozenset({"c"}))
        sources.record(checkpoint)
        again = choose_sources(checkpoint, spark, frames)
        assert source_names(again.frames["c"]) == ("c_2",)


def test_users_own_names_are_kept_by_an_engine_and_may_be_left_away_later(
    spark: SparkSession, tmp_path: Path, evolving: None
) -> None:
    pair = Pair(spark, tmp_path).arrive()

    def run(**names: str) -> list[int]:
        with plait.Engine(spark, str(pair.checkpoint), plait.Config(tasks=2)) as engine:
            for name, stream in (("a", pair.a), ("b", pair.b)):
                reader = spark.readStream.schema(stream.schema).option("maxFilesPerTrigger", 1)
                reader = reader.name(names.get(name, "nobody"))
                frame = reader.parquet(stream.directory)
                engine.stream(name, frame if name in names else unnamed(frame))
            query = engine.query("q", SQL)
            done = [progress["epoch"] for progress in run_epochs(engine)]
            assert bag(query.results().toArrow()) == pair.expected()
            return done

    assert run(a="theirs") == [0]
    assert offsets_of(pair.checkpoint, 0) == ["v2", 'b:{"logOffset":0}', 'theirs:{"logOffset":0}']
    pair.arrive()
    assert run() == [1]
    with pytest.raises(CheckpointError) as caught:
        run(a="another")
    assert "theirs" in refused("SOURCES_CHANGED", caught).cause
    # Without the record, the names are still in Spark's log; only their user can tell which is which.
    (pair.checkpoint / FILE).unlink()
    pair.arrive()
    with pytest.raises(StreamError) as caught_stream:
        run(a="theirs")
    assert "'b'" in refused("SOURCE_UNNAMED", caught_stream).cause
    assert run(a="theirs", b="b") == [2]


@pytest.fixture
def golden(spark: SparkSession, tmp_path: Path) -> Iterator[Golden]:
    """A checkpoint that began before sources had names."""
    spark.conf.set("spark.sql.session.timeZone", "UTC")
    kept = Path(__file__).parent.parent / "fixtures" / "checkpoints" / "format-3.tar.gz"
    yield restored(spark, kept, tmp_path)
    spark.conf.unset("spark.sql.session.timeZone")


def test_a_checkpoint_that_began_without_names_goes_on_by_position_and_its_streams_are_fixed(golden: Golden) -> None:
    spark = golden.spark
    golden.arrive(EPOCHS, EPOCHS + 1)
    # Even if the session would name sources: nothing in Spark's log has a name.
    with golden.engine() as engine:
        spark.conf.set(EVOLUTION, "true")
        try:
            assert not can_change_streams(engine.checkpoint, spark)
            for name in ("clicks", "orders"):
                engine._registered.frames[name] = named(engine._registered.frames[name], f"my_{name}")
            assert [progress["epoch"] for progress in run_epochs(engine)] == [EPOCHS]
        finally:
            spark.conf.unset(EVOLUTION)
    assert offsets_of(golden.checkpoint, EPOCHS)[0] == "v1"
    assert sorted(p.name for p in (golden.checkpoint / "spark" / "sources").iterdir()) == ["0", "1", "2", "3"]
    assert not (golden.checkpoint / FILE).exists()
    with golden.engine() as engine:
        engine.stream("more", ScriptedStream(spark, golden.checkpoint.parent / "more", "id long").frame())
        engine.query("fourth", "SELECT o.id FROM orders o JOIN more m ON o.id = m.id")
        with pytest.raises(CheckpointError) as caught:
            engine.start(available_now=True)
        error = refused("STREAMS_FIXED", caught)
        assert "added: more" in error.cause
        assert "began without" in error.cause
        assert "new checkpoint" in error.remedy
    with golden.engine() as engine:
        # The same streams, but one of them has a source more.
        engine._registered.frames["orders"] = engine._registered.frames["orders"].union(
            golden.streams["orders"].frame()
        )
        with pytest.raises(CheckpointError) as caught:
            engine.start(available_now=True)
        assert "has 4 sources, and now there are 5" in refused("STREAMS_FIXED", caught).cause


class OlderSpark:
    """A session of Spark 4.1 as far as names go: its JVM has no class for them."""

    version = "4.1.0"

    def __init__(self, spark: SparkSession) -> None:
        self._jvm = spark._jvm.nowhere  # type: ignore[union-attr]


def test_an_older_spark_goes_by_position_and_refuses_a_checkpoint_with_names(
    spark: SparkSession, tmp_path: Path
) -> None:
    older: Any = OlderSpark(spark)
    assert supports_names(spark)
    assert not supports_names(older)
    with starting(older, by_name=True):
        pass
    pair = Pair(spark, tmp_path).arrive()
    frames = pair.frames()
    with Checkpoint(str(tmp_path / "new"), Config()).open() as checkpoint:
        assert not can_change_streams(checkpoint, older)
        chosen = choose_sources(checkpoint, older, frames)
        assert chosen.names is None
        assert chosen.frames == frames
        with pytest.raises(CheckpointError) as caught:
            refuse_fixed(checkpoint, older, ["a", "b"], ["a"])
        error = refused("STREAMS_FIXED", caught)
        assert "gone: b" in error.cause
        assert "Spark 4.1.0" in error.cause
    pair.run()
    with Checkpoint(str(pair.checkpoint), Config()).open() as checkpoint:
        with pytest.raises(CheckpointError) as caught:
            choose_sources(checkpoint, older, frames)
        assert "4.1.0" in refused("SPARK_OLDER", caught).cause


def test_a_stream_of_two_sources_joins_exactly_and_both_are_named(spark: SparkSession, tmp_path: Path) -> None:
    sql = "SELECT a.v, b.v AS w FROM a JOIN b ON a.k = b.k"
    one, two, b = (ScriptedStream(spark, tmp_path / n, "k long, v long") for n in ("one", "two", "b"))
    for epoch in range(2):
        one.add([(i, i) for i in range(epoch * 4, epoch * 4 + 4)])
        two.add([(i, -i) for i in range(epoch * 3, epoch * 3 + 3)])
        b.add([(i % 3, i) for i in range(epoch * 5, epoch * 5 + 5)])
        with plait.Engine(spark, str(tmp_path / "checkpoint"), plait.Config(tasks=2)) as engine:
            engine.stream("a", one.frame().union(two.frame()))
            engine.stream("b", b.frame())
            query = engine.query("q", sql)
            assert len(run_epochs(engine)) == 1
            tables = {"a": pa.concat_tables([one.table(), two.table()]), "b": b.table()}
            assert bag(query.results().toArrow()) == batch_join(tables, sql)
    assert offsets_of(tmp_path / "checkpoint", 1) == ["v2", *(f'{n}:{{"logOffset":1}}' for n in ("a", "a_2", "b"))]
