"""Part `soak` of the benchmark `state`: the state only grows, to many times the memory that the engine lives in."""

from __future__ import annotations

import json
import math
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from benchmarks.jobs import read_progress
from benchmarks.memory_group import folder_bytes
from benchmarks.state.contestants import StateJob
from benchmarks.state.soak_data import SOAK, Feed, rows_for
from benchmarks.state.trial import trial

if TYPE_CHECKING:
    from benchmarks.state.benchmark import Setup

LEAST_LATE_THROUGHPUT, MOST_P99 = 0.7, 3.0
CONFIG: dict[str, Any] = {"gc_grace_seconds": 20.0, "snapshot_every": 8}
"""Merged runs are removed soon; they would stay on the disk for ten minutes by default."""
DISK_EVERY_SECONDS = 5.0
SAY_EVERY = 10
"""Number of epochs between two lines on the console."""


class Watch:
    """Feeds the run, looks at the disk and prints a line now and then, while the run goes on."""

    def __init__(self, feed: Feed, console: Console) -> None:
        self.feed, self.console = feed, console
        self.disk: list[dict[str, float]] = []
        self.feeding = 0.0
        self._said = 0
        self._looked = 0.0

    def __call__(self, work: Path) -> None:
        epochs = read_progress(work)
        begun = time.perf_counter()
        self.feed.keep_ahead(read(epochs))
        self.feeding += time.perf_counter() - begun
        if epochs and time.monotonic() - self._looked > DISK_EVERY_SECONDS:
            self._looked = time.monotonic()
            on_disk = folder_bytes(work / "checkpoint")
            self.disk.append({"epoch": len(epochs) - 1, "bytes": on_disk, "live": epochs[-1].get("state_bytes", 0)})
        if len(epochs) >= self._said + SAY_EVERY:
            self._said = len(epochs)
            last = epochs[-1]
            self.console.print(
                f"  epoch {last['epoch']}: {last['at']:.0f} s, state {last['state_bytes'] / 2**30:.2f} GiB, "
                f"epoch {last['seconds']['total']:.2f} s",
                highlight=False,
            )


def soak(out: Path, setup: Setup, console: Console) -> dict[str, Any]:
    """Run the soak; `equal` if it came to its end and every epoch gave the number of rows that the feed knows."""
    with tempfile.TemporaryDirectory(prefix="soak-", dir=out) as folder:
        warm = Feed(Path(folder, "warm"), 400, 2)
        for _ in range(warm.epochs):
            warm.make()
        feed = Feed(Path(folder), rows_for(setup.state_gb * 2**30, setup.soak_epochs), setup.soak_epochs)
        for _ in range(min(feed.ahead, feed.epochs)):
            feed.make()
        job = StateJob(
            "plait",
            SOAK.name,
            folder,
            setup.memory,
            config=CONFIG,
            settings=setup.settings,
            total_rows=feed.total_rows,
        )
        watch = Watch(feed, console)
        found = trial(job, setup.limit, out / "scratch", beside=watch)
    console.print(f"  soak: {found.said()}", highlight=False, markup=False, soft_wrap=True)
    # Hours of measuring: kept before anything is made of it.
    (out / "soak.jsonl").write_text("".join(json.dumps(epoch) + "\n" for epoch in found.epochs))
    checked = check(found.epochs, feed)
    figures = measures(found.epochs)
    met = {
        "throughput": figures.get("late_throughput", 0.0) >= LEAST_LATE_THROUGHPUT,
        "p99": figures.get("p99_over_median", float("inf")) <= MOST_P99,
    }
    return {
        "part": "soak",
        "title": "State that only grows",
        "sql": SOAK.sql.strip(),
        "state_gb": setup.state_gb,
        "epochs": setup.soak_epochs,
        "rows_per_epoch": sum(feed.size.values()),
        "expected": feed.expected[-1] if feed.made == feed.epochs else None,
        "run": asdict(found),
        "disk": watch.disk,
        "feeding_seconds": watch.feeding,
        "starved": feed.starved,
        "figures": figures,
        "checked": checked,
        "met": met,
        "equal": found.finished and checked["complete"] and not checked["wrong"],
    }


def read(epochs: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """The number of rows of each stream that have been read.

    >>> read([{"rows_in": {"a": 1, "b": 2}}, {"rows_in": {"a": 5}}])
    {'a': 6, 'b': 2}
    """
    total: dict[str, int] = {}
    for epoch in epochs:
        for stream, rows in epoch["rows_in"].items():
            total[stream] = total.get(stream, 0) + rows
    return total


def check(epochs: Sequence[Mapping[str, Any]], feed: Feed) -> dict[str, Any]:
    """Compare rows out with what the feed knows, after every epoch by which all streams have been read equally far.

    An engine that has read everything may take one stream's next file before the others': such epochs are not compared.
    """
    compared, wrong, rows = 0, [], 0
    so_far: dict[str, int] = {}
    parts = -1
    for epoch in epochs:
        rows += epoch["rows_out"]
        for stream, count in epoch["rows_in"].items():
            so_far[stream] = so_far.get(stream, 0) + count
        whole = {divmod(so_far.get(stream, 0), size) for stream, size in feed.size.items()}
        if len(whole) == 1 and (part := next(iter(whole)))[1] == 0:
            parts = part[0]
            compared += 1
            if rows != feed.expected[parts - 1]:
                wrong.append({"epoch": epoch["epoch"], "rows": rows, "expected": feed.expected[parts - 1]})
    return {"compared": compared, "wrong": wrong[:10], "complete": parts == feed.epochs}


def measures(epochs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Seconds per epoch, and rows per second in each quarter of the epochs; the first epoch is not counted."""
    if len(epochs) < 5:
        return {}
    seconds = [epoch["seconds"]["total"] for epoch in epochs[1:]]
    ordered = sorted(seconds)
    median, p99 = statistics.median(ordered), _quantile(ordered, 0.99)
    quarters = []
    for quarter in range(4):
        low, high = (len(seconds) * q // 4 for q in (quarter, quarter + 1))
        wall = epochs[high]["at"] - epochs[low]["at"]
        quarters.append(sum(sum(e["rows_in"].values()) for e in epochs[low + 1 : high + 1]) / wall)
    return {
        "median": median,
        "p99": p99,
        "max": ordered[-1],
        "p99_over_median": p99 / median,
        "quarters": quarters,
        "late_throughput": quarters[3] / quarters[1],
    }


def _quantile(ordered: Sequence[float], share: float) -> float:
    """The least value that is not below `share` of all.

    >>> _quantile([1.0, 2.0, 3.0, 4.0], 0.5), _quantile([1.0, 2.0], 0.99)
    (2.0, 2.0)
    """
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)]
