"""What the streaming query hands over of a stream, and how source tasks make of it what this epoch's queries need.

Spark plans a streaming query once, when it is started; queries come and go from epoch to epoch.  So a `Selection` says
what Spark selects (columns, conditions that it evaluates, rows that it leaves out), and an `Input` arrives with every
epoch.  As long as a selection `covers` an input, queries change without touching the streaming query.

Contract.  `with_bits` makes of the rows that a selection hands over what Spark would have made for the input alone: its
columns, one bit per condition where there are several, without the rows that meet none.  A condition is Spark's bit, or
evaluated here where its meaning is exactly Spark's (`Filter.expr`).

Cost.  Where Spark has done for these queries all that is to be done, nothing is touched.  Spark analyses, optimises and
plans a streaming query anew in every epoch, and a hundred conditions per stream make that the largest part of a small
epoch; a source task needs an Arrow kernel or two for each.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from plait.kernels import Flags
from plait.query.expr import Expr, columns_of
from plait.query.relation import ColumnDef
from plait.query.store import CORRUPT, MASK_BITS, NEEDED, Input, mask_columns
from plait.state.segments.columns import in_utc, single
from plait.state.segments.evaluate import holds
from plait.state.segments.filter_sets import packed

FEWEST = 8
"""Conditions from which on tasks evaluate them: fewer cost Spark next to nothing, and it is faster row by row."""


@dataclass(frozen=True)
class Selection:
    """What Spark hands over of a stream."""

    columns: tuple[ColumnDef, ...]
    needed: str | None = None
    """SQL that says which rows outlive the TTL; Spark evaluates it."""
    corrupt: str | None = None
    """The column in which a permissive reader leaves what it could not parse."""
    bits: tuple[str | None, ...] = ()
    """The conditions that Spark evaluates, one bit each."""
    passing: tuple[str, ...] | None = None
    """Rows that meet none of these are left out by Spark; None: all rows come."""

    @property
    def names(self) -> list[str]:
        """The columns that Spark hands over, in this order."""
        names = [column.name for column in self.columns]
        names += [NEEDED] if self.needed is not None else []
        names += [CORRUPT] if self.corrupt is not None else []
        return names + list(mask_columns(len(self.bits)))


def selection_of(source: Input) -> Selection:
    """What an input needs, and as little as that: Spark leaves out what nobody reads."""
    texts = source.texts
    bits: tuple[str | None, ...] = ()
    columns, passing = source.columns, None if None in texts else tuple(filter(None, texts))
    if masked_by_task(source):
        columns, passing = _with_read_columns(source), None
    elif len(texts) > 1:
        bits = texts
    return Selection(columns, source.needed, source.corrupt, bits, passing)


def widened(before: Selection, source: Input) -> Selection:
    """What Spark hands over once queries of a stream have changed while the engine runs, for those that may follow.

    All that it has handed over so far; and all rows, with the columns that conditions read, where tasks can evaluate
    these: the next condition, or the next query on these columns, then needs no other selection.
    """
    known = {column.name: column for column in (*before.columns, *_with_read_columns(source))}
    meanings = _meanings(source)
    untold = tuple(text for text in source.texts if text is not None and text not in meanings)
    passing = () if not source.texts else None
    return Selection(
        tuple(known[name] for name in sorted(known)), source.needed, source.corrupt or before.corrupt, untold, passing
    )


def covers(selection: Selection, source: Input) -> bool:
    """Whether an input can be made of what Spark hands over."""
    selected = {column.name: column for column in selection.columns}
    if selection.needed != source.needed or source.corrupt not in (None, selection.corrupt):
        return False
    if any(selected.get(column.name) != column for column in source.columns):
        return False
    if selection.passing is not None and not set(source.texts) <= set(selection.passing):
        return False
    told = {None, *selection.bits, *_implied(selection)}
    meanings = _meanings(source)
    return all(
        text in told or (text in meanings and {ref.column for ref in columns_of(meanings[text])} <= selected.keys())
        for text in source.texts
    )


def masked_by_task(source: Input) -> bool:
    """Whether tasks evaluate the conditions of a source from the start: there are many, and all meanings are known."""
    return len(source.texts) >= FEWEST and all(text is None or text in _meanings(source) for text in source.texts)


def with_bits(batch: pa.RecordBatch, selection: Selection, source: Input) -> pa.Table:
    """Rows as an input wants them; those that meet none of its conditions are left out."""
    table = pa.Table.from_batches([batch])
    names = [column.name for column in source.columns]
    names += [NEEDED] if source.needed is not None else []
    names += [CORRUPT] if source.corrupt is not None else []
    texts = source.texts
    if selection.bits == texts and len(texts) > 1 and (None in texts or selection.passing == texts):
        return table.select([*names, *mask_columns(len(texts))])
    if texts == (None,) or (len(texts) == 1 and texts == _implied(selection)):
        return table.select(names)
    flags = _flags(in_utc(table), selection, source)
    table = table.select(names)
    if not flags:
        return table.slice(0, 0)
    met = np.logical_or.reduce(flags)
    if len(flags) > 1:
        for name, word in zip(mask_columns(len(flags)), packed(flags, table.num_rows), strict=True):
            table = table.append_column(name, pa.array(word))
    return table if met.all() else table.filter(pa.array(met))


def _flags(table: pa.Table, selection: Selection, source: Input) -> list[Flags]:
    """By condition of an input, which rows meet it."""
    meanings, implied = _meanings(source), _implied(selection)
    place = {text: number for number, text in enumerate(selection.bits)}
    columns = {name: single(table.column(name)) for name in table.column_names}

    def flags(text: str | None) -> Flags:
        if text is None or text in implied:
            return np.ones(table.num_rows, np.bool_)
        if text in place:
            word, bit = divmod(place[text], MASK_BITS)
            words = columns[mask_columns(len(place))[word]].to_numpy()
            return np.asarray(words & (1 << bit) != 0)
        found = holds(meanings[text], lambda ref: columns[ref.column])
        if isinstance(found, pa.Scalar):
            return np.full(table.num_rows, found.as_py(), np.bool_)
        return np.asarray(pa.array(found).to_numpy(zero_copy_only=False), np.bool_)

    return [flags(text) for text in source.texts]


def _implied(selection: Selection) -> tuple[str, ...]:
    """The condition that all rows meet which Spark hands over, if there is one."""
    return selection.passing if selection.passing is not None and len(selection.passing) == 1 else ()


def _with_read_columns(source: Input) -> tuple[ColumnDef, ...]:
    """The columns of an input, and those that its conditions read."""
    selected = {column.name for column in source.columns}
    found = dict.fromkeys(ref for expr in _meanings(source).values() for ref in columns_of(expr))
    read = {ref.column: ref for ref in found if ref.column not in selected}
    more: Iterable[ColumnDef] = (
        ColumnDef(name, "`" + name.replace("`", "``") + "`", ref.type) for name, ref in read.items()
    )
    return (*source.columns, *more)


def _meanings(source: Input) -> dict[str | None, Expr]:
    return {f.text: f.expr for f in source.filters if f.expr is not None}
