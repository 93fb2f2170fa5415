"""Partial rows of aggregates that several queries share: one row per group and set of queries, written once.

Contract.  Queries share a writer if they share joined rows (`shared_results.alike`) and make the same groups of them.
A partial row is that of all queries in its set, so a query's partial rows are those with its bit; a group may occur in
several of them, and whoever reads them merges (`group_writer.merged`).  What cannot be grouped here is kept as joined
rows with their sets, for Spark.

While sets are few, that is one row per group instead of one per group and query.  Where it would be more (a filter on
a number that hardly two rows have in common makes as many sets as rows), every query has rows of its own in the same
file: sets of one bit.

Cost: joined rows are grouped once for all queries.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa

from plait.kernels import I64, U64
from plait.kernels.sets import members_in, union_of, weights_in
from plait.query.expr import ColumnRef
from plait.query.grouping import Grouping, GroupKey
from plait.query.plan import Emit
from plait.query.store import SET, SET_BITS
from plait.runtime.task.file_sets import mapped, row_bytes, sets_in, width_of, with_sets
from plait.runtime.task.group_writer import grouped, merged
from plait.runtime.task.partial import Partial
from plait.runtime.task.result_writer import ResultWriter
from plait.runtime.task.shared_results import SHARED, SharedWriter, of_emits
from plait.state.files.storage import Files
from plait.state.log.manifest import ResultFile
from plait.state.segments.sieve import as_words

PLACE = "#query"
"""A key beside those of the group: the place of a query among those that share."""
_EXPLODED_CELLS = 1 << 24
"""Rows times queries that are looked at together."""


def by_set(grouping: Grouping, width: int) -> Grouping:
    """The same groups, apart by set."""
    keys = tuple(GroupKey(f"{SET}{word}", ColumnRef("", f"{SET}{word}", "bigint")) for word in range(width))
    return replace(grouping, keys=(*grouping.keys, *keys))


def by_place(grouping: Grouping) -> Grouping:
    """The same groups, apart by query."""
    return replace(grouping, keys=(GroupKey(PLACE, ColumnRef("", PLACE, "int")), *grouping.keys))


def split_sets(table: pa.Table, names: Sequence[str]) -> tuple[pa.Table, U64]:
    """Rows without their sets, and these."""
    table = table.combine_chunks()
    batches = table.to_batches()
    width = sum(name.startswith(SET) for name in table.column_names)
    sets = sets_in(batches[0]) if batches else np.zeros((0, width), np.uint64)
    return table.select(names), sets


def of_places(places: I64, width: int) -> U64:
    """Sets of one bit each.

    >>> of_places(np.array([1, 64]), 2).tolist()
    [[2, 0], [0, 1]]
    """
    sets = np.zeros((len(places), width), np.uint64)
    sets[np.arange(len(places)), places // SET_BITS] = np.uint64(1) << (places % SET_BITS).astype(np.uint64)
    return sets


def members_of(sets: U64) -> Iterator[tuple[I64, I64]]:
    """Pairs of row and place, for every bit of every set; some rows at a time."""
    step = max(1, _EXPLODED_CELLS // max(1, SET_BITS * sets.shape[1]))
    for begin in range(0, len(sets), step):
        some = np.ascontiguousarray(sets[begin : begin + step])
        rows, places = np.nonzero(np.unpackbits(some.view(np.uint8), axis=1, bitorder="little"))
        yield rows.astype(np.int64) + begin, places.astype(np.int64)


def each_query(table: pa.Table, sets: U64, grouping: Grouping) -> pa.Table | None:
    """Partial rows per query, one for each of its groups, with its place; None if that is for Spark to merge."""
    apart, parts = by_place(grouping), list[pa.Table]()
    for rows, places in members_of(sets):
        one = table.take(pa.array(rows)).append_column(PLACE, pa.array(places.astype(np.int32)))
        found = merged([one.select(apart.names)], apart)
        if found is None:
            return None
        parts.append(found)
    return merged(parts, apart) if parts else _nothing(table, grouping)


def _nothing(table: pa.Table, grouping: Grouping) -> pa.Table:
    return table.slice(0, 0).append_column(PLACE, pa.array([], pa.int32())).select(by_place(grouping).names)


def groups_of_all(table: pa.Table, sets: U64, grouping: Grouping) -> int:
    """The groups of all queries together, each counted once per query that has it."""
    if not len(sets):
        return 0
    keys = [key.name for key in grouping.keys]
    if not keys:
        union = np.bitwise_or.reduce(sets, axis=0)[None, :]
        return int(members_in(union).sum())
    numbered = table.select(keys).append_column(PLACE, pa.array(np.arange(len(sets))))
    found = pa.TableGroupBy(numbered, keys, use_threads=False).aggregate([(PLACE, "list")])
    lists = found.column(f"{PLACE}_list").combine_chunks()
    offsets = lists.offsets.to_numpy().astype(np.int64)
    rows = lists.values.to_numpy()
    return int(members_in(union_of(sets[rows], offsets[:-1], np.diff(offsets))).sum())


def fewest(table: pa.Table, sets: U64, grouping: Grouping) -> tuple[pa.Table, U64]:
    """Partial rows with sets as they are, or each query's own if these are fewer."""
    if groups_of_all(table, sets, grouping) >= len(sets):
        return table, sets
    found = each_query(table, sets, grouping)
    if found is None:
        return table, sets
    places = found.column(PLACE).to_numpy().astype(np.int64)
    return found.select(grouping.names), of_places(places, sets.shape[1])


class SharedGroupWriter:
    """The partial rows that a task, or a merge, adds to queries with the same groups."""

    def __init__(
        self,
        queries: Sequence[str],
        columns: Sequence[str],
        grouping: Grouping,
        results: Files,
        sync: bool,
        limit: int,
    ) -> None:
        self.queries = tuple(queries)
        self.place = {query: place for place, query in enumerate(self.queries)}
        self.rows = np.zeros(len(self.queries), np.int64)
        """Joined rows of each query."""
        self.limit = limit
        self._columns = tuple(columns)
        self._grouping = grouping
        self._width = width_of(len(self.queries))
        self._by_set = by_set(grouping, self._width)
        self._plain = SharedWriter(queries, columns, results, sync)
        self._groups = ResultWriter(self.queries[0], grouping.names, results, sync, SHARED)
        self._group_rows = np.zeros(len(self.queries), np.int64)
        self._group_bytes = np.zeros(len(self.queries), np.int64)
        self._held: list[pa.Table] = []
        self._bytes = 0
        self._files: dict[str, list[ResultFile]] | None = None

    def write(self, emits: Sequence[Emit], partial: Partial) -> None:
        """A chunk of joined rows that are the same for all of these queries, one emit for each."""
        partial = of_emits(emits, partial)
        if not len(partial.hashes):
            return
        rows = pa.table(partial.columns(emits[0].columns), names=list(self._columns))
        if partial.sets is None:
            mine = as_words(sum(1 << self.place[emit.query] for emit in emits), self._width)
            sets = np.broadcast_to(mine, (len(rows), self._width))
        else:
            sets = mapped(partial.sets, [(emit.member, self.place[emit.query]) for emit in emits], self._width)
        self.rows += members_in(sets)[: len(self.queries)]
        found = grouped(with_sets(rows, sets), self._by_set)
        if found is None:
            self._plain.add(rows, sets)
            return
        self.add(found)

    def add(self, groups: pa.Table) -> None:
        """Partial rows with their sets."""
        self._held.append(groups)
        self._bytes += groups.nbytes
        if self._bytes > self.limit:
            self._merge()
            if self._bytes > self.limit // 2:
                self._flush()

    def unpacked(self, query: str) -> int:
        """Bytes of a query's partial rows in memory that are in files, so far."""
        return int(self._group_bytes[self.place[query]]) + self._plain.unpacked(query)

    def close(self, whole: bool = False) -> dict[str, list[ResultFile]]:
        """Finishes the files; by query its entries."""
        if self._files is None:
            self._merge()
            self._flush()
            self._files = self._plain.close()
            for file in self._groups.close(whole, grouped=True):
                for bit, query in enumerate(self.queries):
                    rows, size = int(self._group_rows[bit]), int(self._group_bytes[bit])
                    if rows:
                        self._files[query].append(replace(file, query=query, rows=rows, unpacked=size, bit=bit))
        return self._files

    def abandon(self) -> None:
        """Removes what was written: the task has failed."""
        self._plain.abandon()
        self._groups.abandon()

    def _merge(self) -> None:
        if len(self._held) > 1 and (found := merged(self._held, self._by_set)) is not None:
            self._held, self._bytes = [found], found.nbytes

    def _flush(self) -> None:
        for table in self._held:
            groups, sets = fewest(*split_sets(table, self._grouping.names), self._grouping)
            self._groups.add(with_sets(groups, sets))
            self._group_rows += members_in(sets)[: len(self.queries)]
            self._group_bytes += weights_in(sets, row_bytes(groups))[: len(self.queries)]
        self._held, self._bytes = [], 0
