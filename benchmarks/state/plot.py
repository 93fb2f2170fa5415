"""Plots of the benchmark `state`: output over time, seconds against memory, the soak over its epochs, the sweeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.report import COLOURS, Document, Part, grouped_bars, size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

NAMES = {
    "plait": "Plait",
    "plait-memory": "Plait, state in memory",
    "spark-rocksdb": "Spark joins, RocksDB",
    "spark": "Spark joins, in memory",
}
BACKENDS = {
    "runs": ("Plait's runs", COLOURS["plait"]),
    "memory": ("in memory", COLOURS["plait-memory"]),
    "rocksdb": ("RocksDB", COLOURS["spark-rocksdb"]),
}
KINDS = {"write": "#b5541c", "read": "#3b6ea5", "space": "#0b6e4f"}
GREY = "#999999"
WIDTH = 16.2


def draw(document: Document, figure: Figure) -> None:
    """Draw one band of panels per part."""
    bands = [(part, _panels(part)) for part in document["parts"]]
    heights = [-(-panels // _across(panels)) for _, panels in bands]
    figure.set_size_inches(WIDTH, 4.2 * sum(heights))
    for band, (part, panels) in zip(
        figure.subfigures(len(bands), 1, height_ratios=heights, squeeze=False)[:, 0], bands, strict=True
    ):
        grid = band.subplots(-(-panels // _across(panels)), _across(panels), squeeze=False).ravel()
        for unused in grid[panels:]:
            unused.set_axis_off()
        band.suptitle(part["title"], fontsize=12, fontweight="bold")
        _BANDS[part["part"]](part, grid[:panels], band)


def _panels(part: Part) -> int:
    if part["part"] == "limits":
        return len({run["memory"] for run in part["runs"]}) + 2
    if part["part"] == "backends":
        return 2
    return 4 if part["part"] == "soak" else max(len(part["lines"]), 1)


def _across(panels: int) -> int:
    """The number of panels side by side with which few places stay empty.

    >>> [_across(n) for n in (1, 2, 3, 4, 6, 7)]
    [2, 2, 3, 4, 3, 4]
    """
    return max(2, min(panels, 4 if panels % 4 == 0 or panels % 3 == 1 else 3))


def _limits(part: Part, grid: Sequence[Axes], band: SubFigure) -> None:
    memories = sorted({run["memory"] for run in part["runs"]}, reverse=True)
    for axes, memory in zip(grid, memories, strict=False):
        runs = [r for r in part["runs"] if r["memory"] == memory]
        _outputs([(r, NAMES[r["who"]], COLOURS[r["who"]]) for r in runs], part["expected"], axes)
        share = memory / part["state_bytes"]
        axes.set_title(f"{size(memory)} for {size(part['state_bytes'])} of state ({share:.3g})", fontsize=10)
    _runtimes(part, grid[len(memories)])
    tight = min((r for r in part["runs"] if r["who"] == "plait"), key=lambda r: r["memory"], default=None)
    if tight is not None:
        _factors(tight["epochs"], grid[len(memories) + 1])
        grid[len(memories) + 1].set_title(f"Plait's amplification with {size(tight['memory'])}", fontsize=10)


def _outputs(runs: Sequence[tuple[Mapping[str, Any], str, str]], expected: int, axes: Axes) -> None:
    """Draw the results so far over time, with a cross where a run ended too early."""
    unit, name = (10**6, "million rows out so far") if expected >= 10**6 else (1, "rows out so far")
    longest = 0.0
    for run, label, colour in runs:
        at, counts = output_over_time(run)
        rows = [count / unit for count in counts]
        if run["outcome"] == "stopped":
            at, rows = [*at, run["seconds"]], [*rows, rows[-1]]
        longest = max(longest, at[-1])
        axes.plot(at, rows, color=colour, label=label)
        if run["outcome"] != "finished":
            axes.plot(at[-1:], rows[-1:], "X", color=colour, markersize=9)
            how = f"{run['outcome']}, {len(run['epochs'])} epochs done"
            side = "right" if at[-1] > 0.6 * longest else "left"
            axes.annotate(
                how, (at[-1], rows[-1]), (0, 7), textcoords="offset points", color=colour, ha=side, fontsize=8
            )
    axes.axhline(expected / unit, color=GREY, linestyle=":", linewidth=1)
    axes.set_xlabel("seconds")
    axes.set_ylabel(name)
    axes.set_ylim(0, 1.12 * max(expected, 1) / unit)
    axes.set_xlim(0, 1.08 * longest or 1)
    _legend_below(axes, [line for line in axes.get_lines() if not str(line.get_label()).startswith("_")])


def _runtimes(part: Part, axes: Axes) -> None:
    for who in dict.fromkeys(run["who"] for run in part["runs"]):
        runs = sorted((r for r in part["runs"] if r["who"] == who), key=lambda r: r["memory"])
        colour = COLOURS[who]
        for outcomes, mark in ((("finished",), "o-"), (("stopped",), "^:"), (("killed", "failed"), "X")):
            points = [(r["memory"] / 2**20, r["seconds"]) for r in runs if r["outcome"] in outcomes]
            if points:
                axes.plot(*zip(*points, strict=True), mark, color=colour, ms=9 if mark == "X" else 6)
    axes.axhline(part["ample_seconds"], color=GREY, linestyle=":", linewidth=1, label="Plait, no limit")
    axes.axhline(2 * part["ample_seconds"], color=GREY, linewidth=1, label="twice that")
    axes.axvline(part["state_bytes"] / 2**20, color=GREY, linestyle="--", linewidth=1, label="size of the state")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted({run["memory"] / 2**20 for run in part["runs"]}))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_title("Seconds against memory (× died, ▲ stopped)", fontsize=10)
    axes.set_xlabel("memory for the state, MiB")
    axes.set_ylabel("seconds")
    _legend_below(axes, [line for line in axes.get_lines() if not str(line.get_label()).startswith("_")])


def output_over_time(run: Mapping[str, Any]) -> tuple[list[float], list[int]]:
    """Seconds and rows out so far at the start and after each epoch.

    >>> output_over_time({"epochs": [{"at": 1.5, "rows_out": 3}, {"at": 2.0, "rows_out": 4}]})
    ([0.0, 1.5, 2.0], [0, 3, 7])
    """
    at, rows = [0.0], [0]
    for epoch in run["epochs"]:
        at.append(epoch["at"])
        rows.append(rows[-1] + epoch["rows_out"])
    return at, rows


def _soak(part: Part, grid: Sequence[Axes], band: SubFigure) -> None:
    epochs = part["run"]["epochs"]
    _epoch_seconds(part, epochs, grid[0])
    _amplification(part, epochs, grid[1])
    _memory(part["run"], grid[2])
    _steps(epochs, grid[3])


def _epoch_seconds(part: Part, epochs: Sequence[Mapping[str, Any]], axes: Axes) -> None:
    numbers = [e["epoch"] for e in epochs]
    axes.plot(numbers, [e["seconds"]["total"] for e in epochs], ".", color=COLOURS["plait"], label="seconds per epoch")
    if part["figures"]:
        median = part["figures"]["median"]
        axes.axhline(median, color=COLOURS["plait"], linewidth=1, label=f"median {median:.2f} s")
        axes.axhline(3 * median, color=COLOURS["plait"], linewidth=1, linestyle=":", label="3 × median")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("epoch")
    axes.set_ylabel("seconds per epoch")
    right = axes.twinx()
    unit, name = _unit(max((e["state_bytes"] for e in epochs), default=1))
    right.plot(numbers, [e["state_bytes"] / unit for e in epochs], color=COLOURS["spark"], label="state")
    limit = part["run"]["limit"]
    # A limit far above the state would press it flat.
    if epochs and epochs[-1]["state_bytes"] > limit / 2:
        right.axhline(limit / unit, color=COLOURS["spark"], linestyle="--", linewidth=1, label="memory limit")
    right.set_ylim(bottom=0)
    right.set_ylabel(f"state, {name}", color=COLOURS["spark"])
    _legend_below(axes, [*axes.get_lines(), *right.get_lines()])
    axes.set_title("Seconds per epoch, and the state", fontsize=10)


def _amplification(part: Part, epochs: Sequence[Mapping[str, Any]], axes: Axes) -> None:
    _factors(epochs, axes)
    disk = [(d["epoch"], d["bytes"] / d["live"]) for d in part["disk"] if d["live"]]
    if disk:
        axes.plot(*zip(*disk, strict=True), ".:", color=GREY, label="checkpoint on disk / live state")
    axes.set_title("Amplification", fontsize=10)
    _legend_below(axes, axes.get_lines())


def _factors(epochs: Sequence[Mapping[str, Any]], axes: Axes) -> None:
    """Draw the amplification of writing, reading and space over the epochs."""
    for kind, colour in KINDS.items():
        points = [
            (e["epoch"], e["state"]["amplification"][kind])
            for e in epochs
            if kind in e.get("state", {}).get("amplification", {})
        ]
        if points:
            axes.plot(*zip(*points, strict=True), color=colour, label=kind)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("epoch")
    _legend_below(axes, axes.get_lines())


def _memory(run: Mapping[str, Any], axes: Axes) -> None:
    looks = [look if isinstance(look, Mapping) else vars(look) for look in run["looks"]]
    at = [look["seconds"] for look in looks]
    held = [look["held"] / 2**20 for look in looks]
    cache = [look["cache"] / 2**20 for look in looks]
    axes.stackplot(at, held, cache, colors=["#0b6e4f", "#bcd9cf"], labels=["processes", "page cache"])
    axes.axhline(run["limit"] / 2**20, color=COLOURS["spark"], linestyle="--", linewidth=1, label="limit")
    axes.set_xlim(left=0)
    axes.set_xlabel("seconds (start of Java included)")
    axes.set_ylabel("MiB")
    axes.set_title("Memory of the process tree", fontsize=10)
    _legend_below(axes, axes.get_legend_handles_labels()[0])


def _steps(epochs: Sequence[Mapping[str, Any]], axes: Axes) -> None:
    """Draw the tasks' seconds by step, smoothed over some epochs so that merges are areas and not needles."""
    kinds = [k for k in ("append", "merge", "probe", "materialise") if any(k in e["task_seconds"] for e in epochs)]
    width = max(len(epochs) // 25, 1)
    groups = [epochs[i : i + width] for i in range(0, len(epochs), width)]
    heights = [[sum(e["task_seconds"].get(kind, 0.0) for e in g) / len(g) for g in groups] for kind in kinds]
    if groups and kinds:
        colours = ["#c9a227", "#b5541c", "#3b6ea5", "#0b6e4f"][: len(kinds)]
        axes.stackplot([g[0]["epoch"] for g in groups], *heights, labels=kinds, colors=colours)
        _legend_below(axes, axes.get_legend_handles_labels()[0])
    axes.set_xlabel("epoch")
    axes.set_ylabel("seconds per epoch, all tasks")
    axes.set_title(f"Task seconds (means of {width} epochs)" if width > 1 else "Task seconds", fontsize=10)


def _sweep(part: Part, grid: Sequence[Axes], band: SubFigure) -> None:
    highest = max(run["seconds"] for runs in part["lines"].values() for run in runs)
    for axes, (name, runs) in zip(grid, part["lines"].items(), strict=True):
        names = [str(run["value"]) for run in runs]
        colours = [COLOURS["plait"] if run["outcome"] == "finished" else GREY for run in runs]
        bars = axes.bar(names, [run["seconds"] for run in runs], color=colours)
        labels = [f"{r['seconds']:.1f}" if r["outcome"] == "finished" else r["outcome"] for r in runs]
        axes.bar_label(bars, labels=labels, fontsize=8)
        axes.set_title(f"{name}, under {size(part['limit'])} in all", fontsize=10)
        axes.set_ylabel("seconds")
        axes.set_ylim(0, 1.12 * highest)


def _legend_below(axes: Axes, shown: Sequence[Any]) -> None:
    """Put the legend below the panel, in which points may lie anywhere."""
    if shown:
        names = [str(one.get_label()) for one in shown]
        axes.legend(shown, names, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncol=2)


def _backends(part: Part, grid: Sequence[Axes], band: SubFigure) -> None:
    ratios = list(dict.fromkeys(run["ratio"] for run in part["runs"]))
    axes = grid[0]
    found = {name: {run["ratio"]: run for run in part["runs"] if run["who"] == name} for name in BACKENDS}
    seconds = {BACKENDS[name][0]: [runs[ratio]["seconds"] for ratio in ratios] for name, runs in found.items()}
    drawn = grouped_bars(axes, ["ample" if r is None else f"{r:g}" for r in ratios], seconds, dict(BACKENDS.values()))
    for runs, (label, bars) in zip(found.values(), drawn.items(), strict=True):
        for bar, ratio in zip(bars, ratios, strict=True):
            if runs[ratio]["outcome"] != "finished":
                bar.set(facecolor="none", edgecolor=dict(BACKENDS.values())[label], hatch="//")
        axes.bar_label(bars, labels=[_bar_text(runs[ratio]) for ratio in ratios], fontsize=8)
    axes.set_xlabel("memory for the state / state (hatched: did not end)")
    axes.set_ylabel("seconds")
    axes.margins(y=0.12)
    _legend_below(axes, axes.get_legend_handles_labels()[0])
    axes.set_title("Seconds", fontsize=10)
    tight = [run for run in part["runs"] if run["ratio"] == ratios[-1]]
    expected = max(run["rows"] for run in part["runs"])
    _outputs([(run, *BACKENDS[run["who"]]) for run in tight], expected, grid[1])
    share = "ample memory" if ratios[-1] is None else f"memory for {ratios[-1]:g} of the state"
    grid[1].set_title(f"Output over time with {share}", fontsize=10)


def _bar_text(run: Mapping[str, Any]) -> str:
    return f"{run['seconds']:.0f}" if run["outcome"] == "finished" else str(run["outcome"])


_BANDS = {"limits": _limits, "soak": _soak, "sweep": _sweep, "backends": _backends}


def _unit(largest: float) -> tuple[int, str]:
    return (2**30, "GiB") if largest >= 2**30 else (2**20, "MiB")
