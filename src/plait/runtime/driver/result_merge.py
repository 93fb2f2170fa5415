"""Merging of kept result files: many small ones become one larger, so that a query of many epochs has few.

Contract.  A merged file holds exactly the rows of the files that it replaces; their order does not matter.  The
manifest of the epoch names both (`Manifest.merged`, `Manifest.replaced`), so a kill at any point leaves either the old
files in force or the new one.  What is merged was committed by earlier epochs, and is compared with its checksum first:
damaged bytes never get a new checksum.  A damaged or lost file is left alone; whoever reads the results is told of it.
All queries that have rows in these files share the merged one.  What is replaced is replaced for these queries: one
that does not take part still has its rows in the old files.

Invariant.  A tier of a query holds less than `FAN_IN` small files, apart from those that wait for their turn: after n
epochs a query has O(log n) files, and one for every `FULL_BYTES` of rows.

Cost.  A row is copied once per tier, by the driver; an epoch copies at most `MOST_BYTES` (compressed), in few merges.
Decoded, some megabytes are held at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from plait.errors import CorruptionError
from plait.runtime.answers.result_reader import ResultRows
from plait.runtime.driver.driver import Epoch
from plait.runtime.faults import reached
from plait.runtime.task.file_sets import mapped, of_bit, sets_in, width_of, with_sets, without_sets
from plait.runtime.task.shared_results import SharedWriter
from plait.state.log.manifest import ResultFile
from plait.state.segments.sieve import as_words

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


Together = Mapping[str, dict[str, ResultFile]]
"""By query its entries, by path: files that are merged for all of these queries at once."""


def merge_results(epoch: Epoch) -> None:
    """Small result files of kept queries become larger ones; the manifest of this epoch commits that."""
    services, rows, account = epoch.driver.services, epoch.driver.now.rows, epoch.account
    for file in (file for files in services.sources.live.files.values() for file in files):
        # The sink is another one since the last epoch, and this one keeps rows: so it does from there on.
        if file.passing and not file.raw and file.query in services.sinks and services.sinks[file.query].keeps_rows:
            account.merged_results.append(replace(file, passing=False))
            account.replaced.append((file.query, file.path))
    _settle_missed(epoch)
    mergeable = _mergeable(epoch, {file.query for file in account.results if file.whole})
    sharing: dict[str, list[ResultFile]] = {}
    for file in (file for files in mergeable.values() for file in files):
        sharing.setdefault(file.path, []).append(file)
    due = sorted(filter(None, map(choose, mergeable.values())), key=len, reverse=True)
    budget, taken, turns = MOST_BYTES, set[str](), 1 + len(epoch.plan.queries) // _QUERIES_PER_MERGE
    for chosen in due:
        size = sum(file.bytes for file in chosen)
        if not turns:
            break
        if size > budget or any(file.path in taken for file in chosen):
            continue
        turns -= 1
        # Whoever has rows in these files goes along, so that what was written together stays together.
        together: dict[str, dict[str, ResultFile]] = {chosen[0].query: {}}
        for file in (file for mine in chosen for file in sharing[mine.path]):
            together.setdefault(file.query, {})[file.path] = file
        joined = {query for query in together if services.sources.source(query) is not None}
        if merged := merged_files(rows, together, joined):
            account.merged_results += merged
            account.replaced += [(query, path) for query, files in together.items() for path in files]
            budget -= size
            taken |= {file.path for file in chosen}
            reached("results.merge", epoch.number)


def _settle_missed(epoch: Epoch) -> None:
    """Rows that parked queries are owed stay in force; those that nobody waits for any more go, with this commit."""
    services, account, last = epoch.driver.services, epoch.account, epoch.driver.now.live.epoch
    parking, settled, live = services.parking, set(account.replaced), services.sources.live.files
    for query, sink in services.sinks.items():
        files = [file for file in live.get(query, ()) if (query, file.path) not in settled]
        is_parked, keeps = parking.of(query) is not None, sink.keeps_rows
        owed = [file for file in files if file.held is not None or (file.passing and is_parked)]
        if not owed and (keeps or not is_parked):
            continue
        stay = is_parked and parking.bound(query, epoch.number, owed)
        for file in owed:
            if stay and file.held is not None:
                continue
            account.replaced.append((query, file.path))
            if stay:
                account.merged_results.append(replace(file, passing=False, held=last))
            elif keeps and not file.raw and not is_parked:
                # It goes on, and keeps its rows: it was over a limit, or its sink is another one since.
                account.merged_results.append(replace(file, passing=False, held=None))


def _mergeable(epoch: Epoch, whole: set[str]) -> dict[str, list[ResultFile]]:
    """By query the files in force that may be merged."""
    found = {}
    sources, damaged = epoch.driver.services.sources, epoch.driver.now.rows.damaged
    for query in epoch.plan.queries:
        kept = sources.source(query.name)
        # Partial rows of groups are merged as such (`Sources.merged`).
        if query.name in whole or (kept is not None and kept[1].maintained is not None):
            continue
        files = [file for file in sources.live.files.get(query.name, ()) if file.path not in damaged]
        found[query.name] = [file for file in files if _small(file)]
    return found


def _small(file: ResultFile) -> bool:
    other = file.passing or file.whole or file.grouped or file.raw or file.held is not None
    return file.bytes < FULL_BYTES and not other


def choose(files: Sequence[ResultFile]) -> list[ResultFile]:
    """The files of a query to merge next: of the lowest tier that has enough small ones; none if no tier has."""
    tiers: dict[int, list[ResultFile]] = {}
    for file in filter(_small, files):
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


def merged_files(rows: ResultRows, together: Together, joined: Set[str]) -> list[ResultFile]:
    """The rows of files as one file of the next tier; none if one of the files is not what was committed.

    Queries in `joined` are sources of an answer: Spark's part of the query comes later.
    """
    every = {path: file for files in together.values() for path, file in files.items()}
    sources = {}
    for path, file in every.items():
        try:
            sources[path] = pq.ParquetFile(pa.BufferReader(rows.committed_bytes(file)))
        except CorruptionError:
            rows.damaged.add(path)
            return []
    if _copied_exactly(list(sources.values())):
        merged = _copied(rows, together, sources)
    else:
        # Files that Spark and Arrow have written in different types: Spark knows what they mean.
        merged = []
        for query, files in together.items():
            plan = rows.plan.query_by_name[query]
            columns = plan.columns if query in joined else plan.output
            merged += rows.written(query, rows.read(columns, files.values()).coalesce(1))
    tier = 1 + max(file.tier for file in every.values())
    return [replace(file, tier=tier, passing=False) for file in merged]


def _own(schema: pa.Schema) -> pa.Schema:
    """A file's columns without its sets."""
    return pa.schema([schema.field(name) for name in without_sets(schema.names)])


def _copied_exactly(sources: Sequence[pq.ParquetFile]) -> bool:
    """Whether Arrow reads and writes these rows without changing them: in one schema, and without Spark's old times."""
    same = all(_own(source.schema_arrow).equals(_own(sources[0].schema_arrow)) for source in sources)
    return same and all(
        source.schema.column(i).physical_type != "INT96" for source in sources for i in range(len(source.schema))
    )


def _copied(rows: ResultRows, together: Together, sources: Mapping[str, pq.ParquetFile]) -> list[ResultFile]:
    """All rows of files in one, some megabytes at a time."""
    names = without_sets(next(iter(sources.values())).schema_arrow.names)
    writer = SharedWriter(list(together), names, rows.checkpoint.results, rows.checkpoint.config.sync)
    # What every query has whole needs no sets; with them all rows go into one file.
    plain = all(files.keys() == sources.keys() for files in together.values()) and all(
        file.bit is None for files in together.values() for file in files.values()
    )
    held: list[pa.Table] = []
    size = 0
    try:
        for path, source in sources.items():
            entries = [(writer.place[query], files[path]) for query, files in together.items() if path in files]
            for batch in source.iter_batches(_BATCH_ROWS):
                held.append(_rows_of(batch, entries, len(together), plain))
                size += held[-1].nbytes
                if size >= _WRITTEN_BYTES:
                    _write(writer, held)
                    held, size = [], 0
        _write(writer, held)
        return [file for files in writer.close().values() for file in files]
    except BaseException:
        writer.abandon()
        raise


def _rows_of(batch: pa.RecordBatch, entries: Sequence[tuple[int, ResultFile]], queries: int, plain: bool) -> pa.Table:
    """Rows of a file, of which each of some queries has an entry, by its place; of several queries with their sets."""
    bit = entries[0][1].bit
    if queries == 1 and bit is not None:
        return pa.Table.from_batches([of_bit(batch, bit)])
    table = pa.Table.from_batches([batch]).select(without_sets(batch.schema.names))
    if plain or queries == 1:
        return table
    width, some = width_of(queries), [(file.bit, place) for place, file in entries if file.bit is not None]
    sets = np.zeros((len(table), width), np.uint64)
    sets |= as_words(sum(1 << place for place, file in entries if file.bit is None), width)
    if some:
        sets |= mapped(sets_in(batch), some, width)
    return with_sets(table, sets)


def _write(writer: SharedWriter, held: Sequence[pa.Table]) -> None:
    """Rows of one kind, with sets or without."""
    table = pa.concat_tables(held) if held else None
    if table is None or not table.num_rows:
        return
    names = without_sets(table.schema.names)
    shared = len(names) < table.num_columns
    writer.add(table.select(names), sets_in(table.combine_chunks().to_batches()[0]) if shared else None)
