"""Every sink gets each epoch's rows once per epoch number; what is handed over twice is recognised by that number."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

import plait
from plait.testing import ScriptedStream, run_epochs
from tests.oracle import Bag, bag

pytestmark = pytest.mark.spark

JOIN = "SELECT a.id AS x, b.id AS y FROM a JOIN b ON a.k = b.k"
EXPECTED = [(1, 10), (2, 10), (1, 30), (2, 30), (3, 10), (3, 30)]


@pytest.fixture
def streams(spark: SparkSession, tmp_path: Path) -> dict[str, ScriptedStream]:
    """Two results, then none, then four more."""
    made = {name: ScriptedStream(spark, tmp_path / name, "id int, k int") for name in "ab"}
    made["a"].add([(1, 1), (2, 1)])
    made["b"].add([(10, 1)])
    made["a"].add([(7, 7)])
    made["b"].add()
    made["a"].add([(3, 1)])
    made["b"].add([(30, 1)])
    return made


def engine_on(spark: SparkSession, base: Path, streams: dict[str, ScriptedStream]) -> plait.Engine:
    engine = plait.Engine(spark, str(base / "checkpoint"), plait.Config(tasks=2))
    for name, stream in streams.items():
        engine.stream(name, stream.frame())
    return engine


def forget_last_epoch(base: Path) -> None:
    """As if the process had died after the sinks were called and before the receipt was written."""
    (base / "checkpoint" / "receipts" / f"{2:012d}.json").unlink()
    for name in ("2", ".2.crc"):
        (base / "checkpoint" / "spark" / "commits" / name).unlink(missing_ok=True)


def test_every_sink_gets_every_epoch_once_and_recognises_it_when_it_comes_again(
    spark: SparkSession, tmp_path: Path, streams: dict[str, ScriptedStream], capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[tuple[int, Bag]] = []
    target = tmp_path / "out" / "parquet"

    def take(rows: DataFrame, epoch: int) -> None:
        calls.append((epoch, bag(rows.collect())))

    def start() -> tuple[plait.Engine, dict[str, plait.QueryHandle], list[dict[str, object]]]:
        engine = engine_on(spark, tmp_path, streams)
        names = ("kept", "black_hole", "shown", "remembered", "written", "called")
        handles = {name: engine.query(name, JOIN) for name in names}
        # Tasks compute the first of these, and Spark finishes the second; their sinks want no rows, and get none.
        handles["computed"] = engine.query("computed", JOIN.replace("a.id AS x", "a.id + b.id AS x"))
        handles["finished"] = engine.query("finished", JOIN.replace("a.id AS x", "length(concat(a.id, b.id)) AS x"))
        for name in ("black_hole", "computed", "finished"):
            handles[name].sink("noop")
        handles["shown"].sink("console", rows=1)
        handles["remembered"].sink("memory")
        handles["written"].sink("parquet", path=str(target))
        handles["called"].foreach_batch(take)
        return engine, handles, run_epochs(engine)

    engine, handles, progress = start()
    with engine:
        everything = bag(EXPECTED)
        assert [p["rows_out"] for p in progress] == [dict.fromkeys(handles, n) for n in (2, 0, 4)]
        assert [epoch for epoch, _ in calls] == [0, 1, 2]
        assert sum((rows for _, rows in calls), bag([])) == everything
        assert calls[1][1] == bag([])
        for name in ("kept", "remembered", "written"):
            assert bag(handles[name].results().collect()) == everything, name
        for name in ("black_hole", "shown", "called", "computed", "finished"):
            with pytest.raises(plait.QueryError, match="RESULTS_NOT_KEPT"):
                handles[name].results()
        assert bag(spark.table("remembered").collect()) == everything
        printed = capsys.readouterr().out
        assert [f"epoch {n} " in printed for n in range(4)] == [True, True, True, False]
        assert "only showing top 1 row" in printed
        files = sorted(os.listdir(target))
        shown = [name for name in files if name[0] not in "._"]
        assert {name.split("-")[1] for name in shown} == {f"{n:012d}" for n in (0, 2)}
        assert all(name.endswith(".parquet") for name in shown)

    forget_last_epoch(tmp_path)
    engine, handles, progress = start()
    with engine:
        assert [epoch for epoch, _ in calls] == [0, 1, 2, 2]
        assert calls[-1] == calls[-2]
        assert sorted(os.listdir(target)) == files
        for name in ("kept", "remembered", "written"):
            assert bag(handles[name].results().collect()) == everything, name
        assert progress == []


LEAST = {"kept": 1, "remembered": 2, "written": 3, "called": 2, "also": 2, "finished": 2, "again": 2, "answer": 1}
"""By query the ids of `a` that it begins with."""


@pytest.mark.filterwarnings("ignore::plait.RecomputationWarning")
def test_sinks_of_queries_that_share_their_files_get_their_own_rows(
    spark: SparkSession, tmp_path: Path, streams: dict[str, ScriptedStream]
) -> None:
    calls: dict[int, Bag] = {}
    target = tmp_path / "out" / "parquet"

    def take(rows: DataFrame, epoch: int) -> None:
        assert rows.columns == ["x", "y"]
        calls[epoch] = bag(rows.collect())

    def start(names: list[str], written: str = "parquet") -> tuple[plait.Engine, dict[str, plait.QueryHandle]]:
        engine = engine_on(spark, tmp_path, streams)
        handles = {}
        for name in names:
            sql = f"{JOIN} WHERE a.id >= {LEAST[name]}"
            if name in ("finished", "again"):
                # Spark finishes these; all candidates of the one are the other's.
                sql = sql.replace("b.id AS y", "cast(reverse(reverse(concat(b.id, a.k))) AS int) div 10 AS y")
            if name == "answer":
                sql += " ORDER BY x, y"
            handles[name] = engine.query(name, sql)
        if "remembered" in handles:
            handles["remembered"].sink("memory")
        if "written" in handles and written == "parquet":
            handles["written"].sink("parquet", path=str(target))
        if "called" in handles:
            handles["called"].foreach_batch(take)
        return engine, handles

    def due(name: str) -> Bag:
        return bag([(x, y) for x, y in EXPECTED if x >= LEAST[name]])

    engine, handles = start(list(LEAST))
    with engine:
        run_epochs(engine)
        in_force = engine.checkpoint.log.results()
        shared = {name: {file.path for file in in_force[name]} for name in ("kept", "remembered", "also")}
        assert shared["kept"] >= shared["remembered"] == shared["also"]
        assert all(file.bit is not None for name in shared for file in in_force[name])
        for name in ("kept", "remembered", "written", "also", "finished", "again", "answer"):
            rows = handles[name].results()
            assert rows.columns == ["x", "y"]
            assert bag(rows.collect()) == due(name), name
        assert sum(calls.values(), bag([])) == due("called")
        assert bag(spark.table("remembered").collect()) == due("remembered")
    assert bag(spark.read.parquet(str(target)).collect()) == due("written")

    # The last epoch comes again, to sinks that find their rows in files; one query is there no more.
    forget_last_epoch(tmp_path)
    calls.clear()
    engine, handles = start([name for name in LEAST if name != "remembered"])
    with engine:
        engine.drop("remembered")
        run_epochs(engine)
        streams["b"].add([(40, 1)])
        run_epochs(engine)
        assert set(calls) == {2, 3}
        assert calls[2] == bag([(x, y) for x, y in EXPECTED if (x, y) != (2, 10) and x >= LEAST["called"]])
        more = [*EXPECTED, (1, 40), (2, 40), (3, 40)]
        for name in ("kept", "written", "also", "finished", "again", "answer"):
            now = bag([(x, y) for x, y in more if x >= LEAST[name]])
            assert bag(handles[name].results().collect()) == now, name
        assert "remembered" not in engine.checkpoint.log.results()


def test_a_parquet_directory_belongs_to_one_query_of_one_checkpoint(
    spark: SparkSession, tmp_path: Path, streams: dict[str, ScriptedStream]
) -> None:
    target = str(tmp_path / "out")

    def start(base: Path, *names: str) -> Bag:
        with engine_on(spark, base, streams) as engine:
            for name in names:
                engine.query(name, JOIN).sink("parquet", path=target)
            run_epochs(engine)
            return bag(plait.QueryHandle(engine, names[0]).results().collect())

    with pytest.raises(plait.CheckpointError, match=r"SINK_OWNED.*query 'one'"):
        start(tmp_path / "both", "one", "two")
    with pytest.raises(plait.CheckpointError, match="SINK_OWNED"):
        start(tmp_path / "single", "one")
    for name in os.listdir(target):
        os.unlink(os.path.join(target, name))
    assert start(tmp_path / "single", "one") == bag(EXPECTED)
    assert start(tmp_path / "single", "one") == bag(EXPECTED)
    with pytest.raises(plait.CheckpointError, match="SINK_OWNED"):
        start(tmp_path / "another", "one")
    # As a version wrote it that left no owner: whoever has run goes on, whoever has not is refused.
    os.unlink(os.path.join(target, "_plait_owner.json"))
    with pytest.raises(plait.CheckpointError, match=r"SINK_OWNED.*not run yet"):
        start(tmp_path / "another", "one")
    assert start(tmp_path / "single", "one") == bag(EXPECTED)


def test_results_are_empty_but_typed_before_anything_happened(
    spark: SparkSession, tmp_path: Path, streams: dict[str, ScriptedStream]
) -> None:
    with engine_on(spark, tmp_path, streams) as engine:
        kept = engine.query("kept", JOIN)
        written = engine.query("written", JOIN).sink("parquet", path=str(tmp_path / "nothing yet"))
        for query in (kept, written):
            assert query.results().dtypes == [("x", "int"), ("y", "int")]
            assert query.results().count() == 0


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("kafkaesque", {}, r"no sink called 'kafkaesque'.*console, foreach_batch, memory, noop, parquet"),
        ("parquet", {}, "path"),
        ("parquet", {"path": "s3://bucket/x"}, "local paths"),
        ("console", {"lines": 3}, "lines"),
    ],
)
def test_a_sink_that_cannot_be_made_says_why(
    spark: SparkSession,
    tmp_path: Path,
    streams: dict[str, ScriptedStream],
    kind: str,
    options: dict[str, object],
    message: str,
) -> None:
    with engine_on(spark, tmp_path, streams) as engine, pytest.raises(plait.QueryError, match=message):
        engine.query("q", JOIN).sink(kind, **options)
