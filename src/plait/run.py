"""The engine at work: what a user holds while epochs are run."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql.streaming.query import StreamingQuery

from plait.errors import PlaitError
from plait.runtime.driver.driver import Driver
from plait.runtime.driver.epoch import run_epoch
from plait.runtime.driver.stopping import Stopping
from plait.runtime.spark.failures import translated


class Run:
    """The engine at work."""

    def __init__(self, query: StreamingQuery, driver: Driver, stopping: Stopping) -> None:
        self._query = query
        self._driver = driver
        self._stopping = stopping
        stopping.active = lambda: bool(query.isActive)
        driver.services.behind.failed = self._answers_failed

    @property
    def is_active(self) -> bool:
        """Whether epochs are still being run, or answers are on their way."""
        return self._query.isActive or self._driver.services.behind.busy

    def await_termination(self, timeout: float | None = None) -> bool:
        """Waits for the end, at most `timeout` seconds; True when it has ended.  Raises what made it fail."""
        try:
            if timeout is None:
                self._query.awaitTermination()
            elif not self._query.awaitTermination(timeout):  # type: ignore[arg-type]
                return False
            self._driver.services.behind.close()
            self._driver.services.behind.wait()
            return True
        except (PySparkException, Py4JError, OSError) as error:
            if (failure := self._failure(error)) is None:
                return True
            raise failure from error

    def stop(self, wait: bool = True) -> None:
        """Stops after the running epoch, when it is committed and its answers have arrived.

        With `wait=False`, or if waiting is interrupted, the running epoch is cancelled: the next start does it again.
        """
        try:
            self._stopping.ask(wait)
            if not self._stopping.impatient:
                try:
                    with self._driver.services.working:
                        pass
                except BaseException:
                    self._stopping.ask(wait=False)
                    raise
        finally:
            self._stop()

    def _stop(self) -> None:
        try:
            if self._query.isActive:
                self._query.stop()
        except (Py4JError, OSError) as error:
            # With the JVM gone nothing runs any more.
            if translated(error).code != "SPARK_LOST":
                raise translated(error) from error
        finally:
            # Spark does not wait for an epoch that is in Python, and without a JVM nobody does: it may be at its sinks.
            with self._driver.services.working:
                self._driver.services.behind.close()

    @property
    def exception(self) -> PlaitError | None:
        """What made the run fail, if it did; being stopped is no failure."""
        error = self._query.exception()
        return self._driver.feedback.failure if error is None else self._failure(error)

    @property
    def last_progress(self) -> dict[str, Any] | None:
        """The newest progress report; see docs/operations.md for its keys."""
        recent = self.recent_progress
        return recent[-1] if recent else None

    @property
    def recent_progress(self) -> list[dict[str, Any]]:
        """The progress reports kept (`Config.history`), oldest first; `spark_seconds` are Spark's own parts."""
        spark = {p.batchId: {k: v / 1000 for k, v in p.durationMs.items()} for p in self._query.recentProgress}
        reports = list(self._driver.feedback.progress)
        return [{**report.json, "spark_seconds": spark.get(report.epoch, {})} for report in reports]

    def _answers_failed(self, error: BaseException) -> None:
        """Ends the run: the next epoch would fail, but that may be far away."""
        if not self._stopping.impatient:
            self._driver.feedback.failure = self._driver.feedback.failure or translated(error)
        with contextlib.suppress(PySparkException, Py4JError, OSError):
            self._query.stop()

    def _failure(self, error: BaseException) -> PlaitError | None:
        """The error that ended the run; None for what comes of being stopped."""
        return self._driver.feedback.failure or (None if self._stopping.asked else translated(error))


def guarded(driver: Driver, stopping: Stopping, buckets: DataFrame, number: int) -> None:
    """Keeps the error a user can act on: Spark would wrap it in its own."""
    with driver.services.working:
        if not stopping.asked:
            stopping.at_work = threading.get_ident()
            try:
                run_epoch(driver, buckets, number)
            except Exception as error:
                # What an epoch says that was cancelled comes of that.
                if not stopping.impatient:
                    driver.feedback.failure = driver.feedback.failure or translated(error)
                raise
            finally:
                stopping.at_work = None
            return
    stopping.turn_away()
