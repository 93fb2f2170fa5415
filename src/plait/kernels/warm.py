"""Loads every compiled kernel by calling it once on next to nothing.  Import it where work is about to begin."""

from __future__ import annotations

import numpy as np

from plait.kernels.filters import ask_filter, build_filter
from plait.kernels.hashing import combine, even_bounds, hash_bytes, mix64, owner
from plait.kernels.multiply import Product, Ruler
from plait.kernels.probe import expand, gather_ranges, product_ends
from plait.kernels.runs import fence, group_starts, lookup, lookup_fenced, merge_order
from plait.kernels.sets import latest_of_bits, moved_bits


def warm_up() -> None:
    """Compiles or loads all kernels."""
    hashes = mix64(np.arange(2, dtype=np.uint64))
    combine(hashes, hashes)
    hash_bytes(np.array([0, 1], np.int64), np.zeros(1, np.uint8))
    owner(hashes, even_bounds(2))
    runs = np.sort(hashes)
    lookup(runs, runs)
    lookup_fenced(runs, fence(runs), runs)
    ask_filter(build_filter(runs), int(runs[0]), int(runs[-1]), runs)
    merge_order([runs, runs])
    group_starts(runs)
    ones = np.ones((2, 1), np.int64)
    expand(ones, ones, product_ends(ones), 0, 1)
    gather_ranges(np.zeros(1, np.int64), np.ones(1, np.int64))
    moved_bits(ones, ones[0], 62, ones[:, 0], ones[0])
    latest_of_bits(ones, 1, 62, ones[:, 0])
    bits = ones.view(np.uint64)
    times = ones[:, 0]
    ruler = Ruler(0, times, 1, times, times[:0], bits[:1])
    Product(ones, ones, ones[0], bits[0], bits[:1], [None, bits], [ruler]).expand(0, 1)


warm_up()
