"""Tables and plots of the benchmark `sharing`, beside the figures of paper 001 and the goals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from benchmarks.report import Document, Part, Report, size, table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAMES = {
    "independent": "independent",
    "naive": "naive",
    "ilp": "ilp",
    "engines": "an engine for each query",
    "spark": "Spark, in memory",
    "spark-rocksdb": "Spark, RocksDB",
}
COLOURS = {
    "independent": "#b5541c",
    "naive": "#3b6ea5",
    "ilp": "#0b6e4f",
    "engines": "#c9a227",
    "spark": "#e07a1f",
    "spark-rocksdb": "#8e6bbf",
}
LEAST_GAIN = 2.6
"""Throughput of ilp over that of independent, with five queries: the paper's figure."""
LEAST_SAVED = {5: 3.1, 10: 5.3}
"""State of independent over that of ilp, by number of queries: the paper's figures."""


def how(document: Document) -> str:
    """What was measured, and how."""
    setup = document["setup"]
    return (
        f"TPC-H’s tables as streams, shuffled, {setup['epochs']} epochs, scale factor {setup['sf']:g}; "
        f"joins without filters and windows, made as paper 001 makes them and fixed in "
        f"`benchmarks/sharing/workload.py`; all rows are kept for ever.  {setup['repeat']} run(s) of each by turns, "
        "each in a process of its own, results dropped (noop) and counted.  Seconds are from registering the queries "
        "to the last epoch, after one over the first epoch’s rows; rows/s are rows of all tables, each counted once.  "
        "Equal: every query has DuckDB’s number of results."
    )


def gain(part: Part, who: str, base: str = "independent") -> float | None:
    """Throughput of one contestant over that of another; None where one was not measured."""
    mine, theirs = (part["contestants"].get(name, {}) for name in (who, base))
    return theirs["seconds"] / mine["seconds"] if mine.get("seconds") and theirs.get("seconds") else None


def saved(part: Part, who: str, base: str = "independent") -> float | None:
    """State of one contestant over that of another."""
    mine, theirs = (part["contestants"].get(name, {}) for name in (who, base))
    return theirs["state_bytes"] / mine["state_bytes"] if mine.get("state_bytes") and "state_bytes" in theirs else None


def lines(part: Part, document: Document) -> Iterator[str]:
    """The table of a part, and whether the goals are met."""
    results = sum(query["results"] for query in part["queries"].values())
    yield (f"{part['rows_in']:,} rows in, {results:,} results of {len(part['queries'])} queries.")
    yield ""
    base = "independent" if "independent" in part["contestants"] else "ilp"
    columns = (
        "contestant",
        "seconds",
        "rows/s",
        f"throughput ÷ {base}",
        "s per epoch, median",
        "last",
        "state",
        f"{base} ÷ state",
        "stores",
        "peak memory",
        "equal",
    )
    rows = []
    for who, found in part["contestants"].items():
        if found.get("failure") is not None:
            rows.append((NAMES[who], "failed", *[""] * 8, "NO"))
            continue
        rows.append(
            (
                NAMES[who],
                f"{found['seconds']:.1f}",
                f"{part['rows_in'] / found['seconds']:,.0f}",
                _times(gain(part, who, base)),
                f"{found['median_epoch']:.2f}",
                f"{found['epochs'][-1]:.2f}",
                size(found["state_bytes"]),
                _times(saved(part, who, base)),
                str(found["stores"] if isinstance(found["stores"], int) else len(found["stores"])),
                "" if found["peak"] is None else size(found["peak"]),
                "yes" if found["equal"] else "NO",
            )
        )
    yield from table(columns, rows)
    for who, found in part["contestants"].items():
        if found.get("failure") is not None:
            yield f"\n{NAMES[who]} failed: {found['failure']}"
    if "lookups" in part["contestants"].get("ilp", {}):
        yield ""
        counted = ("lookups", "rows", "tuples", "state_rows")
        apart = part["contestants"].get("independent", {}).get("cpu")
        yield from table(
            ("counted", "lookups", "rows found", "tuples made", "rows at rest", "CPU s", "independent ÷ CPU s"),
            [
                (
                    NAMES[who],
                    *(f"{found[name]:,}" for name in counted),
                    f"{found['cpu']:.1f}",
                    _times(apart / found["cpu"] if apart else None),
                )
                for who, found in part["contestants"].items()
                if "cpu" in found
            ],
        )
    if "ilp" in part["contestants"] and part["contestants"]["ilp"].get("mirs"):
        yield ""
        yield f"Kept by ilp at the end: {'; '.join(part['contestants']['ilp']['mirs'])}."
    yield from _goals(part)


def _goals(part: Part) -> Iterator[str]:
    count = len(part["queries"])
    faster, smaller = gain(part, "ilp"), saved(part, "ilp")
    if faster is not None and count == 5:
        yield ""
        yield f"Goal: throughput of ilp at least {LEAST_GAIN} × independent: {_met(faster, LEAST_GAIN)}."
    if smaller is not None and count in LEAST_SAVED:
        yield ""
        least = LEAST_SAVED[count]
        yield f"Goal: state of ilp at most 1/{least} of independent: {_met(smaller, least)}."


def _met(found: float, least: float) -> str:
    return f"{found:.1f} ({'met' if found >= least else 'missed'})"


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def draw(document: Document, figure: Figure) -> None:
    """Draw throughput, state and seconds per epoch of all contestants, a row per part."""
    parts = document["parts"]
    figure.set_size_inches(14, 3.6 * len(parts))
    grid: Any = figure.subplots(len(parts), 3, squeeze=False, width_ratios=(1, 1, 2))
    for (rates, states, epochs), part in zip(grid, parts, strict=True):
        done = {who: of for who, of in part["contestants"].items() if of.get("failure") is None}
        _bars(rates, {who: part["rows_in"] / of["seconds"] / 1000 for who, of in done.items()})
        rates.set_title(f"{part['title']}: 1,000 rows/s", fontsize=10)
        _bars(states, {who: of["state_bytes"] / 2**20 for who, of in done.items()})
        states.set_title("state after the last epoch, MiB", fontsize=10)
        for who, of in done.items():
            epochs.plot(range(len(of["epochs"])), of["epochs"], "o-", ms=3, color=COLOURS[who], label=NAMES[who])
        epochs.set_title("seconds per epoch", fontsize=10)
        epochs.set_xlabel("epoch")
        epochs.set_ylim(bottom=0)
        epochs.legend(fontsize=8)
    figure.suptitle("sharing: many multi-way joins over TPC-H (paper 001, Figure 7)")


def _bars(axes: Axes, heights: dict[str, float]) -> None:
    bars = axes.bar(range(len(heights)), list(heights.values()), color=[COLOURS[who] for who in heights])
    axes.bar_label(bars, fmt="{:,.0f}", fontsize=8)
    axes.set_xticks(range(len(heights)), list(heights), rotation=30, fontsize=8)


REPORT = Report(how, lines, draw)
