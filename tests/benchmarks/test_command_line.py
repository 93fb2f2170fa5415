"""`python -m benchmarks`: what it lists, what it refuses, and that it runs from any folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from plait.runtime.spark import java
from tests.serve.test_cli import ROOT, fake_java

NAMES = ("tpcds", "tpch", "orders", "drivers", "ilp", "sets", "sharing", "state")


def benchmarks(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", *arguments]
    clean = os.environ | {"COLUMNS": "120"} | environment
    return subprocess.run(command, capture_output=True, text=True, env=clean, cwd=ROOT, check=False)


def test_without_a_name_all_benchmarks_are_listed_with_a_line_each() -> None:
    listed = benchmarks().stdout
    for name in NAMES:
        lines = [line for line in listed.splitlines() if name in line.split()]
        assert len(lines) == 1, name
        assert len(lines[0].split()) > 6, "and what it compares"


@pytest.mark.parametrize("name", NAMES)
def test_every_benchmark_has_a_folder_with_what_the_command_runs(name: str) -> None:
    assert (ROOT / "benchmarks" / name / "benchmark.py").exists()
    assert "--quick" in benchmarks(name, "--help").stdout


def test_an_unknown_benchmark_is_refused() -> None:
    done = benchmarks("tpcc")
    assert done.returncode == 2
    assert "No such command 'tpcc'" in done.stderr


def test_an_unknown_part_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    done = benchmarks("orders", "--part", "seven", "--out", str(tmp_path))
    assert done.returncode == 2
    assert "[BENCH_NAME] there is no part 'seven'" in done.stderr
    assert "iterative, factorised" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["tpcds", "tpch", "state"])
def test_too_old_a_java_is_refused_before_anything_is_made(tmp_path: Path, name: str) -> None:
    out = tmp_path / "out"
    done = benchmarks(name, "--out", str(out), JAVA_HOME=str(fake_java(tmp_path / "jdk", "11.0.2")))
    assert done.returncode == 2
    assert java.CAUSE in done.stderr
    assert not out.exists()
