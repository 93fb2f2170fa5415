"""Long lives: what an epoch and a restart cost after very many epochs, against what they cost in the beginning.

`python -m benchmarks.long_lives [--epochs N] [--spark] [--sinks kept,noop,memory] [--out FILE]`

Two streams of four rows per epoch are joined; a window of event time bounds their state, so that whatever grows is
history.  Without Spark (`plait.testing.LocalEngine`) 20,000 epochs, with it 3,000; rows kept, and dropped.  Printed are
the mean seconds of an epoch in the second and in the last tenth, their ratio, the files in the checkpoint at four
points, and the seconds of a restart after the first tenth and at the end.  The claim: the ratio is at most 1.1, and
the number of files is bounded.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow as pa

import plait
from plait.query.expr import ColumnRef
from plait.query.graph import Alias, Equality, JoinGraph, Output, Window
from plait.query.relation import ColumnDef, Relation
from plait.runtime.answers.live_results import LiveResults
from plait.runtime.driver.sinks import Noop
from plait.share.planner import Planner
from plait.testing import LocalEngine

ROWS = 4
"""Rows per stream and epoch."""
GRACE_SECONDS = 5.0
"""Garbage lies this long: by default ten minutes, in which a short run would delete nothing."""
WINDOW_SECONDS = 32
"""Epochs are a second of event time apart: rows find partners in as many epochs."""
POINTS = (0.25, 0.5, 0.75, 1.0)
RATIO = 1.1


@dataclass
class Life:
    """What one run has shown."""

    engine: str
    sink: str
    epochs: int
    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    """Seconds that this process has worked per epoch, where all of the work is in it."""
    files: dict[str, dict[str, int]] = field(default_factory=dict)
    """At each of `POINTS`: files by folder of the checkpoint."""
    restarts: list[float] = field(default_factory=list)
    rows: int = 0
    """Result rows in the end."""

    @property
    def ratio(self) -> float:
        """The last tenth over the second."""
        early, late = tenths(self.seconds)
        return late / early

    def report(self) -> str:
        """For people."""
        early, late = tenths(self.seconds)
        files = "  ".join(f"{at} {sum(found.values())}" for at, found in self.files.items())
        return (
            f"{self.engine:>5} {self.sink:<6} {self.epochs:>6} epochs: second tenth {early * 1000:.2f} ms, last tenth "
            f"{late * 1000:.2f} ms, ratio {self.ratio:.3f}{'' if self.ratio <= RATIO else ' (!)'}"
            f"{self._cpu()}; "
            f"restart {' → '.join(f'{s * 1000:.0f} ms' for s in self.restarts)}; files {files}; {self.rows} rows\n"
            f"      files in the end: {', '.join(f'{k} {v}' for k, v in list(self.files.values())[-1].items())}"
        )

    def _cpu(self) -> str:
        if not self.cpu:
            return ""
        early, late = tenths(self.cpu)
        return f" (of work {early * 1000:.2f} ms, {late * 1000:.2f} ms, ratio {late / early:.3f})"

    def to_json(self) -> dict[str, Any]:
        """All but the single epochs, of which there are a hundred means."""
        early, late = tenths(self.seconds)
        means = {"seconds": _means(self.seconds), "cpu": _means(self.cpu)}
        return {**asdict(self), **means, "second_tenth": early, "last_tenth": late, "ratio": self.ratio}


def tenths(values: list[float]) -> tuple[float, float]:
    """The means of the second and of the last tenth."""
    tenth = max(1, len(values) // 10)
    return fmean(values[tenth : 2 * tenth]), fmean(values[-tenth:])


def _means(values: list[float]) -> list[float]:
    step = max(1, len(values) // 100)
    return [fmean(values[i : i + step]) for i in range(0, len(values), step)]


def count_files(checkpoint: str) -> dict[str, int]:
    """Files by folder of a checkpoint."""
    found = {}
    for entry in sorted(os.scandir(checkpoint), key=lambda e: e.name):
        if entry.is_dir():
            found[entry.name] = sum(len(names) for _, _, names in os.walk(entry.path))
    return found


def watched(life: Life, checkpoint: str, run: Callable[[int], None], restart: Callable[[], None]) -> None:
    """Runs the epochs one by one; looks at the checkpoint and restarts on the way."""
    points = {max(0, round(life.epochs * at) - 1): f"{at:.0%}" for at in POINTS}
    for number in range(life.epochs):
        begun, worked = time.perf_counter(), time.process_time()
        run(number)
        life.seconds.append(time.perf_counter() - begun)
        life.cpu.append(time.process_time() - worked)
        if number in points:
            life.files[points[number]] = count_files(checkpoint)
        if number in (life.epochs // 10, life.epochs - 1):
            begun = time.perf_counter()
            restart()
            life.restarts.append(time.perf_counter() - begun)


# ---------------------------------------------------------------- without Spark


def graph() -> JoinGraph:
    """`SELECT a.id, b.id FROM a JOIN b ON a.k = b.k AND b.ts BETWEEN a.ts − w AND a.ts + w`."""

    def ref(alias: str, column: str) -> ColumnRef:
        return ColumnRef(alias, column, dict(COLUMNS)[column])

    columns = tuple(ColumnDef(name, f"`{name}`", kind) for name, kind in COLUMNS)
    outputs = [ref(alias, "id") for alias in ("a", "b")]
    span = WINDOW_SECONDS * 1_000_000
    return JoinGraph(
        "",
        tuple(Alias(name, name, None, columns) for name in ("a", "b")),
        (Equality(ref("a", "k"), ref("b", "k")),),
        tuple(Output(f"{r.alias}_id", r.type, r, str(r), (r,)) for r in outputs),
        (Window(ref("a", "ts"), ref("b", "ts"), -span, span),),
    )


COLUMNS = (("id", "bigint"), ("k", "bigint"), ("ts", "timestamp"))
_SCHEMA = pa.schema([("id", pa.int64()), ("k", pa.int64()), ("ts", pa.timestamp("us", "UTC"))])


def arrivals(number: int) -> pa.Table:
    """Four rows of a second; each finds a partner in every epoch of the window."""
    ids = [number * ROWS + i for i in range(ROWS)]
    at = [1_600_000_000_000_000 + number * 1_000_000] * ROWS
    return pa.table([pa.array(ids), pa.array([i % ROWS for i in ids]), pa.array(at, _SCHEMA.field("ts").type)], _SCHEMA)


def local_life(epochs: int, sink: str, directory: str) -> Life:
    """All epochs in this process."""
    config = plait.Config(tasks=1, sync=False, gc_grace_seconds=GRACE_SECONDS)
    relations = {name: Relation(name, COLUMNS, "ts", 0) for name in ("a", "b")}

    def started() -> LocalEngine:
        planner = Planner({"q": graph()}, relations, config)
        made = LocalEngine(directory, planner.plan, config, planner=planner)
        if sink == "noop":
            made.change(sinks={"q": Noop()})
        return made

    life = Life("local", sink, epochs)
    engine = started()

    def run(number: int) -> None:
        engine.run({"a": arrivals(number), "b": arrivals(number)})
        life.rows += engine.progress[-1]["rows_out"]["q"]

    def restart() -> None:
        nonlocal engine
        engine.close()
        engine = started()

    watched(life, directory, run, restart)
    if sink == "kept":
        held = LiveResults.read(engine.checkpoint.log).files["q"]
        assert sum(file.rows for file in held) == life.rows, "rows were lost or doubled"
    engine.close()
    return life


# ---------------------------------------------------------------- with Spark


def spark_life(epochs: int, sink: str, directory: str) -> Life:
    """A streaming query over generated rows, which leave no files of their own."""
    spark = plait.session(app="plait-long-lives")
    config = plait.Config(gc_grace_seconds=GRACE_SECONDS)
    life = Life("spark", sink, epochs)

    def source() -> Any:
        reader = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", ROWS).option("numPartitions", 1)
        rows = reader.option("startTimestamp", 0).option("advanceMillisPerBatch", 1000).load()
        return rows.selectExpr("value AS id", f"value % {ROWS} AS k", "timestamp AS ts").withWatermark(
            "ts", "0 seconds"
        )

    def engine() -> tuple[plait.Engine, plait.QueryHandle]:
        made = plait.Engine(spark, directory, config)
        made.stream("a", source())
        made.stream("b", source())
        width = f"INTERVAL {WINDOW_SECONDS} SECONDS"
        query = made.query(
            "q",
            "SELECT a.id AS a_id, b.id AS b_id FROM a JOIN b ON a.k = b.k "
            f"AND b.ts BETWEEN a.ts - {width} AND a.ts + {width}",
        )
        if sink != "kept":
            query.sink(sink)
        return made, query

    done = 0
    stops = sorted({epochs // 10, *(max(1, round(epochs * at)) for at in POINTS)})
    for stop in stops:
        begun = time.perf_counter()
        made, _ = engine()
        with made:
            run = made.start()
            first, seen, before = None, done, None
            while seen < stop:
                if run.exception is not None:
                    raise run.exception
                for report in run.recent_progress:
                    if report["epoch"] >= seen and "total" in report["seconds"]:
                        first = first or time.perf_counter()
                        seen = report["epoch"] + 1
                        life.rows += report["rows_out"]["q"]
                        # From one epoch to the next, Spark's own part included.
                        if before is not None:
                            life.seconds.append(report["timestamp"] - before)
                        before = report["timestamp"]
                time.sleep(0.02)
            run.stop()
            done = seen = max(seen, (made.checkpoint.log.last() or 0) + 1)
        life.restarts.append((first or begun) - begun)
        life.files[f"{done / epochs:.0%}"] = count_files(directory)
    with engine()[0] as made:
        if sink == "kept":
            life.rows = sum(f.rows for f in LiveResults.read(made.checkpoint.log).files["q"])
    spark.stop()
    life.restarts = [life.restarts[1], life.restarts[-1]]
    return life


@contextmanager
def _directory(base: str | None) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="plait-long-lives-", dir=base) as directory:
        yield str(Path(directory) / "checkpoint")


def main() -> None:
    """Runs the lives and reports them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--epochs", type=int, help="20,000 without Spark, 3,000 with it")
    parser.add_argument("--spark", action="store_true", help="on Spark instead of in this process")
    parser.add_argument("--sinks", default=None, help="which of kept, noop and, on Spark, memory; separated by commas")
    parser.add_argument("--dir", help="where the checkpoints are made")
    parser.add_argument("--out", help="a file for the numbers, as JSON")
    args = parser.parse_args()
    epochs = args.epochs or (3_000 if args.spark else 20_000)
    sinks = (args.sinks or "kept,noop").split(",")
    lives = []
    for sink in sinks:
        with _directory(args.dir) as directory:
            life = (spark_life if args.spark else local_life)(epochs, sink, directory)
            shutil.rmtree(directory, ignore_errors=True)
        print(life.report(), flush=True)
        lives.append(life)
    if args.out:
        Path(args.out).write_text(json.dumps([life.to_json() for life in lives], indent=1))
    sys.exit(any(life.ratio > RATIO for life in lives))


if __name__ == "__main__":
    main()
