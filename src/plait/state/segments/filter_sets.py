"""Query sets at rest: which filters the rows of a segment pass.

A segment knows the filters that all its rows pass, and which bit of its query set stands for which filter; no bit ever
changes its meaning.  A filter that was not known when the rows arrived is evaluated from their columns, if it can be.
Rows for which nobody can tell do not pass: they are older than the floor of every query that has the filter.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from plait.kernels.sets import moved_bits
from plait.query.expr import columns_of
from plait.query.store import MASK_BITS, Filter, mask_columns
from plait.state.segments.evaluate import holds

Flags = npt.NDArray[np.bool_]
Column = Callable[[str], pa.Array]
"""A column of some rows, by name."""
PASSED = -1
"""In the place of a bit: all rows pass."""


@dataclass(frozen=True, slots=True)
class Sets:
    """What a segment knows of the filters that its rows pass."""

    bits: tuple[int, ...] = ()
    """The filter of each bit of its query set."""
    passed: tuple[int, ...] = ()
    """Filters that all rows pass."""

    def known(self, filter: Filter) -> int | None:
        """The filter whose bit tells whether rows pass this one; None if none does."""
        every = (filter.id, *filter.like)
        return next((f for f in every if f in self.passed), next((f for f in every if f in self.bits), None))

    def lookup(self) -> Callable[[Filter], int | None]:
        """`known` for many filters: a function that gives the bit that tells, PASSED if all rows pass, or None."""
        places = {f: i for i, f in enumerate(self.bits)} | dict.fromkeys(self.passed, PASSED)

        def known(filter: Filter) -> int | None:
            found = places.get(filter.id)
            if filter.like and found != PASSED:
                every = [places[f] for f in (filter.id, *filter.like) if f in places]
                return PASSED if PASSED in every else next(iter(every), None)
            return found

        return known

    def columns(self, filter: Filter, there: Container[str]) -> list[str]:
        """The columns from which it is told whether rows pass a filter, of those that are there."""
        known = self.known(filter)
        if known is None:
            return list(_read(filter)) if _can_evaluate(filter, there) else []
        return [] if known in self.passed else [mask_columns(len(self.bits))[self.bits.index(known) // MASK_BITS]]

    def passing(self, filter: Filter, column: Column, rows: int, there: Container[str]) -> Flags:
        """Which of some rows with these columns pass a filter."""
        known = self.known(filter)
        if known is None and filter.expr is not None and _can_evaluate(filter, there):
            found: Flags = holds(filter.expr, lambda ref: column(ref.column)).to_numpy(zero_copy_only=False)
            return found
        if known is None:
            return np.full(rows, filter.text is None)
        if known in self.passed:
            return np.ones(rows, np.bool_)
        return tested(column, self.bits.index(known))


def _read(filter: Filter) -> dict[str, None]:
    return {} if filter.expr is None else dict.fromkeys(ref.column for ref in columns_of(filter.expr))


def _can_evaluate(filter: Filter, there: Container[str]) -> bool:
    return filter.expr is not None and all(name in there for name in _read(filter))


def tested(column: Column, position: int) -> Flags:
    """Bit `position` of the query sets."""
    word = column(mask_columns(position + 1)[-1]).to_numpy()
    flags: Flags = (word >> (position % MASK_BITS) & 1).astype(np.bool_)
    return flags


def packed(flags: Sequence[Flags], rows: int) -> list[npt.NDArray[np.int64]]:
    """The query sets of rows, word by word, from what is known filter by filter."""
    words = [np.zeros(rows, np.int64) for _ in mask_columns(len(flags))]
    for position, flag in enumerate(flags):
        words[position // MASK_BITS] |= flag.astype(np.int64) << (position % MASK_BITS)
    return words


def moved(words: Sequence[npt.NDArray[np.int64]], places: Sequence[int], rows: int) -> list[npt.NDArray[np.int64]]:
    """Query sets with other bits: bit j is what bit `places[j]` was."""
    none = np.zeros(rows, np.int64), np.full(len(places), np.iinfo(np.int64).min)
    return list(moved_bits(np.stack(words), np.array(places), MASK_BITS, *none)) if len(places) else []


@dataclass(frozen=True)
class Rewritten:
    """The query sets of a segment, in the bits that segments have from now on."""

    filters: tuple[Filter, ...]
    by_id: Mapping[int, Filter] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_id", {f.id: f for f in self.filters})

    def together(self, parts: Iterable[Sets]) -> Sets:
        """What is known of rows of several segments in one."""
        known = list(parts)
        # A filter that was not asked about yet has to be evaluated: it is implied for none.
        tell = [s.lookup() for s in dict.fromkeys(known)]
        passed = tuple(f.id for f in self.filters if all(of(f) == PASSED for of in tell))
        everyone = frozenset(passed)
        return Sets(tuple(f.id for f in self.filters if f.id not in everyone), passed)

    def words(self, into: Sets, sets: Sets, columns: Mapping[str, pa.Array], rows: int) -> list[npt.NDArray[np.int64]]:
        """The query sets of some rows of a segment with `sets`, as a segment `into` which they go has them."""
        known = sets.lookup()
        places = [p for f in into.bits if (p := known(self.by_id[f])) is not None and p != PASSED]
        if len(places) == len(into.bits):
            # The usual case: all that is asked has a bit, which only moves.
            words = [np.asarray(columns[name]) for name in mask_columns(len(sets.bits))]
            return words if into.bits == sets.bits else moved(words, places, rows)
        flags = [sets.passing(self.by_id[f], columns.__getitem__, rows, columns) for f in into.bits]
        return packed(flags, rows)
