"""The clock that TTLs go by: the machine's, as long as it does not jump ahead.

A row that a TTL has ended is deleted, and no later correction of the clock brings it back.  So a jump is not believed:
where the machine's clock is further ahead than `most_us` of what has passed since it was read last, time goes on from
there at the pace of a counter that nobody sets.  Once the machine's clock is right again it is believed again.

How long an engine was not running only the machine's clock can tell: the first reading is taken as it is.  A clock that
goes back does no harm: the driver never goes back behind the last commit.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


def system_clock() -> int:
    """The machine's time in microseconds."""
    return time.time_ns() // 1000


def counter() -> int:
    """Microseconds since the machine started, those in which it slept included where it counts them."""
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    return time.clock_gettime_ns(clock) // 1000


@dataclass
class SteadyClock:
    """A clock in microseconds; call it for the time.  `most_us` is None where every jump is believed."""

    most_us: int | None
    wall: Callable[[], int] = system_clock
    passed: Callable[[], int] = counter
    _last: tuple[int, int] | None = None
    """What it said last, and what the counter said then."""

    def __call__(self) -> int:
        now, count = self.wall(), self.passed()
        if self._last is not None and self.most_us is not None:
            expected = self._last[0] + count - self._last[1]
            now = now if now <= expected + self.most_us else expected
        self._last = now, count
        return now
