"""Sets of queries that joined tuples belong to (paper 004's query sets): bit loops over words of 64.

Contract.  The sets of n tuples are an array [n, w] of 64-bit words; member m is bit m % 64 of word m // 64.

Cost.  `translated` reads eight table entries of w words for each word of filter bits, whatever the number of filters
and members; the others touch every word once.
"""

from __future__ import annotations

import numpy as np

from plait.kernels import I64, U8, U64, Flags, frozen, jit


def union_of(sets: U64, starts: I64, counts: I64) -> U64:
    """[g, w]: of each group of neighbouring tuples, `counts[g]` from `starts[g]` on, the members of any.

    >>> union_of(np.array([[1], [2], [4]], np.uint64), np.array([0, 2]), np.array([2, 1])).ravel().tolist()
    [3, 4]
    """
    return _union_of(frozen(sets, np.uint64), frozen(starts, np.int64), frozen(counts, np.int64))


def translated(words: I64, table: U64) -> U64:
    """[n, w]: the union of what `table[byte, value]` says for each byte of the tuples' filter bits, `words[n, f]`.

    >>> table = np.zeros((8, 256, 1), np.uint64); table[0, 3] = 9
    >>> translated(np.array([[3], [1]]), table).ravel().tolist()
    [9, 0]
    """
    flat = np.ascontiguousarray(words, np.int64).view(np.uint8).reshape(len(words), 8 * words.shape[1])
    return _translated(frozen(flat, np.uint8), frozen(table, np.uint64))


def members_in(sets: U64) -> I64:
    """[64 w]: how many tuples each member has.

    >>> members_in(np.array([[3], [2]], np.uint64))[:3].tolist()
    [1, 2, 0]
    """
    return _members_in(frozen(sets, np.uint64))


def weights_in(sets: U64, weights: I64) -> I64:
    """[64 w]: by member the sum of its tuples' weights.

    >>> weights_in(np.array([[3], [2]], np.uint64), np.array([10, 5]))[:3].tolist()
    [10, 15, 0]
    """
    return _weights_in(frozen(sets, np.uint64), frozen(weights, np.int64))


def within(sets: U64, members: U64) -> Flags:
    """Which tuples have one of these members at least.

    >>> within(np.array([[3], [4]], np.uint64), np.array([5], np.uint64)).tolist()
    [True, True]
    """
    return _within(frozen(sets, np.uint64), frozen(members, np.uint64))


def moved_bits(words: I64, places: I64, size: int, at: I64, until: I64) -> I64:
    """[f', n]: bit j of tuple i is its bit `places[j]` in `words[f, n]`, if `at[i] > until[j]`; `size` bits per word.

    >>> moved_bits(np.array([[5, 6]]), np.array([2, 0]), 62, np.array([9, 9]), np.array([0, 0])).tolist()
    [[3, 1]]
    """
    found = _moved_bits(
        frozen(words, np.int64), frozen(places, np.int64), size, frozen(at, np.int64), frozen(until, np.int64)
    )
    return found


def latest_of_bits(words: I64, count: int, size: int, at: I64) -> I64:
    """[count]: the greatest `at` of the tuples that have each bit in `words[f, n]`; the least integer if none has.

    >>> latest_of_bits(np.array([[1, 3]]), 2, 62, np.array([8, 7])).tolist()
    [8, 7]
    """
    return _latest_of_bits(frozen(words, np.int64), count, size, frozen(at, np.int64))


@jit
def _moved_bits(words: I64, places: I64, size: int, at: I64, until: I64) -> I64:
    n = words.shape[1]
    out = np.zeros((-(-len(places) // size), n), np.int64)
    for j in range(len(places)):
        word, bit = places[j] // size, places[j] % size
        into, as_bit, limit = j // size, j % size, until[j]
        for i in range(n):
            out[into, i] |= (words[word, i] >> bit & np.int64(at[i] > limit)) << as_bit
    return out


@jit
def _latest_of_bits(words: I64, count: int, size: int, at: I64) -> I64:
    least = np.iinfo(np.int64).min
    out = np.full(count, least, np.int64)
    for j in range(count):
        word, bit = j // size, j % size
        found = least
        for i in range(words.shape[1]):
            found = max(found, at[i] if words[word, i] >> bit & 1 else least)
        out[j] = found
    return out


@jit
def _union_of(sets: U64, starts: I64, counts: I64) -> U64:
    out = np.zeros((len(starts), sets.shape[1]), np.uint64)
    for g in range(len(starts)):
        for i in range(starts[g], starts[g] + counts[g]):
            for w in range(sets.shape[1]):
                out[g, w] |= sets[i, w]
    return out


@jit
def _translated(flat: U8, table: U64) -> U64:
    n, bytes_ = flat.shape
    width = table.shape[2]
    out = np.zeros((n, width), np.uint64)
    for i in range(n):
        for b in range(bytes_):
            value = flat[i, b]
            if value:
                for w in range(width):
                    out[i, w] |= table[b, value, w]
    return out


@jit
def _members_in(sets: U64) -> I64:
    # How often each byte has each value; then, per value, its bits.
    values = np.zeros((8 * sets.shape[1], 256), np.int64)
    for i in range(sets.shape[0]):
        for w in range(sets.shape[1]):
            word = sets[i, w]
            for byte in range(8):
                values[8 * w + byte, word >> np.uint64(8 * byte) & np.uint64(255)] += 1
    return _by_bit(values)


@jit
def _weights_in(sets: U64, weights: I64) -> I64:
    values = np.zeros((8 * sets.shape[1], 256), np.int64)
    for i in range(sets.shape[0]):
        for w in range(sets.shape[1]):
            word = sets[i, w]
            for byte in range(8):
                values[8 * w + byte, word >> np.uint64(8 * byte) & np.uint64(255)] += weights[i]
    return _by_bit(values)


@jit
def _by_bit(values: I64) -> I64:
    """[8 b]: from what each value of each of b bytes adds up to, what each bit does."""
    out = np.zeros(8 * values.shape[0], np.int64)
    for byte in range(values.shape[0]):
        for value in range(1, 256):
            found = values[byte, value]
            if found:
                for bit in range(8):
                    if value >> bit & 1:
                        out[8 * byte + bit] += found
    return out


@jit
def _within(sets: U64, members: U64) -> Flags:
    out = np.zeros(sets.shape[0], np.bool_)
    for i in range(sets.shape[0]):
        for w in range(sets.shape[1]):
            if sets[i, w] & members[w]:
                out[i] = True
                break
    return out
