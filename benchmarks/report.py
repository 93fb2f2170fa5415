"""Writes what was measured: NAME.json (everything), NAME.md (tables) and NAME.png (plots).

A document is `{"benchmark", "machine", "setup", "parts"}`.  Every part has a name (`part`), a `title`, and `equal`:
whether its results were right.  What else is in a part is known to the benchmark that measures it and to its `Report`.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.container import BarContainer
    from matplotlib.figure import Figure

Document = Mapping[str, Any]
Part = Mapping[str, Any]

COLOURS = {
    "plait": "#0b6e4f",
    "plait-memory": "#3b6ea5",
    "spark": "#e07a1f",
    "spark-rocksdb": "#b5541c",
    "spark-tuned": "#f2b279",
    "duckdb": "#7a7a7a",
}
"""The colour of a contestant is the same in all plots."""
DOTS_PER_INCH = 120
BAR_GROUP_WIDTH = 0.8


@dataclass(frozen=True, slots=True)
class Report:
    """How the document of a benchmark is told and drawn."""

    how: Callable[[Document], str]
    """A paragraph on what was measured and how."""
    lines: Callable[[Part, Document], Iterable[str]]
    """The Markdown of one part, below its title."""
    draw: Callable[[Document, Figure], None]
    """Draws all parts, and sets the size of the figure."""


def publish(
    name: str, setup: Any, parts: Iterable[dict[str, Any]], report: Report, out: Path, console: Console
) -> list[dict[str, Any]]:
    """Measure part after part, writing the report after each: an interrupted run keeps what it has measured."""
    done: list[dict[str, Any]] = []
    text = ""
    for part in parts:
        done.append(part)
        text = write({"benchmark": name, "machine": machine(), "setup": plain(setup), "parts": done}, report, out)
    console.print(text, markup=False, highlight=False)
    return done


def plain(setup: Any) -> dict[str, Any]:
    """The fields and properties of a setup, as JSON takes them."""
    properties = [name for name, value in vars(type(setup)).items() if isinstance(value, property)]
    return dataclasses.asdict(setup) | {name: getattr(setup, name) for name in properties}


def write(document: Document, report: Report, out: Path) -> str:
    """Write all three files; returns the Markdown."""
    from matplotlib.figure import Figure

    name = document["benchmark"]
    (out / f"{name}.json").write_text(json.dumps(document, indent=1, default=str) + "\n")
    text = markdown(document, report)
    (out / f"{name}.md").write_text(text)
    figure = Figure(layout="constrained")
    report.draw(document, figure)
    figure.savefig(out / f"{name}.png", dpi=DOTS_PER_INCH)
    return text


def markdown(document: Document, report: Report) -> str:
    """The title, how it was measured, the machine, and every part under its own title."""
    lines = [f"# python -m benchmarks {document['benchmark']}", "", report.how(document), "", _machine_line(document)]
    for part in document["parts"]:
        lines += ["", f"## {part['title']}", "", *report.lines(part, document)]
    return "\n".join(lines).rstrip() + "\n"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], align: str | None = None) -> list[str]:
    """A table in Markdown; `align` has an l or r for each column, by default l for the first and r for the others.

    >>> table(("who", "s"), [("plait", "1.5")])
    ['| who | s |', '|---|---:|', '| plait | 1.5 |']
    """
    sides = align or "l" + "r" * (len(columns) - 1)
    rule = "".join("---|" if side == "l" else "---:|" for side in sides)
    return [f"| {' | '.join(columns)} |", f"|{rule}", *(f"| {' | '.join(row)} |" for row in rows)]


def size(n: float) -> str:
    """A number of bytes in MiB, or in GiB from 10 on.

    >>> size(3 << 20), size(20 << 30)
    ('3 MiB', '20.0 GiB')
    """
    return f"{n / 2**30:.1f} GiB" if n >= 10 << 30 else f"{n / 2**20:,.0f} MiB"


def grouped_bars(
    axes: Axes, groups: Sequence[str], heights: Mapping[str, Sequence[float]], colours: Mapping[str, str]
) -> dict[str, BarContainer]:
    """One bar per name of `heights` in each group, side by side; returns the bars of each name."""
    width = BAR_GROUP_WIDTH / max(len(heights), 1)
    drawn = {}
    for number, (name, values) in enumerate(heights.items()):
        places = [group + (number - (len(heights) - 1) / 2) * width for group in range(len(groups))]
        drawn[name] = axes.bar(places, values, 0.95 * width, label=name, color=colours[name])
    axes.set_xticks(range(len(groups)), groups)
    return drawn


def machine() -> dict[str, Any]:
    """The machine and the versions that the figures were measured with."""
    import psutil

    names = ("pyspark", "duckdb", "pyarrow", "numpy", "numba")
    return {
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in names},
        "when": time.strftime("%Y-%m-%d"),
    }


def _machine_line(document: Document) -> str:
    found = document["machine"]
    versions = "".join(f", {name} {version}" for name, version in found["versions"].items())
    memory = found["memory_bytes"] / 2**30
    return (
        f"{found['cores']} cores, {memory:.0f} GiB, {found['system']}, Python {found['python']}{versions}; "
        f"{found['when']}."
    )
