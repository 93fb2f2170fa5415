"""Many aggregates in one engine: each is DuckDB's after every epoch, and one job finishes all with the same plan."""

from __future__ import annotations

import datetime as dt
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession

import plait
from plait.runtime.answers import answer as answers
from plait.runtime.answers import answers_together as together
from plait.runtime.answers import placed_groups
from plait.runtime.task.shared_results import SHARED
from plait.testing import ScriptedStream, run_epochs
from tests.oracle import Bag, Oracle, bag

pytestmark = pytest.mark.spark

START = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
COLUMNS = "s.g, count(*) AS n, sum(s.v) AS total, avg(s.v) AS mean, min(s.d) AS least, max(t.w) AS most, sum(s.d) AS sd"
ON = "s.k = t.k"
FILTERS = {
    "all": "true",
    "low": "s.v < 3",
    "high": "s.v >= 3",
    "again": "s.v < 3",
    "named": "s.g IS NOT NULL AND t.w > 1",
    "none": "s.v > 99",
    "across": "s.v < t.w",
    "near": "t.ts BETWEEN s.ts AND s.ts + INTERVAL 2 MINUTES",
    "nearer": "t.ts BETWEEN s.ts AND s.ts + INTERVAL 1 MINUTE AND t.w < 4",
}
QUERIES = {name: f"SELECT {COLUMNS} FROM s JOIN t ON {ON} AND {where} GROUP BY s.g" for name, where in FILTERS.items()}


class Shop:
    """Streams s and t, a minute per epoch; what sinks were given, by query and epoch."""

    def __init__(self, spark: SparkSession, home: Path) -> None:
        self.spark, self.home = spark, home
        self.s = ScriptedStream(spark, home / "s", "k int, g string, v int, d decimal(10,2), ts timestamp")
        self.t = ScriptedStream(spark, home / "t", "k int, w int, ts timestamp")
        self.given: dict[str, dict[int, Bag]] = {}
        self.jobs: list[int] = []

    def arrive(self, epochs: int = 1) -> None:
        for _ in range(epochs):
            number = len(self.s.files)
            rng = random.Random(number)

            def some(*values: Any, rng: random.Random = rng) -> Any:
                return rng.choice((*values, None))

            def when(number: int = number, rng: random.Random = rng) -> dt.datetime:
                return START + dt.timedelta(minutes=number, seconds=rng.randrange(60))

            cents = [Decimal(n).scaleb(-2) for n in range(0, 900, 77)]
            self.s.add(
                [(some(0, 1, 2, 3), some("a", "b", "c"), some(*range(6)), some(*cents), when()) for _ in range(12)]
            )
            self.t.add([(some(0, 1, 2, 3, 4), rng.randrange(6), when()) for _ in range(10)])

    @contextmanager
    def engine(self, queries: Mapping[str, str], mode: str | None = None, **config: Any) -> Iterator[plait.Engine]:
        settings = {"tasks": 2, "snapshot_every": 2, "gc_grace_seconds": 0, "sync": False, **config}
        with plait.Engine(self.spark, str(self.home / "checkpoint"), plait.Config(**settings)) as engine:
            engine.stream("s", self.s.frame().withWatermark("ts", "0 seconds"))
            engine.stream("t", self.t.frame().withWatermark("ts", "0 seconds"))
            for name, sql in queries.items():
                engine.query(name, sql, mode).foreach_batch(self.keeper(name))
            yield engine

    def keeper(self, name: str) -> Callable[[DataFrame, int], None]:
        def keep(rows: DataFrame, epoch: int) -> None:
            self.given.setdefault(name, {})[epoch] = bag(rows.toArrow())

        return keep

    def expected(self, sql: str, epochs: int | None = None, since: int = 0) -> Bag:
        """DuckDB's answer over some epochs; those before `since` were not seen."""
        with Oracle() as oracle:
            oracle.load({n: self.rows(n, epochs).slice(self.rows(n, since).num_rows) for n in "st"})
            return rounded(oracle.bag(sql))

    def rows(self, name: str, epochs: int | None) -> Any:
        return getattr(self, name).table(epochs)


def rounded(rows: Bag) -> Bag:
    """Spark's averages are doubles as well, of sums in another order."""
    return Counter({tuple(round(v, 6) if isinstance(v, float) else v for v in row): n for row, n in rows.items()})


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The queries of every finishing job."""
    found: list[tuple[str, ...]] = []
    plain = together.Group._finished

    def finished(group: together.Group) -> Any:
        parts = plain(group)
        found.append(tuple(answer.name.partition(".")[0] for answer in group.answers) if parts else ())
        return parts

    monkeypatch.setattr(together.Group, "_finished", finished)
    return found


def in_force(engine: plait.Engine) -> dict[str, Any]:
    return {query: list(files) for query, files in engine.checkpoint.log.results().items()}


@pytest.mark.parametrize("where", ["here", "spark", "files"])
def test_each_of_many_aggregates_is_duckdb_s_after_every_epoch(
    spark: SparkSession, tmp_path: Path, jobs: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Merged in the driver, merged by Spark, and with answers that wait in files."""
    if where != "here":
        monkeypatch.setattr(together, "HERE_BYTES", -1)
        monkeypatch.setattr(answers, "HERE_BYTES", -1)
    if where == "files":
        monkeypatch.setattr(together, "COLLECTED_BYTES", -1)
    monkeypatch.setattr(answers, "MERGE_FILES", 4)
    shop = Shop(spark, tmp_path)
    first = dict(list(QUERIES.items())[:5])
    later = {name: sql for name, sql in QUERIES.items() if name != "low"}
    shop.arrive(2)
    with shop.engine(first) as engine:
        run_epochs(engine)
        if where == "here":
            files = in_force(engine)
            assert all(file.path.startswith(SHARED) and file.grouped for of in files.values() for file in of)
            assert len({file.path for of in files.values() for file in of}) <= 4
    shop.arrive(3 if where == "here" else 1)
    # One is dropped, four begin with what is there to come.
    with shop.engine({}) as engine:
        for name, sql in later.items():
            since = {} if name in first else {"since": "new"}
            engine.query(name, sql, **since).foreach_batch(shop.keeper(name))
        engine.drop("low")
        run_epochs(engine)
        for name, sql in later.items():
            want = shop.expected(sql, None, 0 if name in first else 2)
            assert rounded(bag(plait.QueryHandle(engine, name).results().toArrow())) == want, name
        if where == "here":
            files = in_force(engine)
            assert any(file.whole for of in files.values() for file in of)
            assert len({file.path for of in files.values() for file in of}) <= 10
    epochs = len(shop.s.files)
    for name, sql in QUERIES.items():
        begun = 0 if name in first else 2
        ended = 2 if name == "low" else epochs
        want = {n: shop.expected(sql, n + 1, begun) for n in range(begun, ended)}
        assert {n: rounded(rows) for n, rows in shop.given[name].items()} == want, name
    assert [len(queries) for queries in jobs] == [5] * 2 + [8] * (epochs - 2)


def test_update_mode_hands_over_the_groups_that_have_changed(
    spark: SparkSession, tmp_path: Path, jobs: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    shop, names = Shop(spark, tmp_path), ("all", "low", "across", "none")
    shop.arrive(1)
    # An epoch that changes no group of some.
    soon = START + dt.timedelta(seconds=90)
    shop.s.add([(0, "c", 5, None, soon)])
    shop.t.add([(0, 0, soon)])
    shop.arrive(2)
    queries = {name: QUERIES[name] for name in names}
    with shop.engine(queries, "update", tasks=1) as engine:
        run_epochs(engine)
    monkeypatch.setattr(together, "HERE_BYTES", -1)
    shop.arrive(2)
    with shop.engine(queries, "update", tasks=1) as engine:
        run_epochs(engine)
    for name in names:
        before: Bag = Counter()
        for epoch in range(6):
            now = shop.expected(QUERIES[name], epoch + 1)
            given = rounded(shop.given[name][epoch])
            assert given - now == Counter(), (name, epoch)
            # What has another value must be there; what has the same value may be, if rows came that change nothing.
            assert now - before <= given, (name, epoch)
            before = now
    assert [len(found) for found in jobs] == [4] * 6
    assert sum(shop.given["all"][1].values()) < sum(shop.given["all"][0].values())


def test_append_mode_hands_over_each_query_s_groups_when_they_are_final(
    spark: SparkSession, tmp_path: Path, jobs: list[tuple[str, ...]]
) -> None:
    """Queries with other windows have their groups at other times: as each alone has them."""

    def sql(where: str) -> str:
        return f"SELECT s.ts, count(*) AS n, sum(t.w) AS total FROM s JOIN t ON {ON} AND {where} GROUP BY s.ts"

    near = {name: sql(FILTERS[name]) for name in ("near", "nearer")}
    near["nearest"] = sql("t.ts BETWEEN s.ts AND s.ts + INTERVAL 10 SECONDS")
    shop, alone = Shop(spark, tmp_path / "all"), {name: Shop(spark, tmp_path / name) for name in near}
    for each in (shop, *alone.values()):
        each.arrive(6)
    with shop.engine(near, "append") as engine:
        plait.QueryHandle(engine, "nearer").sink("parquet", path=str(tmp_path / "out"))
        run_epochs(engine)
    assert [len(found) for found in jobs] == [3] * 6
    for name, own in alone.items():
        with own.engine({name: near[name]}, "append") as engine:
            run_epochs(engine)
        assert sum(map(len, own.given[name].values()))
        if name == "nearer":
            assert bag(pq.read_table(tmp_path / "out")) == sum(own.given[name].values(), Counter())
        else:
            assert shop.given[name] == own.given[name]


def test_a_query_whose_part_fails_is_parked_alone(
    spark: SparkSession, tmp_path: Path, jobs: list[tuple[str, ...]]
) -> None:
    shop, sql = Shop(spark, tmp_path), "SELECT s.g, 1 / (count(*) - {}) AS x FROM s JOIN t ON s.k = t.k{} GROUP BY s.g"
    shop.arrive(2)
    with Oracle() as oracle:
        oracle.load({name: getattr(shop, name).table(1) for name in "st"})
        (n,) = oracle.table("SELECT count(*) FROM s JOIN t ON s.k = t.k GROUP BY s.g LIMIT 1").column(0).to_pylist()
    # The same plan for both, which divides by zero for one of them only.
    queries = {"bad": sql.format(n, ""), "good": sql.format(n, " AND t.w > 99"), "other": QUERIES["all"]}
    with shop.engine(queries) as engine:
        engine.start(available_now=True).await_termination()
        assert {query.name: query.status for query in engine.queries()} == {
            "bad": "parked",
            "good": "live",
            "other": "live",
        }
    assert jobs == []
    assert list(shop.given["good"]) == list(shop.given["other"]) == [0, 1]
    assert rounded(shop.given["other"][1]) == shop.expected(QUERIES["all"])


def test_a_sink_that_fails_is_parked_alone_and_gets_one_answer_when_it_is_resumed(
    spark: SparkSession, tmp_path: Path, jobs: list[tuple[str, ...]]
) -> None:
    shop, broken = Shop(spark, tmp_path), [True]
    queries = {name: QUERIES[name] for name in ("all", "low", "high")}

    def fussy(rows: DataFrame, epoch: int) -> None:
        if broken[0]:
            raise ValueError("the table is locked")
        shop.keeper("low")(rows, epoch)

    for resumed in (False, True):
        shop.arrive(2)
        with shop.engine(queries) as engine:
            low = plait.QueryHandle(engine, "low").foreach_batch(fussy)
            if resumed:
                broken[0] = False
                low.resume()
            engine.start(available_now=True).await_termination()
            assert low.status == ("live" if resumed else "parked")
    assert [len(found) for found in jobs] == [3, 2, 3, 3]
    # One answer stands for all that it missed.
    for name, epochs in (("all", range(4)), ("high", range(4)), ("low", range(1, 4))):
        want = {epoch: shop.expected(QUERIES[name], epoch + 1) for epoch in epochs}
        assert {epoch: rounded(rows) for epoch, rows in shop.given[name].items()} == want


def test_other_functions_modes_and_conditions_above_are_finished_apart(
    spark: SparkSession, tmp_path: Path, jobs: list[tuple[str, ...]]
) -> None:
    shop, base = Shop(spark, tmp_path), "FROM s JOIN t ON s.k = t.k"
    queries = {
        "a": f"SELECT s.g, count(*) AS n {base} GROUP BY s.g HAVING count(*) > 5",
        "b": f"SELECT s.g, count(*) AS n {base} AND s.v < 3 GROUP BY s.g HAVING count(*) > 5",
        "c": f"SELECT s.g, count(*) AS n {base} GROUP BY s.g HAVING count(*) > 6",
        "d": f"SELECT s.g, count(*) AS many {base} GROUP BY s.g HAVING count(*) > 5",
        "e": f"SELECT s.g, count(*) AS n {base} AND s.v > 3 GROUP BY s.g ORDER BY n DESC, s.g LIMIT 2",
        "f": f"SELECT t.w, count(*) AS n {base} AND s.v > 3 GROUP BY t.w HAVING count(*) > 5",
        "g": "SELECT s.g, count(*) AS n FROM s WHERE s.v < 5 GROUP BY s.g HAVING count(*) > 5",
        "h": f"SELECT s.g, sum(t.w) AS n {base} GROUP BY s.g HAVING sum(t.w) > 5",
    }
    shop.arrive(3)
    with shop.engine(queries) as engine:
        run_epochs(engine)
    # A join below is no difference: what stands above is the same for a, b and g.
    assert jobs == [("a", "b", "g")] * 3
    for name, sql in queries.items():
        text = sql.replace(" DESC, s.g", " DESC, s.g NULLS FIRST")
        assert shop.given[name] == {epoch: shop.expected(text, epoch + 1) for epoch in range(3)}, name
    assert placed_groups.HERE_BYTES > 0
