"""The results of one task: which writer complete tuples go to.

Queries whose rows are kept and have the same columns share a writer, also those that make the same groups of them;
those that are dropped are materialised once for all with the same columns, and counted for each.

A query of which a row cannot be computed is given up in this task, and all that it has written: the driver is told of
it, and parks it.  The others lose nothing, not even those that share the rows' file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from functools import partial as bound

from plait.errors import QueryError
from plait.kernels.sets import members_in
from plait.query.plan import Emit
from plait.runtime.task.computed import result_columns
from plait.runtime.task.epoch_task import EpochTask
from plait.runtime.task.group_writer import GroupWriter
from plait.runtime.task.notes import CUT, FailedNote, ResultNote
from plait.runtime.task.partial import Partial
from plait.runtime.task.result_writer import ResultWriter
from plait.runtime.task.shared_groups import SharedGroupWriter
from plait.runtime.task.shared_results import Share, Shared, SharedWriter, alike, rounds
from plait.state.segments.sieve import as_words


@dataclass
class TaskResults:
    """The writers of a task, by query."""

    context: EpochTask
    writers: dict[str, ResultWriter | GroupWriter | Share] = field(default_factory=dict)
    failed: dict[str, QueryError] = field(default_factory=dict)
    """The queries that are given up, and why."""

    @property
    def rows(self) -> int:
        """Of all queries so far."""
        return sum(writer.rows for writer in self.writers.values())

    def emit(self, emits: Sequence[Emit], partial: Partial) -> None:
        """Complete tuples go to the results of the queries that they belong to."""
        dropped: dict[tuple[object, ...], list[Emit]] = {}
        shared: list[tuple[Share, Emit]] = []
        for emit in emits:
            if emit.query in self.context.left_out or emit.query in self.failed:
                continue
            writer = self.writers.get(emit.query)
            if writer is None:
                writer = self.writers[emit.query] = self._writer(emit.query)
            if isinstance(writer, Share):
                shared.append((writer, emit))
            elif partial.sets is not None and emit.query not in self.context.kept:
                dropped.setdefault((emit.columns, emit.values), []).append(emit)
            else:
                mine = partial.of_member(emit.member)
                if len(mine.hashes):
                    self._written([emit], partial, bound(_write_own, writer, mine))
        for together, some in rounds(shared):
            self._written(some, partial, bound(together.write, partial=partial))
        for equal in dropped.values():
            self._written(equal, partial, bound(self._count, partial=partial))
        self._cut()

    def _written(self, emits: Sequence[Emit], partial: Partial, write: Callable[[Sequence[Emit]], None]) -> None:
        """A chunk of results is written for these queries, without those of which a row cannot be computed.

        `write` computes all rows before it writes one.
        """
        try:
            write(emits)
        except QueryError:
            left = [emit for emit in emits if not self._fails(emit, partial)]
            if len(left) == len(emits):
                raise
            if left:
                write(left)

    def _fails(self, emit: Emit, partial: Partial) -> bool:
        names = [name for name, _ in self.context.plan.query_by_name[emit.query].columns]
        try:
            result_columns(emit.query, emit, partial.of_member(emit.member), names)
        except QueryError as error:
            self.failed[emit.query] = error
            return True
        return False

    def _cut(self) -> None:
        """Gives up queries with more rows than they may have, and than could be kept for them."""
        for query, most in self.context.most_rows.items():
            writer = self.writers.get(query)
            if writer is None or query in self.failed or writer.rows <= most:
                continue
            if query not in self.context.kept or writer.unpacked > self.context.most_bytes:
                self.failed[query] = QueryError(CUT, f"a task has stopped after {writer.rows:,} rows", "")

    def _count(self, emits: Sequence[Emit], partial: Partial) -> None:
        """Rows that queries with the same columns drop are materialised once, and counted for each."""
        assert partial.sets is not None
        everyone = as_words(sum(1 << emit.member for emit in emits), partial.sets.shape[1])
        first = emits[0]
        names = [name for name, _ in self.context.plan.query_by_name[first.query].columns]
        result_columns(first.query, first, partial.of_members(everyone), names)
        rows = members_in(partial.sets)
        for emit in emits:
            writer = self.writers[emit.query]
            assert not isinstance(writer, Share), "rows that are dropped are in no file"
            writer.rows += int(rows[emit.member])

    @cached_property
    def _shares(self) -> dict[str, Share]:
        """By query what it shares; a query that shares with nobody is left out."""
        found: dict[str, Share] = {}
        for queries in alike(self.context.plan, self.context.kept):
            writer = self._shared_writer(queries)
            found |= {query: Share(query, writer) for query in queries}
        return found

    def _shared_writer(self, queries: Sequence[str]) -> Shared:
        context = self.context
        first = context.plan.query_by_name[queries[0]]
        columns, results = [name for name, _ in first.columns], context.results
        if first.grouping is None:
            return SharedWriter(queries, columns, results, context.sync, context.apart)
        return SharedGroupWriter(queries, columns, first.grouping, results, context.sync, self._group_bytes)

    @property
    def _group_bytes(self) -> int:
        """Bytes of groups that a writer may hold."""
        return self.context.memory // 16

    def _writer(self, name: str) -> ResultWriter | GroupWriter | Share:
        context = self.context
        query = context.plan.query_by_name[name]
        columns = tuple(column for column, _ in query.columns)
        if name not in context.kept:
            return ResultWriter(name, columns, None, context.sync)
        if (share := self._shares.get(name)) is not None:
            return share
        if query.grouping is None:
            return ResultWriter(name, columns, context.results, context.sync)
        return GroupWriter(name, columns, query.grouping, context.results, context.sync, self._group_bytes)

    def close(self) -> Iterator[ResultNote | FailedNote]:
        """Finishes the files, and tells of them."""
        needed = {id(w.writer) for q, w in self.writers.items() if isinstance(w, Share) and q not in self.failed}
        for query, writer in self.writers.items():
            if (error := self.failed.get(query)) is None:
                files = tuple(writer.close())
                yield ResultNote(query, writer.rows, files)
                continue
            if not isinstance(writer, Share) or id(writer.writer) not in needed:
                writer.abandon()
            yield FailedNote(query, error.code, error.cause, error.remedy, writer.rows)

    def abandon(self) -> None:
        """Removes what was written: the task has failed."""
        for writer in self.writers.values():
            writer.abandon()


def _write_own(writer: ResultWriter | GroupWriter, rows: Partial, emits: Sequence[Emit]) -> None:
    for emit in emits:
        writer.write(emit, rows)
