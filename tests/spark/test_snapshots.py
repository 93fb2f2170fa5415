"""What a program asks of an engine at work: it gets what is in force, whole, and waits for no epoch or admission."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest
from pyspark.sql import DataFrame, SparkSession

from plait.state.files.storage import LocalFiles
from tests.spark.changes_driver import BASE, Changing, found

pytestmark = pytest.mark.spark

PATIENCE = 60.0
"""Seconds after which something hangs: all that is asked here takes a fraction of a second."""
WIDE = "SELECT a.v, a.s, b.w FROM a JOIN b ON a.k = b.k"
Result = TypeVar("Result")


class Held:
    """A place where the engine stays until it is let go."""

    def __init__(self) -> None:
        self.reached, self.free = threading.Event(), threading.Event()

    def stay(self) -> None:
        self.reached.set()
        assert self.free.wait(PATIENCE)

    def meanwhile(self, ask: Callable[[], Result]) -> Result:
        """What is answered while the engine stays there."""
        assert self.reached.wait(PATIENCE)
        with ThreadPoolExecutor(1) as other:
            try:
                return other.submit(ask).result(PATIENCE / 2)
            finally:
                self.free.set()


def test_plans_and_results_are_told_while_an_epoch_is_at_its_sinks(spark: SparkSession, tmp_path: Path) -> None:
    changing, held = Changing(spark, tmp_path).arrive(), Held()

    def slow(rows: DataFrame, epoch: int) -> None:
        held.stay()

    with changing.engine() as engine:
        kept = engine.query("kept", BASE)
        counted = engine.query("counted", "SELECT a.k, count(*) AS n FROM a JOIN b ON a.k = b.k GROUP BY a.k")
        engine.query("q", BASE).foreach_batch(slow)
        run = engine.start(available_now=True)
        text, rows, groups = held.meanwhile(lambda: (engine.explain(), found(kept), found(counted)))
        assert "Query kept" in text
        # The epoch is committed before its rows go to sinks.
        assert rows == changing.answer(BASE)
        assert groups == changing.answer("SELECT a.k, count(*) AS n FROM a JOIN b ON a.k = b.k GROUP BY a.k")
        assert run.await_termination(PATIENCE)


def test_what_is_told_while_a_query_becomes_live_is_of_one_catalog(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changing, held = Changing(spark, tmp_path).arrive().arrive(), Held()
    with changing.engine(keep={"a": "all"}) as engine:
        engine.query("q", BASE)
        changing.run(engine)
    changing.arrive()
    with changing.engine(keep={"a": "all"}) as engine:
        old, new = engine.query("q", BASE), engine.query("n", WIDE, since="state")
        put = LocalFiles.put_if_absent

        def slow(files: LocalFiles, name: str, data: bytes) -> bool:
            # The version with which the new query is live: the start has written the one before.
            if name == "catalog/000000000002.json":
                held.stay()
            return put(files, name, data)

        monkeypatch.setattr(LocalFiles, "put_if_absent", slow)
        run = engine.start(available_now=True)

        def ask() -> tuple[Any, ...]:
            return new.status, new.live_since, engine.explain(), found(new), found(old)

        status, live_since, text, rows, olds = held.meanwhile(ask)
        assert (status, live_since) == ("building", None)
        assert "n (since=state): waits for a store" in text
        assert "Query n" not in text
        assert not rows
        assert olds == changing.answer(BASE)
        assert run.await_termination(PATIENCE)
        assert (new.status, new.live_since) == ("live", 3)
        assert "n (since=state): live since epoch 3" in engine.explain()
        assert "Query n" in engine.explain()
