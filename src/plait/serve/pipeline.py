'''A pipeline file declares streams, tables, queries and sinks; `plait run`, `explain` and `sql` read it.

    [engine]
    checkpoint = "checkpoint"             # state, results and progress; the one required key of [engine]

    [config]                              # any field of plait.Config
    tasks = 2

    [spark]                               # master, app, and any Spark setting
    master = "local[2]"
    "spark.sql.session.timeZone" = "UTC"

    [streams.orders]
    format = "json"                       # any streaming source of Spark
    path = "orders"                       # file formats (parquet, json, csv, orc, text, xml, avro) need path and schema
    schema = "id BIGINT, ts TIMESTAMP"    # DDL
    options = { maxFilesPerTrigger = 1 }  # passed to the source
    watermark = "ts, 10 minutes"          # event-time column, delay
    ttl = "7 days"                        # rows are forgotten this long after they arrived,
    needed = "status = 'open'"            # except those for which this is true
    keep = "used"                         # or "all": queries that are added later find the whole past

    [tables.regions]                      # rows that do not change, read once; any batch source of Spark
    format = "csv"
    path = "regions.csv"                  # file formats need a path; without a schema, Spark infers it
    options = { header = true }

    [queries.big]
    sql = """SELECT …"""                  # or sql_file = "big.sql"
    output_mode = "complete"              # what sinks get: append, update, complete; by default what fits the query
    since = "now"                         # which past a query begins with that is new on a checkpoint: now, state, new
    replace = false                       # true: run this text instead of another that lives under this name
    max_rows_per_epoch = 1000000          # over it, the query is parked and the others go on
    max_state = "2g"                      # the same for its share of the state

    [queries.big.sink]                    # without a sink, results are kept in the checkpoint
    type = "parquet"                      # noop, console, memory, parquet
    path = "out"

    [trigger]
    available_now = true                  # the default: read what there is, then end
    # every = "1 second"                  # or run until stopped

Paths are relative to the file.  What the file says is checked before Spark starts: a key that is not known, is
missing or has the wrong type is a `PipelineError` that names the file and the key.
'''

from __future__ import annotations

import dataclasses
import difflib
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.config import Config, bytes_of
from plait.errors import ConfigError, PipelineError
from plait.query.durations import parse_duration

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from plait.engine import Engine
    from plait.queries import QueryHandle

FILE_FORMATS = ("parquet", "json", "csv", "orc", "text", "xml", "avro")
SINKS: Mapping[str, tuple[str, ...]] = {"noop": (), "console": (), "memory": (), "parquet": ("path",)}
"""Sink types and the options each requires."""
OUTPUT_MODES = ("append", "update", "complete")
KEEP = ("used", "all")
SINCE = ("now", "state", "new")


@dataclass(frozen=True, slots=True)
class StreamSpec:
    """One `[streams.NAME]`."""

    name: str
    format: str
    path: str | None
    schema: str | None
    options: Mapping[str, str]
    watermark: tuple[str, str] | None
    ttl: str | None
    needed: str | None
    keep: str = "used"


@dataclass(frozen=True, slots=True)
class TableSpec:
    """One `[tables.NAME]`."""

    name: str
    format: str
    path: str | None
    schema: str | None
    options: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class QuerySpec:
    """One `[queries.NAME]`; `sink` is its type and options."""

    name: str
    sql: str
    sink: tuple[str, Mapping[str, Any]] | None
    output_mode: str | None = None
    since: str | None = None
    replace: bool = False
    max_rows_per_epoch: int | None = None
    max_state: str | None = None


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A pipeline file, checked.  `every` is None for available-now."""

    file: Path
    checkpoint: str
    config: Config
    app: str
    master: str | None
    settings: Mapping[str, str]
    streams: tuple[StreamSpec, ...]
    queries: tuple[QuerySpec, ...]
    every: str | None
    tables: tuple[TableSpec, ...] = ()


def load(file: Path, needs_queries: bool = True) -> Pipeline:
    """Read and check a pipeline file."""
    try:
        document = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise PipelineError(
            "PIPELINE_FILE", f"{file} cannot be read: {error.strerror}", "give an existing file"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PipelineError(
            "PIPELINE_TOML", f"{file} is not TOML: {error}", "correct it; see https://toml.io"
        ) from None

    top = _Table(file, "", document)
    top.allow("engine", "config", "spark", "streams", "tables", "queries", "trigger")
    engine = top.table("engine", required=True)
    engine.allow("checkpoint")
    spark = top.table("spark")
    settings = dict(_flatten(spark.values))
    app, master = settings.pop("app", "plait"), settings.pop("master", None)
    for key in settings:
        if not key.startswith("spark."):
            raise spark.unknown(key, ("app", "master", f"spark.{key}"))
    streams = tuple(_stream(t, name) for name, t in top.table("streams", required=True).tables("stream"))
    tables: tuple[TableSpec, ...] = ()
    if "tables" in top.values:
        tables = tuple(_table(t, name) for name, t in top.table("tables").tables("table"))
    _refuse_same_names(top, streams, tables)
    queries: tuple[QuerySpec, ...] = ()
    if needs_queries or "queries" in top.values:
        queries = tuple(_query(t, name) for name, t in top.table("queries", required=True).tables("query"))
    return Pipeline(
        file=file,
        checkpoint=engine.path("checkpoint", required=True) or "",
        config=_config(top.table("config")),
        app=app,
        master=master,
        settings=settings,
        streams=streams,
        queries=queries,
        every=_every(top.table("trigger")),
        tables=tables,
    )


def build(pipeline: Pipeline, engine: Engine, spark: SparkSession) -> dict[str, QueryHandle]:
    """Register the streams, tables, queries and sinks of a pipeline with an engine."""
    for stream in pipeline.streams:
        frame = read_stream(pipeline, stream, spark)
        engine.stream(stream.name, frame, ttl=stream.ttl, needed=stream.needed, keep=stream.keep)
    for table in pipeline.tables:
        engine.table(table.name, read_table(pipeline, table, spark))
    return {query.name: define(engine, query) for query in pipeline.queries}


def define(engine: Engine, query: QuerySpec) -> QueryHandle:
    """Register a query of a pipeline, with its sink."""
    register = engine.replace if query.replace else engine.query
    limits = query.max_rows_per_epoch, query.max_state
    handle = register(query.name, query.sql, query.output_mode, query.since, *limits)
    if query.sink is not None:
        kind, options = query.sink
        handle.sink(kind, **options)
    return handle


def read_stream(pipeline: Pipeline, stream: StreamSpec, spark: SparkSession) -> DataFrame:
    """A stream of a pipeline, opened."""
    from pyspark.errors import PySparkException

    where = f"{pipeline.file}: [streams.{stream.name}]"
    reader = spark.readStream.format(stream.format).options(**stream.options)
    try:
        if stream.schema is not None:
            reader = reader.schema(stream.schema)
        frame = reader.load(stream.path) if stream.path is not None else reader.load()
        if stream.watermark is not None:
            frame = frame.withWatermark(*stream.watermark)
    except PySparkException as error:
        said = str(error).strip().splitlines()[0]
        raise PipelineError("PIPELINE_STREAM", f"{where} cannot be opened: {said}", "correct the stream") from None
    if stream.watermark is not None and stream.watermark[0] not in frame.columns:
        known = ", ".join(frame.columns)
        raise PipelineError(
            "PIPELINE_STREAM", f"{where} watermark names {stream.watermark[0]!r}", f"use one of its columns: {known}"
        )
    return frame


def read_table(pipeline: Pipeline, table: TableSpec, spark: SparkSession) -> DataFrame:
    """A table of a pipeline, opened."""
    from pyspark.errors import PySparkException

    reader = spark.read.format(table.format).options(**table.options)
    try:
        if table.schema is not None:
            reader = reader.schema(table.schema)
        return reader.load(table.path) if table.path is not None else reader.load()
    except PySparkException as error:
        said = str(error).strip().splitlines()[0]
        where = f"{pipeline.file}: [tables.{table.name}]"
        raise PipelineError("PIPELINE_TABLE", f"{where} cannot be opened: {said}", "correct the table") from None


def _stream(table: _Table, name: str) -> StreamSpec:
    table.allow("format", "path", "schema", "options", "watermark", "ttl", "needed", "keep")
    kind = table.text("format", required=True) or ""
    by_file = kind.lower() in FILE_FORMATS
    watermark = table.text("watermark")
    split = None
    if watermark is not None:
        column, comma, delay = (part.strip() for part in watermark.partition(","))
        if not (column and comma and delay):
            raise table.wrong("watermark", 'a column and a delay, such as "ts, 10 minutes"')
        split = (column, delay)
    return StreamSpec(
        name=name,
        format=kind,
        path=table.path("path", required=by_file),
        schema=table.text("schema", required=by_file),
        options=dict(_flatten(table.table("options").values)),
        watermark=split,
        ttl=_ttl(table),
        needed=_needed(table),
        keep=_one_of(table, "keep", KEEP) or "used",
    )


def _table(table: _Table, name: str) -> TableSpec:
    table.allow("format", "path", "schema", "options")
    kind = table.text("format", required=True) or ""
    return TableSpec(
        name=name,
        format=kind,
        path=table.path("path", required=kind.lower() in FILE_FORMATS),
        schema=table.text("schema"),
        options=dict(_flatten(table.table("options").values)),
    )


def _refuse_same_names(top: _Table, streams: Iterable[StreamSpec], tables: Iterable[TableSpec]) -> None:
    """SQL does not tell Orders from orders, nor a stream from a table."""
    seen: dict[str, str] = {}
    for section, name in (*(("streams", s.name) for s in streams), *(("tables", t.name) for t in tables)):
        here, before = f"[{section}.{name}]", seen.get(name.lower())
        if before is not None:
            raise PipelineError(
                "PIPELINE_VALUE", f"{top.file}: {here} and {before} have one name", "give one of them another name"
            )
        seen[name.lower()] = here


def _ttl(table: _Table) -> str | None:
    ttl = table.text("ttl")
    try:
        if ttl is not None:
            parse_duration(ttl)
    except ValueError:
        raise table.wrong("ttl", 'a length of time, such as "7 days"') from None
    return ttl


def _needed(table: _Table) -> str | None:
    needed = table.text("needed")
    if needed is not None and "ttl" not in table.values:
        raise PipelineError(
            "PIPELINE_MISSING", f"{table.where} needed is given, but ttl is missing", 'add ttl = "7 days", or drop it'
        )
    return needed


def _query(table: _Table, name: str) -> QuerySpec:
    table.allow("sql", "sql_file", "output_mode", "sink", "since", "replace", "max_rows_per_epoch", "max_state")
    mode = _one_of(table, "output_mode", OUTPUT_MODES)
    replaces = table.values.get("replace", False)
    if not isinstance(replaces, bool):
        raise table.wrong("replace", "true or false")
    if ("sql" in table.values) == ("sql_file" in table.values):
        raise PipelineError(
            "PIPELINE_MISSING", f"{table.where} needs either sql or sql_file", "give exactly one of them"
        )
    sql = table.text("sql")
    if sql is None:
        sql_file = Path(table.path("sql_file", required=True) or "")
        try:
            sql = sql_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise PipelineError(
                "PIPELINE_FILE",
                f"{table.where} sql_file {sql_file} cannot be read: {error}",
                "give an existing text file",
            ) from None
    sink = _sink(table.table("sink")) if "sink" in table.values else None
    since = _one_of(table, "since", SINCE)
    return QuerySpec(name, sql, sink, mode, since, replaces, *_limits(table))


def _limits(table: _Table) -> tuple[int | None, str | None]:
    """`max_rows_per_epoch` and `max_state`."""
    most, state = table.values.get("max_rows_per_epoch"), table.text("max_state")
    if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 1):
        raise table.wrong("max_rows_per_epoch", "a number of rows above zero")
    try:
        if state is not None and bytes_of("max_state", state) < 1:
            raise table.wrong("max_state", "a size above zero, such as 512m or 2g")
    except ConfigError:
        raise table.wrong("max_state", "a size, such as 512m or 2g") from None
    return most, state


def _one_of(table: _Table, key: str, known: tuple[str, ...]) -> str | None:
    value = table.text(key)
    if value is not None and value not in known:
        raise table.wrong(key, f"one of: {', '.join(known)}")
    return value


def _sink(table: _Table) -> tuple[str, Mapping[str, Any]]:
    kind = table.text("type", required=True) or ""
    if kind not in SINKS:
        near = _nearest(kind, SINKS)
        raise PipelineError(
            "PIPELINE_VALUE",
            f"{table.where} type = {kind!r} is not a sink of a pipeline file{near}",
            f"use one of: {', '.join(SINKS)}",
        )
    table.allow("type", *SINKS[kind])
    return kind, {key: table.path(key, required=True) for key in SINKS[kind]}


def _config(table: _Table) -> Config:
    table.allow(*(field.name for field in dataclasses.fields(Config)))
    try:
        return Config(**table.values)
    except (ConfigError, TypeError) as error:
        cause, remedy = (
            (error.cause, error.remedy) if isinstance(error, ConfigError) else (str(error), "correct the value")
        )
        raise PipelineError("PIPELINE_VALUE", f"{table.where} {cause}", remedy) from None


def _every(table: _Table) -> str | None:
    table.allow("available_now", "every")
    every = table.text("every")
    now = table.values.get("available_now", every is None)
    if not isinstance(now, bool):
        raise table.wrong("available_now", "true or false")
    if now == (every is not None):
        raise PipelineError(
            "PIPELINE_VALUE",
            f"{table.where} must say when to run",
            'give either available_now = true or every = "1 second"',
        )
    return every


@dataclass(frozen=True, slots=True)
class _Table:
    """A TOML table that knows where it stands, so that errors can say it."""

    file: Path
    name: str
    values: Mapping[str, Any]

    @property
    def where(self) -> str:
        return f"{self.file}: [{self.name}]" if self.name else f"{self.file}:"

    def allow(self, *known: str) -> None:
        for key in self.values:
            if key not in known:
                raise self.unknown(key, known)

    def unknown(self, key: str, known: Iterable[str]) -> PipelineError:
        known = tuple(known)
        return PipelineError(
            "PIPELINE_KEY",
            f"{self.where} {key!r} is not a known key{_nearest(key, known)}",
            f"known: {', '.join(known)}",
        )

    def wrong(self, key: str, expected: str) -> PipelineError:
        return PipelineError("PIPELINE_VALUE", f"{self.where} {key} = {self.values[key]!r}", f"give {expected}")

    def text(self, key: str, required: bool = False) -> str | None:
        value = self.values.get(key)
        if value is None:
            if required:
                raise PipelineError("PIPELINE_MISSING", f"{self.where} {key} is missing", f"add {key} = …")
            return None
        if not isinstance(value, str) or not value.strip():
            raise self.wrong(key, "a text in quotes")
        return value

    def path(self, key: str, required: bool = False) -> str | None:
        """A path as Spark takes it: URIs as they are, others relative to the file."""
        value = self.text(key, required)
        return value if value is None or "://" in value else str((self.file.parent / value).absolute())

    def table(self, key: str, required: bool = False) -> _Table:
        name = f"{self.name}.{key}" if self.name else key
        value = self.values.get(key)
        if value is None:
            if required:
                raise PipelineError("PIPELINE_MISSING", f"{self.file}: [{name}] is missing", f"add a table [{name}]")
            value = {}
        if not isinstance(value, dict):
            raise self.wrong(key, f"a table, [{name}]")
        return _Table(self.file, name, value)

    def tables(self, what: str) -> list[tuple[str, _Table]]:
        if not self.values:
            raise PipelineError("PIPELINE_MISSING", f"{self.where} holds no {what}", f"add a table [{self.name}.NAME]")
        return [(key, self.table(key)) for key in self.values]


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    """Nested tables as dotted keys and Spark's spelling of values: TOML reads a.b = true as {a: {b: True}}."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, str(value).lower() if isinstance(value, bool) else str(value)


def _nearest(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, tuple(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
