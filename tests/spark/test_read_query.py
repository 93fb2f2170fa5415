"""SQL to join graphs: golden graphs, an oracle that runs them, registering streams, and speed.

`tests/fixtures/sql/*.spec` hold cases: an optional `# title`, the SQL, a line `----`, the graph as `describe` prints
it.  `pytest --rewrite` refreshes them.  The oracle runs every graph as plain Spark (filter, compute columns, join,
check, select) over small data and compares with what Spark makes of the SQL itself.
"""

from __future__ import annotations

import datetime as dt
import decimal
import itertools
import operator
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache, reduce
from pathlib import Path
from typing import Any, cast

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StringType, StructField, StructType

from plait.errors import PlaitError, StreamError
from plait.query.expr import ColumnRef, Expr, Literal
from plait.query.graph import JoinGraph
from plait.query.plan import QueryPlan
from plait.query.relation import Relation
from plait.sql.answer.residual import finish
from plait.sql.catalyst.expressions import Printer, quote
from plait.sql.catalyst.read_query import read_query, relation_of, reserved_words
from plait.sql.catalyst.scala import items

pytestmark = pytest.mark.spark

FIXTURES = Path(__file__).parent.parent / "fixtures" / "sql"
DDL = {
    "orders": "id int, customer bigint, ts timestamp, status string, total decimal(10,2)",
    "lines": "order_id bigint, product int, ts timestamp, price double, qty smallint, note string",
    "customer": "id bigint, region int, name string, since date, seen timestamp",
    "product": "id int, category int, name string, weight double",
    "region": "id int, name string",
    "payments": "order_id int, ts timestamp_ntz, amount decimal(12,2), method string",
    "refunds": "order_id int, ts timestamp_ntz, amount decimal(12,2), reason string",
    "clicks": "customer bigint, at timestamp",
    "weird": "`odd name` int, `odd``tick` string, `true` boolean, `select` int, `a.b` string, v variant, "
    "folded string collate UTF8_LCASE, list array<int>, st struct<inner:struct<v:int>,w:string>",
}
TIMES = dict.fromkeys(("orders", "lines", "payments", "refunds"), "ts")


@cache
def schemas() -> dict[str, StructType]:
    """Spark parses DDL only once it runs."""
    return {name: cast(StructType, StructType.fromDDL(ddl)) for name, ddl in DDL.items()}


@cache
def relations() -> dict[str, Relation]:
    return {
        name: Relation(
            name=name,
            columns=tuple((f.name, f.dataType.simpleString()) for f in schema.fields),
            time_column=TIMES.get(name),
            delay_ms=1000 if name in TIMES else None,
            ttl_us=60_000_000 if name == "clicks" else None,
        )
        for name, schema in schemas().items()
    }


@pytest.fixture(scope="module")
def session(spark: SparkSession) -> SparkSession:
    """A session with a table that is no stream, a Python function, and small data under the streams' names."""
    fresh = spark.newSession()
    fresh.conf.set("spark.sql.session.timeZone", "UTC")
    # The oracle's queries are tiny: compiling code for them would take most of their time.
    fresh.conf.set("spark.sql.codegen.wholeStage", "false")
    fresh.conf.set("spark.sql.codegen.factoryMode", "NO_CODEGEN")
    fresh.conf.set("spark.sql.shuffle.partitions", "1")
    fresh.conf.set("spark.sql.adaptive.enabled", "false")
    fresh.range(3).createOrReplaceTempView("dimension")
    fresh.udf.register("python_upper", lambda s: s.upper())
    for name, schema in schemas().items():
        fresh.createDataFrame(list(rows_of(schema)), schema).coalesce(1).localCheckpoint().createOrReplaceTempView(name)
    return fresh


def rows_of(schema: StructType) -> Iterator[tuple[Any, ...]]:
    """Thirty rows with few distinct values, NULLs among them."""
    choose = random.Random(len(schema.fields))
    for _ in range(30):
        yield tuple(value_of(f.dataType.simpleString(), choose) for f in schema.fields)


def value_of(kind: str, choose: random.Random) -> Any:
    number = choose.randrange(6)
    if number == 5 or kind == "variant":
        return None
    start = dt.datetime(2020, 1, 1)
    made: dict[str, Any] = {
        "string": ("a", "A", "1", "paid", "c")[number],
        "boolean": number > 1,
        "date": dt.date(2020, 1, 1 + number),
        "timestamp": start.replace(tzinfo=dt.UTC) + dt.timedelta(seconds=number, hours=choose.choice((0, 0, 1, 30))),
        "timestamp_ntz": start + dt.timedelta(seconds=number, days=choose.choice((0, 0, 40))),
        "array<int>": [number],
    }
    if kind.startswith("decimal"):
        return decimal.Decimal(number)
    if kind.startswith("struct"):
        return ((number,), "w")
    if kind.startswith("string"):
        return made["string"]
    return made.get(kind, float(number) if kind == "double" else number)


def read(spark: SparkSession, sql: str) -> JoinGraph:
    (graph,) = read_query(spark, relations(), schemas(), "q", sql).graphs.values()
    return graph


# ---------------------------------------------------------------- golden graphs


def describe(graph: JoinGraph) -> str:
    """A graph as text, one fact a line."""
    lines = []
    for alias in graph.aliases:
        lines.append(f"{alias.name}: {alias.relation}" + (f" where {alias.filter}" if alias.filter else ""))
        lines += [] if alias.ttl_us is None else [f"    TTL {alias.ttl_us / 1e6:g} s"]
        lines += [f"    {c.name} {c.type}" + (f" := {c.sql}" if c.sql != quote(c.name) else "") for c in alias.columns]
    lines += [f"key {e}" for e in graph.equalities]
    lines += [f"window {w}" for w in graph.windows]
    for condition in graph.conditions:
        refs = ", ".join(map(str, condition.refs))
        lines.append(f"check {condition.expr}" if condition.expr else f"spark {condition.sql} of {refs}")
    for o in graph.outputs:
        refs = ", ".join(map(str, o.refs))
        origin = str(o.source) if o.source else f"task {o.expr}" if o.expr else f"spark {o.sql} of {refs}"
        lines.append(f"out {o.name} {o.type} = {origin}")
    return "\n".join(lines)


def cases(name: str) -> list[tuple[str, str, str]]:
    """(title, SQL, expected) of a fixture."""
    found = []
    for block in (FIXTURES / f"{name}.spec").read_text().strip().split("\n\n"):
        head, _, expected = (block + "\n").partition("\n----\n")
        title = head.splitlines()[0] if head.startswith("#") else ""
        found.append((title, head.removeprefix(title).strip(), expected.strip()))
    return found


NAMES = sorted(path.stem for path in FIXTURES.glob("*.spec"))


@pytest.mark.parametrize("name", NAMES)
def test_a_query_reads_as_its_golden_graph(session: SparkSession, rewrite: bool, name: str) -> None:
    blocks = []
    for title, sql, _ in cases(name):
        try:
            printed = describe(read(session, sql))
        except PlaitError as error:
            printed = f"! {error}"
        blocks.append("\n".join(filter(None, (title, sql, "----", printed))))
    text = "\n\n".join(blocks) + "\n"
    if rewrite:
        (FIXTURES / f"{name}.spec").write_text(text)
    assert text == (FIXTURES / f"{name}.spec").read_text()


@pytest.mark.parametrize("name", [name for name in NAMES if name != "refusals"])
def test_only_the_refusals_fixture_holds_refusals(name: str) -> None:
    assert not [sql for _, sql, expected in cases(name) if expected.startswith("!")]


def test_every_refusal_has_a_cause_and_a_remedy() -> None:
    texts = [expected for _, _, expected in cases("refusals")]
    assert all(text.startswith("! [") and " — " in text for text in texts)


# ---------------------------------------------------------------- the oracle


def oracle_run(spark: SparkSession, graph: JoinGraph) -> DataFrame:
    """The graph as plain Spark over the tables named like its relations."""
    frames = []
    for alias in graph.aliases:
        df = spark.table(alias.relation)
        df = df.where(F.expr(alias.filter)) if alias.filter else df
        frames.append(df.select(*(F.expr(c.sql).alias(f"{alias.name}.{c.name}") for c in alias.columns)))
    joined = reduce(lambda one, other: one.crossJoin(other), frames)
    for equality in graph.equalities:
        joined = joined.where(column(equality.left) == column(equality.right))
    for window in graph.windows:
        gap = micros(window.left) - micros(window.right)
        if window.lower_us is not None:
            joined = joined.where(gap >= window.lower_us)
        if window.upper_us is not None:
            joined = joined.where(gap <= window.upper_us)
    for condition in graph.conditions:
        joined = joined.where(evaluate(condition.expr) if condition.expr else F.expr(condition.sql))
    outputs = tuple((o.sql, o.name) for o in graph.outputs)
    return finish(joined, QueryPlan("q", graph.sql, (), (), outputs, (), (), (), ()))


def column(ref: ColumnRef) -> Column:
    return F.col(quote(str(ref)))


def micros(ref: ColumnRef) -> Column:
    return F.unix_micros(column(ref).cast("timestamp"))


BINARY: dict[str, Callable[..., Column]] = {
    "=": operator.eq, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
    "and": operator.and_, "or": operator.or_, "+": operator.add, "-": operator.sub, "*": operator.mul,
}  # fmt: skip


def evaluate(expr: Expr) -> Column:
    """A native expression as a Spark column."""
    if isinstance(expr, ColumnRef):
        return column(expr)
    if isinstance(expr, Literal):
        if expr.type == "timestamp":
            return F.timestamp_micros(F.lit(expr.value))
        if expr.type == "date":
            return F.date_from_unix_date(F.lit(expr.value))
        return F.lit(expr.value).cast(expr.type)
    args = [evaluate(arg) for arg in expr.args]
    if expr.op in BINARY:
        return BINARY[expr.op](*args)
    others: dict[str, Callable[..., Column]] = {
        "not": lambda a: ~a,
        "isnull": lambda a: a.isNull(),
        "isnotnull": lambda a: a.isNotNull(),
        "<=>": lambda a, b: a.eqNullSafe(b),
        "cast": lambda a: a.cast(expr.type),
        "shift": lambda a, b: F.timestamp_micros(F.unix_micros(a) + b).cast(expr.type),
    }
    return others[expr.op](*args)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "refusals"])
def test_oracle_a_graph_means_what_its_sql_means(session: SparkSession, name: str) -> None:
    matched = 0
    for title, sql, _ in cases(name):
        graph = read(session, sql)
        expected = session.sql(sql)
        found = oracle_run(session, graph)
        assert [o.name for o in graph.outputs] == expected.columns, title
        assert [o.type for o in graph.outputs] == [f.dataType.simpleString() for f in expected.schema.fields], title
        assert found.dtypes == expected.dtypes, title
        wanted = Counter(map(str, expected.collect()))
        assert Counter(map(str, found.collect())) == wanted, title
        matched += bool(wanted)
    assert matched > len(cases(name)) / 2


# ---------------------------------------------------------------- what goldens do not show


def test_a_calendar_day_in_a_zone_with_daylight_saving_is_widened_and_checked_by_spark(session: SparkSession) -> None:
    sql = """SELECT o.id FROM orders o JOIN lines l ON o.id = l.order_id
             WHERE l.ts BETWEEN o.ts AND o.ts + INTERVAL 1 DAY"""
    session.conf.set("spark.sql.session.timeZone", "Europe/Berlin")
    try:
        graph = read(session, sql)
    finally:
        session.conf.set("spark.sql.session.timeZone", "UTC")
    day = 86_400_000_000
    assert [(w.lower_us, w.upper_us) for w in graph.windows] == [(-2 * day, 0)]
    assert [c.expr for c in graph.conditions] == [None]


def test_integer_arithmetic_wraps_around_only_where_ansi_is_off(session: SparkSession) -> None:
    sql = "SELECT o.id FROM orders o JOIN payments p ON o.id = p.order_id WHERE o.customer + 1 < p.order_id"
    assert "(o.customer + 1)" in str(read(session, sql).conditions[0].expr)
    session.conf.set("spark.sql.ansi.enabled", "false")
    try:
        assert "(o.customer +% 1)" in str(read(session, sql).conditions[0].expr)
    finally:
        session.conf.unset("spark.sql.ansi.enabled")


def test_reading_a_query_leaves_the_users_views_alone(session: SparkSession) -> None:
    before = session.table("orders").count()
    read(session, "SELECT o.id FROM orders o JOIN lines l ON o.id = l.order_id")
    assert session.table("orders").count() == before


def test_a_command_is_refused_and_not_run(session: SparkSession) -> None:
    session.range(1).createOrReplaceTempView("keep_me")
    with pytest.raises(PlaitError):
        read(session, "DROP VIEW keep_me")
    assert session.table("keep_me").count() == 1


def test_a_scala_function_of_the_session_is_printed_by_name(session: SparkSession) -> None:
    session.sql("CREATE OR REPLACE TEMPORARY FUNCTION twice(x INT) RETURNS INT RETURN x * 2")
    graph = read(session, "SELECT o.id FROM orders o JOIN region g ON twice(o.id) = g.id")
    assert str(graph.equalities[0]) == "o.=(id * 2) = g.id"


@pytest.mark.soak
def test_every_keyword_can_be_a_column(session: SparkSession) -> None:
    words = [row.keyword.lower() for row in session.sql("SELECT * FROM sql_keywords()").collect()]
    schema = StructType([StructField(word, StringType()) for word in words])
    printer = Printer((), (), reserved_words(session._jvm))
    shapes = "(({0} > 'a') OR ({0} IS NULL) OR (NOT {0} LIKE 'x') OR (upper({0}) = {0}))"
    tests = " AND ".join(shapes.format(printer.identifier(word)) for word in words)
    condition = session.createDataFrame([], schema).where(tests)._jdf.queryExecution().analyzed().condition()
    assert {a.name() for a in items(condition.references().toSeq())} == set(words)


def test_a_refused_query_leaves_sparks_own_errors_as_they_are(session: SparkSession) -> None:
    with pytest.raises(PlaitError, match="UNKNOWN_STREAM"):
        read(session, "SELECT * FROM nowhere")
    with pytest.raises(AnalysisException, match="nowhere"):
        session.sql("SELECT * FROM nowhere")


def test_an_eight_way_join_is_read_within_two_seconds(session: SparkSession) -> None:
    names = ("a", "b", "c", "d", "e", "f", "g", "h")
    keys = " AND ".join(f"{one}.customer = {two}.customer" for one, two in itertools.pairwise(names))
    sql = f"SELECT a.id, h.total FROM {', '.join(f'orders {n}' for n in names)} WHERE {keys} AND a.total < h.total"
    read(session, sql)
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        assert len(read(session, sql).aliases) == 8
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 2


# ---------------------------------------------------------------- registering streams


def rate(spark: SparkSession) -> DataFrame:
    return spark.readStream.format("rate").load()


def test_a_relation_knows_its_columns_event_time_delay_and_ttl(spark: SparkSession) -> None:
    relation = relation_of("ticks", rate(spark).withWatermark("timestamp", "10 minutes"), "1 hour 30 minutes")
    assert relation == Relation(
        "ticks", (("timestamp", "timestamp"), ("value", "bigint")), "timestamp", 600_000, 5_400_000_000
    )


def test_a_relation_needs_neither_watermark_nor_ttl(spark: SparkSession) -> None:
    relation = relation_of("ticks", rate(spark), None)
    assert (relation.time_column, relation.delay_ms, relation.ttl_us) == (None, None, None)


@pytest.mark.parametrize("name", ["", "a b", "a-b", "1a", "a.b", "ä", "../x"])
def test_a_stream_needs_a_plain_name(spark: SparkSession, name: str) -> None:
    with pytest.raises(StreamError, match="NAME"):
        relation_of(name, rate(spark), None)


def test_a_stream_must_be_streaming(spark: SparkSession) -> None:
    with pytest.raises(StreamError, match=r"NOT_STREAMING.*readStream"):
        relation_of("s", spark.range(3), None)


def test_a_stream_must_not_have_two_columns_of_one_name(spark: SparkSession) -> None:
    with pytest.raises(StreamError, match="DUPLICATE_COLUMN"):
        relation_of("s", rate(spark).selectExpr("value", "value AS VALUE"), None)


def test_a_stream_has_one_watermark(spark: SparkSession) -> None:
    one = rate(spark).selectExpr("timestamp AS one", "value AS k").withWatermark("one", "1 minute")
    two = rate(spark).selectExpr("timestamp AS two", "value AS l").withWatermark("two", "2 minutes")
    with pytest.raises(StreamError, match=r"\[WATERMARK\].*one, two"):
        relation_of("s", one.join(two, one.k == two.l), None)


@pytest.mark.parametrize("ttl", ["0 days", "1 month", "soon", "-1 day"])
def test_a_ttl_is_a_fixed_positive_time(spark: SparkSession, ttl: str) -> None:
    with pytest.raises(StreamError, match="TTL"):
        relation_of("s", rate(spark), ttl)


def test_a_ttl_is_text(spark: SparkSession) -> None:
    with pytest.raises(StreamError, match=r"\[TTL\].*'7'"):
        relation_of("s", rate(spark), 7)  # type: ignore[arg-type]


def test_what_is_needed_is_any_condition_over_a_row(session: SparkSession) -> None:
    for needed in ("value % 2 = 0", "timestamp IS NULL OR `value` > 3", "true", "CAST(NULL AS BOOLEAN)"):
        assert relation_of("s", rate(session), "1 day", needed).needed == needed


@pytest.mark.parametrize(
    ("needed", "code", "words"),
    [
        ("", "NEEDED", "Syntax error"),
        ("value >", "NEEDED", "Syntax error"),
        ("value", "NEEDED", "BIGINT"),
        ("colour = 3", "UNKNOWN_COLUMN", "colour"),
        ("rand() < 0.5", "NON_DETERMINISTIC", "rand()"),
        ("timestamp < current_timestamp()", "NON_DETERMINISTIC", "the current time"),
        ("python_upper('x') = 'X'", "PYTHON_UDF", "a Python function"),
        ("value IN (SELECT id FROM dimension)", "NEEDED", "IN (SELECT"),
        ("max(value) > 3", "NEEDED", "aggregate"),
        ("row_number() OVER (ORDER BY value) = 1", "NEEDED", ""),
        ("value > 1; DROP TABLE s", "NEEDED", "Syntax error"),
    ],
)
def test_what_is_no_condition_over_a_row_is_refused(session: SparkSession, needed: str, code: str, words: str) -> None:
    with pytest.raises(StreamError) as caught:
        relation_of("s", rate(session), "1 day", needed)
    assert caught.value.code == code, str(caught.value)
    assert words.lower() in caught.value.cause.lower()
    assert f"needed={needed!r} of stream s" in caught.value.cause
    assert caught.value.remedy


def test_what_is_needed_longer_than_the_ttl_needs_one(spark: SparkSession) -> None:
    with pytest.raises(StreamError, match=r"\[NEEDED\].*ttl=\"7 days\""):
        relation_of("s", rate(spark), None, "value > 3")
    with pytest.raises(StreamError, match=r"\[NEEDED\].*Column, not SQL text"):
        relation_of("s", rate(spark), "1 day", F.col("value") > 3)  # type: ignore[arg-type]
