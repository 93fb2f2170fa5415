"""Measures queries that come to a running engine and go (paper 004).

deploy      how long a request waits until the engine has the query, and whether that is the next epoch
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.adhoc.deploy import WHO, DeployJob, deploy
from benchmarks.adhoc.report import REPORT
from benchmarks.options import Options, chosen
from benchmarks.report import publish

PARTS = ("deploy",)
RATES, QUICK_RATES = (1.0, 10.0), (5.0,)
MOST_QUERIES = 50
ROWS, QUICK_ROWS = 1000, 50


@dataclass(frozen=True, slots=True)
class Setup:
    """Options with every default filled in."""

    parts: tuple[str, ...]
    who: tuple[str, ...]
    rates: tuple[float, ...]
    seconds: float
    rows: int
    most: int
    memory: str


def settle(options: Options) -> Setup:
    """Fill in the defaults; `--epochs` are the seconds for which requests are sent.

    >>> settle(Options(quick=True)).rates, settle(Options(counts=(4,))).rates
    ((5.0,), (4.0,))
    """
    quick = options.quick
    return Setup(
        parts=chosen("part", options.parts, PARTS, PARTS),
        who=chosen("contestant", options.who, WHO, WHO),
        rates=tuple(map(float, options.counts)) or (QUICK_RATES if quick else RATES),
        seconds=float(options.epochs or (2 if quick else 60)),
        rows=QUICK_ROWS if quick else ROWS,
        most=5 if quick else MOST_QUERIES,
        memory=options.memory or ("1g" if quick else "4g"),
    )


def run(out: Path, options: Options, console: Console) -> int:
    """Run the benchmark and write its report into `out`; 0 if every request was carried out, else 1."""
    setup = settle(options)
    done = publish("adhoc", setup, _measured(out, setup, console), REPORT, out, console)
    return 0 if all(part["equal"] for part in done) else 1


def _measured(out: Path, setup: Setup, console: Console) -> Iterator[dict[str, Any]]:
    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    for part in setup.parts:
        say(f"{part} …")
        sizes = [
            DeployJob(who, rate, setup.seconds, setup.most, setup.rows, setup.memory)
            for who in setup.who
            for rate in setup.rates
        ]
        yield deploy(out, sizes, say)
