"""Joined tuples in rows, inside one task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from plait.kernels import U64
from plait.kernels.sets import within
from plait.query.plan import SlotColumn
from plait.query.store import SET_BITS
from plait.state.segments.columns import Rows, single, take

Hashes = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Slot:
    """What one joined relation contributes: tuple i has row `rows[i]` of `table` (row i if `rows` is None)."""

    table: pa.Table
    rows: Rows | None = None

    def column(self, name: str) -> pa.Array:
        """The column's value in every tuple."""
        values = single(self.table.column(name))
        return values if self.rows is None else take([values], self.rows)[0]

    def columns(self, names: Sequence[str]) -> list[pa.Array]:
        """Several columns' values in every tuple."""
        values = [single(self.table.column(name)) for name in names]
        return values if self.rows is None else take(values, self.rows)

    def picked(self, rows: Rows) -> Slot:
        """The slot of the tuples `rows`."""
        return Slot(self.table, rows if self.rows is None else self.rows[rows])


@dataclass(frozen=True)
class Partial:
    """Joined tuples in rows, sorted by the hash of the hop's key."""

    hashes: Hashes
    slots: tuple[Slot, ...]
    sets: U64 | None = None
    """The members that each tuple belongs to; None where all belong to all."""

    def column(self, ref: SlotColumn) -> pa.Array:
        """A column of every tuple."""
        return self.slots[ref.slot].column(ref.column)

    def columns(self, refs: Sequence[SlotColumn]) -> list[pa.Array]:
        """Several columns of every tuple."""
        found: dict[SlotColumn, pa.Array] = {}
        for number, slot in enumerate(self.slots):
            mine = list(dict.fromkeys(ref for ref in refs if ref.slot == number))
            found.update(zip(mine, slot.columns([ref.column for ref in mine]), strict=True))
        return [found[ref] for ref in refs]

    def picked(self, rows: Rows) -> Partial:
        """The tuples `rows`, which must be ascending."""
        sets = None if self.sets is None else self.sets[rows]
        return Partial(self.hashes[rows], tuple(slot.picked(rows) for slot in self.slots), sets)

    def of_member(self, member: int) -> Partial:
        """The tuples that belong to a member."""
        if self.sets is None:
            return self
        word, bit = divmod(member, SET_BITS)
        return self.picked(np.flatnonzero(self.sets[:, word] >> np.uint64(bit) & np.uint64(1)))

    def of_members(self, members: U64) -> Partial:
        """The tuples that belong to some of these members."""
        if self.sets is None:
            return self
        mine = within(self.sets, members)
        return self if mine.all() else self.picked(np.flatnonzero(mine))
