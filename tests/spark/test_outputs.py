"""Outputs that tasks compute, against Spark: every pair of extreme values through every function, in both modes.

One SQL text holds all expressions.  Plait reads it and evaluates what it translates over all pairs of rows; Spark runs
the same text as a batch join.  Values, types and the rows on which an expression fails must be the same.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession

import plait
from plait.query.expr import Expr, may_fail
from plait.query.graph import Output
from plait.query.plan import Plan
from plait.query.relation import Relation
from plait.runtime.answers.result_reader import ResultRows
from plait.sql.catalyst.logical import logical_of
from plait.sql.catalyst.read_query import read_query
from plait.sql.catalyst.scala import items
from plait.sql.join import graph_rules
from plait.state.segments.evaluate import values
from plait.testing import ScriptedStream, run_epochs
from tests.oracle import bag, batch_join

pytestmark = pytest.mark.spark

NAN, INF = math.nan, math.inf
LEAST, MOST = -(2**63), 2**63 - 1
COLUMNS: dict[str, tuple[str, pa.DataType, list[Any]]] = {
    "t": ("tinyint", pa.int8(), [None, 0, 1, -1, 2, 100, 127, -128]),
    "s": ("smallint", pa.int16(), [None, 0, 1, -1, 7, 300, 2**15 - 1, -(2**15)]),
    "i": ("int", pa.int32(), [None, 0, 1, -1, 7, 65536, 2**31 - 1, -(2**31)]),
    "l": ("bigint", pa.int64(), [None, 0, 1, -1, 7, 2**53 + 1, MOST, LEAST]),
    "f": ("float", pa.float32(), [None, 0.0, -0.0, 0.1, -3.5, NAN, INF, -INF]),
    "d": ("double", pa.float64(), [None, 0.0, -0.0, 0.1, -3.5, NAN, INF, 1e308]),
    "n": ("decimal(10,2)", pa.decimal128(10, 2), [None, 0, *map(Decimal, ["-0.01", "1.5", "99999999.99", "-99999.9"])]),
    "m": ("decimal(12,4)", pa.decimal128(12, 4), [None, 0, *map(Decimal, ["0.0001", "-1.5", "99999999.9999", "-7"])]),
    "w": ("string", pa.string(), [None, "", "a", "A", "ß🧵", "a\0b", "10", "-0"]),
    "o": ("boolean", pa.bool_(), [None, True, False]),
    "y": ("date", pa.int32(), [None, 0, -1, 19_782, 2**31 - 1, -(2**31), 7]),
    "z": ("timestamp", pa.int64(), [None, 0, -1, 1_709_164_800_000_001, -62_135_596_800_000_000, MOST, LEAST, 999_999]),
    "x": ("timestamp_ntz", pa.int64(), [None, 0, -1, 1_709_164_800_000_001, -62_135_596_800_000_000, MOST, LEAST]),
}  # fmt: skip
SIZE = max(len(values) for _, _, values in COLUMNS.values())
INTEGERS, FLOATS = "tsil", "fd"
EVERY = [
    # arithmetic of integers of one width and of two, of floats, of both
    *(f"a.{c} {op} b.{c}" for c in INTEGERS + FLOATS for op in "+-*"),
    *(f"a.{x} {op} b.{y}" for x, y in ("ti", "sl", "il", "fd", "ld", "if", "lf") for op in "+-*"),
    *(f"a.{x} / b.{y}" for x, y in ("dd", "fd", "il", "ll", "ff")),
    *(f"a.{x} {op} b.{y}" for x, y in ("tt", "ii", "ll", "il") for op in ("div", "%")),
    *(f"a.{x} % b.{y}" for x, y in ("dd", "ff", "fd", "ld")), "a.d % 0.0D", "7.5D % b.d", "a.d % -1.0D + b.d",
    *(f"-(a.{c} + b.{c})" for c in INTEGERS + FLOATS + "n"),
    *(f"coalesce(-a.{c}, abs(b.{c}))" for c in INTEGERS + FLOATS + "nm"),
    *(f"a.{c} {op} ~b.{c}" for c in INTEGERS for op in "&|^"),
    # decimals that keep all their digits
    *(f"a.n {op} b.m" for op in "+-*"), "a.n * 2 - b.t", "a.m + b.i", "abs(a.n - b.n)",
    "a.n + CAST(b.s AS DECIMAL(20,3))",
    # comparisons, logic, null tests
    *(f"a.{c} {op} b.{c}" for c in COLUMNS for op in ("=", "<=>", "<", "<=", ">", ">=", "<>")),
    "a.t < b.l", "a.f = b.d", "a.l > b.d", "a.n <= b.m", "a.i = b.n",
    "a.o AND b.o", "a.o OR b.o", "NOT (a.o AND NOT b.o)", "(a.i > b.i) <=> (a.l > b.l)",
    "a.w IS NULL OR b.w IS NOT NULL",
    "isnan(a.d + b.d)", "isnan(a.f) OR isnan(b.f)", "a.i + b.t IN (0, 7, -2)", "a.w || b.w IN ('a', 'aA')",
    "a.i * b.s IN (1, NULL)", "a.i + b.i IN (a.i, b.i)", "a.d IN (b.d, 0.0D, b.d / 2.0D)", "a.w IN (b.w, 'a', NULL)",
    # choices
    *(f"{f}(a.{c}, b.{c})" for c in COLUMNS for f in ("coalesce", "greatest", "least", "nvl", "nullif")),
    *(f"IF(a.o, a.{c}, b.{c})" for c in COLUMNS), "nvl2(a.i, b.i, a.i)",
    "CASE WHEN a.i > b.i THEN a.w WHEN a.i = b.i THEN '=' ELSE b.w END", "CASE WHEN a.o THEN b.l END",
    "CASE a.t WHEN b.t THEN 1 WHEN 7 THEN 2 ELSE a.t + b.t END", "greatest(a.t, b.i, 7)", "least(a.f, b.d, 0.5D)",
    # what can fail is evaluated only where it is chosen
    "CASE WHEN b.d <> 0 AND NOT isnan(b.d) THEN a.d / b.d ELSE a.d END", "IF(b.i = 0, NULL, a.i div b.i)",
    "IF(b.l = 0, 0, a.l % b.l)", "coalesce(a.l, b.l + 1)", "coalesce(b.i, a.l div b.l)",
    "b.l <> 0 AND a.l div b.l > 1", "b.l = 0 OR a.l div b.l > 1", "b.d <> 0 AND a.d / b.d > 1",
    "(a.i + b.i > 0) OR a.o",
    "a.l + (b.l * 2)", "(a.l * 2) + b.l", "(a.l + 1) div (b.l - 1)", "(a.d / b.d) * (b.d / a.d)", "(a.l div b.l) / b.l",
    "CASE WHEN a.o THEN a.i + b.i WHEN b.o THEN a.i - b.i ELSE a.i * b.i END", "greatest(a.i + 1, b.i - 1)",
    "a.i + 1 <=> b.i + 1", "concat(a.i + 1, b.i)",
    # text
    "a.w || b.w", "concat(a.w, '-', b.w, 'ü')", "concat_ws(',', a.w, b.w)", "concat_ws(a.w, b.w, 'x', b.w)",
    "concat(a.i, b.w)", "concat(a.t, ':', b.l)", "a.w || b.o", "concat_ws('/', a.s, b.t, a.w)",
    # time
    "IF(a.o, a.z + INTERVAL 90 SECONDS, b.z)", "IF(a.o, a.x - INTERVAL '1 02:03:04.5' DAY TO SECOND, b.x)",
    "greatest(a.z, b.z + INTERVAL 1 DAY)", "unix_micros(a.z) - unix_micros(b.z)", "unix_millis(a.z) - unix_millis(b.z)",
    "unix_seconds(a.z) - unix_seconds(b.z)", "CAST(a.z AS BIGINT) - CAST(b.z AS BIGINT)", "CAST(a.z AS DOUBLE) + b.t",
    "datediff(a.y, b.y)", "date_add(a.y, b.i)", "date_sub(a.y, b.s)", "a.y + b.t", "a.z + INTERVAL 1 HOUR < b.z",
    # casts
    "CAST(a.t AS BIGINT) + b.t", "CAST(a.f AS DOUBLE) + b.t", "CAST(a.l AS DOUBLE) + b.t",
    "CAST(a.o AS INT) + CAST(b.o AS INT)",
    *(f"CAST(a.l + b.{c} AS {kind})" for c in "tl" for kind in ("TINYINT", "SMALLINT", "INT")),
    "CAST(a.i AS TINYINT) + b.t", "CAST(a.i - b.s AS SMALLINT)", "coalesce(a.t, CAST(b.l AS TINYINT))",
    "concat(a.n, '/', b.m)", "CAST(a.n + b.n AS STRING)", "concat_ws(' ', a.m - b.m, a.n * b.m)",
    # days
    "CAST(a.z AS DATE) = CAST(b.z AS DATE)", "datediff(a.z, b.z)", "datediff(a.x, b.y)", "IF(a.o, to_date(a.x), b.y)",
    "concat(a.y, ' - ', b.y)", "concat(CAST(a.z AS DATE), b.w)", "year(a.y) - year(b.y)", "month(a.y) = month(b.z)",
    "day(a.y) + day(b.y)", "(year(a.y) - year(b.y)) * 12 + month(a.y) - month(b.y)", "date_add(a.y, b.t) = b.y",
    "unix_timestamp(a.z) - unix_timestamp(b.z)", "unix_timestamp(a.x) + b.t",
    # over one stream, and able to fail
    "a.i + 1", "a.l * 3", "1 / b.d", "a.i div b.i",
    "a.l div -1", "a.l % -1", "b.l div 7", "a.d / 9.0D + b.d", "a.d / 0.0D", "b.l % 0", "-a.t", "abs(a.s)",
]  # fmt: skip
LEFT_TO_SPARK = [
    "upper(a.w) || b.w", "substring(a.w || b.w, 1, 2)", "length(a.w || b.w)", "a.w LIKE b.w", "a.n / b.m",
    "CAST(a.d + b.d AS STRING)", "CAST(a.n * b.m * b.m AS STRING)", "CAST(a.d + b.d AS INT)",
    "IF(a.o, a.z + INTERVAL 1 MONTH, b.z)", "round(a.d + b.d)", "CAST(concat(a.w, b.w) AS DATE)",
    "CAST(a.n * b.n AS DOUBLE)", "pow(a.d, b.d)", "hash(a.i, b.i)", "CAST(a.d + b.d AS DECIMAL(10,2))",
    "hour(a.z) - hour(b.z)", "quarter(a.y) + quarter(b.y)",
    "CAST(a.n AS DECIMAL(38,10)) * b.m", "a.y < b.z", "IF(a.o, a.d, CAST('NaN' AS DOUBLE) + b.t)",
]  # fmt: skip

LEFT_WHERE_MEMBERS_MAY_FAIL = ["a.d IN (7D, 1 / b.d, b.d)", "a.i + b.i IN (a.i, a.i + b.i)"]


def table(name: str) -> pa.Table:
    """One row per place in the lists of values; shorter lists are gone through again."""
    arrays = {}
    for column, (_, kind, found) in COLUMNS.items():
        whole = pa.array(list(itertools.islice(itertools.cycle(found), SIZE)), kind)
        times = {"y": pa.date32(), "z": pa.timestamp("us", "UTC"), "x": pa.timestamp("us")}
        arrays[column] = whole.cast(times.get(column, kind))
    return pa.table({"k": pa.array([1] * SIZE, pa.int32()), f"r{name}": pa.array(range(SIZE), pa.int32()), **arrays})


@pytest.fixture(scope="module")
def session(spark: SparkSession) -> SparkSession:
    fresh = spark.newSession()
    for key, value in {
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.codegen.factoryMode": "NO_CODEGEN",
        "spark.sql.shuffle.partitions": "1",
        "spark.sql.adaptive.enabled": "false",
    }.items():
        fresh.conf.set(key, value)
    for name in "ab":
        kinds = {"k": "int", f"r{name}": "int", **{column: kind for column, (kind, _, _) in COLUMNS.items()}}
        frame = fresh.createDataFrame(table(name), ", ".join(f"{column} {kind}" for column, kind in kinds.items()))
        frame.coalesce(1).localCheckpoint().createOrReplaceTempView(name)
    return fresh


@pytest.fixture(params=["ANSI", "LEGACY"])
def mode(request: pytest.FixtureRequest, session: SparkSession) -> Iterator[str]:
    session.conf.set("spark.sql.ansi.enabled", str(request.param == "ANSI").lower())
    yield request.param
    session.conf.unset("spark.sql.ansi.enabled")


def text_of(expressions: list[str]) -> str:
    listed = ", ".join(f"{text} AS c{place}" for place, text in enumerate(expressions))
    return f"SELECT a.ra, b.rb, {listed} FROM a JOIN b ON a.k = b.k"


def read(session: SparkSession, expressions: list[str]) -> tuple[Output, ...]:
    schemas = {name: session.table(name).schema for name in "ab"}
    relations = {
        name: Relation(name, tuple((f.name, f.dataType.simpleString()) for f in schema.fields))
        for name, schema in schemas.items()
    }
    (graph,) = read_query(session, relations, schemas, "q", text_of(expressions)).graphs.values()
    return graph.outputs[2:]


def shown(array: pa.Array) -> list[str]:
    """Values that tell −0.0 from 0.0, and can hold any day and time."""
    if pa.types.is_timestamp(array.type):
        array = array.cast(pa.timestamp("us")).cast(pa.int64())
    return [repr(value) for value in (array.cast(pa.int32()) if pa.types.is_date32(array.type) else array).to_pylist()]


class Pairs:
    """All pairs of rows, as tasks see them: the columns of slot 0 and 1."""

    def __init__(self) -> None:
        both = list(itertools.product(range(SIZE), repeat=2))
        self.places = dict(zip("ab", (np.array(side) for side in zip(*both, strict=True)), strict=True))
        self.tables = {name: table(name) for name in "ab"}

    def values(self, expr: Expr, rows: np.ndarray[Any, Any] | None = None) -> pa.Array:
        places = self.places if rows is None else {name: side[rows] for name, side in self.places.items()}
        return values(
            expr,
            lambda ref: self.tables[ref.alias].column(ref.column).take(pa.array(places[ref.alias])).combine_chunks(),
            len(places["a"]),
        )

    def failing(self, expr: Expr) -> list[int]:
        """The pairs for which the expression cannot be computed."""
        found = []
        for place in range(SIZE * SIZE) if may_fail(expr) else ():
            try:
                self.values(expr, np.array([place]))
            except pa.ArrowInvalid:
                found.append(place)
        return found


def tried_by_spark(session: SparkSession, expressions: list[str]) -> pa.Table:
    """What Spark makes of the expressions for all pairs; NULL also where one fails."""
    logical = logical_of(session._jvm)
    project: Any = session.sql(text_of(expressions))._jdf.queryExecution().analyzed()
    first, second, *columns = items(project.projectList())
    classes: Any = session._jvm.org.apache.spark.sql.catalyst.expressions  # type: ignore[union-attr]
    tried = [logical.alias(classes.TryEval(column.child()), str(column.name())) for column in columns]
    plan = logical.project([first, second, *tried], project.child())
    datasets: Any = session._jvm.org.apache.spark.sql.classic.Dataset  # type: ignore[union-attr]
    found = DataFrame(datasets.ofRows(session._jsparkSession, plan), session).toArrow()
    return found.sort_by([("ra", "ascending"), ("rb", "ascending")])


def test_what_tasks_compute_is_what_spark_computes(session: SparkSession, mode: str) -> None:
    pairs, outputs = Pairs(), read(session, EVERY)
    assert [text for text, o in zip(EVERY, outputs, strict=True) if o.expr is None and o.source is None] == []
    exprs = [expr for o in outputs if (expr := o.expr or o.source) is not None]
    fallible = [text for text, expr in zip(EVERY, exprs, strict=True) if may_fail(expr)]
    # A hash is never NULL, so where it is, what is hashed has failed.
    expected = tried_by_spark(session, [*EVERY, *(f"hash({text})" for text in fallible)])
    columns = [column.combine_chunks() for column in expected.columns[2:]]
    failed = {
        text: np.flatnonzero(c.is_null()).tolist() for text, c in zip(fallible, columns[len(EVERY) :], strict=True)
    }
    if mode == "LEGACY":
        assert all("INTERVAL" in text for text, rows in failed.items() if rows)
    for text, expr, wanted in zip(EVERY, exprs, columns, strict=False):
        assert pairs.failing(expr) == failed.get(text, []), (text, mode)
        rows = np.setdiff1d(np.arange(SIZE * SIZE), failed.get(text, []))
        found, wanted = pairs.values(expr, rows), wanted.take(pa.array(rows))
        assert found.type == wanted.type, text
        assert shown(found) == shown(wanted), (text, mode)


def test_what_is_not_provably_the_same_is_left_to_spark(session: SparkSession, mode: str) -> None:
    texts = [*LEFT_TO_SPARK, *(LEFT_WHERE_MEMBERS_MAY_FAIL if mode == "ANSI" else ())]
    assert [t for t, o in zip(texts, read(session, texts), strict=True) if o.expr is not None] == []


def test_a_very_deep_expression_is_left_to_spark(session: SparkSession) -> None:
    short, long = read(session, [" + ".join(["a.d", *["b.d"] * terms]) for terms in (60, 200)])
    assert short.expr is not None
    assert long.expr is None


# ---------------------------------------------------------------- in the engine

CHAIN = """SELECT a.v + c.u AS total, a.v || '/' || b.w AS both, CASE WHEN b.w < -50 THEN a.v ELSE c.u END AS one,
                  a.v * 2 AS twice, b.w
           FROM a JOIN b ON a.k = b.k JOIN c ON c.j = b.j WHERE coalesce(a.v, 7) * 2.5 > c.u"""


class Chain:
    """Streams a(k, v), b(k, j, w) and c(j, u), and a checkpoint."""

    def __init__(self, spark: SparkSession, home: Path) -> None:
        self.spark, self.checkpoint = spark, str(home / "checkpoint")
        schemas = {"a": "k long, v long", "b": "k long, j long, w long", "c": "j long, u long"}
        self.streams = {name: ScriptedStream(spark, home / name, schema) for name, schema in schemas.items()}

    def arrive(self, epoch: int) -> None:
        rows = range(epoch * 20, epoch * 20 + 20)
        self.streams["a"].add([(i % 7, None if i % 5 == 0 else i) for i in rows])
        self.streams["b"].add([(i % 11, i % 4, -i) for i in rows])
        self.streams["c"].add([(i % 4, i * i) for i in rows if i % 6 == 0])

    def engine(self, sql: str = CHAIN) -> plait.Engine:
        engine = plait.Engine(self.spark, checkpoint=self.checkpoint, config=plait.Config(tasks=2))
        for name, stream in self.streams.items():
            engine.stream(name, stream.frame())
        engine.query("q", sql)
        return engine

    def expected(self, sql: str = CHAIN) -> Any:
        return batch_join({name: stream.table() for name, stream in self.streams.items()}, sql)


def plan_of(engine: plait.Engine) -> Plan:
    return Plan.from_json(engine.explain(format="json"))


@pytest.fixture
def without_second_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that Spark would have to finish are an error."""

    def finished(*_: Any) -> None:
        raise AssertionError("a second job")

    monkeypatch.setattr(ResultRows, "finished", finished)


@pytest.mark.usefixtures("without_second_jobs")
def test_a_chain_computes_its_outputs_without_a_second_job_and_goes_on_after_a_restart(
    spark: SparkSession, tmp_path: Path
) -> None:
    chain = Chain(spark, tmp_path)
    for epochs in (2, 4):
        for epoch in range(epochs - 2, epochs):
            chain.arrive(epoch)
        with chain.engine() as engine:
            (query,) = plan_of(engine).queries
            assert (query.select, query.where) == ((), ())
            assert engine.explain().count("(computed by the join's tasks)") == 4
            assert len(run_epochs(engine)) == 2
            assert bag(plait.QueryHandle(engine, "q").results().toArrow()) == chain.expected()


def test_a_query_of_a_release_that_left_its_outputs_to_spark_goes_on(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = Chain(spark, tmp_path)
    chain.arrive(0)
    with monkeypatch.context() as earlier:
        earlier.setattr(graph_rules, "output_expr", lambda node, column: None)
        with chain.engine() as engine:
            assert plan_of(engine).queries[0].select
            assert engine.explain().count("(evaluated by Spark)") == 5
            run_epochs(engine)
    chain.arrive(1)
    with chain.engine() as engine:
        run_epochs(engine)
        assert plan_of(engine).queries[0].select == ()
        assert bag(plait.QueryHandle(engine, "q").results().toArrow()) == chain.expected()


def test_one_output_that_tasks_cannot_compute_leaves_all_to_spark(spark: SparkSession, tmp_path: Path) -> None:
    chain = Chain(spark, tmp_path)
    chain.arrive(0)
    sql = "SELECT a.v + b.w AS sum, upper(concat('v', a.v, b.w)) AS loud FROM a JOIN b ON a.k = b.k"
    with chain.engine(sql) as engine:
        assert engine.explain().count("(evaluated by Spark)") == 2
        run_epochs(engine)
        wanted = chain.expected(sql.replace("concat('v', a.v, b.w)", "'v' || a.v || b.w"))
        assert bag(plait.QueryHandle(engine, "q").results().toArrow()) == wanted


@pytest.mark.parametrize("sink", [None, "noop"])
def test_an_overflow_stops_the_epoch_only_if_its_row_is_a_result(
    spark: SparkSession, tmp_path: Path, sink: str | None
) -> None:
    chain = Chain(spark, tmp_path)
    chain.arrive(0)
    sql = "SELECT a.v + b.w AS sum FROM a JOIN b ON a.k = b.k AND a.v < b.w"
    # Of the keys that meet, MOST + 1 does not pass the condition.
    chain.streams["a"].add([(100, LEAST), (101, LEAST), (102, MOST)])
    chain.streams["b"].add([(102, 0, 1)])
    chain.streams["c"].add([])

    def run() -> int:
        with chain.engine(sql) as engine:
            if sink is not None:
                plait.QueryHandle(engine, "q").sink(sink)
            return len(run_epochs(engine))

    assert run() == 2
    chain.streams["a"].add([])
    chain.streams["b"].add([(101, 0, -1)])
    chain.streams["c"].add([])
    with pytest.raises(plait.QueryError, match="column 'sum' of query 'q'") as caught:
        run()
    assert caught.value.code == "ARITHMETIC_OVERFLOW"
