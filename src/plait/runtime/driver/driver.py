"""What lives from epoch to epoch on the driver, by who may change it.  All of it can be rebuilt from the checkpoint.

    Services   what epochs are run by: Spark, the checkpoint, settings, the clock, the sinks of the queries in force
    InForce    what the next epoch runs with (live state, catalog, plan): one frozen value, replaced as a whole
    Feedback   what past epochs have taught: the optimiser, sizes, durations, reports

An `Epoch` is one micro-batch on its way through the steps of `epoch.py`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from pyspark.sql import DataFrame, SparkSession

from plait.config import Config
from plait.errors import PlaitError
from plait.query.observed import Observed
from plait.query.plan import Plan
from plait.query.progress import CatalogInForce, ChangesReport, OptimiserReport, Progress, Replanned
from plait.runtime.answers.answer import Sources
from plait.runtime.answers.answer_queue import Behind
from plait.runtime.answers.result_reader import ResultRows
from plait.runtime.driver.batch_sizes import Batches
from plait.runtime.driver.collect import Collected
from plait.runtime.driver.first_pass import FirstPass
from plait.runtime.driver.parking import Parking
from plait.runtime.driver.scaling import Capacity, Scaling
from plait.runtime.driver.sinks import Sink
from plait.runtime.driver.state_account import StateAccount
from plait.runtime.driver.steady_clock import system_clock
from plait.runtime.task.epoch_task import EpochTask
from plait.state.log.checkpoint import Checkpoint
from plait.state.log.manifest import LiveState, Manifest
from plait.state.segments.segment import SegmentInfo

EXCHANGE_SECONDS = 0.1
"""What Spark needs for an exchange between tasks, however little travels."""


class Planner(Protocol):
    """What the driver needs of the optimiser (share/planner.py): it sees each epoch, and may change the plan."""

    @property
    def plan(self) -> Plan: ...

    def looked(self) -> None: ...

    @property
    def samples(self) -> frozenset[int]: ...

    def observe(self, observed: Observed, now: float) -> bool: ...

    def report(self) -> OptimiserReport: ...

    def memory(self) -> dict[str, Any] | None: ...


class Changes(Protocol):
    """What the driver needs of whoever keeps the catalog (`admission.py`): epochs may make queries live."""

    @property
    def catalog_in_force(self) -> CatalogInForce: ...

    def after(self, live: LiveState) -> Planner | None: ...


@dataclass(frozen=True)
class Services:
    """What epochs are run by.  Sinks, answers and tables are those of the queries in force; the rest never changes."""

    spark: SparkSession
    checkpoint: Checkpoint
    config: Config
    sinks: Mapping[str, Sink]
    verified_dir: str | None
    parking: Parking
    """Queries whose deliveries wait."""
    watermark_policy: str = "min"
    clock: Callable[[], int] = system_clock
    """Microseconds since 1970: what TTLs are measured by."""
    changes: Changes | None = None
    """None keeps the queries for ever."""
    sources: Sources = field(default_factory=Sources)
    """What is kept for queries of which Spark does a part."""
    behind: Behind = field(default_factory=Behind)
    """Their answers, on the way to sinks."""
    tables: Mapping[int, DataFrame] = field(default_factory=dict)
    """The buckets of tables, by the epoch in which they arrive."""
    executor_cores: str | None = None
    """Spark's setting, where it has one."""
    most_tasks: int | None = None
    """Tasks that run at the same time once Spark has allocated all executors it may; None where it allocates none."""
    working: threading.RLock = field(default_factory=threading.RLock)
    """Held by whoever runs an epoch; a sink may stop the run that it is called by."""

    @property
    def queries(self) -> set[str]:
        """The ids of all queries."""
        return {join for join in self.sinks if self.sources.source(join) is None} | set(self.sources.answers)

    @property
    def parallel(self) -> int:
        """Tasks that run at the same time."""
        return int(self.spark.sparkContext.defaultParallelism)

    @property
    def capacity(self) -> Capacity:
        """What there is to run tasks on, and what there could be."""
        return Capacity(self.parallel, max(self.parallel, self.most_tasks or 0))


@dataclass(frozen=True)
class InForce:
    """What the next epoch runs with.  Steps replace it as a whole; nothing in it changes."""

    live: LiveState
    """What is committed."""
    plan: Plan
    rows: ResultRows
    """Reads results of the plan's queries."""
    catalog: CatalogInForce = field(default_factory=CatalogInForce)
    samples: frozenset[int] = frozenset()
    """The ingest edges of which new tuples are sampled for the optimiser."""
    arriving: Mapping[int, float] = field(default_factory=dict)
    """Which share of its keys got as far as a node of the plan, in the last epoch."""

    def with_plan(self, plan: Plan) -> InForce:
        """The same with another plan, of which nothing has been seen yet."""
        return replace(self, plan=plan, rows=replace(self.rows, plan=plan), arriving={})


@dataclass
class Feedback:
    """What past epochs of a run have taught."""

    planner: Planner | None = None
    """The optimiser; None keeps the plan for ever."""
    state: StateAccount = field(default_factory=StateAccount)
    """What state has cost."""
    batches: Batches = field(default_factory=Batches)
    """How large the batches are that Spark hands to tasks."""
    progress: deque[Progress] = field(default_factory=deque)
    scaling: Scaling = field(default_factory=Scaling)
    """The tasks of the last epoch, and what key groups have cost."""
    seconds: float = 0.0
    """What the last epoch took: merging gets its share of as much."""
    work: float | None = None
    """Seconds that the tasks of the last epoch worked, all together; before the first, as many as are expected."""
    failure: PlaitError | None = None
    """What ended the run."""
    changes: ChangesReport = field(default_factory=ChangesReport)
    """How changes of queries were admitted, since this run began."""


@dataclass
class Driver:
    """All that lives from epoch to epoch."""

    services: Services
    """Replaced between two epochs, where a change of queries needs no other streaming query."""
    now: InForce
    feedback: Feedback = field(default_factory=Feedback)
    first_pass: FirstPass = field(default_factory=FirstPass)
    replays: bool = False
    """Whether Spark is to repeat the last epoch, which is committed: until then sinks may lack its rows."""

    def goes_on_with(self, services: Services, planner: Planner) -> None:
        """Other queries from the next epoch on: between two epochs, and once their catalog is durable."""
        assert services.changes is not None
        self.services, self.feedback.planner = services, planner
        now = self.now.with_plan(planner.plan)
        self.now = replace(now, catalog=services.changes.catalog_in_force, samples=planner.samples)

    def scaled(self) -> Scaling:
        """Join tasks of the next epoch, and what they own."""
        config, known = self.services.config, self.feedback.scaling
        if isinstance(config.tasks, int):
            return known.next(config.tasks, f"tasks={config.tasks}")
        parallel = self.services.parallel
        saved = (self.feedback.work or 0.0) * (1 - 1 / parallel)
        exchanges = (self.now.plan.hops - 1) * EXCHANGE_SECONDS
        tasks = 1 if saved < exchanges else parallel
        reason = f"{parallel} tasks would save {saved:.2f} s of work, their exchanges take {exchanges:.2f} s"
        if config.tasks == "auto" and known.wanted > tasks:
            tasks, reason = known.wanted, f"epochs of {self.feedback.seconds:.1f} s, wanted {config.latency_target}"
        return known.next(tasks, reason)


@dataclass
class Epoch:
    """One micro-batch on its way through `STEPS`."""

    number: int
    buckets: DataFrame
    driver: Driver
    batch: int | None
    """Spark's number of it; None if Spark knows nothing of it, because no rows have arrived."""
    seconds: dict[str, float] = field(default_factory=dict)
    """By step."""
    task: EpochTask | None = None
    dropped: list[SegmentInfo] = field(default_factory=list)
    """Segments that are wholly expired, or of stores that nobody refers to."""
    account: Collected = field(default_factory=Collected)
    manifest: Manifest | None = None
    replanned: Replanned = field(default_factory=Replanned)
    await_durable: Callable[[], None] = lambda: None
    """Waits until what the commit relies on of Spark's logs is durable."""

    def ran(self, query: str) -> bool:
        """Whether earlier epochs have results of a query, by id."""
        begin = self.driver.now.catalog.begins(self.number)
        return any(q.name not in begin and q.name.partition(".")[0] == query for q in self.plan.queries)

    def __post_init__(self) -> None:
        self.plan = self.driver.now.plan
        """The plan that it runs with; the driver's may be the next epoch's already."""
