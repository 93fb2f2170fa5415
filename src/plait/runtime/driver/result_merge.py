"""Merging of kept result files: many small ones become one larger, so that a query of many epochs has few.

Contract.  A merged file holds exactly the rows of the files that it replaces; their order does not matter.  The
manifest of the epoch names both (`Manifest.merged`, `Manifest.replaced`), so a kill at any point leaves either the old
files in force or the new one.  What is merged was committed by earlier epochs, and is compared with its checksum first:
damaged bytes never get a new checksum.  A damaged or lost file is left alone; whoever reads the results is told of it.

Invariant.  A tier of a query holds less than `FAN_IN` small files, apart from those that wait for their turn: after n
epochs a query has O(log n) files, and one for every `FULL_BYTES` of rows.

Cost.  A row is copied once per tier, by the driver; an epoch copies at most `MOST_BYTES` (compressed), in few merges.
Decoded, some megabytes are held at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq

from plait.errors import CorruptionError
from plait.runtime.answers.result_reader import ResultRows
from plait.runtime.driver.driver import Epoch
from plait.runtime.faults import reached
from plait.runtime.task.result_writer import ResultWriter
from plait.state.log.manifest import ResultFile

FAN_IN = 8
"""Small files of one tier that may come together before they become one of the next."""
FULL_BYTES = 8 << 20
"""A file of this size is not merged any more."""
MOST_BYTES = 64 << 20
"""Bytes that are merged in one epoch, and so the largest file that merging makes."""
MOST_FILES = 256
"""Files that become one at once."""
_QUERIES_PER_MERGE = 4
"""Of as many queries one is merged per epoch: each has its turn before its files double."""
_BATCH_ROWS = 1 << 10
_WRITTEN_BYTES = 8 << 20
"""Decoded rows that are written together."""


def merge_results(epoch: Epoch) -> None:
    """Small result files of kept queries become larger ones; the manifest of this epoch commits that."""
    services, rows, account = epoch.driver.services, epoch.driver.now.rows, epoch.account
    for file in (file for files in services.sources.live.files.values() for file in files):
        # The sink is another one since the last epoch, and this one keeps rows: so it does from there on.
        if file.passing and file.query in services.sinks and services.sinks[file.query].keeps_rows:
            account.merged_results.append(replace(file, passing=False))
            account.replaced.append(file.path)
    due = _due(epoch, {file.query for file in account.results if file.whole})
    budget = MOST_BYTES
    for query, files in due[: 1 + len(epoch.plan.queries) // _QUERIES_PER_MERGE]:
        if sum(file.bytes for file in files) > budget:
            continue
        if merged := merged_files(rows, query, files, services.sources.source(query) is not None):
            account.merged_results += merged
            account.replaced += [file.path for file in files]
            budget -= sum(file.bytes for file in files)
            reached("results.merge", epoch.number)


def _due(epoch: Epoch, whole: set[str]) -> list[tuple[str, list[ResultFile]]]:
    """The queries that have enough small files of one tier, with those; the most files first."""
    found = []
    sources, damaged = epoch.driver.services.sources, epoch.driver.now.rows.damaged
    for query in epoch.plan.queries:
        kept = sources.source(query.name)
        # Partial rows of groups are merged as such (`Sources.merged`).
        if query.name in whole or (kept is not None and kept[1].maintained is not None):
            continue
        files = sources.live.files.get(query.name, ())
        if chosen := choose([file for file in files if file.path not in damaged]):
            found.append((query.name, chosen))
    return sorted(found, key=lambda each: -len(each[1]))


def choose(files: Sequence[ResultFile]) -> list[ResultFile]:
    """The files of a query to merge next: of the lowest tier that has enough small ones; none if no tier has."""
    tiers: dict[int, list[ResultFile]] = {}
    for file in files:
        if file.bytes < FULL_BYTES and not (file.passing or file.whole or file.grouped):
            tiers.setdefault(file.tier, []).append(file)
    for _, small in sorted(tiers.items()):
        if len(small) >= FAN_IN:
            # Of small files at least eight always fit.
            total, chosen = 0, []
            for file in small[:MOST_FILES]:
                total += file.bytes
                if total > MOST_BYTES:
                    break
                chosen.append(file)
            return chosen
    return []


def merged_files(rows: ResultRows, query: str, files: Sequence[ResultFile], joined: bool) -> list[ResultFile]:
    """The rows of files as one file of the next tier; none if one of the files is not what was committed.

    `joined` are rows of a source of an answer: Spark's part of the query comes later.
    """
    sources = []
    for file in files:
        try:
            sources.append(pq.ParquetFile(pa.BufferReader(rows.committed_bytes(file))))
        except CorruptionError:
            rows.damaged.add(file.path)
            return []
    if _copied_exactly(sources):
        merged = _copied(rows, query, sources)
    else:
        # Files that Spark and Arrow have written in different types: Spark knows what they mean.
        plan = rows.plan.query_by_name[query]
        merged = rows.written(query, rows.read(plan.columns if joined else plan.output, files).coalesce(1))
    tier = 1 + max(file.tier for file in files)
    return [replace(file, tier=tier, passing=False) for file in merged]


def _copied_exactly(sources: Sequence[pq.ParquetFile]) -> bool:
    """Whether Arrow reads and writes these rows without changing them: in one schema, and without Spark's old times."""
    same = all(source.schema_arrow.equals(sources[0].schema_arrow) for source in sources)
    return same and all(
        source.schema.column(i).physical_type != "INT96" for source in sources for i in range(len(source.schema))
    )


def _copied(rows: ResultRows, query: str, sources: Sequence[pq.ParquetFile]) -> list[ResultFile]:
    """All rows of files in one, some megabytes at a time."""
    schema = sources[0].schema_arrow
    writer = ResultWriter(query, tuple(schema.names), rows.checkpoint.results, rows.checkpoint.config.sync)
    held: list[pa.RecordBatch] = []
    size = 0
    try:
        for batch in (batch for source in sources for batch in source.iter_batches(_BATCH_ROWS)):
            held.append(batch)
            size += batch.nbytes
            if size >= _WRITTEN_BYTES:
                writer.add(pa.Table.from_batches(held, schema))
                held, size = [], 0
        if held:
            writer.add(pa.Table.from_batches(held, schema))
        return writer.close()
    except BaseException:
        writer.abandon()
        raise
