"""Tables and plots of the benchmark `adhoc`, beside its goals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from benchmarks.report import Document, Part, Report, table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = {"program": "#0b6e4f", "requests": "#3b6ea5"}


def how(document: Document) -> str:
    """What was measured, and how."""
    return (
        "Queries of paper 004's generator come to a running engine at a steady rate, and the oldest go (SC2).  There "
        'is an epoch per second, or as fast as they follow; results are dropped (noop), streams `keep="all"`.'
    )


def lines(part: Part, document: Document) -> Iterator[str]:
    """The table of one part."""
    goal = part["goal"]
    yield (
        f"Goal at 10 requests per second: {goal['share']:.0%} live in the next epoch that begins after they were made, "
        f"and a sender waits at most the running epoch and {1e3 * goal['slack_seconds']:.0f} ms."
    )
    yield ""
    columns = (
        "who",
        "requests/s",
        "requests",
        "in the next epoch",
        "in time",
        "epochs late, at most",
        "wait, median s",
        "wait, 95 % s",
        "epoch, median s",
        "admission, median ms",
        "restarts",
    )
    yield from table(columns, [_row(figure) for figure in part["figures"]])


def _row(figure: Part) -> tuple[str, ...]:
    if "in_next" not in figure:
        return (figure["who"], f"{figure['per_second']:g}", *["failed"] * 9)
    admission = figure["admission_median"]
    return (
        figure["who"],
        f"{figure['per_second']:g}",
        str(figure["requests"]),
        f"{figure['in_next']:.1%}",
        f"{figure['in_time']:.1%}",
        str(figure["epochs_late"]),
        f"{figure['wait_median']:.3f}",
        f"{figure['wait_95']:.3f}",
        "–" if figure["epoch_median"] is None else f"{figure['epoch_median']:.3f}",
        "–" if admission is None else f"{1e3 * admission:.1f}",
        str(figure["restarts"]),
    )


def draw(document: Document, figure: Figure) -> None:
    """Waits by rate."""
    figure.set_size_inches(6, 4)
    axes = figure.subplots()
    for part in document["parts"]:
        for who, colour in COLOURS.items():
            points = [f for f in part["figures"] if f["who"] == who and "wait_95" in f]
            if points:
                rates = [f["per_second"] for f in points]
                axes.plot(rates, [f["wait_95"] for f in points], "o-", color=colour, label=f"{who}, 95 %")
                axes.plot(rates, [f["wait_median"] for f in points], "o:", color=colour, label=f"{who}, median")
    axes.set_xlabel("requests per second")
    axes.set_ylabel("seconds until live")
    axes.set_ylim(bottom=0)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()


REPORT = Report(how, lines, draw)
