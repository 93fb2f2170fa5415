"""Two-Step Convert: golden conversions.

`tests/fixtures/tsc/*.spec` hold cases like those of `fixtures/sql`: a `# title`, the SQL, a line `----`; then the plan
as `explain(stages=True)` draws it, the joins left binary and why, what is kept from epoch to epoch, and what is
recomputed.  `pytest --rewrite` refreshes them; review the diff.  `tpch.spec` names queries of the benchmark by number.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
from py4j.java_gateway import GatewayClient
from py4j.protocol import MEMORY_COMMAND_NAME
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from benchmarks.tpch.queries import QUERIES, SCHEMAS
from plait.errors import PlaitError
from plait.query.graph import JoinGraph
from plait.query.relation import Relation
from plait.sql.answer.convert import drawn, left_binary
from plait.sql.answer.residual import Source
from plait.sql.catalyst import read_query as catalyst
from plait.sql.catalyst.logical import logical_of
from plait.sql.catalyst.read_query import ReadQuery, read_query
from plait.sql.join.multiway import MULTI_JOIN, PlanNode, get_ordered_nodes, two_step_convert
from tests.spark.test_read_query import relations, schemas

pytestmark = pytest.mark.spark

FIXTURES = Path(__file__).parent.parent / "fixtures" / "tsc"
NAMES = sorted(path.stem for path in FIXTURES.glob("*.spec"))
CONVERTED = (2, 3, 5, 7, 8, 9, 10, 11, 15, 18, 21)
"""The queries of TPC-H that paper 002 converts."""


@cache
def tpch_schemas() -> dict[str, StructType]:
    return {name: cast(StructType, StructType.fromDDL(ddl)) for name, ddl in SCHEMAS.items()}


@cache
def tpch_relations() -> dict[str, Relation]:
    found = {}
    for name, schema in tpch_schemas().items():
        found[name] = Relation(name, tuple((f.name, f.dataType.simpleString()) for f in schema.fields))
    return found


def read(spark: SparkSession, title: str, sql: str) -> ReadQuery:
    """A case; without SQL its title names a query of TPC-H."""
    if sql:
        return read_query(spark, relations(), schemas(), "q", sql)
    return read_query(spark, tpch_relations(), tpch_schemas(), "q", QUERIES[int(title.removeprefix("# Q"))])


def told(query: ReadQuery) -> Iterator[str]:
    """What a golden conversion says."""
    yield query.stages.after
    yield from (f"binary: {why}" for why in query.stages.left_binary)
    if query.residual is None:
        (graph,) = query.graphs.values()
        yield f"append {_graph(graph)}"
        return
    for source in query.residual.sources:
        yield f"keep {_kept(source)}"
    yield from (f"recompute: {note}" for note in dict.fromkeys(query.residual.notes))


def _kept(source: Source) -> str:
    assert source.graph is not None
    what = f"rows of {source.name}"
    if source.maintained is not None:
        columns = ", ".join(f"{name} {type}" for name, type in source.maintained.columns)
        what = f"({columns}) of {source.name}"
    return f"{what} {_graph(source.graph)}"


def _graph(graph: JoinGraph) -> str:
    inputs = ", ".join(a.relation if a.relation == a.name else f"{a.relation} {a.name}" for a in graph.aliases)
    keys = "".join(f" on {' = '.join(map(str, attribute))}" for attribute in graph.attributes)
    return f"[{inputs}]{keys} → {', '.join(o.sql.replace('`', '') for o in graph.outputs)}"


def converted(spark: SparkSession, sql: str) -> PlanNode:
    """The plan of a text that `read_query` may refuse, after both steps."""
    return two_step_convert(optimised(spark, sql))


def optimised(spark: SparkSession, sql: str) -> PlanNode:
    """The plan of a text as Catalyst has optimised it."""
    state = catalyst._stub_session(spark).sessionState()
    catalyst._add_stubs(spark, state.catalog(), schemas())
    execution = catalyst._analyse(spark._jvm, state, state.sqlParser().parsePlan(sql))
    return PlanNode.of(logical_of(spark._jvm).reader.plan(execution.optimizedPlan()))


def cases(name: str) -> list[tuple[str, str, str]]:
    """(title, SQL, expected) of a fixture."""
    found = []
    for block in (FIXTURES / f"{name}.spec").read_text().strip().split("\n\n"):
        head, _, expected = (block + "\n").partition("\n----\n")
        title = head.splitlines()[0]
        found.append((title, head.removeprefix(title).strip(), expected.strip()))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_is_converted_as_its_golden_one(spark: SparkSession, rewrite: bool, name: str) -> None:
    blocks = []
    for title, sql, _ in cases(name):
        if name == "nondeterministic":
            plan = converted(spark, sql)
            lines = [*drawn(plan), *(f"binary: {why}" for why in left_binary(plan))]
        else:
            try:
                lines = list(told(read(spark, title, sql)))
            except PlaitError as error:
                lines = [f"! {error}"]
        blocks.append("\n".join(filter(None, (title, sql, "----", *lines))))
    text = "\n\n".join(blocks) + "\n"
    if rewrite:
        (FIXTURES / f"{name}.spec").write_text(text)
    assert text == (FIXTURES / f"{name}.spec").read_text()


def test_the_fixtures_hold_the_paper_s_queries_and_forty_more() -> None:
    assert [title for title, _, _ in cases("tpch")] == [f"# Q{number}" for number in CONVERTED]
    assert sum(len(cases(name)) for name in NAMES if name != "tpch") >= 40


@pytest.mark.parametrize("name", NAMES)
def test_no_golden_conversion_is_a_refusal(name: str) -> None:
    assert not [title for title, _, expected in cases(name) if not expected or expected.startswith("!")]


def test_no_inner_join_of_the_paper_s_queries_is_left_binary() -> None:
    for title, _, expected in cases("tpch"):
        assert "MultiJoin [" in expected, title
        assert "Join Inner" not in expected, title


def test_nothing_is_lost_between_a_group_s_members_and_its_node(spark: SparkSession) -> None:
    """Step 2 keeps every input of every member, and each input is read by one node."""
    sql = cases("questions")[5][1]
    before = optimised(spark, sql)
    streams = sorted(node.stream for node in get_ordered_nodes(before) if node.stream)
    after = two_step_convert(before)
    assert sorted(node.stream for node in get_ordered_nodes(after) if node.stream) == streams
    for node in get_ordered_nodes(after):
        if node.kind == MULTI_JOIN:
            assert node.group is not None
            members = {id(member) for member in node.group.members}
            outside = [below for m in node.group.members for below in m.inputs if id(below) not in members]
            assert [below.jvm for below in outside] == [below.jvm for below in node.group.inputs]
            assert len(node.inputs) == len(outside)


def test_reading_a_query_of_eight_tables_takes_few_calls(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a plan is talking with the JVM: what makes it slow is the number of calls."""
    calls = 0
    send = GatewayClient.send_command

    def counted(self: GatewayClient, command: str, *rest: Any) -> Any:
        nonlocal calls
        # Python's garbage collector has its say at any time.
        calls += not command.startswith(MEMORY_COMMAND_NAME)
        return send(self, command, *rest)

    monkeypatch.setattr(GatewayClient, "send_command", counted)
    read(spark, "# Q8", "")
    assert calls < 3000
