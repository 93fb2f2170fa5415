"""The one report writer: its files, and what an interrupted benchmark has written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from benchmarks import report


@dataclass(frozen=True, slots=True)
class Setup:
    epochs: int

    @property
    def half(self) -> int:
        return self.epochs // 2


def draw(document: report.Document, figure: Figure) -> None:
    axes = figure.subplots()
    bars = report.grouped_bars(axes, ["x", "y"], {"plait": [1, 2], "spark": [3, 4]}, report.COLOURS)
    assert [bar.get_height() for bar in bars["spark"]] == [3, 4]
    assert bars["plait"][1].get_x() < bars["spark"][1].get_x()


REPORT = report.Report(
    lambda document: f"{document['setup']['half']} of {document['setup']['epochs']} epochs.",
    lambda part, document: [f"{part['rows']} rows"],
    draw,
)


def part(rows: int) -> dict[str, Any]:
    return {"part": "one", "title": "One", "rows": rows, "equal": True}


def test_all_three_files_are_written_and_the_text_is_printed(tmp_path: Path) -> None:
    console = Console(file=StringIO(), width=200)
    parts = report.publish("some", Setup(8), [part(3)], REPORT, tmp_path, console)
    assert parts == [part(3)]
    text = (tmp_path / "some.md").read_text()
    assert text.startswith("# python -m benchmarks some\n\n4 of 8 epochs.\n\n")
    assert text.endswith("\n\n## One\n\n3 rows\n")
    assert isinstance(console.file, StringIO)
    assert console.file.getvalue().strip() == text.strip()
    assert json.loads((tmp_path / "some.json").read_text())["setup"] == {"epochs": 8, "half": 4}
    assert (tmp_path / "some.png").read_bytes().startswith(b"\x89PNG")


def test_an_interrupted_benchmark_keeps_what_it_has_measured(tmp_path: Path) -> None:
    def measured() -> Iterator[dict[str, Any]]:
        yield part(1)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        report.publish("some", Setup(8), measured(), REPORT, tmp_path, Console(file=StringIO()))
    assert json.loads((tmp_path / "some.json").read_text())["parts"] == [part(1)]
