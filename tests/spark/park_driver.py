"""A driver to be killed while a query is parked.  `python park_driver.py DIR [resume]`, over the streams of a `Pair`.

The sink of `q` fails from epoch 1 on unless it is resumed; every epoch it takes is a line of `DIR/taken`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from pyspark.sql import DataFrame

import plait
from tests.spark.pair import SQL, Pair


def main(home: Path, resume: bool) -> None:
    """Runs all that is available."""
    spark = plait.session(app="plait-park", master="local[2]")
    run(Pair(spark, home, {"snapshot_every": 1, "gc_grace_seconds": 0.0}), home, resume)
    spark.stop()


def run(pair: Pair, home: Path, resume: bool) -> str:
    """One run; the status of `q` afterwards."""

    def take(rows: DataFrame, epoch: int) -> None:
        if epoch and not resume:
            raise ValueError("the warehouse is closed")
        with open(home / "taken", "a") as taken:
            taken.write(f"{epoch} {sorted(tuple(row) for row in rows.collect())}\n")

    with pair.engine({"q": SQL, "other": SQL}) as engine:
        q = plait.QueryHandle(engine, "q").foreach_batch(take)
        if resume:
            q.resume()
        engine.start(available_now=True).await_termination()
        return q.status


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] == ["resume"])
