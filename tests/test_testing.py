"""The test doubles that ship with the library, as far as they need no Spark."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from plait.query.plan import Plan, QueryPlan
from plait.testing import Clock, LocalEngine, fault

REACH = "from plait.runtime.faults import reached; reached('commit.3', 2)"


def test_a_clock_moves_only_when_told() -> None:
    clock = Clock()
    before = clock()
    assert clock() == before
    clock.advance(1.5)
    assert clock() - before == 1_500_000


def dies(code: str = REACH) -> bool:
    return subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL


def test_a_process_dies_at_the_fault_point_inside_the_block_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAIT_FAULT", "elsewhere@0")
    with fault("commit.3", 2):
        assert dies()
        assert not dies(REACH.replace("2)", "1)"))
    assert os.environ["PLAIT_FAULT"] == "elsewhere@0"
    assert not dies()


def test_with_once_only_the_first_process_dies(tmp_path: Path) -> None:
    with fault("commit.3", 2, once=tmp_path / "died"):
        assert dies()
        assert not dies()
    assert "PLAIT_FAULT_ONCE" not in os.environ


def test_the_local_engine_refuses_what_only_spark_can_do(tmp_path: Path) -> None:
    query = QueryPlan("q", "", (), (), (), (), (), (), ())
    plan = Plan((), (), (), (replace(query, where=("a LIKE b",)),), ())
    with pytest.raises(NotImplementedError, match="only Spark"):
        LocalEngine(tmp_path, plan)
