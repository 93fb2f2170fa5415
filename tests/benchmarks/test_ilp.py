"""The benchmark `ilp` at its quick size: no Spark, a few seconds."""

from __future__ import annotations

import json
from typing import Any

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from benchmarks.ilp.benchmark import measured, settle
from benchmarks.ilp.random_queries import RATE, fresh, random_workload
from benchmarks.ilp.report import REPORT
from benchmarks.options import Options


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    setup = settle(Options(quick=True))
    parts = list(measured(setup, Console(quiet=True)))
    found: dict[str, Any] = json.loads(
        json.dumps({"parts": parts, "setup": {"repeat": 1, "long_seconds": setup.long_seconds, "highspy": "1"}})
    )
    return found


def test_queries_are_different_and_as_large_as_asked() -> None:
    given = random_workload(20, 4, 10, seed=1)
    assert len({query.join for query in given.queries}) == 20
    assert all(len(set(query.join.leaves)) == 4 for query in given.queries)


def test_every_join_of_the_environment_has_as_many_rows_as_a_relation() -> None:
    given = random_workload(5, 3, 10, seed=2)
    assert [given.sizes.rows(query.join) for query in given.queries] == pytest.approx([RATE] * 5)


def test_few_relations_have_only_so_many_queries() -> None:
    assert len(random_workload(50, 3, 3, seed=0).queries) < 50


def test_the_same_seed_draws_the_same_workload_and_a_fresh_one_is_equal() -> None:
    assert random_workload(5, 3, 10, seed=3) == random_workload(5, 3, 10, seed=3) == fresh(random_workload(5, 3, 10, 3))


def test_costs_sizes_and_seconds_are_measured(document: dict[str, Any]) -> None:
    ten, hundred, speed = document["parts"]
    assert all(part["equal"] for part in document["parts"])
    for part in (ten, hundred):
        for point in part["points"]:
            assert 0 < point["together"] <= point["alone"]
            assert 0 < point["variables"] < point["paper_variables"]
    assert all(row["cpu"] > 0 and row["above_best"] < 0.01 for row in speed["rows"])


def test_the_figures_are_told_and_drawn(document: dict[str, Any]) -> None:
    text = "\n".join(line for part in document["parts"] for line in REPORT.lines(part, document))
    assert "around 50 %" in text
    assert "proven within" in text
    assert "Equation 1" in REPORT.how(document)
    figure = Figure()
    REPORT.draw(document, figure)
    assert len(figure.axes) == 6
