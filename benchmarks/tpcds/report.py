"""Tables and plots of the benchmark `tpcds`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, linear_regression
from typing import TYPE_CHECKING, Any

from benchmarks.report import COLOURS, Document, Part, Report, size, table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAMES = {
    "plait": "Plait",
    "spark": "Spark joins, in-memory state",
    "spark-rocksdb": "Spark joins, RocksDB state",
    "spark-tuned": "Spark joins, in-memory state, Plait's session",
    "spark-stateless": "Spark, no join (empty trigger)",
    "duckdb": "DuckDB, one batch (floor)",
}
TRIGGER_PARTS = ("latestOffset", "getBatch", "queryPlanning", "walCommit", "addBatch", "commitOffsets")


def how(document: Document) -> str:
    """What was measured, and how."""
    setup = document["setup"]
    return (
        f"Scale factor {setup['sf']:g}, {setup['epochs']} epochs (one file per table each), {setup['repeat']} timed "
        f"run(s) each (median), contestants by turns, each run in a process of its own on 2 cores with a Java heap "
        f"of at most {setup['memory']}, after a warm-up run over a few rows.  Seconds run from defining the query to "
        "its end, with the session already up.  Streaming contestants drop their rows (noop).  Memory is the peak of "
        "summed PSS of the whole process tree, warm-up included.  "
        + ("Equal: row count and checksum as DuckDB's." if setup["verify"] else "Equal: row count as DuckDB's.")
    )


def lines(part: Part, document: Document) -> list[str]:
    """The tables of one part."""
    return _fixed_lines(part) if part["part"] == "fixed" else _race_lines(part)


def _race_lines(part: Part) -> list[str]:
    contestants = part["contestants"]
    rows = [_race_row(who, c, contestants.get("plait", {}).get("seconds")) for who, c in contestants.items()]
    columns = ("contestant", "seconds", "range", "× Plait", "peak memory", "equal")
    found = [f"{part['expected']['rows']:,} rows out.", "", *table(columns, rows, "lrrrrl"), "", verdict(contestants)]
    share = part.get("optimiser_share")
    if share is not None:
        found.append(f"Statistics and planning take {100 * share:.2f} % of Plait's epochs.")
    growth = log_growth(part.get("curve", ()))
    return [*found, growth] if growth else found


def _race_row(who: str, found: Mapping[str, Any], plait: float | None) -> tuple[str, ...]:
    peak = size(found["peak_bytes"])
    if found["seconds"] is None:
        return NAMES[who], "failed", "", "", peak, found["failure"]
    spread = f"{min(found['all_seconds']):.2f}–{max(found['all_seconds']):.2f}"
    against = f"{found['seconds'] / plait:.2f}" if plait else ""
    return NAMES[who], f"{found['seconds']:.2f}", spread, against, peak, "yes" if found["equal"] else "**NO**"


def verdict(contestants: Mapping[str, Mapping[str, Any]]) -> str:
    """How Plait compares with Spark's faster variant, in one sentence.

    >>> verdict({"plait": {"seconds": 2.0}, "spark": {"seconds": 9.0}, "spark-rocksdb": {"seconds": 12.0}})
    "Plait takes 2.00 s, Spark's faster variant (Spark joins, in-memory state) 9.00 s: 4.50× as long."
    """
    own = contestants.get("plait", {}).get("seconds")
    others = {w: c["seconds"] for w, c in contestants.items() if w.startswith("spark") and c["seconds"] is not None}
    if own is None or not others:
        return "No comparison: Plait or both Spark variants were not measured."
    best = min(others, key=lambda who: others[who])
    unequal = [NAMES[who] for who in ("plait", best) if not contestants[who].get("equal", True)]
    return (
        f"Plait takes {own:.2f} s, Spark's faster variant ({NAMES[best]}) {others[best]:.2f} s: "
        f"{others[best] / own:.2f}× as long."
        + (f"  **Not a fair comparison: the results of {' and '.join(unequal)} are not equal.**" if unequal else "")
    )


def log_growth(curve: Sequence[Mapping[str, float]]) -> str | None:
    """How seconds per epoch grow: least squares of a + b·log₂(state rows), and the second half over the first.

    >>> log_growth([{"state_rows": 2.0**i, "without_output": 0.5 + 0.01 * i} for i in range(1, 9)])
    'Seconds per epoch, output excluded: 0.500 + 0.010·log₂(state rows); second half of the epochs 1.08× the first.'
    """
    points = [(math.log2(p["state_rows"]), p["without_output"]) for p in curve if p["state_rows"] > 0]
    if len(points) < 4:
        return None
    slope, start = linear_regression([x for x, _ in points], [y for _, y in points])
    half = len(points) // 2
    ratio = fmean(y for _, y in points[half:]) / fmean(y for _, y in points[:half])
    return (
        f"Seconds per epoch, output excluded: {start:.3f} {'+' if slope >= 0 else '−'} {abs(slope):.3f}·"
        "log₂(state rows); "
        f"second half of the epochs {ratio:.2f}× the first."
    )


def _fixed_lines(part: Part) -> list[str]:
    triggers = part["triggers"]
    who = list(triggers)
    rows = [(name, *(_ms(triggers[w].get(name, 0.0)) for w in who)) for name in (*TRIGGER_PARTS, "triggerExecution")]
    found = [
        f"Four file sources, {part['rows_per_epoch']} rows per epoch; medians of the last epochs of {part['epochs']}, "
        "in milliseconds.  Parts are Spark's own names; `addBatch` is the job (all of Plait's epoch is in it).",
        "",
        *table(("part", *(NAMES[w] for w in who)), rows),
    ]
    for where, steps in part["steps"].items():
        told = ", ".join(f"{step} {_ms(seconds)}" for step, seconds in steps.items())
        found += ["", f"Inside Plait's epoch, {'on the driver' if where == 'driver' else 'summed over tasks'}: {told}."]
    found += [f"\n{NAMES[w]} failed: {why}" for w, why in part["failures"].items()]
    return found


def draw(document: Document, figure: Figure) -> None:
    """Draw one column per part: seconds as bars, or the parts of a trigger stacked; below, the curve of the epochs."""
    parts = document["parts"]
    figure.set_size_inches(5.2 * len(parts), 7.4)
    grid: Any = figure.subplots(2, len(parts), squeeze=False)
    for column, part in enumerate(parts):
        if part["part"] == "fixed":
            _draw_fixed(grid[0][column], part)
            grid[1][column].set_axis_off()
        else:
            _draw_bars(grid[0][column], part)
            _draw_curve(grid[1][column], part["curve"])
    setup = document["setup"]
    figure.suptitle(f"{document['benchmark']}, SF {setup['sf']:g}, {setup['epochs']} epochs")


def _draw_bars(axes: Axes, part: Part) -> None:
    shown = [(who, c["seconds"]) for who, c in part["contestants"].items() if c["seconds"] is not None]
    names = [NAMES[who].replace(", ", "\n") for who, _ in shown]
    bars = axes.barh(names, [s for _, s in shown], color=[COLOURS[who] for who, _ in shown])
    axes.bar_label(bars, labels=[f" {s:.2f} s" for _, s in shown])
    axes.set_title(f"{part['title']}\n{part['expected']['rows']:,} rows out", fontsize=10)
    axes.set_xlabel("seconds")
    axes.margins(x=0.25)
    axes.invert_yaxis()


def _draw_curve(axes: Axes, curve: Sequence[Mapping[str, float]]) -> None:
    points = [p for p in curve if p["state_rows"] > 0]
    rows = [p["state_rows"] for p in points]
    axes.plot(rows, [p["seconds"] for p in points], ".:", color="#999999", label="whole epoch")
    axes.plot(rows, [p["without_output"] for p in points], "o-", color=COLOURS["plait"], label="output excluded")
    axes.set_xscale("log")
    # The minor ticks' labels overlap within one decade.
    axes.tick_params(axis="x", which="minor", labelbottom=False)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("state rows (log scale: a straight line is logarithmic growth)")
    axes.set_ylabel("seconds per epoch")
    axes.set_title("Plait: seconds per epoch against state", fontsize=10)
    axes.legend()


def _draw_fixed(axes: Axes, part: Part) -> None:
    who = list(part["triggers"])
    left = [0.0] * len(who)
    names = [NAMES[w].replace(", ", "\n").replace(" (", "\n(") for w in who]
    for name in TRIGGER_PARTS:
        values = [part["triggers"][w].get(name, 0.0) * 1000 for w in who]
        axes.barh(names, values, left=left, label=name)
        left = [a + b for a, b in zip(left, values, strict=True)]
    axes.set_title(f"{part['title']}\n{part['rows_per_epoch']} rows, 4 sources", fontsize=10)
    axes.set_xlabel("milliseconds per trigger")
    axes.legend(fontsize=8)
    axes.invert_yaxis()


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f}"


REPORT = Report(how, lines, draw)
