"""How many tasks there are and what they own may change with every epoch, and no row notices."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.config import KEY_GROUPS, Config
from plait.errors import ConfigError
from plait.kernels import U64
from plait.kernels.hashing import group_starts_in, key_group
from plait.runtime.driver.scaling import CALM_EPOCHS, Capacity, Scaling, cut, most_tasks
from plait.runtime.task.load import Load
from plait.share.planner import Planner
from plait.testing import LocalEngine
from tests.random_joins import Case, cases, check_case
from tests.runtime.test_join_property import COMMON
from tests.share.streams import joined, streams


def costliest(load: np.ndarray, bounds: tuple[int, ...]) -> float:
    return max(float(load[a:b].sum()) for a, b in pairwise(bounds))


@given(st.lists(st.sampled_from([0, 0, 1, 2, 5, 9, 500]), min_size=1, max_size=9), st.integers(1, 9))
def test_oracle_no_other_bounds_have_a_cheaper_costliest_task(costs: list[int], tasks: int) -> None:
    load, tasks = np.array(costs, float), min(tasks, len(costs))
    found = cut(load, tasks)
    assert (found[0], found[-1], len(found)) == (0, len(costs), tasks + 1)
    assert all(a < b for a, b in pairwise(found))
    best = min(costliest(load, (0, *inner, len(costs))) for inner in combinations(range(1, len(costs)), tasks - 1))
    assert costliest(load, found) <= best * 1.02


@given(st.lists(st.integers(0, 2**64 - 1), max_size=50), st.integers(0, 1023), st.integers(1, 1024))
def test_key_groups_begin_where_the_first_of_their_hashes_is(values: list[int], first: int, count: int) -> None:
    hashes: U64 = np.sort(np.array(values, np.uint64))
    last = min(KEY_GROUPS, first + count)
    counted = np.diff(group_starts_in(hashes, (first, last)))
    groups = key_group(hashes).tolist()
    assert counted.tolist() == [groups.count(group) for group in range(first, last)]


def test_a_load_is_what_was_counted_by_group() -> None:
    group = np.uint64(1) << np.uint64(54)
    hashes: U64 = np.array([0, 1, group, 3 * group], np.uint64)
    load = Load((0, 3))
    load.add(hashes, 10.0)
    assert load.cost.tolist() == [20.0, 10.0, 0.0]
    load.add_matches(hashes, np.array([5, 0, 2, 100], np.int64))
    assert load.cost.tolist() == [120.0, 50.0, 0.0]


@settings(COMMON, max_examples=12)
@given(cases())
def test_oracle_ranges_that_change_after_every_epoch(case: Case) -> None:
    choose = np.random.default_rng(case.seed)
    seen: set[tuple[int, ...]] = set()

    def disturb(engine: LocalEngine) -> None:
        seen.add(engine.driver.feedback.scaling.bounds)
        load = choose.random(KEY_GROUPS) ** 30
        engine.driver.feedback.scaling = replace(engine.driver.feedback.scaling, load=load)

    check_case(case, look=disturb)
    assert len(seen) > 1 or len(case.arrivals) < 2


def hot(number: int, share: float) -> dict[str, pa.Table]:
    """Two streams of which one key has a share of the rows."""
    choose = np.random.default_rng(number)
    rows = 4000
    keys = [np.where(choose.random(rows) < share, 7, choose.integers(0, 10**6, rows)) for _ in "ab"]
    ids = np.arange(number * rows, (number + 1) * rows)
    return {name: pa.table({"k": k, "id": ids}) for name, k in zip("ab", keys, strict=True)}


def test_a_hot_key_group_gets_a_task_of_its_own(tmp_path: Path) -> None:
    planner = Planner({"q": joined("a.k = b.k")}, streams("ab"), Config(tasks=3, sync=False))
    with LocalEngine(tmp_path, planner.plan, Config(tasks=3, sync=False), planner=planner) as engine:
        engine.run(hot(0, 0.05))
        engine.run(hot(1, 0.05))
        report = engine.progress[-1]
        bounds, load = report["scaling"]["bounds"], engine.driver.feedback.scaling.load
        at = int(load.argmax())
        assert (at, at + 1) in pairwise(bounds)
        assert report["scaling"]["reason"].startswith("tasks=3; cut by cost")
        assert report["scaling"]["skew"] > 1.5
        # As long as nothing else is hot the ranges stay as they are.
        engine.run(hot(2, 0.05))
        assert engine.progress[-1]["scaling"]["bounds"] == bounds


def test_more_tasks_up_before_out_and_fewer_when_it_is_calm() -> None:
    there = Capacity(parallel=4, most=12)
    scaling = Scaling()
    wanted = []
    for _ in range(6):
        scaling = scaling.for_latency(6.0, 5.0, there).next(scaling.wanted, "")
        wanted.append(scaling.wanted)
    assert wanted == [2, 4, 8, 12, 12, 12]
    scaling = scaling.for_latency(3.0, 5.0, there)
    assert scaling.wanted == 12
    for _ in range(CALM_EPOCHS):
        scaling = scaling.for_latency(0.1, 5.0, there)
    assert scaling.wanted == 6


def test_without_dynamic_allocation_there_are_no_more_tasks_than_run_at_once() -> None:
    scaling = Scaling()
    for _ in range(5):
        scaling = scaling.for_latency(60.0, 5.0, Capacity(2, 2)).next(scaling.wanted, "")
    assert scaling.wanted == 2
    assert most_tasks({}) is None
    assert most_tasks({"spark.dynamicAllocation.enabled": "true", "spark.executor.cores": "4"}) == KEY_GROUPS


def test_tasks_are_a_number_or_auto_and_the_target_is_a_time() -> None:
    assert Config().with_spark_settings({"spark.plait.tasks": "auto"}).tasks == "auto"
    assert Config(latency_target="1 minute").latency_seconds == 60
    with pytest.raises(ConfigError, match="give a number, None or auto"):
        Config(tasks="many")
    with pytest.raises(ConfigError, match="latency_target"):
        Config(latency_target="soon")
