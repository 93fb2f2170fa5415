"""Many selections over one stream: source tasks evaluate them, so that Spark need not plan them.

Spark analyses, optimises and plans a streaming query anew in every epoch, and a hundred conditions per stream make that
the largest part of a small epoch.  A condition whose meaning join tasks know exactly (`Filter.expr`) costs a source
task an Arrow kernel or two.

Contract.  `masked_by_task(source)` says for a source whether its tasks do so.  Then Spark hands over `extra_columns` as
well, and no query-set bits; `with_bits` makes of these rows what Spark would have: the same bits, without the rows that
meet no condition, without the extra columns.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from plait.query.expr import Expr, columns_of
from plait.query.store import Input, mask_columns
from plait.state.segments.columns import in_utc, single
from plait.state.segments.evaluate import holds
from plait.state.segments.filter_sets import packed

FEWEST = 8
"""Conditions from which on tasks evaluate them: fewer cost Spark next to nothing, and it is faster row by row."""


def masked_by_task(source: Input) -> bool:
    """Whether tasks evaluate the conditions of a source: there are many, and the meaning of all is known."""
    return len(source.texts) >= FEWEST and all(text is None or text in _meanings(source) for text in source.texts)


def extra_columns(source: Input) -> list[str]:
    """The stream's columns that conditions read, beside those that are selected anyway."""
    selected = {column.name for column in source.columns}
    read = dict.fromkeys(ref.column for expr in _meanings(source).values() for ref in columns_of(expr))
    return [name for name in read if name not in selected]


def with_bits(batch: pa.RecordBatch, source: Input) -> pa.Table:
    """Rows with the bits of the conditions that they meet; those that meet none are left out."""
    table = in_utc(pa.Table.from_batches([batch]))
    meanings = _meanings(source)
    columns = {name: single(table.column(name)) for name in table.column_names}
    flags = [
        np.ones(table.num_rows, np.bool_)
        if text is None
        else np.asarray(
            pa.array(holds(meanings[text], lambda ref: columns[ref.column])).to_numpy(zero_copy_only=False), np.bool_
        )
        for text in source.texts
    ]
    table = table.drop_columns(extra_columns(source))
    words = packed(flags, table.num_rows)
    for name, word in zip(mask_columns(len(flags)), words, strict=True):
        table = table.append_column(name, pa.array(word))
    met = np.logical_or.reduce([word != 0 for word in words])
    return table if met.all() else table.filter(pa.array(met))


def _meanings(source: Input) -> dict[str | None, Expr]:
    return {f.text: f.expr for f in source.filters if f.expr is not None}
