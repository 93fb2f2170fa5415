"""Where the time of a task goes, part by part."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass
class Timer:
    """Adds the time spent inside `with` to `seconds[name]`, or takes it off."""

    seconds: dict[str, float]
    name: str
    sign: int = 1
    _begin: float = 0.0

    def __enter__(self) -> None:
        self._begin = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds[self.name] = self.seconds.get(self.name, 0.0) + self.sign * (time.perf_counter() - self._begin)
