"""The queries of a checkpoint, seen beside whoever runs them.

Contract.  Nothing is written and no lock is taken.  The catalog is read anew whenever it is asked for; its queries are
defined again from their texts, over stubs of the streams as the catalog describes them, and planned with what the
engine has learnt.  Results are those that are committed by then.
"""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager
from functools import partial

from pyspark.sql import DataFrame, SparkSession

from plait.admission import Admission, Snapshot, admitted
from plait.attendant import SINKS
from plait.catalog.catalog import Catalog, StreamEntry
from plait.config import Config
from plait.errors import CheckpointError, RecomputationWarning, StreamError
from plait.explain import explain, explain_stages
from plait.queries import Desk, QueryHandle, RegisteredQuery, watermark_policy
from plait.query.relation import Relation
from plait.registry import Registry
from plait.runtime.driver.sinks import make_sink
from plait.state.log import catalog_versions as catalogs
from plait.state.log.checkpoint import Checkpoint
from plait.state.log.parked import parked_queries


class AttachedEngine:
    """What an engine of another process has on its checkpoint."""

    def __init__(self, spark: SparkSession, checkpoint: str, config: Config | None = None) -> None:
        self.spark = spark
        self.checkpoint = Checkpoint(checkpoint, config or Config())
        self._catalog = Catalog()
        self._registry = self._empty()
        self._snapshot: Snapshot | None = None
        self._known: set[str] = set()
        self._desk = self._new_desk()

    def catalog(self) -> Catalog:
        """The newest version, with its queries defined."""
        found = catalogs.newest(self.checkpoint.files)
        if found is None:
            where = self.checkpoint.path
            raise CheckpointError("NOT_STARTED", f"no engine has started on {where} yet", "start one")
        if found["version"] != self._catalog.version:
            self._read(Catalog.from_json(found))
        return self._catalog

    @property
    def queries(self) -> dict[str, RegisteredQuery]:
        """By name."""
        self.catalog()
        return self._registry.queries

    def results(self, name: str) -> DataFrame:
        """The committed rows of a query, or its answer so far."""
        self.catalog()
        return QueryHandle(self, name).results()

    def explain(self, name: str | None = None, stages: bool = False) -> str:
        """As `Engine.explain`: with the orders that the engine has remembered last."""
        queries = self.queries
        if stages:
            return "\n".join(explain_stages(n, queries[n].read) for n in ([name] if name else queries))
        now = self._planned()
        graphs = {join: g for join, g in now.graphs.items() if name is None or join in queries[name].graphs}
        return explain(now.plan, graphs, self._registry.relations, "text", now.optimiser, now.catalog)

    def _read(self, catalog: Catalog) -> None:
        self._catalog, self._snapshot, self._registry = catalog, None, self._empty()
        registry = self._registry
        for stream in catalog.streams.values():
            registry.relations[stream.name] = _relation(stream)
            schema = ", ".join(f"`{name.replace('`', '``')}` {kind}" for name, kind in stream.columns)
            # Nobody reads it: only its columns are looked at.
            registry.frames[stream.name] = self.spark.createDataFrame([], schema)
            if stream.table:
                registry.tables.add(stream.name)
        self._desk = self._new_desk()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RecomputationWarning)
            for entry in catalog.queries.values():
                made = registry.define(entry.name, entry.sql, entry.mode, entry.since, replaces=False)
                made.origin, made.budget = entry.origin, entry.budget
                if entry.sink is not None:
                    kind, options = entry.sink["kind"], entry.sink["options"]
                    # Where a function takes the rows, nobody else can tell where they are.
                    kind, options = (kind, options) if kind in SINKS else ("noop", {})
                    sink = make_sink(kind, entry.name, partial(self.results, entry.name), options, False)
                    made.use(sink, kind, options)

    def _planned(self) -> Snapshot:
        catalog = self.catalog()
        if self._snapshot is None:
            live, policy = self.checkpoint.log.live(), watermark_policy(self.spark)
            config = self.checkpoint.config
            asked = self._registry.asked("drop", config.stores)
            admission = Admission(
                self.checkpoint, config, asked, admitted(catalog, asked, live, policy, config.sharing), policy
            )
            admission.begin(live, self.checkpoint.statistics())
            self._snapshot = admission.in_force
        assert self._snapshot is not None
        return self._snapshot

    def _empty(self) -> Registry:
        return Registry(self.spark, lambda: self._catalog, lambda id: self._desk.complete_us(id))

    def _new_desk(self) -> Desk:
        return Desk(
            self.spark,
            self.checkpoint,
            self.checkpoint.config,
            plan=lambda: self._planned().plan,
            catalog=lambda: self._catalog,
            changing=_refuse,
            run=lambda: None,
            parked=lambda id: parked_queries(self.checkpoint.files).get(id),
            resume=lambda name, skip: None,
            queries=self._registry.queries,
            known=self._known,
        )


def _relation(stream: StreamEntry) -> Relation:
    return Relation(
        stream.name,
        stream.columns,
        stream.time_column,
        stream.delay_ms,
        stream.ttl_us,
        stream.needed,
        stream.keep,
    )


def _refuse(what: str) -> AbstractContextManager[None]:
    raise StreamError("ATTACHED", f"the engine is one of another process: {what}", "use plait add, drop or replace")
