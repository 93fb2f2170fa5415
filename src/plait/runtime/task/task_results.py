"""The results of one task: which writer complete tuples go to.

Queries whose rows are kept and have the same columns share a writer; those that are dropped are materialised once for
all with the same columns, and counted for each; aggregates are grouped, query by query.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from plait.kernels.sets import members_in
from plait.query.plan import Emit
from plait.runtime.task.computed import result_columns
from plait.runtime.task.epoch_task import EpochTask
from plait.runtime.task.group_writer import GroupWriter
from plait.runtime.task.notes import ResultNote
from plait.runtime.task.partial import Partial
from plait.runtime.task.result_writer import ResultWriter
from plait.runtime.task.shared_results import Share, shares, write_shared
from plait.state.segments.sieve import as_words


@dataclass
class TaskResults:
    """The writers of a task, by query."""

    context: EpochTask
    writers: dict[str, ResultWriter | GroupWriter | Share] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """Of all queries so far."""
        return sum(writer.rows for writer in self.writers.values())

    def emit(self, emits: Sequence[Emit], partial: Partial) -> None:
        """Complete tuples go to the results of the queries that they belong to."""
        dropped: dict[tuple[object, ...], list[Emit]] = {}
        shared: list[tuple[Share, Emit]] = []
        for emit in emits:
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
                    writer.write(emit, mine)
        write_shared(shared, partial)
        for alike in dropped.values():
            self._count(alike, partial)

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

    def close(self) -> Iterator[ResultNote]:
        """Finishes the files, and tells of them."""
        for query, writer in self.writers.items():
            files = tuple(writer.close())
            yield ResultNote(query, writer.rows, files)

    def abandon(self) -> None:
        """Removes what was written: the task has failed."""
        for writer in self.writers.values():
            writer.abandon()
