"""Multiplying lists out where tuples have sets of members or lie in windows: what nobody takes is never written.

Contract.  As `probe.expand`: a driving row r has k lists, and its output rows are the product of its counts, the last
list varying fastest.  An output row's set is `members[r]`, less what the sets of its rows do not have, less the members
in whose windows it does not lie.  Only output rows with a set that is not empty are written.

Cost.  What the lists before the last say is found once for a whole pass over the last list, which is read forwards.
Up to eight cuts of one window with one word of members are compared in vector instructions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from plait.kernels import I64, U64, frozen, jit

_FEW_CUTS = 8
"""Up to so many cuts, comparing with each is faster than a binary search."""
_BLOCK = 128
"""Output rows that are measured together."""
_NEAR = 1 << 61
"""Differences of times below this fit into 64 bits."""


@dataclass(frozen=True)
class Ruler:
    """`left − right` of two lists' times, in pieces: piece p lies from `cuts[p - 1]` to before `cuts[p]`."""

    left: int
    """The list of the left time,"""
    left_times: I64
    """and the times of its rows."""
    right: int
    right_times: I64
    cuts: I64
    """Ascending."""
    table: U64
    """[pieces, w]: the members in whose window a difference in each piece lies."""


class Product:
    """Lists, ready to be multiplied out piece by piece.

    `labels[n]` are written instead of the driving rows' numbers.  `members[n, w]` has the set of each driving row, and
    `sets[j]` those of list j's rows; None where all members see all of them.

    >>> label, everyone = np.array([7], np.uint64), np.array([[3]], np.uint64)
    >>> own = np.array([[1], [2], [4]], np.uint64)
    >>> product = Product(np.array([[0], [0]]), np.array([[1], [3]]), np.array([3]), label, everyone, [None, own])
    >>> labels, picks, sets, _ = product.expand(0, 3)
    >>> labels.tolist(), picks.tolist(), sets.ravel().tolist()
    ([7, 7], [[0, 0], [0, 1]], [1, 2])
    """

    def __init__(
        self,
        starts: I64,
        counts: I64,
        ends: I64,
        labels: U64,
        members: U64,
        sets: Sequence[U64 | None],
        rulers: Sequence[Ruler] = (),
    ) -> None:
        width = members.shape[1]
        own, own_at = _joined([s for s in sets if s is not None], (0, width), np.uint64)
        places = iter(own_at)
        times, times_at = _joined([t for r in rulers for t in (r.left_times, r.right_times)], (0,), np.int64)
        cuts, cuts_at = _joined([r.cuts for r in rulers], (0,), np.int64)
        table, _ = _joined([r.table for r in rulers], (0, width), np.uint64)
        spans = [
            (r.left, times_at[2 * i], r.right, times_at[2 * i + 1], cuts_at[i], cuts_at[i] + len(r.cuts))
            for i, r in enumerate(rulers)
        ]
        near = not len(times) or (int(times.min()) > -_NEAR and int(times.max()) < _NEAR)
        self.total = int(ends[-1]) if len(ends) else 0
        """Output rows, whether they have a set or not."""
        self._lists = tuple(frozen(part, np.int64) for part in (starts, counts, ends))
        self._sets = (
            frozen(members, np.uint64),
            own,
            frozen([-1 if s is None else next(places) for s in sets], np.int64),
        )
        self._rulers = (times, frozen(np.array(spans, np.int64).reshape(len(rulers), 6), np.int64), cuts, table, near)
        self._labels = frozen(labels, np.uint64)

    def expand(self, begin: int, stop: int) -> tuple[U64, I64, U64, int]:
        """Of output rows begin … stop − 1 those with a set: (labels[m], picks[k, m], sets[m, w], how many had).

        A label is that of the driving row.  The last is how many had a set before rulers were applied.
        """
        if not 0 <= begin <= stop <= self.total:
            raise IndexError(f"output rows {begin} to {stop} are not within the {self.total} there are")
        run: Any = _expand_within
        labels, picks, sets, had = run(*self._lists, begin, stop, *self._sets, *self._rulers, self._labels)
        return labels, picks, sets, int(had)


def _joined(parts: Sequence[Any], empty: tuple[int, ...], kind: type[np.generic]) -> tuple[Any, list[int]]:
    """Arrays one after the other, and where each begins; one alone is not copied."""
    at = [0, *accumulate(len(part) for part in parts)]
    return frozen(parts[0] if len(parts) == 1 else np.concatenate([np.empty(empty, kind), *parts]), kind), at


@jit
def _piece(cuts: I64, begin: int, end: int, a: int, b: int) -> int:
    """The piece of a − b, as a number of cuts that are not above it."""
    difference = a - b
    if ((a ^ b) & (a ^ difference)) < 0:
        # Beyond 64 bits.
        difference = np.iinfo(np.int64).min if a < 0 else np.iinfo(np.int64).max
    if end - begin <= _FEW_CUTS:
        piece = 0
        for c in range(begin, end):
            piece += difference >= cuts[c]
        return piece
    low, high = begin, end
    while low < high:
        middle = (low + high) // 2
        if difference >= cuts[middle]:
            low = middle + 1
        else:
            high = middle
    return low - begin


@jit
def _measure(
    times: I64, left: int, left_moves: int, right: int, right_moves: int, cuts: I64, n: int, gaps: I64, pieces: I64
) -> None:
    """The pieces of n neighbouring output rows: loops that the compiler turns into vector instructions."""
    if right_moves:
        a, moving = times[left], times[right : right + n]
        for t in range(n):
            gaps[t] = a - moving[t]
    else:
        b, moving = times[right], times[left : left + n]
        for t in range(n):
            gaps[t] = moving[t] - b
    for t in range(n):
        pieces[t] = 0
    for c in range(len(cuts)):
        cut = cuts[c]
        for t in range(n):
            pieces[t] += gaps[t] >= cut


@jit
def _expand_within(
    starts: I64,
    counts: I64,
    ends: I64,
    begin: int,
    stop: int,
    members: U64,
    sets: U64,
    sets_at: I64,
    times: I64,
    spans: I64,
    cuts: I64,
    table: U64,
    near: bool,
    labels: U64,
) -> tuple[U64, I64, U64, int]:
    k, width, count = starts.shape[0], members.shape[1], spans.shape[0]
    m, last = stop - begin, k - 1
    rows = np.empty(m, np.uint64)
    picks = np.empty((k, m), np.int64)
    out = np.empty((m, width), np.uint64)
    nobody = np.uint64(0)
    position = np.zeros(k, np.int64)
    prefix = np.empty(width, np.uint64)
    # Per ruler and side: where its time lies, and whether it moves with the last list.
    at = np.zeros((count, 2), np.int64)
    moves = np.zeros((count, 2), np.int64)
    for s in range(count):
        for side in range(2):
            moves[s, side] = spans[s, 2 * side] == last
    own = sets_at[last]
    flat = sets.reshape(-1)
    gaps = np.empty(_BLOCK, np.int64)
    pieces = np.empty(_BLOCK, np.int64)
    # A ruler whose time is not of the last list, or of it twice, is rare.
    narrow = near and width == 1 and count == 1 and moves.sum() == 1 and len(cuts) <= _FEW_CUTS
    o, had, number = 0, 0, begin
    r = np.searchsorted(ends, begin, side="right")
    skipped = begin - (ends[r - 1] if r > 0 else 0)
    while number < stop:
        until = min(ends[r], stop)
        for j in range(last, -1, -1):
            if skipped == 0:
                position[j] = 0
            else:
                position[j] = skipped % counts[j, r]
                skipped //= counts[j, r]
        while number < until:
            length = min(counts[last, r] - position[last], until - number)
            first = starts[last, r] + position[last]
            some = nobody
            for w in range(width):
                mine = members[r, w]
                for j in range(last):
                    if sets_at[j] >= 0:
                        mine &= sets[sets_at[j] + starts[j, r] + position[j], w]
                prefix[w] = mine
                some |= mine
            if some != nobody:
                before, label = o, labels[r]
                for s in range(count):
                    for side in range(2):
                        j = spans[s, 2 * side]
                        at[s, side] = spans[s, 2 * side + 1] + starts[j, r] + position[j]
                if narrow:
                    for block in range(0, length, _BLOCK):
                        n = min(_BLOCK, length - block)
                        left, right = at[0, 0] + moves[0, 0] * block, at[0, 1] + moves[0, 1] * block
                        _measure(times, left, moves[0, 0], right, moves[0, 1], cuts, n, gaps, pieces)
                        begins = first + block
                        if own >= 0:
                            seen = flat[own + begins : own + begins + n]
                            for t in range(n):
                                mine = prefix[0] & seen[t]
                                had += mine != nobody
                                mine &= table[pieces[t], 0]
                                # Written in any case, and overwritten by the next where nobody takes it.
                                picks[last, o] = begins + t
                                out[o, 0] = mine
                                o += mine != nobody
                        else:
                            had += n
                            for t in range(n):
                                mine = prefix[0] & table[pieces[t], 0]
                                picks[last, o] = begins + t
                                out[o, 0] = mine
                                o += mine != nobody
                else:
                    for t in range(length):
                        some = nobody
                        for w in range(width):
                            mine = prefix[w]
                            if own >= 0:
                                mine &= sets[own + first + t, w]
                            out[o, w] = mine
                            some |= mine
                        if some == nobody:
                            continue
                        had += 1
                        for s in range(count):
                            a, b = times[at[s, 0] + moves[s, 0] * t], times[at[s, 1] + moves[s, 1] * t]
                            # A ruler has one piece more than cuts.
                            piece = spans[s, 4] + s + _piece(cuts, spans[s, 4], spans[s, 5], a, b)
                            some = nobody
                            for w in range(width):
                                out[o, w] &= table[piece, w]
                                some |= out[o, w]
                            if some == nobody:
                                break
                        picks[last, o] = first + t
                        o += some != nobody
                for x in range(before, o):
                    rows[x] = label
                for j in range(last):
                    same = starts[j, r] + position[j]
                    for x in range(before, o):
                        picks[j, x] = same
            number += length
            position[last] = 0
            for j in range(last - 1, -1, -1):
                position[j] += 1
                if position[j] < counts[j, r]:
                    break
                position[j] = 0
        skipped = 0
        r += 1
    return rows[:o], picks[:, :o], out[:o], had
