"""A driver that joins wide rows in little memory, and tells what its processes held.  `python wide_driver.py DIR`

`DIR/a/*.parquet` and `DIR/b/*.parquet` are read, all at once; `DIR/report.json` gets, in bytes, the most that the
driver and any Python worker have held, and what the query gave.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import psutil
import pyarrow.compute as pc

import plait

SQL = "SELECT a.v, a.t, concat(b.w, '!') AS w FROM a JOIN b ON a.k = b.k"
LONGER = "SELECT a.v, repeat(b.w, 15000) AS w FROM a JOIN b ON a.k = b.k"
"""Few bytes are joined, and Spark makes 160 MB of them."""


def main(home: Path) -> None:
    """Runs all that is available."""
    options = {
        "spark.driver.memory": "512m",
        "spark.driver.extraJavaOptions": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1",
    }
    spark = plait.session(app="plait-wide", master="local[2,3]", settings=options)
    config = plait.Config(tasks=2, memory_limit="64m")
    before = peak(os.getpid())
    with plait.Engine(spark, checkpoint=str(home / "checkpoint"), config=config) as engine:
        engine.stream("a", spark.readStream.schema("k long, v long, t string").parquet(str(home / "a")))
        engine.stream("b", spark.readStream.schema("k long, w string").parquet(str(home / "b")))
        query = engine.query("q", SQL)
        engine.query("longer", LONGER)
        run = engine.start(available_now=True)
        run.await_termination()
        grown = peak(os.getpid()) - before
        workers = [p.pid for p in psutil.Process().children(recursive=True) if p.name().startswith("python")]
        held = [peak(pid) for pid in workers]
        rows = query.results().selectExpr("v", "length(t) AS n", "w").toArrow()
        longer = sum(progress["rows_out"]["longer"] for progress in run.recent_progress)
    report = {"driver": grown, "workers": held, "rows": rows.num_rows, "text": pc.sum(rows.column("n")).as_py()}
    report["longer"] = longer
    (home / "report.json").write_text(json.dumps(report))


def peak(pid: int) -> int:
    """The most memory that a process has held; 0 of one that has ended."""
    with open(f"/proc/{pid}/status", encoding="ascii") as file:
        return next((int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM")), 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
