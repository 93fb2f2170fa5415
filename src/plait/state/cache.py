"""The block cache: decompressed blocks of deep segments, the last used ones, up to a number of bytes.

One per process, shared by the tasks that run in it one after the other.  Segments never change, so nothing in it can
be out of date; blocks of segments that are gone are simply not asked for again.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any


class Cache:
    """Least recently used things go first when the weight of all exceeds `limit`."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.bytes = 0
        self._held: OrderedDict[Any, tuple[Any, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Any) -> Any:
        """What was put under `key`, or None."""
        with self._lock:
            found = self._held.get(key)
            if found is None:
                return None
            self._held.move_to_end(key)
            return found[0]

    def put(self, key: Any, value: Any, weight: int) -> None:
        """Keeps `value`, unless it alone is above the limit."""
        with self._lock:
            self.bytes -= self._held.pop(key, (None, 0))[1]
            if weight <= self.limit:
                self.bytes += weight
                self._held[key] = (value, weight)
                self._shrink()

    def resize(self, limit: int) -> None:
        """Another limit, from now on."""
        with self._lock:
            self.limit = limit
            self._shrink()

    def _shrink(self) -> None:
        while self.bytes > self.limit:
            self.bytes -= self._held.popitem(last=False)[1][1]


CACHE = Cache(64 << 20)
"""This process's cache; tasks set its limit from `Config.memory_limit`."""
