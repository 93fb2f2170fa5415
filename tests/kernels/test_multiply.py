"""Multiplying out with sets and windows is compared with a plain loop over all combinations of rows."""

from __future__ import annotations

from itertools import product
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.kernels.multiply import Product, Ruler
from plait.kernels.probe import product_ends

EDGE = 2**63 - 1


def words(value: int, width: int) -> list[int]:
    return [value >> 64 * w & (1 << 64) - 1 for w in range(width)]


def as_sets(values: list[int], width: int) -> Any:
    return np.array([words(v, width) for v in values], np.uint64).reshape(-1, width)


@given(st.randoms(use_true_random=False), st.integers(1, 3), st.integers(0, 2), st.integers(1, 3))
def test_oracle_tuples_of_somebody_are_those_of_a_plain_loop(random: Random, width: int, spans: int, k: int) -> None:
    keys = random.randrange(1, 4)
    counts = [[random.randrange(4) for _ in range(keys)] for _ in range(k)]
    if random.random() < 0.2:
        # More than are measured together.
        counts[-1][0] = 300
    starts = [[random.randrange(3) for _ in range(keys)] for _ in range(k)]
    size = 6 if max(counts[-1]) < 9 else 303
    everyone = (1 << 64 * width) - 1

    def some_set() -> int:
        # Bits at both ends of words, and few of them, so that intersections are empty often.
        return sum(1 << bit for bit in random.sample([0, 1, 63, 64 * width - 1, 64 * width - 2], random.randrange(4)))

    members = [some_set() | random.choice([0, everyone]) for _ in range(keys)]
    sets = [[some_set() for _ in range(size)] if random.random() < 0.6 else None for _ in range(k)]
    rulers, plain = [], []
    for _ in range(spans):
        left, right = random.randrange(k), random.randrange(k)
        near = random.random() < 0.7
        times = [
            [random.choice([-3, 0, 1, 2, 5, *([] if near else [EDGE, -EDGE])]) for _ in range(size)] for _ in range(2)
        ]
        cuts = sorted(random.sample(range(-9, 12), random.choice([0, 1, 3, 8, 9, 12])))
        table = [random.choice([0, everyone, some_set()]) for _ in range(len(cuts) + 1)]
        plain.append((left, right, times, cuts, table))
        arrays = [np.array(side, np.int64) for side in times]
        rulers.append(
            Ruler(left, arrays[0], right, arrays[1], np.array(cuts, np.int64), as_sets(table, width)),
        )
    wanted = []
    """Of all output rows in order: key, picks, set, whether it had one before windows."""
    for key in range(keys):
        for picks in product(*(range(starts[j][key], starts[j][key] + counts[j][key]) for j in range(k))):
            mine = members[key]
            for j, own in enumerate(sets):
                mine &= everyone if own is None else own[picks[j]]
            had = mine != 0
            for left, right, times, cuts, table in plain:
                gap = times[0][picks[left]] - times[1][picks[right]]
                mine &= table[sum(gap >= cut for cut in cuts)]
            wanted.append((key, list(picks), mine, had))
    ends = product_ends(np.array(counts))
    made = Product(
        np.array(starts),
        np.array(counts),
        ends,
        np.arange(keys, dtype=np.uint64) + np.uint64(5),
        as_sets(members, width),
        [None if own is None else as_sets(own, width) for own in sets],
        rulers,
    )
    assert made.total == len(wanted)
    begin = random.randrange(len(wanted) + 1)
    stop = random.randrange(begin, len(wanted) + 1)
    for part in ((0, len(wanted)), (begin, stop)):
        labels, picked, found, had = made.expand(*part)
        expected = [w for w in wanted[slice(*part)] if w[2]]
        assert labels.tolist() == [5 + w[0] for w in expected]
        assert picked.T.tolist() == [w[1] for w in expected]
        assert found.tolist() == [words(w[2], width) for w in expected]
        assert had == sum(w[3] for w in wanted[slice(*part)])


def test_rows_that_are_not_there_are_refused() -> None:
    one = np.ones((1, 1), np.int64)
    made = Product(one, one, np.array([1]), one[0].view(np.uint64), one.view(np.uint64), [None])
    with pytest.raises(IndexError, match="output rows 0 to 2"):
        made.expand(0, 2)
