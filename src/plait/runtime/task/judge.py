"""Judging whole tuples: conditions and windows take members out of a tuple's set, or drop it for all.

Windows of several lengths over the same two event times are one search: the lengths cut the line of differences into
pieces, and each piece has a set of members.  So a hundred windows cost a tuple what one does.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa

from plait.kernels import I64, U64, Flags
from plait.kernels.sets import in_pieces
from plait.query.expr import ColumnRef
from plait.query.plan import SlotColumn, Span, Step
from plait.runtime.task.frames import Partial
from plait.state.segments.evaluate import holds
from plait.state.segments.segment import microseconds
from plait.state.segments.sieve import as_words

_LEAST, _MOST = np.iinfo(np.int64).min, np.iinfo(np.int64).max


def judged(step: Step, members: int, partial: Partial, width: int) -> Partial:
    """The tuples that belong to somebody once a step's checks and spans are applied, with their sets."""
    for check in step.checks:
        keep = holds(check.condition, _columns(partial)).to_numpy(zero_copy_only=False)
        if check.members is None:
            partial = partial if keep.all() else partial.picked(np.flatnonzero(keep))
        elif not keep.all():
            cleared = _sets(partial, members, width)
            cleared[~keep] &= ~as_words(check.members, width)
            partial = _alive(partial, cleared)
    for span in step.spans:
        is_for_all = len(span.bounds) == 1 and span.bounds[0][2] == members
        if not is_for_all and (times := _without_holes(partial, span)):
            sets = as_words(members, width)[None] if partial.sets is None else partial.sets
            sets, alive = in_pieces(sets, *times, *_pieces(span, width))
            partial = Partial(partial.hashes, partial.slots, sets)
            partial = partial if alive.all() else partial.picked(np.flatnonzero(alive))
            continue
        difference, known = _difference(partial, span)
        if is_for_all:
            lower, upper, _ = span.bounds[0]
            keep = known & _between(difference, lower, upper)
            partial = partial if keep.all() else partial.picked(np.flatnonzero(keep))
        else:
            partial = _alive(partial, _sets(partial, members, width) & _inside(span, difference, known, width))
    return partial


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


def _without_holes(partial: Partial, span: Span) -> tuple[I64, I64] | None:
    """The event times of both sides; None if one is not known."""
    left, right = (microseconds(partial.column(side)) for side in (span.left, span.right))
    return None if left.null_count or right.null_count else (left.to_numpy(), right.to_numpy())


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
