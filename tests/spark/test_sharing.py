"""Several queries on one engine: sources, stores and equal beginnings of probe orders are shared, results are not."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import plait
from plait.testing import ScriptedStream, run_epochs
from tests.oracle import Oracle
from tests.spark.test_queries import epoch_bags

pytestmark = pytest.mark.spark

QUERIES = {
    "all_rows": "SELECT a.id AS a, b.id AS b, c.id AS c FROM a JOIN b ON a.k = b.k JOIN c ON b.k = c.k",
    "few_rows": "SELECT a.id AS a, b.id AS b, c.id AS c FROM a JOIN b ON a.k = b.k JOIN c ON b.k = c.k WHERE a.m < 3",
    "others": "SELECT a.id AS a, b.id AS b, d.id AS d FROM a JOIN b ON a.k = b.k JOIN d ON b.k = d.k WHERE a.m >= 3",
    "renamed": "SELECT y.id AS y, x.id AS x FROM a x JOIN b y ON x.k = y.k",
    "chain": "SELECT a.id AS a, d.id AS d FROM a JOIN b ON a.k = b.k JOIN c ON b.m = c.m JOIN d ON c.k = d.k",
    "itself": "SELECT x.id AS x, y.id AS y FROM a x JOIN a y ON x.k = y.k AND x.m < 3 AND y.m >= 3",
}


def streams_in(spark: SparkSession, base: Path, epochs: int) -> dict[str, ScriptedStream]:
    choose = random.Random(3)
    made = {name: ScriptedStream(spark, base / name, "id int, k int, m int") for name in "abcd"}
    for epoch in range(epochs):
        for stream in made.values():
            values = [(choose.choice((None, 0, 1, 2, 3, 4)), choose.choice((None, 0, 2, 3, 5))) for _ in range(9)]
            stream.add([(100 * epoch + i, *pair) for i, pair in enumerate(values)])
    return made


def run_all(
    spark: SparkSession, base: Path, streams: dict[str, ScriptedStream], names: list[str]
) -> tuple[plait.Engine, list[dict[str, object]]]:
    engine = plait.Engine(spark, str(base), plait.Config(tasks=2))
    for name, stream in streams.items():
        engine.stream(name, stream.frame())
    for name in names:
        engine.query(name, QUERIES[name])
    return engine, run_epochs(engine)


def test_queries_together_give_what_each_gives_alone_and_probe_less(spark: SparkSession, tmp_path: Path) -> None:
    streams = streams_in(spark, tmp_path, 2)
    together, progress = run_all(spark, tmp_path / "together", streams, list(QUERIES))
    with together, Oracle() as oracle:
        for epoch in range(2):
            oracle.load({name: stream.table(epoch + 1) for name, stream in streams.items()})
            for name, sql in QUERIES.items():
                assert epoch_bags(together, name, 2)[epoch] == oracle.bag(sql), f"{name} after epoch {epoch}"
        plan = together.plan
    # One input per stream, one store per stream and attribute.
    assert [i.relation for i in plan.inputs] == list("abcd")
    assert [s.id for s in plan.stores] == ["a[k]", "b[k]", "b[m]", "c[k]", "c[m]", "d[k]"]
    assert progress[-1]["segments"].keys() == {s.id for s in plan.stores}  # type: ignore[attr-defined]
    # Every query joins by k, so rows without it are left at the source.
    keys = {name: stream.table().column("k").to_pylist()[9:] for name, stream in streams.items()}
    assert progress[-1]["rows_in"] == {name: 9 - found.count(None) for name, found in keys.items()}

    # "all_rows" and "renamed" begin alike: together they look up as often as the longer one alone.
    one, alone = run_all(spark, tmp_path / "alone", streams, ["all_rows"])
    both, shared = run_all(spark, tmp_path / "both", streams, ["all_rows", "renamed"])
    one.close()
    both.close()

    def lookups(reports: list[dict[str, object]]) -> int:
        return sum(edge["lookups"] for report in reports for edge in report["edges"].values())  # type: ignore[attr-defined]

    assert lookups(shared) == lookups(alone)
    assert [p["rows_out"]["all_rows"] for p in shared] == [p["rows_out"]["all_rows"] for p in alone]  # type: ignore[index]
