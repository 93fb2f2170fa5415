"""One query's trouble is its own: who is parked, and whether an error parks a query or ends the run.

Contract.  A query whose sink, answer or expression fails is *parked*: the epoch is committed, the others go on, and
this query's sink is not called until somebody resumes it.  Nothing of it is lost meanwhile: result files of the epochs
that it missed stay in force (`ResultFile.held`).  Beyond `Config.parked_epochs` or `Config.parked_bytes` they are let
go, and the query is `failed`.  What is everybody's trouble (Spark is lost, another driver has taken over, the
checkpoint is damaged or full) ends the run as ever.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from plait.config import Config, bytes_of
from plait.errors import CheckpointError, CorruptionError, PlaitError
from plait.query.layout import shown
from plait.runtime.spark.failures import translated
from plait.state.log.checkpoint import Checkpoint
from plait.state.log.manifest import ResultFile
from plait.state.log.parked import FAILED, PARKED, ParkedQuery, parked_queries, put_parked, remove_parked

DELIVER = "deliver"
SKIP = "skip"
_EVERYBODYS = ("SPARK_LOST", "WORKER_LOST", "RESULTS_FULL", "STATE_FULL", "CHECKPOINT_FULL", "STORAGE_UNREACHABLE")
"""Codes of errors that the next query would meet as well."""
_SPARK_ENDS = re.compile(r"SparkContext (?:was|has been) (?:shut down|stopped)|stopped SparkContext")
_LOG = logging.getLogger("plait")


class Parking:
    """The parked queries of one engine.  Epochs, answers and whoever resumes a query call it from their threads."""

    def __init__(self, checkpoint: Checkpoint, config: Config) -> None:
        self._checkpoint = checkpoint
        self._config = config
        self._records = parked_queries(checkpoint.files)
        self._lock = threading.RLock()
        self.cancelled: Callable[[], bool] = lambda: False
        """Whether the run is being cancelled: what fails then is nobody's trouble."""

    def of(self, query: str) -> ParkedQuery | None:
        """Its record, by id; None if it is not parked."""
        return self._records.get(query)

    @property
    def records(self) -> tuple[ParkedQuery, ...]:
        """All of them."""
        return tuple(self._records.values())

    def take(
        self,
        query: str,
        epoch: int,
        error: BaseException,
        others: Collection[str],
        before_ms: Mapping[str, int] | None = None,
        *,
        gone: str = "",
        asked_for: bool = False,
    ) -> None:
        """Parks a query from an epoch on, unless that ends the run: then raises the error.

        `others` are the ids of all queries that run.  `gone` says so if rows that it misses are not there: it is
        `failed` then.  With `asked_for` it is parked because somebody has set it a limit, and also if no other goes on.
        """
        found = translated(error)
        everybodys = isinstance(found, CorruptionError | CheckpointError) or found.code in _EVERYBODYS
        if everybodys or self.cancelled() or _SPARK_ENDS.search(str(error)):
            raise error
        goes_on = any(other != query and other not in self._records for other in others)
        policy = self._config.on_query_error
        if query not in self._records and (policy == "stop" or (policy == "auto" and not goes_on and not asked_for)):
            raise error
        name = shown(query)
        first = "raise the limit (q.limit, or options of `plait resume`)" if asked_for else "remove the cause"
        remedy = f"{first}, then engine.resume({name!r}) or `plait resume`; or drop or replace it"
        record = ParkedQuery(query, name, epoch, found.code, found.cause, remedy, before_ms=before_ms)
        self._park(_failed(record, gone) if gone else record)

    def _park(self, record: ParkedQuery) -> None:
        """One that is parked stays so, from its first missed epoch on, with this error."""
        query, cause, remedy = record.query, record.cause, record.remedy
        with self._lock:
            known = self._records.get(query)
            if known is not None:
                record = replace(record, since=known.since, before_ms=known.before_ms)
            self._put(record)
        if known is None:
            name, since = record.name, record.since
            _LOG.warning("query %r is parked from epoch %d on: [%s] %s — %s", name, since, record.code, cause, remedy)

    def ask(self, query: str, skip: bool) -> None:
        """Somebody wants a query to go on, with the epochs that it missed or without them."""
        with self._lock:
            record = self._records.get(query)
            if record is None:
                return
            if record.status == FAILED and not skip:
                raise PlaitError("MISSED_GONE", f"query {record.name!r} has failed: {record.cause}", record.remedy)
            self._put(replace(record, asked=SKIP if skip else DELIVER))

    def moved_on(self, query: str, since: int) -> None:
        """A parked query's sink has taken the epochs before this one."""
        with self._lock:
            self._put(replace(self._records[query], since=since))

    def caught_up(self, query: str) -> None:
        """It is owed nothing any more."""
        with self._lock:
            remove_parked(self._checkpoint.files, query)
            self._records.pop(query, None)

    def forget(self, living: Collection[str]) -> None:
        """Queries that were dropped or replaced are owed nothing."""
        for query in [query for query in self._records if query not in living]:
            self.caught_up(query)

    def bound(self, query: str, epoch: int, held: Collection[ResultFile]) -> bool:
        """Whether a parked query's missed rows may still be kept; beyond the limit it is `failed` from here on."""
        with self._lock:
            record = self._records.get(query)
            if record is None or record.status == FAILED:
                return False
            missed, size = epoch + 1 - record.since, sum(file.bytes for file in held)
            most = bytes_of("parked_bytes", self._config.parked_bytes)
            if missed <= self._config.parked_epochs and size <= most:
                return True
            limit = f"parked_epochs={self._config.parked_epochs}, parked_bytes={self._config.parked_bytes!r}"
            gone = f"it missed {missed:,} epochs with {size:,} bytes, more than are kept ({limit}); they are gone"
            self._put(_failed(record, gone))
            return False

    def holds(self, query: str) -> bool:
        """Whether rows of a query are kept for when it is resumed."""
        record = self._records.get(query)
        return record is not None and record.status == PARKED

    def _put(self, record: ParkedQuery) -> None:
        self._checkpoint.check_fence()
        put_parked(self._checkpoint.files, record)
        self._records[record.query] = record


def _failed(record: ParkedQuery, gone: str) -> ParkedQuery:
    """What it missed is not there."""
    remedy = f"engine.resume({record.name!r}, skip=True) goes on without what it missed; or drop or replace it"
    return replace(record, status=FAILED, cause=f"{gone}. {record.cause}", remedy=remedy, asked="")
