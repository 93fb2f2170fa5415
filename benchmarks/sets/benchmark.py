"""Measures many queries in one engine, by the generator of paper 004: counted work, and overall data throughput.

work2, work3               without Spark: lookups, matched rows and seconds against one unfiltered query per join
                           structure, and against one tree per query
throughput2, throughput3   on Spark, at 1,000 rows per stream and second: rows per second summed over queries
aggregates                 on Spark, at the same rate: aggregates of the same groups, finished together and apart
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.options import Options, chosen
from benchmarks.report import publish
from benchmarks.sets import aggregates, throughput, work
from benchmarks.sets.report import REPORT
from plait.runtime.spark.java import require_java

PARTS = ("work2", "work3", "throughput2", "throughput3", "aggregates")
COUNTS, QUICK_COUNTS = (1, 10, 100, 500), (1, 10)
AGGREGATES = (1, 10, 50)
WORK_ROWS = {2: 45_000, 3: 10_000}
"""Rows per stream and epoch with which the join of one unfiltered query takes about a second."""
QUICK_ROWS = {2: 300, 3: 100}
THROUGHPUT_ROWS = 1000


@dataclass(frozen=True, slots=True)
class Setup:
    """Options with every default filled in."""

    parts: tuple[str, ...]
    counts: tuple[int, ...]
    aggregates: tuple[int, ...]
    quick: bool
    work_epochs: int
    throughput_epochs: int
    work_repeat: int
    throughput_repeat: int
    memory: str


def settle(options: Options) -> Setup:
    """Fill in the defaults.

    >>> settle(Options(quick=True)).counts, settle(Options(repeat=5)).work_repeat
    ((1, 10), 5)
    """
    quick = options.quick
    return Setup(
        parts=chosen("part", options.parts, PARTS, PARTS),
        counts=options.counts or (QUICK_COUNTS if quick else COUNTS),
        aggregates=options.counts or (QUICK_COUNTS if quick else AGGREGATES),
        quick=quick,
        work_epochs=options.epochs or (1 if quick else 2),
        throughput_epochs=options.epochs or (3 if quick else 40),
        work_repeat=options.repeat or 1,
        throughput_repeat=options.repeat or (1 if quick else 3),
        memory=options.memory or ("1g" if quick else "4g"),
    )


def run(out: Path, options: Options, console: Console) -> int:
    """Run the benchmark and write its report into `out`; 0 if every query had the results of a plain count, else 1."""
    setup = settle(options)
    if any(not part.startswith("work") for part in setup.parts):
        require_java()
    with tempfile.TemporaryDirectory(prefix="sets-", dir=out) as scratch:
        done = publish("sets", setup, _measured(out, Path(scratch), setup, console), REPORT, out, console)
    return 0 if all(part["equal"] for part in done) else 1


def _measured(out: Path, scratch: Path, setup: Setup, console: Console) -> Iterator[dict[str, Any]]:
    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    for part in setup.parts:
        say(f"{part} …")
        if part == "aggregates":
            rows = QUICK_ROWS[3] if setup.quick else THROUGHPUT_ROWS
            size = throughput.Size(
                setup.aggregates, rows, setup.throughput_epochs, setup.throughput_repeat, setup.memory
            )
            yield aggregates.aggregates(out, size, say)
            continue
        ways = int(part[-1])
        if part.startswith("work"):
            rows = (QUICK_ROWS if setup.quick else WORK_ROWS)[ways]
            yield work.work(ways, scratch, work.Size(setup.counts, rows, setup.work_epochs, setup.work_repeat), say)
        else:
            rows = QUICK_ROWS[ways] if setup.quick else THROUGHPUT_ROWS
            size = throughput.Size(setup.counts, rows, setup.throughput_epochs, setup.throughput_repeat, setup.memory)
            yield throughput.throughput(ways, out, size, say)
