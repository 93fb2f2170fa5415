"""An intermediate result that is kept, on Spark: appended, looked up and merged by tasks, restarted, inspected."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import plait
from plait.share.allocate import Allocation, Wanted, allocate
from plait.share.mirs import Keep
from plait.state.log.inspect import Inspection
from plait.testing import ScriptedStream, run_epochs
from tests.oracle import bag, batch_join

pytestmark = pytest.mark.spark

CHAIN = "SELECT a.v, b.w, c.x FROM a JOIN b ON a.k = b.k JOIN c ON b.w = c.w"
FEW = "SELECT a.v, c.x FROM a JOIN b ON a.k = b.k JOIN c ON b.w = c.w WHERE b.k < 20 AND c.x > 3"


def keeping(before: Any, wanted: dict[str, Wanted], *more: Any, **how: Any) -> Allocation:
    """An allocation that keeps b ⋈ c for whoever has it."""
    uses = tuple((name, ("b", "c")) for name in wanted)
    return allocate(before, wanted, *more, **{**how, "keeps": [Keep(uses, ((0, "k"),))] if uses else ()})


def test_queries_share_a_mir_that_survives_a_restart(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plait.admission.allocate", keeping)
    streams = {
        "a": ScriptedStream(spark, tmp_path / "a", "k long, v long"),
        "b": ScriptedStream(spark, tmp_path / "b", "k long, w long"),
        "c": ScriptedStream(spark, tmp_path / "c", "w long, x long"),
    }
    numbers = random.Random(5)
    for _ in range(2):
        for _ in range(3):
            streams["a"].add([(numbers.randrange(40), i) for i in range(60)])
            streams["b"].add([(numbers.randrange(40), numbers.randrange(30)) for _ in range(60)])
            streams["c"].add([(numbers.randrange(30), numbers.randrange(9)) for _ in range(60)])
        config = plait.Config(tasks=2, fan_in=2, orderer="fixed", driver_policy="registration")
        engine = plait.Engine(spark, checkpoint=str(tmp_path / "checkpoint"), config=config)
        for name, stream in streams.items():
            engine.stream(name, stream.frame())
        engine.query("chain", CHAIN)
        engine.query("few", FEW)
        assert "probe b ⋈ c[0.k]" in engine.explain()
        run_epochs(engine)
        for name, sql in (("chain", CHAIN), ("few", FEW)):
            expected = batch_join({n: s.table() for n, s in streams.items()}, sql)
            assert bag(plait.QueryHandle(engine, name).results().toArrow()) == expected, name
        engine.close()
    inspection = Inspection(str(tmp_path / "checkpoint"))
    assert list(inspection.findings()) == []
    mir = next(name for name, of in inspection.catalog()["stores"].items() if of["joins"])
    assert max(info.tier for info in inspection.live().segments[mir]) > 0
    assert inspection.usage(mir).readers.keys() == {"chain.b", "chain.c", "few.b", "few.c"}
    assert plait.read_state(spark, str(tmp_path / "checkpoint"), "b").count() == 360
    with pytest.raises(plait.PlaitError, match="no state of a stream"):
        plait.read_state(spark, str(tmp_path / "checkpoint"), "b ⋈ c")
