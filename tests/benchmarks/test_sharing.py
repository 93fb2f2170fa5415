"""The benchmark `sharing`, at a tiny size: its queries, counted work under every setting, and the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from benchmarks.options import Options
from benchmarks.sharing.benchmark import measured, settle, summary
from benchmarks.sharing.contestants import _told
from benchmarks.sharing.report import REPORT, gain, saved
from benchmarks.sharing.workload import LEFT_OUT, OUTPUTS, QUERIES, SIZES, TABLE_OF, drawn, queries


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    setup = settle(Options(quick=True, sf=0.001, epochs=6, parts=("work5",)))
    (part,) = measured(tmp_path_factory.mktemp("sharing"), setup, Console(quiet=True))
    return part


def test_the_queries_are_those_that_were_drawn() -> None:
    asked = list(dict.fromkeys(drawn(14)))
    assert set(asked) == {joins for _, joins in QUERIES} | set(LEFT_OUT)
    assert [joins for joins in asked if joins not in LEFT_OUT] == [joins for _, joins in QUERIES]


def test_a_query_joins_its_tables_without_a_cycle_each_with_one_before() -> None:
    for query in queries(10):
        assert len(query.tables) in SIZES
        assert len(query.joins) == len(query.tables) - 1
        for number, table in enumerate(query.tables[1:], 1):
            sides = [{TABLE_OF[column] for column in join.split(" = ")} for join in query.joins]
            assert any(table in side and side & set(query.tables[:number]) for side in sides), query.name
        assert len(query.graph.outputs) == sum(len(OUTPUTS[table]) for table in query.tables)


def test_every_setting_gives_the_rows_of_duckdb_and_sharing_saves_state(work: dict[str, Any]) -> None:
    assert work["equal"]
    independent, naive = (work["contestants"][who] for who in ("independent", "naive"))
    assert independent["state_rows"] > 2 * naive["state_rows"]
    assert set(naive["stores"]) >= {"lineitem[l_partkey]", "orders[o_orderkey]"}
    assert sum(query["results"] for query in work["queries"].values()) > 1000


def test_a_contestant_with_other_results_or_that_fails_is_told() -> None:
    run = {"seconds": 1.0, "epochs": [1.0], "state_bytes": [1, 2], "rows_out": {"q1": 2}, "failure": None}
    assert summary([run], {"q1": 2})["equal"]
    assert summary([run], {"q1": 2})["state_bytes"] == 2
    assert not summary([run], {"q1": 3})["equal"]
    assert not summary([run, {"failure": "it burns"}], {"q1": 2})["equal"]
    assert summary([{"failure": "it burns"}], {"q1": 2}) == {"failure": "it burns", "equal": False}


def test_engines_at_once_are_added_up() -> None:
    def report(at: float, rows: int, size: int) -> dict[str, Any]:
        return {
            "timestamp": at,
            "rows_out": {"q": rows},
            "task_seconds": {"probe": 1.0},
            "seconds": {"join": 2.0},
            "state_bytes": size,
            "segments": {"a[k]": 1, "a ⋈ b[0.k]": 1},
            "optimiser": {"said": "nothing"},
        }

    found = _told(9.0, 100.0, [[report(101, 1, 5), report(103, 1, 6)], [report(104, 7, 1)]])
    assert found.epochs == [4.0]
    assert found.state_bytes == [6, 7]
    assert found.rows_out == {"q": 9}
    assert found.stores == 4
    assert found.mirs == ["a ⋈ b[0.k]"] * 2


def test_the_report_tells_ratios_and_goals(work: dict[str, Any], tmp_path: Path) -> None:
    part = json.loads(json.dumps(work))
    found = part["contestants"]
    found["independent"] |= {"seconds": 26.0, "state_bytes": 60 << 20}
    found["ilp"] |= {"seconds": 5.0, "state_bytes": 30 << 20, "peak": 1 << 30}
    found["spark"] = {"failure": "it burns", "equal": False}
    assert gain(part, "ilp") == 5.2
    assert saved(part, "ilp") == 2
    document = {"parts": [part], "setup": {"epochs": 6, "sf": 0.001, "repeat": 1}}
    text = "\n".join([REPORT.how(document), *REPORT.lines(part, document)])
    assert "at least 2.6 × independent: 5.2 (met)" in text
    assert "at most 1/3.1 of independent: 2.0 (missed)" in text
    assert "Spark, in memory failed: it burns" in text
    figure = Figure()
    REPORT.draw(document, figure)
    assert len(figure.axes) == 3
