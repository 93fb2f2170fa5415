"""Tables and plots of the benchmark `drivers`, beside the figures of paper 003."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.report import Document, Part, Report, grouped_bars, table
from plait.config import DRIVER_POLICIES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MEASURES = ("time", "work", "early", "early_work")
COLOURS = {
    "registration": "#bbbbbb",
    "timestamp": "#555555",
    "round_robin": "#c9a227",
    "consumption_rate": "#b5541c",
    "initial_output_size": "#0b6e4f",
    "output_rate": "#3b6ea5",
}

_PAPER_COLUMNS = ("round_robin", "timestamp", "consumption_rate", "initial_output_size", "output_rate")
_NONE = (None, None)
_TABLE_4: dict[str, tuple[tuple[float | None, float | None], ...]] = {
    "I": ((0.985, 1.012), (1, 1), _NONE, (0.854, 0.791), (0.903, 0.769)),
    "II": ((1.002, 1.002), (1, 1), _NONE, (0.859, 0.773), (0.840, 0.777)),
    "III": ((1.003, 1.014), (1, 1), _NONE, (0.871, 0.811), (0.884, 0.815)),
    "IV": ((0.966, 0.997), (1, 1), _NONE, (0.744, 0.801), (0.755, 0.789)),
    "V": ((0.948, 0.927), (1, 1), (0.863, 0.808), (0.882, 0.5), (0.906, 0.851)),
    "VI": ((1.128, 0.926), (1, 1), (0.785, 0.728), (0.785, 0.611), (0.956, 0.819)),
}
_TABLE_5: dict[str, tuple[tuple[float | None, float | None], ...]] = {
    "I": ((0.5, 0.4), (0.45, 0.45), _NONE, (0.85, 0.85), (0.85, 0.85)),
    "II": ((0.45, 0.4), (0.5, 0.45), _NONE, (0.85, 0.85), (0.85, 0.85)),
    "III": ((0.5, 0.45), (0.5, 0.45), _NONE, (0.8, 0.8), (0.8, 0.8)),
    "IV": ((0.55, 0.5), (0.5, 0.45), _NONE, (0.65, 0.6), (0.6, 0.6)),
    "V": ((0.85, 0.9), (0.5, 0.45), (0.1, 0.05), (0.95, 1), (0.9, 0.95)),
    "VI": ((0.65, 0.55), (0.5, 0.45), (0.4, 0.35), (0.8, 0.95), (0.7, 0.7)),
}


def paper(measure: str, dataset: str, policy: str, which: int) -> float | None:
    """The paper's figure for short (0) or long (1) batches; None where it has none.

    >>> paper("time", "V", "initial_output_size", 1), paper("early", "I", "registration", 0)
    (0.5, None)
    """
    table = _TABLE_4 if measure in ("time", "work") else _TABLE_5
    return table[dataset][_PAPER_COLUMNS.index(policy)][which] if policy in _PAPER_COLUMNS else None


def ranking(part: Part) -> list[tuple[str, dict[str, float]]]:
    """Policies, least work first, with their averages over datasets, batch lengths and probes."""
    averages = [probe["average"] for probe in part["probes"].values()]
    mean = {
        policy: {m: statistics.fmean(v for average in averages for v in average[policy][m]) for m in MEASURES}
        for policy in DRIVER_POLICIES
    }
    return sorted(mean.items(), key=lambda item: (item[1]["work"], -item[1]["early_work"]))


def how(document: Document) -> str:
    """What was measured, and how."""
    return (
        "Every driver policy on the six datasets of paper 003, through the engine's own tasks, state and commit in one "
        "process, without Spark."
    )


def lines(part: Part, document: Document) -> Iterator[str]:
    """All figures, the paper's beside them."""
    short, long = part["batches"]
    rows = part["rows"]
    yield (
        f"The six datasets of paper 003 at {rows / 1e6:g} of its size: I–IV three streams of {rows:,} tuples, V and VI "
        f"{rows // 100:,}, {rows // 10:,} and {rows:,}, every ratio and every number of results per tuple as in its "
        f"Tables 2 and 3 (where |S2| = 10⁹ in V and VI must be 10⁵: only that agrees with its σ).  {short} short or "
        f"{long} long batches; the first fifth is left out.  All policies run side by side, batch by batch; "
        f"{part['repeat'][0]} run(s) with short and {part['repeat'][1]} with long batches, of which each batch "
        "counts with its median.  "
        "Every batch of every run gave as many results as a plain count."
    )
    yield ""
    yield (
        "A batch is one epoch here, and a stream drives with all its new tuples at once.  So `timestamp` and "
        "`round_robin` rank whole streams per batch (oldest latest tuple first; the first place goes round), where the "
        "paper interleaves single tuples; what the paper gains by not interleaving, all our policies have already.  "
        "And the keys of a driver are looked up together, once each, so the number of lookups hardly depends on who is "
        "first.  `registration` is S1, S2, S3 for ever.  The paper does not give `consumption_rate` for I–IV, where "
        "its σ are equal."
    )
    yield ""
    yield (
        "In seconds, whoever drives first also opens the files that the batch before has written, which with short "
        "batches is much of the time; counted work has no such part.  Where counted work is equal within 1 %, seconds "
        f"still scatter by {100 * _scatter(part):.0f} % (standard deviation): smaller differences are noise."
    )
    for probe, found in part["probes"].items():
        prices = found["coefficients"]
        yield ""
        yield (
            "### Iterative probing, as in the paper" if probe == "iterative" else "### Factorised probing, the default"
        )
        yield ""
        yield (
            "Prices of counted work, measured over all policies with long batches: "
            f"α_q {prices['alpha_q']:.1f} ns per run visited (each doubling {prices['rho']:.2f} of that), "
            f"α_m {prices['alpha_m']:.1f} ns per tuple."
        )
        yield ""
        yield "Running time over that of `timestamp`: seconds / counted work (paper, Table 4)"
        yield ""
        yield from _grid(found, "time", "work", part["batches"])
        yield ""
        yield "Fraction of results at half of `timestamp`'s time: by seconds / by counted work (paper, Table 5)"
        yield ""
        yield from _grid(found, "early", "early_work", part["batches"])
    yield ""
    yield "### Which is best"
    yield ""
    places = ranking(part)
    early = max(places, key=lambda item: item[1]["early_work"])[0]
    yield (
        f"Averages over datasets, batch lengths and both probes: `{places[0][0]}` needs the least work, `{early}` has "
        "the most results at half time.  Plait hands results over when a batch is committed, so within a batch early "
        "results reach nobody earlier: work and time decide."
    )
    yield ""
    columns = ("policy", "work", "time", "results at half time: by work", "by seconds")
    rows = [
        (policy, f"{m['work']:.3f}", f"{m['time']:.3f}", f"{m['early_work']:.2f}", f"{m['early']:.2f}")
        for policy, m in places
    ]
    yield from table(columns, rows)


def _scatter(part: Part) -> float:
    """Standard deviation of relative seconds where the work is equal."""
    everything = [f["policies"].items() for probe in part["probes"].values() for f in probe["figures"]]
    ratios = [one["time"] for policies in everything for policy, one in policies if policy != "timestamp"]
    works = [one["work"] for policies in everything for policy, one in policies if policy != "timestamp"]
    same = [ratio for ratio, work in zip(ratios, works, strict=True) if abs(work - 1) <= 0.01]
    return statistics.pstdev(same) if same else 0.0


def _grid(found: Mapping[str, Any], by_time: str, by_work: str, batches: Sequence[int]) -> list[str]:
    rows = []
    for figure in found["figures"]:
        which, dataset = figure["which"], figure["dataset"]
        cells = []
        for policy in DRIVER_POLICIES:
            one = figure["policies"][policy]
            known = paper(by_time, dataset, policy, which)
            cells.append(f"{one[by_time]:.2f} / {one[by_work]:.2f}" + ("" if known is None else f" ({known:.2f})"))
        rows.append((dataset, f"{batches[which]}", *cells))
    for which, count in enumerate(batches):
        cells = []
        for policy in DRIVER_POLICIES:
            of_all = [v for d in _TABLE_4 if (v := paper(by_time, d, policy, which)) is not None]
            own = found["average"][policy]
            cells.append(
                f"**{own[by_time][which]:.2f} / {own[by_work][which]:.2f}**"
                + (f" ({statistics.fmean(of_all):.2f})" if of_all else "")
            )
        rows.append(("average", f"{count}", *cells))
    return table(("dataset", "batches", *DRIVER_POLICIES), rows)


def draw(document: Document, figure: Figure) -> None:
    """Draw counted work, seconds and early results per probe and length of batches, the paper's figures as ticks."""
    (part,) = document["parts"]
    figure.set_size_inches(17, 15)
    titles = {
        "work": "counted work ÷ timestamp's",
        "time": "seconds of probing ÷ timestamp's",
        "early_work": "results at half of timestamp's work",
    }
    lines = [(probe, which) for probe in part["probes"] for which in (0, 1)]
    grid: Any = figure.subplots(len(lines), len(titles), squeeze=False)
    for row, (probe, which) in zip(grid, lines, strict=True):
        chosen = [f for f in part["probes"][probe]["figures"] if f["which"] == which]
        for axes, (measure, title) in zip(row, titles.items(), strict=True):
            _draw_bars(axes, chosen, measure, which)
            axes.set_title(f"{probe}, {part['batches'][which]} batches: {title}", fontsize=10)
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    figure.suptitle(f"drivers: {part['title']}, |S3| = {part['rows']:,}; datasets I to VI")


def _draw_bars(axes: Axes, figures: Sequence[Mapping[str, Any]], measure: str, which: int) -> None:
    heights = {policy: [f["policies"][policy][measure] for f in figures] for policy in DRIVER_POLICIES}
    ticks: list[tuple[float, float]] = []
    for policy, bars in grouped_bars(axes, [f["dataset"] for f in figures], heights, COLOURS).items():
        for bar, figure in zip(bars, figures, strict=True):
            known = paper(measure, figure["dataset"], policy, which)
            if known is not None:
                ticks.append((bar.get_x() + bar.get_width() / 2, known))
    axes.plot([x for x, _ in ticks], [y for _, y in ticks], "_", color="black", markersize=6, label="paper 003")
    if measure in ("time", "work"):
        axes.axhline(1, color="#999999", linewidth=0.8)
        axes.set_ylim(0.4, None)
    else:
        axes.set_ylim(0, 1.05)


REPORT = Report(how, lines, draw)
