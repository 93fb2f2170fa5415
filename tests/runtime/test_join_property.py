"""Property: whatever is joined and however it arrives, after every epoch the committed rows are the batch join's.

All of it runs on `plait.testing.LocalEngine`: the code of Spark's tasks and of the driver, real state files, no Spark.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plait.config import Config
from plait.order.orders import fixed
from plait.query.expr import Call, ColumnRef, Literal
from plait.query.graph import Equality, Window
from plait.query.plan import Node, Plan
from plait.query.relation import Relation
from plait.runtime.task import join_task, prober
from plait.runtime.task.passes import Passes
from plait.share.probe_trees import build_plan
from plait.state.segments import keys
from plait.testing import Clock, LocalEngine, state_tables
from tests.oracle import rows_of
from tests.random_joins import (
    ARROW,
    COMPARED,
    KINDS,
    SECOND,
    START,
    Builder,
    Case,
    Query,
    cases,
    check_case,
    fewer_stores,
    run_case,
    value,
)

COMMON = settings(
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
)


@settings(COMMON, max_examples=40)
@given(cases())
def test_oracle_every_epochs_results_are_those_of_the_batch_join(case: Case) -> None:
    check_case(case)


def test_oracle_rows_do_not_depend_on_which_stores_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    # Small stores are asked about all tuples that would go to them.
    monkeypatch.setattr(prober, "FEWEST_ASKED", 1)
    # Every hop in three passes, each with the rows of its range only.
    monkeypatch.setattr(join_task, "passes_for", lambda reads, _: Passes(3, frozenset(reads)))
    left_out = searches = 0

    def counted(plan: Plan) -> Plan:
        nonlocal searches
        searches += len(plan.searches)
        return plan

    @settings(COMMON, max_examples=20)
    @given(cases(most_aliases=5, most_queries=2, shapes=("cycle", "chain")))
    def check(case: Case) -> None:
        nonlocal left_out
        case = fewer_stores(case)
        left_out += sum(graph.stored is not None for graph in case.graphs.values())
        check_case(case, change=counted)

    check()
    assert left_out > 8, "nothing was tested"
    assert searches > 8, "nothing was searched"


@pytest.mark.soak
@settings(COMMON, derandomize=False, max_examples=1000)
@given(st.one_of(cases(), cases(windows=True, ttl=True, most_aliases=4), cases(windows=True, most_aliases=4)))
def test_oracle_a_thousand_new_cases(case: Case) -> None:
    check_case(case)


@settings(COMMON, max_examples=15)
@given(cases(kinds=("integral", "string"), most_aliases=8, most_queries=1))
def test_oracle_eight_aliases_join_as_a_batch_would(case: Case) -> None:
    check_case(case)


@settings(COMMON, max_examples=20)
@given(cases(kinds=("integral", "string"), most_aliases=4, most_queries=2, alike=(3, 1, 6), rows=(24, 40)))
def test_oracle_queries_of_one_structure_share_trees_and_keep_their_rows(case: Case) -> None:
    check_case(case)


@settings(COMMON, max_examples=20)
@given(cases(kinds=("integral",), windows=True, ttl=True, most_aliases=3, most_queries=2, alike=(4, 2), rows=(24, 40)))
def test_oracle_windows_of_many_lengths_and_ttls_in_one_tree(case: Case) -> None:
    check_case(case)


@pytest.mark.parametrize("kind", KINDS)
def test_oracle_every_key_type_joins_as_a_batch_would(kind: str) -> None:
    check_case(star(3, kind))
    check_case(star(3, kind, composite=True))


# ---------------------------------------------------------------- a hash is not a key


@pytest.fixture
def two_bit_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys whose hash alone does not decide get one of four hashes."""
    few = np.uint64(3 << 62)
    hash_array, combine = keys._hash_array, keys.combine

    def coarse(array: pa.Array) -> Any:
        wide = pa.types.is_decimal(array.type) and array.type.precision > 18
        return hash_array(array) & few if wide or keys._is_bytes(array.type) else hash_array(array)

    monkeypatch.setattr(keys, "_hash_array", coarse)
    monkeypatch.setattr(keys, "combine", lambda left, right: combine(left, right) & few)


@settings(COMMON, max_examples=18)
@given(cases(kinds=(*COMPARED, "integral"), most_queries=2, most_aliases=5))
def test_different_keys_with_one_hash_never_match(two_bit_hashes: None, case: Case) -> None:
    check_case(case)


@pytest.mark.parametrize("kind", COMPARED)
def test_without_comparing_keys_collisions_would_give_wrong_results(
    two_bit_hashes: None, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr("plait.runtime.task.prober.same_keys", lambda left, rows, *_: np.ones(len(rows), np.bool_))
    assert is_wrong(star(3, kind), lambda plan: plan)


# ---------------------------------------------------------------- exactly once: the rank rule


def star(size: int, kind: str = "bigint", composite: bool = False, rows: int = 12) -> Case:
    """Relations joined on one key; every epoch brings rows of all of them."""
    kind = "bigint" if kind == "integral" else kind
    schema = (("id", "bigint"), ("d0", kind), ("d1", "string"))
    relations = {f"r{i}": Relation(f"r{i}", schema) for i in range(size)}
    builder = Builder(relations, {})
    builder.aliases = [(f"a{i}", f"r{i}") for i in range(size)]
    columns = ("d0", "d1") if composite else ("d0",)
    for i in range(1, size):
        builder.equalities += [Equality(builder.ref("a0", c), builder.ref(f"a{i}", c)) for c in columns]
    builder.outputs = [builder.ref(alias, column) for alias, _ in builder.aliases for column in ("id", "d0")]
    return case_of({"q": builder.query(ttl=False)}, relations, rows)


def self_join() -> Case:
    """One relation under three aliases."""
    relations = {"r0": Relation("r0", (("id", "bigint"), ("d0", "bigint"), ("d1", "string")))}
    builder = Builder(relations, {})
    builder.aliases = [(f"a{i}", "r0") for i in range(3)]
    builder.equalities = [Equality(builder.ref("a0", "d0"), builder.ref(f"a{i}", "d0")) for i in (1, 2)]
    builder.outputs = [builder.ref(alias, "id") for alias, _ in builder.aliases]
    return case_of({"q": builder.query(ttl=False)}, relations, 12)


def case_of(queries: dict[str, Query], relations: dict[str, Relation], rows: int) -> Case:
    """Three epochs, in each of them rows of every relation with NULLs and matches among them."""
    schemas = {n: pa.schema([(c, ARROW[k]) for c, k in r.columns]) for n, r in relations.items()}

    def cell(column: str, kind: str, number: int) -> Any:
        return number if column == "id" else None if number % 11 == 5 else value(kind, number % 6)

    def table(name: str, numbers: range) -> pa.Table:
        columns = [[cell(c, kind, n) for n in numbers] for c, kind in relations[name].columns]
        return pa.table(
            [pa.array(c, t) for c, t in zip(columns, schemas[name].types, strict=True)], schema=schemas[name]
        )

    arrivals = [{name: table(name, range(rows * e, rows * (e + 1))) for name in relations} for e in range(3)]
    return Case(relations, schemas, queries, {}, arrivals, [0] * 3, seed=7, results=1000)


def with_steps(plan: Plan, see: Any) -> Plan:
    """The plan with `sees_current` of every step as `see(node)` says."""

    def changed(node: Node) -> Node:
        step = replace(node.step, sees_current=see(node))
        return replace(node, step=step, children=tuple(map(changed, node.children)))

    return replace(plan, trees=tuple(replace(t, nodes=tuple(map(changed, t.nodes))) for t in plan.trees))


def is_wrong(case: Case, change: Any) -> bool:
    """Whether some epoch's results are not the oracle's."""
    return any(seen.results != seen.expected for seen in run_case(case, change, steady=True))


def steps(case: Case) -> Iterator[int]:
    found: list[int] = []

    def note(plan: Plan) -> Plan:
        found.extend(node.id for tree in plan.trees for top in tree.nodes for node in top.walk())
        return plan

    next(iter(run_case(case, note, steady=True)))
    yield from dict.fromkeys(found)


@pytest.mark.parametrize("make", [lambda: star(2), lambda: star(3), self_join], ids=["two", "three", "self-join"])
def test_the_rank_rule_holds_for_every_step_or_results_are_lost_or_repeated(make: Any) -> None:
    case = make()
    assert not is_wrong(case, lambda plan: plan)
    assert is_wrong(case, lambda plan: with_steps(plan, lambda _: True))
    assert is_wrong(case, lambda plan: with_steps(plan, lambda _: False))
    for broken in steps(case):

        def flipped(node: Node, broken: int = broken) -> bool:
            return node.step.sees_current != (node.id == broken)

        assert is_wrong(case, lambda plan, flipped=flipped: with_steps(plan, flipped)), f"step {broken} does not matter"


# ---------------------------------------------------------------- windows, late rows, TTL


@settings(COMMON, max_examples=25)
@given(cases(kinds=("integral", "string"), windows=True, most_aliases=4, most_queries=2))
def test_oracle_windows_drop_late_rows_by_sparks_rule_and_lose_no_result(case: Case) -> None:
    check_case(case)


@settings(COMMON, max_examples=18)
@given(cases(kinds=("integral", "string"), ttl=True, most_aliases=4, most_queries=2))
def test_oracle_a_row_is_matched_until_its_ttl_is_over_and_no_longer(case: Case) -> None:
    check_case(case)


@settings(COMMON, max_examples=15)
@given(cases(kinds=("integral",), windows=True, ttl=True, most_aliases=3, most_queries=2))
def test_oracle_windows_and_ttl_together(case: Case) -> None:
    check_case(case)


def windowed(ttl_seconds: int | None = None) -> tuple[Plan, pa.Schema]:
    """Two streams within five seconds of each other; the plan and their schema."""
    columns = (("id", "bigint"), ("d0", "bigint"), ("ts", "timestamp"))
    ttl_us = None if ttl_seconds is None else ttl_seconds * SECOND
    timed = None if ttl_seconds else "ts"
    delay = None if ttl_seconds else 2000
    relations = {f"r{i}": Relation(f"r{i}", columns, timed, delay, ttl_us) for i in range(2)}
    builder = Builder(relations, {})
    builder.aliases = [("a0", "r0"), ("a1", "r1")]
    builder.equalities = [Equality(builder.ref("a0", "d0"), builder.ref("a1", "d0"))]
    if ttl_seconds is None:
        builder.windows = [Window(builder.ref("a0", "ts"), builder.ref("a1", "ts"), -5 * SECOND, 5 * SECOND)]
    builder.outputs = [builder.ref("a0", "id"), builder.ref("a1", "id")]
    graph = builder.query(ttl=False).graph
    plan = build_plan({"q": graph}, relations, {"q": fixed(graph)}, tuple(relations))
    return plan, pa.schema([(c, ARROW[k]) for c, k in columns])


def at(schema: pa.Schema, *seconds: int) -> pa.Table:
    """Rows of one key at these event times."""
    times = [START + dt.timedelta(seconds=s) for s in seconds]
    return pa.table(
        [pa.array(c, t) for c, t in zip([seconds, [1] * len(times), times], schema.types, strict=True)], schema=schema
    )


def rows_at_rest(engine: LocalEngine) -> dict[str, list[int]]:
    return {store[:2]: sorted(t.column("id").to_pylist()) for store, t in state_tables(engine).items()}


def test_state_no_window_can_reach_is_removed(tmp_path: Path) -> None:
    plan, schema = windowed()
    with LocalEngine(tmp_path, plan) as engine:
        engine.run({"r0": at(schema, 0, 1), "r1": at(schema, 0)})
        assert engine.live.watermark_ms == start_ms(-2)
        engine.run({"r0": at(schema, 20), "r1": at(schema, 7)})
        # The slower stream holds the watermark: everything may still be reached.
        assert engine.live.watermark_ms == start_ms(5)
        assert rows_at_rest(engine) == {"r0": [0, 1, 20], "r1": [0, 7]}
        engine.run({"r1": at(schema, 8)})
        # At 5 a row of time 0 is out of reach, one of time 1 is not, but they rest in one segment.
        assert rows_at_rest(engine) == {"r0": [0, 1, 20], "r1": [7, 8]}
        engine.run({})
        assert engine.live.watermark_ms == start_ms(6)
        assert rows_at_rest(engine) == {"r0": [20], "r1": [7, 8]}


def test_expired_rows_are_dropped_while_merging(tmp_path: Path) -> None:
    plan, schema = windowed()
    with LocalEngine(tmp_path, plan, Config(tasks=1, sync=False, fan_in=2)) as engine:
        engine.run({"r0": at(schema, 0, 30), "r1": at(schema, 30)})
        engine.run({"r0": at(schema, 31, 32), "r1": at(schema, 29)})
        assert rows_at_rest(engine)["r0"] == [0, 30, 31, 32]
        engine.run({})
        assert rows_at_rest(engine)["r0"] == [30, 31, 32]


def test_late_rows_are_counted_and_neither_joined_nor_kept(tmp_path: Path) -> None:
    plan, schema = windowed()
    with LocalEngine(tmp_path, plan) as engine:
        engine.run({"r0": at(schema, 10), "r1": at(schema, 10)})
        added = engine.run({"r0": at(schema, 8, 9, 7)})
        # The watermark is 8: at it is late, above it is not.
        assert engine.progress[-1]["rows_late"] == {"r0": 2, "r1": 0}
        assert rows_of(added["q"]) == [(9, 10)]
        assert rows_at_rest(engine)["r0"] == [9, 10]


def test_a_stream_never_seen_holds_the_watermark_back(tmp_path: Path) -> None:
    plan, schema = windowed()
    with LocalEngine(tmp_path, plan) as engine:
        engine.run({"r0": at(schema, 100)})
        engine.run({"r0": at(schema, 0)})
        assert engine.live.watermark_ms is None
        assert engine.progress[-1]["rows_late"] == {"r0": 0, "r1": 0}


def test_a_row_is_removed_when_its_ttl_is_over(tmp_path: Path) -> None:
    plan, schema = windowed(ttl_seconds=10)
    clock = Clock()
    with LocalEngine(tmp_path, plan, clock=clock) as engine:
        engine.run({"r0": at(schema, 0)})
        clock.advance(9.999999)
        assert rows_of(engine.run({"r1": at(schema, 1)})["q"]) == [(0, 1)]
        clock.advance(0.000001)
        assert engine.run({"r1": at(schema, 2)})["q"].num_rows == 0
        assert rows_at_rest(engine) == {"r1": [1, 2]}
        clock.advance(60)
        engine.run({})
        assert rows_at_rest(engine) == {}


def test_a_clock_that_goes_back_neither_revives_nor_kills_rows(tmp_path: Path) -> None:
    plan, schema = windowed(ttl_seconds=10)
    clock = Clock()
    with LocalEngine(tmp_path, plan, clock=clock) as engine:
        engine.run({"r0": at(schema, 0)})
        clock.advance(10)
        engine.run({"r0": at(schema, 5)})
        clock.advance(-10)
        assert rows_of(engine.run({"r1": at(schema, 1)})["q"]) == [(5, 1)]


def with_needed(fan_in: int, directory: Path, clock: Clock) -> tuple[LocalEngine, pa.Schema]:
    """Rows of r0 are forgotten after ten seconds, unless their id is above 100."""
    columns = (("id", "bigint"), ("d0", "bigint"), ("ts", "timestamp"))
    relations = {
        "r0": Relation("r0", columns, ttl_us=10 * SECOND, needed="(id > 100)"),
        "r1": Relation("r1", columns, ttl_us=10 * SECOND),
    }
    builder = Builder(relations, {})
    builder.aliases = [("a0", "r0"), ("a1", "r1")]
    builder.equalities = [Equality(builder.ref("a0", "d0"), builder.ref("a1", "d0"))]
    builder.outputs = [builder.ref("a0", "id"), builder.ref("a1", "id")]
    graph = builder.query(ttl=False).graph
    plan = build_plan({"q": graph}, relations, {"q": fixed(graph)}, tuple(relations))
    meaning = Call(">", (ColumnRef("", "id", "bigint"), Literal(100, "bigint")), "boolean")
    config = Config(tasks=1, sync=False, fan_in=fan_in)
    engine = LocalEngine(directory, plan, config, predicates={"(id > 100)": meaning}, clock=clock)
    return engine, pa.schema([(c, ARROW[k]) for c, k in columns])


def test_a_row_that_is_needed_outlives_its_ttl_and_the_rows_beside_it_do_not(tmp_path: Path) -> None:
    clock = Clock()
    engine, schema = with_needed(2, tmp_path, clock)
    with engine:
        engine.run({"r0": at(schema, 1, 101)})
        clock.advance(10)
        # The segment of both rows stays for the one; the other can no longer be matched.
        assert sorted(rows_of(engine.run({"r0": at(schema, 2), "r1": at(schema, 7)})["q"])) == [(2, 7), (101, 7)]
        assert rows_at_rest(engine)["r0"] == [1, 2, 101]
        # Merging takes what is over, and only that.
        engine.run({})
        assert rows_at_rest(engine)["r0"] == [2, 101]
        clock.advance(3_000 * 365 * 86_400)
        assert sorted(rows_of(engine.run({"r1": at(schema, 8)})["q"])) == [(101, 8)]


def test_a_segment_without_needed_rows_goes_unread(tmp_path: Path) -> None:
    clock = Clock()
    engine, schema = with_needed(8, tmp_path, clock)
    with engine:
        engine.run({"r0": at(schema, 1, 2)})
        engine.run({"r0": at(schema, 101)})
        clock.advance(10)
        engine.run({})
        assert rows_at_rest(engine) == {"r0": [101]}


def test_a_clock_that_goes_back_over_a_restart_neither_revives_nor_kills_rows(tmp_path: Path) -> None:
    clock = Clock()
    engine, schema = with_needed(8, tmp_path, clock)
    with engine:
        engine.run({"r0": at(schema, 1, 101)})
        clock.advance(6)
        engine.run({"r0": at(schema, 2)})
        clock.advance(4)
        engine.run({})
    # 1 is over; a clock an hour slow must not say otherwise, and what arrives now must live its ten seconds.
    clock.advance(-3_600)
    engine, schema = with_needed(8, tmp_path, clock)
    with engine:
        assert sorted(rows_of(engine.run({"r0": at(schema, 3), "r1": at(schema, 7)})["q"])) == [
            (2, 7),
            (3, 7),
            (101, 7),
        ]
        clock.advance(3_600 + 9)
        assert sorted(rows_of(engine.run({"r1": at(schema, 8)})["q"])) == [(3, 8), (101, 8)]
        clock.advance(1)
        assert sorted(rows_of(engine.run({"r1": at(schema, 9)})["q"])) == [(101, 9)]


def start_ms(seconds: int) -> int:
    return int((START.replace(tzinfo=dt.UTC) + dt.timedelta(seconds=seconds)).timestamp() * 1000)
