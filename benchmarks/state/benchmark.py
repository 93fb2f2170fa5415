"""`python -m benchmarks state`: state larger than memory.

`limits`  paper 002's Figures 5 and 6: its query under a sweep of memory limits, Plait against an all-in-memory Plait
          (the paper's MultiStream) and Spark's joins on RocksDB
`soak`    state that only grows, to many times the memory of the whole process tree
`sweep`   Figure 7: Plait's own settings under one limit
`backends`  the same operator with its state in sorted runs, in memory, and in RocksDB

Every run is a process tree under one limit: see state_cgroup.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import jobs as race
from benchmarks.options import Options
from benchmarks.process_tree import bytes_of
from benchmarks.state import report as state_report
from benchmarks.state.backends import backends
from benchmarks.state.limits import limits, sweep
from benchmarks.state.soak import soak
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
"""Java heap: small, for what is measured is memory for state."""


@dataclass(frozen=True, slots=True)
class Setup:
    """Options with every default filled in; sizes in bytes but for `state_gb` and the heap."""

    quick: bool
    sf: float
    epochs: int
    parts: tuple[str, ...]
    who: tuple[str, ...]
    memory: str
    limits: tuple[int, ...]
    """Memory for the state; none: shares of the state."""
    soak_epochs: int
    state_gb: float
    limit: int
    """Of the whole process tree, in the soak."""
    settings: dict[str, str] = field(default_factory=dict)
    """Fields of Plait's Config, for all of Plait's runs."""


def settle(options: Options) -> Setup:
    """Fill in the defaults.

    >>> settle(Options(quick=True)).soak_epochs, settle(Options()).state_gb, settle(Options(limits=("1k",))).limits
    (16, 20.0, (1024,))
    """
    sf = options.sf or (0.05 if options.quick else 10.0)
    if not 0.001 <= sf <= 100:
        raise ConfigError("BENCH_SF", f"scale factor {sf:g} is out of range", "give a number from 0.001 to 100")
    state_gb = options.state_gb or (0.05 if options.quick else 20.0)
    if not 0.001 <= state_gb <= 10_000:
        raise ConfigError("BENCH_SIZE", f"{state_gb:g} GB of state is out of range", "give a number from 0.001 on")
    default_who = RACERS[:2] if options.quick else RACERS
    limits_asked = tuple(bytes_of(limit) for limit in options.limits)
    return Setup(
        quick=options.quick,
        sf=sf,
        epochs=options.epochs or (6 if options.quick else 40),
        parts=_chosen("part", options.parts, tuple(PARTS)),
        who=_chosen("contestant", options.who, KNOWN) if options.who else default_who,
        memory=options.memory or HEAP,
        limits=limits_asked or ((64 << 20,) if options.quick else ()),
        soak_epochs=options.epochs or (16 if options.quick else 200),
        state_gb=state_gb,
        limit=bytes_of(options.limit or "2g"),
        settings=_settings(options.settings),
    )


def run(out: Path, options: Options, console: Console) -> int:
    """Run it, write state.json, state.md and state.png into `out`; 0 if all results are equal and the soak is steady.

    At quick size nothing is asked of the soak but its results.
    """
    setup = settle(options)
    # Being told to end must end the process trees and remove their groups too: SystemExit runs the clean-up.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    parts: list[dict[str, Any]] = []
    table = ""
    for name in setup.parts:
        console.print(f"{name} …", highlight=False)
        parts.append(PARTS[name](out, setup, console))
        # After every part, so that an interrupted run keeps what it has measured.
        document = {"benchmark": "state", "machine": race.machine(), "setup": asdict(setup), "parts": parts}
        table = state_report.write(document, out)
    console.print(table, markup=False, highlight=False)
    steady = setup.quick or all(all(part.get("met", {}).values()) for part in parts)
    return 0 if steady and all(part["equal"] for part in parts) else 1


def _settings(wanted: tuple[str, ...]) -> dict[str, str]:
    """`name=value`, checked when the session is made."""
    for text in wanted:
        if "=" not in text:
            raise ConfigError("BENCH_SIZE", f"{text!r} sets nothing", "write, for example, fan_in=8")
    return {f"spark.plait.{name}": value for name, _, value in (text.partition("=") for text in wanted)}


def _chosen(what: str, wanted: tuple[str, ...], known: tuple[str, ...]) -> tuple[str, ...]:
    for name in wanted:
        if name not in known:
            raise ConfigError("BENCH_NAME", f"there is no {what} {name!r}", f"use: {', '.join(known)}")
    return tuple(name for name in known if name in wanted) or known
