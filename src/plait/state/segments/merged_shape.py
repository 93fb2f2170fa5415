"""What rows of several segments become when they are written together: one set of columns, one meaning of bits.

Segments of a store may have been written under different catalogs: with fewer columns, other filters, with or without
a TTL.  Whoever writes their rows again, a merge or a build, gives all of them the shape that the store has today.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from plait.kernels import Flags
from plait.query.store import ARRIVED, BORN, FOREVER, MASK, Filter, Store, mask_columns
from plait.state.segments.columns import single
from plait.state.segments.filter_sets import Rewritten
from plait.state.segments.segment import Origin, SegmentInfo


@dataclass(frozen=True)
class Shape:
    """Columns and query sets of rows that are written together."""

    columns: tuple[str, ...]
    """Data columns, and ARRIVED where there is a TTL."""
    masks: tuple[str, ...]
    """Columns of query sets."""
    has_born: bool
    origin: Origin
    rewritten: Rewritten | None
    """None leaves query sets as they are."""
    horizon_us: int | None = None
    """Rows up to this event time are left out."""

    def formed(self, info: SegmentInfo, table: pa.Table, rows: int) -> pa.Table:
        """Some rows of a segment in this shape."""
        there = set(table.column_names)
        arrays: dict[str, pa.Array | pa.ChunkedArray] = {}
        for name in self.columns:
            if name in there:
                arrays[name] = table.column(name)
            else:
                arrays[name] = pa.array(np.full(rows, FOREVER, np.int64)) if name == ARRIVED else pa.nulls(rows)
        if self.rewritten is None or (self.masks and info.sets == self.origin.sets):
            arrays |= {name: table.column(name) for name in self.masks}
        elif self.masks:
            found = {name: single(table.column(name)) for name in there}
            words = self.rewritten.words(self.origin.sets, info.sets, found, rows)
            arrays |= {name: pa.array(word) for name, word in zip(self.masks, words, strict=True)}
        if self.has_born:
            arrays[BORN] = table.column(BORN) if BORN in there else pa.array(np.full(rows, info.min_born, np.int64))
        return pa.table(arrays) if arrays else pa.table({})

    def wanted(self, table: pa.Table) -> Flags | None:
        """The rows that pass a filter in use; None if all do."""
        if self.rewritten is None or self.origin.sets.passed or not self.masks:
            return None
        found = np.zeros(table.num_rows, np.bool_)
        for name in self.masks:
            found |= table.column(name).to_numpy() != 0
        return None if found.all() else found


def shape_of(
    store: Store,
    infos: Sequence[SegmentInfo],
    names: Sequence[frozenset[str]],
    filters: tuple[Filter, ...] | None,
    horizon_us: int | None = None,
) -> Shape:
    """The shape of rows of these segments, which have columns with these names."""
    first = min((info.min_born for info in infos), default=0)
    last = max((info.max_born for info in infos), default=0)
    has_born = any(first < floor <= last for floor in store.floors)
    found = sorted(frozenset[str]().union(*names))
    if filters is None:
        masks = tuple(name for name in found if name.startswith(MASK))
        columns = tuple(name for name in found if name != BORN and name not in masks)
        sets = infos[0].sets if infos else Origin((0, 0)).sets
        return Shape(columns, masks, has_born, Origin((first, last), sets), None, horizon_us)
    rewritten = Rewritten(filters)
    sets = rewritten.together(info.sets for info in infos)
    kept = tuple(column.name for column in store.columns)
    aged = (ARRIVED,) if store.ttl_us is not None else ()
    masks = mask_columns(len(sets.bits))
    return Shape((*kept, *aged), masks, has_born, Origin((first, last), sets), rewritten, horizon_us)
