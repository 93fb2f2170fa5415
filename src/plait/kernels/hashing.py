"""Hashes of keys, and who owns them.

Contract.  A key becomes 64 bits.  One fixed-width word goes through `mix64`, a bijection, so equal hashes *are*
equal keys; byte strings and composites go through `hash_bytes` and `combine`, where equal hashes must be compared.
The top ten bits are the key group (`plait.config.KEY_GROUPS`); task t owns the groups [bounds[t], bounds[t+1]).  Rows
sorted by hash are thus sorted by key group: a task's share is a slice, and other bounds move no state.

These functions are part of the checkpoint format: changing one strands all segments written before.

Cost.  About 1 ns per word; a byte string about 6 ns per eight bytes (measured: 20 ns for 12 bytes, 50 for 64).

>>> even_bounds(3)
(0, 341, 682, 1024)
>>> owner(np.array([0, 2**63, 2**64 - 1], np.uint64), even_bounds(2)).tolist()
[0, 1, 1]
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from plait.kernels import I64, U8, U64, frozen, jit

GROUPS = 1024
_SHIFT = np.uint64(54)

_S30, _S27, _S31 = np.uint64(30), np.uint64(27), np.uint64(31)
_MIX1, _MIX2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_WORD1, _WORD2 = np.uint64(0x87C37B91114253D5), np.uint64(0x4CF5AD432745937F)
_S33, _S37, _S23, _S41 = np.uint64(33), np.uint64(37), np.uint64(23), np.uint64(41)
_FIVE, _ADD = np.uint64(5), np.uint64(0x52DCE729)


def mix64(values: U64) -> U64:
    """splitmix64's finaliser of every value: a bijection on 64 bits whose top bits depend on all input bits."""
    return _mix_all(frozen(values, np.uint64))


def hash_bytes(offsets: I64, data: U8) -> U64:
    """A hash of every slice data[offsets[i]:offsets[i+1]]; `offsets` has one entry more than there are slices."""
    return _hash_all(frozen(offsets, np.int64), frozen(data, np.uint8))


def combine(left: U64, right: U64) -> U64:
    """One hash of two, where order matters: fold the columns of a composite key with it."""
    return _combine_all(frozen(left, np.uint64), frozen(right, np.uint64))


def key_group(hashes: U64) -> I64:
    """The key group of every hash: its top ten bits."""
    return (np.asarray(hashes, np.uint64) >> _SHIFT).astype(np.int64)


def even_bounds(tasks: int) -> tuple[int, ...]:
    """tasks + 1 key groups, as far apart as each other."""
    return tuple(task * GROUPS // tasks for task in range(tasks + 1))


def group_starts_in(hashes: U64, bounds: tuple[int, int]) -> I64:
    """Where key groups, from bounds[0] up to but without bounds[1], begin in sorted hashes; and where the last ends."""
    first, last = bounds
    starts = np.arange(first, last, dtype=np.uint64) << _SHIFT
    ends = [len(hashes)] if last == GROUPS else [int(np.searchsorted(hashes, np.uint64(last) << _SHIFT))]
    return np.append(np.searchsorted(hashes, starts), ends)


@lru_cache(maxsize=64)
def _owners(bounds: tuple[int, ...]) -> I64:
    return np.repeat(np.arange(len(bounds) - 1, dtype=np.int64), np.diff(bounds))


def owner(hashes: U64, bounds: tuple[int, ...]) -> I64:
    """The task that owns every hash."""
    owners: I64 = _owners(bounds)[key_group(hashes)]
    return owners


@jit
def _mix(z: np.uint64) -> np.uint64:
    z = (z ^ (z >> _S30)) * _MIX1
    z = (z ^ (z >> _S27)) * _MIX2
    return z ^ (z >> _S31)


@jit
def _mix_all(values: U64) -> U64:
    out = np.empty(len(values), np.uint64)
    for i in range(len(values)):
        out[i] = _mix(values[i])
    return out


@jit
def _absorb(h: np.uint64, word: np.uint64) -> np.uint64:
    # One block of MurmurHash3 x64: for a fixed h a bijection of the word.
    word = word * _WORD1
    word = (word << _S31) | (word >> _S33)
    h = h ^ (word * _WORD2)
    h = (h << _S27) | (h >> _S37)
    return h * _FIVE + _ADD


@jit
def _hash_all(offsets: I64, data: U8) -> U64:
    n = max(len(offsets) - 1, 0)
    out = np.empty(n, np.uint64)
    for i in range(n):
        at, end = offsets[i], offsets[i + 1]
        # The length goes in first, so that trailing zero bytes matter.
        h = np.uint64(end - at) * _GOLDEN
        while at + 8 <= end:
            word = np.uint64(0)
            for b in range(8):
                word |= np.uint64(data[at + b]) << np.uint64(8 * b)
            h = _absorb(h, word)
            at += 8
        if at < end:
            word = np.uint64(0)
            for b in range(end - at):
                word |= np.uint64(data[at + b]) << np.uint64(8 * b)
            h = _absorb(h, word)
        out[i] = _mix(h)
    return out


@jit
def _combine_all(left: U64, right: U64) -> U64:
    out = np.empty(len(left), np.uint64)
    for i in range(len(left)):
        turned = (left[i] << _S23) | (left[i] >> _S41)
        out[i] = _mix(turned * _GOLDEN + right[i])
    return out
