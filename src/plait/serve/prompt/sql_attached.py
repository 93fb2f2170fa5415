"""`plait sql CHECKPOINT`: the statements over an engine of another process.

Results are read from the checkpoint as they are committed; changes are requests that the engine answers, and a plan
that is not in force is asked for in the same way (`plait add --dry-run`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from plait.attached import AttachedEngine
from plait.errors import PlaitError, QueryError
from plait.serve.other_engine import OtherEngine
from plait.serve.prompt.sql_printing import Printer, Quit, briefly
from plait.serve.prompt.sql_session import TABLE_FUNCTIONS
from plait.serve.prompt.sql_show import Shown, of_epochs
from plait.serve.prompt.sql_statements import HELP_ATTACHED, KEYWORDS, Statement
from plait.sql.catalyst.allow_list import tables_of_text
from plait.state.log.events import newest_events
from plait.state.log.requests import Answer, Request

ANSWER_SECONDS = 60.0
DRAFT = "prompt"
"""What a SELECT is called whose plan is asked for."""
EPOCHS_SHOWN = 10


class AttachedSession:
    """An engine of another process, and the statements over it."""

    def __init__(self, checkpoint: str, printer: Printer) -> None:
        self.other = OtherEngine.at(checkpoint)
        self.engine = AttachedEngine(printer.spark, checkpoint)
        self.printer = printer
        self._does: Mapping[str, Callable[[Statement], None]] = {
            "select": lambda s: self.select(s.text),
            "explain": lambda s: self.explain(s.text, s.stages),
            "show": lambda s: self.show(s.text),
            "describe": lambda s: self.describe(s.text),
            "create": self.create,
            "drop": lambda s: self.drop(s.name),
            "help": lambda _: self.say(HELP_ATTACHED.rstrip()),
            "quit": _quit,
            "format": lambda s: self._set("format", s.text, f"Rows are now printed as {s.text}."),
            "rows": lambda s: self._set("rows", int(s.text), f"A table now shows up to {s.text} rows."),
        }

    def execute(self, statement: Statement) -> None:
        """Does what a statement asks for; raises a PlaitError, Stopped or Quit."""
        if statement.kind not in self._does:
            raise QueryError(
                "STATEMENT",
                f"{statement.kind.upper()} is for a pipeline of one's own; this is an engine of another process",
                "see HELP; give plait sql a pipeline file to run one",
            )
        self._does[statement.kind](statement)

    def close(self) -> None:
        """Nothing is held."""

    def failure(self) -> PlaitError | None:
        """Nothing runs here."""
        return None

    def say(self, text: str, style: str = "") -> None:
        """Anything but rows."""
        self.printer.say(text, style)

    def greeting(self) -> str:
        """Where one is."""
        catalog = self.engine.catalog()
        state = "runs" if self.other.runs else "does not run"
        parts = [f"{self.other.checkpoint}: the engine {state}"]
        parts += [f"streams: {', '.join(catalog.streams)}"] if catalog.streams else []
        return "\n".join([*parts, f"queries: {', '.join(catalog.queries) or 'none'}"])

    def words(self) -> list[str]:
        """What can be completed."""
        catalog = self.engine.catalog()
        columns = {name for stream in catalog.streams.values() for name, _ in stream.columns}
        return sorted({*KEYWORDS, *catalog.streams, *catalog.queries, *columns})

    # --- what is there

    def select(self, sql: str) -> None:
        """Reads what queries have committed."""
        with self._views(self._read_by(sql)):
            self.printer.show(self.printer.batch(sql))

    @contextmanager
    def _views(self, queries: list[str]) -> Iterator[None]:
        spark = self.printer.spark
        with ExitStack() as stack:
            for name, frame in {name: self.engine.results(name) for name in queries}.items():
                frame.createOrReplaceTempView(name)
                stack.callback(spark.catalog.dropTempView, name)
            yield

    def _read_by(self, sql: str) -> list[str]:
        """The queries whose results a text reads."""
        from pyspark.errors import ParseException

        catalog = self.engine.catalog()
        known = {name.lower(): name for name in catalog.queries}
        streams = {name.lower(): name for name in catalog.streams}
        try:
            found = tables_of_text(self.printer.spark, sql, [*known.values(), *streams.values()], TABLE_FUNCTIONS)
        except ParseException as error:
            raise QueryError("SYNTAX", briefly(error), "correct the SQL text") from error
        for name in dict.fromkeys(name.lower() for name in found):
            if name in streams and name not in known:
                raise QueryError(
                    "STREAM_ELSEWHERE",
                    f"{streams[name]} is a stream of another process: its rows cannot be read here",
                    f"CREATE QUERY name AS {sql.strip()[:60]} … and read its results",
                )
            if name not in known:
                called, all_known = name.replace(", ", "."), ", ".join(known.values()) or "none yet"
                raise QueryError("NO_QUERY", f"no query is called {called}", f"use one of: {all_known}")
        return [known[name] for name in dict.fromkeys(name.lower() for name in found)]

    def explain(self, text: str, stages: bool) -> None:
        """The plan of a query that lives there, of all of them, or of one that might be added."""
        names = {name.lower(): name for name in self.engine.queries}
        if not text or text.lower() in names:
            shown = self.engine.explain(names.get(text.lower()), stages)
        elif re.fullmatch(r"\w+", text):
            known = ", ".join(names.values()) or "none yet"
            raise QueryError("NO_QUERY", f"no query is called {text!r}", f"use one of: {known}")
        elif stages:
            raise QueryError("STATEMENT", "EXPLAIN STAGES is for queries that live there", "write EXPLAIN SELECT …")
        else:
            free = next(n for n in (DRAFT, *(f"{DRAFT}{i}" for i in range(len(names) + 1))) if n not in names)
            answer = self._ask(Request("add", free, text, dry_run=True))
            shown = f"{(answer.preview or {})['text']}\n"
        self.printer.out.write(shown)
        self.printer.out.flush()

    def show(self, what: str) -> None:
        """SHOW QUERIES, STREAMS, TABLES or PROGRESS."""
        names, rows = {
            "queries": self._queries,
            "streams": lambda: self._streams(False),
            "tables": lambda: self._streams(True),
            "progress": self._progress,
        }[what]()
        self.say(self.printer.writer().write(names, rows), "dim")

    def _queries(self) -> Shown:
        names = ["name", "status", "since", "live_since", "mode", "sink", "origin", "rows", "state_bytes", "error"]
        return names, [[query[name] for name in names] for query in self.other.queries()]

    def _streams(self, tables: bool) -> Shown:
        rows: list[list[Any]] = []
        for stream in self.engine.catalog().streams.values():
            if stream.table == tables:
                columns = ", ".join(f"{name} {kind}" for name, kind in stream.columns)
                ttl = None if stream.ttl_us is None else f"{stream.ttl_us / 1e6:g} s"
                rows.append([stream.name, columns, stream.time_column, ttl, stream.keep])
        return ["name", "columns", "event_time", "ttl", "keep"], rows

    def _progress(self) -> Shown:
        return of_epochs(newest_events(self.other.files)[-EPOCHS_SHOWN:], self.printer.settings.format)

    def describe(self, name: str) -> None:
        """Columns and types of a stream, table or query."""
        catalog, queries = self.engine.catalog(), self.engine.queries
        streams = {known.lower(): stream.columns for known, stream in catalog.streams.items()}
        found = streams.get(name.lower())
        for known, query in queries.items():
            if found is None and known.lower() == name.lower():
                found = query.columns
        if found is None:
            every = ", ".join((*catalog.streams, *queries))
            raise QueryError("UNKNOWN_STREAM", f"no stream, table or query is called {name}", f"use one of: {every}")
        self.say(self.printer.writer().write(["column", "type"], [list(pair) for pair in found]), "dim")

    # --- changes

    def create(self, statement: Statement) -> None:
        """CREATE QUERY: waits until it is part of the catalog."""
        operation = "replace" if statement.replaces else "add"
        answer = self._ask(Request(operation, statement.name, statement.text, statement.since))
        since = "" if answer.epoch is None else f", with results from epoch {answer.epoch} on"
        self.say(f"{statement.name} is {answer.status}{since}.", "dim")

    def drop(self, name: str) -> None:
        """DROP QUERY."""
        self.other.query(name)
        self.say(f"{name} is {self._ask(Request('drop', name)).status}.", "dim")

    def _ask(self, request: Request) -> Answer:
        if not self.other.runs:
            raise QueryError("NOT_RUNNING", f"the engine of {self.other.checkpoint} does not run", "start it")
        answer = self.other.change(request, ANSWER_SECONDS)
        if answer is None:
            raise QueryError(
                "NO_ANSWER", f"the engine has not answered in {ANSWER_SECONDS:g} s; nothing is changed", "try again"
            )
        return answer

    def _set(self, name: str, value: Any, said: str) -> None:
        setattr(self.printer.settings, name, value)
        self.say(said, "dim")


def _quit(_: Statement) -> None:
    raise Quit
