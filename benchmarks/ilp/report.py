"""Tables and plots of the benchmark `ilp`, beside the figures of paper 001."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from benchmarks.report import Document, Part, Report, table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ALONE, TOGETHER, PAPER = "#e07a1f", "#0b6e4f", "#7a7a7a"
PAPER_SAVED = {10: "around 50 %", 100: "15 % at 50 queries"}


def how(document: Document) -> str:
    """What was measured, and how."""
    setup = document["setup"]
    return (
        "Random joins over relations with three attributes, equal rates and selectivities of 1/rate (paper 001, "
        "section VII-C), optimised together: costs of Equation 1, MIRs among the candidates, copies of stores "
        f"allowed, {setup['repeat']} workload(s) per point, HiGHS {setup['highspy']} in one thread.  "
        "Nothing is executed."
    )


def lines(part: Part, document: Document) -> Iterator[str]:
    """The figures of a part."""
    if part["part"] == "speed":
        yield from _speed_lines(part, document)
    else:
        yield from _sharing_lines(part)


def _sharing_lines(part: Part) -> Iterator[str]:
    yield (
        f"Probe cost of the plan for all queries beside the sum of each query's own best plan (paper: "
        f"{PAPER_SAVED[part['relations']]} saved).  Variables: of the form over sets, and of Algorithm 2 as written "
        "with its decorated probe orders."
    )
    yield ""
    columns = ("queries", "alone", "together", "saved", "variables", "Algorithm 2: variables", "orders", "CPU, ms")
    rows = [
        (
            f"{point['queries']}",
            f"{point['alone']:,.0f}",
            f"{point['together']:,.0f}",
            f"{100 * (1 - point['together'] / point['alone']):.0f} %",
            f"{point['variables']:,.0f}",
            f"{point['paper_variables']:,.0f}",
            f"{point['paper_orders']:,.0f}",
            f"{1000 * point['cpu']:.0f}",
        )
        for point in part["points"]
    ]
    yield from table(columns, rows, "rrrrrrrr")


def _speed_lines(part: Part, document: Document) -> Iterator[str]:
    yield (
        'Median CPU and wall seconds from candidates to plan, warm; the making of candidates beside it.  "Above the '
        f'best" compares with the plan of a solve with {document["setup"]["long_seconds"]:g} s for the solver; "proven '
        'within" is what that solve could prove of its own plan.'
    )
    yield ""
    columns = (
        "queries",
        "relations each",
        "CPU, s",
        "wall, s",
        "wanted, s",
        "paper, s",
        "candidates, CPU s",
        "variables",
        "above the best",
        "proven within",
    )
    rows = [
        (
            f"{row['queries']}",
            f"{row['size']}",
            f"{row['cpu']:.3f}",
            f"{row['wall']:.3f}",
            f"{row['goal']:g}",
            "" if row["paper"] is None else f"{row['paper']:g}",
            f"{row['candidates_cpu']:.3f}",
            f"{row['variables']:,.0f}",
            f"{100 * row['above_best']:.2f} %",
            f"{100 * row['above_bound']:.1f} %",
        )
        for row in part["rows"]
    ]
    yield from table(columns, rows, "r" * len(columns))


def draw(document: Document, figure: Figure) -> None:
    """Draw two panels per part, as in the paper's Figure 9."""
    parts = document["parts"]
    figure.set_size_inches(11, 3.6 * len(parts))
    grid: Any = figure.subplots(len(parts), 2, squeeze=False)
    for (left, right), part in zip(grid, parts, strict=True):
        if part["part"] == "speed":
            _draw_seconds(left, part, "cpu", "CPU seconds")
            _draw_seconds(right, part, "wall", "wall seconds")
        else:
            _draw_cost(left, part)
            _draw_sizes(right, part)
    figure.suptitle("ilp: many queries, one plan (paper 001, Figure 9)")


def _draw_cost(axes: Axes, part: Part) -> None:
    counts = [point["queries"] for point in part["points"]]
    axes.plot(counts, [point["alone"] for point in part["points"]], "s-", color=ALONE, label="individual")
    axes.plot(counts, [point["together"] for point in part["points"]], "o-", color=TOGETHER, label="together")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("queries")
    axes.set_ylabel("probe cost")
    axes.set_title(f"{part['relations']} relations: probe cost", fontsize=10)
    axes.legend(fontsize=8)


def _draw_sizes(axes: Axes, part: Part) -> None:
    counts = [point["queries"] for point in part["points"]]
    for name, label, colour in (
        ("variables", "variables, sets", TOGETHER),
        ("paper_variables", "variables, Algorithm 2", PAPER),
        ("paper_orders", "decorated orders, Algorithm 2", ALONE),
    ):
        axes.plot(counts, [point[name] for point in part["points"]], "o-", color=colour, label=label)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("queries")
    axes.set_title(f"{part['relations']} relations: problem size", fontsize=10)
    axes.legend(fontsize=8)


def _draw_seconds(axes: Axes, part: Part, measure: str, label: str) -> None:
    names = [f"{row['queries']} × {row['size']}-way" for row in part["rows"]]
    places = range(len(names))
    axes.bar(places, [row[measure] for row in part["rows"]], 0.6, color=TOGETHER, label="Plait")
    axes.plot(places, [row["goal"] for row in part["rows"]], "_", color="black", markersize=30, label="wanted")
    paper = [(i, row["paper"]) for i, row in enumerate(part["rows"]) if row["paper"] is not None]
    axes.plot([i for i, _ in paper], [s for _, s in paper], "x", color=PAPER, label="paper 001")
    axes.set_yscale("log")
    axes.set_xticks(places, names, fontsize=8)
    axes.set_title(f"candidates to plan: {label}", fontsize=10)
    axes.legend(fontsize=8)


REPORT = Report(how, lines, draw)
