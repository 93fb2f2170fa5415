"""Rows of a maintained aggregate, made where the rows are joined: groups leave the task, not what they are made of.

Contract.  Partial rows mean what Spark's would (`sql/catalyst/maintain.py`).  Where a value might leave its type, or
Arrow cannot compute it, nothing is made: the joined rows themselves are kept, and Spark says what becomes of them.

Cost: one hash table per chunk of joined rows and one over the groups of all chunks; of these at most `limit` bytes are
held, more go to the file, where a group may then occur several times.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from plait.query.expr import ColumnRef, Expr
from plait.query.grouping import SUM, Grouping
from plait.query.plan import Emit
from plait.runtime.task.partial import Partial
from plait.runtime.task.result_writer import ResultWriter
from plait.state.files.storage import Files
from plait.state.log.manifest import ResultFile
from plait.state.segments.arrow_types import arrow_type
from plait.state.segments.columns import single
from plait.state.segments.evaluate import values


def grouped(rows: pa.Table, grouping: Grouping) -> pa.Table | None:
    """Of joined rows, one row per group; None where that is for Spark to say."""

    def column(ref: ColumnRef) -> pa.Array:
        return single(rows.column(ref.column))

    asked: list[tuple[str, pa.Array | None]] = []
    try:
        keys = {key.name: values(key.value, column, len(rows)) for key in grouping.keys}
        for value in grouping.values:
            argument = None if value.argument is None else values(value.argument, column, len(rows))
            asked.append((value.function, argument))
        return _aggregated(keys, asked, grouping, len(rows))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return None


def merged(parts: Sequence[pa.Table], grouping: Grouping) -> pa.Table | None:
    """Of partial rows, one row per group; None where that is for Spark to say."""
    if not parts:
        return None
    try:
        rows = pa.concat_tables([part.select(grouping.names).cast(parts[0].schema) for part in parts])
        keys = {key.name: single(rows.column(key.name)) for key in grouping.keys}
        asked = [(value.merging, single(rows.column(value.name))) for value in grouping.values]
        found = _aggregated(keys, asked, grouping, len(rows))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return None
    return None if found is None else found.cast(parts[0].schema)


def having(rows: pa.Table, conditions: Sequence[Expr]) -> pa.Table:
    """Of merged rows those that fulfil conditions, and those of which only Spark can say whether they do."""
    for condition in conditions:
        table = rows

        def column(ref: ColumnRef, table: pa.Table = table) -> pa.Array:
            return single(table.column(ref.column))

        try:
            rows = table.filter(values(condition, column, len(table)))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            continue
    return rows


def _aggregated(
    keys: dict[str, pa.Array], asked: Sequence[tuple[str, pa.Array | None]], grouping: Grouping, rows: int
) -> pa.Table | None:
    columns: dict[str, pa.Array] = dict(keys)
    functions: list[tuple[Any, str]] = []
    made: list[str] = []
    for number, (function, argument) in enumerate(asked):
        if argument is None:
            functions.append(([], "count_all"))
            made.append("count_all")
            continue
        if function == SUM and (argument := _summable(argument, rows)) is None:
            return None
        columns[f"a{number}"] = argument
        functions.append((f"a{number}", function))
        made.append(f"a{number}_{function}")
    if not columns:
        # Arrow wants a column to count the rows of.
        columns[""] = pa.nulls(rows)
    found = pa.TableGroupBy(pa.table(columns), list(keys), use_threads=False).aggregate(functions)
    results = [single(found.column(name)) for name in keys]
    for name, value in zip(made, grouping.values, strict=True):
        kind = arrow_type(value.type)
        result = single(found.column(name))
        results.append(result if kind is None else result.cast(kind))
    return pa.table(results, names=list(grouping.names))


def _summable(argument: pa.Array, rows: int) -> pa.Array | None:
    """The argument in the type that it is summed in; None if the sum might not fit."""
    kind = argument.type
    if pa.types.is_floating(kind):
        return argument.cast(pa.float64())
    bounds = pc.min_max(argument)
    most = max(abs(bounds[name].as_py() or 0) for name in ("min", "max"))
    if pa.types.is_decimal(kind):
        # Python rounds to 28 digits here, so one of the 38 is kept back.
        fits = Decimal(most) * rows < Decimal(10) ** (37 - kind.scale)
        return argument.cast(pa.decimal128(38, kind.scale)) if fits else None
    return argument.cast(pa.int64()) if most * rows < 2**63 else None


class GroupWriter:
    """What one task adds to a maintained aggregate."""

    def __init__(
        self, query: str, columns: tuple[str, ...], grouping: Grouping, results: Files, sync: bool, limit: int
    ) -> None:
        self.rows = 0
        """Joined rows."""
        self.limit = limit
        self._columns = columns
        self._grouping = grouping
        self._plain = ResultWriter(query, columns, results, sync)
        self._groups = ResultWriter(query, grouping.names, results, sync)
        self._held: list[pa.Table] = []
        self._bytes = 0

    @property
    def unpacked(self) -> int:
        """Bytes of its rows in memory, so far."""
        return self._bytes + self._plain.unpacked + self._groups.unpacked

    def write(self, emit: Emit, partial: Partial) -> None:
        """A chunk of results."""
        rows = pa.table(partial.columns(emit.columns), names=list(self._columns))
        self.rows += len(rows)
        found = grouped(rows, self._grouping)
        if found is None:
            self._plain.add(rows)
            return
        self._held.append(found)
        self._bytes += found.nbytes
        if self._bytes > self.limit:
            self._merge()
            if self._bytes > self.limit // 2:
                self._flush()

    def close(self) -> list[ResultFile]:
        """The files that hold it all."""
        self._merge()
        self._flush()
        return [*self._plain.close(), *self._groups.close(grouped=True)]

    def abandon(self) -> None:
        """Removes what was written: the task has failed."""
        self._plain.abandon()
        self._groups.abandon()

    def _merge(self) -> None:
        if len(self._held) > 1 and (found := merged(self._held, self._grouping)) is not None:
            self._held, self._bytes = [found], found.nbytes

    def _flush(self) -> None:
        for table in self._held:
            self._groups.add(table)
        self._held, self._bytes = [], 0
