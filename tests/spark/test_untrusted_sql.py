"""SQL text is not trusted: what is not a query over known tables is refused before Spark analyses or opens anything."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from rich.console import Console

import plait
from plait.config import Config
from plait.errors import PlaitError, StreamError
from plait.serve.pipeline import Pipeline, TableSpec
from plait.serve.prompt.sql_prompt import Interrupts
from plait.serve.prompt.sql_session import Session, Settings
from plait.serve.prompt.sql_statements import Statement
from plait.sql.catalyst.read_query import relation_of
from tests.spark.pair import told

pytestmark = pytest.mark.spark

PROPERTY = "plait.test.untrusted"
SET_PROPERTY = f"('java.lang.System', 'setProperty', '{PROPERTY}', 'called')"


@pytest.fixture(scope="module")
def engine(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[plait.Engine]:
    """An engine with the streams a and b, in a session that has a view and a table beside them."""
    spark.range(3).createOrReplaceTempView("a_view")
    with plait.Engine(spark, checkpoint=str(tmp_path_factory.mktemp("untrusted"))) as engine:
        rate = spark.readStream.format("rate").load()
        engine.stream("a", rate)
        engine.stream("b", rate)
        yield engine
    spark.catalog.dropTempView("a_view")


@pytest.fixture
def broken(tmp_path: Path) -> str:
    """A Parquet file that cannot be opened: whoever tries it fails in Spark's words."""
    (tmp_path / "x.parquet").write_text("no Parquet at all")
    return str(tmp_path)


def refused(code: str, use: Callable[[], object], *words: str) -> None:
    with pytest.raises(PlaitError) as caught:
        use()
    assert told(caught.value, code)
    for word in words:
        assert word in caught.value.cause


def was_called(spark: SparkSession) -> bool:
    jvm: Any = spark._jvm
    return jvm.System.getProperty(PROPERTY) is not None


# Names.


@pytest.mark.parametrize("case_sensitive", ["false", "true"])
def test_names_that_differ_in_case_only_are_one_name(spark: SparkSession, tmp_path: Path, case_sensitive: str) -> None:
    rate, table = spark.readStream.format("rate").load(), spark.range(3)
    spark.conf.set("spark.sql.caseSensitive", case_sensitive)
    try:
        with plait.Engine(spark, checkpoint=str(tmp_path)) as engine:
            engine.stream("A", rate)
            engine.table("T", table)
            for other in ("a", "A"):
                refused("DUPLICATE_STREAM", partial(engine.stream, other, rate), "'A'")
                refused("DUPLICATE_STREAM", partial(engine.table, other, table), "'A'")
            refused("DUPLICATE_STREAM", lambda: engine.stream("t", rate), "'T'")
            refused("DUPLICATE_STREAM", lambda: engine.table("t", table), "'T'")
            engine.query("Q", "SELECT A.value FROM A")
            refused("DUPLICATE_QUERY", lambda: engine.query("q", "SELECT A.value FROM A"), "'Q'")
    finally:
        spark.conf.unset("spark.sql.caseSensitive")


def test_spark_decides_whether_case_matters_in_a_query(spark: SparkSession, engine: plait.Engine) -> None:
    engine.query("upper_case", "WITH C AS (SELECT value FROM A) SELECT c.value FROM c JOIN B ON c.value = B.value")
    spark.conf.set("spark.sql.caseSensitive", "true")
    try:
        refused("UNKNOWN_STREAM", lambda: engine.query("q", "SELECT value FROM A"), "A")
        refused("UNKNOWN_STREAM", lambda: engine.query("q", "WITH C AS (SELECT value FROM a) SELECT * FROM c"), "c")
    finally:
        spark.conf.unset("spark.sql.caseSensitive")


# Statements.


@pytest.mark.parametrize(
    "sql",
    [
        "EXECUTE IMMEDIATE 'DROP VIEW a_view'",
        "DROP VIEW a_view",
        "BEGIN DROP VIEW a_view; END",
        "WITH c AS (SELECT value FROM a) INSERT INTO a_view SELECT value FROM c",
        "INSERT INTO a_view SELECT value FROM a",
        "CACHE TABLE a_view",
        "EXPLAIN SELECT value FROM a",
        "DESCRIBE QUERY SELECT value FROM a",
        "SHOW TABLES",
        "SET spark.sql.ansi.enabled = false",
        "CALL somebody()",
    ],
)
def test_a_statement_that_is_no_query_is_refused_and_not_run(engine: plait.Engine, sql: str) -> None:
    refused("UNSUPPORTED", lambda: engine.query("q", sql), "a command")
    assert engine.spark.table("a_view").count() == 3
    assert engine.spark.conf.get("spark.sql.ansi.enabled") == "true"


@pytest.mark.parametrize(
    ("sql", "words"),
    [
        ("SELECT TRANSFORM(value) USING 'cat' AS (x) FROM a", "a script"),
        ("SELECT x FROM (SELECT TRANSFORM(value) USING 'cat' AS (x) FROM a)", "a script"),
        ("SELECT value FROM a VERSION AS OF 1", "VERSION"),
        ("SELECT value FROM STREAM a", "STREAM"),
        ("SELECT value FROM a WATERMARK timestamp DELAY OF INTERVAL 1 MINUTE", "WATERMARK"),
        ("SELECT value FROM IDENTIFIER('a' || '')", "IDENTIFIER(…)"),
        ("SELECT IDENTIFIER('value') FROM a", "IDENTIFIER(…)"),
        (f"SELECT IDENTIFIER('reflect'){SET_PROPERTY} FROM a", "IDENTIFIER(…)"),
        (f"SELECT reflect{SET_PROPERTY} FROM a", "reflect(…)"),
        (f"SELECT system.builtin.java_method{SET_PROPERTY} FROM a", "java_method(…)"),
        (f"SELECT `Try_Reflect`{SET_PROPERTY} FROM a", "try_reflect(…)"),
        (f"SELECT value FROM a LATERAL VIEW reflect{SET_PROPERTY} r AS s", "reflect(…)"),
        (f"SELECT sum(value) OVER w FROM a WINDOW w AS (ORDER BY reflect{SET_PROPERTY})", "reflect(…)"),
    ],
)
def test_what_a_query_must_not_do_is_refused_by_name(engine: plait.Engine, sql: str, words: str) -> None:
    refused("UNSUPPORTED", lambda: engine.query("q", sql), words)
    assert not was_called(engine.spark)


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT * FROM parquet.`{path}`",
        "SELECT value FROM a WHERE value IN (SELECT id FROM parquet.`{path}`)",
        "SELECT CASE WHEN value > 1 THEN (SELECT max(id) FROM parquet.`{path}`) END AS x FROM a",
        "WITH c AS (SELECT id FROM parquet.`{path}`) SELECT c.id FROM c JOIN a ON c.id = a.value",
        "SELECT sum(value) OVER w FROM a WINDOW w AS (ORDER BY (SELECT max(id) FROM parquet.`{path}`))",
        "SELECT * FROM (VALUES ((SELECT max(id) FROM parquet.`{path}`))) v",
        "SELECT value FROM a, LATERAL (SELECT id FROM parquet.`{path}` p WHERE p.id = a.value)",
        "SELECT value FROM a UNION ALL SELECT id FROM parquet.`{path}`",
        "SELECT value FROM a ORDER BY (SELECT max(id) FROM parquet.`{path}`)",
        "FROM parquet.`{path}` |> SELECT *",
        "TABLE parquet.`{path}`",
    ],
)
def test_a_table_given_by_path_is_refused_before_it_is_opened(engine: plait.Engine, broken: str, sql: str) -> None:
    refused("NOT_A_STREAM", lambda: engine.query("q", sql.format(path=broken)), f"parquet.{broken}")


def test_a_name_in_with_is_no_way_around_that(engine: plait.Engine, broken: str) -> None:
    named = f"WITH `parquet, {broken}` AS (SELECT value FROM a) SELECT * FROM parquet.`{broken}`"
    refused("NAME", lambda: engine.query("q", named), "WITH")
    # The name is known in the sub-query only, and only after it was defined.
    for sql in (
        "SELECT * FROM a_view, (WITH a_view AS (SELECT value FROM a) SELECT * FROM a_view)",
        "WITH c AS (SELECT id FROM a_view), a_view AS (SELECT value FROM a) SELECT * FROM c",
        "WITH a_view AS (SELECT id FROM a_view) SELECT * FROM a_view",
    ):
        refused("UNKNOWN_STREAM", partial(engine.query, "q", sql), "a_view")


@pytest.mark.parametrize("call", ["range(3)", "explode(array(1, 2))", "sql_keywords()", "nothing(1)"])
def test_a_table_valued_function_is_no_stream(engine: plait.Engine, call: str) -> None:
    refused("NOT_A_STREAM", lambda: engine.query("q", f"SELECT * FROM {call}"), f"{call.partition('(')[0]}(…)")


@pytest.mark.filterwarnings("ignore::plait.errors.RecomputationWarning")
def test_what_queries_may_say_is_still_said(engine: plait.Engine) -> None:
    for number, sql in enumerate(
        (
            "WITH c AS (SELECT value FROM a), d AS (SELECT value FROM c) SELECT c.value FROM c JOIN d USING (value)",
            "SELECT a.value, sum(b.value) OVER w AS s FROM a JOIN b USING (value) WINDOW w AS (ORDER BY a.value)",
            "FROM a |> JOIN b ON a.value = b.value |> AGGREGATE count(*) AS n GROUP BY a.value",
            "SELECT a.* EXCEPT (timestamp) FROM a NATURAL JOIN b",
            "SELECT value, n FROM (SELECT a.value, array(1, 2) AS l FROM a JOIN b USING (value)) LATERAL VIEW "
            "explode(l) t AS n",
        )
    ):
        engine.query(f"said_{number}", sql)


# What is needed.


@pytest.mark.parametrize(
    ("needed", "words"),
    [
        ("value > 1 -- until it is closed", "comment"),
        ("value > 1 -- \\", "comment"),
        ("value > 1 /* not closed", ""),
        ("true) OR (true", "Syntax error"),
        ("true THEN true ELSE false END = true", "Syntax error"),
        ("value IN (SELECT id FROM parquet.`/nowhere`)", "sub-query"),
        (f"reflect{SET_PROPERTY} = ''", "reflect(…)"),
    ],
)
def test_what_cannot_stand_inside_a_longer_text_is_not_needed(spark: SparkSession, needed: str, words: str) -> None:
    rate = spark.readStream.format("rate").load()
    with pytest.raises(StreamError) as caught:
        relation_of("s", rate, "1 day", needed)
    assert words in told(caught.value, "NEEDED").cause
    assert not was_called(spark)


def test_a_comment_that_ends_by_itself_is_harmless(spark: SparkSession) -> None:
    rate = spark.readStream.format("rate").load()
    for needed in ("value > 1 -- first\nOR value IS NULL", "value /* why */ > 1", "timestamp < '2020--' "):
        assert relation_of("s", rate, "1 day", needed).needed == needed


# The prompt.


@pytest.fixture
def prompt(spark: SparkSession, tmp_path: Path) -> Iterator[Session]:
    """The prompt of a pipeline that has one table."""
    spark.range(3).write.parquet(str(tmp_path / "t"))
    pipeline = Pipeline(
        file=Path("test"),
        checkpoint=str(tmp_path / "checkpoint"),
        config=Config(),
        app="test",
        master=None,
        settings={},
        streams=(),
        queries=(),
        every=None,
        tables=(TableSpec("t", "parquet", str(tmp_path / "t"), None, {}),),
    )
    out = io.StringIO()
    session = Session(pipeline, spark, Settings(format="csv"), Interrupts(), out, Console(file=io.StringIO()))
    yield session
    session.close()


@pytest.mark.parametrize(
    "sql",
    [
        f"SELECT reflect{SET_PROPERTY}",
        f"SELECT java_method{SET_PROPERTY} FROM t",
        f"WITH c AS (SELECT builtin.try_reflect{SET_PROPERTY} AS x) SELECT x FROM c",
        f"SELECT IDENTIFIER('reflect'){SET_PROPERTY}",
        "SELECT * FROM IDENTIFIER('par' || 'quet')",
        "SELECT TRANSFORM(id) USING 'cat' AS (x) FROM t",
        "WITH c AS (SELECT 1) INSERT INTO t SELECT * FROM c",
        "TABLE t |> SELECT reflect('java.lang.System', 'gc')",
    ],
)
def test_the_prompt_refuses_what_reaches_beyond_sql(prompt: Session, sql: str) -> None:
    refused("UNSUPPORTED", lambda: prompt.execute(Statement("select", sql)))
    assert not was_called(prompt.spark)


@pytest.mark.parametrize(
    ("sql", "code"),
    [
        ("SELECT * FROM parquet.`{path}`", "UNKNOWN_STREAM"),
        ("WITH `parquet, {path}` AS (SELECT 1) SELECT * FROM parquet.`{path}`", "NAME"),
        ("WITH `parquet.{path}` AS (SELECT 1) SELECT * FROM parquet.`{path}`", "UNKNOWN_STREAM"),
        ("SELECT * FROM a_view, (WITH a_view AS (SELECT 1) SELECT * FROM a_view)", "UNKNOWN_STREAM"),
        ("SELECT sum(id) OVER w FROM t WINDOW w AS (ORDER BY (SELECT 1 FROM parquet.`{path}`))", "UNKNOWN_STREAM"),
        ("VALUES (1), ((SELECT max(id) FROM parquet.`{path}`))", "UNKNOWN_STREAM"),
        ("SELECT * FROM sql_keywords()", "NOT_A_STREAM"),
    ],
)
def test_the_prompt_reads_what_the_pipeline_names_only(prompt: Session, broken: str, sql: str, code: str) -> None:
    refused(code, lambda: prompt.execute(Statement("select", sql.format(path=broken))))


def test_the_prompt_still_reads_tables_values_and_its_own_ctes(prompt: Session) -> None:
    for sql in (
        "WITH c AS (SELECT id FROM T) SELECT count(*) AS n FROM C",
        "SELECT count(*) AS n FROM range(3)",
        "SELECT count(*) AS n FROM VALUES (1), (2), (3)",
        "SELECT 3 AS n",
    ):
        prompt.execute(Statement("select", sql))
    assert isinstance(prompt.out, io.StringIO)
    assert prompt.out.getvalue().split() == ["n", "3"] * 4
