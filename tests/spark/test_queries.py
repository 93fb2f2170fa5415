"""SQL on real streams: every query of the matrix equals DuckDB's batch join of the input so far, after every epoch.

All queries run on one engine at once: it is the matrix of what can be asked, and a test of sharing as well.
"""

from __future__ import annotations

import datetime as dt
import os
import random
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

import plait
from plait.runtime.task.file_sets import query_table
from plait.testing import ScriptedStream, run_epochs
from tests.oracle import Bag, Oracle, bag

pytestmark = pytest.mark.spark

EPOCHS = 3
# Names with dots and ticks in them travel as well.
ODD = "SELECT o.`a.b`, p.name FROM odd o JOIN product p ON o.`a.b` = p.id AND o.`tick``s` < p.name"
DDL = {
    "orders": "id int, customer bigint, status string, total decimal(10,2), day date",
    "lines": "order_id bigint, product smallint, qty int, price double, note string",
    "customer": "id bigint, region int, name string",
    "product": "id int, category tinyint, name string",
    "payments": "order_id int, amount decimal(10,2), method string",
    "odd": "`a.b` int, `tick``s` string",
}

# name: SQL, or (SQL for Plait, the same in DuckDB's dialect)
QUERIES: dict[str, str | tuple[str, str]] = {
    "comma": "SELECT o.id, l.qty FROM orders o, lines l WHERE o.id = l.order_id",
    "join_on": "SELECT o.id, p.amount FROM orders o JOIN payments p ON o.id = p.order_id",
    "using_key": "SELECT order_id, l.qty, p.amount FROM lines l JOIN payments p USING (order_id)",
    "star": """SELECT o.id, l.qty, p.amount, c.name FROM orders o, lines l, payments p, customer c
        WHERE o.id = l.order_id AND p.order_id = o.id AND c.id = o.customer""",
    "one_key": """SELECT o.id, l.price, p.amount FROM orders o JOIN lines l ON o.id = l.order_id
        JOIN payments p ON l.order_id = p.order_id""",
    "chain": """SELECT c.name AS who, o.id, l.qty, p.name AS what FROM customer c JOIN orders o ON c.id = o.customer
        JOIN lines l ON o.id = l.order_id JOIN product p ON l.product = p.id""",
    "tree": """SELECT c.name AS who, p.name AS what, pay.amount FROM orders o
        JOIN customer c ON o.customer = c.id JOIN lines l ON l.order_id = o.id
        JOIN product p ON l.product = p.id JOIN payments pay ON pay.order_id = o.id""",
    "cycle": """SELECT o.id, l.qty, p.method FROM orders o, lines l, payments p
        WHERE o.id = l.order_id AND l.note = p.method AND p.amount = o.total""",
    "composite": "SELECT o.id, p.method FROM orders o JOIN payments p ON o.id = p.order_id AND o.total = p.amount",
    "expression_keys": """SELECT o.id, p.order_id, l.note FROM orders o
        JOIN payments p ON o.id + 1 = p.order_id JOIN lines l ON upper(o.status) = upper(l.note)""",
    "twin_keys": "SELECT o.id, l.qty FROM orders o JOIN lines l ON o.id = l.order_id AND o.customer = l.order_id",
    "self_join": "SELECT x.id AS a, y.id AS b FROM orders x JOIN orders y ON x.customer = y.customer WHERE x.id < y.id",
    "hierarchy": "SELECT x.id AS a, y.id AS b FROM customer x JOIN customer y ON x.region = y.id",
    "filters": """SELECT o.id, l.qty FROM orders o JOIN lines l ON o.id = l.order_id
        WHERE o.status IN ('paid', 'open') AND l.qty > 2 AND o.day >= DATE '2024-01-02' AND l.note IS NOT NULL""",
    "other_filters": """SELECT o.id, l.qty FROM orders o JOIN lines l ON o.id = l.order_id
        WHERE o.status = 'paid' OR o.total > 3""",
    "conditions": """SELECT o.id, l.qty, p.amount FROM orders o JOIN lines l ON o.id = l.order_id
        JOIN payments p ON o.id = p.order_id
        WHERE l.price < p.order_id * 1.5D AND (l.qty <> p.order_id OR o.total > p.amount)""",
    "spark_condition": """SELECT o.id, p.method FROM orders o JOIN payments p ON o.id = p.order_id
        WHERE o.status LIKE concat(substr(p.method, 1, 1), '%')""",
    "expressions": """SELECT o.id * 2 AS twice, o.status || '/' || p.method AS label, l.qty + p.order_id AS total,
        CASE WHEN l.price > 1 THEN 'dear' ELSE 'cheap' END AS kind FROM orders o
        JOIN lines l ON o.id = l.order_id JOIN payments p ON p.order_id = o.id""",
    "everything": "SELECT * FROM lines JOIN payments USING (order_id)",
    "whole_side": "SELECT o.*, p.name FROM orders o JOIN product p ON o.id = p.id",
    "constants": "SELECT o.id, p.method FROM orders o JOIN payments p ON o.id = p.order_id AND o.id = 3",
    "odd_names": (ODD, 'SELECT o."a.b", p.name FROM odd o JOIN product p ON o."a.b" = p.id AND o."tick`s" < p.name'),
    "no_columns": "SELECT 1 AS one FROM orders o JOIN product p ON o.id = p.id",
    "eight": """SELECT a.id, h.amount
        FROM orders a, lines b, payments c, orders d, lines e, payments f, product g, payments h
        WHERE a.id = b.order_id AND b.order_id = c.order_id AND c.order_id = d.id AND d.id = e.order_id
        AND e.order_id = f.order_id AND f.order_id = g.id AND g.id = h.order_id AND a.id IN (1, 2)
        AND b.qty = e.qty AND c.method = f.method AND c.method = h.method""",
}  # fmt: skip


def rows(name: str, epoch: int) -> list[tuple[Any, ...]]:
    """Few distinct values, NULLs and duplicates among them; payments pause in the second epoch."""
    choose = random.Random(f"{name} {epoch}")

    def some(*values: Any) -> Any:
        return None if choose.random() < 0.1 else choose.choice(values)

    words = ("paid", "open", "PAID", "Open", "x")
    makers: dict[str, Any] = {
        "orders": lambda: (
            some(*range(9)),
            some(*range(5)),
            some(*words),
            some(*(Decimal(n) for n in range(5))),
            some(dt.date(2024, 1, 1), dt.date(2024, 1, 3)),
        ),
        "lines": lambda: (some(*range(9)), some(0, 1, 2), some(*range(6)), some(0.5, 1.5, -0.0, 7.25), some(*words)),
        "customer": lambda: (some(*range(5)), some(*range(4)), some("ann", "bob")),
        "product": lambda: (some(*range(9)), some(-1, 0, 1), some("pen", "ink")),
        "payments": lambda: (some(*range(9)), some(*(Decimal(n) for n in range(5))), some(*words)),
        "odd": lambda: (some(*range(9)), some("a", "z")),
    }
    many = {"orders": 9, "lines": 9, "customer": 4, "product": 5, "payments": 0 if epoch == 1 else 7, "odd": 6}[name]
    return [makers[name]() for _ in range(many)]


@pytest.fixture(scope="module")
def streams(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> dict[str, ScriptedStream]:
    base = tmp_path_factory.mktemp("streams")
    made = {name: ScriptedStream(spark, base / name, ddl) for name, ddl in DDL.items()}
    for epoch in range(EPOCHS):
        for name, stream in made.items():
            stream.add(rows(name, epoch))
    return made


def asked(name: str) -> tuple[str, str]:
    sql = QUERIES[name]
    return sql if isinstance(sql, tuple) else (sql, sql.replace("1.5D", "1.5::double"))


def epoch_bags(engine: plait.Engine, query: str, epochs: int) -> list[Bag]:
    """What is committed after every epoch, straight from the result files that the manifests name."""
    total: Bag = Counter()
    found = []
    for epoch in range(epochs):
        manifest = engine.checkpoint.log.read(epoch)
        assert manifest is not None
        for file in manifest.results:
            if file.query == query:
                path = os.path.join(engine.checkpoint.results_dir, file.path)
                total += bag(query_table(path, file.bit))
        found.append(Counter(total))
    return found


@pytest.mark.parametrize(
    "config",
    [
        plait.Config(tasks=2),
        pytest.param(plait.Config(tasks=3, probe="iterative", fan_in=2), marks=pytest.mark.soak),
    ],
    ids=["factorised", "iterative"],
)
def test_oracle_every_query_of_the_matrix_is_exact_after_every_epoch(
    spark: SparkSession, streams: dict[str, ScriptedStream], tmp_path: Path, config: plait.Config
) -> None:
    with plait.Engine(spark, str(tmp_path / "checkpoint"), config) as engine:
        for name, stream in streams.items():
            engine.stream(name, stream.frame())
        handles = {name: engine.query(name, asked(name)[0]) for name in QUERIES}
        progress = run_epochs(engine)
        assert [report["epoch"] for report in progress] == list(range(EPOCHS))
        found = {name: epoch_bags(engine, name, EPOCHS) for name in QUERIES}
        for name in ("star", "expressions", "everything"):
            # The same rows through the front door, with the names and types Spark gives them.
            frame = handles[name].results()
            assert bag(frame.collect()) == found[name][-1]
            for other in DDL:
                spark.createDataFrame([], DDL[other]).createOrReplaceTempView(other)
            assert frame.dtypes == spark.sql(asked(name)[0]).dtypes
    with Oracle() as oracle:
        for epoch in range(EPOCHS):
            oracle.load({name: stream.table(epoch + 1) for name, stream in streams.items()})
            for name in QUERIES:
                assert found[name][epoch] == oracle.bag(asked(name)[1]), f"{name} after epoch {epoch}"
    assert [name for name in QUERIES if not found[name][-1]] == []


KEYS: dict[str, tuple[str, list[Any]]] = {
    "tinyint": ("tinyint", [None, 0, -1, 127, -128]),
    "smallint": ("smallint", [None, 0, -1, 127, -128, 300]),
    "int": ("int", [None, 0, -1, 127, 300, 2**31 - 1]),
    "bigint": ("bigint", [None, 0, -1, 127, 300, 2**31 - 1, -(2**63)]),
    "text": ("string", [None, "", "a", "A", "a\0", "ä", "long enough to be longer than eight"]),
    "bytes": ("binary", [None, b"", b"\0", b"\xff\xfe", b"long enough to be longer"]),
    "truth": ("boolean", [None, True, False]),
    "day": ("date", [None, dt.date(1969, 12, 31), dt.date(2024, 2, 29)]),
    "time": ("timestamp", [None, dt.datetime(1969, 12, 31, 23, 59, 59, 999_999), dt.datetime(2024, 1, 1)]),
    "local": ("timestamp_ntz", [None, dt.datetime(1969, 12, 31, 23, 59, 59, 999_999), dt.datetime(2024, 1, 1)]),
    "money": ("decimal(10,2)", [None, Decimal("0.00"), Decimal("-1.50"), Decimal("99999999.99")]),
    "wide": (
        "decimal(38,4)",
        [None, Decimal(0), Decimal("-1.5"), Decimal(1 + 2**64).scaleb(-4), Decimal(-1).scaleb(-4)],
    ),
    "single": ("float", [None, 0.0, -0.0, float("nan"), 1.5, float("inf")]),
    "real": ("double", [None, 0.0, -0.0, float("nan"), 1.5, float("-inf")]),
}
MIXED = [
    ("tinyint", "bigint"), ("smallint", "int"), ("int", "bigint"), ("single", "real"), ("money", "wide"),
    ("int", "real"), ("int", "money"), ("day", "local"),
]  # fmt: skip


def test_oracle_every_type_can_be_a_key_and_mixed_types_meet_as_spark_casts_them(
    spark: SparkSession, tmp_path: Path
) -> None:
    ddl = "id int, " + ", ".join(f"k_{name} {kind}" for name, (kind, _) in KEYS.items())
    streams = {name: ScriptedStream(spark, tmp_path / name, ddl) for name in ("l", "r")}
    choose = random.Random(5)
    for epoch in range(2):
        for stream in streams.values():
            stream.add([(10 * epoch + i, *(choose.choice(v) for _, v in KEYS.values())) for i in range(10)])
    queries = {f"q_{one}_{other}": f"l.k_{one} = r.k_{other}" for one, other in [*((k, k) for k in KEYS), *MIXED]}
    queries["composite"] = "l.k_text = r.k_text AND l.k_real = r.k_real AND l.k_int = r.k_bigint"
    sql = {name: f"SELECT l.id AS a, r.id AS b FROM l JOIN r ON {on}" for name, on in queries.items()}
    with plait.Engine(spark, str(tmp_path / "checkpoint"), plait.Config(tasks=2)) as engine:
        for name, stream in streams.items():
            engine.stream(name, stream.frame())
        for name, text in sql.items():
            engine.query(name, text)
        run_epochs(engine)
        found = {name: epoch_bags(engine, name, 2) for name in sql}
    with Oracle() as oracle:
        for epoch in range(2):
            oracle.load({name: stream.table(epoch + 1) for name, stream in streams.items()})
            for name, text in sql.items():
                assert found[name][epoch] == oracle.bag(text), f"{name} after epoch {epoch}"
    assert [name for name in sql if not found[name][-1] and name not in ("q_day_local", "composite")] == []


def test_a_scripted_stream_gives_one_file_per_epoch_in_order(spark: SparkSession, tmp_path: Path) -> None:
    stream = ScriptedStream(spark, tmp_path / "s", "n int, t timestamp")
    stream.add([(1, dt.datetime(2024, 1, 1))])
    stream.add()
    stream.add(pa.table({"n": pa.array([2], pa.int32()), "t": pa.array([None], pa.timestamp("us", "UTC"))}))
    times = [os.stat(path).st_mtime for path in stream.files]
    assert times == sorted(set(times))
    assert [stream.table(n).num_rows for n in range(4)] == [0, 1, 1, 2]
    seen: list[list[int]] = []
    query = stream.frame().writeStream.foreachBatch(lambda df, _: seen.append([r.n for r in df.collect()]))
    query.trigger(availableNow=True).start().awaitTermination()
    assert seen == [[1], [], [2]]
