"""Answers of whole queries are DuckDB's after every epoch: aggregates, outer, semi and anti joins, sub-queries, limits.

Queries run in one engine, twice: two epochs, then an engine on the same checkpoint, with merging of partial files,
for two more.  A test compares one query's answers with the oracle's, epoch by epoch.
"""

from __future__ import annotations

import random
import threading
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession

import plait
from plait.errors import RecomputationWarning
from plait.query.group_filter import Narrowing
from plait.query.semi_join import Partners
from plait.runtime.answers import answer as answers
from plait.sql.answer.residual import Source
from plait.testing import ScriptedStream, run_epochs
from tests.oracle import Oracle, plain
from tests.spark.pair import SQL, Pair, told

pytestmark = pytest.mark.spark

EPOCHS = 4
SCHEMAS = {
    "s": "id bigint, k int, g string, v int, d decimal(10,2), x double",
    "t": "id bigint, k int, w int, n string",
}
LABELS = [(0, "even"), (1, "odd"), (2, "even"), (3, "odd"), (7, "none"), (None, "null")]
JOIN = "FROM s JOIN t ON s.k = t.k"
COMPLETE = {
    "groups": f"""SELECT s.g, count(*) AS n, count(s.v) AS nv, sum(s.v) AS sv, avg(s.v) AS av, min(s.v) AS least,
        max(t.n) AS most, sum(s.d) AS sd, avg(s.d) AS ad, min(s.d) AS ld, sum(s.x) AS sx, avg(s.x) AS ax
        {JOIN} GROUP BY s.g""",
    "grouped_by_tasks": f"""SELECT s.g, t.w, sum(s.d * (1 - s.d)) AS r, avg(s.v) AS av, avg(s.x) AS ax, min(s.d) AS ld,
        sum(CASE WHEN t.n = 'q' THEN s.d * t.w WHEN s.v IS NULL THEN 1 ELSE 0 END) AS cased, max(s.v) AS most,
        sum(if(s.v > 2, s.d, NULL)) AS big, count(s.d) AS nd, count(*) AS n, sum(s.v * t.w) AS product
        {JOIN} GROUP BY s.g, t.w""",
    "keys_computed_by_sources": f"""SELECT s.v % 3 AS r, upper(s.g) AS big, min(t.w) AS least, count(*) AS n,
        sum((s.v + t.w) % 4) AS rest {JOIN} GROUP BY s.v % 3, upper(s.g)""",
    "one_stream": "SELECT g, count(*) AS n, avg(d) AS a FROM s WHERE v > 0 GROUP BY g",
    "nothing": "SELECT count(*) AS n, count(v) AS nv, sum(v) AS total, max(g) AS most, avg(d) AS a FROM s WHERE v > 99",
    "having": f"SELECT s.g, sum(t.w) AS total {JOIN} GROUP BY s.g HAVING count(*) > 6 AND max(s.v) > 3",
    "distinct": f"SELECT DISTINCT s.g, t.n {JOIN}",
    "left_join": "SELECT s.id, t.id AS other FROM s LEFT JOIN t ON s.k = t.k AND s.v > t.w",
    "semi": f"SELECT s.id, t.id AS other {JOIN} WHERE EXISTS (SELECT 1 FROM s z WHERE z.v = t.w AND z.id <> s.id)",
    "anti": f"SELECT s.id, t.id AS other {JOIN} WHERE NOT EXISTS (SELECT 1 FROM t z WHERE z.w = s.v AND z.id > t.id)",
    "semi_of_groups": f"SELECT s.k, s.g, sum(t.w) AS total {JOIN} WHERE s.k IN (SELECT k FROM t GROUP BY k "
    "HAVING sum(w) > 8) GROUP BY s.k, s.g",
    "anti_of_groups": f"SELECT s.k, t.n, count(*) AS n {JOIN} WHERE NOT EXISTS (SELECT 1 FROM s z WHERE z.v = t.k "
    "AND z.g = t.n) AND s.g IS NOT NULL GROUP BY s.k, t.k, t.n",
    "semi_of_semi": f"SELECT s.k, count(*) AS n, sum(s.d) AS total {JOIN} WHERE s.k IN (SELECT k FROM t WHERE k IN "
    "(SELECT k FROM s WHERE g IS NOT NULL GROUP BY k HAVING count(v) > 3 AND max(x) > 1) GROUP BY k HAVING sum(w) > 5) "
    "GROUP BY s.k HAVING sum(s.d) > 12.50 OR count(*) < 9",
    "anti_of_having": f"SELECT s.k, count(*) AS n {JOIN} WHERE NOT EXISTS (SELECT 1 FROM (SELECT k, sum(w) AS total "
    "FROM t GROUP BY k HAVING sum(w) > 8) z WHERE z.k = s.k) GROUP BY s.k",
    "few_asked": f"SELECT s.id, t.id AS other {JOIN} WHERE s.v > 4 AND EXISTS (SELECT 1 FROM t z WHERE z.k = s.k AND "
    "z.id <> t.id) AND NOT EXISTS (SELECT 1 FROM t z WHERE z.k + 1 = s.v AND z.w > t.w)",
    "not_in": "SELECT id FROM s WHERE v NOT IN (SELECT w FROM t WHERE n = 'p')",
    "scalar": f"SELECT s.id, t.id AS other {JOIN} WHERE s.v > (SELECT avg(w) FROM t)",
    "shared": f"WITH sold AS (SELECT s.g, sum(t.w) AS total {JOIN} GROUP BY s.g) "
    "SELECT g, total FROM sold WHERE total = (SELECT max(total) FROM sold)",
    "labelled": "SELECT d.label, count(*) AS n, sum(s.v) AS total FROM s JOIN d ON s.k = d.k JOIN t ON t.k = s.k "
    "GROUP BY d.label",
}
MORE = {
    "computed": f"SELECT s.v % 2 AS parity, s.g IS NULL AS nameless, sum(s.v * t.w) / count(*) + 1 AS mean {JOIN} "
    "GROUP BY s.v % 2, s.g IS NULL",
    "filtered": f"SELECT t.n, count(*) FILTER (WHERE s.v > 2) AS n_big, sum(s.d) FILTER (WHERE s.v > 2) AS big {JOIN} "
    "GROUP BY t.n",
    "everything": f"SELECT count(*) AS n, sum(s.v * t.w) AS total, min(s.d) AS least {JOIN}",
    "of_groups": "SELECT n, count(*) AS groups FROM (SELECT k, count(*) AS n FROM s GROUP BY k) GROUP BY n",
    "count_distinct": f"SELECT s.g, count(DISTINCT t.n) AS names, sum(DISTINCT s.v) AS total {JOIN} GROUP BY s.g",
    "rollup": f"SELECT s.g, t.n, sum(s.v) AS total {JOIN} GROUP BY ROLLUP (s.g, t.n)",
    "right_join": "SELECT s.id, t.id AS other FROM s RIGHT JOIN t ON s.k = t.k WHERE t.w > 1",
    "full_join": "SELECT s.id, t.id AS other FROM s FULL JOIN t ON s.k = t.k",
    "left_counted": "SELECT t.id, count(s.id) AS n FROM t LEFT JOIN s ON s.k = t.k GROUP BY t.id",
    "correlated": "SELECT s.id FROM s WHERE s.v >= (SELECT avg(z.v) FROM s z WHERE z.g = s.g)",
    "united": f"SELECT s.id, t.w AS v {JOIN} UNION ALL SELECT id, v FROM s WHERE k IS NULL",
    "ranked": f"SELECT s.id, t.id AS other, row_number() OVER (PARTITION BY s.g ORDER BY s.id, t.id) AS n {JOIN}",
    "unlabelled": "SELECT d.label, s.id FROM d LEFT JOIN s ON s.k = d.k",
}
"""Compared in a soak test."""
ORDERED = {
    "top": f"SELECT s.id, s.v, t.id AS other {JOIN} ORDER BY s.v DESC NULLS LAST, s.id, t.id LIMIT 5",
    "top_groups": f"SELECT s.k, sum(s.d) AS total {JOIN} GROUP BY s.k ORDER BY total DESC NULLS LAST, s.k LIMIT 3",
}
UPDATED = {
    "changed": f"SELECT s.g, count(*) AS n, sum(s.d) AS total {JOIN} GROUP BY s.g",
    "changed_big": f"SELECT t.n, count(*) + 0 AS many {JOIN} GROUP BY t.n HAVING count(*) > 5",
    "changed_all": f"SELECT count(*) AS n {JOIN}",
}
APPENDED = {
    "joined": f"SELECT s.id, t.id AS other {JOIN}",
    "picked": "SELECT id, upper(g) AS g FROM s WHERE v > 1 OR k IS NULL",
}


def comparable(value: Any) -> Any:
    """Spark's decimals are DuckDB's doubles where something is divided."""
    return round(float(value), 5) if isinstance(value, float | Decimal) else plain(value)


def rows_of(table: pa.Table) -> list[tuple[Any, ...]]:
    return [tuple(comparable(value) for value in row.values()) for row in table.to_pylist()]


@dataclass
class History:
    """What an engine answered, and from what."""

    streams: dict[str, ScriptedStream]
    delivered: dict[str, dict[int, list[tuple[Any, ...]]]] = field(default_factory=dict)
    results: dict[str, list[tuple[Any, ...]]] = field(default_factory=dict)
    merged: set[int] = field(default_factory=set)
    """Epochs in which partial files were merged."""
    told: set[str] = field(default_factory=set)
    """Queries whose semi and anti joins were told without Spark."""
    narrowed: dict[str, int] = field(default_factory=dict)
    """By source of which few groups matter: how many of them were found to, at last."""

    def expected(self, sql: str, epochs: int) -> list[tuple[Any, ...]]:
        """What DuckDB answers over the first epochs."""
        with Oracle() as oracle:
            oracle.load({name: stream.table(epochs) for name, stream in self.streams.items()})
            oracle.connection.execute("CREATE TABLE d (k INT, label VARCHAR)")
            oracle.connection.executemany("INSERT INTO d VALUES (?, ?)", LABELS)
            return rows_of(oracle.table(sql))


def arrive(streams: dict[str, ScriptedStream], seed: int) -> None:
    """One epoch's rows: few keys, few groups, NULLs everywhere but in ids."""
    rng = random.Random(seed)

    def some(*values: Any) -> Any:
        return rng.choice((*values, None))

    number = 100 * seed
    streams["s"].add(
        [
            (number + i, some(0, 1, 2, 3, 4), some("a", "b", "c"), some(*range(6)),
             some(*(Decimal(n).scaleb(-2) for n in range(0, 900, 77))), some(*(n / 4 for n in range(9))))
            for i in range(12)
        ]
    )  # fmt: skip
    # A NULL among the names p comes late: from then on NOT IN is never true.
    names = ("p", "q") if seed > 2 else ("q",)
    late = [(number + 50, 0, None, "p")] if seed == EPOCHS else []
    streams["t"].add(
        [(number + i, some(0, 1, 2, 3, 5), rng.randrange(4), rng.choice((*names, "r", None))) for i in range(10)] + late
    )


@pytest.fixture(scope="module")
def history(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> History:
    return run_twice(spark, tmp_path_factory.mktemp("answers"), COMPLETE | ORDERED | UPDATED | APPENDED)


@pytest.fixture(scope="module")
def more_history(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> History:
    return run_twice(spark, tmp_path_factory.mktemp("more"), MORE)


def run_twice(spark: SparkSession, home: Path, queries: dict[str, str]) -> History:
    found = History({name: ScriptedStream(spark, home / name, schema) for name, schema in SCHEMAS.items()})
    found.delivered = {name: {} for name in queries if name not in APPENDED}
    config = plait.Config(tasks=2, fan_in=2, snapshot_every=2, gc_grace_seconds=0, sync=False)

    def run(labels: list[tuple[int | None, str]]) -> None:
        with plait.Engine(spark, str(home / "checkpoint"), config) as engine, warnings.catch_warnings():
            warnings.simplefilter("ignore", RecomputationWarning)
            for name, stream in found.streams.items():
                engine.stream(name, stream.frame())
            engine.table("d", spark.createDataFrame(labels, "k int, label string"))
            for name, sql in queries.items():
                query = engine.query(name, sql, "update" if name in UPDATED else None)
                if name not in APPENDED:
                    query.foreach_batch(keeper(name))
            run_epochs(engine)
            if len(found.streams["s"].files) == EPOCHS:
                for name in queries:
                    found.results[name] = rows_of(plait.QueryHandle(engine, name).results().toArrow())
            for epoch in engine.checkpoint.log.epochs():
                manifest = engine.checkpoint.log.read(epoch)
                if manifest is not None and any(file.whole for file in manifest.results):
                    found.merged.add(epoch)

    def keeper(name: str) -> Any:
        def keep(rows: DataFrame, epoch: int) -> None:
            found.delivered[name][epoch] = rows_of(rows.toArrow())

        return keep

    def passing(self: answers.Committed, source: Source, asked: Sequence[Partners]) -> DataFrame | None:
        frame = original(self, source, asked)
        if frame is not None:
            found.told.add(source.name.partition(".")[0])
        return frame

    def groups(self: answers.Committed, source: str, narrowing: Narrowing) -> pa.Table | None:
        table = all_groups(self, source, narrowing)
        if narrowing and table is not None:
            found.narrowed[source] = len(table)
        return table

    original, all_groups = answers.Committed.passing, answers.Committed._groups
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answers.Committed, "passing", passing)
        patch.setattr(answers.Committed, "_groups", groups)
        arrive(found.streams, 1)
        arrive(found.streams, 2)
        run(LABELS)
        arrive(found.streams, 3)
        arrive(found.streams, 4)
        patch.setattr(answers, "MERGE_FILES", 2)
        # Hardly anything is few now.
        patch.setattr(answers, "FEW_BYTES", 100)
        # Other rows than before: a table that is read again would show.
        run([(k, "read twice") for k in range(5)])
    return found


@pytest.mark.parametrize("name", COMPLETE)
def test_oracle_an_answer_is_duckdb_s_after_every_epoch(history: History, name: str) -> None:
    check(history, name, COMPLETE[name])


@pytest.mark.soak
@pytest.mark.parametrize("name", MORE)
def test_oracle_more_answers_are_duckdb_s_after_every_epoch(more_history: History, name: str) -> None:
    check(more_history, name, MORE[name])


def check(history: History, name: str, sql: str) -> None:
    assert sorted(history.delivered[name]) == list(range(EPOCHS))
    for epoch, rows in history.delivered[name].items():
        assert Counter(rows) == Counter(history.expected(sql, epoch + 1)), f"after epoch {epoch}"
    assert Counter(history.results[name]) == Counter(rows)


def test_semi_and_anti_joins_of_few_rows_are_told_without_spark(history: History) -> None:
    assert {"semi", "anti"} <= history.told
    assert not history.told & {"not_in", "left_join"}, "what needs Spark is left to it"


def test_groups_that_cannot_pass_are_not_shown_to_spark(history: History) -> None:
    for name in ("having", "semi_of_groups"):
        assert len(history.results[name]) in {n for s, n in history.narrowed.items() if s.startswith(f"{name}.")}
    assert not any(source.startswith(("groups.", "anti_of_groups.")) for source in history.narrowed)


@pytest.mark.parametrize("name", ORDERED)
def test_oracle_the_best_rows_come_in_their_order_after_every_epoch(history: History, name: str) -> None:
    for epoch, rows in history.delivered[name].items():
        assert rows == history.expected(ORDERED[name], epoch + 1), f"after epoch {epoch}"
    assert history.results[name] == rows


@pytest.mark.parametrize("name", UPDATED)
def test_oracle_update_mode_tells_exactly_the_groups_that_have_changed(history: History, name: str) -> None:
    sql = UPDATED[name]
    before: Counter[tuple[Any, ...]] = Counter()
    for epoch, rows in history.delivered[name].items():
        now = Counter(history.expected(sql, epoch + 1))
        # Every new row of a group changes its count.
        assert Counter(rows) == now - before, f"in epoch {epoch}"
        before = now
    assert Counter(history.results[name]) == before


@pytest.mark.parametrize("name", APPENDED)
def test_oracle_rows_that_are_final_are_appended(history: History, name: str) -> None:
    assert Counter(history.results[name]) == Counter(history.expected(APPENDED[name], EPOCHS))


def test_partial_files_were_merged_after_the_restart_only(history: History) -> None:
    assert history.merged
    assert history.merged <= {2, 3}


def test_the_oracle_had_something_to_compare(history: History) -> None:
    """Guards the random rows: NULL groups are there, NOT IN had rows and lost them, nothing matched `nothing`."""
    assert any(row[0] is None for row in history.results["groups"])
    assert history.delivered["not_in"][0]
    assert not history.delivered["not_in"][EPOCHS - 1]
    assert history.results["nothing"] == [(0, 0, None, None, None)]
    empty = [name for name, rows in history.results.items() if not rows]
    assert empty == ["not_in"]


# ---------------------------------------------------------------- modes, sinks, tables, warnings


def test_modes_and_sinks_without_a_meaning_are_refused(spark: SparkSession, tmp_path: Path) -> None:
    grouped = "SELECT a.k, count(*) AS n FROM a JOIN b ON a.k = b.k GROUP BY a.k"
    with Pair(spark, tmp_path).engine({}) as engine:
        for sql, mode, use in (
            (SQL, "complete", "leave it out, or use append"),
            (SQL, "update", "leave it out, or use append"),
            (
                grouped,
                "append",
                "leave it out, or use update or complete; or group by window(…) of a stream's event time with a "
                "watermark",
            ),
            (f"{grouped} ORDER BY n DESC, a.k LIMIT 3", "update", "leave it out, or use complete"),
            (grouped, "sideways", "use one of: append, update, complete"),
        ):
            with pytest.raises(plait.PlaitError) as caught:
                engine.query("refused", sql, output_mode=mode)
            assert told(caught.value, "OUTPUT_MODE").remedy == use
        handle = engine.query("grouped", grouped)
        with pytest.raises(plait.PlaitError) as caught:
            handle.sink("parquet", path=str(tmp_path / "out"))
        told(caught.value, "SINK")
        assert (handle.output_mode, handle.joins) == ("complete", ("grouped.1",))
        joined = engine.query("joined", SQL)
        assert (joined.output_mode, joined.joins) == ("append", ("joined",))
        assert engine.query("changed", grouped, output_mode="update").output_mode == "update"


def test_a_query_that_keeps_all_rows_says_so_once(spark: SparkSession, tmp_path: Path) -> None:
    with Pair(spark, tmp_path).engine({}) as engine:
        with pytest.warns(RecomputationWarning, match=r"'outer'.*a, b|'outer'.*a; b") as caught:
            engine.query("outer", "SELECT a.v, b.w FROM a LEFT JOIN b ON a.k = b.k")
        assert len(caught) == 1
        # An aggregate that is maintained is no reason to warn: warnings are errors here.
        engine.query("grouped", "SELECT k, sum(v) AS total FROM a GROUP BY k")
        text = engine.explain("outer", stages=True)
        assert "left outer join keeps rows without a partner" in text
        assert "maintained incrementally" in engine.explain("grouped", stages=True)
        assert "rows are grouped by the join's tasks" in engine.explain("grouped", stages=True)
        with pytest.raises(plait.PlaitError) as unknown:
            engine.explain("nobody", stages=True)
        told(unknown.value, "NO_QUERY")


def test_only_what_tasks_evaluate_as_spark_does_is_grouped_by_them(spark: SparkSession, tmp_path: Path) -> None:
    with plait.Engine(spark, str(tmp_path / "checkpoint")) as engine:
        for name, schema in SCHEMAS.items():
            engine.stream(name, ScriptedStream(spark, tmp_path / name, schema).frame())
        for name, sql in {
            "by_tasks": COMPLETE["grouped_by_tasks"].replace("avg(s.v)", "avg(s.d)"),
            "keys_by_tasks": COMPLETE["keys_computed_by_sources"],
            "least_string": f"SELECT s.g, min(t.n) AS n {JOIN} GROUP BY s.g",
            "least_double": f"SELECT s.g, min(s.x) AS x {JOIN} GROUP BY s.g",
            "by_double": f"SELECT s.x, count(*) AS n {JOIN} GROUP BY s.x",
            "quotient": f"SELECT s.g, sum(s.d / 3) AS q {JOIN} GROUP BY s.g",
            "rounded": f"SELECT s.g, sum(CAST(s.d AS DECIMAL(38, 10)) * s.d) AS r {JOIN} GROUP BY s.g",
            "letters": f"SELECT s.g, sum(length(t.n)) AS letters {JOIN} GROUP BY s.g",
            "filtered": f"SELECT s.g, sum(s.v) FILTER (WHERE s.v > 1) AS v {JOIN} GROUP BY s.g",
            "spark_s_condition": f"SELECT s.g, count(*) AS n {JOIN} AND s.g LIKE concat(t.n, '%') GROUP BY s.g",
        }.items():
            engine.query(name, sql)
            said = engine.explain(name, stages=True)
            by_tasks = name.endswith("by_tasks")
            assert ("grouped by the join's tasks" in said) == by_tasks, name
            assert ("grouped by Spark" in said) != by_tasks, name


def test_sums_that_tasks_leave_to_spark_are_right(spark: SparkSession, tmp_path: Path) -> None:
    numbers = ScriptedStream(spark, tmp_path / "numbers", "g string, v bigint")
    numbers.add([("a", 2**62), ("a", 2**61), ("b", 1)])
    numbers.add([("b", 2), ("c", 3)])
    numbers.add([("c", 2**62), ("c", -(2**62)), ("b", 2**62)])
    given: list[list[tuple[Any, ...]]] = []
    with plait.Engine(spark, str(tmp_path / "checkpoint")) as engine:
        engine.stream("numbers", numbers.frame())
        query = engine.query("total", "SELECT g, sum(v) AS v FROM numbers GROUP BY g ORDER BY g")
        query.foreach_batch(lambda rows, _: given.append([tuple(row) for row in rows.collect()]))
        run_epochs(engine)
        kinds = [file.grouped for files in engine.checkpoint.log.results().values() for file in files]
    assert given == [
        [("a", 3 * 2**61), ("b", 1)],
        [("a", 3 * 2**61), ("b", 3), ("c", 3)],
        [("a", 3 * 2**61), ("b", 2**62 + 3), ("c", 3)],
    ]
    assert set(kinds) == {False, True}


def test_a_table_is_a_batch_dataframe_and_joins_a_stream(spark: SparkSession, tmp_path: Path) -> None:
    pair = Pair(spark, tmp_path)
    with pair.engine({}) as engine:
        with pytest.raises(plait.PlaitError) as caught:
            engine.table("c", pair.a.frame())
        told(caught.value, "NOT_A_TABLE")
        engine.table("c", spark.createDataFrame([(1, 2)], "k long, z long"))
        with pytest.raises(plait.PlaitError) as caught:
            engine.table("a", spark.range(3))
        told(caught.value, "DUPLICATE_STREAM")
        with pytest.raises(plait.PlaitError) as caught:
            engine.query("still", "SELECT z, count(*) AS n FROM c GROUP BY z")
        told(caught.value, "NO_STREAM")


@pytest.mark.parametrize(("epochs", "pause"), [(1, 0), (3, 5)], ids=["nothing more comes", "the next epoch waits"])
def test_a_sink_that_fails_ends_the_run_and_gets_the_answer_at_the_next_start(
    spark: SparkSession, tmp_path: Path, epochs: int, pause: int
) -> None:
    pair = Pair(spark, tmp_path).arrive(epochs)
    queries = {"n": "SELECT count(*) AS n FROM a JOIN b ON a.k = b.k"}
    given: list[tuple[int, int]] = []

    def fail(_rows: DataFrame, _epoch: int) -> None:
        time.sleep(pause)
        raise RuntimeError("the table is locked")

    def take(rows: DataFrame, epoch: int) -> None:
        given.append((epoch, rows.collect()[0].n))

    with pair.engine(queries) as engine:
        plait.QueryHandle(engine, "n").foreach_batch(fail)
        run = engine.start(every="0 seconds")
        with pytest.raises(plait.PlaitError, match=r"SINK_FAILED.*'n'.*the table is locked"):
            run.await_termination()
        assert run.exception is not None
        assert not run.is_active
    for _ in range(2):
        with pair.engine(queries) as engine:
            plait.QueryHandle(engine, "n").foreach_batch(take)
            run_epochs(engine)
        assert given == [(epoch, sum(pair.expected(epoch + 1).values())) for epoch in range(epochs)]
    assert not any(thread.name.startswith("plait-answers") for thread in threading.enumerate())


def test_the_last_answers_have_arrived_when_a_run_has_ended(spark: SparkSession, tmp_path: Path) -> None:
    pair = Pair(spark, tmp_path).arrive(2)
    ended: list[int] = []

    def take(rows: DataFrame, epoch: int) -> None:
        rows.collect()
        time.sleep(1)
        ended.append(epoch)

    with pair.engine({"n": "SELECT count(*) AS n FROM a JOIN b ON a.k = b.k"}) as engine:
        plait.QueryHandle(engine, "n").foreach_batch(take)
        run = engine.start(available_now=True)
        run.await_termination()
        assert ended == [0, 1]
        assert [report["seconds"]["answers"] > 1 for report in run.recent_progress] == [True, True]
        pair.arrive()
        run = engine.start(available_now=True)
        while run.is_active:
            time.sleep(0.05)
        assert ended == [0, 1, 2]


def test_a_query_without_a_name_gets_one(spark: SparkSession, tmp_path: Path) -> None:
    with Pair(spark, tmp_path).engine({}) as engine:
        assert engine.sql(SQL).name == "q1"
        assert engine.sql("SELECT k FROM a").name == "q2"
        assert engine.sql("SELECT w FROM b", name="mine").name == "mine"
