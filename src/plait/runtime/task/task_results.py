"""The results of one task: which writer complete tuples go to.

Queries whose rows are kept and have the same columns share a writer; those that are dropped are materialised once for
all with the same columns, and counted for each; aggregates are grouped, query by query.

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
from plait.runtime.task.shared_results import Share, rounds, shares
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
        for alike in dropped.values():
            self._written(alike, partial, bound(self._count, partial=partial))
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
        context = self.context
        return shares(context.plan, context.kept, context.apart, context.results, context.sync)

    def _writer(self, name: str) -> ResultWriter | GroupWriter | Share:
        context = self.context
        query = context.plan.query_by_name[name]
        columns = tuple(column for column, _ in query.columns)
        if name not in context.kept:
            return ResultWriter(name, columns, None, context.sync)
        if query.grouping is None:
            return self._shares.get(name) or ResultWriter(name, columns, context.results, context.sync)
        return GroupWriter(name, columns, query.grouping, context.results, context.sync, context.memory // 16)

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
