"""What is read of a plan is what the plan says, in few calls; what was kept from query to query is never stale."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, cast

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from benchmarks.reading import QUERIES, STREAMS, counted
from plait.query.graph import JoinGraph
from plait.query.relation import Relation
from plait.sql.catalyst.logical import logical_of
from plait.sql.catalyst.plan_reader import UNKNOWN
from plait.sql.catalyst.read_query import read_query

pytestmark = pytest.mark.spark


@pytest.fixture
def session(spark: SparkSession) -> SparkSession:
    """A session whose functions and settings may be changed."""
    return spark.newSession()


@cache
def schema_of(ddl: str) -> StructType:
    """Spark parses DDL."""
    return cast(StructType, StructType.fromDDL(ddl))


def read(session: SparkSession, sql: str, streams: Mapping[str, str] = STREAMS) -> JoinGraph:
    schemas = {name: schema_of(ddl) for name, ddl in streams.items()}
    relations = {
        name: Relation(name, tuple((f.name, f.dataType.simpleString()) for f in schema.fields))
        for name, schema in schemas.items()
    }
    (graph,) = read_query(session, relations, schemas, "q", sql).graphs.values()
    return graph


@pytest.mark.parametrize(
    ("sql", "value"),
    [
        ("5", 5),
        ("-5000000000", -5_000_000_000),
        ("7Y", 7),
        ("true", True),
        ("NULL", None),
        ("'plain'", "plain"),
        ("'it\\'s \\\\ \"quoted\" \\n \\t'", 'it\'s \\ "quoted" \n \t'),
        ("'Grüße 🧵 ∞'", "Grüße 🧵 ∞"),
        ("2.5D", 2.5),
        ("1e300D", 1e300),
        ("DATE '1970-01-03'", 2),
        ("TIMESTAMP_NTZ '1970-01-01 00:00:01'", 1_000_000),
        ("INTERVAL '2' SECOND", 2_000_000),
        ("1.50BD", UNKNOWN),
        ("X'00FF'", UNKNOWN),
    ],
)
def test_a_constant_keeps_its_value(session: SparkSession, sql: str, value: object) -> None:
    state: Any = session._jsparkSession.sessionState()
    found = logical_of(session._jvm).reader.expression(state.sqlParser().parseExpression(sql))
    assert found.name == "Literal"
    assert found.value == value
    assert type(found.value) is type(value)


def test_names_and_texts_of_any_kind_are_read_as_they_are(session: SparkSession) -> None:
    streams = {"a": '`odd "name" 🧵` int, `back``tick` string', "b": '`odd "name" 🧵` int'}
    sql = (
        'SELECT a.`back``tick` AS t FROM a JOIN b ON a.`odd "name" 🧵` = b.`odd "name" 🧵` '
        "WHERE a.`back``tick` <> '\"🧵\\\\\n'"
    )
    graph = read(session, sql, streams)
    assert str(graph.equalities[0]) == 'a.odd "name" 🧵 = b.odd "name" 🧵'
    assert graph.aliases[0].filter is not None
    assert "🧵" in graph.aliases[0].filter


def test_a_deep_condition_is_read_whole(session: SparkSession) -> None:
    deep = " OR ".join(f"(l.qty > {number} AND upper(l.note) <> 'n{number}')" for number in range(150))
    graph = read(session, f"SELECT o.id FROM orders o JOIN lines l ON o.id = l.order_id WHERE {deep}")
    assert graph.aliases[1].filter is not None
    assert all(f"'n{number}'" in graph.aliases[1].filter for number in range(150))


@pytest.mark.parametrize(("query", "most"), [("two-way", 40), ("three-way", 45), ("five-way", 55)])
def test_a_query_is_read_in_few_calls(session: SparkSession, query: str, most: int) -> None:
    sql = QUERIES[query].replace(" AND l.ts BETWEEN o.ts AND o.ts + INTERVAL 1 HOUR", "")
    read(session, sql)
    with counted() as calls:
        read(session, sql)
    assert len(calls) <= most


def test_a_function_that_was_replaced_is_not_remembered(session: SparkSession) -> None:
    sql = "SELECT o.id FROM orders o JOIN region g ON twice(o.id) = g.id"
    for body, key in (("x * 2", "(id * 2)"), ("x + x", "(id + id)")):
        session.sql(f"CREATE OR REPLACE TEMPORARY FUNCTION twice(x INT) RETURNS INT RETURN {body}")
        assert str(read(session, sql).equalities[0]) == f"o.={key} = g.id"


def test_the_settings_of_the_engines_session_hold_whichever_is_active(
    spark: SparkSession, session: SparkSession
) -> None:
    spark.createDataFrame([], "x int")  # makes its session the active one
    session.conf.set("spark.sql.ansi.enabled", "false")
    graph = read(session, "SELECT o.id + g.id AS n FROM orders o JOIN region g ON o.customer = g.id")
    assert graph.outputs[0].sql == "(`o.id` + `g.id`)"
    assert spark.range(1).selectExpr("1 + 1")._jdf.sparkSession().equals(spark._jsparkSession)


def test_a_setting_that_was_changed_is_not_remembered(session: SparkSession) -> None:
    sql = "SELECT o.id + g.id AS n FROM orders o JOIN region g ON o.customer = g.id WHERE o.id + g.id > 3"
    for ansi in (True, False, True):
        session.conf.set("spark.sql.ansi.enabled", str(ansi).lower())
        assert ("+%" in str(read(session, sql).conditions[0].expr)) is not ansi


def test_a_schema_that_was_changed_is_not_remembered(session: SparkSession) -> None:
    sql = "SELECT a.x FROM a JOIN b ON a.k = b.k"
    for kind in ("int", "string", "int"):
        graph = read(session, sql, {"a": f"k int, x {kind}", "b": "k int"})
        assert graph.outputs[0].type == kind


def test_streams_of_two_sessions_are_kept_apart(spark: SparkSession, session: SparkSession) -> None:
    sql = "SELECT a.x FROM a JOIN b ON a.k = b.k"
    for chosen, kind in ((spark, "int"), (session, "string"), (spark, "int")):
        assert read(chosen, sql, {"a": f"k int, x {kind}", "b": "k int"}).outputs[0].type == kind
