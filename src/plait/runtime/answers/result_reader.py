"""Committed result files as DataFrames: checksums first, then Spark reads them with the query's own schema."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Iterator, Set
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache, reduce
from tempfile import TemporaryDirectory

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
from pyspark.sql import DataFrame, DataFrameReader, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from plait.errors import CorruptionError
from plait.query.plan import Plan, QueryPlan
from plait.query.store import SET, SET_BITS
from plait.query.types import FIXED, digits
from plait.runtime.task.file_sets import query_batches, query_table, set_column, without_sets
from plait.runtime.task.result_writer import ResultWriter, results_folder, sync_results
from plait.sql.answer.residual import finish
from plait.state.files.remote import RemoteFiles
from plait.state.files.segment_home import scratch_dir
from plait.state.files.storage import Files, LocalFiles, storage_error, sync_file
from plait.state.log.checkpoint import Checkpoint
from plait.state.log.manifest import ResultFile

SMALL_BYTES = 32 << 20
"""Up to this much in memory, Spark works in one task and its rows pass through the driver: that needs no exchange."""
_ROWS_AT_A_TIME = 1024
_FIXED_BYTES = 16
"""The most that a value takes whose type has a fixed size."""


@dataclass
class ResultRows:
    """The result files of one engine's queries."""

    spark: SparkSession
    plan: Plan
    checkpoint: Checkpoint
    known: set[str] = field(default_factory=set)
    """Files in force that hold what was committed, as far as this run has seen: it has written or verified them."""
    damaged: set[str] = field(default_factory=set)
    """Files that did not, when they were to be merged."""

    def frame(self, query: str, files: Iterable[ResultFile]) -> DataFrame:
        """The rows of these files, in the query's output columns."""
        return self.read(self.plan.query_by_name[query].output, files)

    def paths(self, files: Iterable[ResultFile]) -> list[str]:
        """Where the files lie, once they are known to hold what was committed."""
        results, found = self.checkpoint.results, []
        for file in files:
            if file.path not in self.known:
                _verify(results, file.path, file)
                self.known.add(file.path)
            found.append(results.where(file.path))
        return found

    def committed_bytes(self, file: ResultFile) -> bytes:
        """The bytes of a file of some megabytes; raises CorruptionError if they are not those that were committed."""
        data = self.checkpoint.results.read(file.path)
        if data is None:
            raise _missing(self.checkpoint.results.where(file.path))
        if (len(data), xxhash.xxh3_128_hexdigest(data)) != (file.bytes, file.checksum):
            raise _corrupt(self.checkpoint.results.where(file.path))
        return data

    @contextmanager
    def copies(self, files: Iterable[ResultFile]) -> Iterator[list[str]]:
        """The files as paths of this machine, for as long as the block runs; they hold what was committed."""
        results = self.checkpoint.results
        assert isinstance(results, RemoteFiles), "local files need no copies"
        with TemporaryDirectory(prefix="plait-results-", dir=scratch_dir()) as folder:
            here, found = LocalFiles(folder, sync=False), []
            for number, file in enumerate(files):
                name = f"{number:04d}.parquet"
                try:
                    results.download(file.path, here.where(name))
                except FileNotFoundError:
                    raise _missing(results.where(file.path)) from None
                except OSError as error:
                    raise storage_error("RESULTS", here.where(name), error) from error
                _verify(here, name, file)
                found.append(here.where(name))
            yield found

    @contextmanager
    def apart(self, files: Iterable[ResultFile]) -> Iterator[list[str]]:
        """Files of this machine with a query's rows and nothing else, for as long as the block runs.

        Those that it shares with others are split here: the cost is reading them once, and writing its rows.
        """
        files = list(files)
        local = not isinstance(self.checkpoint.results, RemoteFiles)
        with ExitStack() as stack:
            paths = self.paths(files) if local else stack.enter_context(self.copies(files))
            if any(file.bit is not None for file in files):
                folder = stack.enter_context(TemporaryDirectory(prefix="plait-results-", dir=scratch_dir()))
                for number, file in enumerate(files):
                    if file.bit is not None:
                        target = os.path.join(folder, f"{number:04d}.parquet")
                        _split(paths[number], file.bit, target)
                        paths[number] = target
            yield paths

    @contextmanager
    def one_file(self, query: str, rows: DataFrame | pa.Table) -> Iterator[list[str]]:
        """Rows as one file of this machine, or none, for as long as the block runs."""
        results = self.checkpoint.results
        here = isinstance(rows, pa.Table)
        files = self.written_here(query, rows) if here else self.written(query, rows.coalesce(1))
        paths_here = [results.where(file.path) for file in files]
        try:
            with self.copies(files) if isinstance(results, RemoteFiles) else nullcontext(paths_here) as paths:
                yield paths
        finally:
            for file in files:
                results.delete(file.path)

    def all(self, query: str) -> DataFrame:
        """Every committed row of a query, exactly once."""
        files = self.checkpoint.log.results().get(query, ())
        return self.frame(query, [file for file in files if not file.raw])

    def finished(self, query: QueryPlan, candidates: list[ResultFile], needed: Set[str]) -> list[ResultFile]:
        """Joined rows go through Spark's part of the query and are written as result files of their own.

        The candidates go, but for those that other queries have rows in: the paths in `needed`.
        """
        if not candidates:
            return []
        self.known.update(candidate.path for candidate in candidates)
        rows = finish(self.read(query.columns, candidates), query)
        small = stays_small(query, candidates)
        files = self.written_here(query.name, rows.toArrow()) if small else self.written(query.name, rows)
        for candidate in candidates:
            if candidate.path not in needed:
                self.checkpoint.results.delete(candidate.path)
        return files

    def written_here(self, query: str, table: pa.Table, whole: bool = False) -> list[ResultFile]:
        """What `written` does, for few rows: they are in the driver, which spares Spark's own way of writing."""
        writer = ResultWriter(query, tuple(table.column_names), self.checkpoint.results, self.checkpoint.config.sync)
        if table.num_rows:
            writer.add(table)
        files = writer.close(whole=whole)
        self.known.update(file.path for file in files)
        return files

    def written(self, query: str, rows: DataFrame, whole: bool = False) -> list[ResultFile]:
        """Rows that Spark has computed as result files of a query; they are not committed by that."""
        results = self.checkpoint.results
        target = f"{results_folder(query)}/{uuid.uuid4().hex}"
        # On a cluster the executors write: they need a place that all of them share.
        rows.write.mode("error").parquet(f"file://{results.where(target)}" if results.local else results.where(target))
        try:
            files = [
                self._taken(query, f"{target}/{name}", whole)
                for name in sorted(results.names(target))
                if name.endswith(".parquet") and not name.startswith((".", "_"))
            ]
            results.delete_tree(target)
        except OSError as error:
            raise storage_error("RESULTS", results.where(target), error) from error
        return [file for file in files if file is not None]

    def _taken(self, query: str, written: str, whole: bool) -> ResultFile | None:
        """A file that Spark wrote as a result file like the others: measured, synced, under a fresh name."""
        results = self.checkpoint.results
        if isinstance(results, RemoteFiles):
            with TemporaryDirectory(prefix="plait-results-", dir=scratch_dir()) as folder:
                here = os.path.join(folder, "written.parquet")
                results.download(written, here)
                count, unpacked = _counted(here)
                size, checksum = _measured(LocalFiles(folder, sync=False), "written.parquet")
        else:
            count, unpacked = _counted(results.where(written))
        if not count:
            return None
        path = f"{results_folder(query)}/{uuid.uuid4().hex}.parquet"
        results.move(written, path)
        if results.local:
            size, checksum = _measured(results, path)
            if self.checkpoint.config.sync:
                sync_file(results.where(path))
                sync_results(results.root, path)
        return ResultFile(query, path, count, size, checksum, whole, unpacked=unpacked)

    def schema(self, query: str) -> T.StructType:
        """The schema of a query's output."""
        return _struct(self.plan.query_by_name[query].output)

    def tables(self, files: Iterable[ResultFile], columns: list[str] | None = None) -> Iterator[pa.Table]:
        """The rows of small files, file by file: all columns, or these."""
        files, local = list(files), not isinstance(self.checkpoint.results, RemoteFiles)
        with nullcontext(self.paths(files)) if local else self.copies(files) as paths:
            for file, path in zip(files, paths, strict=True):
                yield query_table(path, file.bit, columns)

    def here(self, columns: tuple[tuple[str, str], ...], table: pa.Table) -> DataFrame:
        """A few rows that are here already, in one partition."""
        return self.local(_struct(columns), table).coalesce(1)

    def local(self, schema: T.StructType, table: pa.Table) -> DataFrame:
        """Rows that are here already."""
        return self.spark.createDataFrame(table, schema)

    def nothing(self, columns: tuple[tuple[str, str], ...]) -> DataFrame:
        """No rows, with these columns."""
        return self.spark.createDataFrame([], _struct(columns))

    def read(self, columns: tuple[tuple[str, str], ...], files: Iterable[ResultFile]) -> DataFrame:
        """The rows of files with these columns: one scan for all, and one for each bit that the query has in files."""
        by_bit: dict[int | None, list[ResultFile]] = {}
        for file in files:
            by_bit.setdefault(file.bit, []).append(file)
        frames = [self._scanned(_struct(columns), self.paths(some), bit) for bit, some in by_bit.items()]
        return reduce(DataFrame.union, frames) if frames else self.nothing(columns)

    def with_words(
        self, columns: tuple[tuple[str, str], ...], words: Iterable[int], files: Iterable[ResultFile]
    ) -> DataFrame:
        """All rows of files with these columns, whosever they are, and these words of their sets."""
        sets = [T.StructField(f"{SET}{word}", T.LongType()) for word in words]
        return self._reader().schema(T.StructType([*_struct(columns).fields, *sets])).parquet(*self.paths(files))

    def _reader(self) -> DataFrameReader:
        # Whatever the session says of missing files: these were committed.
        return self.spark.read.option("ignoreMissingFiles", "false")

    def _scanned(self, schema: T.StructType, paths: list[str], bit: int | None) -> DataFrame:
        """The rows of files, or those that have a bit."""
        if bit is None:
            return self._reader().schema(schema).parquet(*paths)
        word = set_column(bit)
        rows = self._reader().schema(T.StructType([*schema.fields, T.StructField(word, T.LongType())])).parquet(*paths)
        return rows.where(F.shiftright(f"`{word}`", bit % SET_BITS).bitwiseAND(1) == 1).drop(word)


def stays_small(query: QueryPlan, files: Iterable[ResultFile]) -> bool:
    """Whether the rows that Spark makes of joined ones are sure to come to no more than SMALL_BYTES in memory.

    Of a computed text nobody knows the length before it is there (`repeat(…)`), so that is never sure.
    """
    files, names = list(files), {f"`{name.replace('`', '``')}`" for name, _ in query.columns}
    computed = [kind for (sql, _), (_, kind) in zip(query.select, query.output, strict=False) if sql not in names]
    if not all(kind in FIXED or digits(kind) is not None for kind in computed):
        return False
    grown = _FIXED_BYTES * len(computed) * sum(file.rows for file in files)
    return sum(file.weight for file in files) + grown <= SMALL_BYTES


@lru_cache(maxsize=256)
def _struct(columns: tuple[tuple[str, str], ...]) -> T.StructType:
    return T.StructType([T.StructField(name, T._parse_datatype_string(kind)) for name, kind in columns])


def _split(source: str, bit: int, target: str) -> None:
    """The rows of a shared file that have a bit, as a file without sets."""
    try:
        with pq.ParquetFile(source) as file:
            schema = file.schema_arrow
            own = pa.schema([schema.field(name) for name in without_sets(schema.names)])
            with pq.ParquetWriter(target, own, compression="snappy") as writer:
                for rows in query_batches(file, bit):
                    if rows.num_rows:
                        writer.write_batch(rows)
    except OSError as error:
        raise storage_error("RESULTS", target, error) from error


def _measured(files: Files, name: str) -> tuple[int, str]:
    digest = xxhash.xxh3_128()
    size = 0
    for block in files.blocks(name):
        digest.update(block)
        size += len(block)
    return size, digest.hexdigest()


def _counted(path: str) -> tuple[int, int]:
    """Rows of a Parquet file, and the bytes of them in memory as far as SMALL_BYTES: beyond, nobody asks how many.

    The file's own sizes are those of encoded columns: rows are at least as large, and text that repeats far larger.
    """
    unpacked = 0
    with pq.ParquetFile(path) as file:
        groups = [file.metadata.row_group(i).total_byte_size for i in range(file.metadata.num_row_groups)]
        if sum(groups) > SMALL_BYTES:
            return file.metadata.num_rows, sum(groups)
        for batch in file.iter_batches(_ROWS_AT_A_TIME):
            unpacked += batch.nbytes
            if unpacked > SMALL_BYTES:
                break
        return file.metadata.num_rows, unpacked


def _verify(files: Files, name: str, file: ResultFile) -> None:
    try:
        found = _measured(files, name)
    except FileNotFoundError:
        raise _missing(files.where(name)) from None
    if found != (file.bytes, file.checksum):
        raise _corrupt(files.where(name))


def _corrupt(where: str) -> CorruptionError:
    return CorruptionError(
        "RESULT_CORRUPT",
        f"the result file {where} is not what was committed",
        "restore it from a backup of the checkpoint",
    )


def _missing(where: str) -> CorruptionError:
    return CorruptionError(
        "RESULT_MISSING", f"the result file {where} is gone", "restore it from a backup of the checkpoint"
    )
