"""What the command line asked for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Wishes:
    """None and () mean the default, which each benchmark has for itself."""

    quick: bool = False
    sf: float | None = None
    epochs: int | None = None
    parts: tuple[str, ...] = ()
    who: tuple[str, ...] = ()
    repeat: int | None = None
    verify: bool = True
    memory: str = "8g"
    state_gb: float | None = None
    limit: str | None = None
    limits: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
