"""Random trees of inner, left, semi and anti joins: the converted query answers what the query as written answers.

Every tree joins three to five small streams with NULLs among their keys, with filters and projections at any level, and
sometimes an aggregate on top.  Many run in one engine over the same streams; DuckDB runs the text as it is.
"""

from __future__ import annotations

import random
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

import plait
from plait.errors import RecomputationWarning
from plait.testing import ScriptedStream, run_epochs
from tests.oracle import Bag, Oracle, bag

pytestmark = pytest.mark.spark

STREAMS = ("r", "s", "t")
EPOCHS = 3
ROWS = 12
QUERIES = 8


@dataclass
class Tree:
    """SQL that gives rows, and the columns they have: all are integers, `keys` are those to join on."""

    sql: str
    keys: list[str]
    values: list[str]


@dataclass
class Trees:
    """Draws trees; every column of a query has a name of its own."""

    rng: random.Random
    number: int = 0
    kinds: Counter[str] = field(default_factory=Counter)

    def query(self) -> str:
        """A tree of three to five streams, and what is asked about its rows."""
        tree = self.tree(self.rng.randint(3, 5))
        columns = tree.keys + tree.values
        if self.rng.random() < 0.3:
            group, value = self.rng.choice(columns), self.rng.choice(columns)
            return f"SELECT {group}, count(*) AS n, sum({value}) AS total FROM ({tree.sql}) GROUP BY {group}"
        return tree.sql

    def tree(self, streams: int) -> Tree:
        """A join of so many streams, of any shape."""
        if streams == 1:
            return self.leaf()
        left = self.rng.randint(1, streams - 1)
        return self.join(self.tree(left), self.tree(streams - left))

    def leaf(self) -> Tree:
        prefix = self._name()
        columns = [f"{prefix}_{column}" for column in ("k", "m", "v")]
        picked = f"k AS {columns[0]}, m AS {columns[1]}, v AS {columns[2]}"
        sql = f"SELECT {picked} FROM {self.rng.choice(STREAMS)}"
        where = self.rng.choice(("", "", " WHERE v > 1", " WHERE k <> 2", " WHERE m IS NULL OR v < 4", " WHERE k < m"))
        return Tree(sql + where, columns[:2], columns[2:])

    def join(self, left: Tree, right: Tree) -> Tree:
        kind = self.rng.choice(("inner", "inner", "inner", "left", "semi", "anti"))
        self.kinds[kind] += 1
        on = f"{self.rng.choice(left.keys)} = {self.rng.choice(right.keys)}"
        if self.rng.random() < 0.25:
            mine, theirs = self.rng.choice(left.keys + left.values), self.rng.choice(right.keys + right.values)
            on += self.rng.choice((f" AND {mine} < {theirs}", f" AND ({mine} > {theirs} OR {theirs} IS NULL)"))
        if kind in ("semi", "anti"):
            asks = "EXISTS" if kind == "semi" else "NOT EXISTS"
            sql = f"SELECT * FROM ({left.sql}) WHERE {asks} (SELECT 1 FROM ({right.sql}) WHERE {on})"
            return self._projected(Tree(sql, left.keys, left.values))
        word = "JOIN" if kind == "inner" else "LEFT JOIN"
        sql = f"SELECT * FROM ({left.sql}) {word} ({right.sql}) ON {on}"
        return self._projected(Tree(sql, left.keys + right.keys, left.values + right.values))

    def _projected(self, tree: Tree) -> Tree:
        """Sometimes fewer columns, a computed one, and a filter."""
        if self.rng.random() < 0.5:
            return tree
        keys = self.rng.sample(tree.keys, self.rng.randint(1, len(tree.keys)))
        values = self.rng.sample(tree.values, self.rng.randint(0, len(tree.values)))
        computed = f"{self._name()}_c"
        one, other = self.rng.choice(tree.keys + tree.values), self.rng.choice(tree.keys + tree.values)
        expression = self.rng.choice((f"{one} + 1", f"coalesce({one}, {other})", f"{one} * {other}"))
        columns = ", ".join([*keys, *values, f"{expression} AS {computed}"])
        where = self.rng.choice(("", f" WHERE {one} > 0", f" WHERE {one} IS NULL OR {other} <> 3"))
        return Tree(f"SELECT {columns} FROM ({tree.sql}){where}", keys, [*values, computed])

    def _name(self) -> str:
        self.number += 1
        return f"c{self.number}"


def rows(rng: random.Random) -> list[tuple[Any, ...]]:
    return [tuple(rng.choice((0, 1, 2, 3, 4, 5, None)) for _ in range(3)) for _ in range(ROWS)]


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in (2, 3, 4, 5))])
@pytest.mark.filterwarnings("ignore::plait.errors.RecomputationWarning")
def test_oracle_a_converted_tree_of_joins_means_what_it_meant(spark: SparkSession, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    streams = {name: ScriptedStream(spark, tmp_path / name, "k int, m int, v int") for name in STREAMS}
    for _ in range(EPOCHS):
        for stream in streams.values():
            stream.add(rows(rng))
    trees = Trees(rng)
    queries = {f"q{i}": trees.query() for i in range(QUERIES)}
    assert set(trees.kinds) == {"inner", "left", "semi", "anti"}
    found: dict[tuple[str, int], Bag] = {}

    def keeper(name: str) -> Any:
        def keep(frame: DataFrame, epoch: int) -> None:
            found[name, epoch] = bag(frame.toArrow())

        return keep

    answered: set[str] = set()
    config = plait.Config(tasks=2, fan_in=2, sync=False)
    with plait.Engine(spark, str(tmp_path / "checkpoint"), config) as engine, warnings.catch_warnings():
        warnings.simplefilter("ignore", RecomputationWarning)
        for name, stream in streams.items():
            engine.stream(name, stream.frame())
        for name, sql in queries.items():
            query = engine.query(name, sql)
            if query.output_mode != "append":
                query.foreach_batch(keeper(name))
                answered.add(name)
        run_epochs(engine)
        for name in queries.keys() - answered:
            found[name, EPOCHS - 1] = bag(plait.QueryHandle(engine, name).results().toArrow())
    with Oracle() as oracle:
        for epoch in range(EPOCHS):
            oracle.load({name: stream.table(epoch + 1) for name, stream in streams.items()})
            for name, sql in queries.items():
                if (name, epoch) in found:
                    assert found[name, epoch] == oracle.bag(sql), f"seed {seed}, {name} after epoch {epoch}: {sql}"
    assert sum(map(bool, found.values())) > len(found) / 2
