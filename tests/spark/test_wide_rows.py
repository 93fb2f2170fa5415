"""Rows of 100 KB: what tasks and the driver hold is bounded by bytes, not by rows, and not by compressed bytes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytestmark = pytest.mark.spark

ROWS = 3_000
WIDTH = 100_000


def test_wide_rows_take_no_more_memory_than_narrow_ones(tmp_path: Path) -> None:
    # 300 MB of text in a file of 100 KB: it is the same text in every row.
    text = pa.DictionaryArray.from_arrays(pa.array([0] * ROWS, pa.int32()), pa.array(["x" * WIDTH]))
    numbers = pa.array(range(ROWS), pa.int64())
    for name, table in {
        "a": pa.table({"k": numbers, "v": numbers, "t": text}),
        "b": pa.table({"k": numbers, "w": [str(n) for n in range(ROWS)]}),
    }.items():
        (tmp_path / name).mkdir()
        pq.write_table(table, tmp_path / name / "0.parquet")
    assert (tmp_path / "a" / "0.parquet").stat().st_size < 1 << 20
    driver = Path(__file__).with_name("wide_driver.py")
    done = subprocess.run([sys.executable, str(driver), str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["rows"], report["text"]) == (ROWS, ROWS * WIDTH)
    assert report["longer"] == ROWS
    # A worker that has imported everything holds 215 MB, and maps what it has written; the rows, once, are 300 MB more.
    assert max(report["workers"]) < 480 << 20, report
    # The results are small as files; as rows they are 300 MB, which the driver never has.
    assert report["driver"] < 100 << 20, report
