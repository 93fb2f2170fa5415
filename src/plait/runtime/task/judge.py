"""Judging whole tuples: conditions and windows take members out of a tuple's set, or drop it for all.

Windows of several lengths over the same two event times are one search: the lengths cut the line of differences into
pieces, and each piece has a set of members.  So a hundred windows cost a tuple what one does.  Where all event times
are known, the search is made while tuples are multiplied out (`kernels/multiply.py`), and one outside is never written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from plait.kernels import I64, U64, Flags
from plait.kernels.multiply import Ruler
from plait.query.expr import ColumnRef
from plait.query.plan import SlotColumn, Span, Step
from plait.runtime.task.partial import Partial, Slot
from plait.state.segments.columns import single
from plait.state.segments.evaluate import holds
from plait.state.segments.segment import microseconds
from plait.state.segments.sieve import as_words

_LEAST, _MOST = np.iinfo(np.int64).min, np.iinfo(np.int64).max


@dataclass(frozen=True)
class Ruled:
    """What of a step can be applied while lists are multiplied out, and what is left for afterwards."""

    rulers: tuple[Ruler, ...]
    others: tuple[Span, ...]
    """Windows over event times of which some are not known."""
    whole: U64
    """The set of a tuple that nothing has been taken from."""
    makes_sets: bool
    """Whether tuples have sets afterwards; otherwise they are for all members, or dropped."""


@dataclass
class Judge:
    """Applies a step's checks and windows, for the members of its node."""

    step: Step
    members: int
    width: int
    """Words of a set."""
    tuples: int = 0
    """Tuples judged so far: multiplied out, and of somebody."""

    def ruled(self, slots: Sequence[Slot], tables: Sequence[pa.Table], have_sets: bool) -> Ruled:
        """For tuples of these slots, whose rows are list 0, and one list more for each table."""
        found, others = list[tuple[Span, tuple[int, I64], tuple[int, I64]]](), []
        for span in self.step.spans:
            left, right = (_known(ref, slots, tables) for ref in (span.left, span.right))
            if left is None or right is None:
                others.append(span)
            else:
                found.append((span, left, right))
        makes_sets = have_sets or not all(self._is_for_all(span) for span, _, _ in found)
        rulers = []
        for span, left, right in found:
            if makes_sets:
                cuts, table = _pieces(span, self.width)
            else:
                # One bit stands for all members.
                (low, high, _), *_ = span.bounds
                cuts, table = _pieces(replace(span, bounds=((low, high, 1),)), 1)
            rulers.append(Ruler(*left, *right, cuts, table))
        whole = as_words(self.members, self.width) if makes_sets else as_words(1, 1)
        return Ruled(tuple(rulers), tuple(others), whole, makes_sets)

    def judged(self, partial: Partial, ruled: Ruled, had: int) -> Partial:
        """The tuples that belong to somebody once also the rest is applied; `had` were multiplied out for them."""
        self.tuples += had
        members, width = self.members, self.width
        for check in self.step.checks:
            keep = holds(check.condition, _columns(partial)).to_numpy(zero_copy_only=False)
            if check.members is None:
                partial = partial if keep.all() else partial.picked(np.flatnonzero(keep))
            elif not keep.all():
                cleared = _sets(partial, members, width)
                cleared[~keep] &= ~as_words(check.members, width)
                partial = _alive(partial, cleared)
        for span in ruled.others:
            difference, known = _difference(partial, span)
            if self._is_for_all(span):
                lower, upper, _ = span.bounds[0]
                keep = known & _between(difference, lower, upper)
                partial = partial if keep.all() else partial.picked(np.flatnonzero(keep))
            else:
                partial = _alive(partial, _sets(partial, members, width) & _inside(span, difference, known, width))
        return partial

    def _is_for_all(self, span: Span) -> bool:
        return len(span.bounds) == 1 and span.bounds[0][2] == self.members


def _known(ref: SlotColumn, slots: Sequence[Slot], tables: Sequence[pa.Table]) -> tuple[int, I64] | None:
    """The list that a slot is in, and the event times of its rows; None if some are NULL."""
    number = ref.slot - len(slots)
    column = single(tables[number].column(ref.column)) if number >= 0 else slots[ref.slot].column(ref.column)
    times = microseconds(column)
    return None if times.null_count else (max(0, number + 1), times.to_numpy())


def _columns(partial: Partial) -> Callable[[ColumnRef], pa.Array]:
    return lambda ref: partial.column(SlotColumn(int(ref.alias), ref.column))


def _sets(partial: Partial, members: int, width: int) -> U64:
    """The sets of tuples, to be changed."""
    if partial.sets is not None:
        return partial.sets.copy()
    return np.broadcast_to(as_words(members, width), (len(partial.hashes), width)).copy()


def _alive(partial: Partial, sets: U64) -> Partial:
    """The tuples with these sets that are not empty."""
    partial = Partial(partial.hashes, partial.slots, sets)
    alive = sets.any(axis=1)
    return partial if alive.all() else partial.picked(np.flatnonzero(alive))


def _difference(partial: Partial, span: Span) -> tuple[I64, Flags]:
    """left − right in microseconds, at the ends of 64 bits where it lies beyond; and where both are known."""
    left, right = (microseconds(partial.column(side)) for side in (span.left, span.right))
    known: Flags = left.is_valid().to_numpy(zero_copy_only=False) & right.is_valid().to_numpy(zero_copy_only=False)
    a, b = left.fill_null(0).to_numpy(), right.fill_null(0).to_numpy()
    with np.errstate(over="ignore"):
        found: I64 = a - b
    beyond = ((a ^ b) & (a ^ found)) < 0
    if beyond.any():
        found = np.where(beyond, np.where(a < 0, _LEAST, _MOST), found)
    return found, known


def _between(difference: I64, lower: int | None, upper: int | None) -> Flags:
    inside = np.ones(len(difference), np.bool_)
    if lower is not None:
        inside &= difference >= lower
    if upper is not None:
        inside &= difference <= upper
    return inside


def _pieces(span: Span, width: int) -> tuple[I64, U64]:
    """Where the line of differences is cut, and per piece the members in whose window it lies, or who have none."""
    # Each cut is the first difference of a new piece of the line.
    cuts = sorted(
        {low for low, _, _ in span.bounds if low is not None} | {h + 1 for _, h, _ in span.bounds if h is not None}
    )
    firsts = [_LEAST, *cuts]
    windowed = [
        sum(m for low, high, m in span.bounds if (low is None or low <= first) and (high is None or first <= high))
        for first in firsts
    ]
    table = np.stack([as_words(members, width) for members in windowed])
    return np.array(cuts, np.int64), table | ~_windowed(span, width)


def _windowed(span: Span, width: int) -> U64:
    """The members that have a window."""
    everyone = 0
    for _, _, members in span.bounds:
        everyone |= members
    return as_words(everyone, width)


def _inside(span: Span, difference: I64, known: Flags, width: int) -> U64:
    """Per tuple the members in whose window it lies, and those that have no such window."""
    cuts, table = _pieces(span, width)
    found: U64 = table[np.searchsorted(cuts, difference, side="right")]
    found[~known] = ~_windowed(span, width)
    return found
