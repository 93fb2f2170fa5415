"""How many join tasks the next epoch has, and which key groups each of them owns.

A segment is sorted by hash, so whatever is decided here moves no state: tasks own other slices of it from the next
epoch on.  Ranges are cut by what key groups have cost in past epochs (`runtime/task/load.py`): a hot one gets a task of
its own.

With `Config(tasks="auto")` there are more tasks when epochs take longer than `Config.latency_target`: up first, to as
many as run at the same time, which is cheap; then out, as far as Spark allocates executors by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from plait.config import KEY_GROUPS
from plait.kernels.hashing import even_bounds

Load = npt.NDArray[np.float64]

RECENT = 0.5
"""What the last epoch counts against all before it."""
SKEW = 1.1
"""How many times the least the costliest task may cost before ranges are cut anew: caches know the old ones."""
CALM_SHARE = 0.25
"""Of the wanted latency: epochs that take less can do with fewer tasks."""
CALM_EPOCHS = 8
"""Epochs in a row that must be calm: one that is large is not to find too few tasks."""


@dataclass(frozen=True)
class Capacity:
    """What there is to run tasks on."""

    parallel: int
    """Tasks that run at the same time."""
    most: int
    """The same once Spark has allocated all executors that it may."""


@dataclass(frozen=True, eq=False)
class Scaling:
    """What was decided for an epoch, and what the next decision rests on.  A run begins without any."""

    bounds: tuple[int, ...] = (0, KEY_GROUPS)
    reason: str = "nothing is known yet"
    load: Load = field(default_factory=lambda: np.zeros(KEY_GROUPS))
    """What key groups have cost, the newest epochs most."""
    wanted: int = 1
    """Tasks that the latency asks for."""
    calm: int = 0
    """Epochs in a row that were far below the wanted latency."""

    @property
    def tasks(self) -> int:
        """How many there are."""
        return len(self.bounds) - 1

    @property
    def skew(self) -> float:
        """What the costliest task costs, relative to all costing the same."""
        total = float(self.load.sum())
        return _costliest(self.load, self.bounds) * self.tasks / total if total else 1.0

    def after(self, load: Load) -> Scaling:
        """What an epoch has shown; one task alone counts nothing."""
        return replace(self, load=(1 - RECENT) * self.load + RECENT * load) if load.any() else self

    def next(self, tasks: int, reason: str) -> Scaling:
        """The ranges of so many tasks."""
        if tasks == 1:
            return replace(self, bounds=even_bounds(1), reason=reason)
        if not self.load.any():
            return replace(self, bounds=even_bounds(tasks), reason=f"{reason}; equal ranges")
        best = cut(self.load, tasks)
        known = self.tasks == tasks
        if known and _costliest(self.load, self.bounds) <= SKEW * _costliest(self.load, best):
            return replace(self, reason=reason)
        found = replace(self, bounds=best)
        return replace(found, reason=f"{reason}; cut by cost: the costliest task has {found.skew:.2f} x the mean")

    def for_latency(self, seconds: float, target: float, capacity: Capacity) -> Scaling:
        """Whether the last epoch's latency asks for other tasks."""
        now = max(self.wanted, self.tasks)
        if seconds > target:
            limit = capacity.parallel if now < capacity.parallel else capacity.most
            return replace(self, wanted=max(now, min(2 * now, limit)), calm=0)
        if seconds > CALM_SHARE * target:
            return replace(self, calm=0)
        if self.calm + 1 < CALM_EPOCHS:
            return replace(self, calm=self.calm + 1)
        return replace(self, wanted=max(1, self.wanted // 2), calm=0)


def most_tasks(settings: Mapping[str, str]) -> int | None:
    """Tasks that run at the same time when Spark has allocated all executors that it may; None if it allocates none.

    >>> most_tasks({"spark.dynamicAllocation.enabled": "true", "spark.dynamicAllocation.maxExecutors": "8"})
    8
    """
    if settings.get("spark.dynamicAllocation.enabled") != "true":
        return None
    executors, cores = settings.get("spark.dynamicAllocation.maxExecutors"), settings.get("spark.executor.cores", "1")
    return min(KEY_GROUPS, int(executors) * int(cores)) if executors else KEY_GROUPS


def cut(load: Load, tasks: int) -> tuple[int, ...]:
    """The bounds under which the costliest task costs least; each owns a key group at least.

    >>> cut(np.array([1.0, 1.0, 8.0, 1.0, 1.0]), 3)
    (0, 2, 3, 5)
    """
    ends = np.concatenate([[0.0], np.cumsum(load)])
    low, high = max(float(load.max()), float(ends[-1]) / tasks), float(ends[-1])
    best, most = _greedy(ends, tasks, high), low
    # Nothing is below `low`: where one group is that hot it is asked for first, and has a task of its own.
    while high - low > 0.01 * high:
        found = _greedy(ends, tasks, most)
        if _costliest(load, found) <= most * (1 + 1e-9):
            best, high = found, most
        else:
            low = most
        most = (low + high) / 2
    return best


def _greedy(ends: Load, tasks: int, most: float) -> tuple[int, ...]:
    """Each task takes groups until it would cost more; the last one takes what is left."""
    groups, bounds = len(ends) - 1, [0]
    for left in range(tasks - 1, 0, -1):
        begin = bounds[-1]
        end = int(np.searchsorted(ends, ends[begin] + most, side="right")) - 1
        bounds.append(min(max(end, begin + 1), groups - left))
    return (*bounds, groups)


def _costliest(load: Load, bounds: tuple[int, ...]) -> float:
    return float(np.add.reduceat(load, bounds[:-1]).max())
