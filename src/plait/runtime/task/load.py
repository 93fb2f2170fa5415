"""What each key group of a task costs in an epoch: by this the driver cuts the ranges that tasks own.

Contract.  A number per key group, in nanoseconds that only compare: rows that arrived, keys that were looked up, rows
that matched, tuples that were multiplied out.  Hashes come sorted.

Cost: binary searches for the groups' beginnings, about 0.1 ms for 1,024 groups, however many rows there are.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from plait.kernels import U64
from plait.kernels.hashing import group_starts_in

ARRIVED_NS = 150.0
"""A new row of a store: read from its bucket, written, later merged."""
LOOKUP_NS = 50.0
MATCH_NS = 20.0
TUPLE_NS = 60.0
"""A tuple that is multiplied out, judged, and made a row of a result or sent on."""


@dataclass
class Load:
    """What has been counted of the key groups from `groups[0]` up to but without `groups[1]`."""

    groups: tuple[int, int]
    cost: npt.NDArray[np.float64] = field(init=False)

    def __post_init__(self) -> None:
        self.cost = np.zeros(self.groups[1] - self.groups[0])

    def add(self, hashes: U64, each_ns: float) -> None:
        """Things with these hashes, which cost so much each."""
        self.cost += each_ns * np.diff(group_starts_in(hashes, self.groups))

    def add_matches(self, hashes: U64, counts: npt.NDArray[np.int64]) -> None:
        """Keys with these hashes that have found so many rows each."""
        rows = np.concatenate([[0], np.cumsum(counts)])
        self.cost += MATCH_NS * np.diff(rows[group_starts_in(hashes, self.groups)])
