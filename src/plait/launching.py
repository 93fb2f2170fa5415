"""How what is registered with an engine is admitted: at a start, and between two epochs while it runs.

Engine (engine.py)       what users call: it registers, under a lock
Launcher (this file)     what is registered becomes a catalog, a plan, and a streaming query of Spark
Run (run.py)             when: a start, between two epochs, or by stopping and starting Spark's query
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial, reduce

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from plait.admission import Admission, Admitted, Asked, admitted
from plait.catalog.catalog import Catalog
from plait.catalog.upgrade import filters_of, upgraded
from plait.config import Config
from plait.errors import PlaitError
from plait.preview import Preview, preview
from plait.queries import watermark_policy
from plait.query.plan import Plan
from plait.query.store import Input
from plait.registry import Registry
from plait.run import Admits, Run, Started, guarded
from plait.runtime.answers.answer import Answer, Sources
from plait.runtime.answers.live_results import LiveResults
from plait.runtime.answers.result_reader import ResultRows
from plait.runtime.driver.deliver import catch_up, claim
from plait.runtime.driver.driver import Driver, Feedback, InForce, Services
from plait.runtime.driver.missed import deliver_missed
from plait.runtime.driver.parking import Parking
from plait.runtime.driver.scaling import most_tasks
from plait.runtime.driver.sinks import Keep, Sink
from plait.runtime.driver.source_log import can_change_streams, choose_sources
from plait.runtime.driver.steady_clock import SteadyClock
from plait.runtime.driver.stopping import Stopping
from plait.runtime.driver.verified import verified_dir
from plait.runtime.faults import reached
from plait.runtime.spark.failures import translated
from plait.runtime.spark.session import forget_origins
from plait.runtime.task.bucketise import bucketised
from plait.share.planner import Planner
from plait.starting import (
    deliver_to_old_sinks,
    is_covered,
    loads,
    refuse_other_positions,
    selected,
    streamed,
    triggered,
    will_replay,
)
from plait.state.log import catalog_versions as catalogs
from plait.state.log.checkpoint import Checkpoint
from plait.state.log.events import mean_rows
from plait.state.log.manifest import LiveState, modernised


class Launcher:
    """Admits what is registered with one engine, and starts Spark."""

    def __init__(
        self,
        spark: SparkSession,
        config: Config,
        checkpoint: Checkpoint,
        catalog: Catalog,
        registered: Registry,
        restore: Callable[[], None],
    ) -> None:
        """`catalog` is the newest of the checkpoint; `restore` defines queries that other processes have added."""
        self.spark, self.config, self.checkpoint = spark, config, checkpoint
        self.registered = registered
        self.restore = restore
        self.catalog = catalog
        """That the last start, or change, has admitted."""
        self.live = LiveState()
        """What was committed at the last start."""
        self.parking = Parking(checkpoint, config)
        self.clock = SteadyClock(config.max_future_us)
        self.known: set[str] = set()
        """Result files in force that this engine has written or verified."""
        self.lock = threading.RLock()
        """Held while something is registered, and while what is registered is admitted."""
        self.run: Run | None = None
        """The run under way, or the last one."""
        self.admission: Admission | None = None
        """What is registered, as it would be admitted; None once something else is."""
        self.running: Admission | None = None
        """The admission of the last start: versions are added while it runs."""
        self.holding = 0
        """Blocks of `changes` that are open and have changed something: nothing is admitted meanwhile."""
        self.asked_at: float | None = None
        """When the first change was made that waits for its admission; None if none does."""

    def begin(self, available_now: bool, every: str | None, before: Started | None) -> Started:
        """Admits what is registered, and starts Spark's streaming query; `before` ran the epochs until now."""
        with self.lock:
            begun, asked_at = time.monotonic(), self.asked_at
            admission = self.admit()
            last = None if before is None or self.running is None else self.running.planner
            learnt = self.checkpoint.statistics() if last is None else last.knowledge()
            planner = admission.begin(self.live, learnt)
            self.admission = admission
            feedback = Feedback(planner, progress=deque(maxlen=self.config.history))
            if before is not None:
                feedback = replace(before.driver.feedback, planner=planner)
            driver = Driver(self._services(admission), self._first(admission, planner), feedback)
            driver.replays = will_replay(self.checkpoint)
            refuse_other_positions(self.checkpoint, self.spark, admission.now.catalog, self.registered.frames)
            streams = streamed(admission.now.catalog)
            selections = selected(streams, None if before is None else before.selections)
            sources = choose_sources(self.checkpoint, self.spark, self.frames_of(streams))
            buckets = reduce(
                DataFrame.union, [bucketised(sources.frames[name], name, chosen) for name, chosen in selections.items()]
            )
            spark_dir = self.checkpoint.spark_dir
            writer = (
                buckets.writeStream.queryName(f"plait-{self.checkpoint.id[:8]}-{self.checkpoint.token}")
                .option("checkpointLocation", f"file://{spark_dir}" if self.checkpoint.files.local else spark_dir)
                .foreachBatch(partial(guarded, driver, stopping := Stopping()))
            )
            writer = triggered(writer, available_now, every)
            deliver_to_old_sinks(
                driver, self.catalog, admission.now.catalog, self.registered.relations, self.registered.frames
            )
            forget_origins(self.spark)
            try:
                if self.catalog.version == 0 and catalogs.newest(self.checkpoint.files) is None:
                    catalogs.put(self.checkpoint.files, 0, self.catalog.to_json())
                admission.put(self.catalog)
                self.catalog, self.running = admission.now.catalog, admission
                self.registered.admitted()
                self.parking.forget({entry.id for entry in self.catalog.queries.values()})
                catch_up(driver)
                deliver_missed(driver)
                sources.record(self.checkpoint)
                with sources.starting(buckets.sparkSession):
                    started = Started(writer.start(), driver, stopping, selections)
            except (PySparkException, Py4JError) as error:
                raise translated(error) from error
            if before is not None:
                self._count_change("restart", driver, asked_at, begun)
            self.asked_at = None
            return started

    def frames_of(self, streams: Iterable[Input]) -> dict[str, DataFrame]:
        return {i.relation: self.registered.frames[i.relation] for i in streams}

    def admit_in_place(self, now: Started) -> Admits:
        """Admits what is registered within what Spark's streaming query selects; called between two epochs.

        The next epoch runs with it.  Whoever dies on the way leaves the old version, or the new one: that is written
        before anything else changes.
        """
        driver, begun = now.driver, time.monotonic()
        with self.lock:
            if self.asked_at is None or self.run is None:
                return Admits.DONE
            if self.holding or driver.replays:
                return Admits.LATER
            assert self.running is not None
            last = self.running.planner
            assert last is not None
            before, live = self.in_force, driver.now.live
            try:
                admission = self.proposed(before, live, last)
                catalog = admission.now.catalog
                refuse_other_positions(self.checkpoint, self.spark, catalog, self.registered.frames)
                if not is_covered(streamed(catalog), now.selections):
                    return Admits.RESTART
                planner = admission.begin(live, last.knowledge())
                services = replace(
                    driver.services,
                    sinks=self._sinks(),
                    changes=admission,
                    sources=Sources(self._answers(), driver.services.sources.live),
                    tables=loads(admission.now, self.registered.frames, live.epoch + 1),
                )
                claim(services, live.epoch >= 0, driver.services)
            except (PlaitError, PySparkException, Py4JError):
                # Whatever it is, a start tells it.
                return Admits.RESTART
            self.checkpoint.check_fence()
            reached("admit.1", live.epoch + 1)
            admission.put(before)
            reached("admit.2", live.epoch + 1)
            driver.goes_on_with(services, planner)
            self.catalog, self.running = admission.now.catalog, admission
            self.registered.admitted()
            self.parking.forget({entry.id for entry in self.catalog.queries.values()})
            self._count_change("in_place", driver, self.asked_at, begun)
            self.asked_at = None
            return Admits.DONE

    def _count_change(self, way: str, driver: Driver, asked_at: float | None, begun: float) -> None:
        now = time.monotonic()
        counted = driver.feedback.changes.after(way, now - (asked_at or begun), now - begun)
        driver.feedback.changes = counted

    def _services(self, admission: Admission) -> Services:
        """What epochs are run by."""
        sinks = self._sinks()
        return Services(
            spark=self.spark,
            checkpoint=self.checkpoint,
            config=self.config,
            sinks=sinks,
            verified_dir=verified_dir(self.checkpoint),
            parking=self.parking,
            watermark_policy=admission.policy,
            clock=self.clock,
            executor_cores=self.spark.sparkContext.getConf().get("spark.executor.cores"),
            most_tasks=most_tasks(dict(self.spark.sparkContext.getConf().getAll())),
            changes=admission,
            sources=Sources(self._answers(), LiveResults.read(self.checkpoint.log, sinks, admission.policy)),
            tables=loads(admission.now, self.registered.frames, self.live.epoch + 1),
        )

    def _first(self, admission: Admission, planner: Planner) -> InForce:
        """What the first epoch runs with."""
        rows = ResultRows(self.spark, planner.plan, self.checkpoint, self.known)
        return InForce(self.live, planner.plan, rows, admission.catalog_in_force, planner.samples)

    def _sinks(self) -> dict[str, Sink]:
        """By join: queries that only join have their own, the others' rows are kept for their answers."""
        return {
            join: Keep() if query.answer is not None else query.sink
            for query in self.registered.queries.values()
            for join in query.graphs
        }

    def _answers(self) -> dict[str, Answer]:
        return {query.id: query.answer for query in self.registered.queries.values() if query.answer is not None}

    def admit(self) -> Admission:
        """What the next epoch would run with."""
        self.restore()
        self.catalog = self.in_force
        self.live = self.checkpoint.log.live()
        if self.live.legacy or (self.catalog.version < 0 and self.checkpoint.catalog() is not None):
            self._upgrade(self.registered.asked(self.config.on_missing_query, self.config.stores))
        return self.proposed(self.catalog, self.live)

    def proposed(self, before: Catalog, live: LiveState, planner: Planner | None = None) -> Admission:
        """What is registered, on top of a catalog and what is committed; `planner` has run the epochs until then."""
        asked = self.registered.asked(self.config.on_missing_query, self.config.stores)
        now = admitted(before, asked, live, watermark_policy(self.spark), self.config.sharing)
        if before.version < 0 and not can_change_streams(self.checkpoint, self.spark):
            positions = tuple(sorted(name for name in self.registered.relations if name not in self.registered.tables))
            now = Admitted(replace(now.catalog, positions=positions), now.allocation, now.graphs)
        return Admission(self.checkpoint, self.config, asked, now, watermark_policy(self.spark), planner)

    def previewed(self, name: str, before: Plan | None) -> Preview:
        """What admitting what is registered would mean for one query."""
        run = self.run if self.run is not None and self.run.is_active else None
        if run is None or self.running is None or self.running.planner is None:
            admission, learnt, in_place = self.admit(), self.checkpoint.statistics(), None
            live = self.live
        else:
            live, learnt = run.live, self.running.planner.knowledge()
            admission = self.proposed(self.in_force, live, self.running.planner)
            in_place = is_covered(streamed(admission.now.catalog), run._selections)
        admission.begin(live, learnt)
        built = admission.as_if_built(live)
        built.begin(live, learnt)
        return preview(name, before, admission, built, live, mean_rows(self.checkpoint.files), in_place)

    def _upgrade(self, asked: Asked) -> None:
        """A checkpoint of format 3: what it says is said again in today's terms, and committed with the next epoch."""
        old = self.checkpoint.catalog()
        assert old is not None, "manifests of format 3 come with a catalog.json"
        if self.catalog.version < 0:
            self.catalog = upgraded(old, asked.relations, asked.tables, asked.definitions)
        if self.live.legacy:
            # By what the old release had, whatever has been admitted since: no epoch has run with that.
            written = catalogs.newest(self.checkpoint.files) is not None
            first = Catalog.from_json(catalogs.read(self.checkpoint.files, 0)) if written else self.catalog
            self.live = modernised(self.live, first.layout, filters_of(old, first.layout))

    @property
    def in_force(self) -> Catalog:
        """The catalog that the last epoch ran with, or that the next will, while the engine runs."""
        running = None if self.running is None else self.running.in_force
        return self.catalog if running is None else running.catalog
