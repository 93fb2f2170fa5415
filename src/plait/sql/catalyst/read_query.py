"""SQL text over registered streams becomes join graphs, and what Spark makes of their rows: Catalyst's plan is read.

Catalyst parses, resolves names and types, inlines sub-queries and CTEs, pushes filters down, infers that keys are not
NULL and simplifies; we only read what it arrives at.  The streams are represented by empty stubs, temporary views in a
*cloned* session, so that they meet neither the user's views nor a streaming source; every column of a stub carries in
its metadata which stream it is of, and keeps that mark through all rewriting.  The clone is made for every query, since
functions and settings may have changed; the stubs are made once.

Nothing is executed: a text that is not a query is refused before Spark could analyse it.  Cost, for three streams and
once the JVM is warm: 40 calls of 0.1 ms, 10 ms for Catalyst, 2 ms for reading its plans; `benchmarks/reading.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

from pyspark.errors import AnalysisException, IllegalArgumentException, ParseException
from pyspark.logger import PySparkLogger
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructField, StructType

from plait.errors import QueryError, StreamError
from plait.query.durations import parse_duration
from plait.query.graph import JoinGraph
from plait.query.relation import Relation
from plait.sql.answer.convert import Converter, drawn, left_binary
from plait.sql.answer.final_groups import closing_of
from plait.sql.answer.grouping import grouping_of
from plait.sql.answer.residual import Residual, Rows
from plait.sql.catalyst import hints
from plait.sql.catalyst.allow_list import refuse_expression, tables_read
from plait.sql.catalyst.expressions import Node, Printer, prints_faithfully, resolve, unprintable
from plait.sql.catalyst.logical import logical_of
from plait.sql.catalyst.maintain import Maintained
from plait.sql.catalyst.plan_reader import STREAM_KEY
from plait.sql.catalyst.readable_windows import readable_windows
from plait.sql.catalyst.refusals import always_false, not_a_stream, refuse_constructs, unknown_stream
from plait.sql.catalyst.scala import items
from plait.sql.join.graph_rules import Draft, build_graph
from plait.sql.join.multiway import MultiwayJoin, PlanNode, two_step_convert, written_inputs

_DELAY_KEY = "spark.watermarkDelayMs"
# Keywords that are common names of columns, and mean a column wherever our text has them.
_HARMLESS = {
    "NAME",
    "DATE",
    "TIMESTAMP",
    "YEAR",
    "MONTH",
    "DAY",
    "HOUR",
    "SOURCE",
    "TARGET",
    "COMMENT",
    "LOCATION",
    "X",
}
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

# The optimiser should depend on the text alone: no statistics, no run-time filters, no caches of the user's.
_SETTINGS = {
    "spark.sql.cbo.enabled": "false",
    "spark.sql.cbo.joinReorder.enabled": "false",
    "spark.sql.optimizer.runtime.bloomFilter.enabled": "false",
    "spark.sql.optimizer.dynamicPartitionPruning.enabled": "false",
}

_STUBS: WeakKeyDictionary[SparkSession, dict[str, tuple[StructType, Any]]] = WeakKeyDictionary()
"""The stubs that were made for a session, by stream, with the schema they were made for."""
_MOST_STUBS = 256


@dataclass(eq=False)
class ReadQuery:
    """A query as the engine runs it: join graphs by name, and what Spark makes of their rows."""

    sql: str
    graphs: dict[str, JoinGraph]
    residual: Residual | None
    """None where the rows of the only graph are the answer."""
    stages: Stages


@dataclass(frozen=True)
class Stages:
    """How the plan was converted, for people."""

    before: str
    after: str
    left_binary: tuple[str, ...]


@dataclass
class _Reading:
    """What all parts of one query have in common while it is read."""

    spark: SparkSession
    session: Any
    sql: str
    relations: Mapping[str, Relation]
    written: dict[int, str]
    ttls: list[tuple[str, str]]

    def names(self, join: MultiwayJoin) -> tuple[str, ...]:
        """What the streams of a join are called."""
        return _distinct([self.written.get(leaf.id, str(leaf.stream)) for leaf in join.leaves])

    def graph(
        self,
        join: MultiwayJoin,
        outputs: tuple[str, ...],
        ttls: Mapping[str, int],
        above: Maintained | None = None,
        is_answer: bool = False,
    ) -> JoinGraph:
        """The join graph of a multi-way join of streams, with the aggregate above it if tasks can make it.

        `is_answer`: its rows are the answer, which nothing else is made of.
        """
        names = self.names(join)
        columns = tuple(leaf.columns.names for leaf in join.leaves)
        draft = Draft(
            join=join,
            names=names,
            output_names=outputs,
            relations=self.relations,
            printer=Printer(names, columns, reserved_words(self.spark._jvm)),
            pending=list(join.conjuncts),
            filters=[{} for _ in join.leaves],
            ttls={name: ttl for name, ttl in ttls.items() if name in names},
            computes=is_answer,
        )
        graph = build_graph(self.sql, draft)
        doubtful = [node for node in draft.left_to_spark if not prints_faithfully(node)]
        if doubtful and not _reads_back(self.spark, self.session, draft, doubtful):
            for node in doubtful:
                if not _reads_back(self.spark, self.session, draft, [node]):
                    raise unprintable(draft.printer.over_join(node))
        if above is None:
            return graph
        return replace(graph, grouping=grouping_of(above, draft))


def read_query(
    spark: SparkSession, relations: Mapping[str, Relation], schemas: Mapping[str, StructType], name: str, sql: str
) -> ReadQuery:
    """A query over the registered streams, or a QueryError that says what cannot be run."""
    session = _stub_session(spark)
    with _active(spark, session):
        return _read_query(spark, session, relations, schemas, name, sql)


def _read_query(
    spark: SparkSession,
    session: Any,
    relations: Mapping[str, Relation],
    schemas: Mapping[str, StructType],
    name: str,
    sql: str,
) -> ReadQuery:
    jvm: Any = spark._jvm
    logical = logical_of(jvm)
    known = sorted(relations)
    state = session.sessionState()
    with _explained(known, sql):
        parsed = state.sqlParser().parsePlan(sql)
        case_sensitive = bool(state.conf().caseSensitiveAnalysis())
        used = _streams_read(parsed, logical.reader.json(parsed), known, case_sensitive)
        _add_stubs(spark, state.catalog(), {stream: schemas[stream] for stream in used})
        ttls = hints.read_ttls(parsed) if hints.NAME in sql.upper() else []
        execution = _analyse(jvm, state, hints.without_ttls(parsed, logical.to_seq) if ttls else parsed)
        analysed = execution.analyzed()
        outline = logical.reader.outline(analysed)
        refuse_constructs(analysed, outline)
        written = written_inputs(outline.root, known)
        optimised, windows = readable_windows(execution.optimizedPlan(), logical)
    mirror = logical.reader.plan(optimised)
    plan = two_step_convert(PlanNode.of(mirror))
    reading = _Reading(spark, session, sql, relations, dict(written), ttls)
    columns = tuple(column for _, column, _ in outline.root.output)
    converter = Converter(name, logical, {first: i for i, (first, _) in enumerate(written)}, known)
    root = converter.recipe(plan)
    if not converter.sources:
        raise always_false()
    joins = [source.join for source in converter.sources]
    streams = {n: leaf.relation for j in joins for n, leaf in zip(reading.names(j), j.leaves, strict=True)}
    kept = hints.ttl_by_alias(ttls, streams)
    stages = Stages(_plain(optimised), "\n".join(drawn(plan)), tuple(left_binary(plan)))
    if isinstance(root, Rows) and root.maintained is None:
        return ReadQuery(sql, {name: reading.graph(root.source.join, columns, kept, is_answer=True)}, None, stages)
    for source in converter.sources:
        source.graph = reading.graph(source.join, source.output_names, kept, source.maintained)
        if source.maintained is not None:
            names = reading.names(source.join)
            source.closing = closing_of(source.maintained, source.join, names, relations, windows)
    types = tuple(kind for _, _, kind in mirror.root.output)
    output = tuple(zip(columns, types, strict=True))
    residual = Residual(spark, converter.logical, root, output, tuple(converter.notes), tuple(converter.sources))
    return ReadQuery(sql, {s.name: s.graph for s in converter.sources if s.graph is not None}, residual, stages)


def _plain(plan: Any) -> str:
    """A plan as Spark draws it, without the ids of expressions."""
    return re.sub(r"#\d+L?", "", str(plan.toString())).rstrip()


def _streams_read(parsed: Any, text: str, known: list[str], case_sensitive: bool) -> list[str]:
    """The registered streams that a parsed text names; it is refused if it names others, before any is opened."""
    names = {name if case_sensitive else name.lower(): name for name in known}
    found = []
    for name in tables_read(parsed, known, case_sensitive, text=text):
        stream = names.get(name if case_sensitive else name.lower())
        if stream is None:
            raise not_a_stream("", name.replace(", ", "."), known) if ", " in name else unknown_stream(name, known)
        found.append(stream)
    return found


def _reads_back(spark: SparkSession, session: Any, draft: Draft, nodes: list[Node]) -> bool:
    """Whether the nodes' texts, parsed and optimised again over a stub of the joined rows, are the nodes again."""
    jvm: Any = spark._jvm
    columns = [node for leaf in draft.join.leaves for node in leaf.columns]
    schema = jvm.org.apache.spark.sql.types.StructType()
    for alias, leaf in zip(draft.names, draft.join.leaves, strict=True):
        for node in leaf.columns:
            schema = schema.add(f"{alias}.{node.column.name if node.column else ''}", node.jvm.dataType(), True)
    joined = session.createDataFrame(spark._jsc.emptyRDD(), schema)
    known = {a.exprId().id(): node for a, node in zip(items(joined.logicalPlan().output()), columns, strict=True)}
    to_seq = jvm.PythonUtils.toSeq
    texts = to_seq([draft.printer.over_join(node) for node in nodes])
    try:
        with _quiet():
            plan = joined.selectExpr(texts).queryExecution().optimizedPlan()
    except (AnalysisException, ParseException):
        return False
    mirror = logical_of(jvm).reader.plan(plan)
    again = [resolve(written, known, to_seq) for _, written in mirror.root.expressions]
    return len(again) == len(nodes) and all(
        one.template == other.template and one.jvm.semanticEquals(other.jvm)
        for one, other in zip(nodes, again, strict=True)
    )


def _stub_session(spark: SparkSession) -> Any:
    """A clone of the user's session, functions and settings included, in which stubs meet none of the user's views."""
    session = spark._jsparkSession.cloneSession()
    settings = session.conf()
    for key, value in _SETTINGS.items():
        settings.set(key, value)
    return session


@contextmanager
def _active(spark: SparkSession, session: Any) -> Iterator[None]:
    """Makes a session the thread's active one meanwhile: Spark parses and prints by the active session's settings."""
    sessions = logical_of(spark._jvm).sessions
    before = sessions.getActiveSession()
    sessions.setActiveSession(session)
    try:
        yield
    finally:
        if before.isDefined():
            sessions.setActiveSession(before.get())
        else:
            sessions.clearActiveSession()


def _add_stubs(spark: SparkSession, catalog: Any, schemas: Mapping[str, StructType]) -> None:
    """Puts temporary views of empty streams into the catalog of a cloned session."""
    made = _STUBS.setdefault(spark, {})
    for name, schema in schemas.items():
        known = made.get(name)
        if known is None or known[0] != schema:
            while len(made) >= _MOST_STUBS:
                del made[next(iter(made))]
            known = made[name] = schema, _stub(spark, name, schema)
        catalog.createTempView(name, known[1], True)


def _stub(spark: SparkSession, name: str, schema: StructType) -> Any:
    """A temporary view without rows, as a session's catalog holds it: making one takes longer than all of Catalyst."""
    jvm: Any = spark._jvm
    session = spark._jsparkSession.cloneSession()
    marked = StructType([StructField(f.name, f.dataType, f.nullable, {STREAM_KEY: name}) for f in schema.fields])
    kinds = jvm.org.apache.spark.sql.types.DataType.fromJson(marked.json())
    session.createDataFrame(spark._jsc.emptyRDD(), kinds).createOrReplaceTempView(name)
    return session.sessionState().catalog().getRawTempView(name).get()


def _analyse(jvm: Any, state: Any, parsed: Any) -> Any:
    """The execution of a plan, analysed with CTEs inlined: each of their uses then has columns of its own."""
    execution = _execution(jvm, state, parsed)
    analysed = execution.analyzed()
    if analysed.nodeName() != "WithCTE":
        return execution
    inline = jvm.org.apache.spark.sql.catalyst.optimizer.InlineCTE
    return _execution(jvm, state, inline(True, False, False).apply(analysed))


def _execution(jvm: Any, state: Any, plan: Any) -> Any:
    return state.executePlan(plan, _skip(jvm))


@lru_cache(maxsize=2)
def _skip(jvm: Any) -> Any:
    """Commands are not executed."""
    return jvm.org.apache.spark.sql.execution.CommandExecutionMode.SKIP()


@lru_cache(maxsize=2)
def reserved_words(jvm: Any) -> frozenset[str]:
    """The words that, unquoted, may mean something else than a column; a test tries all keywords."""
    words = jvm.org.apache.spark.sql.catalyst.util.SQLKeywordUtils.keywords()
    return frozenset(str(words.mkString(" ")).split()) - _HARMLESS


def _distinct(names: list[str]) -> tuple[str, ...]:
    """Alias names told apart by a suffix: t, t_2, t_3."""
    found: list[str] = []
    for name in names:
        number, unique = 1, name
        while unique.lower() in (other.lower() for other in found):
            number += 1
            unique = f"{name}_{number}"
        found.append(unique)
    return tuple(found)


@contextmanager
def _explained(known: list[str], sql: str) -> Iterator[None]:
    """Spark's errors as ours; its own logging of them is kept quiet, since the error says it all."""
    try:
        with _quiet():
            yield
    except (ParseException, IllegalArgumentException) as error:
        raise QueryError("SYNTAX", said(error), hints.spelling(sql) or "correct the SQL text") from error
    except AnalysisException as error:
        raise _explain(error, known) from error


@contextmanager
def _quiet() -> Iterator[None]:
    # Asked for by this class only: a plain logger of that name would break pyspark's own logging.
    logger = PySparkLogger.getLogger("SQLQueryContextLogger")
    was_disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was_disabled


def _explain(error: AnalysisException, known: list[str]) -> QueryError:
    condition = error.getCondition() or ""
    detail: dict[str, str] = error.getMessageParameters() or {}
    if condition.startswith("TABLE_OR_VIEW_NOT_FOUND"):
        return unknown_stream(detail.get("relationName", "").replace("`", ""), known)
    if condition.startswith(("UNRESOLVED_COLUMN", "UNRESOLVED_USING_COLUMN")):
        name = detail.get("objectName", detail.get("colName", "")).replace("`", "")
        close = detail.get("proposal", detail.get("suggestion", "")).replace("`", "")
        return QueryError(
            "UNKNOWN_COLUMN", f"no column is called {name}", f"did you mean one of: {close}" if close else ""
        )
    return QueryError("ANALYSIS", said(error), "correct the query as Spark's message says")


def said(error: Any) -> str:
    """What Spark says of a text that it cannot read, in one line: without the plan that follows, and the SQL state."""
    text = str(error).strip()
    return re.sub(r"\s*SQLSTATE: \w+", "", text.split("\n\n")[0].split(";\n")[0]).replace("\n", " ").strip()


def table_of(name: str, df: DataFrame) -> Relation:
    """A DataFrame as the planner sees it: its columns."""
    if not _NAME.fullmatch(name):
        raise StreamError("NAME", f"{name!r} cannot name a stream", "use letters, digits and underscores")
    seen: set[str] = set()
    for field in df.schema.fields:
        if field.name.lower() in seen:
            raise StreamError(
                "DUPLICATE_COLUMN", f"stream {name} has two columns called {field.name!r}", "rename or drop one of them"
            )
        seen.add(field.name.lower())
    return Relation(name, tuple((field.name, field.dataType.simpleString()) for field in df.schema.fields))


def relation_of(name: str, df: DataFrame, ttl: str | None = None, needed: str | None = None) -> Relation:
    """A stream as the planner sees it: columns, event time and delay as `withWatermark` left them, and its TTL."""
    if not df.isStreaming:
        remedy = "read it with spark.readStream, or register it with engine.table(…)"
        raise StreamError("NOT_STREAMING", f"the DataFrame of {name} is not streaming", remedy)
    plain = table_of(name, df)
    times = [field for field in df.schema.fields if _DELAY_KEY in field.metadata]
    if len(times) > 1:
        raise StreamError(
            "WATERMARK",
            f"stream {name} has watermarks on several columns: {', '.join(f.name for f in times)}",
            "call withWatermark once, on the column that the queries' time bounds use",
        )
    try:
        ttl_us = None if ttl is None else parse_duration(str(ttl))
    except ValueError as error:
        raise StreamError("TTL", f"the TTL of stream {name}: {error}", 'write, for example, "7 days"') from error
    if needed is not None:
        _check_needed(name, df, ttl, needed)
    corrupt = df.sparkSession.conf.get("spark.sql.columnNameOfCorruptRecord", "_corrupt_record")
    return replace(
        plain,
        corrupt=corrupt if corrupt in dict(plain.columns) else None,
        time_column=times[0].name if times else None,
        delay_ms=int(times[0].metadata[_DELAY_KEY]) if times else None,
        ttl_us=ttl_us,
        needed=needed,
    )


def _check_needed(name: str, df: DataFrame, ttl: str | None, needed: str) -> None:
    """Refuse a predicate that is no condition over one row of the stream, or has no TTL to be an exception from."""
    remedy = "write a condition over the stream's own columns, for example needed=\"status = 'open'\""
    if ttl is None:
        cause = f"stream {name} says which rows are needed longer than its TTL, but has none"
        raise StreamError("NEEDED", cause, 'give a TTL as well, for example ttl="7 days"')
    if not isinstance(needed, str):
        raise StreamError("NEEDED", f"needed of stream {name} is a {type(needed).__name__}, not SQL text", remedy)
    session = _stub_session(df.sparkSession)
    state = session.sessionState()
    parser = state.sqlParser()
    _add_stubs(df.sparkSession, state.catalog(), {name: df.schema})
    try:
        with _explained([], needed), _active(df.sparkSession, session):
            refuse_expression(parser.parseExpression(needed))
            _refuse_open_comment(parser, needed)
            analysed = session.table(name).filter(needed).queryExecution().analyzed()
            refuse_constructs(analysed, logical_of(df.sparkSession._jvm).reader.outline(analysed))
    except QueryError as error:
        cause = f"needed={needed!r} of stream {name}: {error.cause}"
        if error.code in ("UNKNOWN_COLUMN", "NON_DETERMINISTIC", "PYTHON_UDF"):
            raise StreamError(error.code, cause, error.remedy) from error
        raise StreamError("NEEDED", cause, remedy) from error


def _refuse_open_comment(parser: Any, needed: str) -> None:
    """Refuse a text that, put into a longer one, would make a comment of what follows it."""
    try:
        parser.parseExpression(f"({needed})")
    except ParseException as error:
        raise QueryError("NEEDED", "it ends in a comment, which would hide what follows it", "") from error
