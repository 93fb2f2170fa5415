"""The report of `python -m benchmarks tpch`, from measurements made up here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.options import Options
from benchmarks.tpch import report as tpch_report
from benchmarks.tpch.benchmark import settle


def measured(seconds: float, equal: bool = True) -> dict[str, Any]:
    return {"seconds": seconds, "all_seconds": [seconds], "epochs": [seconds], "parts": {}, "how": "so", "equal": equal}


def document(*who: str, equal: bool = True) -> dict[str, Any]:
    seconds = {"plait": 2.0, "spark": 5.0, "spark-tuned": 3.0}
    machine = {"cores": 2, "memory_bytes": 1 << 34, "system": "Linux", "python": "3", "versions": {}, "when": "now"}
    return {
        "benchmark": "tpch",
        "machine": machine,
        "setup": {"sf": 0.1, "epochs": 1, "repeat": 1, "checked": (0,), "who": who},
        "rows": {"3": 1000},
        "queries": {"3": {name: measured(seconds[name], equal) for name in who}},
    }


def test_both_are_compared_and_answers_that_differ_are_named(tmp_path: Path) -> None:
    text = tpch_report.write(document("plait", "spark"), tmp_path)
    assert "| Q3 | 2.0 | 5.0 | 2.50× | 2.00 | 5.00 | 500 | yes |" in text
    assert "session |" not in text
    assert "| NO |" in tpch_report.markdown(document("plait", "spark", equal=False))
    assert {file.name for file in tmp_path.iterdir()} == {"tpch.json", "tpch.md", "tpch.png"}


def test_spark_in_plait_s_session_has_columns_of_its_own_if_it_was_asked_for(tmp_path: Path) -> None:
    assert settle(Options()).who == ("plait", "spark")
    text = tpch_report.write(document("plait", "spark", "spark-tuned"), tmp_path)
    header, rule, row = text.splitlines()[-3:]
    assert row.endswith("| 3.0 | 1.50× |")
    assert header.count("|") == rule.count("|") == row.count("|")
