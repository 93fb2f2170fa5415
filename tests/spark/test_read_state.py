"""State as a DataFrame: exactly the rows that arrived and are still kept."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import plait
from plait.testing import ScriptedStream, run_epochs

pytestmark = pytest.mark.spark


def test_the_live_rows_of_a_stream_are_a_frame(spark: SparkSession, tmp_path: Path) -> None:
    a = ScriptedStream(spark, tmp_path / "a", "k string, v long, at timestamp, `x.y` decimal(9,2)")
    b = ScriptedStream(spark, tmp_path / "b", "k string, w long")
    for epoch in range(5):
        a.add([(f"k{i % 7}", 10 * epoch + i, None, None) for i in range(10)])
        b.add([(f"k{i % 5}", i) for i in range(10)])
    checkpoint = str(tmp_path / "checkpoint")
    with plait.Engine(spark, checkpoint=checkpoint, config=plait.Config(fan_in=2)) as engine:
        engine.stream("a", a.frame())
        engine.stream("b", b.frame())
        engine.query("q", "SELECT a.k, a.v, a.at, a.`x.y` AS z, b.w FROM a JOIN b ON a.k = b.k")
        run_epochs(engine)
        # Beside the engine that holds the checkpoint.
        found = plait.read_state(spark, checkpoint, "a")
    assert sorted(found.columns) == ["at", "k", "v", "x.y"]
    rows = sorted((row.k, row.v) for row in found.collect())
    assert rows == sorted((row["k"], row["v"]) for row in a.table().to_pylist())
    assert found.schema["`x.y`" if "`x.y`" in found.columns else "x.y"].dataType.simpleString() == "decimal(9,2)"

    with pytest.raises(plait.CheckpointError) as caught:
        plait.read_state(spark, checkpoint, "c")
    assert "a, b" in caught.value.remedy


def test_a_damaged_segment_is_not_read(spark: SparkSession, tmp_path: Path) -> None:
    a = ScriptedStream(spark, tmp_path / "a", "k long, v long")
    b = ScriptedStream(spark, tmp_path / "b", "k long, w long")
    a.add([(i, i) for i in range(50)])
    b.add([(i, i) for i in range(50)])
    checkpoint = tmp_path / "checkpoint"
    with plait.Engine(spark, checkpoint=str(checkpoint)) as engine:
        engine.stream("a", a.frame())
        engine.stream("b", b.frame())
        engine.query("q", "SELECT a.v, b.w FROM a JOIN b ON a.k = b.k")
        run_epochs(engine)
    for file in (checkpoint / "state").rglob("*.arrow"):
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 4
        file.write_bytes(data)
    with pytest.raises(Exception, match="SEGMENT_CORRUPT"):
        plait.read_state(spark, str(checkpoint), "a").collect()
