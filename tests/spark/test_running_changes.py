"""Queries that come, change and go while the engine runs: nobody else loses or repeats a row."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import plait
from plait.errors import PlaitError, QueryError, StreamError
from plait.testing import ScriptedStream

JOIN = "SELECT a.v AS av, b.v AS bv FROM a JOIN b ON a.k = b.k"
PACE = "100 milliseconds"


class Shop:
    """Two streams and an engine over them, on one checkpoint."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self.spark = spark
        self.folder = folder
        self.streams = {n: ScriptedStream(spark, folder / n, "k bigint, v bigint") for n in "ab"}
        self.rows: dict[str, list[tuple[int, int]]] = {n: [] for n in "ab"}
        self.add(0)

    def engine(self, keep: str = "used") -> plait.Engine:
        config = plait.Config(sync=False)
        engine = plait.Engine(self.spark, str(self.folder / "checkpoint"), config)
        for name, stream in self.streams.items():
            engine.stream(name, stream.frame(), keep=keep)
        return engine

    def add(self, number: int, rows: int = 6) -> None:
        """The number-th rows of both streams: the same keys again."""
        for name, stream in self.streams.items():
            new = [(i % 3, 100 * number + i) for i in range(rows)]
            self.rows[name] += new
            stream.add(new)

    def joined(self, keep: Callable[[int, int], bool] = lambda a, b: True) -> Counter[Any]:
        """The join of all rows, or of those pairs of values that are to be kept."""
        pairs = [(av, bv) for ak, av in self.rows["a"] for bk, bv in self.rows["b"] if ak == bk]
        return Counter(pair for pair in pairs if keep(*pair))

    def arrived(self, run: plait.Run) -> None:
        """Waits until all rows so far are committed."""
        want = sum(len(rows) for rows in self.rows.values())
        wait_until(lambda: sum(sum(p["rows_in"].values()) for p in run.recent_progress) >= want, run)


def wait_until(holds: Callable[[], bool], run: plait.Run) -> None:
    until = time.monotonic() + 60
    while not holds():
        assert run.exception is None, run.exception
        assert time.monotonic() < until
        time.sleep(0.02)


def rows_of(handle: plait.QueryHandle) -> Counter[Any]:
    return Counter(tuple(row) for row in handle.results().collect())


def test_queries_are_added_replaced_and_dropped_while_others_go_on(spark: SparkSession, tmp_path: Path) -> None:
    shop = Shop(spark, tmp_path)
    with shop.engine() as engine:
        first = engine.query("first", JOIN)
        run = engine.start(every=PACE)
        shop.arrived(run)
        now = engine.query("now", f"{JOIN} WHERE a.v > 2")
        state = engine.query("state", JOIN, since="state")
        assert now.await_live(60)
        assert state.await_live(60)
        assert now.live_since is not None
        shop.add(1)
        shop.arrived(run)
        # Results with at least one row that came after it was there; older ones are partners.
        assert rows_of(now) == shop.joined(lambda a, b: a > 2 and (a >= 100 or b >= 100))
        assert rows_of(state) == shop.joined()
        assert rows_of(first) == shop.joined()
        engine.drop("state")
        newer = engine.replace("now", f"{JOIN} WHERE b.v % 2 = 1", since="new")
        assert newer.await_live(60)
        assert state.status == "dropped"
        shop.add(2)
        shop.arrived(run)
        assert rows_of(newer) == shop.joined(lambda a, b: b % 2 == 1 and a >= 200 and b >= 200)
        assert rows_of(first) == shop.joined()
        assert {q.name for q in engine.queries()} == {"first", "now"}
        run.stop()
        assert run.exception is None
        numbers = [p["epoch"] for p in run.recent_progress]
        assert numbers == list(range(len(numbers)))
    # What was admitted while running is there at the next start.
    with shop.engine() as engine:
        first, now = engine.query("first", JOIN), engine.query("now", f"{JOIN} WHERE b.v % 2 = 1", since="new")
        shop.add(3)
        engine.start(available_now=True).await_termination()
        assert rows_of(first) == shop.joined()
        assert rows_of(now) == shop.joined(lambda a, b: b % 2 == 1 and a >= 200 and b >= 200)


def test_a_query_and_its_sink_are_admitted_together(spark: SparkSession, tmp_path: Path) -> None:
    shop = Shop(spark, tmp_path)
    with shop.engine() as engine:
        engine.query("first", JOIN).sink("noop")
        run = engine.start(every=PACE)
        shop.arrived(run)
        with engine.changes():
            out = engine.query("out", JOIN, since="new").sink("parquet", path=str(tmp_path / "out"))
            assert out.status == "pending"
        assert out.await_live(60)
        shop.add(1)
        shop.arrived(run)
        run.stop()
        assert rows_of(out) == shop.joined(lambda a, b: a >= 100 and b >= 100)
    assert Counter(tuple(r) for r in spark.read.parquet(str(tmp_path / "out")).collect()) == shop.joined(
        lambda a, b: a >= 100 and b >= 100
    )


def test_what_is_wrong_is_told_to_its_sender_and_the_run_goes_on(spark: SparkSession, tmp_path: Path) -> None:
    shop = Shop(spark, tmp_path)
    with shop.engine() as engine:
        first = engine.query("first", JOIN)
        run = engine.start(every=PACE)
        shop.arrived(run)
        for sql, code in (("SELECT nonsense", "UNKNOWN_COLUMN"), ("DROP TABLE a", ""), ("SELECT * FROM nowhere", "")):
            with pytest.raises(PlaitError) as told:
                engine.query("late", sql)
            assert code in str(told.value)
        with pytest.raises(QueryError, match="DUPLICATE_QUERY"):
            engine.query("FIRST", JOIN)
        with pytest.raises(StreamError, match="DUPLICATE_STREAM"):
            engine.stream("A", shop.streams["a"].frame())
        with pytest.raises(StreamError, match="RUNNING"):
            engine.drop("a")
        engine.drop("was_never_there")
        shop.add(1)
        shop.arrived(run)
        assert rows_of(first) == shop.joined()
        assert [q.name for q in engine.queries()] == ["first"]
        run.stop()
        with pytest.raises(QueryError, match="NOT_RUNNING"):
            engine.query("after", JOIN).await_live(1)


def test_what_spark_selects_already_is_changed_without_stopping_it(spark: SparkSession, tmp_path: Path) -> None:
    shop = Shop(spark, tmp_path)
    with shop.engine() as engine:
        first = engine.query("first", JOIN)
        run = engine.start(every=PACE)
        shop.arrived(run)
        streaming = run._now.query
        ways = []
        for number in range(2):
            late = engine.query(f"late{number}", f"{JOIN} WHERE a.v > {number}", since="new")
            assert late.await_live(60)
            shop.add(number + 1)
            shop.arrived(run)
            assert rows_of(late) == shop.joined(lambda a, b, n=100 * number + 100: a >= n and b >= n)
            ways.append(run.last_progress["changes"]["last"])
        engine.drop("late1")
        assert engine.replace("late0", f"{JOIN} WHERE b.v > 1", since="new").await_live(60)
        wait_until(lambda: "late1" not in engine._in_force.queries, run)
        assert ways == ["in_place"] * 2
        assert run._now.query is streaming
        # What only Spark can evaluate, and what it does not select, needs another streaming query.
        only_spark = engine.query("spark", f"{JOIN} WHERE CAST(a.v AS STRING) RLIKE '3'", since="new")
        assert only_spark.await_live(60)
        wait_until(lambda: run._now.driver.feedback.changes.restarts == 1, run)
        assert run._now.query is not streaming
        shop.add(4)
        shop.arrived(run)
        assert rows_of(first) == shop.joined()
        assert rows_of(only_spark) == shop.joined(lambda a, b: a >= 400 and b >= 400 and "3" in str(a))
        run.stop()


def test_an_engine_without_queries_runs_and_an_idle_one_admits_builds_and_looks_back(
    spark: SparkSession, tmp_path: Path
) -> None:
    shop = Shop(spark, tmp_path)
    delivered: list[int] = []
    with shop.engine(keep="all") as engine:
        run = engine.start(every=PACE)
        shop.arrived(run)
        # Nothing arrives from here on.
        first = engine.query("first", JOIN, since="state").foreach_batch(lambda rows, _: delivered.append(rows.count()))
        assert first.await_live(60), "its stores are built from what is kept"
        wait_until(lambda: sum(delivered) == shop.joined().total(), run)
        now = engine.query("now", JOIN)
        assert now.await_live(60)
        kept = engine.query("kept", f"{JOIN} WHERE a.v > 2", since="state")
        wait_until(lambda: rows_of(kept) == shop.joined(lambda a, b: a > 2), run)
        shop.add(1)
        shop.arrived(run)
        assert rows_of(kept) == shop.joined(lambda a, b: a > 2)
        assert rows_of(now) == shop.joined(lambda a, b: a >= 100 or b >= 100)
        assert sum(delivered) == shop.joined().total()
        reports = run.recent_progress
        assert [p["epoch"] for p in reports] == list(range(len(reports)))
        batches = [p["batch"] for p in reports if p["batch"] is not None]
        assert batches == list(range(len(batches)))
        assert len(batches) < len(reports)
        for query in ("first", "now", "kept"):
            engine.drop(query)
        wait_until(lambda: not engine._in_force.queries, run)
        shop.add(2)
        shop.arrived(run)
        run.stop()
        assert run.exception is None
    # Spark's batches and epochs have other numbers by now.
    with shop.engine(keep="all") as engine:
        again = engine.query("again", JOIN, since="state")
        shop.add(3)
        run = engine.start(every=PACE)
        wait_until(lambda: rows_of(again) == shop.joined(), run)
        run.stop()


def test_streams_and_tables_are_registered_while_the_engine_runs(spark: SparkSession, tmp_path: Path) -> None:
    shop = Shop(spark, tmp_path)
    with shop.engine() as engine:
        first = engine.query("first", JOIN)
        run = engine.start(every=PACE)
        shop.arrived(run)
        more = ScriptedStream(spark, tmp_path / "c", "k bigint, w bigint")
        with engine.changes():
            engine.stream("c", more.frame())
            engine.table("names", spark.createDataFrame([(i, f"n{i}") for i in range(3)], "k bigint, name string"))
            with_c = engine.query("with_c", "SELECT a.v, c.w FROM a JOIN c ON a.k = c.k", since="new")
            named = engine.query("named", "SELECT c.w, n.name FROM c JOIN names n ON c.k = n.k", since="new")
        assert with_c.await_live(60)
        assert named.await_live(60)
        shop.add(1)
        more.add([(0, 7), (1, 8)])
        shop.arrived(run)
        wait_until(lambda: rows_of(named) == Counter({(7, "n0"): 1, (8, "n1"): 1}), run)
        wanted = Counter((v, w) for k, v in shop.rows["a"] for c, w in ((0, 7), (1, 8)) if c == k and v >= 100)
        assert rows_of(with_c) == wanted
        assert rows_of(first) == shop.joined()
        run.stop()
        assert run.exception is None


def test_a_run_is_active_also_while_its_streaming_query_is_replaced(spark: SparkSession, tmp_path: Path) -> None:
    shop = Shop(spark, tmp_path)
    with shop.engine() as engine:
        engine.query("first", JOIN)
        run = engine.start(every=PACE)
        shop.arrived(run)
        seen: set[bool] = set()
        done = threading.Event()

        def watch() -> None:
            while not done.is_set():
                seen.add(run.is_active)

        watchers = [threading.Thread(target=watch) for _ in range(3)]
        for watcher in watchers:
            watcher.start()
        try:
            for number in range(3):
                more = ScriptedStream(spark, tmp_path / f"more{number}", "k bigint, w bigint")
                engine.stream(f"more{number}", more.frame())
                sql = f"SELECT a.v, m.w FROM a JOIN more{number} m ON a.k = m.k"
                assert engine.query(f"q{number}", sql, since="new").await_live(60)
        finally:
            done.set()
            for watcher in watchers:
                watcher.join()
        assert seen == {True}
        run.stop()
        assert not run.is_active


def test_many_threads_add_and_drop_at_once(spark: SparkSession, tmp_path: Path) -> None:
    shop = Shop(spark, tmp_path)
    failed: list[BaseException] = []
    with shop.engine() as engine:
        first = engine.query("first", JOIN)
        run = engine.start(every=PACE)

        def user(number: int) -> None:
            try:
                engine.query(f"q{number}", f"{JOIN} WHERE a.v > {number}", since="state").await_live(60)
                if number % 2:
                    engine.drop(f"q{number}")
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=user, args=(n,)) for n in range(6)]
        for thread in threads:
            thread.start()
        shop.add(1)
        for thread in threads:
            thread.join()
        assert not failed
        shop.add(2)
        shop.arrived(run)
        wait_until(lambda: {q.name for q in engine.queries() if q.status == "live"} == {"first", "q0", "q2", "q4"}, run)
        run.stop()
        assert rows_of(first) == shop.joined()
        for number in (0, 2, 4):
            handle = next(q for q in engine.queries() if q.name == f"q{number}")
            assert rows_of(handle) == shop.joined(lambda a, b, n=number: a > n)


def test_a_first_pass_over_state_tells_how_far_it_is_and_is_given_up_when_its_query_is_dropped(
    spark: SparkSession, tmp_path: Path
) -> None:
    shop = Shop(spark, tmp_path)
    # One key, so that the pass has 16 million results, which take far longer than the test.
    many = [(7, i) for i in range(4000)]
    for name, stream in shop.streams.items():
        shop.rows[name] += many
        stream.add(many)
    few = "SELECT a.v AS av, b.v AS bv FROM a JOIN b ON a.k = b.k AND a.v = b.v"
    wide = "SELECT a.v AS av, b.v AS bv, a.v * b.v AS p, a.v + b.v AS s FROM a JOIN b ON a.k = b.k"
    with shop.engine(keep="all") as engine:
        first = engine.query("first", few)
        run = engine.start(every=PACE)
        shop.arrived(run)
        for arrives in (False, True):
            state = engine.query("state", wide, since="state")
            wait_until(lambda made=state: made.first_pass is not None, run)  # type: ignore[misc]
            if arrives:
                shop.add(1)
            assert first.first_pass is None
            begun = time.monotonic()
            engine.drop("state")
            wait_until(lambda: "state" not in engine._in_force.queries, run)
            assert time.monotonic() - begun < 20
        shop.arrived(run)
        run.stop()
        want = Counter((a, b) for ak, a in shop.rows["a"] for bk, b in shop.rows["b"] if (ak, a) == (bk, b))
        assert rows_of(first) == want
        numbers = [p["epoch"] for p in run.recent_progress]
        assert numbers == list(range(len(numbers)))
        assert not any("state" in p["rows_out"] for p in run.recent_progress)
        assert not list((tmp_path / "checkpoint" / "passes").glob("*.json"))
