"""What an epoch tells the optimiser: counts, never rows.  The runtime fills these in, `stats/` reads them.

All of it is additive, so that the counts of tasks and of epochs are added up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(slots=True)
class EdgeCount:
    """What one probe (a node of a probe tree) did."""

    lookups: int = 0
    """q: distinct keys looked up."""
    hits: int = 0
    """Keys that found a row."""
    alive: int = 0
    """m: keys of which a tuple goes on, after the checks."""
    rows: int = 0
    """s: rows found, each counted once per key."""
    tuples: int = 0
    """Joined tuples that were multiplied out here."""
    passed: int = 0
    """Those that met the checks."""
    runs: int = 0
    """Lookups times the runs each went through."""
    gallop: float = 0.0
    """Σ over lookups and runs of log2(1 + run length / lookups): how far a galloping search goes."""
    lookup_ns: int = 0
    match_ns: int = 0
    shipped: int = 0
    """Tuples that left for another task."""
    ship_ns: int = 0

    def add(self, other: EdgeCount) -> None:
        """Takes in what another task or epoch counted."""
        for f in fields(self):
            setattr(self, f.name, getattr(self, f.name) + getattr(other, f.name))


@dataclass(slots=True)
class Driven:
    """What the new tuples of one relation took as they drove through probe trees, in the first hop."""

    seconds: float = 0.0
    rows: int = 0
    """Results complete without another exchange."""

    def add(self, other: Driven) -> None:
        """Takes in what another task did."""
        self.seconds += other.seconds
        self.rows += other.rows


@dataclass(slots=True)
class KeyCount:
    """Keys of one store after an epoch, and what arrived in it."""

    keys: float = 0.0
    """κ, estimated from the k smallest hashes of its runs where the epoch was sampled."""
    arrived: int = 0
    """Distinct keys that arrived, known to the store or not."""
    rows: int = 0
    runs: float = 0.0
    """Runs that a lookup goes through."""


@dataclass(slots=True)
class Sample:
    """The smallest hashes among the new tuples of one input, looked up in all stores on the same attribute.

    `patterns` maps the set of stores that have a key (bit i is `stores[i]`) to [keys, rows in stores[0], …]: small
    whatever the number of keys sampled, and enough for the success of any probe after any others.
    """

    edge: int
    filters: tuple[int, ...]
    """Tuples that pass one of these; none: all tuples."""
    stores: tuple[tuple[str, tuple[int, ...]], ...]
    """(store, filters); the first is the input's own store, before this epoch."""
    patterns: dict[int, list[int]] = field(default_factory=dict)
    tuples: int = 0
    """New tuples that have the sampled keys."""

    def add(self, other: Sample) -> None:
        """Takes in what another epoch sampled."""
        self.tuples += other.tuples
        for pattern, counts in other.patterns.items():
            mine = self.patterns.setdefault(pattern, [0] * len(counts))
            self.patterns[pattern] = [a + b for a, b in zip(mine, counts, strict=True)]

    def to_json(self) -> dict[str, Any]:
        """A JSON value; `from_json` gives the sample back."""
        return {
            "edge": self.edge,
            "filters": list(self.filters),
            "stores": [[store, list(filters)] for store, filters in self.stores],
            "patterns": [[pattern, *counts] for pattern, counts in self.patterns.items()],
            "tuples": self.tuples,
        }

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Sample:
        """The inverse of `to_json`."""
        patterns = {pattern: counts for pattern, *counts in value["patterns"]}
        stores = tuple((store, tuple(filters)) for store, filters in value["stores"])
        return Sample(value["edge"], tuple(value["filters"]), stores, patterns, value["tuples"])


SetRow = tuple[int, int, float]
"""(hash of the key, query set, rows): alike rows counted together."""


@dataclass(frozen=True, slots=True)
class SetSample:
    """Query sets of rows with the smallest new keys of an ingest edge: of those that arrive, and of those they meet.

    Of keys up to hash `limit` all rows are there.  Bit i of a set is filter `filters[i]`.
    """

    edge: int
    limit: int
    arrived: float
    """Rows that arrived on the edge, sampled or not, in all tasks."""
    filters: tuple[int, ...]
    rows: tuple[SetRow, ...]
    met: tuple[tuple[str, tuple[int, ...], tuple[SetRow, ...]], ...]
    """(store, filters, rows at these keys)."""

    def to_json(self) -> dict[str, Any]:
        """A JSON value; `from_json` gives the sample back."""
        return {
            "edge": self.edge,
            "limit": self.limit,
            "arrived": self.arrived,
            "filters": list(self.filters),
            "rows": _sets_to_json(self.rows),
            "met": [[store, list(filters), _sets_to_json(rows)] for store, filters, rows in self.met],
        }

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> SetSample:
        """The inverse of `to_json`."""
        met = tuple((store, tuple(filters), _sets_from_json(rows)) for store, filters, rows in value["met"])
        filters, rows = tuple(value["filters"]), _sets_from_json(value["rows"])
        return SetSample(value["edge"], value["limit"], value["arrived"], filters, rows, met)


def _sets_to_json(rows: tuple[SetRow, ...]) -> list[Any]:
    return [[key, f"{found:x}", count] for key, found, count in rows]


def _sets_from_json(rows: list[Any]) -> tuple[SetRow, ...]:
    return tuple((key, int(found, 16), count) for key, found, count in rows)


@dataclass(slots=True)
class Observed:
    """One epoch as the optimiser sees it."""

    epoch: int
    rows_in: dict[str, int] = field(default_factory=dict)
    rows_out: dict[str, int] = field(default_factory=dict)
    edges: dict[int, EdgeCount] = field(default_factory=dict)
    stores: dict[str, KeyCount] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    sets: list[SetSample] = field(default_factory=list)
    max_event_ms: dict[str, int] = field(default_factory=dict)
    """Per stream the latest event time so far, where it has one."""
    exchanged: bool = True
    """Whether tuples that travelled went from task to task; one task passes them on to itself."""
