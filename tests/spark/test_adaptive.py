"""Orders that change while the engine runs on Spark: the answer stays exact, and what happened can be seen."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import plait
from plait.testing import ScriptedStream, run_epochs
from tests.oracle import Bag, bag, batch_join

pytestmark = pytest.mark.spark

STAR = "SELECT a.v, b.w, c.x FROM a, b, c WHERE a.k = b.k AND b.k = c.k"
CHAIN = "SELECT a.v, b.w, c.x FROM a JOIN b ON a.k = b.k JOIN c ON b.w = c.w"
KEYS = 400


class Flip:
    """Streams a, b, c on one key: at first hardly any key is in b, after the flip hardly any is in c."""

    def __init__(self, spark: SparkSession, home: Path) -> None:
        self.spark, self.home = spark, home
        self.streams = {
            "a": ScriptedStream(spark, home / "a", "k long, v long"),
            "b": ScriptedStream(spark, home / "b", "k long, w long"),
            "c": ScriptedStream(spark, home / "c", "k long, w long, x long"),
        }
        self.random = random.Random(3)

    def arrive(self, epochs: int, rare: str) -> None:
        for _ in range(epochs):
            keys = {n: [self.random.randrange(KEYS) for _ in range(150)] for n in self.streams}
            keys[rare] = [KEYS + k if k > 20 else k for k in keys[rare]]
            self.streams["a"].add([(k, i) for i, k in enumerate(keys["a"])])
            self.streams["b"].add([(k, self.random.randrange(60)) for k in keys["b"]])
            self.streams["c"].add([(k, self.random.randrange(60), i) for i, k in enumerate(keys["c"])])

    def engine(self, **config: Any) -> plait.Engine:
        settings = plait.Config(**{"tasks": 2, "replan_epochs": 1, "replan_gain": 0.02, **config})
        engine = plait.Engine(self.spark, checkpoint=str(self.home / "checkpoint"), config=settings)
        for name, stream in self.streams.items():
            engine.stream(name, stream.frame(), ttl="1 hour")
        engine.query("star", STAR)
        engine.query("chain", CHAIN)
        return engine

    def expected(self, sql: str) -> Bag:
        return batch_join({n: s.table() for n, s in self.streams.items()}, sql)

    def check(self, engine: plait.Engine) -> None:
        for name, sql in (("star", STAR), ("chain", CHAIN)):
            assert bag(plait.QueryHandle(engine, name).results().toArrow()) == self.expected(sql), name


def orders_of(reports: list[dict[str, Any]], query: str, driver: str) -> list[tuple[str, ...]]:
    return list(dict.fromkeys(tuple(report["orders"][query][driver]) for report in reports))


def test_orders_follow_the_data_and_no_row_is_lost_or_doubled(spark: SparkSession, tmp_path: Path) -> None:
    case = Flip(spark, tmp_path)
    case.arrive(5, rare="c")
    with case.engine() as engine:
        reports = run_epochs(engine)
        assert orders_of(reports, "star", "a")[0] == ("b", "c")
        assert reports[-1]["orders"]["star"]["a"] == ["c", "b"], "whoever hardly ever matches is probed first"
        case.check(engine)

        text = engine.explain()
        assert "star.a → c → b instead of b → c" in text
        assert "because" in text
        assert "a probes c: success" in text
        switch = reports[-1]["optimiser"]["switches"][0]
        assert switch["new_ns"] < switch["old_ns"]

    # A restarted engine goes on with what was learnt, and unlearns it.
    case.arrive(8, rare="b")
    with case.engine() as engine:
        reports = run_epochs(engine)
        assert reports[0]["orders"]["star"]["a"] == ["c", "b"]
        case.check(engine)


def test_what_was_learnt_is_advice_only(spark: SparkSession, tmp_path: Path) -> None:
    case = Flip(spark, tmp_path)
    case.arrive(3, rare="c")
    with case.engine() as engine:
        run_epochs(engine)
    file = tmp_path / "checkpoint" / "statistics.json"
    learnt = file.read_text()
    assert '"orders"' in learnt
    for damage in (learnt[: len(learnt) // 2], learnt.replace("star", "rats"), "", "[]"):
        file.write_text(damage)
        case.arrive(1, rare="c")
        with case.engine() as engine:
            run_epochs(engine)
            case.check(engine)


@pytest.mark.soak
def test_every_policy_and_orderer_gives_the_same_rows(spark: SparkSession, tmp_path: Path) -> None:
    case = Flip(spark, tmp_path)
    settings = [
        {"orderer": "greedy", "driver_policy": "round_robin", "probe": "iterative"},
        {"orderer": "selectivity_first", "driver_policy": "initial_output_size"},
        {"orderer": "dp_pick", "driver_policy": "output_rate", "cost_model": "recursive"},
        {"orderer": "fixed", "driver_policy": "consumption_rate", "cost_variant": "no_smoothing"},
    ]
    for number, config in enumerate(settings):
        case.arrive(2, rare="c" if number % 2 else "b")
        with case.engine(**config) as engine:
            reports = run_epochs(engine)
            assert reports[-1]["optimiser"]["orderer"] == config["orderer"]
            case.check(engine)
