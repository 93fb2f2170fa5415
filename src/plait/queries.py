"""The queries that a program has defined, and their handles."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from pyspark.sql import DataFrame, SparkSession

from plait.catalog.catalog import PROGRAM, Catalog, QueryEntry
from plait.catalog.changes import Definition
from plait.config import Config, bytes_of
from plait.errors import PlaitError, QueryError
from plait.query.budget import Budget
from plait.query.graph import JoinGraph
from plait.query.layout import shown
from plait.query.plan import Plan
from plait.runtime.answers.answer import Answer
from plait.runtime.answers.live_results import LiveResults
from plait.runtime.answers.result_reader import ResultRows
from plait.runtime.driver.epoch import refuse_gap
from plait.runtime.driver.sinks import Keep, Sink, make_sink, refuse_appending
from plait.sql.catalyst.read_query import ReadQuery
from plait.state.log.checkpoint import Checkpoint
from plait.state.log.parked import FAILED, ParkedQuery
from plait.state.log.passes import told_share

if TYPE_CHECKING:
    from plait.run import Run

_POLL_SECONDS = 0.01
"""How often whoever waits for a query looks whether it is live."""


def budget_of(max_rows_per_epoch: int | None, max_state: str | None) -> Budget:
    """The limits of a query as users write them."""
    return Budget(max_rows_per_epoch, None if max_state is None else bytes_of("max_state", max_state))


def watermark_policy(spark: SparkSession) -> str:
    """How the watermark of a query follows from those of its streams: Spark's setting."""
    return spark.conf.get("spark.sql.streaming.multipleWatermarkPolicy", "min") or "min"


@dataclass(eq=False)
class RegisteredQuery:
    """A query as the program has defined it, read and checked."""

    id: str
    name: str
    sql: str
    read: ReadQuery
    mode: str
    since: str | None
    origin: str = PROGRAM
    """Who has defined it: the program, or another process."""
    sink: Sink = field(default_factory=Keep)
    """Where its rows go, or its answers."""
    described: Mapping[str, Any] | None = None
    """Kind and options of the sink, as far as they can be written down."""
    answer: Answer | None = None
    """What Spark makes of its rows, if they are not the answer themselves."""
    budget: Budget = field(default_factory=Budget)
    """Over which it is parked."""

    @property
    def graphs(self) -> dict[str, JoinGraph]:
        """Its joins by name."""
        return self.read.graphs

    @property
    def columns(self) -> tuple[tuple[str, str], ...]:
        """Names and types of its results' columns."""
        if self.read.residual is not None:
            return self.read.residual.output
        return tuple((output.name, output.type) for graph in self.graphs.values() for output in graph.outputs)

    @property
    def definition(self) -> Definition:
        """What admission must know of it."""
        residual = self.read.residual
        aggregate = None if residual is None or self.mode != "append" else residual.only_source
        closing = None if aggregate is None else aggregate.closing
        return Definition(
            id=self.id,
            name=self.name,
            sql=self.sql,
            graphs=self.graphs,
            mode=self.mode,
            since=self.since,
            one_floor=residual is not None and len(residual.sources) > 1,
            sink=self.described,
            origin=self.origin,
            closing=None if aggregate is None or closing is None else (aggregate.name, closing.alias),
            budget=self.budget,
        )

    def use(self, sink: Sink, kind: str, options: Mapping[str, Any]) -> None:
        """Another sink."""
        plain = {name: value for name, value in options.items() if isinstance(value, str | int | float | bool)}
        self.sink, self.described = sink, {"kind": kind, "options": plain}
        if self.answer is not None:
            self.answer.sink = sink


@dataclass(eq=False)
class Desk:
    """What an engine and the handles of its queries share."""

    spark: SparkSession
    checkpoint: Checkpoint
    config: Config
    plan: Callable[[], Plan]
    """The plan in force."""
    catalog: Callable[[], Catalog]
    """The catalog in force."""
    changing: Callable[[str], AbstractContextManager[None]]
    """Around a change: refused if the engine is closed, admitted if it runs."""
    run: Callable[[], Run | None]
    """The run under way, or the last one."""
    parked: Callable[[str], ParkedQuery | None]
    """By id: why a query is parked; None if it is not."""
    resume: Callable[[str, bool], None]
    """Lets a parked query go on."""
    queries: dict[str, RegisteredQuery] = field(default_factory=dict)
    """By name."""
    known: set[str] = field(default_factory=set)
    """Result files in force that this engine has written or verified."""

    def registered(self, name: str) -> RegisteredQuery:
        """A query that the program has defined."""
        if name not in self.queries:
            raise QueryError("NO_QUERY", f"no query is called {name!r}", "it was dropped; define it again")
        return self.queries[name]

    def entry(self, name: str) -> QueryEntry | None:
        """A query as the catalog has it, once the engine has started with it."""
        found = self.catalog().queries.get(name)
        return found if found is not None and found.id == self.registered(name).id else None

    def complete_us(self, id: str) -> int | None:
        """The event time at or before which groups of a query lack rows that were gone when it began."""
        return next((q.complete_us for q in self.catalog().queries.values() if q.id == id), None)


class HasDesk(Protocol):
    """An engine, as far as handles need it."""

    _desk: Desk


class QueryHandle:
    """One registered query."""

    def __init__(self, engine: HasDesk, name: str) -> None:
        self._desk = engine._desk
        self.name = name

    @property
    def _query(self) -> RegisteredQuery:
        return self._desk.registered(self.name)

    @property
    def output_mode(self) -> str:
        """What its sink gets after an epoch: `append`, `update` or `complete`."""
        return self._query.mode

    @property
    def joins(self) -> tuple[str, ...]:
        """What plans and progress reports call its joins: its own name, or, of a whole query, `name.1`, `name.2` …"""
        return tuple(shown(join) for join in self._query.graphs)

    @property
    def status(self) -> str:
        """`pending` before the engine has started with it, `building` while a store is filled for it, then `live`.

        `parked` while its deliveries wait, because its sink or expression failed (`error` says why); `failed` if it
        missed more than is kept.  In the end, `dropped`.
        """
        if self.name not in self._desk.queries:
            return "dropped"
        if (parked := self._desk.parked(self._query.id)) is not None:
            return parked.status
        entry = self._desk.entry(self.name)
        return "pending" if entry is None else entry.status

    @property
    def first_pass(self) -> float | None:
        """Which share of its first pass over state is done (`since="state"`); None before and after it."""
        entry, run = self._desk.entry(self.name), self._desk.run()
        if entry is None or entry.since != "state" or run is None or not run.is_active:
            return None
        epoch = run.live.epoch + 1
        return told_share(self._desk.checkpoint.files, epoch) or 0.0 if entry.live_since == epoch else None

    @property
    def error(self) -> PlaitError | None:
        """Why it is `parked` or `failed`."""
        parked = self._desk.parked(self._query.id)
        return None if parked is None else parked.error

    def resume(self, skip: bool = False) -> QueryHandle:
        """Lets it go on if it is parked: see `Engine.resume`."""
        self._desk.resume(self.name, skip)
        return self

    @property
    def live_since(self) -> int | None:
        """The first epoch with results of it; None while there is none."""
        entry = self._desk.entry(self.name)
        return None if entry is None else entry.live_since

    def await_live(self, timeout: float | None = None) -> bool:
        """Waits until the query is live, at most `timeout` seconds; False if it is not by then.

        Raises what made the run fail, and if there is no run that could make it live.  Not to be called by a sink: the
        epoch that it is part of would be waited for.
        """
        until = None if timeout is None else time.monotonic() + timeout
        while self.status != "live":
            if (error := self.error) is not None:
                raise error
            run = self._desk.run()
            if run is None or not run.is_active:
                if run is not None and run.exception is not None:
                    raise run.exception
                if self.status == "live":
                    break
                raise QueryError(
                    "NOT_RUNNING",
                    f"query {self.name!r} is {self.status}, and the engine does not run",
                    "call engine.start",
                )
            if until is not None and time.monotonic() > until:
                return False
            time.sleep(_POLL_SECONDS)
        # While Spark starts, it refuses readers without names, and whoever has waited here may make one next.
        while (run := self._desk.run()) is not None and run._is_replacing:
            if until is not None and time.monotonic() > until:
                break
            time.sleep(_POLL_SECONDS)
        return True

    @property
    def floors(self) -> dict[str, int]:
        """Per alias the first epoch whose rows it sees, once it is admitted."""
        entry = self._desk.entry(self.name)
        return {} if entry is None else {a: f for floors in entry.floors.values() for a, f in floors.items()}

    def sink(self, kind: str, **options: Any) -> QueryHandle:
        """Where the rows go: noop, console(rows=), memory, parquet(path=), foreach_batch(fn=)."""
        with self._desk.changing("a sink cannot be changed"):
            made = make_sink(kind, self.name, self._remembered, options, self._desk.config.sync)
            if self._query.answer is not None and self.output_mode != "append":
                refuse_appending(kind, self.name)
            self._query.use(made, kind, options)
        return self

    def limit(self, max_rows_per_epoch: int | None = None, max_state: str | None = None) -> QueryHandle:
        """Other limits than those it was defined with; None is without."""
        budget = budget_of(max_rows_per_epoch, max_state)
        with self._desk.changing("limits cannot be changed"):
            self._query.budget = budget
        return self

    def foreach_batch(self, fn: Any) -> QueryHandle:
        """Shorthand for `sink("foreach_batch", fn=fn)`: `fn(rows, epoch)` is called once per epoch number."""
        return self.sink("foreach_batch", fn=fn)

    def results(self) -> DataFrame:
        """All committed rows, exactly once; of a query that is more than a join, its answer so far.

        While the engine runs, these are the rows of the epochs that are committed: the running one is not waited for.
        """
        return self._results(set())

    def _remembered(self) -> DataFrame:
        """The same after every epoch: only files that this engine has not seen yet are verified."""
        return self._results(self._desk.known)

    def _refuse_missing(self) -> None:
        """Raises if rows are missing because the query is parked."""
        parked = self._desk.parked(self._query.id)
        if parked is None:
            return
        files = self._desk.checkpoint.log.results().get(self._query.id, ())
        # A sink that takes what was missed may ask for all rows.
        waits = any(file.raw or (file.held is not None and not parked.asked) for file in files)
        if parked.status == FAILED or waits:
            raise parked.error

    def _results(self, known: set[str]) -> DataFrame:
        desk, query = self._desk, self._query
        plan = desk.plan()
        rows = ResultRows(desk.spark, plan, desk.checkpoint, known)
        if not all(join in plan.query_by_name for join in query.graphs):
            # It waits for a store: there are no rows yet.
            return rows.read(query.columns, ())
        if query.answer is not None:
            refuse_gap(desk.checkpoint)
            return query.answer.frame(rows, LiveResults.read(desk.checkpoint.log, policy=watermark_policy(desk.spark)))
        if query.sink.keeps_rows:
            refuse_gap(desk.checkpoint)
            self._refuse_missing()
            return rows.all(query.id)
        delivered = query.sink.results(desk.spark, rows.schema(query.id))
        if delivered is None:
            raise QueryError(
                "RESULTS_NOT_KEPT",
                f"the rows of query {self.name!r} went to its sink and are not kept",
                "read them where the sink put them, or use no sink, memory or parquet",
            )
        return delivered
