"""Measures which input should drive first inside a batch (paper 003, its Tables 4 and 5).

Its six datasets (arrivals.py), a 3-way join on one key, short and long batches, every driver policy.  Probe orders are
those of dp_pick, as the paper assumes a good probing sequence; ranks follow the forecasts after every batch.  Runs go
through the engine's own tasks, state and commit in this process, without Spark.

    time    seconds of probing (making the rows included), over those of `timestamp`
    work    the same counted: lookups and tuples at one price list for all, itself measured in this run
    early   the fraction of a batch's results that are there when `timestamp` would have used half of its time.  So the
            paper: what is done earlier has all its results by then.  A driver's rows are taken as evenly spread over
            its time; once in seconds and once in work

The first fifth of the batches is left out, as in the paper.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import one_key_join
from benchmarks.drivers.arrivals import DATASETS, STREAMS, TIME_MS
from benchmarks.drivers.report import MEASURES, REPORT
from benchmarks.one_key_join import Ran
from benchmarks.options import Options
from benchmarks.report import publish
from benchmarks.without_spark import QUERY
from plait.config import DRIVER_POLICIES, Config
from plait.order.cost import Coefficients
from plait.share.planner import Planner

PROBES = ("iterative", "factorised")
ROWS, QUICK_ROWS = 300_000, 4000
BATCHES, QUICK_BATCHES = (100, 10), (10, 5)
"""How many short and how many long batches, of the same whole time; `ROWS` is |S3|."""
REPEAT = (1, 3)
"""Number of runs with short and with long batches; of short ones a run has ten times as many to average over."""
BASE = "timestamp"


@dataclass(frozen=True, slots=True)
class Setup:
    """Options with every default filled in."""

    rows: int
    batches: tuple[int, int]
    repeat: tuple[int, int]


def settle(options: Options) -> Setup:
    """Fill in the defaults.

    >>> settle(Options(repeat=2)), settle(Options(quick=True)).batches
    (Setup(rows=300000, batches=(100, 10), repeat=(2, 2)), (10, 5))
    """
    default = (1, 1) if options.quick else REPEAT
    return Setup(
        rows=QUICK_ROWS if options.quick else ROWS,
        batches=QUICK_BATCHES if options.quick else BATCHES,
        repeat=(options.repeat, options.repeat) if options.repeat else default,
    )


def run(out: Path, options: Options, console: Console) -> int:
    """Run the benchmark and write its report into `out`; 0, or an error if any result differs."""
    setup = settle(options)

    def measured(scratch: Path) -> Iterator[dict[str, Any]]:
        yield drivers(scratch, setup, say=lambda text: console.print(text, highlight=False))

    with tempfile.TemporaryDirectory(prefix="drivers-", dir=out) as scratch:
        publish("drivers", setup, measured(Path(scratch)), REPORT, out, console)
    return 0


def drivers(
    scratch: Path, setup: Setup, datasets: Sequence[str] = (), say: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Measure every policy on these datasets, by default on all."""
    rows, batches = setup.rows, setup.batches
    runs: dict[str, list[tuple[str, int, dict[str, list[list[Ran]]]]]] = {probe: [] for probe in PROBES}
    results: dict[str, int] = {}
    for dataset in (d for d in DATASETS if d.name in datasets or not datasets):
        for which, count in enumerate(batches):
            say(f"dataset {dataset.name}, {count} batches …")
            arrivals = dataset.arrivals(rows, count)
            wanted = one_key_join.expected(arrivals)
            results[dataset.name] = sum(wanted)
            if not runs[PROBES[0]]:
                # What is run first compiles; it does not count.
                one_key_join.run(scratch, _planner(PROBES[0], BASE, count), arrivals[:5], wanted[:5])
            for probe in PROBES:
                found: dict[str, list[list[Ran]]] = {policy: [] for policy in DRIVER_POLICIES}
                for _ in range(setup.repeat[which]):
                    planners = {policy: _planner(probe, policy, count) for policy in DRIVER_POLICIES}
                    for policy, ran in one_key_join.side_by_side(scratch, planners, arrivals, wanted).items():
                        found[policy].append(ran[count // 5 :])
                runs[probe].append((dataset.name, which, found))
    return {
        "part": "drivers",
        "title": "Driver policies (paper 003, Tables 4 and 5)",
        "rows": rows,
        "batches": list(batches),
        "repeat": list(setup.repeat),
        "results": results,
        "equal": True,
        "probes": {probe: _measured(of) for probe, of in runs.items()},
    }


def _planner(probe: str, policy: str, batches: int) -> Planner:
    config = Config(
        tasks=1,
        sync=False,
        probe=probe,
        orderer="dp_pick",
        driver_policy=policy,
        replan_epochs=1,
        history=batches,
    )
    # No row is late: what arrives in one batch was all sent after the batch before, and the delay is the whole time.
    relations = one_key_join.relations(STREAMS, delay_ms=TIME_MS)
    return Planner({QUERY: one_key_join.graph(STREAMS)}, relations, config)


def _measured(runs: Sequence[tuple[str, int, Mapping[str, Sequence[Sequence[Ran]]]]]) -> dict[str, Any]:
    """All figures of one probe, at prices measured in its runs with long batches."""
    # Short batches would price the fixed cost of a call as a cost of tuples.
    prices = Coefficients().fitted(
        driven.counts
        for _, which, found in runs
        for of in found.values()
        for ran in of
        for batch in ran
        for driven in batch.driven
        if which == 1
    )
    figures: list[dict[str, Any]] = [
        {"dataset": dataset, "which": which, "policies": _figures(found, prices)} for dataset, which, found in runs
    ]
    average = {
        policy: {
            measure: [
                statistics.fmean(f["policies"][policy][measure] for f in figures if f["which"] == which)
                for which in (0, 1)
            ]
            for measure in MEASURES
        }
        for policy in DRIVER_POLICIES
    }
    return {"coefficients": asdict(prices), "figures": figures, "average": average}


def _figures(found: Mapping[str, Sequence[Sequence[Ran]]], prices: Coefficients) -> dict[str, dict[str, Any]]:
    """The figures of each policy relative to BASE, for one dataset and one length of batches."""
    seconds = {policy: _by_batch(of, lambda batch: batch.seconds) for policy, of in found.items()}
    work = {policy: _by_batch(of, lambda batch: batch.work(prices)) for policy, of in found.items()}
    return {
        policy: {
            "time": sum(seconds[policy]) / sum(seconds[BASE]),
            "work": sum(work[policy]) / sum(work[BASE]),
            "early": statistics.median(
                _early(
                    (b, [d.seconds for d in b.driven], limit / 2) for b, limit in zip(ran, seconds[BASE], strict=True)
                )
                for ran in of
            ),
            "early_work": statistics.median(
                _early(
                    (b, [d.work(prices) for d in b.driven], limit / 2) for b, limit in zip(ran, work[BASE], strict=True)
                )
                for ran in of
            ),
            "seconds": sum(seconds[policy]),
            "work_seconds": sum(work[policy]),
            "first": _first(of),
        }
        for policy, of in found.items()
    }


def _by_batch(runs: Sequence[Sequence[Ran]], cost: Callable[[Ran], float]) -> list[float]:
    """The cost of every batch, as the median of the runs."""
    return [statistics.median(cost(batch) for batch in same) for same in zip(*runs, strict=True)]


def _early(batches: Iterable[tuple[Ran, Sequence[float], float]]) -> float:
    """The mean fraction of a batch's results that is there at its limit, over all batches that have results."""
    found = [
        fraction([(cost, d.rows) for cost, d in zip(costs, batch.driven, strict=True)], limit)
        for batch, costs, limit in batches
        if batch.rows
    ]
    return statistics.fmean(found) if found else 0.0


def fraction(driven: Sequence[tuple[float, int]], limit: float) -> float:
    """The share of the rows that is there when `limit` is spent, given the cost and the rows of each driver in turn.

    >>> fraction([(1.0, 30), (2.0, 70)], 2.0)
    0.65
    """
    done, left = 0.0, limit
    for cost, rows in driven:
        share = min(left / cost, 1.0) if cost > 0 else 1.0
        done += share * rows
        left = max(left - cost, 0.0)
    return done / sum(rows for _, rows in driven)


def _first(runs: Sequence[Sequence[Ran]]) -> dict[str, float]:
    """The share of the batches in which each stream drove first."""
    drove = [batch.driven[0].stream for ran in runs for batch in ran if batch.driven]
    return {stream: round(drove.count(stream) / max(len(drove), 1), 3) for stream in STREAMS}
