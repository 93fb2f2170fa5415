"""Append mode of aggregates: a group is handed over once, when it is final, and then it is what it stays.

Rows come out of order, some too late.  The oracle is DuckDB over the rows that were not dropped as late.
"""

from __future__ import annotations

import datetime as dt
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession

import plait
from plait.runtime.answers import answer as answers
from plait.testing import ScriptedStream, run_epochs
from tests.oracle import Oracle
from tests.spark.pair import told

pytestmark = pytest.mark.spark

START = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
MINUTE_US = 60_000_000
LABELS = [(0, "even"), (1, "odd"), (2, "even")]
PAID = "o.k = p.k AND p.ts BETWEEN o.ts AND o.ts + INTERVAL 2 MINUTES"
SPARK = {
    "one_stream": "SELECT unix_micros(w.end) AS e, g, n FROM (SELECT window(ts, '5 minutes') AS w, g, count(*) AS n "
    "FROM o GROUP BY window(ts, '5 minutes'), g)",
    "joined": "SELECT unix_micros(w.end) AS e, g, n, total FROM (SELECT window(o.ts, '5 minutes') AS w, o.g, "
    f"count(*) AS n, sum(p.v) AS total FROM o JOIN p ON {PAID} GROUP BY window(o.ts, '5 minutes'), o.g) WHERE n > 1",
    "of_the_other": "SELECT unix_micros(w.end) AS e, n FROM (SELECT window(p.ts, '5 minutes') AS w, count(*) AS n "
    f"FROM o JOIN p ON {PAID} GROUP BY window(p.ts, '5 minutes'))",
    "by_time": "SELECT unix_micros(ts) AS e, count(*) AS n FROM o GROUP BY ts",
    "labelled": "SELECT unix_micros(w.end) AS e, label, n FROM (SELECT window(o.ts, '5 minutes') AS w, d.label, "
    "count(*) AS n FROM o JOIN d ON o.k = d.k GROUP BY window(o.ts, '5 minutes'), d.label)",
}
END = "epoch_us(time_bucket(INTERVAL 5 MINUTE, {}) + INTERVAL 5 MINUTE) AS e"
DUCKDB = {
    "one_stream": f"SELECT {END.format('ts')}, g, count(*) FROM o GROUP BY ALL",
    "joined": f"SELECT {END.format('o.ts')}, g, count(*), sum(p.v) FROM o JOIN p ON {PAID} GROUP BY ALL "
    "HAVING count(*) > 1",
    "of_the_other": f"SELECT {END.format('p.ts')}, count(*) FROM o JOIN p ON {PAID} GROUP BY ALL",
    "by_time": "SELECT epoch_us(ts) AS e, count(*) FROM o GROUP BY ALL",
    "labelled": f"SELECT {END.format('ts')}, label, count(*) FROM o JOIN d ON o.k = d.k GROUP BY ALL",
}
FINAL_US = {"joined": 2 * MINUTE_US}
"""How far the watermark must be past the end; of `of_the_other`, orders are never later than their payments."""


class Shop:
    """Orders and payments, three minutes per epoch."""

    def __init__(self, spark: SparkSession, home: Path) -> None:
        self.spark, self.home = spark, home
        self.o = ScriptedStream(spark, home / "o", "k int, g string, ts timestamp")
        self.p = ScriptedStream(spark, home / "p", "k int, v int, ts timestamp")
        self.delivered: dict[str, dict[int, list[tuple[Any, ...]]]] = {name: {} for name in SPARK}
        self.watermarks: dict[str, list[int | None]] = {name: [None] for name in SPARK}
        """By query: each has its own, of the streams that it reads."""
        self.late = 0

    def arrive(self, epochs: int) -> None:
        for _ in range(epochs):
            number = len(self.o.files)
            rng = random.Random(number)

            def when(number: int = number, rng: random.Random = rng) -> dt.datetime:
                return START + dt.timedelta(minutes=3 * number, seconds=10 * rng.randrange(-24, 18))

            self.o.add([(rng.randrange(4), rng.choice("ab"), when()) for _ in range(30)] + [(0, "a", None)])
            self.p.add([(rng.randrange(4), rng.randrange(9), when()) for _ in range(30)])

    def engine(self) -> plait.Engine:
        # Snapshots and garbage collection all the time: of the manifests hardly more than the last is left.
        config = plait.Config(tasks=2, fan_in=2, snapshot_every=1, gc_grace_seconds=0, sync=False)
        engine = plait.Engine(self.spark, str(self.home / "checkpoint"), config)
        for name in "op":
            engine.stream(name, getattr(self, name).frame().withWatermark("ts", "1 minute"))
        engine.table("d", self.spark.createDataFrame(LABELS, "k int, label string"))
        return engine

    def run(self) -> dict[str, list[tuple[Any, ...]]]:
        with self.engine() as engine:
            for name, sql in SPARK.items():
                query = engine.query(name, sql, "append")
                assert query.output_mode == "append"
                if name == "joined":
                    query.sink("parquet", path=str(self.home / "parquet"))
                else:
                    query.foreach_batch(self.keeper(name))
            for progress in run_epochs(engine):
                for name in SPARK:
                    (join,) = plait.QueryHandle(engine, name).joins
                    self.watermarks[name].append(progress["watermarks"][join])
                self.late += sum(progress["rows_late"].values())
            return {n: rows_of(plait.QueryHandle(engine, n).results().toArrow()) for n in SPARK}

    def keeper(self, name: str) -> Any:
        def keep(rows: DataFrame, epoch: int) -> None:
            found = rows_of(rows.toArrow())
            # An epoch that is handed over again is the same.
            assert self.delivered[name].setdefault(epoch, found) == found

        return keep

    def expected(self, name: str) -> list[tuple[Any, ...]]:
        """The answer over all rows that were in time."""
        with Oracle() as oracle:
            oracle.load({"o": self.timely(self.o, name), "p": self.timely(self.p, name)})
            oracle.connection.execute("CREATE TABLE d (k INT, label VARCHAR)")
            oracle.connection.executemany("INSERT INTO d VALUES (?, ?)", LABELS)
            return rows_of(oracle.table(DUCKDB[name]))

    def timely(self, stream: ScriptedStream, query: str) -> pa.Table:
        parts = []
        for path, mark in zip(stream.files, self.watermarks[query], strict=False):
            part = pq.read_table(path, schema=stream.arrow)
            if mark is not None:
                late = pc.less_equal(part.column("ts").cast(pa.int64()), mark * 1000)
                part = part.filter(pc.invert(pc.fill_null(late, False)))
            parts.append(part)
        return pa.concat_tables(parts)


def rows_of(table: pa.Table) -> list[tuple[Any, ...]]:
    found = [tuple(row.values()) for row in table.to_pylist()]
    return sorted((row for row in found if row[0] is not None), key=str)


def test_oracle_groups_are_handed_over_once_when_they_are_final(spark: SparkSession, tmp_path: Path) -> None:
    shop = Shop(spark, tmp_path)
    shop.arrive(4)
    shop.run()
    # The last answers were on their way when the process died.
    receipts = list((tmp_path / "checkpoint").rglob("*receipt*/*3*"))
    assert receipts
    for receipt in receipts:
        receipt.unlink()
    shop.arrive(4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answers, "MERGE_FILES", 2)
        results = shop.run()
    assert shop.late > 0
    files = sorted((tmp_path / "parquet").glob("epoch-*.parquet"))
    shop.delivered["joined"] = {int(path.name[6:18]): rows_of(pq.read_table(path)) for path in files}
    for name in SPARK:
        mark = shop.watermarks[name][-1]
        assert mark is not None
        parts = shop.delivered[name]
        given = Counter(row for rows in parts.values() for row in rows)
        final = Counter(shop.expected(name))
        closed = Counter({row: n for row, n in final.items() if row[0] + FINAL_US.get(name, 0) <= mark * 1000})
        assert given == closed, name
        assert Counter(results[name]) == given
        assert len(given) < len(final), "the last groups are still open"
        assert sum(bool(rows) for rows in parts.values()) > 3, "they came one after the other"


def test_a_group_that_lacks_rows_which_were_gone_when_its_query_began_is_not_handed_over(
    spark: SparkSession, tmp_path: Path
) -> None:
    shop = Shop(spark, tmp_path)
    base = f"SELECT o.k, o.g, o.ts AS at, p.v, p.ts FROM o JOIN p ON {PAID}"
    shop.arrive(4)
    marks: list[int | None] = [None]

    def run(engine: plait.Engine) -> None:
        engine.query("base", base)
        marks.extend(progress["watermarks"]["base"] for progress in run_epochs(engine))

    with shop.engine() as engine:
        run(engine)
    begun = marks[-1]
    assert begun is not None
    shop.arrive(4)
    with shop.engine() as engine:
        query = engine.query("joined", SPARK["joined"], "append", since="state")
        query.foreach_batch(shop.keeper("joined"))
        run(engine)
        assert query.floors == {"o": 0, "p": 0}
        given = Counter(row for rows in shop.delivered["joined"].values() for row in rows)
        assert Counter(rows_of(query.results().toArrow())) == given
    shop.watermarks["joined"] = marks
    assert marks[-1] is not None
    # A payment at or before the watermark has been let go: only orders after it are sure to have all of theirs.
    closed = {row for row in shop.expected("joined") if row[0] + FINAL_US["joined"] <= marks[-1] * 1000}
    assert given == Counter(row for row in closed if row[0] - 5 * MINUTE_US > begun * 1000)
    assert given
    assert len(given) < len({row for row in closed if row[0] > begun * 1000}), "some groups were begun"


def test_groups_that_are_never_final_have_no_append_mode(spark: SparkSession, tmp_path: Path) -> None:
    shop = Shop(spark, tmp_path)
    window = "window(o.ts, '5 minutes')"
    with shop.engine() as engine:
        for sql, why in {
            f"SELECT {window}, count(*) FROM o JOIN p ON o.k = p.k GROUP BY {window}": "is ever final",
            f"SELECT {window}, count(*) FROM o JOIN p ON o.k = p.k AND p.ts >= o.ts GROUP BY {window}": "is ever final",
            "SELECT g, count(*) FROM o GROUP BY g": "an answer that changes",
            "SELECT window(ts - INTERVAL 1 HOUR, '5 minutes'), count(*) FROM o GROUP BY 1": "an answer that changes",
            "SELECT window(t, '5 minutes'), count(*) FROM (SELECT ts - INTERVAL 1 DAY t FROM o) GROUP BY 1": "changes",
            "SELECT date(ts), count(*) FROM o GROUP BY date(ts)": "an answer that changes",
            "SELECT window(ts, '5 minutes', '1 minute') AS w, count(*) FROM o GROUP BY 1": "an answer that changes",
            f"SELECT {window}, count(*) AS n FROM o GROUP BY {window} ORDER BY n LIMIT 3": "an answer that changes",
        }.items():
            with pytest.raises(plait.QueryError, match=why) as caught:
                engine.query("q", sql, "append")
            told(caught.value, "OUTPUT_MODE")
        query = engine.query("q", f"SELECT {window} AS w, count(*) AS n FROM o GROUP BY {window}", "update")
        with pytest.raises(plait.QueryError, match="only adds rows"):
            query.sink("parquet", path=str(tmp_path / "out"))
        assert "append or update or complete" in engine.explain("q", stages=True)
