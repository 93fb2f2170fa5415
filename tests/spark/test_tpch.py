"""Queries of TPC-H over eight streams, all in one engine; answers in between and at the end are DuckDB's."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

import plait
from benchmarks.tpch import data as tpch_data
from benchmarks.tpch.benchmark import expected_answers, same_rows
from benchmarks.tpch.contestants import streams
from benchmarks.tpch.queries import QUERIES

pytestmark = pytest.mark.spark


@pytest.mark.parametrize(
    ("queries", "sf", "epochs"),
    [((3, 9, 18, 21), 0.01, 3), pytest.param(tuple(QUERIES), 0.1, 10, marks=pytest.mark.soak)],
    ids=["some", "all"],
)
def test_all_queries_are_right_after_any_epoch(
    spark: SparkSession, tmp_path: Path, queries: tuple[int, ...], sf: float, epochs: int
) -> None:
    folder = tpch_data.ensure(tmp_path / "data", sf, epochs)
    checked = (epochs // 3, 2 * epochs // 3, epochs - 1)
    answers: dict[int, dict[int, list[list[Any]]]] = {query: {} for query in queries}

    def take(query: int, rows: DataFrame, epoch: int) -> None:
        if epoch in checked:
            answers[query][epoch] = [list(row) for row in rows.collect()]

    with plait.Engine(spark, str(tmp_path / "checkpoint"), plait.Config(sync=False)) as engine:
        for table, frame in streams(spark, folder, epochs).items():
            engine.stream(table, frame)
        for query in queries:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", plait.RecomputationWarning)
                handle = engine.query(f"q{query}", QUERIES[query])
            handle.foreach_batch(lambda rows, epoch, query=query: take(query, rows, epoch))
        engine.start(available_now=True).await_termination()
    for query in queries:
        for epoch, rows in expected_answers(folder, query, checked).items():
            assert same_rows(answers[query][epoch], rows), f"Q{query} after epoch {epoch}"
    sizes = {query: len(found[epochs - 1]) for query, found in answers.items()}
    assert sum(size > 0 for size in sizes.values()) >= 3 * len(queries) // 4, f"most answers have rows: {sizes}"
