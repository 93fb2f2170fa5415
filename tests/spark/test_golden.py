"""Checkpoints that earlier releases wrote open, and go on exactly."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import plait
from plait.testing import run_epochs
from tests.golden import EPOCHS, QUERIES, Golden, expected, restored
from tests.oracle import bag

pytestmark = pytest.mark.spark

KEPT = sorted((Path(__file__).parent.parent / "fixtures" / "checkpoints").glob("format-*.tar.gz"))


@pytest.fixture(params=KEPT, ids=lambda path: path.name.removesuffix(".tar.gz"))
def golden(request: pytest.FixtureRequest, spark: SparkSession, tmp_path: Path) -> Iterator[Golden]:
    """A copy of a kept checkpoint, and a session with the time zone that it was written in."""
    before = spark.conf.get("spark.sql.session.timeZone", "UTC") or "UTC"
    spark.conf.set("spark.sql.session.timeZone", "UTC")
    yield restored(spark, request.param, tmp_path)
    spark.conf.set("spark.sql.session.timeZone", before)


def test_an_old_checkpoint_goes_on_exactly(golden: Golden) -> None:
    golden.arrive(EPOCHS, EPOCHS + 4)
    with golden.engine() as engine:
        assert [progress["epoch"] for progress in run_epochs(engine)] == list(range(EPOCHS, EPOCHS + 4))
        for name in QUERIES:
            found = bag(plait.QueryHandle(engine, name).results().toArrow())
            assert found == expected(name, EPOCHS + 4), name
