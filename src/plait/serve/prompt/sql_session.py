"""What the statements of `plait sql` do.

A SELECT over streams runs on an engine of its own, with a checkpoint of its own: nothing of the pipeline is touched.
A SELECT over the pipeline's queries reads what they have committed, as Spark reads any table; so does one over tables.
Rows go to `out`; everything else that is said goes to `notes`.
"""

from __future__ import annotations

import dataclasses
import os
import re
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any, TextIO

import xxhash
from rich.console import Console
from rich.text import Text

from plait.errors import PlaitError, QueryError
from plait.serve import pipeline as pipelines
from plait.serve.pipeline import QuerySpec
from plait.serve.progress import epoch_line
from plait.serve.prompt.sql_background import Background
from plait.serve.prompt.sql_printing import LOOK_EVERY_SECONDS, Printer, Quit, Settings, Stopped, briefly
from plait.serve.prompt.sql_show import SHOWN
from plait.serve.prompt.sql_statements import HELP, KEYWORDS, Statement
from plait.sql.catalyst.allow_list import tables_of_text
from plait.sql.catalyst.frames import described

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from plait.engine import Engine
    from plait.queries import QueryHandle
    from plait.run import Run
    from plait.serve.pipeline import Pipeline
    from plait.serve.prompt.sql_prompt import Interrupts

QUERY = "prompt"
"""What a SELECT is called on its engine."""
FOLLOW_EVERY = "1 second"
BESIDE = "This SELECT runs on an engine of its own, beside the pipeline; CREATE QUERY name AS … adds it to that."
TABLE_FUNCTIONS = frozenset((
    "range", "explode", "explode_outer", "posexplode", "posexplode_outer", "inline", "inline_outer", "stack",
    "json_tuple", "variant_explode", "variant_explode_outer",
))  # fmt: skip
"""Table-valued functions that only look at their arguments."""


class Session:
    """A pipeline's streams, tables and queries, and the statements over them."""

    def __init__(
        self,
        pipeline: Pipeline,
        spark: SparkSession,
        settings: Settings,
        interrupts: Interrupts,
        out: TextIO,
        notes: Console,
    ) -> None:
        self.pipeline = pipeline
        self.spark = spark
        self.settings = settings
        self.interrupts = interrupts
        self.out = out
        self.notes = notes
        self.printer = Printer(spark, settings, interrupts, out, notes)
        self.background: Background | None = None
        self.streams = {s.name.lower(): s for s in pipeline.streams}
        self.tables = {t.name.lower(): t for t in pipeline.tables}
        self.queries = {q.name.lower(): q for q in pipeline.queries}
        self._does: Mapping[str, Callable[[Statement], None]] = {
            "select": lambda s: self.select(s.text),
            "explain": lambda s: self.explain(s.text, s.stages),
            "show": lambda s: self.show(s.text),
            "describe": lambda s: self.describe(s.text),
            "create": self.create,
            "drop": lambda s: self.drop(s.name),
            "start": lambda s: self.start(s.text or None),
            "wait": lambda _: self.wait(),
            "stop": lambda _: self.stop(),
            "help": lambda _: self.say(HELP.rstrip()),
            "quit": _quit,
            "follow": lambda _: self._set("follow", True, "A SELECT over streams now goes on until Ctrl-C."),
            "once": lambda _: self._set("follow", False, "A SELECT over streams now reads what there is, then ends."),
            "format": lambda s: self._set("format", s.text, f"Rows are now printed as {s.text}."),
            "rows": lambda s: self._set("rows", int(s.text), f"A table now shows up to {s.text} rows."),
        }

    def execute(self, statement: Statement) -> None:
        """Does what a statement asks for; raises a PlaitError, Stopped or Quit."""
        self._does[statement.kind](statement)

    def close(self) -> None:
        """Stops what runs in the background."""
        if self.background is not None:
            self.background.close()

    def failure(self) -> PlaitError | None:
        """What has ended the run in the background, told once."""
        background = self.background
        if background is None or background.closed or background.told or background.run.is_active:
            return None
        background.told = True
        return background.run.exception

    def say(self, text: str, style: str = "") -> None:
        """Anything but rows."""
        self.printer.say(text, style)

    # --- SELECT

    def select(self, sql: str) -> None:
        """Runs a query over streams, or reads results and tables."""
        streams, tables, queries = self._read_by(sql)
        if streams and queries:
            raise QueryError(
                "STREAM_AND_RESULT",
                f"{', '.join(streams)} is a stream and {', '.join(queries)} the result of a query: "
                "they cannot be read together",
                "write the query's own SQL in place of its name, as a sub-query",
            )
        if not streams:
            with self._views(tables, queries):
                self.printer.show(self.printer.batch(sql))
            return
        if self._is_running():
            self.say(BESIDE, "dim")
        with self._fresh(sql, streams, tables) as (engine, handle):
            if self.settings.follow:
                self._follow(engine, handle)
            else:
                self._await(engine.start(available_now=True), counting=True)
                self.printer.show(handle.results())

    def _follow(self, engine: Engine, handle: QueryHandle) -> None:
        """Prints what every epoch brings until Ctrl-C: new rows, or the whole answer where it changes."""
        writer = self.printer.writer()
        unread: list[BrokenPipeError] = []

        def print_epoch(rows: DataFrame, epoch: int) -> None:
            self.say(f"epoch {epoch}", "bold")
            try:
                self.say(self.printer.written(writer, rows), "dim")
            except BrokenPipeError as error:
                unread.append(error)
                self.interrupts.noted += 1

        handle.foreach_batch(print_epoch)
        run = engine.start(every=self.pipeline.every or FOLLOW_EVERY)
        self.say("Following; Ctrl-C ends it.", "dim")
        with suppress(Stopped):
            self._await(run, counting=False)
        if unread:
            raise unread[0]
        self.say("Stopped following.", "dim")

    @contextmanager
    def _fresh(
        self, sql: str, streams: Sequence[str], tables: Sequence[str], runs: bool = True
    ) -> Iterator[tuple[Engine, QueryHandle]]:
        """An engine with one query, on a checkpoint of its own."""
        import plait

        # What follows hands its rows on, what does not keeps them: the two cannot share a checkpoint.
        kind = "follow" if self.settings.follow else "once"
        kept = None
        if self.settings.checkpoint is not None and runs:
            kept = os.path.join(self.settings.checkpoint, f"{xxhash.xxh3_64_hexdigest(sql.encode())}-{kind}")
        config = dataclasses.replace(self.pipeline.config, state_dir=None)
        with ExitStack() as stack:
            path = kept or stack.enter_context(tempfile.TemporaryDirectory(prefix="plait-sql-"))
            engine = stack.enter_context(plait.Engine(self.spark, checkpoint=path, config=config))
            for name in streams:
                spec = self.streams[name.lower()]
                frame = pipelines.read_stream(self.pipeline, spec, self.spark)
                engine.stream(spec.name, frame, ttl=spec.ttl, needed=spec.needed)
            for name in tables:
                table = self.tables[name.lower()]
                engine.table(table.name, pipelines.read_table(self.pipeline, table, self.spark))
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always", plait.errors.RecomputationWarning)
                handle = engine.query(QUERY, sql)
            for warning in said:
                self.say(f"note: {warning.message}", "yellow")
            yield engine, handle

    def _await(self, run: Run, counting: bool) -> None:
        """Waits for the end of a run; Ctrl-C stops it (Stopped)."""
        try:
            self._watch(run, counting)
        except Stopped:
            # An epoch that is being printed is printed to its end.  What the run says now comes of being stopped.
            with suppress(PlaitError):
                run.stop(wait=self.settings.follow)
            raise

    def _watch(self, run: Run, counting: bool) -> None:
        """Waits for the end of a run, or for Ctrl-C (Stopped).  On a terminal, a line says how far it is."""
        with ExitStack() as stack:
            status = None
            if counting and self.notes.is_terminal:
                status = stack.enter_context(self.notes.status("the first epoch …"))
            while run.is_active:
                if self.interrupts.noted:
                    raise Stopped
                if status is not None and (progress := run.last_progress) is not None:
                    status.update(Text(epoch_line(progress)))
                time.sleep(LOOK_EVERY_SECONDS)
        run.await_termination()

    # --- results and tables, read by Spark

    @contextmanager
    def _views(self, tables: Sequence[str], queries: Sequence[str]) -> Iterator[None]:
        """Temporary views over tables and over what queries have committed up to now."""
        with ExitStack() as stack:
            frames = {n: pipelines.read_table(self.pipeline, self.tables[n.lower()], self.spark) for n in tables}
            if queries:
                handles = stack.enter_context(self._handles())
                frames |= {name: handles[self.queries[name.lower()].name].results() for name in queries}
            for name, frame in frames.items():
                frame.createOrReplaceTempView(name)
                stack.callback(self.spark.catalog.dropTempView, name)
            yield

    @contextmanager
    def _handles(self) -> Iterator[Mapping[str, QueryHandle]]:
        """The pipeline's queries: of the engine that runs, or of one that only looks at the checkpoint."""
        import plait

        if self.background is not None and not self.background.closed:
            yield self.background.handles
            return
        where = self.pipeline.checkpoint
        if "://" not in where and not os.path.isdir(where):
            raise QueryError("NOT_STARTED", f"the pipeline has not run yet: there is no {where}", "START it")
        with plait.Engine(self.spark, checkpoint=where, config=self.pipeline.config) as engine:
            yield pipelines.build(self.pipeline, engine, self.spark)

    def _read_by(self, sql: str) -> tuple[list[str], list[str], list[str]]:
        """The streams, tables and queries that a text reads."""
        from pyspark.errors import ParseException

        known = (self.streams, self.tables, self.queries)
        names = [spec.name for some in known for spec in some.values()]
        try:
            found = tables_of_text(self.spark, sql, names, TABLE_FUNCTIONS)
        except ParseException as error:
            raise QueryError("SYNTAX", briefly(error), "correct the SQL text") from error
        read = dict.fromkeys(name.lower() for name in found)
        for name in read:
            if not any(name in some for some in known):
                called = name.replace(", ", ".")
                raise QueryError(
                    "UNKNOWN_STREAM",
                    f"no stream, table or query is called {called}",
                    f"use one of: {', '.join(names)}",
                )
        streams = [self.streams[n].name for n in read if n in self.streams]
        tables = [self.tables[n].name for n in read if n in self.tables]
        hidden = {*self.streams, *self.tables}
        return streams, tables, [self.queries[n].name for n in read if n in self.queries and n not in hidden]

    # --- EXPLAIN, SHOW, DESCRIBE

    def explain(self, text: str, stages: bool) -> None:
        """The plan of a SELECT, of a query of the pipeline, or of all of them."""
        if text.lower() in self.queries or not text:
            self.out.write(self._explained(self.queries[text.lower()].name if text else None, stages))
        elif re.fullmatch(r"\w+", text):
            known = ", ".join(q.name for q in self.pipeline.queries) or "the pipeline has none"
            raise QueryError("NO_QUERY", f"no query is called {text!r}", f"use one of: {known}")
        else:
            streams, tables, queries = self._read_by(text)
            if not streams:
                with self._views(tables, queries):
                    self.out.write(f"Read by Spark: no streams.\n\n{described(self.printer.batch(text))}\n")
            else:
                with self._fresh(text, streams, tables, runs=False) as (engine, _):
                    self.out.write(engine.explain(QUERY, stages=stages))
        self.out.flush()

    def _explained(self, name: str | None, stages: bool) -> str:
        if self.background is not None and not self.background.closed:
            return self.background.engine.explain(name, stages=stages)
        with self._planned() as (engine, _):
            return engine.explain(name, stages=stages)

    @contextmanager
    def _planned(self) -> Iterator[tuple[Engine, Mapping[str, QueryHandle]]]:
        """The pipeline on an engine that only plans."""
        import plait

        config = dataclasses.replace(self.pipeline.config, state_dir=None)
        with (
            tempfile.TemporaryDirectory(prefix="plait-sql-") as checkpoint,
            plait.Engine(self.spark, checkpoint=checkpoint, config=config) as engine,
        ):
            unsunk = tuple(dataclasses.replace(query, sink=None) for query in self.pipeline.queries)
            yield engine, pipelines.build(dataclasses.replace(self.pipeline, queries=unsunk), engine, self.spark)

    def show(self, what: str) -> None:
        """SHOW QUERIES, STREAMS, TABLES or PROGRESS."""
        names, rows = SHOWN[what](self)
        self.say(self.printer.writer().write(names, rows), "dim")

    def describe(self, name: str) -> None:
        """Columns and types of a stream, table or query."""
        found = name.lower()
        if found in self.streams:
            schema = pipelines.read_stream(self.pipeline, self.streams[found], self.spark).schema
        elif found in self.tables:
            schema = pipelines.read_table(self.pipeline, self.tables[found], self.spark).schema
        elif found in self.queries:
            with self._planned() as (_, handles):
                schema = handles[self.queries[found].name].results().schema
        else:
            known = ", ".join((*self.streams, *self.tables, *self.queries))
            raise QueryError("UNKNOWN_STREAM", f"no stream, table or query is called {name}", f"use one of: {known}")
        rows = [[field.name, field.dataType.simpleString()] for field in schema.fields]
        self.say(self.printer.writer().write(["column", "type"], rows), "dim")

    # --- the pipeline in the background

    def start(self, every: str | None) -> None:
        """Starts the pipeline's queries on the pipeline's checkpoint."""
        if not self.pipeline.queries:
            raise QueryError("NO_QUERY", f"{self.pipeline.file} has no query", "add a table [queries.NAME] to it")
        if self._is_running():
            raise QueryError("RUNNING", "the pipeline is running already", "STOP it first")
        self.close()
        self.background = Background(self.pipeline, self.spark, every)
        self.say(f"The pipeline runs, on {self.pipeline.checkpoint}.", "dim")

    def create(self, statement: Statement) -> None:
        """CREATE QUERY: the pipeline that runs has one more, until the prompt is left."""
        background = self._running()
        engine = background.engine
        define = engine.replace if statement.replaces else engine.query
        background.handles[statement.name] = define(statement.name, statement.text, since=statement.since)
        background.handles[statement.name].await_live()
        kept = tuple(query for query in self.pipeline.queries if query.name != statement.name)
        self._has((*kept, QuerySpec(statement.name, statement.text, None, None, statement.since)))
        self.say(f"{statement.name} is live. To have it at the next start, add it to {self.pipeline.file}.", "dim")

    def drop(self, name: str) -> None:
        """DROP QUERY: the pipeline that runs has one less."""
        background = self._running()
        if name not in background.handles:
            known = ", ".join(background.handles)
            raise QueryError("NO_QUERY", f"no query is called {name!r}", f"use one of: {known}")
        background.engine.drop(name)
        del background.handles[name]
        self._has(tuple(query for query in self.pipeline.queries if query.name != name))
        self.say(f"{name} is dropped.", "dim")

    def _has(self, queries: tuple[QuerySpec, ...]) -> None:
        self.pipeline = dataclasses.replace(self.pipeline, queries=queries)
        self.queries = {query.name.lower(): query for query in queries}

    def _running(self) -> Background:
        if self.background is None or not self._is_running():
            raise QueryError("NOT_STARTED", "the pipeline does not run", "START it, or add the query to its file")
        return self.background

    def greeting(self) -> str:
        """Where one is."""
        pipeline = self.pipeline
        parts = [str(pipeline.file)]
        for what, specs in (("streams", pipeline.streams), ("tables", pipeline.tables), ("queries", pipeline.queries)):
            if specs:
                parts.append(f"{what}: {', '.join(spec.name for spec in specs)}")
        return "\n".join(parts)

    def words(self) -> list[str]:
        """What can be completed; Spark has to open the tables for it."""
        words = {*KEYWORDS, *(q.name for q in self.pipeline.queries)}
        # A stream or table that cannot be opened is an error of the statement that reads it.
        for stream in self.pipeline.streams:
            with suppress(PlaitError):
                words |= {stream.name, *pipelines.read_stream(self.pipeline, stream, self.spark).columns}
        for table in self.pipeline.tables:
            with suppress(PlaitError):
                words |= {table.name, *pipelines.read_table(self.pipeline, table, self.spark).columns}
        return sorted(words)

    def wait(self) -> None:
        """Waits for the end of the run in the background; Ctrl-C ends the waiting only."""
        if self.background is None or self.background.closed:
            raise QueryError("NOT_STARTED", "nothing runs in the background", "START the pipeline")
        self._watch(self.background.run, counting=True)

    def stop(self) -> None:
        """Stops what runs in the background."""
        if self.background is None or self.background.closed:
            raise QueryError("NOT_STARTED", "nothing runs in the background", "START the pipeline")
        self.background.close()
        self.say("The pipeline is stopped; START continues it.", "dim")

    def _is_running(self) -> bool:
        return self.background is not None and not self.background.closed and self.background.run.is_active

    def _set(self, name: str, value: Any, said: str) -> None:
        setattr(self.settings, name, value)
        self.say(said, "dim")


def _quit(_: Statement) -> None:
    raise Quit
