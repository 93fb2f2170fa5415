"""Driver policies: which input goes first inside a batch (paper 003, section 3.2).

Whoever goes first probes only what was there before; whoever goes later also sees the batch's tuples of those before
it.  The rank rule (query/plan.py) makes every ranking give exactly the same results, so a policy is free: it is a pure
function from what is known of the streams to their ranking, first driver first.

    registration          as the streams were registered
    timestamp             the stream whose tuples are oldest, as MJoin would come across them
    round_robin           the first place goes round
    consumption_rate      ascending σ_S = |results| / |S|: empties the buffers early
    initial_output_size   descending |buffer|·σ·Π|others|: most results first
    output_rate           the same per tuple of the buffer: most results per tuple first

A batch is one epoch, so `timestamp` ranks whole streams, where the paper's interleaves tuples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StreamStats:
    """What a policy knows of one stream."""

    buffer: float
    """Tuples expected in the next batch."""
    results: float
    """Results that one new tuple is expected to find in the others' state."""
    sigma: float
    """σ_S: results so far per tuple of the stream so far."""
    latest_ms: int | None = None
    """Its latest event time."""


Policy = Callable[[Mapping[str, StreamStats], int], tuple[str, ...]]
"""(streams in the order of registration, number of the batch) → ranking, first driver first."""


def registration(streams: Mapping[str, StreamStats], batch: int) -> tuple[str, ...]:
    """As the streams were registered."""
    return tuple(streams)


def timestamp(streams: Mapping[str, StreamStats], batch: int) -> tuple[str, ...]:
    """Oldest event time first; streams without one in the order of registration, after the others."""
    return tuple(sorted(streams, key=lambda s: _or_infinite(streams[s].latest_ms)))


def round_robin(streams: Mapping[str, StreamStats], batch: int) -> tuple[str, ...]:
    """Each stream is first once in every n batches."""
    names = list(streams)
    first = batch % len(names)
    return tuple(names[first:] + names[:first])


def consumption_rate(streams: Mapping[str, StreamStats], batch: int) -> tuple[str, ...]:
    """The most selective first: fewest results per tuple of the stream."""
    return tuple(sorted(streams, key=lambda s: streams[s].sigma))


def initial_output_size(streams: Mapping[str, StreamStats], batch: int) -> tuple[str, ...]:
    """The stream whose buffer gives most results first (paper 003, Eq. 1).

    The paper chooses again after every buffer, with the hash tables that have grown meanwhile.  Those that went before
    are partners of all that are left, so their growth multiplies every candidate alike: sorting once is the same.
    """
    return tuple(sorted(streams, key=lambda s: -streams[s].buffer * streams[s].results))


def output_rate(streams: Mapping[str, StreamStats], batch: int) -> tuple[str, ...]:
    """The stream whose tuples give most results each first."""
    return tuple(sorted(streams, key=lambda s: -streams[s].results))


def _or_infinite(value: float | None) -> float:
    return float("inf") if value is None else value


POLICIES: dict[str, Policy] = {  # the names are `config.DRIVER_POLICIES`
    "registration": registration,
    "timestamp": timestamp,
    "round_robin": round_robin,
    "consumption_rate": consumption_rate,
    "initial_output_size": initial_output_size,
    "output_rate": output_rate,
}
