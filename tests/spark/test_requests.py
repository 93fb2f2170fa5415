"""`plait add`, `drop`, `replace`, `ls` and `show` act on an engine of another process through its checkpoint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import plait
from tests.spark.test_running_changes import JOIN, PACE, Shop, rows_of

pytestmark = pytest.mark.spark


def plait_command(*words: str) -> tuple[int, Any, str]:
    """The command in a process of its own: exit code, what it prints as JSON, what it says."""
    done = subprocess.run(
        [sys.executable, "-m", "plait.serve.cli", *words, "--json"],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=False,
    )
    return done.returncode, json.loads(done.stdout) if done.stdout.strip() else None, done.stderr


def test_another_process_adds_replaces_and_drops_queries_which_outlive_the_engine(
    spark: SparkSession, tmp_path: Path
) -> None:
    shop = Shop(spark, tmp_path)
    path = str(tmp_path / "checkpoint")
    with shop.engine() as engine:
        first = engine.query("first", JOIN)
        run = engine.start(every=PACE)
        shop.arrived(run)
        sink = ("--sink", "parquet", "--option", f"path={tmp_path / 'out'}")
        code, told, said = plait_command("add", path, "late", JOIN, "--since", "new", *sink)
        assert code == 0, said
        assert (told["name"], told["status"]) == ("late", "live")
        assert plait_command("add", path, "gone", JOIN, "--since", "state")[0] == 0
        # What is wrong is told to its sender.
        code, _, said = plait_command("add", path, "wrong", "SELECT nonsense")
        assert (code, "UNKNOWN_COLUMN" in said) == (2, True)
        code, _, said = plait_command("add", path, "first", f"{JOIN} WHERE a.v > 1")
        assert (code, "DUPLICATE_QUERY" in said) == (2, True)
        shop.add(1)
        shop.arrived(run)
        code, listed, _ = plait_command("ls", path)
        assert listed["running"]
        assert {q["name"]: (q["status"], q["origin"]) for q in listed["queries"]} == {
            "first": ("live", "program"),
            "late": ("live", "request"),
            "gone": ("live", "request"),
        }
        assert plait_command("show", path, "late")[1]["sql"] == JOIN
        gone = plait.QueryHandle(engine, "gone")
        assert rows_of(gone) == shop.joined()
        assert plait_command("replace", path, "gone", f"{JOIN} WHERE a.v > 2")[1]["status"] == "live"
        assert plait_command("drop", path, "gone")[1]["status"] == "dropped"
        assert plait_command("drop", path, "was_never_there")[0] == 0
        run.stop()
        assert rows_of(first) == shop.joined()
    assert plait_command("drop", path, "first")[0] == 3
    # The next start knows what the program never said, its sink included, and what was left for it.
    assert plait_command("add", path, "queued", JOIN, "--since", "state", "--queue")[0] == 0
    shop.add(2)
    with shop.engine() as engine:
        first = engine.query("first", JOIN)
        engine.start(available_now=True).await_termination()
        assert {q.name for q in engine.queries()} == {"first", "late", "queued"}
        assert rows_of(first) == shop.joined()
        assert rows_of(plait.QueryHandle(engine, "queued")) == shop.joined()
        late = Counter(tuple(r) for r in spark.read.parquet(str(tmp_path / "out")).collect())
        assert late == shop.joined(lambda a, b: a >= 100 and b >= 100)


def test_a_dry_run_tells_what_adding_would_do_and_does_nothing(spark: SparkSession, tmp_path: Path) -> None:
    shop, path = Shop(spark, tmp_path), str(tmp_path / "checkpoint")
    other = "SELECT a.k AS ak, b.k AS bk FROM a JOIN b ON a.v = b.v"
    with shop.engine(keep="all") as engine:
        engine.query("first", JOIN)
        # Before a start it can be asked, too.
        asked = engine.preview("second", other)
        assert (asked.live, asked.in_place, asked.builds, asked.epoch_seconds) == (True, None, (), None)
        assert asked.floors == {"a": 0, "b": 0}
        run = engine.start(every=PACE)
        shop.arrived(run)
        catalog = engine._in_force
        code, told, said = plait_command("add", path, "second", other, "--dry-run")
        assert code == 0, said
        assert {build["source"] for build in told["builds"]} == {"a[]", "b[]"}
        assert sum(build["rows"] for build in told["builds"]) == sum(map(len, shop.rows.values()))
        assert (told["live"], told["in_place"], told["new_probes"]) == (False, True, 2)
        assert told["epoch_seconds"] > 0
        assert "expected cost: " in told["text"]
        # A query of a structure that is there shares all of its probes.
        twin = engine.preview("twin", f"{JOIN} WHERE a.v > 2", since="state")
        assert (twin.live, twin.new_probes, twin.new_stores, twin.builds) == (True, 0, (), ())
        assert twin.first_pass_rows == len(shop.rows["a"])
        code, _, said = plait_command("add", path, "wrong", "SELECT nonsense", "--dry-run")
        assert (code, "UNKNOWN_COLUMN" in said) == (2, True)
        assert engine._in_force == catalog
        assert [q.name for q in engine.queries()] == ["first"]
        # What it has told is what happens.
        assert engine.query("second", other).await_live(60)
        assert engine.queries()[1].floors == told["floors"]
        assert engine.preview("second", f"{other} WHERE a.k > 1").new_stores == ()
        run.stop()
