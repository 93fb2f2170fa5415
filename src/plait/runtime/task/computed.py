"""Columns of results that tasks compute from joined rows: `r.p + t.p`, `concat(…)`, `CASE …`.

Contract: only complete results that have passed every check come here, so an error of ANSI mode (an overflow, a
division by zero) is one that Spark would raise too.  It is the trouble of its query alone (`driver/troubled.py`).

Cost: the columns that are read are gathered once per chunk, whatever is computed from them.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from plait.errors import QueryError
from plait.query.expr import ColumnRef
from plait.query.plan import Emit, SlotColumn
from plait.runtime.task.partial import Partial
from plait.state.segments.evaluate import values


def result_columns(query: str, emit: Emit, partial: Partial, names: Sequence[str]) -> list[pa.Array]:
    """The columns of a chunk of results; `names` are what they are called."""
    read = partial.columns(emit.columns)
    if not emit.values:
        return read
    known = dict(zip(emit.columns, read, strict=True))

    def column(ref: ColumnRef) -> pa.Array:
        return known[SlotColumn(int(ref.alias), ref.column)]

    found = []
    for name, expr in zip(names, emit.values, strict=True):
        try:
            found.append(values(expr, column, len(partial.hashes)))
        except pa.ArrowInvalid as error:
            raise _failed(query, name, error) from error
    return found


def _failed(query: str, name: str, error: pa.ArrowInvalid) -> QueryError:
    """Under the name that Spark has for the same error."""
    cause = f"column {name!r} of query {query!r} cannot be computed for a joined row: {error}"
    remedy = "correct the rows, or engine.replace the query by one that can take them (CASE, nullif, a wider type)"
    if str(error) == "divide by zero":
        return QueryError("DIVIDE_BY_ZERO", cause, remedy)
    if str(error) == "remainder by zero":
        return QueryError("REMAINDER_BY_ZERO", cause, remedy)
    if str(error) == "cast overflow":
        return QueryError("CAST_OVERFLOW", cause, remedy)
    return QueryError("ARITHMETIC_OVERFLOW", cause, remedy)
