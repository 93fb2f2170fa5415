"""Test doubles that ship with the library: scripted streams, a clock, fault points, and an engine without Spark.

`ScriptedStream` writes real Parquet files, one per epoch, so a test says exactly which rows arrive when.
`LocalEngine` runs a plan epoch by epoch in this process.  It calls the very functions that Spark's tasks call
(`bucketise.buckets`, `task.first_hop`, `later_hop`, `every_hop`) and the driver's own steps (`epoch.prepare`,
`park_troubled`, `commit`, `observe`) on a real checkpoint; only the exchange is a loop.  An epoch so costs
milliseconds, which buys hundreds of random cases for the price of one on Spark.
"""

from __future__ import annotations

import os
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from plait.config import Config
from plait.engine import Engine
from plait.query.expr import Expr
from plait.query.plan import Plan
from plait.query.progress import CatalogInForce
from plait.query.store import NEEDED, IngestEdge, Input, mask_columns
from plait.runtime.answers.answer import Sources
from plait.runtime.answers.live_results import LiveResults
from plait.runtime.answers.result_reader import ResultRows
from plait.runtime.driver.collect import Collected, collected
from plait.runtime.driver.commit import commit
from plait.runtime.driver.deliver import deliver
from plait.runtime.driver.driver import Changes, Driver, Epoch, Feedback, InForce, Planner, Services
from plait.runtime.driver.feedback import observe, replan
from plait.runtime.driver.missed import catch_up_parked
from plait.runtime.driver.parking import Parking
from plait.runtime.driver.prepare import prepare
from plait.runtime.driver.result_merge import merge_results
from plait.runtime.driver.sinks import Keep, Sink
from plait.runtime.driver.troubled import park_troubled
from plait.runtime.task.bucketise import PROPERTY, EpochParameters, buckets
from plait.runtime.task.epoch_task import EpochTask
from plait.runtime.task.exchange import DESCRIPTOR, Outbox
from plait.runtime.task.file_sets import query_table
from plait.runtime.task.hops import every_hop, first_hop, later_hop
from plait.runtime.task.join_task import Work
from plait.state.log.checkpoint import Checkpoint
from plait.state.log.manifest import LiveState
from plait.state.segments.evaluate import holds
from plait.state.segments.filter_sets import packed
from plait.state.segments.segment_reader import open_segment

_FIRST_FILE = 1_600_000_000
"""Modification time of a scripted stream's first file; each further one is a second younger."""


@dataclass
class Clock:
    """A clock that stands still until it is told to move; call it for the time in microseconds."""

    now_us: int = 2_000_000_000_000_000

    def __call__(self) -> int:
        return self.now_us

    def advance(self, seconds: float) -> None:
        """Moves on."""
        self.now_us += round(seconds * 1e6)


class ScriptedStream:
    """A file stream whose n-th file is what arrives in epoch n.

    The files' modification times are set a second apart, because Spark takes files in that order.
    """

    def __init__(self, spark: SparkSession, directory: str | os.PathLike[str], schema: str) -> None:
        self.directory = os.fspath(directory)
        os.makedirs(self.directory, exist_ok=True)
        self.schema = cast(StructType, StructType.fromDDL(schema))
        self.arrow = to_arrow_schema(self.schema, timezone="UTC")
        self._spark = spark

    @property
    def files(self) -> list[str]:
        """The files so far, oldest first."""
        return sorted(os.path.join(self.directory, n) for n in os.listdir(self.directory) if n.endswith(".parquet"))

    def add(self, rows: Iterable[Sequence[Any]] | pa.Table = ()) -> None:
        """One epoch's rows: tuples in the order of the schema, or a table.  None at all is an epoch without rows."""
        if not isinstance(rows, pa.Table):
            columns = list(zip(*rows, strict=True)) or [()] * len(self.arrow)
            arrays = [pa.array(list(c), f.type) for c, f in zip(columns, self.arrow, strict=True)]
            rows = pa.table(arrays, schema=self.arrow)
        number = len(self.files)
        path = os.path.join(self.directory, f"{number:06d}.parquet")
        draft = os.path.join(self.directory, f".{number:06d}")
        pq.write_table(rows, draft)
        os.utime(draft, (_FIRST_FILE + number, _FIRST_FILE + number))
        os.replace(draft, path)

    def frame(self) -> DataFrame:
        """The stream, one file per micro-batch."""
        reader = self._spark.readStream.schema(self.schema).option("maxFilesPerTrigger", 1)
        return reader.parquet(self.directory)

    def table(self, epochs: int | None = None) -> pa.Table:
        """All rows of the first `epochs` files."""
        tables = [pq.read_table(path, schema=self.arrow) for path in self.files[:epochs]]
        return pa.concat_tables([self.arrow.empty_table(), *tables])


def run_epochs(engine: Engine) -> list[dict[str, Any]]:
    """Runs everything that is available, waits for the end, and returns the progress of these epochs."""
    run = engine.start(available_now=True)
    run.await_termination()
    return run.recent_progress


@contextmanager
def fault(point: str, epoch: int, once: str | os.PathLike[str] | None = None) -> Iterator[None]:
    """Processes started inside die at the named point of an epoch (`runtime/faults.py`); with `once`, only the first.

    Python workers inherit the environment of the JVM, so start the session inside as well.
    """
    names = {"PLAIT_FAULT": f"{point}@{epoch}", "PLAIT_FAULT_ONCE": None if once is None else os.fspath(once)}
    before = {name: os.environ.get(name) for name in names}
    try:
        _set_environment(names)
        yield
    finally:
        _set_environment(before)


def _set_environment(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@dataclass
class _LocalContext:
    """What the driver's steps ask of a Spark session where there is none: a place for local properties."""

    properties: dict[str, str] = field(default_factory=dict)
    defaultParallelism: int = 1

    @property
    def sparkContext(self) -> _LocalContext:
        return self

    def setLocalProperty(self, name: str, value: str) -> None:
        self.properties[name] = value


class LocalEngine:
    """Runs a plan without Spark, on a real checkpoint.

    `predicates` gives the meaning of the SQL texts of filters and `needed`, as expressions over the stream's columns.
    Columns computed from SQL, and conditions or outputs left to Spark, need Spark and are refused.  `seed` decides how
    rows are spread over source tasks and in which order buckets arrive: nothing may depend on either.  With a `planner`
    its plan is run, and changes as it says.  An epoch of one task runs all hops in it, as on Spark.  With a `work`
    every hop is a task of its own, the first of that class: `Work` itself, or one that keeps the state of a query of
    one hop in another way.
    """

    def __init__(
        self,
        checkpoint: str | os.PathLike[str],
        plan: Plan,
        config: Config | None = None,
        *,
        predicates: Mapping[str, Expr] | None = None,
        clock: Callable[[], int] | None = None,
        planner: Planner | None = None,
        changes: Changes | None = None,
        seed: int = 0,
        work: type[Work] | None = None,
    ) -> None:
        config = config or Config(tasks=1, sync=False)
        if any(q.select or q.where for q in plan.queries):
            raise NotImplementedError("a query has conditions or outputs that only Spark can evaluate")
        self._random = random.Random(seed)
        self._work = work
        self._predicates = dict(predicates or {})
        self._context = _LocalContext()
        self.checkpoint = Checkpoint(os.fspath(checkpoint), config).open()
        spark = cast(SparkSession, self._context)
        services = Services(
            spark=spark,
            checkpoint=self.checkpoint,
            config=config,
            sinks={q.name: Keep() for q in plan.queries},
            verified_dir=os.path.join(self.checkpoint.path, "verified") if self.checkpoint.files.local else None,
            parking=Parking(self.checkpoint, config),
            clock=clock or Clock(),
            changes=changes,
            sources=Sources(live=LiveResults.read(self.checkpoint.log)),
        )
        now = InForce(
            live=self.checkpoint.log.live(),
            plan=plan,
            rows=ResultRows(spark, plan, self.checkpoint),
            catalog=CatalogInForce() if changes is None else changes.catalog_in_force,
            samples=frozenset() if planner is None else planner.samples,
        )
        self.driver = Driver(services, now, Feedback(planner, progress=deque(maxlen=config.history)))

    def change(self, plan: Plan | None = None, sinks: Mapping[str, Sink] | None = None, **config: Any) -> None:
        """Another plan, other sinks, other settings: from the next epoch on."""
        if plan is not None:
            self.driver.now = self.driver.now.with_plan(plan)
        services = self.driver.services
        changed = replace(services.config, **config)
        self.driver.services = replace(services, config=changed, sinks=services.sinks if sinks is None else sinks)

    @property
    def live(self) -> LiveState:
        """What is committed."""
        return self.driver.now.live

    @property
    def plan(self) -> Plan:
        """The plan of the next epoch."""
        return self.driver.now.plan

    @property
    def results(self) -> LiveResults:
        """The result files in force."""
        return self.driver.services.sources.live

    @property
    def progress(self) -> list[dict[str, Any]]:
        """The progress reports kept, oldest first, in their public form."""
        return [report.json for report in self.driver.feedback.progress]

    def run(
        self, arrivals: Mapping[str, pa.Table], edges: Mapping[str, tuple[IngestEdge, ...]] | None = None
    ) -> dict[str, pa.Table]:
        """One epoch with these new rows per stream; the rows it adds per query.  A stream left out is idle.

        Rows travel on all edges of their stream, or on those in `edges`, as a table's do (`admission.loaded`).
        """
        epoch = Epoch(self.live.epoch + 1, cast(DataFrame, None), self.driver, self.live.batch + 1)
        begun = time.perf_counter()
        prepare(epoch)
        epoch.account = self._join(epoch, arrivals, edges or {})
        park_troubled(epoch)
        merge_results(epoch)
        commit(epoch)
        catch_up_parked(epoch)
        deliver(epoch)
        replan(epoch)
        observe(epoch)
        self.driver.feedback.seconds = time.perf_counter() - begun
        assert epoch.manifest is not None
        added: dict[str, list[pa.Table]] = {query.name: [] for query in epoch.plan.queries}
        for file in epoch.manifest.results:
            table = query_table(pa.BufferReader(self.checkpoint.results.read(file.path) or b""), file.bit)
            assert table.num_rows == file.rows
            added[file.query].append(table)
        return {query: pa.concat_tables(tables) if tables else pa.table({}) for query, tables in added.items()}

    def close(self) -> None:
        """Lets the checkpoint go."""
        self.checkpoint.close()

    def __enter__(self) -> LocalEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _join(
        self, epoch: Epoch, arrivals: Mapping[str, pa.Table], edges: Mapping[str, tuple[IngestEdge, ...]]
    ) -> Collected:
        """`epoch.join` with a loop for a job."""
        task = epoch.task
        assert task is not None
        parameters = EpochParameters.from_property(self._context.properties[PROPERTY])
        rows: list[pa.RecordBatch] = []
        for source in task.plan.inputs:
            source = replace(source, edges=edges.get(source.relation, source.edges))
            if source.relation in arrivals and source.edges:
                selected = self._selected(source, arrivals[source.relation])
                for part in self._parts(selected):
                    rows.extend(buckets(part.to_batches(), source, parameters))
        if task.tasks == 1 and self._work is None:
            rows = list(every_hop(task, 0)(self._exchanged(rows, 1)[0]))
        else:
            rows = self._hop_by_hop(task, rows)
        notes = []
        for batch in rows:
            assert set(batch.column(1).to_pylist()) == {DESCRIPTOR}, "tuples are left over after the last hop"
            notes.extend(batch.column(2).to_pylist())
        return collected(notes, task.plan)

    def _hop_by_hop(self, task: EpochTask, rows: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
        for hop in range(1, task.plan.hops + 1):
            inboxes = self._exchanged(rows, task.tasks)
            rows = []
            for number, inbox in enumerate(inboxes):
                run = first_hop(task, number, self._work) if hop == 1 else later_hop(task, hop, number)
                rows.extend(run(inbox))
        return rows

    def _selected(self, source: Input, table: pa.Table) -> pa.Table:
        """What Spark does before bucketising: `where` and `select`."""
        names = [c.name for c in source.columns]
        if computed := [n for n in names if n.startswith("=")]:
            raise NotImplementedError(f"{source.relation} has computed columns: {', '.join(computed)}")
        bits = [self._passing(text, table) for text in source.texts]
        selected = table.select(names)
        if source.needed is not None:
            selected = selected.append_column(NEEDED, pa.array(self._passing(source.needed, table)))
        if len(bits) > 1:
            for name, word in zip(mask_columns(len(bits)), packed(bits, table.num_rows), strict=True):
                selected = selected.append_column(name, pa.array(word))
        return selected.filter(pa.array(np.logical_or.reduce(bits)))

    def _passing(self, text: str | None, table: pa.Table) -> np.ndarray[Any, np.dtype[np.bool_]]:
        if text is None:
            return np.ones(table.num_rows, np.bool_)
        found = holds(self._predicates[text], lambda ref: table.column(ref.column).combine_chunks())
        return np.asarray(pc.fill_null(found, False).to_numpy(zero_copy_only=False))

    def _parts(self, table: pa.Table) -> list[pa.Table]:
        """The rows as one to three source tasks read them, some in several batches."""
        cuts = sorted(self._random.randrange(table.num_rows + 1) for _ in range(self._random.randrange(3)))
        bounds = [0, *cuts, table.num_rows]
        parts = [table.slice(a, b - a) for a, b in pairwise(bounds)]
        return [pa.concat_tables([p.slice(0, 1), p.slice(1)]) if self._random.random() < 0.3 else p for p in parts]

    def _exchanged(self, rows: list[pa.RecordBatch], tasks: int) -> list[list[pa.RecordBatch]]:
        """Every row in the inbox of its task, in any order."""
        outboxes = [Outbox() for _ in range(tasks)]
        for batch in rows:
            for row in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                outboxes[row[0]].rows.append(row)
        for outbox in outboxes:
            self._random.shuffle(outbox.rows)
        return [list(outbox.batches()) for outbox in outboxes]


def state_tables(engine: LocalEngine) -> dict[str, pa.Table]:
    """All rows at rest, by store."""
    found: dict[str, pa.Table] = {}
    for store, infos in engine.live.segments.items():
        runs = [open_segment(engine.checkpoint.home, info) for info in infos]
        parts = [run.slice(info.first, info.first + info.rows) for run, info in zip(runs, infos, strict=True)]
        # Rows of a MIR lose a column when they are merged.
        found[store] = pa.concat_tables(parts, promote_options="default")
    return found
