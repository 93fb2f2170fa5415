"""Values that travel to tasks again and again: written once, and read once per worker.

A plan of a hundred queries has thousands of small objects.  To write them for every job of every epoch, and to read
them in every task, takes longer than the rest of a small epoch.

Contract.  Neither what is packed nor what is unpacked may change: all tasks of a worker that get equal bytes get the
same object, with all that it has computed (`cached_property`) so far.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property, lru_cache
from typing import Any

KEPT = 64
"""Values that a process keeps: plans and inputs of the engines it works for, and their last ones."""


class Packed(ABC):
    """A frozen value that is sent as compressed JSON, made once."""

    @abstractmethod
    def to_json(self) -> str:
        """Text that `from_json` turns back into an equal value."""

    @staticmethod
    @abstractmethod
    def from_json(text: str) -> Any:
        """The inverse of `to_json`."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return unpacked, (type(self).from_json, self.packed)

    @cached_property
    def packed(self) -> bytes:
        """Its bytes, for `unpacked`."""
        return zlib.compress(self.to_json().encode(), 1)


@lru_cache(maxsize=KEPT)
def unpacked(read: Callable[[str], Any], content: bytes) -> Any:
    """The value whose bytes these are."""
    return read(zlib.decompress(content).decode())
