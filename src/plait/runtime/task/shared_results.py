"""Result rows of queries with the same columns: written once, with the set of queries that each row belongs to.

Contract.  Queries share a writer if they emit the same columns, of the same values, at the same node of a tree: then a
tuple is the same row for each of them.  Those that make groups of these rows must make the same
(`shared_groups.py`).  Every query has an entry of its own for the shared file, with its bit and its
number of rows; the file has the rows of their union.  Where every row belongs to all queries, as of two equal ones
under two names, the file has no sets, and each query's entry says: all rows.

Queries `apart` read the rows of an epoch once, right away, each for itself (Spark's part of a query; a sink that copies
files): where rows have sets, theirs are written to a file of their own, because each of them would read all others'.

Cost: a row is written once for all queries; whoever reads one query's rows reads those of the others in the file too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import pyarrow as pa

from plait.kernels import I64, U64
from plait.kernels.sets import members_in, weights_in, within
from plait.query.plan import Emit, Plan
from plait.query.store import SET
from plait.runtime.task.computed import result_columns
from plait.runtime.task.file_sets import mapped, row_bytes, width_of, with_sets
from plait.runtime.task.partial import Partial
from plait.runtime.task.result_writer import ResultWriter
from plait.state.files.storage import Files
from plait.state.log.manifest import ResultFile
from plait.state.segments.sieve import as_words

SHARED = "shared"
"""The folder of files that several queries share; a query's own has another kind of name."""


def alike(plan: Plan, kept: Set[str]) -> list[tuple[str, ...]]:
    """Queries that can share result files, of those whose rows are `kept`; a query alone is in none of the groups."""
    group: dict[str, list[str]] = {}
    kinds: dict[tuple[object, ...], int] = {}
    kind: dict[str, int] = {}
    for query in plan.queries:
        # A user's own column could be called like one of the sets.
        if query.name in kept and not any(name.lower().startswith(SET) for name, _ in query.columns):
            kind[query.name] = kinds.setdefault((query.columns, query.grouping), len(kinds))
    for emits in _emits(plan):
        same: dict[tuple[object, ...], str] = {}
        for emit in emits:
            if emit.query not in kind:
                continue
            first = same.setdefault((kind[emit.query], emit.columns, emit.values), emit.query)
            mine, other = (group.setdefault(name, [name]) for name in (first, emit.query))
            if mine is not other:
                mine += other
                group |= dict.fromkeys(other, mine)
    return [tuple(names) for first, names in group.items() if first == names[0] and len(names) > 1]


def _emits(plan: Plan) -> Iterator[tuple[Emit, ...]]:
    for tree in plan.trees:
        yield tree.emits
        for top in tree.nodes:
            yield from (node.emits for node in top.walk())


def of_emits(emits: Sequence[Emit], partial: Partial) -> Partial:
    """The tuples of a chunk that belong to some of these queries."""
    if partial.sets is None:
        return partial
    return partial.of_members(as_words(sum(1 << emit.member for emit in emits), partial.sets.shape[1]))


class SharedWriter:
    """The rows that a task, or a merge, adds to queries with the same columns."""

    def __init__(
        self,
        queries: Sequence[str],
        columns: Sequence[str],
        results: Files,
        sync: bool,
        apart: Set[str] = frozenset(),
    ) -> None:
        together = [query for query in queries if query not in apart]
        if len(together) == 1:
            together = []
        self.queries = (*together, *(query for query in queries if query not in together))
        self.place = {query: place for place, query in enumerate(self.queries)}
        self.rows = np.zeros(len(self.queries), np.int64)
        self._shared = len(together)
        """So many share the file with sets: the first ones, so that their places are its bits."""
        self._columns = tuple(columns)
        folder = SHARED if len(queries) > 1 else None
        self._all = ResultWriter(self.queries[0], self._columns, results, sync, folder)
        self._some = ResultWriter(self.queries[0], self._columns, results, sync, folder)
        self._own = {query: ResultWriter(query, self._columns, results, sync) for query in self.queries[self._shared :]}
        self._some_rows = np.zeros(self._shared, np.int64)
        self._some_bytes = np.zeros(self._shared, np.int64)
        self._files: dict[str, list[ResultFile]] | None = None

    def write(self, emits: Sequence[Emit], partial: Partial) -> None:
        """A chunk of results that are the same rows for all of these queries, one emit for each.

        All are computed before one is written.  One that cannot be computed may be a row of any of these queries.
        """
        partial = of_emits(emits, partial)
        if not len(partial.hashes):
            return
        first = emits[0]
        computed = result_columns(first.query, first, partial, self._columns)
        table = pa.table(computed, names=list(self._columns))
        bits = [(emit.member, self.place[emit.query]) for emit in emits]
        width = width_of(len(self.queries))
        if partial.sets is not None:
            self.add(table, mapped(partial.sets, bits, width))
        elif len(emits) == len(self.queries):
            self.add(table, None)
        else:
            mine = as_words(sum(1 << place for _, place in bits), width)
            self.add(table, np.broadcast_to(mine, (table.num_rows, width)))

    def add(self, table: pa.Table, sets: U64 | None) -> None:
        """Rows of all queries, or those with the bit of its place of each."""
        if sets is None and not self._some.rows:
            self._all.add(table)
            self.rows += table.num_rows
            return
        if sets is None:
            width = width_of(len(self.queries))
            everyone = as_words((1 << len(self.queries)) - 1, width)
            sets = np.broadcast_to(everyone, (table.num_rows, width))
        self.rows += members_in(sets)[: len(self.queries)]
        for query, writer in self._own.items():
            word, bit = divmod(self.place[query], 64)
            mine = sets[:, word] >> np.uint64(bit) & np.uint64(1) == 1
            if mine.any():
                writer.add(table if mine.all() else table.filter(pa.array(mine)))
        if self._shared:
            self._add_some(table, sets)

    def _add_some(self, table: pa.Table, sets: U64) -> None:
        """Rows to the file with sets."""
        width = width_of(self._shared)
        everyone = as_words((1 << self._shared) - 1, width)
        sets = sets[:, :width] & everyone
        mine = within(sets, everyone)
        if not mine.all():
            table, sets = table.filter(pa.array(mine)), sets[mine]
        if table.num_rows:
            self._some.add(with_sets(table, sets))
            self._some_rows += members_in(sets)[: self._shared]
            self._some_bytes += weights_in(sets, row_bytes(table))[: self._shared]

    def unpacked(self, query: str) -> int:
        """Bytes of a query's rows in memory, so far."""
        place = self.place[query]
        some = int(self._some_bytes[place]) if place < self._shared else self._own[query].unpacked
        return self._all.unpacked + some

    def close(self) -> dict[str, list[ResultFile]]:
        """Finishes the files; by query its entries."""
        if self._files is None:
            found: dict[str, list[ResultFile]] = {query: [] for query in self.queries}
            for file in self._all.close():
                for query in self.queries:
                    found[query].append(replace(file, query=query))
            for file in self._some.close():
                for bit, query in enumerate(self.queries[: self._shared]):
                    rows, size = int(self._some_rows[bit]), int(self._some_bytes[bit])
                    if rows:
                        found[query].append(replace(file, query=query, rows=rows, unpacked=size, bit=bit))
            for query, writer in self._own.items():
                found[query] += writer.close()
            self._files = found
        return self._files

    def abandon(self) -> None:
        """Removes what was written: the task has failed."""
        for writer in (self._all, self._some, *self._own.values()):
            writer.abandon()


class Shared(Protocol):
    """Takes rows for several queries: `SharedWriter`, or `shared_groups.SharedGroupWriter`."""

    rows: I64
    """Of each query so far, by its place."""
    place: dict[str, int]

    def write(self, emits: Sequence[Emit], partial: Partial) -> None: ...

    def unpacked(self, query: str) -> int: ...

    def close(self) -> dict[str, list[ResultFile]]: ...

    def abandon(self) -> None: ...


@dataclass(frozen=True)
class Share:
    """What a shared writer is to one of its queries."""

    query: str
    writer: Shared

    @property
    def rows(self) -> int:
        """Of the query, so far."""
        return int(self.writer.rows[self.writer.place[self.query]])

    @property
    def unpacked(self) -> int:
        """Bytes of its rows in memory, so far."""
        return self.writer.unpacked(self.query)

    def close(self) -> list[ResultFile]:
        """The query's entries; the files are finished for all."""
        return self.writer.close()[self.query]

    def abandon(self) -> None:
        """Removes what was written: the task has failed."""
        self.writer.abandon()


def rounds(emits: Sequence[tuple[Share, Emit]]) -> Iterator[tuple[Shared, list[Emit]]]:
    """Who writes the rows of a chunk, and for which queries: each row is written once for all that share it.

    A query that drives by two aliases may emit twice at a node: these are different results.
    """
    found: dict[tuple[object, ...], tuple[Shared, list[Emit]]] = {}
    again: dict[str, int] = {}
    for share, emit in emits:
        number = again[emit.query] = again.get(emit.query, 0) + 1
        key = (id(share.writer), emit.columns, emit.values, number)
        found.setdefault(key, (share.writer, []))[1].append(emit)
    yield from found.values()
