"""The pipeline's own queries, running while the prompt of `plait sql` is open.

A thread adds up the progress reports: an engine keeps only the newest of them.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from plait.errors import PlaitError
from plait.serve import pipeline as pipelines
from plait.serve.progress import Totals, epoch_seconds

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from plait.serve.pipeline import Pipeline, QuerySpec

LOOK_EVERY_SECONDS = 1.0


class Background:
    """One run of a pipeline on its own checkpoint, from START to STOP."""

    def __init__(self, pipeline: Pipeline, spark: SparkSession, every: str | None = None) -> None:
        import plait

        self.pipeline = pipeline
        self.closed = self.told = False
        self.totals = Totals()
        self.engine = plait.Engine(spark, checkpoint=pipeline.checkpoint, config=pipeline.config)
        try:
            self.handles = pipelines.build(pipeline, self.engine, spark)
            every = every or pipeline.every
            self.run = self.engine.start(available_now=True) if every is None else self.engine.start(every=every)
        except BaseException:
            self.engine.close()
            raise
        self._end = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    @property
    def state(self) -> str:
        """In a word: running, ended (all is read), stopped, or failed and the code."""
        if self.closed:
            return "stopped"
        if self.run.is_active:
            return "running"
        failure = self.run.exception
        return "ended" if failure is None else f"failed [{failure.code}]"

    def close(self) -> None:
        """Stops after the running epoch and lets the checkpoint go; what was counted stays."""
        if self.closed:
            return
        self._end.set()
        self._thread.join()
        # A failure was reported when it was noticed; stopping cannot make it worse.
        with suppress(PlaitError):
            self.count()
        self.engine.close()
        self.closed = True

    def count(self) -> None:
        """Adds up the reports that have come since the last time."""
        with self._lock:
            self.totals.add(self.run.recent_progress)

    def row_of(self, query: QuerySpec) -> dict[str, Any]:
        """One line of SHOW QUERIES."""
        handle = self.handles[query.name]
        parts = [self.engine.plan.query_by_name[name] for name in handle.joins]
        streams = {relation for part in parts for _, relation in part.relations}
        last = self.totals.last
        return {
            "name": query.name,
            "mode": handle.output_mode,
            "state": self.state,
            "epochs": self.totals.epochs,
            "rows_in": sum(self.totals.rows_in[stream] for stream in streams),
            "rows_out": sum(self.totals.rows_out[part.name] for part in parts),
            "last_epoch_seconds": round(epoch_seconds(last), 3) if last else None,
        }

    def _watch(self) -> None:
        while not self._end.wait(LOOK_EVERY_SECONDS):
            with suppress(Exception):  # Spark may be gone; the main thread says so.
                self.count()
