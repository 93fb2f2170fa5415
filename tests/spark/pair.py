"""Two scripted streams, one query, one checkpoint: the smallest engine that can be broken and started again."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

import plait
from plait.testing import ScriptedStream, run_epochs
from tests.oracle import Bag, bag, batch_join

SQL = "SELECT a.v, b.w FROM a JOIN b ON a.k = b.k"
ROWS = 20


@dataclass
class Pair:
    """Streams a(k, v) and b(k, w), joined on k; `home` holds sources and checkpoint."""

    spark: SparkSession
    home: Path
    config: Mapping[str, Any] = field(default_factory=dict)
    checkpoint: Path = field(init=False)

    def __post_init__(self) -> None:
        self.checkpoint = self.home / "checkpoint"
        self.a = ScriptedStream(self.spark, self.home / "a", "k long, v long")
        self.b = ScriptedStream(self.spark, self.home / "b", "k long, w long")

    def arrive(self, epochs: int = 1) -> Pair:
        """More rows, one file of each stream per epoch; every task gets some."""
        for _ in range(epochs):
            begin = len(self.a.files) * ROWS
            self.a.add([(i % 13, i) for i in range(begin, begin + ROWS)])
            self.b.add([(i % 11, -i) for i in range(begin, begin + ROWS)])
        return self

    def copy(self, home: Path) -> Pair:
        """The same streams with a copy of the checkpoint: to be damaged without harm."""
        twin = Pair(self.spark, self.home, self.config)
        twin.checkpoint = home / "checkpoint"
        shutil.copytree(self.checkpoint, twin.checkpoint)
        return twin

    @contextmanager
    def engine(self, queries: Mapping[str, str] | None = None, **config: Any) -> Iterator[plait.Engine]:
        """An engine with both streams and the query `q`, or other queries."""
        settings = plait.Config(**{"tasks": 2, **self.config, **config})
        with plait.Engine(self.spark, checkpoint=str(self.checkpoint), config=settings) as engine:
            for name, frame in self.frames().items():
                engine.stream(name, frame)
            for name, sql in ({"q": SQL} if queries is None else queries).items():
                engine.query(name, sql)
            yield engine

    def frames(self) -> dict[str, DataFrame]:
        """The streams as Spark sees them."""
        return {"a": self.a.frame(), "b": self.b.frame()}

    def expected(self, epochs: int | None = None) -> Bag:
        """What the query gives over the first epochs, or all."""
        return batch_join({"a": self.a.table(epochs), "b": self.b.table(epochs)}, SQL)

    def run(self, **config: Any) -> list[int]:
        """Runs what is available and compares all that was ever committed with the oracle; the epochs it took."""
        with self.engine(**config) as engine:
            done = [progress["epoch"] for progress in run_epochs(engine)]
            assert bag(plait.QueryHandle(engine, "q").results().toArrow()) == self.expected()
        return done

    def refused(self, code: str, **config: Any) -> plait.PlaitError:
        """Tries to run, and is told why not: an error with a cause and something to do about it."""
        with pytest.raises(plait.PlaitError) as caught, self.engine(**config) as engine:
            run_epochs(engine)
        return told(caught.value, code)


def told(error: plait.PlaitError, code: str) -> plait.PlaitError:
    """The error, if it is the one expected and says what a person needs to know."""
    assert error.code == code, str(error)
    assert len(error.cause) > 10, str(error)
    assert len(error.remedy) > 10, str(error)
    return error
