"""Tables and plots of the benchmark `orders`."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from benchmarks.orders.drift import draw_drift, drift_lines
from benchmarks.orders.rewiring import draw_rewiring, rewiring_lines
from benchmarks.report import Document, Part, Report, grouped_bars, table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TIE = 0.001
"""Contestants whose work differs by less than 0.1 % are equal."""
PAPER = {"fixed": 31.2, "greedy": 20.4, "selectivity_first": 56.1}
"""Paper 000: dpPick's average saving against each, in per cent."""
PAPER_ABLATIONS = {"query_cost_only": 19.5, "match_cost_only": 6.3, "no_smoothing": None}
COLOURS = {
    "fixed": "#7a7a7a",
    "selectivity_first": "#b5541c",
    "greedy": "#3b6ea5",
    "dp_pick": "#0b6e4f",
    "query_cost_only": "#e07a1f",
    "match_cost_only": "#8e6bbf",
    "no_smoothing": "#c9a227",
}


def how(document: Document) -> str:
    """What was measured, and how."""
    setup = document["setup"]
    return (
        f"TPC-DS at scale factor {setup['sf']:g}, {setup['epochs']} epochs, {setup['repeat']} run(s) of each; the "
        "engine's own tasks, state and commit in one process, one task, without Spark.  Work is counted (lookups and "
        "tuples, priced alike for all contestants); seconds are of the whole run."
    )


def lines(part: Part, document: Document) -> Iterator[str]:
    """The tables of one part."""
    if part["part"] == "drift":
        yield from drift_lines(part)
    elif part["part"] == "rewiring":
        yield from rewiring_lines(part)
    elif "runs" in part:
        yield from _compared_lines(part)
    else:
        yield from _swept_lines(part)


def summary(part: Part, who: str = "dp_pick", measure: str = "work") -> dict[str, Any]:
    """How one contestant compares with the others, over all initial orders."""
    runs: Mapping[str, Mapping[str, Mapping[str, float]]] = part["runs"]
    others = [name for name in part["contestants"] if name != who]
    behind = []
    for by_who in runs.values():
        best = min(by_who[name][measure] for name in part["contestants"])
        behind.append(by_who[who][measure] / best - 1)
    return {
        "orders": len(runs),
        # Ties count: from many orders greedy ends with the very same plans, a few epochs earlier or later.
        "least": sum(b <= TIE for b in behind),
        "most_behind": max(behind),
        "saving": {
            name: 100 * statistics.fmean(1 - r[who][measure] / r[name][measure] for r in runs.values())
            for name in others
        },
        "saving_range": {
            name: (
                100 * min(1 - r[who][measure] / r[name][measure] for r in runs.values()),
                100 * max(1 - r[who][measure] / r[name][measure] for r in runs.values()),
            )
            for name in others
        },
    }


def _compared_lines(part: Part) -> Iterator[str]:
    names = part["contestants"]
    prices = part["coefficients"]
    yield (
        f"Prices: α_q {prices['alpha_q']:.1f} ns per run visited (each doubling {prices['rho']:.2f} of that), "
        f"α_m {prices['alpha_m']:.1f} ns per tuple.  Work in seconds."
    )
    yield ""
    columns = ("initial order", *(f"{n} work" for n in names), *(f"{n} s" for n in names))
    rows = [
        (order, *(f"{of[n]['work']:.3f}" for n in names), *(f"{of[n]['seconds']:.2f}" for n in names))
        for order, of in part["runs"].items()
    ]
    yield from table(columns, rows)
    found = summary(part)
    yield ""
    yield (
        f"dp_pick needs the least work from {found['least']} of {found['orders']} initial orders (ties within 0.1 % "
        f"included) and is at most {100 * found['most_behind']:.1f} % behind the best."
    )
    yield ""
    paper = PAPER_ABLATIONS if part["part"] == "ablations" else PAPER
    by_seconds = summary(part, measure="seconds")["saving"]
    by_choice = summary(part, measure="choice")["saving"]
    savings = [
        (
            name,
            f"{saving:.1f} %",
            "{:.1f} to {:.1f} %".format(*found["saving_range"][name]),
            f"{by_choice[name]:.1f} %",
            f"{by_seconds[name]:.1f} %",
            "" if paper.get(name) is None else f"{paper[name]:.1f} %",
        )
        for name, saving in found["saving"].items()
    ]
    measures = ("work, average", "range", "work less making rows", "seconds", "paper 000, seconds")
    yield from table(("dp_pick saves, against", *measures), savings)
    same = statistics.fmean(1 - r["fixed"]["choice"] / r["fixed"]["work"] for r in part["runs"].values())
    yield ""
    yield (
        f"Making the result rows is {100 * same:.0f} % of the fixed orders' work and the same for every order; the "
        "third column leaves it out."
    )
    planning = statistics.median(r["dp_pick"]["planning"] for r in part["runs"].values())
    yield ""
    yield f"Statistics and planning take {100 * planning:.2f} % of dp_pick's run (median; without Spark's fixed cost)."


def _swept_lines(part: Part) -> list[str]:
    swept = part["lines"]
    rows = [
        (f"{point['value']:g}", *(f"{of[i]['work']:.3f} ({of[i]['seconds']:.2f})" for of in swept.values()))
        for i, point in enumerate(next(iter(swept.values())))
    ]
    return table((part["setting"], *(f"{name}: work (seconds)" for name in swept)), rows)


def draw(document: Document, figure: Figure) -> None:
    """Draw one row of panels per part."""
    parts = document["parts"]
    figure.set_size_inches(13, 3.9 * len(parts))
    grid: Any = figure.subplots(len(parts), 1, squeeze=False)
    for (axes,), part in zip(grid, parts, strict=True):
        if part["part"] == "drift":
            draw_drift(part, axes)
        elif part["part"] == "rewiring":
            draw_rewiring(part, axes)
        elif "runs" in part:
            _draw_compared(axes, part)
        else:
            _draw_swept(axes, part)
    setup = document["setup"]
    figure.suptitle(f"orders, SF {setup['sf']:g}, {setup['epochs']} epochs")


def _draw_compared(axes: Axes, part: Part) -> None:
    names, orders = part["contestants"], list(part["runs"])
    grouped_bars(axes, orders, {name: [part["runs"][o][name]["work"] for o in orders] for name in names}, COLOURS)
    axes.tick_params(axis="x", labelrotation=60, labelsize=8)
    axes.set_ylabel("work, seconds")
    axes.set_title(part["title"], fontsize=10)
    axes.legend(fontsize=8, ncols=len(names), loc="upper center")
    axes.set_ylim(top=axes.get_ylim()[1] * 1.15)


def _draw_swept(axes: Axes, part: Part) -> None:
    for name, points in part["lines"].items():
        style = "--" if name.endswith("fixed") else "o-"
        axes.plot([p["value"] for p in points], [p["work"] for p in points], style, label=name)
    axes.set_xlabel(part["setting"])
    axes.set_ylabel("work, seconds")
    axes.set_ylim(bottom=0)
    axes.set_title(part["title"], fontsize=10)
    axes.legend(fontsize=8)


REPORT = Report(how, lines, draw)
