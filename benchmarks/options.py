"""The options of the command line.  Each benchmark fills in what was not given."""

from __future__ import annotations

from dataclasses import dataclass

from plait.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Options:
    """The options as they were given; None and () stand for the default, which each benchmark has for itself."""

    quick: bool = False
    sf: float | None = None
    epochs: int | None = None
    parts: tuple[str, ...] = ()
    who: tuple[str, ...] = ()
    repeat: int | None = None
    verify: bool = True
    memory: str | None = None
    state_gb: float | None = None
    limit: str | None = None
    limits: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    counts: tuple[int, ...] = ()


def scale_factor(options: Options, *, full: float, quick: float) -> float:
    """The scale factor that was given, or the default for a full or a quick run.

    >>> scale_factor(Options(quick=True), full=1.0, quick=0.01)
    0.01
    """
    sf = options.sf or (quick if options.quick else full)
    if not 0.001 <= sf <= 100:
        raise ConfigError("BENCH_SF", f"scale factor {sf:g} is out of range", "give a number from 0.001 to 100")
    return sf


def chosen(what: str, wanted: tuple[str, ...], known: tuple[str, ...], default: tuple[str, ...]) -> tuple[str, ...]:
    """The wanted names in their usual order, or the default; an unknown name is refused with the known ones.

    >>> chosen("part", ("chain", "four"), ("four", "star", "chain"), default=("four",))
    ('four', 'chain')
    """
    for name in wanted:
        if name not in known:
            raise ConfigError("BENCH_NAME", f"there is no {what} {name!r}", f"use: {', '.join(known)}")
    return tuple(name for name in known if name in wanted) or default
