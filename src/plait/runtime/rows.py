"""Committed result files as DataFrames: checksums first, then Spark reads them with the query's own schema."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import pyarrow.parquet as pq
import xxhash
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as T

from plait.errors import CorruptionError
from plait.query.plan import Plan, QueryPlan
from plait.runtime.results import results_folder, sync_results
from plait.runtime.sinks import Sink
from plait.sql.residual import finish
from plait.state.checkpoint import Checkpoint
from plait.state.files import storage_error
from plait.state.manifest import ResultFile


@dataclass
class ResultRows:
    """The result files of one engine's queries."""

    spark: SparkSession
    plan: Plan
    checkpoint: Checkpoint

    def frame(self, query: str, files: Iterable[ResultFile]) -> DataFrame:
        """The rows of these files, in the query's output columns."""
        return self._read(self.plan.query_by_name[query].output, files)

    def paths(self, files: Iterable[ResultFile]) -> list[str]:
        """Where the files lie, once they are known to hold what was committed."""
        found = []
        for file in files:
            path = os.path.join(self.checkpoint.results_dir, file.path)
            _verify(path, file)
            found.append(path)
        return found

    def all(self, query: str) -> DataFrame:
        """Every committed row of a query, exactly once."""
        return self.frame(query, [file for file in self.checkpoint.log.results() if file.query == query])

    def finished(self, query: QueryPlan, candidates: list[ResultFile]) -> list[ResultFile]:
        """Joined rows go through Spark's part of the query and are written as result files of their own."""
        if not candidates:
            return []
        results = self.checkpoint.results_dir
        target = os.path.join(results, results_folder(query.name), uuid.uuid4().hex)
        rows = finish(self._read(query.columns, candidates), query)
        rows.write.mode("error").parquet(f"file://{target}")
        try:
            files = [
                self._taken(query.name, os.path.join(target, name))
                for name in sorted(os.listdir(target))
                if name.endswith(".parquet") and not name.startswith((".", "_"))
            ]
            shutil.rmtree(target)
            for candidate in candidates:
                os.unlink(os.path.join(results, candidate.path))
        except OSError as error:
            raise storage_error("RESULTS", target, error) from error
        return [file for file in files if file is not None]

    def _taken(self, query: str, written: str) -> ResultFile | None:
        """A file that Spark wrote as a result file like the others: measured, synced, under a fresh name."""
        count = pq.read_metadata(written).num_rows
        if not count:
            return None
        path = f"{results_folder(query)}/{uuid.uuid4().hex}.parquet"
        os.replace(written, os.path.join(self.checkpoint.results_dir, path))
        size, checksum = _measured(os.path.join(self.checkpoint.results_dir, path), self.checkpoint.config.sync)
        if self.checkpoint.config.sync:
            sync_results(self.checkpoint.results_dir, path)
        return ResultFile(query, path, count, size, checksum)

    def kept(self, sinks: Mapping[str, Sink]) -> set[str]:
        """Result files that must stay: those of queries whose rows are kept, and those not delivered yet."""
        log = self.checkpoint.log
        kept: set[str] = set()
        for epoch in log.epochs():
            manifest = log.read(epoch)
            if manifest is None or not manifest.results:
                continue
            done = log.receipt(epoch)
            for file in manifest.results:
                sink = sinks[file.query]
                if sink.keeps_rows or (sink.delivers and file.query not in done):
                    kept.add(file.path)
        return kept

    def schema(self, query: str) -> T.StructType:
        """The schema of a query's output."""
        return _struct(self.plan.query_by_name[query].output)

    def _read(self, columns: tuple[tuple[str, str], ...], files: Iterable[ResultFile]) -> DataFrame:
        schema = _struct(columns)
        paths = self.paths(files)
        if not paths:
            return self.spark.createDataFrame([], schema)
        return self.spark.read.schema(schema).parquet(*paths)


def _struct(columns: tuple[tuple[str, str], ...]) -> T.StructType:
    return T.StructType([T.StructField(name, T._parse_datatype_string(kind)) for name, kind in columns])


def _measured(path: str, sync: bool = False) -> tuple[int, str]:
    digest = xxhash.xxh3_128()
    size = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
            size += len(block)
        if sync:
            os.fsync(file.fileno())
    return size, digest.hexdigest()


def _verify(path: str, file: ResultFile) -> None:
    try:
        found = _measured(path)
    except FileNotFoundError:
        raise CorruptionError(
            "RESULT_MISSING", f"the result file {path} is gone", "restore it from a backup of the checkpoint"
        ) from None
    if found != (file.bytes, file.checksum):
        raise CorruptionError(
            "RESULT_CORRUPT",
            f"the result file {path} is not what was committed",
            "restore it from a backup of the checkpoint",
        )
