"""The six datasets of paper 003, section 4.1: three streams, when their tuples arrive and which of them match.

The paper gives selectivities (its Table 2) and sizes (Table 3).  Both follow exactly from G keys of which every stream
has a fixed number of tuples, while all its other tuples match nothing:

    I–IV    |S1| : |S2| : |S3| = 1 : 1 : 1        1, 5 and 1000 tuples per key, G = |S3| / 1000    5·|S3| results
    V, VI   |S1| : |S2| : |S3| = 1 : 10 : 100     1, 10 and 100 tuples per key, G = |S3| / 1000      |S3| results

(Table 3 prints |S2| = 10⁹ for V and VI; only 10⁵ agrees with σ_S2 = 10.)  All of it is linear in |S3|, so a smaller
|S3| keeps every ratio.  Matching tuples are spread evenly over each stream: selectivities stay, arrival rates vary.

Not in the text of the paper, and so chosen here: the sinusoid has four periods, its rate varies between 0.1 and 1.9 of
the mean; the b-model gives 20 % to the first half of the time (80 % in dataset V), and below that, ten levels deep,
the larger share goes to a half drawn at random, as in the model's definition.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from benchmarks.one_key_join import Keys, table

STREAMS = ("S1", "S2", "S3")
TIME_MS = 10_000_000
"""Length of the whole run: the paper's 10 M time units, here milliseconds of event time."""
BIAS = 0.8
LEVELS = 10
SECOND = 0xB0DE
"""Seed of the b-model's lower levels: the arrival pattern is part of the dataset."""

F64 = npt.NDArray[np.float64]
Pattern = Callable[[F64], F64]
"""Maps the share of a stream's tuples that have arrived to the time, both in [0, 1]."""


def uniform(share: F64) -> F64:
    """Arrival of one tuple per 10 time units."""
    return share


def fast_slow(share: F64) -> F64:
    """Arrival of one tuple per 5 and one per 15 time units by turns, a quarter of the tuples each."""
    return np.interp(share, [0, 0.25, 0.5, 0.75, 1], [0, 0.125, 0.5, 0.625, 1])


def slow_fast(share: F64) -> F64:
    """The inverse of `fast_slow`: first one tuple per 15 time units, then one per 5."""
    return np.interp(share, [0, 0.25, 0.5, 0.75, 1], [0, 0.375, 0.5, 0.875, 1])


def sinusoid(share: F64) -> F64:
    """Arrival at a rate that follows a sine."""
    time = np.linspace(0, 1, 1025)
    # ∫ 1 + 0.9·sin(8πt) dt
    arrived = time + 0.9 * (1 - np.cos(8 * np.pi * time)) / (8 * np.pi)
    return np.interp(share, arrived, time)


def b_model(first: float) -> Pattern:
    """The b-model: `first` of the tuples in the first half of the time, and so on in each half, sides drawn."""

    def pattern(share: F64) -> F64:
        random = np.random.default_rng(SECOND)
        weights = np.array([first, 1 - first])
        for _ in range(LEVELS - 1):
            left = np.where(random.random(len(weights)) < 0.5, BIAS, 1 - BIAS)
            weights = np.column_stack([weights * left, weights * (1 - left)]).ravel()
        arrived = np.concatenate([[0.0], np.cumsum(weights)])
        return np.interp(share, arrived, np.linspace(0, 1, len(arrived)))

    return pattern


@dataclass(frozen=True, slots=True)
class Dataset:
    """Three streams S1, S2 and S3: arrival patterns, sizes as shares of |S3|, and tuples per matching key."""

    name: str
    title: str
    patterns: tuple[Pattern, Pattern, Pattern]
    sizes: tuple[float, float, float]
    per_key: tuple[int, int, int]

    def arrivals(self, rows: int, batches: int) -> list[dict[str, pa.Table]]:
        """The batches, all of the same length in time; `rows` is |S3|."""
        found: list[dict[str, pa.Table]] = [{} for _ in range(batches)]
        for number, stream in enumerate(STREAMS):
            keys, times = self._stream(number, rows)
            cuts = np.searchsorted(times, np.linspace(0, 1, batches + 1))
            cuts[-1] = len(times)
            stamps = (times * TIME_MS).astype(np.int64)
            for batch in range(batches):
                part = slice(cuts[batch], cuts[batch + 1])
                found[batch][stream] = table(keys[part], stamps[part])
        return found

    def _stream(self, number: int, rows: int) -> tuple[Keys, F64]:
        random = np.random.default_rng([rows, number])
        count, groups = round(self.sizes[number] * rows), max(rows // 1000, 1)
        matching = np.repeat(np.arange(groups), self.per_key[number])[:count]
        alone = groups + number * rows + np.arange(count - len(matching))
        keys = np.concatenate([matching, alone]).astype(np.int64)
        times = self.patterns[number](np.sort(random.random(count)))
        return random.permutation(keys), times


_EQUAL = ((1.0, 1.0, 1.0), (1, 5, 1000))
_UNEQUAL = ((0.01, 0.1, 1.0), (1, 10, 100))

DATASETS = (
    Dataset("I", "S3 alternates", (uniform, uniform, fast_slow), *_EQUAL),
    Dataset("II", "S2 and S3 alternate, inverse to each other", (uniform, slow_fast, fast_slow), *_EQUAL),
    Dataset("III", "S2 alternates, S3 is a sinusoid", (uniform, slow_fast, sinusoid), *_EQUAL),
    Dataset("IV", "S3 is a b-model 20/80", (uniform, uniform, b_model(0.2)), *_EQUAL),
    Dataset("V", "S3 is a b-model 80/20, streams of different size", (uniform, uniform, b_model(0.8)), *_UNEQUAL),
    Dataset("VI", "S3 is a b-model 20/80, streams of different size", (uniform, uniform, b_model(0.2)), *_UNEQUAL),
)
