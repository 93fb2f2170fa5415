"""The benchmark `tpcds`: data, checksum, settings, report.  The race itself runs in `make bench`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb
import pyarrow.parquet as pq
import pytest

from benchmarks import report
from benchmarks.options import Options
from benchmarks.tpcds import data
from benchmarks.tpcds.benchmark import settle
from benchmarks.tpcds.checksum import checksum_sql
from benchmarks.tpcds.report import REPORT
from benchmarks.tpcds.workloads import CHAIN, FIXED
from plait.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROWS = "VALUES (1, 'x', 2.50), (NULL, NULL, -1.25), (3, 'ü', NULL), (3, 'ü', NULL)"


def duckdb_checksum(values: str) -> int:
    relation = duckdb.sql(f"SELECT a, b, CAST(c AS DECIMAL(7,2)) AS c FROM ({values}) t(a, b, c)")
    columns = [(name, str(kind)) for name, kind in zip(relation.columns, relation.types, strict=True)]
    row = relation.aggregate(checksum_sql(columns, "duckdb")).fetchone()
    assert row is not None
    return int(row[0])


def test_the_checksum_sees_values_swapped_between_rows_but_not_their_order() -> None:
    base = duckdb_checksum("VALUES (1, 'x', 1.0), (2, 'y', 2.0)")
    assert duckdb_checksum("VALUES (2, 'y', 2.0), (1, 'x', 1.0)") == base
    assert duckdb_checksum("VALUES (1, 'y', 1.0), (2, 'x', 2.0)") != base
    assert duckdb_checksum("VALUES (1, 'x', 1.0), (2, 'y', 2.0), (2, 'y', 2.0)") != base
    assert duckdb_checksum("VALUES (1, 'x', 1.0), (2, 'y', NULL)") != base


@pytest.mark.spark
def test_spark_and_duckdb_compute_the_same_checksum(spark: SparkSession) -> None:
    frame = spark.sql(f"SELECT a, b, CAST(c AS DECIMAL(7,2)) AS c FROM {ROWS} AS t(a, b, c)")
    row = frame.selectExpr(f"{checksum_sql(frame.dtypes, 'spark')} AS sum").first()
    assert row is not None
    assert int(row["sum"]) == duckdb_checksum(ROWS)


def test_the_data_is_split_into_epochs_and_made_once(tmp_path: Path) -> None:
    folder = data.ensure(CHAIN, tmp_path, sf=0.01, epochs=3)
    files = sorted((folder / "r2").glob("*.parquet"))
    assert [f.name for f in files] == ["0000.parquet", "0001.parquet", "0002.parquet"]
    assert sum(pq.read_metadata(f).num_rows for f in files) == 1385
    assert [f.stat().st_mtime for f in files] == sorted({f.stat().st_mtime for f in files})
    before = files[0].stat().st_ctime_ns
    assert data.ensure(CHAIN, tmp_path, sf=0.01, epochs=3) == folder
    assert files[0].stat().st_ctime_ns == before


def test_the_chain_gives_one_to_three_rows_out_per_row_in(tmp_path: Path) -> None:
    folder = data.ensure(CHAIN, tmp_path, sf=0.05, epochs=2)
    assert 1 <= data.count_results(CHAIN, folder) / (554_000 * 0.05) <= 3


def test_the_fixed_cost_data_has_ten_rows_per_table_and_epoch(tmp_path: Path) -> None:
    folder = data.ensure(FIXED, tmp_path, sf=1, epochs=4)
    assert {pq.read_metadata(f).num_rows for f in folder.glob("c*/*.parquet")} == {10}


def test_defaults_follow_the_scale_factor() -> None:
    assert (settle(Options()).epochs, settle(Options()).repeat) == (20, 3)
    assert (settle(Options(sf=10)).epochs, settle(Options(sf=10)).repeat) == (40, 1)
    assert settle(Options(sf=10)).parts == ("four", "chain")
    assert settle(Options(parts=("fixed",), who=("plait",))).who == ("plait",)


@pytest.mark.parametrize("options", [Options(sf=-1), Options(parts=("five",)), Options(who=("flink",))])
def test_options_that_cannot_be_are_refused(options: Options) -> None:
    with pytest.raises(ConfigError):
        settle(options)


def contestant(seconds: float | None, equal: bool = True) -> dict[str, Any]:
    return {
        "seconds": seconds,
        "all_seconds": [] if seconds is None else [seconds],
        "rows": 10,
        "checksum": "1",
        "equal": equal,
        "peak_bytes": 1 << 30,
        "failure": None if seconds is not None else "exit code 1: out of memory",
    }


def document() -> dict[str, Any]:
    curve = [
        {"epoch": e, "state_rows": 1000 * (e + 1), "rows_out": e, "seconds": 0.5 + e / 10, "without_output": 0.5}
        for e in range(6)
    ]
    race = {
        "part": "four",
        "title": "four",
        "expected": {"rows": 10, "checksum": "1"},
        "contestants": {
            "plait": contestant(2.0),
            "spark": contestant(9.0, equal=False),
            "spark-rocksdb": contestant(None),
            "duckdb": contestant(0.1),
        },
        "equal": False,
        "curve": curve,
    }
    fixed = {
        "part": "fixed",
        "title": "fixed cost",
        "rows_per_epoch": 40,
        "epochs": 30,
        "triggers": {"plait": {"addBatch": 0.3, "triggerExecution": 0.4}, "spark-stateless": {"addBatch": 0.1}},
        "steps": {"driver": {"join": 0.25, "total": 0.3}, "tasks": {"probe": 0.01}},
        "failures": {},
        "equal": True,
    }
    return {
        "benchmark": "tpcds",
        "machine": {
            "cores": 2,
            "memory_bytes": 1 << 34,
            "system": "Linux",
            "python": "3",
            "versions": {},
            "when": "now",
        },
        "setup": {"sf": 1.0, "epochs": 20, "repeat": 1, "memory": "8g", "verify": True},
        "parts": [race, fixed],
    }


def test_the_report_names_failures_and_differences(tmp_path: Path) -> None:
    text = report.write(document(), REPORT, tmp_path)
    assert "| Plait | 2.00 |" in text
    assert "4.50× as long.  **Not a fair comparison" in text
    assert "**NO**" in text
    assert "out of memory" in text
    assert "| addBatch | 300 | 100 |" in text
    assert sorted(f.name for f in tmp_path.iterdir()) == ["tpcds.json", "tpcds.md", "tpcds.png"]
