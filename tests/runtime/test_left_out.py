"""Rows that no query sees are counted, and one wrong row does not let all state expire."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import pyarrow as pa

from plait.config import Config
from plait.order.orders import fixed
from plait.query.expr import ColumnRef
from plait.query.graph import Alias, Equality, JoinGraph, Output, Window
from plait.query.relation import ColumnDef, Relation
from plait.share.probe_trees import build_plan
from plait.testing import Clock, LocalEngine, state_tables

COLUMNS = (("k", "bigint"), ("ts", "timestamp"))
MINUTE = 60_000_000


def graph() -> JoinGraph:
    """a and b on k, within a minute."""
    columns = tuple(ColumnDef(c, c, t) for c, t in COLUMNS)
    times = [ColumnRef(n, "ts", "timestamp") for n in "ab"]
    keys = [ColumnRef(n, "k", "bigint") for n in "ab"]
    return JoinGraph(
        "",
        tuple(Alias(n, n, None, columns) for n in "ab"),
        (Equality(*keys),),
        (Output("k", "bigint", keys[0], "a.k", (keys[0],)),),
        (Window(times[0], times[1], -MINUTE, MINUTE),),
    )


def started(path: Path, clock: Clock, **config: str | None) -> LocalEngine:
    relations = {n: Relation(n, COLUMNS, "ts", 0) for n in "ab"}
    plan = build_plan({"q": graph()}, relations, {"q": fixed(graph())}, ("a", "b"))
    return LocalEngine(path, plan, Config(tasks=1, sync=False, **config), clock=clock)


def rows(clock: Clock, *values: tuple[int | None, float]) -> pa.Table:
    """Keys, and seconds after the clock."""
    now = dt.datetime.fromtimestamp(clock.now_us / 1e6, dt.UTC)
    times = [now + dt.timedelta(seconds=seconds) for _, seconds in values]
    return pa.table(
        {"k": pa.array([k for k, _ in values], pa.int64()), "ts": pa.array(times, pa.timestamp("us", "UTC"))}
    )


def test_rows_without_a_key_are_counted(tmp_path: Path) -> None:
    clock = Clock()
    with started(tmp_path, clock) as engine:
        found = engine.run({"a": rows(clock, (1, 0), (None, 0), (None, 1)), "b": rows(clock, (1, 0))})
        assert found["q"].num_rows == 1
        report = engine.progress[-1]
        assert report["rows_in"] == {"a": 1, "b": 1}
        assert report["rows_null_key"] == {"a": 2}


def test_a_far_future_event_time_moves_no_watermark_and_is_counted(tmp_path: Path) -> None:
    clock = Clock()
    with started(tmp_path, clock) as engine:
        engine.run({"a": rows(clock, (1, 0), (2, 10 * 365 * 86_400)), "b": rows(clock, (3, 0), (3, 20 * 365 * 86_400))})
        assert engine.progress[-1]["rows_future"] == {"a": 1, "b": 1}
        # Nothing is late, nothing has expired; the row itself is joined like any other.
        found = engine.run({"b": rows(clock, (1, 5), (2, 10 * 365 * 86_400))})
        assert found["q"].num_rows == 2
        assert engine.progress[-1]["rows_late"] == {"a": 0, "b": 0}
        assert state_tables(engine)["a[k]"].num_rows == 2


def test_without_the_bound_one_wrong_row_lets_all_state_expire(tmp_path: Path) -> None:
    clock = Clock()
    with started(tmp_path, clock, max_future=None) as engine:
        engine.run({"a": rows(clock, (1, 0), (2, 10 * 365 * 86_400)), "b": rows(clock, (3, 0), (3, 20 * 365 * 86_400))})
        assert engine.run({"b": rows(clock, (1, 5))})["q"].num_rows == 0
        assert engine.progress[-1]["rows_late"] == {"a": 0, "b": 1}
