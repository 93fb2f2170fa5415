"""Plans travel as bytes that are made once, and are unpacked once per process."""

from __future__ import annotations

import pickle
from dataclasses import replace

from pyspark import cloudpickle

from benchmarks.sets.workload import queries, relations
from plait.config import Config
from plait.query.packed import unpacked
from plait.query.plan import Plan
from plait.share.planner import Planner


def plan(count: int) -> Plan:
    return Planner({q.name: q.graph for q in queries(count, 2)}, relations(), Config()).plan


def test_a_plan_that_was_pickled_is_equal_and_pickled_once() -> None:
    one = plan(3)
    assert pickle.loads(pickle.dumps(one)) == one
    assert pickle.loads(cloudpickle.dumps(one)).digest == one.digest
    assert one.packed is one.packed


def test_equal_bytes_are_one_object_that_keeps_what_it_has_computed() -> None:
    unpacked.cache_clear()
    one = plan(3)
    first = pickle.loads(pickle.dumps(one))
    second = pickle.loads(pickle.dumps(one))
    assert first is second
    assert first.store_by_id is second.store_by_id
    assert pickle.loads(pickle.dumps(one.inputs[0])) == one.inputs[0]


def test_a_changed_plan_is_another_object() -> None:
    one = plan(3)
    assert one.packed
    other = replace(one, ranks=tuple(reversed(one.ranks)))
    assert pickle.loads(pickle.dumps(other)) == other != one
