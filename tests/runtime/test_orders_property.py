"""Property: whatever orders and ranks an epoch runs under, and whoever chooses them, no row is lost or doubled.

As `test_join_property.py`, but the plan changes from epoch to epoch: at random, or by a real planner that re-optimises
after every epoch.  After every epoch the committed rows are those of the batch join in DuckDB.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plait.config import COST_MODELS, COST_VARIANTS, DRIVER_POLICIES, ORDERERS, Config
from plait.query.graph import Equality
from plait.query.plan import Node, Plan
from plait.query.relation import Relation
from plait.share.planner import Planner
from tests.random_joins import ARROW, Builder, Case, cases, check_case, fewer_stores, run_case

COMMON = settings(
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
CASES = cases(kinds=("integral", "string"), most_aliases=5, most_queries=2)
WITH_TIME = cases(kinds=("integral",), windows=True, ttl=True, most_aliases=4, most_queries=2)


@settings(COMMON, max_examples=32)
@given(st.one_of(CASES, WITH_TIME))
def test_oracle_any_order_and_any_ranking_in_every_epoch(case: Case) -> None:
    check_case(case, replan=1.0)


def planned(**config: Any) -> Any:
    """Re-optimises after every epoch, at the slightest gain."""
    return lambda case: Planner(case.graphs, case.relations, Config(replan_epochs=1, replan_gain=0.0, **config))


def test_oracle_a_planner_that_changes_its_mind_after_every_epoch() -> None:
    changes: Counter[str] = Counter()

    @settings(COMMON, max_examples=45)
    @given(
        st.one_of(CASES, WITH_TIME),
        # Those that change more come first: Hypothesis prefers them.
        st.sampled_from(("selectivity_first", "dp_pick", "greedy")),
        st.sampled_from(("round_robin", "initial_output_size", "output_rate", "consumption_rate", "timestamp")),
        st.sampled_from(COST_MODELS),
        st.sampled_from(COST_VARIANTS),
        st.sampled_from((1, 4, 60)),
    )
    def check(case: Case, orderer: str, policy: str, model: str, variant: str, periods: int) -> None:
        sharing = ("naive", "independent")[case.seed % 2]
        settings = {"cost_model": model, "cost_variant": variant, "history_periods": periods, "sharing": sharing}
        reports = check_case(case, planner=planned(orderer=orderer, driver_policy=policy, **settings))
        for before, after in pairwise(reports):
            changes["orders"] += before["orders"] != after["orders"]
            changes["ranks"] += before["ranks"] != after["ranks"]

    check()
    # Else nothing was tested.
    assert changes["orders"] > 10
    assert changes["ranks"] > 10


@settings(COMMON, max_examples=15)
@given(cases(kinds=("integral", "string"), most_aliases=4, most_queries=4, alike=(0, 2), rows=(24, 40)))
def test_oracle_orders_that_are_chosen_together_after_every_epoch(case: Case) -> None:
    check_case(case, planner=planned(sharing="ilp", sharing_seconds=0.2))


def test_oracle_a_planner_that_lacks_stores_chooses_among_the_orders_there_are() -> None:
    changes = 0

    @settings(COMMON, max_examples=20)
    @given(
        cases(kinds=("integral", "string"), most_aliases=5, most_queries=2, alike=(0, 1), shapes=("cycle", "tree")),
        st.sampled_from(("dp_pick", "selectivity_first", "greedy")),
        st.sampled_from(("naive", "ilp")),
    )
    def check(case: Case, orderer: str, sharing: str) -> None:
        nonlocal changes
        settings = {"orderer": orderer, "sharing": sharing, "sharing_seconds": 0.2}
        reports = check_case(fewer_stores(case), planner=planned(**settings))
        changes += sum(before["orders"] != after["orders"] for before, after in pairwise(reports))

    check()
    assert changes > 5, "nothing was tested"


def drifting(epochs: int = 5) -> Case:
    """Four streams on one key and a fifth behind the last; which of them match changes with every epoch."""
    columns = (("id", "bigint"), ("k", "bigint"), ("m", "bigint"))
    relations = {f"r{i}": Relation(f"r{i}", columns) for i in range(5)}
    builder = Builder(relations, {})
    builder.aliases = [(f"a{i}", f"r{i}") for i in range(5)]
    builder.equalities = [Equality(builder.ref("a0", "k"), builder.ref(f"a{i}", "k")) for i in (1, 2, 3)]
    builder.equalities.append(Equality(builder.ref("a3", "m"), builder.ref("a4", "m")))
    builder.outputs = [builder.ref(alias, "id") for alias, _ in builder.aliases]
    schema = pa.schema([(c, ARROW[kind]) for c, kind in columns])

    choose = random.Random(11)

    def table(stream: int, epoch: int) -> pa.Table:
        # The streams take turns in bringing keys that no other has.
        apart = 1000 if stream == epoch % 5 else 0
        numbers = range(100 * epoch, 100 * epoch + 24 - 3 * stream)
        rows = [(n, choose.randrange(50) + apart, choose.randrange(40)) for n in numbers]
        columns = [pa.array(c, t) for c, t in zip(zip(*rows, strict=True), schema.types, strict=True)]
        return pa.table(columns, schema=schema)

    arrivals = [{f"r{i}": table(i, epoch) for i in range(5)} for epoch in range(epochs)]
    queries = {"q": builder.query(ttl=False)}
    return Case(relations, dict.fromkeys(relations, schema), queries, {}, arrivals, [0] * epochs, seed=3, results=500)


@pytest.mark.parametrize(
    "orderer", [o if o == "dp_pick" else pytest.param(o, marks=pytest.mark.soak) for o in ORDERERS]
)
def test_oracle_every_policy_under_every_orderer(orderer: str) -> None:
    case = drifting()
    orders: set[str] = set()
    for policy in DRIVER_POLICIES:
        reports = check_case(case, planner=planned(orderer=orderer, driver_policy=policy))
        assert sum(r["rows_out"]["q"] for r in reports) > 0
        orders |= {str(r["orders"]) for r in reports}
        if policy == "round_robin":
            assert len({tuple(r["ranks"]) for r in reports}) > 1
    assert (len(orders) == 1) == (orderer == "fixed")


def test_without_the_rank_rule_rows_would_be_doubled() -> None:
    def blind(plan: Plan) -> Plan:
        def changed(node: Node) -> Node:
            step = replace(node.step, sees_current=True)
            return replace(node, step=step, children=tuple(map(changed, node.children)))

        return replace(plan, trees=tuple(replace(t, nodes=tuple(map(changed, t.nodes))) for t in plan.trees))

    found = list(run_case(drifting(2), blind, replan=1.0))
    assert any(seen.results["q"] > seen.expected["q"] for seen in found)
