"""Searching rows that are in no helpful order: which of them have one of some hashes.

Contract.  `rows_with` takes hashes in any order and probes in ascending order, duplicates allowed, and gives the places
of the hashes that are among the probes, ascending.

Cost.  O(hashes + probes): the first bits of a hash say where in the probes it would be; 3 to 5 ns per hash while the
probes are in cache, 20 ns for a million probes.
"""

from __future__ import annotations

import numpy as np

from plait.kernels import I64, U64, frozen, jit

_MOST_BITS = 22


def rows_with(hashes: U64, probes: U64) -> I64:
    """The places of the hashes that are among the sorted probes.

    >>> rows_with(np.array([7, 1, 9, 7], np.uint64), np.array([1, 7], np.uint64)).tolist()
    [0, 1, 3]
    """
    if not len(probes) or not len(hashes):
        return np.empty(0, np.int64)
    bits = min(_MOST_BITS, max(1, len(probes).bit_length()))
    shift = np.uint64(64 - bits)
    firsts = np.arange(1 << bits, dtype=np.uint64) << shift
    starts = np.append(np.searchsorted(probes, firsts), len(probes)).astype(np.int64)
    return _rows_with(frozen(hashes, np.uint64), frozen(probes, np.uint64), frozen(starts, np.int64), shift)


@jit
def _rows_with(hashes: U64, probes: U64, starts: I64, shift: np.uint64) -> I64:
    found = np.empty(len(hashes), np.int64)
    count = 0
    for i in range(len(hashes)):
        value = hashes[i]
        place = np.int64(value >> shift)
        j, end = starts[place], starts[place + 1]
        while j < end and probes[j] < value:
            j += 1
        if j < end and probes[j] == value:
            found[count] = i
            count += 1
    return found[:count].copy()
