"""Rows that end with time: `ttl=`, the hint STATE_TTL and `needed`, against a batch join that knows when rows arrived.

The clock is scripted, and goes back now and then: TTLs are measured by the latest time it has shown.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession

import plait
from plait.errors import QueryError, StreamError
from plait.runtime.driver.driver import Services
from plait.testing import Clock, ScriptedStream, run_epochs
from tests.oracle import Bag, Oracle, bag
from tests.spark.pair import told

pytestmark = pytest.mark.spark

SCHEMA = "id int, k int, state string"
SECONDS = [0, 4, 9, 3, 11, 16, 5, 17, 40, 41]
"""What the clock shows in each epoch."""
TTL_A, TTL_B = 10, 6
NEEDED = "state = 'open' AND id % 3 <> 0"
JOIN = "FROM a JOIN b ON a.k = b.k"

# name: (SQL, the aliases of a, of b, all aliases)
QUERIES = {
    "pair": (f"SELECT /*+ STATE_TTL('b', '6s') */ a.id AS x, b.id AS y {JOIN}", "a", "b", "ab"),
    "three": (
        "SELECT /*+ STATE_TTL('y', '6 seconds') */ x.id AS x, y.id AS y, z.id AS z "
        "FROM a x JOIN b y ON x.k = y.k JOIN c z ON z.id = y.id",
        "x", "y", "xyz",
    ),
    "twice": (
        "SELECT /*+ STATE_TTL('b', '0.1min') */ p.id AS x, q.id AS y FROM b p JOIN b q ON p.k = q.k AND p.id < q.id",
        "", "pq", "pq",
    ),
    "filtered": (
        f"SELECT /*+ STATE_TTL(b, '6s') */ a.id AS x, b.id AS y {JOIN} WHERE a.state IS NOT NULL AND b.id > 5",
        "a", "b", "ab",
    ),
}  # fmt: skip


def expected_sql(name: str) -> str:
    """The query over tables with a column `at`, with what expiry means spelt out."""
    sql, of_a, of_b, every = QUERIES[name]
    newest = f"greatest({', '.join(f'{alias}.at' for alias in every)})"
    still = [f"({a}.at + {TTL_A} > {newest} OR ({a}.state = 'open' AND {a}.id % 3 <> 0))" for a in of_a]
    still += [f"{b}.at + {TTL_B} > {newest}" for b in of_b]
    plain = sql[: sql.index("/*")] + sql[sql.index("*/") + 2 :]
    return f"{plain} {'AND' if 'WHERE' in plain or name == 'twice' else 'WHERE'} {' AND '.join(still)}"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("plait.launching.SteadyClock", lambda _: clock)
    return clock


def arrivals(name: str, epoch: int) -> list[tuple[int | None, ...]]:
    choose = random.Random(f"{name} {epoch}")
    many = 0 if choose.random() < 0.15 else 5
    return [(10 * epoch + i, choose.randrange(3), choose.choice(("open", "done", None))) for i in range(many)]  # type: ignore[misc]


def test_oracle_rows_are_matched_until_they_expire_and_needed_ones_for_ever(
    spark: SparkSession, tmp_path: Path, clock: Clock
) -> None:
    streams = {name: ScriptedStream(spark, tmp_path / name, SCHEMA) for name in "abc"}
    begin = clock.now_us
    added: dict[str, dict[int, Bag]] = {name: {} for name in QUERIES}

    def taking(query: str) -> Callable[[DataFrame, int], None]:
        def take(rows: DataFrame, epoch: int) -> None:
            added[query][epoch] = bag(rows.collect())
            # The sinks are the end of an epoch: the next one finds another time.
            clock.now_us = begin + SECONDS[min(epoch + 1, len(SECONDS) - 1)] * 1_000_000

        return take

    # A restart in the middle, where the clock has just gone back.
    for epochs, config in ((range(6), {"tasks": 2}), (range(6, len(SECONDS)), {"tasks": 3, "probe": "iterative"})):
        for epoch in epochs:
            for name, stream in streams.items():
                stream.add(arrivals(name, epoch))
        with plait.Engine(spark, str(tmp_path / "checkpoint"), plait.Config(fan_in=2, **config)) as engine:
            engine.stream("a", streams["a"].frame(), ttl=f"{TTL_A} seconds", needed=NEEDED)
            engine.stream("b", streams["b"].frame())
            engine.stream("c", streams["c"].frame())
            for name, (sql, *_) in QUERIES.items():
                engine.query(name, sql).foreach_batch(taking(name))
            assert len(run_epochs(engine)) == len(epochs)

    latest = list(accumulate(SECONDS, max))
    totals: dict[str, Bag] = {name: Counter() for name in QUERIES}
    with Oracle() as oracle:
        for epoch in range(len(SECONDS)):
            oracle.load({name: stamped(stream, latest[: epoch + 1]) for name, stream in streams.items()})
            for name in QUERIES:
                totals[name] += added[name][epoch]
                assert totals[name] == oracle.bag(expected_sql(name)), f"{name} after epoch {epoch}"
        # Expiry decides something in each of them.
        for name, (sql, *_) in QUERIES.items():
            unbounded = oracle.bag(sql[: sql.index("/*")] + sql[sql.index("*/") + 2 :])
            assert Counter() < totals[name] < unbounded, name


def stamped(stream: ScriptedStream, times: list[int]) -> pa.Table:
    """The rows of the first epochs, each with the time at which it arrived."""
    tables = []
    for path, seconds in zip(stream.files, times, strict=False):
        table = pq.read_table(path, schema=stream.arrow)
        tables.append(table.append_column("at", pa.array(np.full(table.num_rows, seconds))))
    return pa.concat_tables(tables)


def test_a_needed_row_stays_in_state_when_all_others_have_gone(
    spark: SparkSession, tmp_path: Path, clock: Clock
) -> None:
    streams = {name: ScriptedStream(spark, tmp_path / name, SCHEMA) for name in "ab"}
    home = str(tmp_path / "checkpoint")
    with plait.Engine(spark, home, plait.Config(tasks=1, fan_in=2)) as engine:
        engine.stream("a", streams["a"].frame(), ttl="10 seconds", needed="state = 'open'")
        engine.stream("b", streams["b"].frame(), ttl="10 seconds")
        q = engine.query("q", f"SELECT a.id AS x, b.id AS y {JOIN}")
        streams["a"].add([(1, 1, "open"), (2, 1, "done"), (3, 1, None)])
        streams["b"].add([(4, 1, "open")])
        run_epochs(engine)
        clock.advance(100)
        for number in (5, 6):
            streams["a"].add([])
            streams["b"].add([(number, 1, None)])
        streams["a"].add([(7, 2, None)])
        streams["a"].add([])
        run_epochs(engine)
        assert bag(q.results().collect()) == bag([(1, 4), (2, 4), (3, 4), (1, 5), (1, 6)])
    # The condition's column is not stored, since no query reads it: what it said is.
    kept = plait.read_state(spark, home, "a")
    assert kept.columns == ["id"]
    assert sorted(row.id for row in kept.collect()) == [1, 7]


def test_hints_and_ttl_that_contradict_each_other_are_refused_and_leave_the_engine_as_it_was(
    spark: SparkSession, tmp_path: Path
) -> None:
    rate = spark.readStream.format("rate").load()
    on = "a.value FROM a JOIN b ON a.value = b.value"
    with plait.Engine(spark, str(tmp_path)) as engine:
        engine.stream("a", rate, ttl="1 day")
        engine.stream("b", rate)

        def refused(sql: str, code: str) -> str:
            with pytest.raises(QueryError) as caught:
                engine.query("r", sql)
            return told(caught.value, code).cause

        assert "86400 s by its ttl= and 3600 s" in refused(f"SELECT /*+ STATE_TTL('a', '1h') */ {on}", "TTL_CONFLICT")
        engine.query("q", f"SELECT /*+ STATE_TTL('a', '24h', 'b', '1h') */ {on}")
        assert "none for alias b of query 'r'" in refused(f"SELECT {on}", "TTL_CONFLICT")
        assert "7200 s for alias b of query 'r'" in refused(f"SELECT /*+ STATE_TTL('b', '2h') */ {on}", "TTL_CONFLICT")
        assert "c" in refused(f"SELECT /*+ STATE_TTL('c', '2h') */ {on}", "TTL_HINT")
        engine.query("r", f"SELECT /*+ STATE_TTL('b', '60min') */ {on}")
        assert {s.relation: s.ttl_us for s in engine.plan.stores} == {"a": 86_400_000_000, "b": 3_600_000_000}
        with pytest.raises(StreamError, match=r"\[NEEDED\]"):
            engine.stream("c", rate, needed="value > 3")


def test_a_row_lives_as_long_as_the_ttl_and_what_is_needed_said_when_it_arrived(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(Services, "clock", property(lambda _: clock, lambda *_: None), raising=False)
    streams = {name: ScriptedStream(spark, tmp_path / name, SCHEMA) for name in "ab"}

    def start(a: list[tuple[int, int, str]], b: list[tuple[int, int, str]], ttl: str | None, needed: str | None) -> Bag:
        streams["a"].add(a)
        streams["b"].add(b)
        with plait.Engine(spark, str(tmp_path / "checkpoint"), plait.Config(tasks=1)) as engine:
            engine.stream("a", streams["a"].frame(), ttl=ttl, needed=needed)
            engine.stream("b", streams["b"].frame())
            query = engine.query("q", f"SELECT a.id AS x, b.id AS y {JOIN}")
            assert len(run_epochs(engine)) == 1
            return bag(query.results().toArrow())

    start([(1, 1, "open"), (2, 1, "shut")], [], "10 seconds", "state = 'open'")
    clock.advance(5)
    start([(3, 1, "open"), (4, 1, "shut")], [], "1 day", "state = 'shut'")
    clock.advance(6)
    # 2 is over: its TTL was ten seconds.  1 was needed when it arrived.
    found = start([(5, 1, "open")], [(7, 1, "")], None, None)
    assert found == bag([(1, 7), (3, 7), (4, 7), (5, 7)])
    clock.advance(2 * 86_400)
    # 3 is over too; 5 came without a TTL.
    assert start([], [(8, 1, "")], "1 second", None) == found + bag([(1, 8), (4, 8), (5, 8)])
