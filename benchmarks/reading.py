"""How long it takes to register a query on an engine that is warm, and how many calls of the JVM that takes.

    python -m benchmarks.reading [--rounds N] [--parts]

Every round registers each query once more, under another name, on one engine.  Printed are the median and the best of
the rounds in milliseconds, and the number of py4j calls of a round.  With `--parts`, also where the time of a
three-way query goes, by function.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from py4j.java_gateway import GatewayClient  # type: ignore[import-untyped]
from pyspark.sql import SparkSession

import plait

STREAMS = {
    "orders": "id int, customer bigint, ts timestamp, status string, total decimal(10,2)",
    "lines": "order_id bigint, product int, ts timestamp, price double, qty smallint, note string",
    "customer": "id bigint, region int, name string, since date, seen timestamp",
    "product": "id int, category int, name string, weight double",
    "region": "id int, name string",
}
QUERIES = {
    "two-way": "SELECT o.id, l.price FROM orders o JOIN lines l ON o.id = l.order_id",
    "three-way": (
        "SELECT o.id, c.name, l.price FROM orders o JOIN lines l ON o.id = l.order_id JOIN customer c "
        "ON o.customer = c.id WHERE l.qty > 2 AND l.ts BETWEEN o.ts AND o.ts + INTERVAL 1 HOUR"
    ),
    "five-way": (
        "SELECT o.id, c.name, p.name AS product, g.name AS region, upper(l.note) AS note FROM orders o "
        "JOIN lines l ON o.id = l.order_id JOIN customer c ON o.customer = c.id JOIN product p ON l.product = p.id "
        "JOIN region g ON c.region = g.id WHERE o.status = 'paid' AND l.price * l.qty < p.weight"
    ),
    "three-way, aggregate": (
        "SELECT c.region, count(*) AS n, sum(l.price) AS total FROM orders o JOIN lines l ON o.id = l.order_id "
        "JOIN customer c ON o.customer = c.id WHERE o.status = 'paid' GROUP BY c.region"
    ),
}
WARM_UP_ROUNDS = 15


@contextmanager
def counted() -> Iterator[list[str]]:
    """The commands that are sent to the JVM meanwhile."""
    sent: list[str] = []
    send = GatewayClient.send_command

    def count(self: Any, command: str, *args: Any, **kwargs: Any) -> Any:
        # Releasing an object that Python has forgotten is no call that anybody waits for.
        if not command.startswith("m\nd\n"):
            sent.append(command)
        return send(self, command, *args, **kwargs)

    GatewayClient.send_command = count
    try:
        yield sent
    finally:
        GatewayClient.send_command = send


@contextmanager
def engine_of(spark: SparkSession, folder: Path) -> Iterator[plait.Engine]:
    """An engine with all streams, which is never started."""
    with plait.Engine(spark, checkpoint=str(folder / "checkpoint")) as engine:
        for name, ddl in STREAMS.items():
            (folder / name).mkdir()
            frame = spark.readStream.schema(ddl).parquet(str(folder / name))
            engine.stream(name, frame.withWatermark("ts", "1 minute") if "ts timestamp" in ddl else frame)
        yield engine


def measure(engine: plait.Engine, rounds: int) -> dict[str, tuple[float, float, int]]:
    """Median and least milliseconds, and the calls of one round, by query."""
    names = (f"q{number}" for number in range(1_000_000))
    for _ in range(WARM_UP_ROUNDS):
        for sql in QUERIES.values():
            engine.query(next(names), sql)
    found = {}
    for title, sql in QUERIES.items():
        seconds = []
        for _ in range(rounds):
            begin = time.perf_counter()
            engine.query(next(names), sql)
            seconds.append(time.perf_counter() - begin)
        with counted() as calls:
            engine.query(next(names), sql)
        found[title] = (1000 * statistics.median(seconds), 1000 * min(seconds), len(calls))
    return found


def profile(engine: plait.Engine, rounds: int) -> None:
    """Prints the functions of Plait in which the three-way query's time goes."""
    profiler = cProfile.Profile()
    for number in range(rounds):
        profiler.runcall(engine.query, f"profiled_{number}", QUERIES["three-way"])
    pstats.Stats(profiler).sort_stats("cumulative").print_stats("plait", 40)


def main() -> None:
    """Runs it and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--parts", action="store_true", help="also print where the time goes")
    arguments = parser.parse_args()
    spark = plait.session(app="plait-reading", master="local[2]", settings={"spark.ui.enabled": "false"})
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory(prefix="plait-reading-") as folder, engine_of(spark, Path(folder)) as engine:
        print(f"{'query':<22} {'median ms':>10} {'least ms':>10} {'calls':>7}")
        for title, (median, least, calls) in measure(engine, arguments.rounds).items():
            print(f"{title:<22} {median:>10.1f} {least:>10.1f} {calls:>7}")
        if arguments.parts:
            profile(engine, arguments.rounds)
    spark.stop()


if __name__ == "__main__":
    main()
