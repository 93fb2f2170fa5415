"""Where a query's rows go.  A sink gets each epoch's rows once per epoch number, after the epoch is committed.

If the process dies between the sink and its receipt the same epoch is handed over again, with the same number and
the same rows; `parquet` and `memory` recognise it, `foreach_batch` gets the number to do the same.

A directory of the parquet sink belongs to one query of one checkpoint: a file in it says to which.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol
from urllib.parse import unquote, urlparse

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from plait.errors import CheckpointError, QueryError, StorageError
from plait.runtime.faults import reached
from plait.state.files.owner import Owner, claim
from plait.state.files.storage import TEMPORARY, LocalFiles, make_directory, sync_directory, unlink_older

Rows = Callable[[], DataFrame]


class Sink(Protocol):
    """Takes an epoch's rows: as files (the parquet sink; the others are given none) or, when called for, as rows."""

    keeps_rows: bool
    """Whether the rows stay in the checkpoint, so that `q.results()` can give them back."""
    reads_rows: bool
    """Whether it wants rows at all; if not, they are dropped where they are made."""
    delivers: bool
    """Whether it has to be called at all."""

    def claim(self, owner: Owner, ran: bool) -> None:
        """Makes what it writes to the owner's, or raises; `ran` says whether the checkpoint has committed an epoch.

        Called at every start, before the first epoch is delivered.
        """

    def deliver(self, epoch: int, files: list[str], rows: Rows) -> None:
        """Hands one epoch over."""

    def results(self, spark: SparkSession, schema: StructType) -> DataFrame | None:
        """All rows it holds, if it can tell."""


class Keep:
    """No sink: the rows stay in the checkpoint."""

    keeps_rows = True
    reads_rows = True
    delivers = False

    def claim(self, owner: Owner, ran: bool) -> None:
        """Nothing to do: it writes to nothing of its own."""

    def deliver(self, epoch: int, files: list[str], rows: Rows) -> None:
        """Nothing to do: committed rows are already where they belong."""

    def results(self, spark: SparkSession, schema: StructType) -> DataFrame | None:
        return None


class Noop(Keep):
    """The papers' black hole: rows are fully materialised in the task, then dropped."""

    keeps_rows = False
    reads_rows = False


class Console(Keep):
    """Prints every epoch's first rows."""

    keeps_rows = False
    delivers = True

    def __init__(self, rows: int = 20) -> None:
        self.rows = rows

    def deliver(self, epoch: int, files: list[str], rows: Rows) -> None:
        frame = rows()
        print(f"-------- epoch {epoch} --------")
        frame.show(self.rows, truncate=False)


class Memory(Keep):
    """Rows stay in the checkpoint and appear as a temporary view named after the query."""

    delivers = True

    def __init__(self, view: str, all_rows: Rows) -> None:
        self.view = view
        self.all_rows = all_rows

    def deliver(self, epoch: int, files: list[str], rows: Rows) -> None:
        self.all_rows().createOrReplaceTempView(self.view)


class ForeachBatch(Keep):
    """Calls `fn(rows, epoch)`, as Spark's foreachBatch does."""

    keeps_rows = False
    delivers = True

    def __init__(self, fn: Callable[[DataFrame, int], None]) -> None:
        if not callable(fn):
            raise TypeError(f"fn must be a function of rows and epoch, not {fn!r}")
        self.fn = fn

    def deliver(self, epoch: int, files: list[str], rows: Rows) -> None:
        self.fn(rows(), epoch)


PARQUET_OWNER = "_plait_owner.json"
"""Whose a directory is; Spark and Arrow skip names that begin so."""
_DRAFT = ".draft-"
_STALE_SECONDS = 3600.0
"""Age from which the draft of a file is taken for a killed driver's."""


class Parquet(Keep):
    """One or more files per epoch, named by it: delivering an epoch again writes the same names again."""

    keeps_rows = False
    delivers = True

    def __init__(self, path: str, sync: bool = True) -> None:
        parsed = urlparse(path)
        if parsed.scheme not in ("", "file"):
            raise QueryError(
                "SINK", f"the parquet sink writes local paths, not {parsed.scheme}:", "use foreach_batch and df.write"
            )
        self.path = os.path.abspath(unquote(parsed.path) if parsed.scheme else path)
        self.sync = sync

    def claim(self, owner: Owner, ran: bool) -> None:
        """The directory is the owner's.  One that an earlier version wrote is that of a checkpoint that has run."""
        folder = LocalFiles(self.path, self.sync)
        try:
            make_directory(self.path, self.sync)
            names = os.listdir(self.path)
            if PARQUET_OWNER not in names and not ran and any(name.startswith("epoch-") for name in names):
                raise self._owned("files of another checkpoint, and this one has not run yet")
            other = claim(folder, PARQUET_OWNER, owner)
            for name in names:
                if name.startswith((_DRAFT, TEMPORARY)):
                    unlink_older(folder.where(name), time.time() - _STALE_SECONDS)
        except OSError as error:
            raise self._unwritable(error) from error
        if other is not None:
            raise self._owned(f"what query {other.query!r} of the checkpoint {other.path} on host {other.host} writes")

    def _owned(self, by: str) -> CheckpointError:
        return CheckpointError(
            "SINK_OWNED",
            f"the directory {self.path} of a parquet sink holds {by}",
            "give the query a directory of its own, or empty this one; if it is the same checkpoint, moved, delete "
            f"the file {PARQUET_OWNER} in it",
        )

    def _unwritable(self, error: OSError) -> StorageError:
        return StorageError(
            "SINK_UNWRITABLE",
            f"the parquet sink cannot write {self.path}: {error}",
            "free space or correct the path; what is committed is delivered on the next start",
        )

    def deliver(self, epoch: int, files: list[str], rows: Rows) -> None:
        try:
            make_directory(self.path, self.sync)
            for number, source in enumerate(files):
                target = os.path.join(self.path, f"epoch-{epoch:012d}-{number:04d}.parquet")
                # Spark and Arrow skip names that begin with a dot: a half-copied file is never read.  The name is the
                # attempt's own: a driver that has been taken over from may still be copying.
                draft = os.path.join(self.path, f"{_DRAFT}{epoch:012d}-{number:04d}-{uuid.uuid4().hex}")
                try:
                    self._copy(source, draft)
                    reached("sink.draft", epoch)
                    os.replace(draft, target)
                except BaseException:
                    with contextlib.suppress(OSError):
                        os.unlink(draft)
                    raise
                reached("sink.file", epoch)
            if self.sync:
                # The receipt that follows lets the rows in the checkpoint be deleted.
                sync_directory(self.path)
        except OSError as error:
            raise self._unwritable(error) from error

    def _copy(self, source: str, draft: str) -> None:
        with open(source, "rb") as rows, open(draft, "xb") as file:
            shutil.copyfileobj(rows, file, 1 << 20)
            file.flush()
            if self.sync:
                os.fsync(file.fileno())

    def results(self, spark: SparkSession, schema: StructType) -> DataFrame | None:
        if not (os.path.isdir(self.path) and any(name.startswith("epoch-") for name in os.listdir(self.path))):
            return spark.createDataFrame([], schema)
        return spark.read.schema(schema).parquet(self.path)


KINDS = ("console", "foreach_batch", "memory", "noop", "parquet")


def make_sink(kind: str, query: str, all_rows: Rows, options: Mapping[str, Any], sync: bool = True) -> Sink:
    """The sink a user asked for by name; with `sync` its files are durable before it has a receipt."""
    given = dict(options)
    try:
        if kind == "noop":
            return _made(Noop, given)
        if kind == "console":
            return _made(Console, given)
        if kind == "memory":
            return _made(partial(Memory, query, all_rows), given)
        if kind == "parquet":
            return _made(partial(Parquet, sync=sync), given)
        if kind == "foreach_batch":
            return _made(ForeachBatch, given)
    except TypeError as error:
        raise QueryError("SINK", f"sink {kind!r} of query {query!r}: {error}", "correct its options") from None
    raise QueryError("SINK", f"there is no sink called {kind!r}", f"use one of: {', '.join(KINDS)}")


def refuse_appending(kind: str, query: str) -> None:
    """Raises if a sink can only be added to, and the query's answer changes."""
    if kind == "parquet":
        raise QueryError(
            "SINK",
            f"the parquet sink of query {query!r} only adds rows, but its answer changes from epoch to epoch",
            "use memory, console, or foreach_batch with df.write.mode('overwrite')",
        )


def _made(kind: Callable[..., Sink], options: dict[str, Any]) -> Sink:
    return kind(**options)
