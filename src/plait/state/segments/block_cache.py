"""The block cache: decompressed blocks of deep segments, the last used ones, up to a number of bytes.

One per process, shared by the tasks that run in it one after the other.  Segments never change, so nothing in it can
be out of date; blocks of segments that are gone are simply not asked for again.

Where hardly any block is asked for twice, it gives most of its memory up: the page cache, which holds filters and
hashes, makes more of it.  What it would have found with all its memory it goes on counting, and takes the memory back
when that becomes worth it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

LOOKED = 1024
"""Questions after which it is decided anew how much memory is worth it."""
_WORTH = 0.05
"""The share of questions that must be answered."""
_LEAN = 8
"""How many times smaller it is where that is less."""


class _Recent:
    """Least recently used things go first when the weight of all exceeds `limit`."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.bytes = 0
        self._held: OrderedDict[Any, tuple[Any, int]] = OrderedDict()

    def get(self, key: Any) -> Any:
        found = self._held.get(key)
        if found is None:
            return None
        self._held.move_to_end(key)
        return found[0]

    def put(self, key: Any, value: Any, weight: int) -> None:
        self.bytes -= self._held.pop(key, (None, 0))[1]
        if weight <= self.limit:
            self.bytes += weight
            self._held[key] = (value, weight)
            self.resize(self.limit)

    def resize(self, limit: int) -> None:
        self.limit = limit
        while self.bytes > self.limit:
            self.bytes -= self._held.popitem(last=False)[1][1]


class Cache:
    """What was used last, as far as that is worth its memory."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._values = _Recent(limit)
        self._keys = _Recent(limit)
        """What there would be without thrift, by key."""
        self._asked = self._known = 0
        self._lock = threading.Lock()

    @property
    def bytes(self) -> int:
        """What it holds."""
        return self._values.bytes

    def get(self, key: Any) -> Any:
        """What was put under `key`, or None."""
        with self._lock:
            self._asked += 1
            self._known += self._keys.get(key) is not None
            if self._asked >= LOOKED:
                lean = self._known < _WORTH * self._asked
                self._values.resize(self.limit // _LEAN if lean else self.limit)
                self._asked = self._known = 0
            return self._values.get(key)

    def put(self, key: Any, value: Any, weight: int) -> None:
        """Keeps `value`, unless it alone is above the limit."""
        with self._lock:
            self._values.put(key, value, weight)
            self._keys.put(key, True, weight)

    def resize(self, limit: int) -> None:
        """Another limit, from now on."""
        with self._lock:
            lean = self._values.limit < self.limit
            self.limit = limit
            self._values.resize(limit // _LEAN if lean else limit)
            self._keys.resize(limit)


CACHE = Cache(64 << 20)
"""This process's cache; tasks set its limit from `Config.memory_limit`."""
