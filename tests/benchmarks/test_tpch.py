"""The settings and the report of the benchmark `tpch`, from measurements made up here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import report
from benchmarks.options import Options
from benchmarks.tpch.benchmark import settle
from benchmarks.tpch.report import REPORT
from plait.errors import ConfigError


def measured(seconds: float, equal: bool = True) -> dict[str, Any]:
    return {"seconds": seconds, "all_seconds": [seconds], "epochs": [seconds], "parts": {}, "how": "so", "equal": equal}


def document(*who: str, equal: bool = True) -> dict[str, Any]:
    seconds = {"plait": 2.0, "spark": 5.0, "spark-tuned": 3.0}
    machine = {"cores": 2, "memory_bytes": 1 << 34, "system": "Linux", "python": "3", "versions": {}, "when": "now"}
    return {
        "benchmark": "tpch",
        "machine": machine,
        "setup": {"sf": 0.1, "epochs": 1, "repeat": 1, "checked": (0,), "who": who},
        "parts": [
            {
                "part": "queries",
                "title": "TPC-H",
                "rows": {"3": 1000},
                "queries": {"3": {name: measured(seconds[name], equal) for name in who}},
            }
        ],
    }


def test_both_are_compared_and_answers_that_differ_are_named(tmp_path: Path) -> None:
    text = report.write(document("plait", "spark"), REPORT, tmp_path)
    assert "| Q3 | 2.0 | 5.0 | 2.50× | 2.00 | 5.00 | 500 | yes |" in text
    assert "session |" not in text
    assert "| NO |" in report.markdown(document("plait", "spark", equal=False), REPORT)
    assert {file.name for file in tmp_path.iterdir()} == {"tpch.json", "tpch.md", "tpch.png"}


def test_spark_in_plait_s_session_has_columns_of_its_own_if_it_was_asked_for(tmp_path: Path) -> None:
    assert settle(Options()).who == ("plait", "spark")
    text = report.write(document("plait", "spark", "spark-tuned"), REPORT, tmp_path)
    header, rule, row = text.splitlines()[-3:]
    assert row.endswith("| 3.0 | 1.50× |")
    assert header.count("|") == rule.count("|") == row.count("|")


def test_queries_are_chosen_by_number_and_all_means_all() -> None:
    assert settle(Options(parts=("5", "3"))).queries == (3, 5)
    assert settle(Options(parts=("3", "all"))).queries == tuple(range(1, 23))
    with pytest.raises(ConfigError, match="there is no query '23'"):
        settle(Options(parts=("23",)))
