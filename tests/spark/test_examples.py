"""Every example runs and checks itself; so does the README's code; and the example pipeline gives what it says."""

from __future__ import annotations

import importlib.util
import re
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

import plait
from plait.serve import pipeline as pipelines

pytestmark = pytest.mark.spark

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
RUNNABLE = sorted(path.name for path in EXAMPLES.glob("*.py") if path.name != "make_data.py")


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"plait_example_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", RUNNABLE)
def test_an_example_runs_and_its_own_checks_hold(name: str, spark: SparkSession) -> None:
    load(EXAMPLES / name).main(spark)


def test_the_example_pipeline_gives_the_rows_its_data_was_made_for(spark: SparkSession, tmp_path: Path) -> None:
    shutil.copy(EXAMPLES / "pipeline.toml", tmp_path)
    data = load(EXAMPLES / "make_data.py")
    data.main(tmp_path / "data")
    pipeline = pipelines.load(tmp_path / "pipeline.toml")
    with plait.Engine(spark, checkpoint=pipeline.checkpoint, config=pipeline.config) as engine:
        pipelines.build(pipeline, engine, spark)
        engine.start(available_now=True).await_termination()
    rows = sorted(tuple(row.values()) for row in pq.read_table(tmp_path / "data" / "out").to_pylist())
    assert rows == data.EXPECTED


def test_the_code_of_the_readme_runs(spark: SparkSession, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert blocks, "the README shows how to use Plait"
    for block in blocks:
        names: dict[str, Any] = {"__name__": "__readme__"}
        exec(compile(block, "README.md", "exec"), names)
    printed = capsys.readouterr().out
    expected = re.findall(r"^```text\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)[0]
    assert expected.strip() in printed


STREAMS = {
    "orders": "id BIGINT, customer BIGINT, ts TIMESTAMP, status STRING",
    "lines": "order_id INT, product STRING, qty INT, ts TIMESTAMP",
    "customers": "id BIGINT, name STRING",
}


def test_the_explained_query_of_the_documents_is_explained_so(spark: SparkSession, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "life_of_a_query.md").read_text()
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (sql,) = (block for language, block in blocks if language == "sql")
    shown = [block for language, block in blocks if not language]
    with plait.Engine(spark, checkpoint=str(tmp_path / "checkpoint")) as engine:
        for name, schema in STREAMS.items():
            (tmp_path / name).mkdir()
            frame = spark.readStream.schema(schema).parquet(str(tmp_path / name))
            engine.stream(name, frame.withWatermark("ts", "10 minutes") if "ts" in frame.columns else frame)
        engine.query("shipped", sql)
        text = engine.explain()
    assert len(shown) == 6
    missing = [block for block in shown if block not in text]
    assert not missing, f"docs/life_of_a_query.md shows what explain() does not print; it prints:\n{text}"
