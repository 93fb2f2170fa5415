"""The façade: `Engine` takes streams and queries, `Run` is the engine at work, `QueryHandle` one query of it."""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import tempfile
import warnings
from collections import deque
from functools import partial, reduce
from itertools import count
from typing import Any

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from plait.catalog.registry import catalog_of, refuse_changes
from plait.config import Config
from plait.errors import PlaitError, QueryError, RecomputationWarning, StreamError
from plait.explain import explain, explain_stages
from plait.query.graph import JoinGraph
from plait.query.plan import Plan
from plait.query.relation import Relation
from plait.runtime.answers import Answer, LiveResults, Sources
from plait.runtime.answers import output_mode as choose_mode
from plait.runtime.bucketise import bucketised
from plait.runtime.deliver import catch_up
from plait.runtime.epoch import Driver, refuse_gap, run_epoch
from plait.runtime.failures import translated
from plait.runtime.rows import ResultRows
from plait.runtime.session import forget_origins
from plait.runtime.sinks import Keep, Sink, make_sink, refuse_appending
from plait.share.reoptimise import Planner
from plait.share.retention import final_us, with_ttls
from plait.sql.catalyst import ReadQuery, read_query, relation_of, table_of
from plait.sql.residual import Residual, only_aggregate
from plait.state.checkpoint import Checkpoint


class Engine:
    """Joins registered streams by registered queries, all in one Spark streaming query.

    Everything durable lies below `checkpoint`; starting again on it continues exactly where the last commit was.
    One engine at a time holds a checkpoint; use it in a `with` block, or call `close()`.
    """

    def __init__(self, spark: SparkSession, checkpoint: str, config: Config | None = None) -> None:
        if not hasattr(spark, "_jsparkSession"):
            raise StreamError(
                "SPARK_CONNECT", "a Spark Connect session has no Catalyst to ask", "use a classic session"
            )
        self.spark = spark
        settings = {k: v for k, v in spark.sparkContext.getConf().getAll() if k.startswith("spark.plait.")}
        self.config = (config or Config()).with_spark_settings(settings)
        self.checkpoint = Checkpoint(checkpoint, self.config).open()
        self._frames: dict[str, DataFrame] = {}
        self._relations: dict[str, Relation] = {}
        self._tables: set[str] = set()
        self._graphs: dict[str, JoinGraph] = {}
        self._queries: dict[str, ReadQuery] = {}
        self._answers: dict[str, Answer] = {}
        self._sinks: dict[str, Sink] = {}
        self._known: set[str] = set()
        """Result files in force that this engine has written or verified."""
        self._run: Run | None = None
        self._planner: Planner | None = None
        self._closed = False

    def stream(self, name: str, df: DataFrame, ttl: str | None = None, needed: str | None = None) -> None:
        """Registers a streaming DataFrame.  Its watermark comes from `df.withWatermark`; `ttl` bounds its state.

        With a TTL a row can be matched for that long after the epoch in which it arrived; a query may give it by the
        hint `STATE_TTL` instead.  `needed` is an SQL condition over the row's own columns: a row for which it is true
        when it arrives outlives the TTL.
        """
        self._refuse_if_running("a stream cannot be added")
        if not hasattr(df, "_jdf"):
            raise StreamError(
                "NOT_STREAMING", f"{name} is not a DataFrame of a classic session", "read it with spark.readStream"
            )
        if name in self._relations:
            raise StreamError("DUPLICATE_STREAM", f"a stream called {name!r} is registered already", "use another name")
        self._relations[name] = relation_of(name, df, ttl, needed)
        self._planner = None
        self._frames[name] = df

    def table(self, name: str, df: DataFrame) -> None:
        """Registers a batch DataFrame that queries may join with streams.

        Its rows are read once, with the first epoch, and never again: what they are then they stay.
        """
        self._refuse_if_running("a table cannot be added")
        if name in self._relations:
            raise StreamError("DUPLICATE_STREAM", f"a stream called {name!r} is registered already", "use another name")
        if not hasattr(df, "_jdf") or df.isStreaming:
            raise StreamError(
                "NOT_A_TABLE", f"{name} is not a batch DataFrame", "read it with spark.read, or use engine.stream(…)"
            )
        self._relations[name] = table_of(name, df)
        self._tables.add(name)
        self._planner = None
        self._frames[name] = df

    def query(self, name: str, sql: str, output_mode: str | None = None) -> QueryHandle:
        """Registers a query over the streams; it is read, checked and planned at once, and runs from `start` on.

        `output_mode` says what sinks get, in Spark's words: rows as they are joined (`append`, of queries that only
        join, filter and project), the whole answer after every epoch (`complete`, of all others), the groups that have
        changed (`update`, of aggregates), or those that have become final (`append`, of aggregates by windows of event
        time).
        """
        self._refuse_if_running("a query cannot be added")
        if name in self._queries:
            raise QueryError("DUPLICATE_QUERY", f"a query called {name!r} is registered already", "use another name")
        if not (name.isascii() and name.isidentifier()):
            raise QueryError("NAME", f"{name!r} cannot name a query", "use letters, digits and underscores")
        schemas = {stream: df.schema for stream, df in self._frames.items()}
        read = read_query(self.spark, self._relations, schemas, name, sql)
        self._refuse_tables_only(name, read)
        with_ttls({**self._graphs, **read.graphs}, self._relations)
        mode = choose_mode(name, read.residual, output_mode)
        wait_us = self._final_us(name, read.residual) if mode == "append" and read.residual is not None else 0
        self._queries[name] = read
        self._graphs |= read.graphs
        self._sinks |= {graph: Keep() for graph in read.graphs}
        if read.residual is not None:
            self._answers[name] = Answer(name, read.residual, mode, Keep(), wait_us)
            _warn_of_recomputation(name, read.residual)
        self._planner = None
        return QueryHandle(self, name)

    def sql(self, text: str, name: str | None = None, output_mode: str | None = None) -> QueryHandle:
        """Registers a query like `query`, under a name of its own choosing unless one is given."""
        taken = {n.lower() for n in self._queries}
        free = (f"q{i}" for i in count(1))
        return self.query(name or next(n for n in free if n not in taken), text, output_mode)

    @property
    def plan(self) -> Plan:
        """The plan for all registered queries together: the one in force while the engine runs."""
        return self._planned().plan

    def explain(self, name: str | None = None, format: str = "text", stages: bool = False) -> str:
        """The join graphs, stores, probe orders and exchanges, as `text`, `json` or `dot`.

        Once the engine has run, the text also shows estimates against what was counted, and the orders' history.
        With `stages`: how the plan of query `name` (of all, without one) was converted, and what is maintained.
        """
        if name is not None and name not in self._queries:
            known = ", ".join(self._queries) or "none registered yet"
            raise QueryError("NO_QUERY", f"no query is called {name!r}", f"use one of: {known}")
        if stages:
            return "\n".join(explain_stages(n, self._queries[n]) for n in ([name] if name else self._queries))
        planner = self._planned()
        return explain(planner.plan, self._graphs, self._relations, format, planner.report())

    def _planned(self) -> Planner:
        """The planner of all registered queries; a new one when queries have been added."""
        if not self._graphs:
            raise QueryError("NO_QUERY", "the engine has no query", "register one with engine.query(name, sql)")
        if self._planner is None:
            self._planner = Planner(dict(self._graphs), dict(self._relations), self.config)
        return self._planner

    def start(self, available_now: bool = False, every: str | None = None) -> Run:
        """Starts all queries: over what is available now, or for ever (`every` fixes the pace, such as "1 second")."""
        self._refuse_if_running("it cannot be started")
        if available_now and every is not None:
            raise StreamError("TRIGGER", "available_now and every exclude each other", "give one of them")
        planner = self._planned()
        if self._run is None and (learnt := self.checkpoint.statistics()) is not None:
            planner.recall(learnt)
        plan = planner.plan
        live = self.checkpoint.log.live()
        refuse_gap(self.checkpoint)
        rows = ResultRows(self.spark, plan, self.checkpoint, self._known)
        inputs = sorted(plan.inputs, key=lambda i: i.relation)
        tables = [bucketised(self._frames[i.relation], i) for i in inputs if i.relation in self._tables]
        driver = Driver(
            spark=self.spark,
            plan=plan,
            checkpoint=self.checkpoint,
            config=self.config,
            sinks=self._sinks,
            rows=rows,
            live=live,
            verified_dir=_verified_dir(self.checkpoint),
            watermark_policy=self.spark.conf.get("spark.sql.streaming.multipleWatermarkPolicy", "min") or "min",
            executor_cores=self.spark.sparkContext.getConf().get("spark.executor.cores"),
            planner=planner,
            sources=Sources(self._answers, LiveResults.read(self.checkpoint.log, self._sinks)),
            tables=reduce(DataFrame.union, tables) if tables else None,
            progress=deque(maxlen=self.config.history),
        )
        # Spark's checkpoint knows sources by position: it must not depend on the order of registration.
        streams = [bucketised(self._frames[i.relation], i) for i in inputs if i.relation not in self._tables]
        buckets = reduce(DataFrame.union, streams)
        spark_dir = self.checkpoint.spark_dir
        writer = (
            buckets.writeStream.queryName(f"plait-{self.checkpoint.id[:8]}-{self.checkpoint.token}")
            .option("checkpointLocation", f"file://{spark_dir}" if self.checkpoint.files.local else spark_dir)
            .foreachBatch(partial(_guarded, driver))
        )
        if available_now:
            writer = writer.trigger(availableNow=True)
        elif every is not None:
            try:
                writer = writer.trigger(processingTime=every)
            except PySparkException as error:
                cause = f"every={every!r} is not a time between epochs"
                raise StreamError("TRIGGER", cause, 'write, for example, "1 second"') from error
        self._check_catalog(plan)
        forget_origins(self.spark)
        try:
            catch_up(driver)
            self._run = Run(writer.start(), driver)
        except (PySparkException, Py4JError) as error:
            raise translated(error) from error
        return self._run

    def close(self) -> None:
        """Stops the run, if any, and lets the checkpoint go."""
        self._closed = True
        try:
            if self._run is not None:
                self._run.stop()
        finally:
            _forget_verified(self.checkpoint)
            self.checkpoint.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _refuse_tables_only(self, name: str, read: ReadQuery) -> None:
        used = {alias.relation for graph in read.graphs.values() for alias in graph.aliases}
        if used <= self._tables:
            raise QueryError("NO_STREAM", f"query {name!r} reads tables only", "ask Spark: its answer never changes")

    def _final_us(self, name: str, residual: Residual) -> int:
        """How far the watermark has to be past a group's end until it is final; refused if that is never."""
        aggregate = only_aggregate(residual.root)
        assert aggregate is not None
        assert aggregate.graph is not None
        assert aggregate.closing is not None
        alias = aggregate.closing.alias
        found = final_us(aggregate.graph, self._relations, alias, self._tables)
        if found is None:
            raise QueryError(
                "OUTPUT_MODE",
                f"no group of query {name!r} is ever final: rows of {alias} can be joined with later rows without end",
                f"bound the event times of all other streams by that of {alias}, or use update or complete",
            )
        return found

    def _check_catalog(self, plan: Plan) -> None:
        """Records what the checkpoint is made for on the first start; later, refuses what does not fit it."""
        now = catalog_of(plan, self._graphs, self._relations)
        before = self.checkpoint.catalog()
        if before is None:
            self.checkpoint.put_catalog(now)
        else:
            refuse_changes(before, now)

    def _refuse_if_running(self, what: str) -> None:
        if self._closed:
            raise StreamError("CLOSED", f"the engine is closed: {what}", "make a new engine on the same checkpoint")
        if self._run is not None and self._run.is_active:
            raise StreamError("RUNNING", f"the engine is running: {what}", "stop the run first")


class QueryHandle:
    """One registered query."""

    def __init__(self, engine: Engine, name: str) -> None:
        self._engine = engine
        self.name = name

    @property
    def output_mode(self) -> str:
        """What its sink gets after an epoch: `append`, `update` or `complete`."""
        answer = self._engine._answers.get(self.name)
        return "append" if answer is None else answer.mode

    @property
    def joins(self) -> tuple[str, ...]:
        """What plans and progress reports call its joins: its own name, or, of a whole query, `name.1`, `name.2` …"""
        return tuple(self._engine._queries[self.name].graphs)

    def sink(self, kind: str, **options: Any) -> QueryHandle:
        """Where the rows go: noop, console(rows=), memory, parquet(path=), foreach_batch(fn=)."""
        engine = self._engine
        engine._refuse_if_running("a sink cannot be changed")
        made = make_sink(kind, self.name, self._remembered, options, engine.config.sync)
        if self.name in engine._answers:
            if self.output_mode != "append":
                refuse_appending(kind, self.name)
            engine._answers[self.name].sink = made
        else:
            engine._sinks[self.name] = made
        return self

    def foreach_batch(self, fn: Any) -> QueryHandle:
        """Shorthand for `sink("foreach_batch", fn=fn)`: `fn(rows, epoch)` is called once per epoch number."""
        return self.sink("foreach_batch", fn=fn)

    def results(self) -> DataFrame:
        """All committed rows, exactly once; of a query that is more than a join, its answer so far."""
        return self._results(set())

    def _remembered(self) -> DataFrame:
        """The same after every epoch: only files that this engine has not seen yet are verified."""
        return self._results(self._engine._known)

    def _results(self, known: set[str]) -> DataFrame:
        engine = self._engine
        rows = ResultRows(engine.spark, engine.plan, engine.checkpoint, known)
        if self.name in engine._answers:
            refuse_gap(engine.checkpoint)
            return engine._answers[self.name].frame(rows, LiveResults.read(engine.checkpoint.log))
        sink = engine._sinks[self.name]
        if sink.keeps_rows:
            refuse_gap(engine.checkpoint)
            return rows.all(self.name)
        delivered = sink.results(engine.spark, rows.schema(self.name))
        if delivered is None:
            raise QueryError(
                "RESULTS_NOT_KEPT",
                f"the rows of query {self.name!r} went to its sink and are not kept",
                "read them where the sink put them, or use no sink, memory or parquet",
            )
        return delivered


class Run:
    """The engine at work."""

    def __init__(self, query: StreamingQuery, driver: Driver) -> None:
        self._query = query
        self._driver = driver
        driver.behind.failed = self._answers_failed

    @property
    def is_active(self) -> bool:
        """Whether epochs are still being run, or answers are on their way."""
        return self._query.isActive or self._driver.behind.busy

    def await_termination(self, timeout: float | None = None) -> bool:
        """Waits for the end, at most `timeout` seconds; True when it has ended.  Raises what made it fail."""
        try:
            if timeout is None:
                self._query.awaitTermination()
            elif not self._query.awaitTermination(timeout):  # type: ignore[arg-type]
                return False
            self._driver.behind.close()
            self._driver.behind.wait()
            return True
        except (PySparkException, Py4JError, OSError) as error:
            raise self._failure(error) from error

    def stop(self) -> None:
        """Stops after the running epoch, when its answers have arrived; what is committed stays.

        The rest is read again on the next start.
        """
        try:
            if self._query.isActive:
                self._query.stop()
        except (Py4JError, OSError) as error:
            # With the JVM gone nothing runs any more.
            if translated(error).code != "SPARK_LOST":
                raise translated(error) from error
        finally:
            # Spark does not wait for an epoch that is in Python, and without a JVM nobody does: it may be at its sinks.
            with self._driver.working:
                self._driver.behind.close()

    @property
    def exception(self) -> PlaitError | None:
        """What made the run fail, if it did."""
        error = self._query.exception()
        return self._driver.failure if error is None else self._failure(error)

    @property
    def last_progress(self) -> dict[str, Any] | None:
        """The newest progress report; see docs/operations.md for its keys."""
        recent = self.recent_progress
        return recent[-1] if recent else None

    @property
    def recent_progress(self) -> list[dict[str, Any]]:
        """The progress reports kept (`Config.history`), oldest first; `spark_seconds` are Spark's own parts."""
        spark = {p.batchId: {k: v / 1000 for k, v in p.durationMs.items()} for p in self._query.recentProgress}
        return [{**report, "spark_seconds": spark.get(report["epoch"], {})} for report in list(self._driver.progress)]

    def _answers_failed(self, error: BaseException) -> None:
        """Ends the run: the next epoch would fail, but that may be far away."""
        self._driver.failure = self._driver.failure or translated(error)
        with contextlib.suppress(PySparkException, Py4JError, OSError):
            self._query.stop()

    def _failure(self, error: BaseException) -> PlaitError:
        return self._driver.failure or translated(error)


def _guarded(driver: Driver, buckets: DataFrame, number: int) -> None:
    """Keeps the error a user can act on: Spark would wrap it in its own."""
    try:
        with driver.working:
            run_epoch(driver, buckets, number)
    except Exception as error:
        driver.failure = driver.failure or translated(error)
        raise


def _warn_of_recomputation(name: str, residual: Residual) -> None:
    """Says once that answers take longer and longer, and why."""
    kept = [source for source in residual.sources if source.maintained is None and source.graph is not None]
    if not kept:
        return
    streams = "; ".join(", ".join(a.name for a in s.graph.aliases) for s in kept if s.graph is not None)
    warnings.warn(
        f"[RECOMPUTED] every answer of query {name!r} reads all rows of {streams} again, and they are kept for ever: "
        f"{'; '.join(dict.fromkeys(residual.notes)) or 'nothing above them is an aggregate'}",
        RecomputationWarning,
        stacklevel=3,
    )


def _verified_dir(checkpoint: Checkpoint) -> str:
    """Where this run notes, on every host, which segments it has verified."""
    return os.path.join(tempfile.gettempdir(), f"plait-{os.getuid()}-{checkpoint.id}-{checkpoint.token}")


def _forget_verified(checkpoint: Checkpoint) -> None:
    """Removes the notes of this run, and of those before it that were killed."""
    prefix = _verified_dir(checkpoint).removesuffix(str(checkpoint.token))
    for folder in glob.glob(f"{glob.escape(prefix)}*"):
        shutil.rmtree(folder, ignore_errors=True)
