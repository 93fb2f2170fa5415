"""Tables and plots of the benchmark `sets`, beside the figures of paper 004 and the goals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from benchmarks.report import Document, Part, Report, table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_LOOKUPS = 1.05
"""With 100 queries: lookups over those of one unfiltered query per join structure, at most."""
MOST_SECONDS = 1.2
"""The same of seconds, result rows set aside."""
LEAST_GAIN = 40.0
"""Overall data throughput of 100 queries over that of one, at least."""
GOAL_QUERIES = 100
COLOURS = {"shared": "#0b6e4f", "widest": "#7a7a7a", "alone": "#b5541c"}
LABELS = {
    "shared": "all in one engine",
    "widest": "one unfiltered query per structure",
    "alone": "one tree per query",
}


def how(document: Document) -> str:
    """What was measured, and how."""
    return (
        "Queries of paper 004's generator, all registered before the start: six attributes of 0..500, a selection per "
        "stream, windows of 1 to 3 s, 50 % similarity.  Results are dropped (noop), and the number of results of every "
        "query is compared with a plain count."
    )


def over(figure: Mapping[str, Any], who: str, base: str, measure: str) -> float | None:
    """A figure of one contestant over that of another; None where one was not measured.

    >>> over({"shared": {"lookups": 3.0}, "widest": {"lookups": 2.0}}, "shared", "widest", "lookups")
    1.5
    """
    mine, theirs = figure[who], figure[base]
    return mine[measure] / theirs[measure] if mine and theirs and theirs[measure] else None


def gain(part: Part, queries: int) -> float | None:
    """Overall data throughput of so many queries over that of one."""
    found = {figure["queries"]: figure["throughput"] for figure in part["figures"]}
    return found[queries] / found[1] if found.get(queries) and found.get(1) else None


def lines(part: Part, document: Document) -> Iterator[str]:
    """The tables of one part."""
    if part["wrong"]:
        yield f"**NOT EQUAL**: {part['wrong']} results differ from a plain count."
        yield ""
    kinds = {"work": _work_lines, "throughput": _throughput_lines, "aggregates": _aggregates_lines}
    yield from kinds[part["kind"]](part)


def _work_lines(part: Part) -> Iterator[str]:
    yield (
        f"{part['rows']:,} rows per stream and epoch of a second; sums over {part['epochs']} epoch(s) after "
        f"{part['warm_up']} that fill the windows; {part['repeat']} run(s), the median counts.  One process, one task, "
        "without Spark.  *Widest* is one unfiltered query with the widest window per join structure, *alone* an engine "
        "per query, added up; of more queries than were run, scaled up from those that were."
    )
    yield ""
    columns = (
        "queries",
        "structures",
        "who",
        "lookups",
        "matched rows",
        "tuples",
        "join s",
        "result rows s",
        "results",
    )
    rows = []
    for figure in part["figures"]:
        for who in ("shared", "widest", "alone"):
            if found := figure[who]:
                name = f"alone ({figure['sample']} run)" if who == "alone" else who
                counts = [f"{found[m]:,.0f}" for m in ("lookups", "rows", "tuples")]
                seconds = [f"{found[m]:.2f}" for m in ("join", "materialise")]
                row = (str(figure["queries"]), str(figure["structures"]), name, *counts, *seconds)
                rows.append((*row, f"{found['results']:,.0f}"))
    yield from table(columns, rows, align="rrlrrrrrr")
    yield ""
    ratios = ("queries", "lookups ÷ widest", "join s ÷ widest", "lookups ÷ alone", "join s ÷ alone")
    measures = (("widest", "lookups"), ("widest", "join"), ("alone", "lookups"), ("alone", "join"))
    yield from table(
        ratios,
        [
            (str(f["queries"]), *(_number(over(f, "shared", base, measure), 3) for base, measure in measures))
            for f in part["figures"]
        ],
        align="rrrrr",
    )
    yield ""
    for figure in part["figures"]:
        if figure["queries"] == GOAL_QUERIES:
            asked, spent = (over(figure, "shared", "widest", m) for m in ("lookups", "join"))
            yield (
                f"Goals with {GOAL_QUERIES} queries: lookups at most {MOST_LOOKUPS} × ({_met(asked, MOST_LOOKUPS)}), "
                f"seconds at most {MOST_SECONDS} × ({_met(spent, MOST_SECONDS)}) those of *widest*."
            )


def _throughput_lines(part: Part) -> Iterator[str]:
    yield (
        f"{part['rows']:,} rows per stream and epoch, two cores, {part['epochs']} epochs after {part['warm_up']}; "
        f"{part['repeat']} run(s) by turns, each in a process of its own; the median epoch counts, from one progress "
        "report to the next.  Overall data throughput is the sum of the rows per second that each query takes in."
    )
    yield ""
    columns = ("queries", "structures", "s per epoch", "rows/s, all queries", "÷ one query", "start s", "results")
    rows = [
        (
            str(f["queries"]),
            str(f["structures"]),
            _number(f["seconds"], 3),
            "failed" if f["throughput"] is None else f"{f['throughput']:,.0f}",
            _number(gain(part, f["queries"]), 1),
            f"{f['registered']:.1f}",
            f"{f['results']:,}",
        )
        for f in part["figures"]
    ]
    yield from table(columns, rows, align="rrrrrrr")
    yield ""
    if (found := gain(part, GOAL_QUERIES)) is not None:
        met = "met" if found >= LEAST_GAIN else "missed"
        yield f"Goal: {GOAL_QUERIES} queries at least {LEAST_GAIN:g} × one query: {found:.1f} × ({met})."
        yield ""
    yield (
        "Paper 004 (Figure 15) shows its figures in a plot only; its text has 2.04 million tuples/s for AJoin and 0.1 "
        "million for Flink, on 4 or 8 nodes of 16 cores, without selections."
    )
    yield ""
    yield "Median seconds of an epoch by step: of Spark's trigger, on the driver, and in tasks:"
    yield ""
    kinds = (("Spark: ", "trigger"), ("", "steps"), ("task: ", "tasks"))
    parts = [{f"{kind}{name}": s for kind, of in kinds for name, s in f[of].items()} for f in part["figures"]]
    names = list(dict.fromkeys(name for steps in parts for name in steps))
    yield from table(
        ("queries", *names),
        [
            (str(f["queries"]), *(f"{steps.get(name, 0.0):.3f}" for name in names))
            for f, steps in zip(part["figures"], parts, strict=True)
        ],
    )


def _aggregates_lines(part: Part) -> Iterator[str]:
    yield (
        f"Aggregates over one join, {part['groups']} groups, other selections and windows; {part['rows']:,} rows per "
        f"stream and epoch, two cores, {part['epochs']} epochs after {part['warm_up']}; {part['repeat']} run(s) by "
        "turns, each in a process of its own; the median epoch counts.  *Answers* are made beside the next epoch, by "
        "as many jobs as there are finishing plans: jobs are all of Spark's, per epoch.  Last answers compared with "
        "DuckDB's."
    )
    yield ""
    columns = ("queries", "who", "s per epoch", "÷ one query", "answers s", "partial groups", "files", "jobs")
    rows = []
    first = next((f for f in part["figures"] if f["queries"] == 1), None)
    for figure in part["figures"]:
        for who in ("together", "independent"):
            if found := figure[who]:
                one = None if first is None or not first[who] else found["seconds"] / first[who]["seconds"]
                counts = [f"{found[measure]:,.1f}" for measure in ("groups", "files", "jobs")]
                seconds = [_number(found["seconds"], 3), _number(one, 2), _number(found["answers"], 3)]
                rows.append((str(figure["queries"]), who, *seconds, *counts))
    yield from table(columns, rows, align="rlrrrrrr")


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _met(value: float | None, most: float) -> str:
    if value is None:
        return "not measured"
    return f"{value:.3f}, {'met' if value <= most else 'missed'}"


def draw(document: Document, figure: Figure) -> None:
    """Draw lookups and seconds of work, and throughput, over the number of queries; a row per part."""
    parts = document["parts"]
    figure.set_size_inches(11, 4 * len(parts))
    grid: Any = figure.subplots(len(parts), 2, squeeze=False)
    for (left, right), part in zip(grid, parts, strict=True):
        if part["kind"] == "work":
            _draw_work(left, part, "lookups", "lookups")
            _draw_work(right, part, "join", "seconds of join, result rows set aside")
        elif part["kind"] == "aggregates":
            _draw_aggregates(
                left, part, "seconds", f"aggregates: seconds per epoch of {part['rows']:,} rows per stream"
            )
            _draw_aggregates(right, part, "groups", "aggregates: partial groups written per epoch")
        else:
            _draw_throughput(left, right, part)
    figure.suptitle("sets: many queries in one engine (paper 004's generator)")


def _draw_work(axes: Axes, part: Part, measure: str, label: str) -> None:
    for who, colour in COLOURS.items():
        found = [(f["queries"], f[who][measure]) for f in part["figures"] if f[who]]
        axes.plot([q for q, _ in found], [v for _, v in found], "o-", color=colour, label=LABELS[who])
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("queries")
    axes.set_title(f"{part['ways']}-way: {label}", fontsize=10)
    axes.legend(fontsize=8)


def _draw_aggregates(axes: Axes, part: Part, measure: str, label: str) -> None:
    for who, colour in (("together", COLOURS["shared"]), ("independent", COLOURS["alone"])):
        found = [(f["queries"], f[who][measure]) for f in part["figures"] if f[who]]
        axes.plot([q for q, _ in found], [v for _, v in found], "o-", color=colour, label=who)
    axes.set_xscale("log")
    axes.set_ylim(0, None)
    axes.set_xlabel("queries")
    axes.set_title(label, fontsize=10)
    axes.legend(fontsize=8)


def _draw_throughput(left: Axes, right: Axes, part: Part) -> None:
    done = [f for f in part["figures"] if f["throughput"] is not None]
    counts = [f["queries"] for f in done]
    left.plot(counts, [f["throughput"] for f in done], "o-", color=COLOURS["shared"], label="measured")
    if done and done[0]["queries"] == 1:
        at_best = [f["throughput"] for f in done[:1]]
        left.plot(counts, [at_best[0] * count for count in counts], "--", color="#999999", label="same time for all")
    left.set_yscale("log")
    left.set_title(f"{part['ways']}-way: overall data throughput, rows/s", fontsize=10)
    left.legend(fontsize=8)
    right.plot(counts, [f["seconds"] for f in done], "o-", color=COLOURS["shared"])
    right.set_ylim(0, None)
    right.set_title(f"{part['ways']}-way: seconds per epoch of {part['rows']:,} rows per stream", fontsize=10)
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set_xlabel("queries")


REPORT = Report(how, lines, draw)
