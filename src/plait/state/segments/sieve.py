"""A sieve: which members of a probe tree see a row at rest, or one that has just arrived.

A row carries one bit per filter of its stream; a segment says which bit is which filter's (`filter_sets.py`), so a
sieve is fitted to every view it meets.  Fitted, it is a table from bytes of filter bits to sets of members, and a row
costs the same whether two queries filter the stream or five hundred.  Filters that a segment does not know are
evaluated one by one; floors are compared with the rows' births.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa

from plait.kernels import I64, U64
from plait.kernels.sets import translated
from plait.query.plan import Seen
from plait.query.store import BORN, MASK_BITS, SET_BITS, Filter, mask_columns
from plait.state.segments.columns import single
from plait.state.segments.filter_sets import PASSED, Sets
from plait.state.segments.run import MemoryRun
from plait.state.segments.view import View

Cells = Mapping[str, pa.Array]
"""Columns of some rows, by name."""


def as_words(members: int, width: int) -> U64:
    """A set of members as words.

    >>> as_words(1 << 64 | 5, 2).tolist()
    [5, 1]
    """
    words: U64 = all_as_words((members,), width)[0]
    return words


def all_as_words(sets: Iterable[int], width: int) -> U64:
    """[n, w]: sets of members as words."""
    size = SET_BITS // 8 * width
    every = (1 << 8 * size) - 1
    return np.frombuffer(bytearray().join((s & every).to_bytes(size, "little") for s in sets), "<u8").reshape(-1, width)


@dataclass(frozen=True)
class Sieve:
    """What each member sees, as words of its tree's sets."""

    seen: tuple[Seen, ...]
    width: int
    """Words of a set."""

    @cached_property
    def everyone(self) -> int:
        """All members."""
        found = 0
        for one in self.seen:
            found |= one.members
        return found

    @property
    def is_one(self) -> bool:
        """Whether all members see the same rows."""
        return len(self.seen) <= 1

    def lets_all(self, view: View) -> bool:
        """Whether every member sees every row of a view, as far as can be told without reading one."""
        fitted = self.fitted(view)
        return fitted.opens and fitted.always == self.everyone

    def sifted(self, view: View, names: Sequence[str], rows: I64) -> tuple[U64, dict[str, pa.Array]]:
        """The sets of some rows of a view, and further columns of them."""
        fitted = self.fitted(view)
        wanted = list(dict.fromkeys([*fitted.columns(view.run.names), *names]))
        cells = dict(zip(wanted, view.take(wanted, rows), strict=True)) if wanted else {}
        return fitted.apply(cells, len(rows)), cells

    def of_slice(self, view: View, rows: pa.Table, count: int) -> U64:
        """The sets of a slice of a view's rows."""
        fitted = self.fitted(view)
        wanted = fitted.columns(frozenset(rows.column_names))
        table = view.table(wanted, rows, count)
        return fitted.apply({name: single(table.column(name)) for name in wanted}, count)

    def of_all(self, view: View) -> U64:
        """The sets of all rows of a view that is in memory."""
        assert isinstance(view.run, MemoryRun)
        return self.of_slice(view, view.run.table, len(view.hashes))

    def fitted(self, view: View) -> Fitted:
        """For the rows of one view."""
        older = tuple(floor for floor in self._floors if view.min_born < floor)
        found = self._fits.get((view.sets, older))
        if found is None:
            found = self._fits[view.sets, older] = _fit(self, view)
        return found

    @cached_property
    def _floors(self) -> tuple[int, ...]:
        return tuple({seen.floor for seen in self.seen if seen.floor is not None})

    @cached_property
    def _fits(self) -> dict[tuple[Sets, tuple[int, ...]], Fitted]:
        return {}


@dataclass(frozen=True)
class Fitted:
    """A sieve, for rows of which it is known what their bits mean."""

    width: int
    always: int
    """Members whose filter all rows pass."""
    bits: tuple[int, ...]
    """The filter of each bit of the rows."""
    by_bit: Mapping[int, int]
    """Members by position of their filter's bit."""
    evaluated: tuple[tuple[Filter, int], ...]
    """Filters that the rows have no bit for, and their members."""
    floors: tuple[tuple[int, int], ...]
    """(floor, members): some rows may be older."""
    sets: Sets

    @property
    def opens(self) -> bool:
        """Whether all rows are seen by the same members, so that none has to be looked at."""
        return not (self.by_bit or self.evaluated or self.floors)

    def columns(self, there: frozenset[str]) -> list[str]:
        """What of the rows has to be read, of the columns that are there; BORN is always there."""
        found = [name for filter, _ in self.evaluated for name in self.sets.columns(filter, there)]
        found += mask_columns(len(self.bits)) if self.by_bit else ()
        return list(dict.fromkeys([*found, *([BORN] if self.floors else [])]))

    def apply(self, cells: Cells, rows: int) -> U64:
        """The set of each of some rows."""
        if self.by_bit:
            words = [np.asarray(cells[name]) for name in mask_columns(len(self.bits))]
            found = translated(np.stack(words, axis=1), self._table)
            found |= as_words(self.always, self.width)
        else:
            found = np.broadcast_to(as_words(self.always, self.width), (rows, self.width)).copy()
        for filter, members in self.evaluated:
            flags = self.sets.passing(filter, cells.__getitem__, rows, cells)
            found[flags] |= as_words(members, self.width)
        for floor, members in self.floors:
            found[np.asarray(cells[BORN]) < floor] &= ~as_words(members, self.width)
        return found

    @cached_property
    def _table(self) -> U64:
        """[byte, value, word]: the members whose filter has one of the bits in that byte."""
        count = 8 * len(mask_columns(len(self.bits)))
        members = np.zeros((64 * count // 8, self.width), np.uint64)
        places = np.fromiter(self.by_bit, np.int64, len(self.by_bit))
        members[places // MASK_BITS * 64 + places % MASK_BITS] = all_as_words(self.by_bit.values(), self.width)
        of_bit = members.reshape(count, 8, 1, self.width)
        table = np.zeros((count, 256, self.width), np.uint64)
        for bit in range(8):
            # Values with this bit as their highest: what the lower bits say, and what this one does.
            table[:, 1 << bit : 2 << bit] = table[:, : 1 << bit] | of_bit[:, bit]
        return table


def _fit(sieve: Sieve, view: View) -> Fitted:
    always, by_bit, evaluated = 0, dict[int, int](), dict[int, int]()
    floors: dict[int, int] = {}
    sets = view.sets
    known = sets.lookup()
    for seen in sieve.seen:
        position = None if seen.filter is None else known(view.filters[seen.filter])
        if seen.filter is None or position == PASSED:
            always |= seen.members
        elif position is not None:
            by_bit[position] = by_bit.get(position, 0) | seen.members
        else:
            evaluated[seen.filter] = evaluated.get(seen.filter, 0) | seen.members
        if seen.floor is not None and view.min_born < seen.floor:
            floors[seen.floor] = floors.get(seen.floor, 0) | seen.members
    return Fitted(
        width=sieve.width,
        always=always,
        bits=sets.bits,
        by_bit=by_bit,
        evaluated=tuple((view.filters[filter], members) for filter, members in evaluated.items()),
        floors=tuple(floors.items()),
        sets=sets,
    )
