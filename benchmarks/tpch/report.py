"""Table and plots of the benchmark `tpch`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from benchmarks.report import COLOURS, Document, Part, Report, grouped_bars, table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAMES = {"plait": "Plait", "spark": "Spark", "spark-tuned": "Spark, Plait's session"}
COLUMNS = (
    "query",
    "Plait s",
    "Spark s",
    "Spark / Plait",
    "last epoch: Plait s",
    "Spark s",
    "Plait rows/s",
    "equal",
    "Plait keeps",
    "Spark runs",
)
TUNED_COLUMNS = ("Spark s, Plait’s session", "/ Plait")


def how(document: Document) -> str:
    """What was measured, and how."""
    setup = document["setup"]
    checked = ", ".join(str(epoch + 1) for epoch in setup["checked"])
    return (
        f"TPC-H at scale factor {setup['sf']:g}, all eight tables as streams, shuffled, {setup['epochs']} epochs; "
        f"after every epoch the whole answer is collected.  {setup['repeat']} round(s), Plait and Spark by turns, "
        "medians.  Spark runs its own streaming plan where it accepts the query, otherwise the batch query over all "
        "files so far, again after every epoch.  Seconds run from starting the query to its last answer, in a session "
        f"that has run the query once over one epoch.  Equal: answers after epochs {checked} as DuckDB's."
    )


def lines(part: Part, document: Document) -> Iterator[str]:
    """The table, one row per query; Spark in Plait's session has columns of its own if it ran."""
    tuned = "spark-tuned" in document["setup"]["who"]
    rows = []
    for query, of in part["queries"].items():
        plait, spark = of.get("plait"), of.get("spark")
        row = (
            f"Q{query}",
            _seconds(plait),
            _seconds(spark),
            _ratio(plait, spark),
            _last(plait),
            _last(spark),
            f"{part['rows'][query] / plait['seconds'] if plait else 0:,.0f}",
            "yes" if all(one["equal"] for one in of.values()) else "NO",
            plait["how"] if plait else "",
            spark["how"] if spark else "",
        )
        rows.append((*row, _seconds(of["spark-tuned"]), _ratio(plait, of["spark-tuned"])) if tuned else row)
    yield from table((*COLUMNS, *TUNED_COLUMNS), rows, "lrrrrrrlllrr") if tuned else table(COLUMNS, rows, "lrrrrrrlll")


def _seconds(one: Mapping[str, Any] | None) -> str:
    return "" if one is None else f"{one['seconds']:.1f}"


def _last(one: Mapping[str, Any] | None) -> str:
    return "" if one is None or not one["epochs"] else f"{one['epochs'][-1]:.2f}"


def _ratio(plait: Mapping[str, Any] | None, spark: Mapping[str, Any] | None) -> str:
    return "" if plait is None or spark is None else f"{spark['seconds'] / plait['seconds']:.2f}×"


def draw(document: Document, figure: Figure) -> None:
    """Draw seconds per query side by side, and seconds per epoch."""
    (part,) = document["parts"]
    queries = list(part["queries"])
    who = [name for name in NAMES if any(name in of for of in part["queries"].values())]
    figure.set_size_inches(12, 4.5)
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    seconds = {NAMES[name]: [part["queries"][q][name]["seconds"] for q in queries] for name in who}
    grouped_bars(left, [f"Q{q}" for q in queries], seconds, {NAMES[name]: COLOURS[name] for name in who})
    for name in who:
        for query in queries:
            epochs = part["queries"][query][name]["epochs"]
            label = NAMES[name] if query == queries[0] else None
            right.plot(range(1, len(epochs) + 1), epochs, color=COLOURS[name], alpha=0.5, lw=1.2, label=label)
    left.set_ylabel("seconds, all epochs")
    left.set_title(part["title"], fontsize=10)
    left.legend()
    right.set_xlabel("epoch")
    right.set_ylabel("seconds from the last answer to this")
    right.set_title("each line one query", fontsize=10)
    right.set_ylim(bottom=0)
    right.legend()


REPORT = Report(how, lines, draw)
