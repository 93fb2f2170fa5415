"""One query's trouble is its own: it is parked, the others go on, and it gets what it missed when it is resumed."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

import plait
from plait.errors import PlaitError
from plait.query.plan import QueryPlan
from plait.runtime.answers import result_reader
from plait.state.log.checkpoint import Checkpoint
from tests.oracle import Bag, bag
from tests.spark import park_driver
from tests.spark.pair import SQL, Pair, told
from tests.spark.test_requests import plait_command
from tests.spark.test_running_changes import JOIN, PACE, Shop, rows_of, wait_until

pytestmark = pytest.mark.spark

COUNT = "SELECT a.k, count(*) AS n FROM a JOIN b ON a.k = b.k GROUP BY a.k"
# Little is left of old epochs: what a parked query is owed must stay nevertheless.
TIDY = {"snapshot_every": 1, "gc_grace_seconds": 0.0}


class Fussy:
    """A sink that fails from an epoch on until it is mended."""

    def __init__(self, first: int = 1) -> None:
        self.first = first
        self.mended = threading.Event()
        self.got: list[tuple[int, Bag]] = []

    def __call__(self, rows: DataFrame, epoch: int) -> None:
        if epoch >= self.first and not self.mended.is_set():
            raise ValueError("the warehouse is closed")
        self.got.append((epoch, bag(rows.toArrow())))

    @property
    def epochs(self) -> list[int]:
        return [epoch for epoch, _ in self.got]

    @property
    def rows(self) -> Bag:
        return sum((rows for _, rows in self.got), Counter())


def test_a_failing_sink_parks_its_query_and_misses_nothing_when_it_is_resumed_after_a_restart(
    spark: SparkSession, tmp_path: Path
) -> None:
    pair, sink, other = Pair(spark, tmp_path, TIDY).arrive(3), Fussy(), Fussy(99)
    queries = {"q": SQL, "other": SQL, "kept": SQL}

    def run(expect: str, epochs: int, resume: bool = False, skip: bool = False) -> None:
        pair.arrive(epochs)
        with pair.engine(queries) as engine:
            q = plait.QueryHandle(engine, "q").foreach_batch(sink)
            plait.QueryHandle(engine, "other").foreach_batch(other)
            if resume:
                engine.resume("q", skip)
            run = engine.start(available_now=True)
            run.await_termination()
            assert q.status == expect
            assert {h.name: h.status for h in engine.queries()} == {"q": expect, "other": "live", "kept": "live"}
            if expect == "parked":
                assert q.error is not None
                assert "'q' failed in epoch 1: ValueError: the warehouse is closed" in q.error.cause
                assert run.last_progress is not None
                told_of = run.last_progress["catalog"]["queries"]["q"]
                assert (told_of["status"], told_of["missed_since"]) == ("parked", 1)
            assert bag(plait.QueryHandle(engine, "kept").results().toArrow()) == pair.expected()

    run("parked", 0)
    run("parked", 1)
    assert (sink.epochs, other.epochs) == ([0], [0, 1, 2, 3])
    # Resumed in vain it stays where it was.
    run("parked", 1, resume=True)
    assert sink.epochs == [0]
    listed = plait_command("ls", str(pair.checkpoint))[1]["queries"]
    assert [(q["name"], q["missed_since"]) for q in listed if q["status"] == "parked"] == [("q", 1)]
    assert "the warehouse is closed" in plait_command("show", str(pair.checkpoint), "q")[1]["error"]
    sink.mended.set()
    run("live", 1, resume=True)
    assert sink.epochs == list(range(6))
    assert sink.got == other.got
    # Nothing is kept any longer than it is owed.
    run("live", 1)
    assert sink.epochs == list(range(7))
    assert sink.rows == pair.expected()
    assert not list((pair.checkpoint / "parked").iterdir())
    in_force = Checkpoint(str(pair.checkpoint), plait.Config()).log.results()
    assert not [file for files in in_force.values() for file in files if file.held is not None]


def test_a_running_engine_resumes_at_once_also_when_another_process_asks(spark: SparkSession, tmp_path: Path) -> None:
    shop, sink, path = Shop(spark, tmp_path), Fussy(0), str(tmp_path / "checkpoint")
    with shop.engine() as engine:
        good = engine.query("good", JOIN)
        bad = engine.query("bad", JOIN).foreach_batch(sink)
        run = engine.start(every=PACE)
        shop.arrived(run)
        shop.add(1)
        shop.arrived(run)
        assert bad.status == "parked"
        with pytest.raises(PlaitError) as caught:
            bad.resume()
        told(caught.value, "SINK_FAILED")
        with pytest.raises(PlaitError):
            bad.await_live(10)
        code, _, said = plait_command("resume", path, "bad")
        assert (code, "SINK_FAILED" in said) == (2, True)
        sink.mended.set()
        # No epoch is waited for: the sources are idle.
        code, answer, said = plait_command("resume", path, "bad")
        assert (code, answer and answer["status"]) == (0, "live"), said
        assert sink.epochs == list(range(len(sink.epochs)))
        assert sink.rows == shop.joined() == rows_of(good)
        assert plait_command("resume", path, "good")[0] == 0
        assert plait_command("resume", path, "nobody")[0] == 2
        shop.add(2)
        shop.arrived(run)
        wait_until(lambda: sink.rows == shop.joined(), run)
        run.stop()
    assert plait_command("resume", path, "bad")[0] == 3


def test_what_a_query_missed_is_kept_up_to_a_limit_and_never_given_in_part(spark: SparkSession, tmp_path: Path) -> None:
    pair, sink = Pair(spark, tmp_path, {**TIDY, "parked_epochs": 2}).arrive(6), Fussy()
    with pair.engine({"q": SQL, "other": SQL}) as engine:
        q = plait.QueryHandle(engine, "q").foreach_batch(sink)
        engine.start(available_now=True).await_termination()
        assert q.status == "failed"
        sink.mended.set()
        with pytest.raises(PlaitError) as caught:
            q.resume()
        told(caught.value, "MISSED_GONE")
        q.resume(skip=True)
        pair.arrive(2)
        engine.start(available_now=True).await_termination()
        assert q.status == "live"
    assert sink.epochs == [0, 6, 7]


def test_whoever_wants_one_error_to_end_the_run_can_say_so_and_the_only_query_always_does(
    spark: SparkSession, tmp_path: Path
) -> None:
    pair = Pair(spark, tmp_path).arrive(2)
    for queries, policy, ends in (({"q": SQL}, "auto", True), ({"q": SQL, "r": SQL}, "stop", True)):
        pair.checkpoint = tmp_path / f"checkpoint-{policy}-{len(queries)}"
        with pair.engine(queries, on_query_error=policy) as engine:
            q = plait.QueryHandle(engine, "q").foreach_batch(Fussy())
            run = engine.start(available_now=True)
            with pytest.raises(PlaitError) as caught:
                run.await_termination()
            told(caught.value, "SINK_FAILED")
            assert ends
            assert q.status == "live"
    pair.checkpoint = tmp_path / "checkpoint-park"
    with pair.engine(on_query_error="park") as engine:
        q = plait.QueryHandle(engine, "q").foreach_batch(Fussy())
        engine.start(available_now=True).await_termination()
        assert q.status == "parked"


@pytest.mark.parametrize("mode", ["complete", "update"])
def test_an_answer_that_was_missed_is_given_once_for_all_epochs(spark: SparkSession, tmp_path: Path, mode: str) -> None:
    pair, last = Pair(spark, tmp_path, TIDY).arrive(4), dict[Any, Any]()
    mended, given = threading.Event(), list[int]()

    def upsert(rows: DataFrame, epoch: int) -> None:
        if epoch and not mended.is_set():
            raise ValueError("the table is locked")
        given.append(epoch)
        last.update({row.k: row.n for row in rows.collect()})

    for expect in ("parked", "live"):
        with pair.engine({"other": SQL}) as engine:
            n = engine.query("n", COUNT, output_mode=mode).foreach_batch(upsert)
            if expect == "live":
                mended.set()
                pair.arrive()
                n.resume()
            engine.start(available_now=True).await_termination()
            assert n.status == expect
            assert bag(plait.QueryHandle(engine, "other").results().toArrow()) == pair.expected()
            want = {row.k: row.n for row in n.results().collect()}
    assert given == [0, 3, 4]
    assert last == want


def test_an_expression_that_fails_parks_its_query_with_its_rows(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, sink, finish = Pair(spark, tmp_path, TIDY).arrive(2), Fussy(99), result_reader.finish
    ruled = tmp_path / "rule"
    ruled.touch()

    def ruled_finish(rows: DataFrame, query: QueryPlan) -> DataFrame:
        if not ruled.exists():
            raise ValueError("there is no rule")
        return finish(rows, query)

    monkeypatch.setattr(result_reader, "finish", ruled_finish)
    # Only Spark can evaluate it, row pair by row pair.
    text = "SELECT a.v, b.w, hash(a.v, b.w) - hash(a.v, b.w) AS d FROM a JOIN b ON a.k = b.k"
    queries = {"kept": text, "sent": text, "other": SQL}

    def run(resume: bool) -> dict[str, str]:
        with pair.engine(queries) as engine:
            plait.QueryHandle(engine, "sent").foreach_batch(sink)
            for name in ("kept", "sent") if resume else ():
                engine.resume(name)
            engine.start(available_now=True).await_termination()
            found = {q.name: q.status for q in engine.queries()}
            want = Counter({(*row, 0): n for row, n in pair.expected().items()})
            assert bag(plait.QueryHandle(engine, "other").results().toArrow()) == pair.expected()
            if found["kept"] == "live":
                assert bag(plait.QueryHandle(engine, "kept").results().toArrow()) == want == sink.rows
            else:
                with pytest.raises(PlaitError, match="there is no rule"):
                    plait.QueryHandle(engine, "kept").results()
            return found

    assert run(resume=False) == {"kept": "live", "sent": "live", "other": "live"}
    ruled.unlink()
    pair.arrive(2)
    assert run(resume=False) == {"kept": "parked", "sent": "parked", "other": "live"}
    pair.arrive(1)
    assert run(resume=True) == {"kept": "parked", "sent": "parked", "other": "live"}
    ruled.touch()
    pair.arrive(1)
    assert run(resume=True) == {"kept": "live", "sent": "live", "other": "live"}
    assert sink.epochs == list(range(6))


def test_killed_while_parked_and_while_it_catches_up_a_sink_misses_nothing(spark: SparkSession, tmp_path: Path) -> None:
    pair = Pair(spark, tmp_path, TIDY).arrive(4)
    driver = [sys.executable, str(Path(park_driver.__file__)), str(tmp_path)]
    for fault, more in (("parked@1", []), ("missed@2", ["resume"])):
        environment = {**os.environ, "PLAIT_FAULT": fault, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run([*driver, *more], env=environment, capture_output=True, timeout=120, check=False)
        assert done.returncode == -signal.SIGKILL, done.stderr.decode()[-2000:]
        if not more:
            # The rest of the epochs is missed, too.
            assert park_driver.run(pair, tmp_path, resume=False) == "parked"
    assert park_driver.run(pair, tmp_path, resume=True) == "live"
    taken = [line.partition(" ") for line in (tmp_path / "taken").read_text().splitlines()]
    # The one that was killed between sink and receipt comes again, the same.
    assert [int(number) for number, _, _ in taken] == [0, 1, 2, 2, 3]
    assert taken[2] == taken[3]
    rows = Counter(row for number, _, text in dict.fromkeys(taken) for row in ast.literal_eval(text))
    assert rows == pair.expected()


def test_an_output_that_tasks_cannot_compute_and_a_limit_are_the_trouble_of_one_query(
    spark: SparkSession, tmp_path: Path
) -> None:
    pair, sent = Pair(spark, tmp_path, TIDY).arrive(3), Fussy(99)
    # Every epoch has twenty rows of each stream: w = -30 is in the second.
    fails = "SELECT a.v, b.w, a.v div (b.w + 30) AS d FROM a JOIN b ON a.k = b.k"
    whole = "SELECT a.v div (b.w + 30) AS d, count(*) AS n FROM a JOIN b ON a.k = b.k GROUP BY a.v div (b.w + 30)"
    with pair.engine({"other": SQL, "fails": fails}) as engine:
        engine.query("whole", whole).foreach_batch(Fussy(99))
        engine.query("many", SQL, max_rows_per_epoch=60).foreach_batch(sent)
        engine.query("stored", SQL, max_rows_per_epoch=60).sink("memory")
        engine.start(available_now=True).await_termination()
        found = {q.name: (q.status, q.error and q.error.code) for q in engine.queries()}
        assert found["other"] == ("live", None)
        assert found["fails"] == ("failed", "DIVIDE_BY_ZERO")
        assert found["many"] == ("parked", "TOO_MANY_ROWS")
        assert found["whole"][0] == "parked"
        assert found["stored"] == ("parked", "TOO_MANY_ROWS")
        with pytest.raises(PlaitError, match="TOO_MANY_ROWS"):
            plait.QueryHandle(engine, "stored").results()
        assert bag(plait.QueryHandle(engine, "other").results().toArrow()) == pair.expected()
        with pytest.raises(PlaitError, match="DIVIDE_BY_ZERO"):
            plait.QueryHandle(engine, "fails").results()
        with pytest.raises(PlaitError, match="MISSED_GONE"):
            engine.resume("fails")
        engine.drop("whole")
        engine.resume("fails", skip=True)
        plait.QueryHandle(engine, "many").limit(max_rows_per_epoch=10_000).resume()
        plait.QueryHandle(engine, "stored").limit().resume()
        pair.arrive(1)
        engine.start(available_now=True).await_termination()
        lives = dict.fromkeys(("other", "many", "stored"), "live")
        assert {q.name: q.status for q in engine.queries()} == {**lives, "fails": "failed"}
        assert sent.epochs == list(range(4))
        assert sent.rows == pair.expected() == bag(spark.table("stored").toArrow())
        for name in ("other", "stored"):
            assert bag(plait.QueryHandle(engine, name).results().toArrow()) == pair.expected()
