"""Result rows of one task: written to a Parquet file under a fresh name, or materialised and dropped.

Where results rest behind a URI, the file is written to this host's disk and uploaded when it is complete.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import uuid
from typing import IO

import pyarrow as pa
import pyarrow.parquet as pq

from plait.errors import StorageError
from plait.query.plan import Emit
from plait.query.store import SET
from plait.runtime.task.computed import result_columns
from plait.runtime.task.frames import Partial
from plait.state.files.checksummed_file import ChecksummedFile
from plait.state.files.remote import RemoteFiles
from plait.state.files.segment_home import scratch_dir
from plait.state.files.storage import (
    PRIVATE,
    Files,
    beneath,
    create_file,
    make_directory,
    storage_error,
    sync_directory,
)
from plait.state.log.manifest import ResultFile


def results_folder(query: str) -> str:
    """Where a query's result files lie, below the results directory: users' names never become paths."""
    return hashlib.sha256(query.encode()).hexdigest()[:16]


def sync_results(directory: str, path: str) -> None:
    """Makes the name of a result file durable; its query's folder may be new as well."""
    sync_directory(os.path.dirname(os.path.join(directory, path)))
    sync_directory(directory)


class ResultWriter:
    """The rows one task adds to one query."""

    def __init__(
        self, query: str, columns: tuple[str, ...], results: Files | None, sync: bool, folder: str | None = None
    ) -> None:
        self.query = query
        self.folder = results_folder(query) if folder is None else folder
        self.columns = columns
        self.results = results
        self.sync = sync and results is not None and results.local
        self.rows = 0
        self.unpacked = 0
        """Bytes of the rows in memory."""
        self._path = ""
        self._full = ""
        """Where it is written: its place, or one on this host until it is uploaded."""
        self._file: IO[bytes] | None = None
        self._out: ChecksummedFile | None = None
        self._writer: pq.ParquetWriter | None = None

    def write(self, emit: Emit, partial: Partial) -> None:
        """Materialises a chunk of results; with nowhere to go the rows end here (the papers' black hole).

        They are computed all the same: whether a query fails must not depend on its sink.
        """
        self.add(pa.table(result_columns(self.query, emit, partial, self.columns), names=list(self.columns)))

    def add(self, batch: pa.Table) -> None:
        """More rows, in the query's columns."""
        self.rows += batch.num_rows
        if self.results is None:
            return
        self.unpacked += batch.nbytes
        try:
            if self._writer is None:
                self._open(batch.schema)
            assert self._writer is not None
            self._writer.write_table(batch)
        except OSError as error:
            raise self._failed(error) from error

    def close(self, whole: bool = False, grouped: bool = False) -> list[ResultFile]:
        """Finishes the file; none, where there were no rows."""
        if self._writer is None or self._file is None or self._out is None or self.results is None:
            return []
        try:
            self._writer.close()
            self._file.flush()
            if self.sync:
                os.fsync(self._file.fileno())
            self._file.close()
            if self.sync:
                sync_results(self.results.root, self._path)
        except OSError as error:
            raise self._failed(error) from error
        if isinstance(self.results, RemoteFiles):
            with open(self._full, "rb") as file:
                self.results.upload(file, self._path)
            os.unlink(self._full)
        digest = self._out.digest.hexdigest()
        return [ResultFile(self.query, self._path, self.rows, self._out.size, digest, whole, grouped, self.unpacked)]

    def abandon(self) -> None:
        """Removes what was written: the task has failed."""
        if self._file is not None:
            with contextlib.suppress(Exception):
                if self._writer is not None:
                    self._writer.close()
            self._file.close()
            with contextlib.suppress(OSError):
                os.unlink(self._full)

    def _open(self, schema: pa.Schema) -> None:
        assert self.results is not None
        self._path = f"{self.folder}/{uuid.uuid4().hex}.parquet"
        if self.results.local:
            self._full = beneath(self.results.root, self._path)
            make_directory(os.path.dirname(self._full), self.sync, PRIVATE)
            self._file = create_file(self._full)
        else:
            handle, self._full = tempfile.mkstemp(prefix="plait-results-", dir=scratch_dir())
            self._file = open(handle, "wb")  # noqa: SIM115 - closed in close()
        self._out = ChecksummedFile(self._file)
        text = [f.name for f in schema if pa.types.is_string(f.type) or pa.types.is_binary(f.type)]
        # Sets repeat as well.
        often = [*text, *(name for name in schema.names if name.startswith(SET))]
        self._writer = pq.ParquetWriter(self._out, schema, compression="snappy", use_dictionary=often)

    def _failed(self, error: OSError) -> StorageError:
        # The error that led here is the one to report; what is left of the file would only fill the disk further.
        with contextlib.suppress(OSError):
            os.unlink(self._full)
        return storage_error("RESULTS", self._full, error)
