"""Which rows have a partner: semi and anti joins of few rows, told in the driver.

Cost: one hash table over the other side's keys; per pair of rows with equal keys, the rest of the condition.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from plait.kernels.probe import gather_ranges
from plait.query.expr import ColumnRef
from plait.query.semi_join import OWN, Partners
from plait.state.segments.columns import single
from plait.state.segments.evaluate import values

MOST_PAIRS = 1 << 22
"""Rows with equal keys that are compared here; more are for Spark."""


class Others:
    """The rows that may be partners, by key; None if there is none at all."""

    def __init__(self, partners: Partners, rows: pa.Table | None) -> None:
        if rows is None:
            rows = pa.table({name: pa.nulls(0) for name in partners.columns})
        key = single(rows.column(partners.key[1]))
        self._partners, self._rows = partners, rows
        self._known = key.drop_null().unique()
        codes = pc.index_in(key, self._known).fill_null(len(self._known)).to_numpy()
        self._order = np.argsort(codes, kind="stable")
        self._starts = np.searchsorted(codes[self._order], np.arange(len(self._known) + 1))

    def have(self, own: pa.Table) -> npt.NDArray[np.bool_] | None:
        """Which of these rows have a partner; None where that is for Spark to say."""
        found = np.zeros(len(own), bool)
        if not len(self._known):
            return found
        codes = pc.index_in(single(own.column(self._partners.key[0])).cast(self._known.type), self._known)
        mine = np.flatnonzero(codes.is_valid().to_numpy(zero_copy_only=False))
        if self._partners.condition is None or not len(mine):
            found[mine] = True
            return found
        place = codes.drop_null().to_numpy()
        begin, end = self._starts[place], self._starts[place + 1]
        if (end - begin).sum() > MOST_PAIRS:
            return None
        pairs = np.repeat(mine, end - begin)
        theirs = self._order[gather_ranges(begin, end)]

        def column(ref: ColumnRef) -> pa.Array:
            table, at = (own, pairs) if ref.alias == OWN else (self._rows, theirs)
            return single(table.column(ref.column)).take(pa.array(at))

        try:
            holds = values(self._partners.condition, column, len(pairs))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            return None
        found[pairs[holds.fill_null(False).to_numpy(zero_copy_only=False)]] = True
        return found
