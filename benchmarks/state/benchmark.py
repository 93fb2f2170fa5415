"""Measures state larger than memory.

`limits`    paper 002's Figures 5 and 6: its query under a sweep of memory limits, Plait against an all-in-memory Plait
            (the paper's MultiStream) and Spark's joins on RocksDB
`soak`      state that only grows, to many times the memory of the whole process tree
`sweep`     Figure 7: Plait's own settings under one limit
`backends`  the same operator with its state in sorted runs, in memory, and in RocksDB

Every run is a process tree under one limit: see `memory_group`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.options import Options, chosen, scale_factor
from benchmarks.report import publish
from benchmarks.state.backends import backends
from benchmarks.state.limits import limits, sweep
from benchmarks.state.report import REPORT
from benchmarks.state.soak import soak
from plait.config import bytes_of
from plait.errors import ConfigError

KNOWN = ("plait", "plait-memory", "spark-rocksdb", "spark")
RACERS = KNOWN[:3]
PARTS: dict[str, Callable[[Path, Setup, Console], dict[str, Any]]] = {
    "limits": limits,
    "soak": soak,
    "sweep": sweep,
    "backends": backends,
}
HEAP = "512m"
"""The Java heap is small, since memory for state is what is measured."""


@dataclass(frozen=True, slots=True)
class Setup:
    """Options with every default filled in; sizes are in bytes but for `state_gb` and `memory`, the Java heap."""

    quick: bool
    sf: float
    epochs: int
    parts: tuple[str, ...]
    who: tuple[str, ...]
    memory: str
    limits: tuple[int, ...]
    """Memory for the state; none stands for shares of the state."""
    soak_epochs: int
    state_gb: float
    limit: int
    """Memory of the whole process tree in the soak."""
    settings: dict[str, str] = field(default_factory=dict)
    """Session settings for fields of Plait's Config, in all of Plait's runs."""


def settle(options: Options) -> Setup:
    """Fill in the defaults.

    >>> settle(Options(quick=True)).soak_epochs, settle(Options()).state_gb, settle(Options(limits=("1k",))).limits
    (16, 20.0, (1024,))
    """
    sf = scale_factor(options, full=10.0, quick=0.05)
    state_gb = options.state_gb or (0.05 if options.quick else 20.0)
    if not 0.001 <= state_gb <= 10_000:
        raise ConfigError("BENCH_SIZE", f"{state_gb:g} GB of state is out of range", "give a number from 0.001 on")
    given = tuple(bytes_of("limits", limit) for limit in options.limits)
    return Setup(
        quick=options.quick,
        sf=sf,
        epochs=options.epochs or (6 if options.quick else 40),
        parts=chosen("part", options.parts, tuple(PARTS), tuple(PARTS)),
        who=chosen("contestant", options.who, KNOWN, RACERS[:2] if options.quick else RACERS),
        memory=options.memory or HEAP,
        limits=given or ((64 << 20,) if options.quick else ()),
        soak_epochs=options.epochs or (16 if options.quick else 200),
        state_gb=state_gb,
        limit=bytes_of("limit", options.limit or "2g"),
        settings=_settings(options.settings),
    )


def run(out: Path, options: Options, console: Console) -> int:
    """Run the benchmark and write its report into `out`; 0 if all results are equal and all goals are met.

    At quick size the goals, which are about speed, do not count.
    """
    setup = settle(options)
    parts = publish("state", setup, measured(out, setup, console), REPORT, out, console)
    steady = setup.quick or all(all(part.get("met", {}).values()) for part in parts)
    return 0 if steady and all(part["equal"] for part in parts) else 1


def measured(out: Path, setup: Setup, console: Console) -> Iterator[dict[str, Any]]:
    """The chosen parts, in their usual order."""
    for name in setup.parts:
        console.print(f"{name} …", highlight=False)
        yield PARTS[name](out, setup, console)


def _settings(wanted: tuple[str, ...]) -> dict[str, str]:
    """Settings of the session from `name=value`; the names are checked when the session is made."""
    for text in wanted:
        if "=" not in text:
            raise ConfigError("BENCH_SIZE", f"{text!r} sets nothing", "write, for example, fan_in=8")
    return {f"spark.plait.{name}": value for name, _, value in (text.partition("=") for text in wanted)}
