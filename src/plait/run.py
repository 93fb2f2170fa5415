"""The engine at work: what a user holds while epochs are run.

Queries may change meanwhile.  All changes that have gathered are admitted at once, between two epochs: by the thread
that is about to run an epoch, or, while no epoch runs, by a thread that waits for changes.  Only one of them has
`Services.working`, so every epoch runs with one catalog.  What goes beyond what Spark's streaming query selects of its
streams stops that query between two epochs, after a commit, and starts another one on the same checkpoint.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql.streaming.query import StreamingQuery

from plait.errors import PlaitError
from plait.query.progress import Progress
from plait.runtime.driver.driver import Driver
from plait.runtime.driver.epoch import has_idle_work, run_epoch, run_idle
from plait.runtime.driver.stopping import Stopping
from plait.runtime.spark.failures import translated
from plait.runtime.task.selections import Selection
from plait.state.log.manifest import LiveState

_IDLE_SECONDS = 0.25
"""After how long without rows, first passes over state and builds go on without them."""
_RETRY_SECONDS = 0.02
"""After how long a change is tried again that could not be admitted between two epochs."""


@dataclass(frozen=True)
class Started:
    """One of Spark's streaming queries, and what runs its epochs.  A run may go through several when queries change."""

    query: StreamingQuery
    driver: Driver
    stopping: Stopping
    selections: Mapping[str, Selection]
    """What it hands over, by stream."""


class Admits(Enum):
    """What came of an attempt to admit changes between two epochs."""

    DONE = "nothing is left to be admitted"
    LATER = "the time has not come"
    RESTART = "Spark's streaming query must be another one"


class Run:
    """The engine at work."""

    def __init__(
        self, begin: Callable[[Started | None], Started], admit: Callable[[Started], Admits], idles: bool
    ) -> None:
        """`begin` admits what the program has registered and starts Spark; it is given what ran before, if anything.

        `admit` admits without starting anew, if that can be; it is called between two epochs.  With `idles` it waits
        for rows for ever, and goes on meanwhile with what needs none.
        """
        self._begin, self._admit, self._idles = begin, admit, idles
        self._now = self._started(None)
        self._switching = threading.Lock()
        """Held while one streaming query is stopped and the next one started."""
        self._replacing: Started | None = None
        """What is being stopped so that the next streaming query can go on where it ends."""
        self._asked = threading.Event()
        self._ended = False
        self._failed: PlaitError | None = None
        threading.Thread(target=self._conduct, name="plait-changes", daemon=True).start()

    def _started(self, before: Started | None) -> Started:
        now = self._begin(before)
        now.stopping.active = lambda: bool(now.query.isActive)
        now.stopping.admit = lambda: self._admit(now)
        now.driver.services.behind.failed = self._answers_failed
        now.driver.services.parking.cancelled = lambda: now.stopping.impatient
        return now

    @property
    def is_active(self) -> bool:
        """Whether epochs are still being run, or answers are on their way."""
        now = self._now
        if now.query.isActive or now.driver.services.behind.busy:
            return True
        # It may have been stopped for the one that follows it: asked only now, because that can happen meanwhile.
        return not self._ended and (self._replacing is now or self._now is not now)

    @property
    def _is_replacing(self) -> bool:
        """Whether one of Spark's streaming queries is being stopped and the next one started."""
        return self._replacing is not None

    @property
    def live(self) -> LiveState:
        """What is committed."""
        return self._now.driver.now.live

    @property
    def newest(self) -> Progress | None:
        """The newest report of an epoch, without Spark's own parts."""
        reports = self._now.driver.feedback.progress
        return reports[-1] if reports else None

    # ------------------------------------------------------------ changes

    def change(self) -> None:
        """What the program has registered by now is admitted between this epoch and the next.  Returns at once."""
        self._asked.set()

    def _between_epochs(self, work: Callable[[Driver], None]) -> bool:
        """Does a piece of work while no epoch runs; False if that is not possible, because this is an epoch's thread.

        What has ended by itself does nothing any more.
        """
        if self._now.stopping.at_work == threading.get_ident():
            return False
        with self._switching:
            now = self._now
            with now.driver.services.working:
                if not self._ended and now.query.isActive:
                    work(now.driver)
        return True

    def _conduct(self) -> None:
        """Admits changes while no epoch runs, and does what can be done without rows while none arrive."""
        while True:
            asked = self._asked.wait(_IDLE_SECONDS)
            self._asked.clear()
            found = Admits.DONE
            with self._switching:
                # What has ended by itself is not started again: the next start admits what was registered.
                if self._ended or not self._now.query.isActive:
                    return
                try:
                    if asked:
                        found = self._admit_now()
                    else:
                        self._go_on_idly()
                    if found is Admits.RESTART:
                        self._switch()
                except Exception as error:
                    if not self._now.stopping.impatient:
                        self._failed = translated(error)
                    with contextlib.suppress(PySparkException, Py4JError, OSError):
                        self._now.query.stop()
                    return
                finally:
                    # Not before `_failed` says why there is no next one.
                    self._replacing = None
            if found is Admits.LATER:
                self._asked.set()
                time.sleep(_RETRY_SECONDS)

    def _admit_now(self) -> Admits:
        """Admits changes unless an epoch runs: whoever waited for it here would keep `stop` from cancelling it."""
        now = self._now
        if not now.driver.services.working.acquire(blocking=False):
            return Admits.LATER
        try:
            return Admits.DONE if now.stopping.asked else self._admit(now)
        finally:
            now.driver.services.working.release()

    def _go_on_idly(self) -> None:
        """First passes over state and builds go on while no rows arrive."""
        now = self._now
        if not self._idles or time.monotonic() - now.stopping.last_rows < _IDLE_SECONDS:
            return
        if not now.driver.services.working.acquire(blocking=False):
            return
        try:
            if now.stopping.asked or not now.query.isActive or not has_idle_work(now.driver):
                return
            now.stopping.at_work = threading.get_ident()
            try:
                run_idle(now.driver)
            finally:
                now.stopping.at_work = None
        finally:
            now.driver.services.working.release()

    def _switch(self) -> None:
        """Another streaming query on the same checkpoint, once the running epoch and its answers are through."""
        self._replacing = before = self._now
        before.stopping.ask(wait=True)
        with before.driver.services.working:
            pass
        if self._ended:
            return
        if before.query.isActive:
            before.query.stop()
        elif (error := before.query.exception()) is not None:
            # It had failed before anybody stopped it.
            self._failed = translated(error)
        before.driver.services.behind.close()
        before.driver.services.behind.wait()
        if before.driver.feedback.failure is None and self._failed is None and not self._ended:
            self._now = self._started(before)

    # ------------------------------------------------------------ the end

    def await_termination(self, timeout: float | None = None) -> bool:
        """Waits for the end, at most `timeout` seconds; True when it has ended.  Raises what made it fail."""
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            now = self._now
            try:
                if until is None:
                    now.query.awaitTermination()
                elif not now.query.awaitTermination(max(0.001, until - time.monotonic())):  # type: ignore[arg-type]
                    return False
                with self._switching:
                    # Spark's query was stopped for a change: the next one has been started by now.
                    if self._now is not now:
                        continue
                now.driver.services.behind.close()
                now.driver.services.behind.wait()
            except (PySparkException, Py4JError, OSError) as error:
                with self._switching:
                    if self._now is not now:
                        continue
                if (failure := self._failure(error)) is not None:
                    raise failure from error
            break
        if self._failed is not None:
            raise self._failed
        return True

    def stop(self, wait: bool = True) -> None:
        """Stops after the running epoch, when it is committed and its answers have arrived.

        With `wait=False`, or if waiting is interrupted, the running epoch is cancelled: the next start does it again.
        """
        self._ended = True
        self._asked.set()
        if self._now.stopping.at_work != threading.get_ident():
            # A change under way is through, or given up.
            with self._switching:
                pass
        now = self._now
        try:
            now.stopping.ask(wait)
            if not now.stopping.impatient:
                try:
                    with now.driver.services.working:
                        pass
                except BaseException:
                    now.stopping.ask(wait=False)
                    raise
        finally:
            self._stop(now)

    def _stop(self, now: Started) -> None:
        try:
            if now.query.isActive:
                now.query.stop()
        except (Py4JError, OSError) as error:
            # With the JVM gone nothing runs any more.
            if translated(error).code != "SPARK_LOST":
                raise translated(error) from error
        finally:
            # Spark does not wait for an epoch that is in Python, and without a JVM nobody does: it may be at its sinks.
            with now.driver.services.working:
                now.driver.services.behind.close()

    @property
    def exception(self) -> PlaitError | None:
        """What made the run fail, if it did; being stopped is no failure."""
        error = self._now.query.exception()
        found = self._now.driver.feedback.failure if error is None else self._failure(error)
        return found or self._failed

    @property
    def last_progress(self) -> dict[str, Any] | None:
        """The newest progress report; see docs/operations.md for its keys."""
        recent = self.recent_progress
        return recent[-1] if recent else None

    @property
    def recent_progress(self) -> list[dict[str, Any]]:
        """The progress reports kept (`Config.history`), oldest first; `spark_seconds` are Spark's own parts."""
        now = self._now
        spark = {p.batchId: {k: v / 1000 for k, v in p.durationMs.items()} for p in now.query.recentProgress}
        reports = list(now.driver.feedback.progress)
        return [
            {**report.json, "spark_seconds": spark.get(-1 if report.batch is None else report.batch, {})}
            for report in reports
        ]

    def _answers_failed(self, error: BaseException) -> None:
        """Ends the run: the next epoch would fail, but that may be far away."""
        now = self._now
        if not now.stopping.impatient:
            now.driver.feedback.failure = now.driver.feedback.failure or translated(error)
        with contextlib.suppress(PySparkException, Py4JError, OSError):
            now.query.stop()

    def _failure(self, error: BaseException) -> PlaitError | None:
        """The error that ended the run; None for what comes of being stopped."""
        now = self._now
        return now.driver.feedback.failure or (None if now.stopping.asked else translated(error))


def guarded(driver: Driver, stopping: Stopping, buckets: DataFrame, batch: int) -> None:
    """Keeps the error a user can act on: Spark would wrap it in its own."""
    with driver.services.working:
        if not stopping.asked:
            stopping.at_work = threading.get_ident()
            try:
                if batch > driver.now.live.batch:
                    stopping.admit()
                run_epoch(driver, buckets, batch)
            except Exception as error:
                # What an epoch says that was cancelled comes of that.
                if not stopping.impatient:
                    driver.feedback.failure = driver.feedback.failure or translated(error)
                raise
            finally:
                stopping.at_work = None
                stopping.last_rows = time.monotonic()
            return
    stopping.turn_away()
