"""Success rates that were never measured, from the sampled keys of an input (`query/observed.py`, `Sample`).

The sample says, for every set of stores, how many of an input's smallest keys are in exactly those.  Summed over
supersets this is how many survive a set of probes: for one pair what paper 000 calls γ, for several the correlation
that a product of γ's would miss.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from plait.query.observed import Sample


def pair(sample: Sample, store: tuple[str, tuple[int, ...]]) -> tuple[float, float] | None:
    """(γ, μ) of looking the input's keys up in one store; None if the sample cannot tell."""
    if store not in sample.stores[1:]:
        return None
    place = sample.stores.index(store, 1)
    asked = sum(counts[0] for counts in sample.patterns.values())
    found = sum(counts[0] for pattern, counts in sample.patterns.items() if pattern >> place & 1)
    rows = sum(counts[1 + place] for counts in sample.patterns.values())
    return (found / asked, rows / found if found else 1.0) if asked else None


def fresh_share(sample: Sample) -> float:
    """Which share of the input's keys its own store did not have before."""
    asked = sum(counts[0] for counts in sample.patterns.values())
    known = sum(counts[0] for pattern, counts in sample.patterns.items() if pattern & 1)
    return 1 - known / asked if asked else 1.0


def correlation(sample: Sample, stores: Sequence[tuple[str, tuple[int, ...]] | None]) -> list[float]:
    """For every set of stores (bit i is `stores[i]`): the share of keys in all of them over the product of shares.

    1 everywhere is independence.  A store that is None, or not sampled, is taken as independent of the others.
    """
    places = [sample.stores.index(s, 1) if s is not None and s in sample.stores[1:] else None for s in stores]
    sizes = np.zeros(1 << len(stores))
    for pattern, counts in sample.patterns.items():
        there = sum(1 << i for i, place in enumerate(places) if place is None or pattern >> place & 1)
        sizes[there] += counts[0]
    total = sizes.sum()
    if not total:
        return [1.0] * len(sizes)
    # Sums over supersets: afterwards sizes[S] counts the keys that are in all of S.
    for i in range(len(stores)):
        halves = sizes.reshape(-1, 2, 1 << i)
        halves[:, 0] += halves[:, 1]
    # Half a key more than was seen, so that what was never seen is rare and not impossible.
    shares = (sizes + 0.5) / (total + 0.5)
    product = np.ones(len(sizes))
    for i in range(len(stores)):
        halves = product.reshape(-1, 2, 1 << i)
        halves[:, 1] *= shares[1 << i]
    return [float(value) for value in shares / product]
