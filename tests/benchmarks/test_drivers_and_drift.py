"""The benchmark `drivers` and the drift part of `orders`, at their quick sizes: no Spark, a few seconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from benchmarks import one_key_join
from benchmarks.drivers.arrivals import DATASETS, STREAMS, b_model
from benchmarks.drivers.benchmark import Setup, drivers, fraction
from benchmarks.drivers.report import REPORT, ranking
from benchmarks.orders.drift import draw_drift, drift, drift_lines
from benchmarks.orders.rewiring import draw_rewiring, rewiring, rewiring_lines
from plait.config import DRIVER_POLICIES, Config
from plait.errors import PlaitError
from plait.share.planner import Planner


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return drivers(tmp_path_factory.mktemp("drivers"), Setup(2000, (5, 3), (1, 1)), datasets=("I", "VI"))


@pytest.fixture(scope="module")
def drifted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return drift(tmp_path_factory.mktemp("drift"), quick=True, rows=300, epochs=14)


def test_every_policy_is_measured_on_every_dataset_and_batch_length(measured: dict[str, Any]) -> None:
    for probe in ("iterative", "factorised"):
        figures = measured["probes"][probe]["figures"]
        assert [(f["dataset"], f["which"]) for f in figures] == [("I", 0), ("I", 1), ("VI", 0), ("VI", 1)]
        assert all(tuple(f["policies"]) == DRIVER_POLICIES for f in figures)
        for one in (f["policies"][policy] for f in figures for policy in DRIVER_POLICIES):
            assert 0 <= one["early"] <= 1
            assert 0 <= one["early_work"] <= 1
            assert one["time"] > 0
            assert one["work"] > 0
        assert all(f["policies"]["timestamp"]["time"] == f["policies"]["timestamp"]["work"] == 1 for f in figures)
    assert measured["equal"]
    assert {name for name, *_ in ranking(measured)} == set(DRIVER_POLICIES)


def test_the_drivers_are_told_beside_the_papers_figures(measured: dict[str, Any]) -> None:
    document = {"parts": [json.loads(json.dumps(measured))]}
    text = "\n".join(REPORT.lines(document["parts"][0], document))
    assert "(0.61)" in text
    assert text.count("\n| VI | 3 |") == 4
    figure = Figure()
    REPORT.draw(document, figure)
    assert len(figure.axes) == 12


def test_the_datasets_have_the_papers_selectivities() -> None:
    for dataset in DATASETS:
        arrivals = dataset.arrivals(20_000, 4)
        keys = {s: np.concatenate([a[s].column("k").to_numpy() for a in arrivals]) for s in STREAMS}
        pairs = {}
        for one, other in (("S1", "S2"), ("S1", "S3"), ("S2", "S3")):
            counts = [dict(zip(*np.unique(keys[s], return_counts=True), strict=True)) for s in (one, other)]
            pairs[one, other] = sum(n * counts[1].get(k, 0) for k, n in counts[0].items())
        # Table 2 times the sizes of Table 3, at a fiftieth.
        equal = dataset.name in ("I", "II", "III", "IV")
        assert list(pairs.values()) == ([100, 20_000, 100_000] if equal else [200, 2000, 20_000])
        assert sum(one_key_join.expected(arrivals)) == (100_000 if equal else 20_000)


def test_the_b_model_gives_a_fifth_to_the_first_half() -> None:
    share = np.linspace(0, 1, 1001)
    assert np.mean(b_model(0.2)(share) < 0.5) == pytest.approx(0.2, abs=0.002)
    assert np.mean(b_model(0.8)(share) < 0.5) == pytest.approx(0.8, abs=0.002)


def test_what_is_done_before_half_time_has_all_its_results() -> None:
    assert fraction([(1.0, 5), (1.0, 0)], 3.0) == 1
    assert fraction([(4.0, 8), (1.0, 2)], 1.0) == pytest.approx(0.2)
    assert fraction([(0.0, 1), (2.0, 3)], 0.0) == pytest.approx(0.25)


def test_a_run_with_other_results_ends_the_benchmark(tmp_path: Path) -> None:
    arrivals = DATASETS[0].arrivals(1000, 2)
    wanted = one_key_join.expected(arrivals)
    config = Config(tasks=1, sync=False)
    planner = Planner({"q": one_key_join.graph(STREAMS)}, one_key_join.relations(STREAMS, delay_ms=10**7), config)
    with pytest.raises(PlaitError, match="BENCH_RESULTS"):
        one_key_join.run(tmp_path, planner, arrivals, [wanted[0], wanted[1] + 1])
    assert list(tmp_path.iterdir()) == []


def test_the_drift_tells_work_and_seconds_of_every_epoch(drifted: dict[str, Any]) -> None:
    assert drifted["equal"]
    assert list(drifted["contestants"]) == ["static", "dp_pick", "dp_pick mid", "oracle"]
    for series in drifted["contestants"].values():
        assert len(series["work"]) == len(series["seconds"]) == drifted["epochs"]
    assert drifted["summary"]["degrades"] > 1
    # Before anything is re-chosen, dp_pick is the static contestant.
    period = drifted["period"]
    assert drifted["contestants"]["dp_pick"]["work"][:period] == drifted["contestants"]["static"]["work"][:period]


def test_the_drift_is_told_and_drawn(drifted: dict[str, Any]) -> None:
    text = "\n".join(drift_lines(json.loads(json.dumps(drifted))))
    assert "| oracle |" in text
    assert "within 10 %" in text
    axes = Figure().subplots()
    draw_drift(drifted, axes)
    assert [line.get_label() for line in axes.lines][:1] == ["static: best orders before the flip"]


def test_a_join_that_becomes_tiny_is_kept_by_itself_and_rows_are_those_of_a_plain_count(tmp_path: Path) -> None:
    part = rewiring(tmp_path, quick=True, rows=60, epochs=14) | {"part": "rewiring"}
    for of in part["contestants"].values():
        assert len(of["seconds"]) == 14
    assert not any(part["contestants"]["orders"]["kept"])
    assert part["summary"]["static"]["kept"] == ""
    assert any("Before is epochs" in line for line in rewiring_lines(part))
    figure = Figure()
    draw_rewiring(part, figure.subplots())
    assert figure.axes[0].get_ylabel() == "ms per epoch"
