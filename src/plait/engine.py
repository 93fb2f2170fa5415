"""The façade: `Engine` takes streams, tables and queries, and starts them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from plait.admission import Snapshot
from plait.attendant import REQUEST, Attendant
from plait.catalog.catalog import Catalog
from plait.catalog.settings import refuse_changed_meaning
from plait.config import Config, refuse_unproven
from plait.errors import PlaitError, QueryError, StreamError
from plait.explain import explain, explain_stages
from plait.explain_sharing import Measured
from plait.launching import Launcher
from plait.preview import Preview
from plait.queries import Desk, QueryHandle, budget_of
from plait.query.budget import Budget
from plait.query.layout import shown
from plait.query.plan import Plan
from plait.registry import Registry
from plait.run import Run
from plait.runtime.driver.epoch import refuse_gap
from plait.runtime.driver.missed import deliver_missed
from plait.runtime.driver.source_log import choose_sources, refuse_fixed
from plait.runtime.driver.verified import forget_verified
from plait.runtime.spark.frames import is_classic
from plait.sql.catalyst.sql_settings import meaning
from plait.starting import streamed
from plait.state.log import catalog_versions as catalogs
from plait.state.log.checkpoint import Checkpoint
from plait.state.log.requests import Request


class _Block(threading.local):
    """The blocks of `Engine.changes` that a thread has opened."""

    depth = 0
    holds = False
    """Whether something has been changed in them, so that admission waits for their end."""


class Engine:
    """Joins registered streams by registered queries, all in one Spark streaming query.

    Everything durable lies below `checkpoint`; starting again on it continues exactly where the last commit was.
    One engine at a time holds a checkpoint; use it in a `with` block, or call `close()`.
    """

    def __init__(self, spark: SparkSession, checkpoint: str, config: Config | None = None) -> None:
        if not is_classic(spark):
            raise StreamError(
                "SPARK_CONNECT", "a Spark Connect session has no Catalyst to ask", "use a classic session"
            )
        self.spark = spark
        settings = {k: v for k, v in spark.sparkContext.getConf().getAll() if k.startswith("spark.plait.")}
        self.config = (config or Config()).with_spark_settings(settings)
        refuse_unproven(self.config)
        self.checkpoint = Checkpoint(checkpoint, self.config).open()
        try:
            found = catalogs.newest(self.checkpoint.files)
        except BaseException:
            self.checkpoint.close()
            raise
        catalog = Catalog() if found is None else Catalog.from_json(found)
        self._registered = Registry(spark, lambda: self._in_force, lambda id: self._desk.complete_us(id))
        self._launcher = Launcher(spark, self.config, self.checkpoint, catalog, self._registered, self._restore)
        self._lock = self._launcher.lock
        self._desk = Desk(
            spark,
            self.checkpoint,
            self.config,
            plan=lambda: self.plan,
            catalog=lambda: self._in_force,
            changing=self._changing,
            run=lambda: self._launcher.run,
            parked=lambda id: self._launcher.parking.of(id),
            resume=self.resume,
            queries=self._registered.queries,
            known=self._launcher.known,
        )
        self._closed = False
        self._block = _Block()
        self._is_changed = False
        """Whether something has been registered or dropped since the last admission was asked for."""

    def stream(
        self, name: str, df: DataFrame, ttl: str | None = None, needed: str | None = None, keep: str = "used"
    ) -> None:
        """Registers a streaming DataFrame.  Its watermark comes from `df.withWatermark`; `ttl` bounds its state.

        With a TTL a row can be matched for that long after the epoch in which it arrived; a query may give it by the
        hint `STATE_TTL` instead.  `needed` is an SQL condition over the row's own columns: a row for which it is true
        when it arrives outlives the TTL.

        `keep="used"` stores what queries use.  `keep="all"` also keeps all rows as they are, within the TTL, for
        queries that are added later: whatever of its columns they read, and by whatever key, they find the past.

        While the engine runs, from any thread: its rows are read from the next epoch on.
        """
        self._register("a stream cannot be added", lambda: self._registered.add_stream(name, df, ttl, needed, keep))

    def table(self, name: str, df: DataFrame) -> None:
        """Registers a batch DataFrame that queries may join with streams.

        Its rows are read once, with the first epoch that a query needs them, and stay what they are then.  To have them
        read again, `drop` the table and the queries that read it, and register and define them anew.
        """
        self._register("a table cannot be added", lambda: self._registered.add_table(name, df))

    def _register(self, what: str, add: Callable[[], None]) -> None:
        """One more stream or table.  What a run would refuse is told to the caller, and nothing has happened."""
        with self._lock:
            self._refuse_if_closed(what)
            before = self._registered.memento()
            add()
            try:
                if self._launcher.run is not None and self._is_running:
                    catalog = self._launcher.proposed(self._in_force, self._launcher.run.live).now.catalog
                    old = before.relations.keys() - before.tables
                    new = self._registered.relations.keys() - self._registered.tables
                    refuse_fixed(self.checkpoint, self.spark, old, new)
                    choose_sources(self.checkpoint, self.spark, self._launcher.frames_of(streamed(catalog)))
            except BaseException:
                self._registered.go_back(before)
                raise
            self._changed()

    def query(
        self,
        name: str,
        sql: str,
        output_mode: str | None = None,
        since: str | None = None,
        max_rows_per_epoch: int | None = None,
        max_state: str | None = None,
    ) -> QueryHandle:
        """Registers a query over the streams; it is read and checked at once, and runs from `start` on.

        While the engine runs, from any thread: it is admitted after the running epoch, beside which it is read and
        checked.  `QueryHandle.await_live` waits for that; with `changes` a query and its sink are admitted together.

        `output_mode` says what sinks get, in Spark's words: rows as they are joined (`append`, of queries that only
        join, filter and project), the whole answer after every epoch (`complete`, of all others), the groups that have
        changed (`update`, of aggregates), or those that have become final (`append`, of aggregates by windows of event
        time).

        On a checkpoint that has run, a query that lives there goes on, and a new one begins.  `since` says with which
        past: `now` gives results with at least one new row, whose partners may be older; `state` gives also the results
        among rows that are there; `new` takes no notice of older rows.  The default is `now`, or `new` for queries with
        semi, anti or outer joins, whose streams must begin together.  A query that lives there with another text is
        refused: see `replace`.

        With more joined rows in an epoch than `max_rows_per_epoch`, or a larger share of the state than `max_state`
        (such as "2g"), the query is parked, and the others go on; `QueryHandle.limit` sets other limits.
        """
        budget = budget_of(max_rows_per_epoch, max_state)
        return self._define(name, sql, output_mode, since, budget, replaces=False)

    def preview(self, name: str, sql: str, output_mode: str | None = None, since: str | None = None) -> Preview:
        """What `query` with these arguments would do, without doing it: floors, stores to be built, the expected cost.

        Under a name that is there already: what `replace` would do.
        """
        with self._lock:
            self._refuse_if_closed("a query cannot be read")
            if name not in self._registered.queries:
                self._restore()
            replaces = name in self._registered.queries
            read = self._registered.reading(name, sql, output_mode, since, replaces)
        made = read()
        with self._lock:
            before = self._registered.memento()
            known = self._planned().plan if before.queries else None
            try:
                if not self._registered.register(made, replaces):
                    raise QueryError("DUPLICATE_QUERY", f"{name!r} has been defined meanwhile", "ask again")
                return self._launcher.previewed(name, known)
            finally:
                self._registered.go_back(before)

    def replace(
        self,
        name: str,
        sql: str,
        output_mode: str | None = None,
        since: str | None = None,
        max_rows_per_epoch: int | None = None,
        max_state: str | None = None,
    ) -> QueryHandle:
        """Registers a query like `query`, instead of the one that lives under this name; also while the engine runs.

        With the text that lives there already nothing changes, so the call may stay in the program.  Rows that were
        committed under the old text have gone to the old sink; those that were kept are deleted.
        """
        budget = budget_of(max_rows_per_epoch, max_state)
        return self._define(name, sql, output_mode, since, budget, replaces=True)

    def drop(self, name: str) -> None:
        """Ends a query, a stream or a table that lives on the checkpoint, with the next start.

        A query may be dropped while the engine runs: it ends with the running epoch.  If that is busy with the query's
        first pass over state (`since="state"`), the pass is given up, and the epoch run without it.  Its kept
        results, and the state that serves no other query, are deleted.  What is not there is no error, so the call may
        stay in the program.
        """
        with self._lock:
            self._refuse_if_closed("nothing can be dropped")
            if name in self._registered.relations:
                self._refuse_if_running("a stream or table cannot be dropped")
            dropped = self._registered.queries.get(name)
            self._registered.drop(name)
            self._changed()
        if dropped is not None and self._launcher.run is not None:
            self._launcher.run._give_up_first_pass(set(dropped.graphs))

    def resume(self, name: str, skip: bool = False) -> None:
        """Lets a parked query go on: its sink gets the epochs that it missed, in order, and then those to come.

        With `skip` it goes on with the next epoch, and the rows that it missed are let go.  While the engine runs that
        happens at once, between two epochs, and if it fails again the error is raised; else with the next start.  Rows
        of which Spark's part has failed follow with the next epoch.  A query that is not parked goes on as it is.
        """
        with self._lock:
            self._refuse_if_closed("a query cannot be resumed")
            if name not in self._registered.queries:
                self._restore()
            id = self._desk.registered(name).id
            self._launcher.parking.ask(id, skip)
        failed: dict[str, PlaitError] = {}
        run = self._launcher.run
        if run is not None and self._is_running:
            run._between_epochs(lambda driver: failed.update(deliver_missed(driver)))
        if id in failed:
            raise failed[id]

    def _define(
        self, name: str, sql: str, output_mode: str | None, since: str | None, budget: Budget, replaces: bool
    ) -> QueryHandle:
        while True:
            with self._lock:
                self._refuse_if_closed("a query cannot be added")
                read = self._registered.reading(name, sql, output_mode, since, replaces)
            # Without the lock: epochs begin meanwhile, and others have their queries read.
            made = read()
            made.budget = budget
            with self._lock:
                self._refuse_if_closed("a query cannot be added")
                before = self._registered.memento()
                if not self._registered.register(made, replaces):
                    continue
                try:
                    if self._launcher.run is not None and self._is_running:
                        # What admission would refuse is told to the caller; the run goes on as it is.
                        self._launcher.proposed(self._in_force, self._launcher.run.live)
                except BaseException:
                    self._registered.go_back(before)
                    raise
                self._changed()
                return QueryHandle(self, name)

    def _carry_out(self, request: Request) -> Mapping[str, Any] | None:
        """What another process asks for (`plait add`, `drop`, `replace`), as if the program had done it.

        Returns the preview of a change that is not to be made.
        """
        name, sink = request.name, request.sink
        if request.dry_run:
            found = self.preview(name, request.sql, request.output_mode, request.since)
            return {**found.json, "text": found.text}
        budget = budget_of(request.max_rows_per_epoch, request.max_state)
        if request.operation == "resume":
            if budget != Budget() and name in self._registered.queries:
                QueryHandle(self, name).limit(request.max_rows_per_epoch, request.max_state)
            self.resume(name, request.skip)
            return None
        with self.changes():
            if request.operation == "drop":
                if name in self._registered.relations:
                    raise QueryError("NO_QUERY", f"{name!r} is a stream or table", "drop these in the program")
                self.drop(name)
                return None
            there = self._registered.queries.get(name)
            if there is not None and there.origin == REQUEST and there.sql == request.sql:
                if there.budget != budget:
                    QueryHandle(self, name).limit(request.max_rows_per_epoch, request.max_state)
                return None
            replaces = request.operation == "replace"
            made = self._define(name, request.sql, request.output_mode, request.since, budget, replaces)
            self._registered.queries[name].origin = REQUEST
            try:
                if sink is not None:
                    made.sink(sink["kind"], **sink.get("options", {}))
            except PlaitError:
                with self._lock:
                    self._registered.take_back(name, there)
                raise
        return None

    def _restore(self) -> None:
        """Queries that other processes have added."""
        self._registered.restore(lambda name: QueryHandle(self, name)._remembered, self.config.sync)

    def sql(self, text: str, name: str | None = None, output_mode: str | None = None) -> QueryHandle:
        """Registers a query like `query`, under a name of its own choosing unless one is given."""
        taken = {n.lower() for n in self._registered.queries}
        free = (f"q{i}" for i in count(1))
        return self.query(name or next(n for n in free if n not in taken), text, output_mode)

    @property
    def plan(self) -> Plan:
        """The plan for all registered queries together: the one in force while the engine runs."""
        return self._planned().plan

    def explain(self, name: str | None = None, format: str = "text", stages: bool = False) -> str:
        """The join graphs, stores, probe orders and exchanges, as `text`, `json` or `dot`.

        Once the engine has run, the text also shows estimates against what was counted, and the orders' history.
        While it runs, it is what the last epoch left in force: no epoch is waited for.
        With `stages`: how the plan of query `name` (of all, without one) was converted, and what is maintained.
        """
        if name is not None and name not in self._registered.queries:
            known = ", ".join(self._registered.queries) or "none registered yet"
            raise QueryError("NO_QUERY", f"no query is called {name!r}", f"use one of: {known}")
        if stages:
            return "\n".join(
                explain_stages(n, self._registered.queries[n].read)
                for n in ([name] if name else self._registered.queries)
            )
        now = self._planned()
        relations = self._registered.relations
        return explain(now.plan, now.graphs, relations, format, now.optimiser, now.catalog, self._measured(now))

    def _measured(self, now: Snapshot) -> Measured:
        """What rests in the stores, and what the last epoch counted if it had the plan that is in force."""
        run = self._launcher.run
        live = self._launcher.live if run is None else run.live
        sizes = {
            store: (sum(info.rows for info in infos), sum(info.live_bytes for info in infos))
            for store, infos in live.segments.items()
        }
        last = None if run is None else run.newest
        orders = {shown(q.name): {alias: list(order) for alias, order in q.orders} for q in now.plan.queries}
        there = {node.id for node in now.plan.nodes()}
        if last is None or last.orders != orders or not there.issuperset(last.edges):
            return Measured(sizes)
        return Measured(sizes, last.edges)

    def _planned(self) -> Snapshot:
        """What is in force for all registered queries; made anew when something has been registered or dropped."""
        if not self._registered.queries:
            raise QueryError("NO_QUERY", "the engine has no query", "register one with engine.query(name, sql)")
        if self._launcher.running is not None and self._launcher.running.in_force is not None and self._is_running:
            return self._launcher.running.in_force
        admission = self._launcher.admission
        if admission is None:
            admission = self._launcher.admit()
            admission.begin(self._launcher.live, None)
            self._launcher.admission = admission
        assert admission.in_force is not None
        return admission.in_force

    def start(self, available_now: bool = False, every: str | None = None) -> Run:
        """Starts all queries: over what is available now, or for ever (`every` fixes the pace, such as "1 second")."""
        self._refuse_if_running("it cannot be started")
        if available_now and every is not None:
            raise StreamError("TRIGGER", "available_now and every exclude each other", "give one of them")
        refuse_gap(self.checkpoint)
        self._check_settings()
        attendant = Attendant(
            self._carry_out,
            lambda: self._in_force,
            self.checkpoint.files,
            lambda: self._is_running,
            status=lambda name: QueryHandle(self, name).status,
        )
        # What was left for this start is part of its first epoch.
        attendant.attend()
        self._restore()
        if self._registered.relations.keys() <= self._registered.tables:
            raise StreamError("NO_STREAM", "the engine has no stream", "register one with engine.stream(name, df)")
        self._launcher.run = Run(
            partial(self._launcher.begin, available_now, every), self._launcher.admit_in_place, not available_now
        )
        attendant.answer()
        attendant.start()
        return self._launcher.run

    @contextmanager
    def changes(self) -> Iterator[None]:
        """All that is registered, replaced or dropped inside is admitted together, when the block is left.

        While the engine runs, a query that gets its sink in the same block has it from its first row on.  Admission is
        held back from the first of these changes on, not while that is read and checked.
        """
        block = self._block
        block.depth += 1
        try:
            yield
        finally:
            block.depth -= 1
            with self._lock:
                if block.holds and not block.depth:
                    block.holds = False
                    self._launcher.holding -= 1
                self._tell_the_run()

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """As `changes`; if an error leaves the block, nothing in it has happened."""
        with self.changes(), self._lock:
            before = self._registered.memento()
            try:
                yield
            except BaseException:
                self._registered.go_back(before)
                raise

    @contextmanager
    def _changing(self, what: str) -> Iterator[None]:
        """What a handle changes."""
        with self._lock:
            self._refuse_if_closed(what)
            yield
            self._changed()

    def _changed(self) -> None:
        """Something was registered or dropped."""
        self._launcher.admission = None
        self._is_changed = True
        if self._block.depth and not self._block.holds:
            self._block.holds = True
            self._launcher.holding += 1
        self._launcher.asked_at = self._launcher.asked_at or time.monotonic()
        self._tell_the_run()

    def _tell_the_run(self) -> None:
        """A running engine admits what has changed after the running epoch."""
        if self._launcher.run is not None and self._is_changed and not self._launcher.holding and self._is_running:
            self._is_changed = False
            self._launcher.run.change()

    def queries(self) -> list[QueryHandle]:
        """The queries that are registered."""
        return [QueryHandle(self, name) for name in list(self._registered.queries)]

    def close(self) -> None:
        """Stops the run, if any, and lets the checkpoint go."""
        self._closed = True
        try:
            if self._launcher.run is not None:
                self._launcher.run.stop()
        finally:
            forget_verified(self.checkpoint)
            self.checkpoint.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_settings(self) -> None:
        """Records what SQL means on the first start; later, refuses to go on with another meaning."""
        now = meaning(self.spark)
        refuse_changed_meaning(self.checkpoint.settings(now), now)

    @property
    def _in_force(self) -> Catalog:
        """The catalog that the last epoch ran with, or that the next will, while the engine runs."""
        return self._launcher.in_force

    @property
    def _is_running(self) -> bool:
        return self._launcher.run is not None and self._launcher.run.is_active

    def _refuse_if_closed(self, what: str) -> None:
        if self._closed:
            raise StreamError("CLOSED", f"the engine is closed: {what}", "make a new engine on the same checkpoint")

    def _refuse_if_running(self, what: str) -> None:
        """Raises if the engine runs, or is closed."""
        self._refuse_if_closed(what)
        if self._is_running:
            raise StreamError("RUNNING", f"the engine is running: {what}", "stop the run first")
