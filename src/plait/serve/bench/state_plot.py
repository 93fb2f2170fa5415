"""state.png: output over time under each limit, seconds against memory, the soak over its epochs, the sweeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import SubFigure

NAMES = {
    "plait": "Plait",
    "plait-memory": "Plait, state in memory",
    "spark-rocksdb": "Spark joins, RocksDB",
    "spark": "Spark joins, in memory",
}
COLOURS = {"plait": "#0b6e4f", "plait-memory": "#3b6ea5", "spark-rocksdb": "#b5541c", "spark": "#e07a1f"}
GREY = "#999999"
WIDTH = 16.2


def plot(document: Mapping[str, Any], file: Path) -> None:
    """One band of panels per part."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    bands = [(part, _panels(part)) for part in document["parts"]]
    heights = [-(-panels // _across(panels)) for _, panels in bands]
    figure = pyplot.figure(figsize=(WIDTH, 4.2 * sum(heights)), layout="constrained")
    for band, (part, panels) in zip(
        figure.subfigures(len(bands), 1, height_ratios=heights, squeeze=False)[:, 0], bands, strict=True
    ):
        grid = band.subplots(-(-panels // _across(panels)), _across(panels), squeeze=False).ravel()
        for unused in grid[panels:]:
            unused.set_axis_off()
        band.suptitle(part["title"], fontsize=12, fontweight="bold")
        _BANDS[part["part"]](part, grid[:panels], band)
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def _panels(part: Mapping[str, Any]) -> int:
    if part["part"] == "limits":
        return len({run["memory"] for run in part["runs"]}) + 1
    if part["part"] == "backends":
        return 1
    return 4 if part["part"] == "soak" else max(len(part["lines"]), 1)


def _across(panels: int) -> int:
    """Panels side by side, so that few places stay empty.

    >>> [_across(n) for n in (1, 2, 3, 4, 6, 7)]
    [2, 2, 3, 4, 3, 4]
    """
    return max(2, min(panels, 4 if panels % 4 == 0 or panels % 3 == 1 else 3))


def _limits(part: Mapping[str, Any], grid: Sequence[Axes], band: SubFigure) -> None:
    memories = sorted({run["memory"] for run in part["runs"]})
    unit, name = (10**6, "million rows out so far") if part["expected"] >= 10**6 else (1, "rows out so far")
    for axes, memory in zip(grid, memories, strict=False):
        longest = 0.0
        for run in (r for r in part["runs"] if r["memory"] == memory):
            at, counts = output_over_time(run)
            rows = [count / unit for count in counts]
            longest = max(longest, at[-1])
            axes.plot(at, rows, color=COLOURS[run["who"]], label=NAMES[run["who"]])
            if run["outcome"] != "finished":
                axes.plot(at[-1:], rows[-1:], "X", color=COLOURS[run["who"]], markersize=10)
                axes.annotate(f" {run['outcome']}", (at[-1], rows[-1]), color=COLOURS[run["who"]], va="bottom")
        axes.axhline(part["expected"] / unit, color=GREY, linestyle=":", linewidth=1)
        axes.set_title(f"{memory / 2**20:,.0f} MiB for {part['state_bytes'] / 2**20:,.0f} MiB of state", fontsize=10)
        axes.set_xlabel("seconds")
        axes.set_ylabel(name)
        axes.set_ylim(0, 1.12 * max(part["expected"], 1) / unit)
        # Room for the word beside the last point.
        axes.set_xlim(0, 1.25 * longest or 1)
    grid[0].legend(fontsize=8, loc="upper left", bbox_to_anchor=(0, 0.93))
    _runtimes(part, grid[len(memories)])


def _runtimes(part: Mapping[str, Any], axes: Axes) -> None:
    for who in dict.fromkeys(run["who"] for run in part["runs"]):
        runs = sorted((r for r in part["runs"] if r["who"] == who), key=lambda r: r["memory"])
        ended = [r for r in runs if r["outcome"] == "finished"]
        axes.plot([r["memory"] / 2**20 for r in ended], [r["seconds"] for r in ended], "o-", color=COLOURS[who])
        died = [r for r in runs if r["outcome"] != "finished"]
        axes.plot([r["memory"] / 2**20 for r in died], [r["seconds"] for r in died], "X", color=COLOURS[who], ms=10)
    axes.axhline(part["ample"]["seconds"], color=GREY, linestyle=":", linewidth=1, label="Plait, no limit")
    axes.axvline(part["state_bytes"] / 2**20, color=GREY, linestyle="--", linewidth=1, label="size of the state")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_ylim(bottom=0)
    axes.set_title("Seconds against memory (× died)", fontsize=10)
    axes.set_xlabel("memory for the state, MiB")
    axes.set_ylabel("seconds")
    axes.legend(fontsize=8)


def output_over_time(run: Mapping[str, Any]) -> tuple[list[float], list[int]]:
    """Seconds and rows out so far, after each epoch, from nothing.

    >>> output_over_time({"epochs": [{"at": 1.5, "rows_out": 3}, {"at": 2.0, "rows_out": 4}]})
    ([0.0, 1.5, 2.0], [0, 3, 7])
    """
    at, rows = [0.0], [0]
    for epoch in run["epochs"]:
        at.append(epoch["at"])
        rows.append(rows[-1] + epoch["rows_out"])
    return at, rows


def _soak(part: Mapping[str, Any], grid: Sequence[Axes], band: SubFigure) -> None:
    epochs = part["run"]["epochs"]
    _epoch_seconds(part, epochs, grid[0])
    _amplification(part, epochs, grid[1])
    _memory(part["run"], grid[2])
    _steps(epochs, grid[3])


def _epoch_seconds(part: Mapping[str, Any], epochs: Sequence[Mapping[str, Any]], axes: Axes) -> None:
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


def _amplification(part: Mapping[str, Any], epochs: Sequence[Mapping[str, Any]], axes: Axes) -> None:
    for kind, colour in (("write", "#b5541c"), ("read", "#3b6ea5"), ("space", "#0b6e4f")):
        points = [
            (e["epoch"], e["state"]["amplification"][kind])
            for e in epochs
            if kind in e.get("state", {}).get("amplification", {})
        ]
        if points:
            axes.plot(*zip(*points, strict=True), color=colour, label=kind)
    disk = [(d["epoch"], d["bytes"] / d["live"]) for d in part["disk"] if d["live"]]
    if disk:
        axes.plot(*zip(*disk, strict=True), ".:", color=GREY, label="checkpoint on disk / live state")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("epoch")
    axes.set_title("Amplification", fontsize=10)
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
    """Where the tasks' seconds go, smoothed over some epochs so that merges are areas and not needles."""
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


def _sweep(part: Mapping[str, Any], grid: Sequence[Axes], band: SubFigure) -> None:
    for axes, (name, runs) in zip(grid, part["lines"].items(), strict=False):
        names = [str(run["value"]) for run in runs]
        colours = [COLOURS["plait"] if run["outcome"] == "finished" else COLOURS["spark-rocksdb"] for run in runs]
        bars = axes.bar(names, [run["seconds"] for run in runs], color=colours)
        labels = [f"{r['seconds']:.1f}" if r["outcome"] == "finished" else r["outcome"] for r in runs]
        axes.bar_label(bars, labels=labels, fontsize=8)
        axes.set_title(f"{name}, under {part['limit'] / 2**20:,.0f} MiB in all", fontsize=10)
        axes.set_ylabel("seconds")
        axes.margins(y=0.15)
    if not part["lines"]:
        grid[0].set_axis_off()


def _legend_below(axes: Axes, shown: Sequence[Any]) -> None:
    """Points may lie anywhere in the panel."""
    if shown:
        names = [str(one.get_label()) for one in shown]
        axes.legend(shown, names, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncol=2)


def _backends(part: Mapping[str, Any], grid: Sequence[Axes], band: SubFigure) -> None:
    axes = grid[0]
    ratios = list(dict.fromkeys(run["ratio"] for run in part["runs"]))
    for number, backend in enumerate(dict.fromkeys(run["backend"] for run in part["runs"])):
        runs = [run for run in part["runs"] if run["backend"] == backend]
        done = [(ratios.index(run["ratio"]), run["seconds"]) for run in runs if run["outcome"] == "finished"]
        # Side by side, not on top of each other.
        dead = [ratios.index(run["ratio"]) + 0.08 * (number - 1) for run in runs if run["outcome"] != "finished"]
        (line,) = (
            axes.plot(*zip(*done, strict=True), marker="o", label=backend) if done else axes.plot([], label=backend)
        )
        axes.plot(dead, [0] * len(dead), "x", color=line.get_color(), markersize=12, clip_on=False)
    axes.set_xticks(range(len(ratios)), ["ample" if r is None else f"{r:g}" for r in ratios])
    axes.set_xlabel("memory for the state / state (× is killed)")
    axes.set_ylabel("seconds")
    axes.set_ylim(bottom=0)
    axes.legend()


_BANDS = {"limits": _limits, "soak": _soak, "sweep": _sweep, "backends": _backends}


def _unit(largest: float) -> tuple[int, str]:
    return (2**30, "GiB") if largest >= 2**30 else (2**20, "MiB")
