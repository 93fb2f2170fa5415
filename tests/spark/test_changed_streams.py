"""Streams and tables that come, go and grow between runs on one checkpoint, and checkpoints of an earlier format."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

import plait
from plait.config import KEY_GROUPS
from plait.errors import CheckpointError, StreamError
from plait.testing import run_epochs
from tests.golden import EPOCHS, QUERIES, Golden, expected, restored, table
from tests.oracle import Bag, bag, batch_join
from tests.spark import changes_driver
from tests.spark.changes_driver import BASE, Changing, die_at, found
from tests.spark.pair import told

pytestmark = pytest.mark.spark

FORMAT_3 = Path(__file__).parent.parent / "fixtures" / "checkpoints" / "format-3.tar.gz"
THREE = "SELECT a.v, b.w, c.x FROM a JOIN b ON a.k = b.k JOIN c ON c.k = b.k"


@pytest.fixture
def changing(spark: SparkSession, tmp_path: Path) -> Changing:
    """Streams without a checkpoint."""
    return Changing(spark, tmp_path)


def started(changing: Changing, *names: str) -> Changing:
    """The same with a checkpoint on which the query `q` over a and b has run for two epochs."""
    names = names or ("a", "b")
    changing.arrive(*names).arrive(*names)
    with changing.engine() as engine:
        engine.query("q", BASE)
        assert changing.run(engine) == [0, 1]
    return changing


def test_a_stream_is_added_and_joined_with_old_rows_of_the_others(changing: Changing) -> None:
    started(changing).arrive("a", "b", "c").arrive("c")
    with changing.engine() as engine:
        old = engine.query("q", BASE)
        three, state = engine.query("three", THREE), engine.query("state_three", THREE, since="state")
        assert changing.run(engine) == [2, 3]
        assert three.floors == {"a": 0, "b": 0, "c": 2}
        assert found(old) == changing.answer(BASE)
        # All rows of c are new, so all results have a new row.
        assert found(three) == found(state) == changing.answer(THREE)
    changing.arrive("a").arrive("a", "b", "c")
    with changing.engine("c", "b", "a") as engine:
        old, three = engine.query("q", BASE), engine.query("three", THREE)
        engine.drop("state_three")
        assert changing.run(engine) == [4, 5]
        assert found(old) == changing.answer(BASE)
        assert found(three) == changing.answer(THREE)


def test_a_stream_is_dropped_and_comes_back_under_its_name_and_no_row_is_read_twice(changing: Changing) -> None:
    started(changing, "a", "b", "c").arrive("a", "b", "c")
    with changing.engine() as engine:
        engine.query("q", BASE)
        engine.query("three", THREE)
        assert changing.run(engine) == [2]
    changing.arrive("a", "b")
    with changing.engine("a", "b") as engine:
        engine.query("q", BASE)
        engine.drop("three")
        with pytest.raises(CheckpointError) as caught:
            engine.start(available_now=True)
        assert "'c'" in told(caught.value, "STREAM_MISSING").cause
        engine.drop("c")
        assert changing.run(engine) == [3]
        assert "c" not in {i.relation for i in engine.plan.inputs}
    changing.arrive("a", "b", "c")
    with changing.engine() as engine:
        old = engine.query("q", BASE)
        # In use it cannot be dropped.
        three = engine.query("three", THREE, since="state")
        with pytest.raises(StreamError) as error:
            engine.drop("c")
        assert "three" in told(error.value, "STREAM_IN_USE").cause
        assert changing.run(engine) == [4, 5, 6, 7]
        assert found(old) == changing.answer(BASE)
        # It begins anew: its files are read again, each once, and of its old state nothing is left.
        assert three.floors == {"a": 0, "b": 0, "c": 4}
        assert sum(progress["rows_in"]["c"] for progress in changing.ran) == changing.table("c").num_rows
        assert found(three) == changing.answer(THREE)


def test_a_stream_that_no_query_reads_stays_a_source(changing: Changing) -> None:
    started(changing, "a", "b", "c")
    # Its rows are let go; a query that begins to read it does not get them again.
    changing.arrive("a", "b", "c")
    with changing.engine() as engine:
        engine.query("q", BASE)
        three = engine.query("three", THREE, since="state")
        assert changing.run(engine) == [2]
        assert three.floors == {"a": 0, "b": 0, "c": 2}
        assert found(three) == changing.answer(THREE, {"c": 2})
    # And the other way round: c is read by nobody any more.
    changing.arrive("c").arrive("a", "c")
    with changing.engine() as engine:
        old = engine.query("q", BASE)
        engine.drop("three")
        changing.run(engine)
        assert found(old) == changing.answer(BASE)
    changing.arrive("b", "c")
    with changing.engine() as engine:
        engine.query("q", BASE)
        three = engine.query("three", THREE)
        (epoch,) = changing.run(engine)
        assert three.floors == {"a": 0, "b": 0, "c": epoch}
        assert found(three) == changing.since_now(THREE, 5, {"c": 5})


def test_a_stream_that_is_kept_whole_has_a_past_before_anybody_reads_it(changing: Changing) -> None:
    keep = {"c": "all"}
    changing.arrive("a", "b", "c").arrive("a", "b", "c")
    with changing.engine(keep=keep) as engine:
        engine.query("q", BASE)
        changing.run(engine)
    changing.arrive("a", "b", "c").arrive("a", "b", "c")
    with changing.engine(keep=keep) as engine:
        engine.query("q", BASE)
        three, state = engine.query("three", THREE), engine.query("state_three", THREE, since="state")
        assert changing.run(engine) == [2, 3]
        assert three.live_since == state.live_since == 3
        assert three.floors == state.floors == {"a": 0, "b": 0, "c": 0}
        assert found(state) == changing.answer(THREE)
        assert found(three) == changing.since_now(THREE, 3)


def test_a_table_is_added_and_all_its_rows_are_there(changing: Changing) -> None:
    started(changing).arrive().arrive()
    names = pa.table({"k": pa.array(range(7), pa.int64()), "name": [f"n{i}" for i in range(7)]})
    frame = changing.spark.createDataFrame(names)
    sql = "SELECT a.v, b.w, n.name FROM a JOIN b ON a.k = b.k JOIN n ON n.k = a.k"

    def answer(first: int = 0, before: int | None = None) -> Any:
        tables = {name: changing.table(name, first, before) for name in ("a", "b")}
        return batch_join({**tables, "n": names}, sql)

    with changing.engine() as engine:
        engine.table("n", frame)
        engine.query("q", BASE)
        queries = {since: engine.query(f"{since}_one", sql, since=since) for since in ("now", "state", "new")}
        assert changing.run(engine) == [2, 3]
        assert queries["now"].floors == {"a": 0, "b": 0, "n": 0}
        assert found(queries["now"]) == answer() - answer(before=2)
        assert found(queries["state"]) == answer()
        assert found(queries["new"]) == answer(2)
    changing.arrive()
    with changing.engine() as engine:
        engine.query("q", BASE)
        for since in queries:
            engine.drop(f"{since}_one")
        with pytest.raises(CheckpointError) as caught:
            engine.start(available_now=True)
        assert "table 'n'" in told(caught.value, "STREAM_MISSING").cause
    with changing.engine() as engine:
        # Its rows stay what they were when they were read.
        engine.table("n", frame.where("k < 0"))
        engine.query("q", BASE)
        again = engine.query("again", sql, since="new")
        queries = {since: engine.query(f"{since}_one", sql) for since in queries}
        assert changing.run(engine) == [4]
        assert found(queries["now"]) == answer() - answer(before=2)
        assert found(queries["state"]) == answer()
        assert found(queries["new"]) == answer(2)
        # Also for those who come later.
        assert again.floors == {"a": 4, "b": 4, "n": 0}
        assert found(again) == answer(4)
    changing.arrive()
    with changing.engine() as engine:
        old = engine.query("q", BASE)
        for name in ("again", *(f"{since}_one" for since in queries), "n"):
            engine.drop(name)
        assert changing.run(engine) == [5]
        assert found(old) == changing.answer(BASE)
        assert {store.relation for store in engine.plan.stores} == {"a", "b"}


def test_a_join_of_tables_only_beside_a_stream_gives_all_its_rows_whatever_stores_are_there(changing: Changing) -> None:
    started(changing).arrive()
    numbers = range(7)
    tables = {
        "t1": pa.table({"k": pa.array(numbers, pa.int64()), "x": [f"x{i}" for i in numbers]}),
        "t2": pa.table({"k": pa.array(numbers, pa.int64()), "j": pa.array([i % 3 for i in numbers], pa.int64())}),
        "t3": pa.table({"j": pa.array(range(3), pa.int64()), "y": [f"y{i}" for i in range(3)]}),
    }
    pairs = "SELECT a.v, t2.k, t2.j FROM a JOIN t2 ON a.k = t2.k"
    chain = "SELECT t1.k, t1.x, t3.y FROM t1 JOIN t2 ON t1.k = t2.k JOIN t3 ON t2.j = t3.j"
    beside = f"SELECT a.v, c.x, c.y FROM a LEFT JOIN ({chain}) c ON a.k = c.k"

    def define(engine: plait.Engine) -> None:
        for name, rows in tables.items():
            engine.table(name, changing.spark.createDataFrame(rows))
        engine.query("q", BASE)
        engine.query("pairs", pairs)

    with changing.engine() as engine:
        define(engine)
        changing.run(engine)
    changing.arrive().arrive().arrive()
    with changing.engine() as engine:
        define(engine)
        with pytest.warns(plait.RecomputationWarning):
            both = engine.query("beside", beside, since="state")
        assert changing.run(engine) == [3, 4, 5]
        # It reads a stream by itself, and so cannot wait until a store of t2 is filled from the one that is there.
        assert both.live_since == both.floors["a"] == 3
        rows = {"a": changing.table("a", both.floors["a"]), **tables}
        assert found(both) == batch_join(rows, beside)


def test_a_table_that_was_dropped_comes_back_with_other_rows(changing: Changing) -> None:
    started(changing)
    sql = "SELECT a.v, n.name FROM a JOIN n ON n.k = a.k"
    for word in ("old", "new"):
        names = pa.table({"k": pa.array(range(7), pa.int64()), "name": [f"{word} {i}" for i in range(7)]})
        changing.arrive()
        with changing.engine() as engine:
            engine.table("n", changing.spark.createDataFrame(names))
            engine.query("q", BASE)
            query = engine.query("named", sql, since="state")
            changing.run(engine)
            assert query.floors == {"a": 0, "n": 0}
            assert found(query) == batch_join({"a": changing.table("a"), "n": names}, sql)
        changing.arrive()
        with changing.engine() as engine:
            engine.query("q", BASE)
            engine.drop("named")
            engine.drop("n")
            changing.run(engine)


def test_a_table_is_dropped_and_registered_again_in_one_start(changing: Changing) -> None:
    started(changing)
    sql = "SELECT a.v, n.name FROM a JOIN n ON n.k = a.k"

    def named(word: str, kind: pa.DataType) -> pa.Table:
        names = pa.array([f"{word} {i}" for i in range(7)])
        return pa.table({"k": pa.array(range(7), kind), "name": names})

    names = named("old", pa.int64())
    with changing.engine() as engine:
        engine.table("n", changing.spark.createDataFrame(names))
        engine.query("q", BASE)
        query = engine.query("named", sql, since="state")
        changing.arrive()
        changing.run(engine)
        assert found(query) == batch_join({"a": changing.table("a"), "n": names}, sql)
    changing.arrive()
    # It is another table, and may have other columns.
    names = named("new", pa.int32())
    with changing.engine() as engine:
        engine.drop("n")
        engine.table("n", changing.spark.createDataFrame(names))
        engine.query("q", BASE)
        engine.query("named", sql)
        # A query cannot go on: its results so far are of the old rows.
        with pytest.raises(CheckpointError) as caught:
            engine.start(available_now=True)
        assert "query 'named'" in told(caught.value, "STREAM_IN_USE").cause
        assert "engine.drop('named')" in told(caught.value, "STREAM_IN_USE").remedy
    with changing.engine() as engine:
        engine.drop("n")
        engine.drop("named")
        engine.table("n", changing.spark.createDataFrame(names))
        old, query = engine.query("q", BASE), engine.query("named", sql, since="state")
        changing.run(engine)
        assert found(query) == batch_join({"a": changing.table("a"), "n": names}, sql)
        assert found(old) == changing.answer(BASE)
        assert len([store for store in engine.plan.stores if store.relation == "n"]) == 1
        # The next start of this engine drops nothing.
        changing.arrive()
        changing.run(engine)
        assert found(query) == batch_join({"a": changing.table("a"), "n": names}, sql)


def test_a_stream_that_was_dropped_comes_back_with_other_columns(changing: Changing) -> None:
    changing.arrive("a", "b", "c")
    with changing.engine() as engine:
        engine.query("q", BASE)
        engine.query("three", THREE)
        changing.run(engine)
    changing.arrive("a", "b")
    with changing.engine("a", "b") as engine:
        engine.query("q", BASE)
        engine.drop("three")
        engine.drop("c")
        changing.run(engine)
    changing.home = changing.home / "elsewhere"
    del changing.born["c"]
    changing.stream("c", "k long, x string")
    changing.arrive(a=[(1, 1, 500, "x")], b=[(1, 1, -500)], c=[(1, "text")])
    with changing.engine() as engine:
        old, three = engine.query("q", BASE), engine.query("three", THREE, since="state")
        assert changing.run(engine) == [2]
        assert found(old) == changing.answer(BASE)
        assert found(three) == changing.answer(THREE)


def test_an_epoch_that_has_begun_with_a_stream_needs_it_once_more(
    changing: Changing, monkeypatch: pytest.MonkeyPatch
) -> None:
    started(changing).arrive("a", "b", "c")
    die_at(monkeypatch, "commit.2", 2)
    with changing.engine() as engine:
        engine.query("q", BASE)
        engine.query("three", THREE)
        with pytest.raises(plait.PlaitError):
            changing.run(engine)
    monkeypatch.undo()
    with changing.engine("a", "b") as engine:
        engine.query("q", BASE)
        engine.drop("three")
        engine.drop("c")
        with pytest.raises(CheckpointError) as caught:
            engine.start(available_now=True)
        assert "epoch 2" in told(caught.value, "EPOCH_UNFINISHED").cause
    # The query, which has no results yet, may go.
    with changing.engine() as engine:
        old = engine.query("q", BASE)
        engine.drop("three")
        assert changing.run(engine) == [2]
        assert found(old) == changing.answer(BASE)
    changing.arrive("a", "b")
    with changing.engine("a", "b") as engine:
        old = engine.query("q", BASE)
        engine.drop("c")
        assert changing.run(engine) == [3]
        assert found(old) == changing.answer(BASE)


def test_a_stream_that_gains_a_column_serves_old_and_new_queries(changing: Changing) -> None:
    started(changing)
    changing.stream("a", f"{changes_driver.SCHEMAS['a']}, more long")
    rows = [(i % 7, i % 5, i, "x", i * 100) for i in range(24, 36)]
    changing.arrive(a=rows, b=changes_driver.made("b", 2))
    sql = "SELECT a.v, a.more, b.w FROM a JOIN b ON a.k = b.k"
    with changing.engine() as engine:
        old, new = engine.query("q", BASE), engine.query("more", sql, since="state")
        assert changing.run(engine) == [2]
        assert new.floors == {"a": 2, "b": 0}
        assert found(old) == changing.answer(BASE)
        assert found(new) == changing.answer(sql, {"a": 2})
    # A column that has gone is refused.
    changing.stream("a")
    with changing.engine() as engine:
        engine.query("q", BASE)
        engine.drop("more")
        with pytest.raises(CheckpointError) as caught:
            engine.start(available_now=True)
        assert "more bigint" in told(caught.value, "SCHEMA_CHANGED").cause


def test_a_stream_is_kept_whole_from_some_epoch_on_and_no_longer_later(changing: Changing) -> None:
    text = "SELECT a.v, a.m, b.w FROM a JOIN b ON a.k = b.k"
    late_text = f"{text} WHERE a.s = 'x'"
    started(changing).arrive()
    with changing.engine(keep={"a": "all"}) as engine:
        engine.query("q", BASE)
        assert changing.run(engine) == [2]
    changing.arrive()
    with changing.engine(keep={"a": "all"}) as engine:
        engine.query("q", BASE)
        query = engine.query("n", text, since="state")
        assert changing.run(engine) == [3]
        assert query.floors == {"a": 2, "b": 0}
    changing.arrive()
    with changing.engine() as engine:
        old, query = engine.query("q", BASE), engine.query("n", text, since="state")
        late = engine.query("late", late_text, since="state")
        assert changing.run(engine) == [4]
        assert query.live_since == 4
        assert found(old) == changing.answer(BASE)
        assert found(query) == changing.answer(text, {"a": 2})
        # What was kept while all was kept is there until the store is filled from it.
        assert late.floors == {"a": 2, "b": 0}
    changing.arrive()
    with changing.engine() as engine:
        engine.query("q", BASE)
        query, late = engine.query("n", text), engine.query("late", late_text)
        assert changing.run(engine) == [5]
        assert late.live_since == 5
        assert found(late) == changing.answer(late_text, {"a": 2})
        assert found(query) == changing.answer(text, {"a": 2})
        assert all(store.key.columns for store in engine.plan.stores)


def test_a_longer_ttl_holds_for_rows_that_arrive_under_it(changing: Changing) -> None:
    def run(ttl: str, epochs: list[int]) -> Bag:
        settings = plait.Config(**changing.config)
        with plait.Engine(changing.spark, checkpoint=str(changing.checkpoint), config=settings) as engine:
            engine.stream("a", changing.frame("a"), ttl=ttl)
            engine.stream("b", changing.frame("b"))
            query = engine.query("q", BASE)
            assert changing.run(engine) == epochs
            return found(query)

    changing.arrive("a", b=[])
    run("1 millisecond", [0])
    changing.arrive("a", b=[])
    run("1 day", [1])
    changing.arrive("b", a=[])
    assert run("1 day", [2]) == changing.answer(BASE, {"a": 1})
    # And a shorter one for rows that arrive under that.
    changing.arrive("a", b=[])
    run("1 millisecond", [3])
    changing.arrive("b", a=[])
    # What has arrived keeps the TTL that it arrived under.
    assert run("1 millisecond", [4]) == changing.answer(BASE, {"a": 1}) - changing.answer(BASE, {"a": 3, "b": 4})


# ---------------------------------------------------------------- checkpoints of an earlier format


@pytest.fixture
def golden(spark: SparkSession, tmp_path: Path) -> Iterator[Golden]:
    """A copy of a checkpoint of format 3, and a session with the time zone that it was written in."""
    before = spark.conf.get("spark.sql.session.timeZone", "UTC") or "UTC"
    spark.conf.set("spark.sql.session.timeZone", "UTC")
    yield restored(spark, FORMAT_3, tmp_path)
    spark.conf.set("spark.sql.session.timeZone", before)


def test_queries_of_an_old_checkpoint_change_once_it_has_been_started_as_it_was(golden: Golden) -> None:
    added = "SELECT o.id, p.way, p.paid FROM orders o JOIN payments p ON p.order_id = o.id WHERE o.amount > 90"

    def oracle(epochs: int) -> Any:
        return batch_join({name: table(name, epochs) for name in golden.streams}, added)

    with golden.engine() as engine:
        engine.drop("dear")
        engine.query("added", added)
        with pytest.raises(CheckpointError) as caught:
            engine.start(available_now=True)
        told(caught.value, "UPGRADE_FIRST")
    golden.arrive(EPOCHS, EPOCHS + 1)
    with golden.engine() as engine:
        assert len(run_epochs(engine)) == 1
    golden.arrive(EPOCHS + 1, EPOCHS + 3)
    with golden.engine() as engine:
        engine.drop("dear")
        state = engine.query("added", added, since="state")
        assert [progress["epoch"] for progress in run_epochs(engine)] == [EPOCHS + 1, EPOCHS + 2]
        for name in QUERIES:
            if name != "dear":
                assert bag(plait.QueryHandle(engine, name).results().toArrow()) == expected(name, EPOCHS + 3), name
        assert state.floors == {"o": 0, "p": 0}
        assert found(state) == oracle(EPOCHS + 3)
    # Spark knows the streams of this checkpoint by position: there can be no other ones.
    with golden.engine() as engine:
        engine.drop("dear")
        engine.query("added", added)
        engine.stream("late", golden.streams["payments"].frame())
        engine.query("other", "SELECT l.way FROM late l JOIN orders o ON l.order_id = o.id")
        with pytest.raises(CheckpointError) as caught:
            engine.start(available_now=True)
        told(caught.value, "STREAMS_FIXED")


# ---------------------------------------------------------------- a death while a store is filled


def driver(home: Path, **environment: str) -> int:
    """Runs the program of `changes_driver.py`, which may die; its exit code."""
    command = [sys.executable, "-m", "tests.spark.changes_driver", str(home)]
    root = Path(__file__).resolve().parents[2]
    return subprocess.run(command, env={**os.environ, **environment}, cwd=root, timeout=300, check=False).returncode


def test_a_driver_that_is_killed_while_a_store_is_filled_goes_on_filling_it(
    changing: Changing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changing.arrive("a", "b").arrive("a", "b")
    with changing.engine(keep={"a": "all", "b": "all"}) as engine:
        engine.query("q", BASE)
        changing.run(engine)
    for _ in range(6):
        changing.arrive("a", "b")
    once = tmp_path / "once-"
    faults = {"PLAIT_FAULT": "task.build@3,commit.3@4", "PLAIT_FAULT_ONCE": str(once)}
    assert driver(tmp_path, **faults) == -signal.SIGKILL
    # A task that dies is done again by Spark; the driver dies after the commit of epoch 4.
    assert {path.name for path in tmp_path.glob("once-*")} == {"once-task.build@3", "once-commit.3@4"}
    with changing.engine(keep={"a": "all", "b": "all"}) as engine:
        cursors = engine.checkpoint.log.live().builds
        assert cursors
        assert all(0 < cursor < KEY_GROUPS for cursor in cursors.values())
    # It does not begin again.
    monkeypatch.setattr("plait.runtime.driver.prepare.BUILD_BYTES_PER_SECOND", changes_driver.SLOW)
    with changing.engine(keep={"a": "all", "b": "all"}) as engine:
        engine.query("q", BASE)
        query = engine.query("other", changes_driver.OTHER)
        assert changing.run(engine) == [5, 6, 7]
        assert query.status == "building"
        assert all(changing.ran[0]["builds"][store] > cursor / KEY_GROUPS for store, cursor in cursors.items())
    monkeypatch.undo()
    changing.arrive("a", "b").arrive("a", "b")
    with changing.engine(keep={"a": "all", "b": "all"}) as engine:
        engine.query("q", BASE)
        query = engine.query("other", changes_driver.OTHER)
        assert changing.run(engine) == [8, 9]
        assert query.status == "live"
        assert query.floors == {"a": 0, "b": 0}
        assert found(query) == changing.answer(changes_driver.OTHER)
