"""Golden explain texts: `tests/fixtures/explain/*.spec`, refreshed by `pytest --rewrite`.

A file holds SQL, one query per paragraph with its name in front, then the text and the DOT that explain prints.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import plait
from plait.query.plan import Plan
from plait.testing import ScriptedStream

pytestmark = pytest.mark.spark

FIXTURES = Path(__file__).parent.parent / "fixtures" / "explain"
DDL = {
    "orders": "id int, customer bigint, ts timestamp, status string, total decimal(10,2)",
    "lines": "order_id bigint, product int, ts timestamp, price double, note string",
    "customer": "id bigint, region int, name string",
    "product": "id int, name string",
    "payments": "order_id int, ts timestamp, amount decimal(10,2), method string",
    "refunds": "order_id int, state string",
}
WATERMARKS = {"orders": "10 seconds", "payments": "1 minute"}
TTL = {"product": "1 day", "refunds": "7 days"}
NEEDED = {"refunds": "state = 'open'"}
CASES: dict[str, dict[str, str]] = {
    "star": {
        "star": "SELECT o.id, l.price, p.amount FROM orders o JOIN lines l ON o.id = l.order_id "
        "JOIN payments p ON p.order_id = o.id"
    },
    "chain": {
        "chain": "SELECT c.name, p.name AS product FROM customer c JOIN orders o ON c.id = o.customer "
        "JOIN lines l ON l.order_id = o.id JOIN product p ON p.id = l.product WHERE l.price > 1"
    },
    "cycle": {
        "cycle": "SELECT o.id FROM orders o, lines l, payments p "
        "WHERE o.id = l.order_id AND l.note = p.method AND p.amount = o.total"
    },
    "self_join": {
        "pairs": "SELECT x.id AS a, y.id AS b, x.total + y.total AS both FROM orders x "
        "JOIN orders y ON x.customer = y.customer AND x.status <> y.status"
    },
    "window": {
        "paid": "SELECT o.id, p.amount FROM orders o JOIN payments p ON o.id = p.order_id "
        "AND p.ts BETWEEN o.ts AND o.ts + INTERVAL 1 HOUR"
    },
    "expiry": {
        "back": "SELECT /*+ STATE_TTL('c', '12h') */ c.name, r.state FROM customer c "
        "JOIN refunds r ON c.id = r.order_id",
    },
    "sharing": {
        "dear": "SELECT o.id, l.price FROM orders o JOIN lines l ON o.id = l.order_id WHERE l.price > 100",
        "known": "SELECT o.id, l.price, p.amount FROM orders o JOIN lines l ON o.id = l.order_id "
        "JOIN payments p ON p.order_id = o.id",
    },
}


@pytest.fixture
def engine(spark: SparkSession, tmp_path: Path) -> Iterator[plait.Engine]:
    with plait.Engine(spark, str(tmp_path / "checkpoint")) as made:
        for name, ddl in DDL.items():
            frame = ScriptedStream(spark, tmp_path / name, ddl).frame()
            frame = frame.withWatermark("ts", WATERMARKS[name]) if name in WATERMARKS else frame
            made.stream(name, frame, ttl=TTL.get(name), needed=NEEDED.get(name))
        yield made


@pytest.mark.parametrize("name", CASES)
def test_explain_reads_as_its_golden_text(engine: plait.Engine, rewrite: bool, name: str) -> None:
    for query, sql in CASES[name].items():
        engine.query(query, sql)
    parts = [f"{query}: {sql}" for query, sql in CASES[name].items()]
    text = "\n----\n".join(["\n".join(parts), engine.explain().rstrip("\n"), engine.explain(format="dot")])
    path = FIXTURES / f"{name}.spec"
    if rewrite:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()
    assert Plan.from_json(engine.explain(format="json")) == engine.plan


def test_every_golden_text_has_its_case() -> None:
    assert {path.stem for path in FIXTURES.glob("*.spec")} == set(CASES)


def test_explain_needs_a_query_and_a_known_format(engine: plait.Engine) -> None:
    with pytest.raises(plait.QueryError, match="NO_QUERY"):
        engine.explain()
    engine.query("q", CASES["star"]["star"])
    with pytest.raises(plait.ConfigError, match=r"EXPLAIN_FORMAT.*text, json, dot"):
        engine.explain(format="svg")
