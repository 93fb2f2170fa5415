"""What one task learns of the data on the way, for the optimiser: coordinated bottom-k samples.

Runs are sorted by hash, so the k smallest hashes of a relation stand at the front of its runs, and those of two
relations joined on one attribute are samples of the same keys.  Task 0 owns the smallest hashes; it looks the front of
every input's new tuples up in all stores on the same attribute, whether the plan probes them or not, and counts the
keys at the front of every store.

Where queries of one structure could run in groups, the rows of the same keys are also sampled with their query sets: a
bounded number of those that arrive, and of those that they meet in the stores.

Cost: k lookups per input, key and store; measured below 2 % of an epoch (docs/benchmarks.md).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from plait.config import KEY_GROUPS
from plait.kernels import I64, U64
from plait.kernels.probe import gather_ranges
from plait.kernels.runs import group_starts
from plait.query.observed import Sample, SetRow, SetSample
from plait.query.plan import Seen
from plait.query.store import SET_BITS
from plait.state.segments.sieve import Sieve
from plait.state.segments.view import View

SET_ROWS = 1024
"""Rows of an input, and of each store that it looks into, whose query sets are sampled in an epoch, at most."""
KEY_ROWS = 128
"""Rows of one key among them; if it has more, each stands for several."""
WHOLE = 2**64 - 1
"""The greatest hash."""
KEYS = 512
"""k: a success rate estimated from it is off by at most 4.4 percentage points, 19 times out of 20."""


def passing(arrived: View, filters: tuple[int, ...]) -> U64:
    """The hashes of the tuples that pass one of some filters; without filters, of all."""
    if not filters or (sieve := _sieve(filters)).lets_all(arrived):
        return arrived.hashes
    return arrived.hashes[sieve.of_all(arrived).any(axis=1)]


def _sieve(filters: tuple[int, ...]) -> Sieve:
    """Lets the rows pass that pass one of these filters."""
    return Sieve(tuple(Seen(filter, None, 1) for filter in filters), 1)


def smallest(hashes: U64, k: int = KEYS) -> tuple[U64, int]:
    """The k smallest keys of a sorted run, and how many of its rows have them."""
    taken = 2 * k
    while True:
        bounds = group_starts(hashes[:taken])
        # The last group may go on beyond what was taken.
        if len(bounds) - 1 > k or taken >= len(hashes):
            kept = min(k, len(bounds) - 1)
            return hashes[bounds[:kept]], int(bounds[kept])
        taken *= 4


def sampled(
    edge: int,
    filters: tuple[int, ...],
    keys: U64,
    tuples: int,
    stores: Sequence[tuple[str, tuple[int, ...]]],
    runs: Sequence[Sequence[View]],
) -> Sample:
    """The keys looked up in every store: which sets of stores have them, and how many rows."""
    counts = np.stack([_rows(keys, passed, store) for (_, passed), store in zip(stores, runs, strict=True)])
    packed = np.packbits(counts.T > 0, axis=1, bitorder="little")
    distinct, where = np.unique(packed, axis=0, return_inverse=True)
    patterns = [int.from_bytes(row.tobytes(), "little") for row in distinct]
    sums = [np.bincount(where.ravel(), minlength=len(patterns))]
    sums += [np.bincount(where.ravel(), weights=found, minlength=len(patterns)) for found in counts]
    table = np.stack(sums, axis=1).astype(np.int64).tolist()
    return Sample(edge, filters, tuple(stores), dict(zip(patterns, table, strict=True)), tuples)


def _rows(keys: U64, filters: tuple[int, ...], runs: Sequence[View]) -> I64:
    """Rows per key that pass one of some filters."""
    total = np.zeros(len(keys), np.int64)
    sieve = _sieve(filters)
    for run in runs:
        at, low, high, _, _ = run.find(keys)
        if not filters or sieve.lets_all(run):
            total[at] += high - low
        elif len(at):
            sets, _ = sieve.sifted(run, (), gather_ranges(low, high))
            total += np.bincount(np.repeat(at, high - low)[sets.any(axis=1)], minlength=len(keys))
    return total


Picked = tuple[I64, I64, npt.NDArray[np.float64]]
"""(number of the key, row, how many rows it stands for)."""


def set_sample(
    edge: int,
    arrived: View,
    share: float,
    filters: tuple[int, ...],
    stores: Sequence[tuple[str, tuple[int, ...], Sequence[View]]],
) -> SetSample | None:
    """Query sets of the rows with the smallest new keys, and of the rows that stores have of these keys.

    `arrived` has `share` of the rows of an edge; `stores` come with the filters of their rows.  None without rows.
    """
    keys, tuples = smallest(arrived.hashes)
    if not len(keys):
        return None
    limit = WHOLE if tuples == len(arrived.hashes) else int(keys[-1])
    bounds = group_starts(arrived.hashes[:tuples])
    upto = _upto(np.diff(bounds))
    limit = limit if upto == len(keys) else int(keys[upto - 1])
    keys = keys[:upto]
    rows = _with_sets(arrived, filters, keys, _picked(np.arange(upto), bounds[:upto], bounds[1 : upto + 1]))
    met = []
    for store, theirs, runs in stores:
        found = [run.find(keys) for run in runs]
        counts = np.zeros(len(keys), np.int64)
        for at, low, high, _, _ in found:
            counts[at] += high - low
        last = _upto(counts)
        limit = limit if last == len(keys) else min(limit, int(keys[last - 1]))
        kinds: dict[tuple[int, int], float] = {}
        for run, (at, low, high, _, _) in zip(runs, found, strict=True):
            mine = at < last
            for key, passed, count in _with_sets(run, theirs, keys, _picked(at[mine], low[mine], high[mine])):
                kinds[key, passed] = kinds.get((key, passed), 0.0) + count
        met.append((store, theirs, tuple((key, passed, count) for (key, passed), count in kinds.items())))
    return SetSample(edge, limit, len(arrived.hashes) / share, filters, rows, tuple(met))


def _upto(counts: I64) -> int:
    """How many keys fit the sample, at least one."""
    return max(1, int(np.searchsorted(np.cumsum(np.minimum(counts, KEY_ROWS)), SET_ROWS, side="right")))


def _picked(keys: I64, low: I64, high: I64) -> Picked:
    """Of every key some rows at equal distances."""
    counts = np.minimum(high - low, KEY_ROWS)
    owner = np.repeat(np.arange(len(keys)), counts)
    number = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    size = (high - low)[owner]
    return keys[owner], low[owner] + number * size // counts[owner], size / counts[owner]


def _with_sets(view: View, filters: tuple[int, ...], keys: U64, picked: Picked) -> tuple[SetRow, ...]:
    """Rows that pass some filter, alike ones together."""
    owner, rows, weights = picked
    if not len(rows) or not filters:
        return ()
    sieve = Sieve(tuple(Seen(id, None, 1 << i) for i, id in enumerate(filters)), -(-len(filters) // SET_BITS))
    sets, _ = sieve.sifted(view, (), rows)
    kinds, where = np.unique(np.column_stack([keys[owner], sets]), axis=0, return_inverse=True)
    counts = np.bincount(where.ravel(), weights=weights).tolist()
    found = [
        (key, sum(word << SET_BITS * i for i, word in enumerate(words)), count)
        for (key, *words), count in zip(kinds.tolist(), counts, strict=True)
    ]
    return tuple(row for row in found if row[1])


def front(run: U64, groups: int) -> U64:
    """The part of a sorted run that lies in the first key groups."""
    if groups >= KEY_GROUPS:
        return run
    limit = np.uint64(groups * (2**64 // KEY_GROUPS))
    return run[: np.searchsorted(run, limit)]


def key_count(runs: Sequence[U64], share: float, k: int = KEYS) -> float:
    """About how many distinct keys sorted runs hold, in all tasks, if these are the runs of `share` of the hashes.

    The k-th smallest of n hashes spread evenly lies at about k / n of their range; fewer than k are simply counted.

    >>> key_count([np.array([1, 1, 5], np.uint64), np.array([5, 9], np.uint64)], share=0.5)
    6.0
    """
    fronts = [smallest(run, k)[0] for run in runs]
    distinct = np.unique(np.concatenate(fronts)) if fronts else np.empty(0, np.uint64)
    if len(distinct) < k:
        return len(distinct) / share
    return (k - 1) * 2.0**64 / float(distinct[k - 1])
