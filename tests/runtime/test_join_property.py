"""Property: whatever is joined and however it arrives, after every epoch the committed rows are the batch join's.

All of it runs on `plait.testing.LocalEngine`: the code of Spark's tasks and of the driver, real state files, no Spark.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings

from plait.query.graph import Equality
from plait.query.plan import Node, Plan
from plait.query.relation import Relation
from plait.state import keys
from tests.random_joins import ARROW, COMPARED, KINDS, Builder, Case, Query, cases, check_case, run_case, value

COMMON = settings(
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
)


@settings(COMMON, max_examples=150)
@given(cases())
def test_oracle_every_epochs_results_are_those_of_the_batch_join(case: Case) -> None:
    check_case(case)


@settings(COMMON, max_examples=15)
@given(cases(kinds=("integral", "string"), most_aliases=8, most_queries=1))
def test_oracle_eight_aliases_join_as_a_batch_would(case: Case) -> None:
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


@settings(COMMON, max_examples=60)
@given(cases(kinds=(*COMPARED, "integral"), most_queries=2, most_aliases=5))
def test_different_keys_with_one_hash_never_match(two_bit_hashes: None, case: Case) -> None:
    check_case(case)


@pytest.mark.parametrize("kind", COMPARED)
def test_without_comparing_keys_collisions_would_give_wrong_results(
    two_bit_hashes: None, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr("plait.runtime.hops.same_keys", lambda left, rows, *_: np.ones(len(rows), np.bool_))
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


@settings(COMMON, max_examples=80)
@given(cases(kinds=("integral", "string"), windows=True, most_aliases=4, most_queries=2))
def test_oracle_windows_drop_late_rows_by_sparks_rule_and_lose_no_result(case: Case) -> None:
    check_case(case)


@settings(COMMON, max_examples=60)
@given(cases(kinds=("integral", "string"), ttl=True, most_aliases=4, most_queries=2))
def test_oracle_a_row_is_matched_until_its_ttl_is_over_and_no_longer(case: Case) -> None:
    check_case(case)


@settings(COMMON, max_examples=30)
@given(cases(kinds=("integral",), windows=True, ttl=True, most_aliases=3, most_queries=2))
def test_oracle_windows_and_ttl_together(case: Case) -> None:
    check_case(case)
