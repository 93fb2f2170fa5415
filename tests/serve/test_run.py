"""The commands that start Spark, each in a process of its own, on a few rows."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.serve.test_cli import plait

pytestmark = pytest.mark.spark

PIPELINE = """
[engine]
checkpoint = "checkpoint"

[spark]
master = "local[2]"
spark.ui.enabled = false

[streams.orders]
format = "parquet"
path = "orders"
schema = "id BIGINT, customer BIGINT"
options = { maxFilesPerTrigger = 1 }

[streams.customers]
format = "parquet"
path = "customers"
schema = "id BIGINT, name STRING"

[queries.named]
sql = "SELECT o.id, c.name FROM orders o JOIN customers c ON o.customer = c.id"

[queries.named.sink]
type = "parquet"
path = "out"
"""


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    for epoch, ids in enumerate(([1, 2], [3, 4])):
        _write(tmp_path / "orders" / f"{epoch}.parquet", id=ids, customer=[10, 20])
    _write(tmp_path / "customers" / "0.parquet", id=[10, 30], name=["ann", "bob"])
    file = tmp_path / "pipeline.toml"
    file.write_text(PIPELINE)
    return file


def _write(file: Path, **columns: list[int] | list[str]) -> None:
    file.parent.mkdir(exist_ok=True)
    pq.write_table(pa.table(columns), file)


def test_a_pipeline_runs_to_the_end_of_its_sources_and_continues_from_its_checkpoint(pipeline: Path) -> None:
    done = plait("run", str(pipeline))
    assert done.returncode == 0, done.stderr
    assert "Done: all sources are read." in done.stdout
    assert _rows(pipeline.parent / "out") == [(1, "ann"), (3, "ann")]

    _write(pipeline.parent / "orders" / "2.parquet", id=[5], customer=[30])
    again = plait("run", str(pipeline))
    assert again.returncode == 0, again.stderr
    assert _rows(pipeline.parent / "out") == [(1, "ann"), (3, "ann"), (5, "bob")]

    # A query that has not got all of its rows is told of, and by the exit code, too.
    _write(pipeline.parent / "orders" / "3.parquet", id=[6, 7], customer=[30, 10])
    pipeline.write_text(PIPELINE.replace("[queries.named]", "[queries.named]\nmax_rows_per_epoch = 1"))
    over = plait("run", str(pipeline))
    assert over.returncode == 5, over.stderr
    assert "named is parked: [TOO_MANY_ROWS] it gave 2 rows in one epoch" in over.stdout
    assert "Done" not in over.stdout
    assert _rows(pipeline.parent / "out") == [(1, "ann"), (3, "ann"), (5, "bob")]


def test_a_watched_pipeline_follows_its_file_until_it_is_stopped(pipeline: Path) -> None:
    log = pipeline.parent / "log"
    command = [sys.executable, "-c", "from plait.serve.cli import main; main()", "run", "--watch", str(pipeline)]
    with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True) as process:
        try:
            _until(lambda: _rows(pipeline.parent / "out") == [(1, "ann"), (3, "ann")], process, log)
            more = PIPELINE.replace("queries.named", "queries.other").replace('"out"', '"other"')
            pipeline.write_text(more.replace('path = "other"', 'path = "other'))
            _until(lambda: "the last good file goes on" in log.read_text(), process, log)
            more = more.replace("SELECT o.id", "SELECT o.id + 100 AS id").replace("sql =", 'since = "state"\nsql =')
            pipeline.write_text(more)
            want = [(101, "ann"), (103, "ann")]
            _until(lambda: _rows(pipeline.parent / "other") == want, process, log)
            assert "added other; dropped named" in log.read_text()
            process.send_signal(signal.SIGTERM)
            assert process.wait(120) == 143, log.read_text()
        finally:
            process.kill()


def _until(holds: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + 120
    while not holds():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < until, log.read_text()
        time.sleep(0.1)


def _rows(folder: Path) -> list[tuple[int, str]]:
    files = [f for f in folder.rglob("*.parquet") if not any(part.startswith(("_", ".")) for part in f.parts)]
    return sorted((row["id"], row["name"]) for f in files for row in pq.ParquetFile(f).read().to_pylist())


def test_explain_shows_the_plan_and_leaves_no_checkpoint(pipeline: Path) -> None:
    done = plait("explain", str(pipeline))
    assert done.returncode == 0, done.stderr
    assert "orders" in done.stdout
    assert not (pipeline.parent / "checkpoint").exists()


def test_a_schema_that_spark_cannot_read_is_an_error_of_the_pipeline(pipeline: Path) -> None:
    pipeline.write_text(PIPELINE.replace("id BIGINT, name STRING", "id BIGNT"))
    done = plait("explain", str(pipeline))
    assert done.returncode == 2
    assert "[streams.customers] cannot be opened" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_demo_checks_its_own_result() -> None:
    done = plait("demo", "--rows", "4000", "--epochs", "2")
    assert done.returncode == 0, done.stderr
    assert "Correct: the " in done.stdout
