"""Bloom filters over sorted hashes, built and asked in one forward pass.

Contract.  A filter never denies a hash that it was built from; of others it lets about 1 in 100 pass (`BITS` per key).
A filter is an array of 512-bit blocks, one cache line each.  Which block a hash belongs to grows with the hash, so
sorted hashes walk through the filter forwards; which eight bits of it follow from a multiplied copy.

Cost.  `BITS` / 8 bytes per distinct hash.  One cache line and at most eight bits per question.
"""

from __future__ import annotations

import numpy as np

from plait.kernels import I64, U64, frozen, jit

BITS = 12
"""Bits per distinct hash."""

_WORDS = 8
_SPREAD = np.uint64(0x9E3779B97F4A7C15)


def build_filter(hashes: U64) -> U64:
    """A filter for these sorted hashes: for the range between the first and the last of them.

    >>> len(build_filter(np.array([3, 3, 9], np.uint64)))
    8
    """
    assert len(hashes) > 0, "a filter of nothing is never built"
    return _build(frozen(hashes, np.uint64))


def ask_filter(words: U64, low: int, high: int, probes: U64) -> I64:
    """Which of the sorted probes may be among the hashes that lay between `low` and `high`: their indices.

    >>> hashes = np.array([3, 9], np.uint64)
    >>> ask_filter(build_filter(hashes), 3, 9, np.array([2, 3, 9, 10], np.uint64)).tolist()
    [1, 2]
    """
    return _ask(frozen(words, np.uint64), np.uint64(low), np.uint64(high), frozen(probes, np.uint64))


@jit
def _block(value: np.uint64, low: np.uint64, scale: float, blocks: int) -> int:
    """Monotone in `value`; the same arithmetic when building and asking, so rounding does no harm."""
    return min(int((value - low) * scale), blocks - 1)


@jit
def _scale(low: np.uint64, high: np.uint64, blocks: int) -> float:
    return blocks / (float(high - low) + 1.0)


@jit
def _build(hashes: U64) -> U64:
    n = len(hashes)
    distinct = 1
    for i in range(1, n):
        distinct += hashes[i] != hashes[i - 1]
    blocks = max(1, (distinct * BITS + 511) // 512)
    words = np.zeros(blocks * _WORDS, np.uint64)
    low = hashes[0]
    scale = _scale(low, hashes[n - 1], blocks)
    for i in range(n):
        if i > 0 and hashes[i] == hashes[i - 1]:
            continue
        at = _block(hashes[i], low, scale, blocks) * _WORDS
        bits = hashes[i] * _SPREAD
        for w in range(_WORDS):
            words[at + w] |= np.uint64(1) << ((bits >> np.uint64(4 + 6 * w)) & np.uint64(63))
    return words


@jit
def _ask(words: U64, low: np.uint64, high: np.uint64, probes: U64) -> I64:
    blocks = len(words) // _WORDS
    scale = _scale(low, high, blocks)
    out = np.empty(len(probes), np.int64)
    found = 0
    for i in range(len(probes)):
        if probes[i] < low or probes[i] > high:
            continue
        at = _block(probes[i], low, scale, blocks) * _WORDS
        bits = probes[i] * _SPREAD
        passes = True
        for w in range(_WORDS):
            if not (words[at + w] >> ((bits >> np.uint64(4 + 6 * w)) & np.uint64(63))) & np.uint64(1):
                passes = False
                break
        if passes:
            out[found] = i
            found += 1
    return out[:found]
