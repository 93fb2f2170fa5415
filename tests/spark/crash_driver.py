"""A driver to be killed: three streams, four queries, two sinks, on one checkpoint.  `python crash_driver.py DIR`

`DIR/source/<stream>/*.parquet` is read, one file of each stream per epoch; `DIR/checkpoint` is continued.  `star` goes
to a function that writes `DIR/star/<epoch>.parquet`, replacing it, and notes every call in `DIR/calls.jsonl`; `chain`
goes to the parquet sink in `DIR/chain`; `told` needs Spark to finish its rows and stays in the checkpoint, like the
partial rows of the aggregate `grouped`.  What there is to tell at the end is in `DIR/report.json`.  Where it dies is up
to `PLAIT_FAULT`; `jvm@<epoch>` kills the JVM alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from pathlib import Path

import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession

import plait

STREAMS = ("a", "b", "c")
QUERIES = {
    "star": "SELECT a.v AS av, b.v AS bv, c.v AS cv FROM a, b, c WHERE a.k = b.k AND b.k = c.k",
    "chain": "SELECT a.v AS av, b.v AS bv, c.v AS cv FROM a JOIN b ON a.k = b.k JOIN c ON b.m = c.m",
    "told": "SELECT concat_ws('-', a.v, c.v) AS t FROM a JOIN c ON a.k = c.k WHERE length(concat(a.v, c.v)) > 3",
    "grouped": "SELECT a.m, count(*) AS n, sum(b.v) AS total, max(a.v) AS last FROM a JOIN b ON a.k = b.k GROUP BY a.m",
}
CONFIG = plait.Config(tasks=2, fan_in=2, snapshot_every=3, gc_grace_seconds=0)


def main(home: Path) -> int:
    """Runs all that is available; 3 when the run fails instead of the process."""
    # It lives for seconds: compiling well costs more than it gains.
    options = {"spark.driver.extraJavaOptions": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"}
    spark = plait.session(app="plait-crash", master="local[2,3]", settings=options)
    chains = home / "chain"

    def write_star(rows: DataFrame, epoch: int) -> None:
        table = rows.toArrow()
        table = table.sort_by([(name, "ascending") for name in table.column_names])
        draft = home / f".star-{epoch}"
        pq.write_table(table, draft)
        os.replace(draft, home / "star" / f"{epoch:06d}.parquet")
        digest = hashlib.sha256(repr(table.to_pydict()).encode()).hexdigest()
        with open(home / "calls.jsonl", "a") as calls:
            calls.write(json.dumps({"epoch": epoch, "digest": digest}) + "\n")
        _kill_jvm_once(spark, epoch)

    report: dict[str, object] = {}
    try:
        with plait.Engine(spark, checkpoint=str(home / "checkpoint"), config=CONFIG) as engine:
            for name in STREAMS:
                reader = spark.readStream.schema("k long, m long, v long").option("maxFilesPerTrigger", 1)
                engine.stream(name, reader.parquet(str(home / "source" / name)))
            queries = {name: engine.query(name, sql) for name, sql in QUERIES.items()}
            queries["star"].foreach_batch(write_star)
            queries["chain"].sink("parquet", path=str(chains))
            run = engine.start(available_now=True)
            run.await_termination()
            live = engine.checkpoint.log.live()
            report["epochs"] = [progress["epoch"] for progress in run.recent_progress]
            report["live"] = sorted(info.path for infos in live.segments.values() for info in infos)
            report["state_dir"] = engine.checkpoint.state_dir
            report["told"] = sorted(queries["told"].results().toArrow().column("t").to_pylist())
            report["grouped"] = [list(row) for row in queries["grouped"].results().collect()]
    except plait.PlaitError as error:
        report["error"] = [type(error).__name__, error.code, error.cause, error.remedy]
    (home / "report.json").write_text(json.dumps(report))
    return 3 if "error" in report else 0


def _kill_jvm_once(spark: SparkSession, epoch: int) -> None:
    point = f"jvm@{epoch}"
    if point not in os.environ.get("PLAIT_FAULT", "").split(","):
        return
    try:
        os.close(os.open(os.environ["PLAIT_FAULT_ONCE"] + point, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    gateway = spark.sparkContext._gateway
    assert gateway is not None
    os.kill(gateway.proc.pid, signal.SIGKILL)
    gateway.proc.wait()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
