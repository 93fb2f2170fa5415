"""A query that cannot go on with an epoch is left out of it; the others have what they would have had without it."""

from __future__ import annotations

import multiprocessing
import random
import shutil
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.config import Config
from plait.errors import PlaitError, QueryError
from plait.query.budget import Budget
from plait.query.expr import Call, Literal
from plait.query.graph import JoinGraph, Output
from plait.query.plan import Plan
from plait.query.progress import CatalogInForce, QueryStatus
from plait.runtime.driver.sinks import Keep, Noop, Sink
from plait.runtime.task.file_sets import query_table
from plait.state.log.manifest import ManifestLog, ResultFile
from plait.testing import LocalEngine, fault
from tests.runtime.test_changes import Shop, join, rows
from tests.runtime.test_query_sets import Row, expected, ref, table
from tests.runtime.test_shared_results import FILTERS, GRAPHS, PREDICATES, Sent, Ticking, arriving, in_force, plan_of

ONE = Literal(1, "bigint")


def dividing(graph: JoinGraph, by: int) -> JoinGraph:
    """With one more output, which cannot be computed for rows with this value."""
    divisor = Call("-", (ref("b.v"), Literal(by, "bigint")), "bigint")
    expr = Call("div", (ONE, divisor), "bigint")
    return replace(graph, outputs=(*graph.outputs, Output("d", "bigint", None, "", (ref("b.v"),), expr)))


def engine_of(path: Path, plan: Plan, tasks: int, sinks: dict[str, Sink]) -> LocalEngine:
    clock: Any = Ticking(path)
    config = Config(sync=False, on_query_error="park", tasks=tasks, replan_epochs=0, snapshot_every=2, fan_in=2)
    engine = LocalEngine(path, plan, config, clock=clock, predicates=PREDICATES)
    engine.change(sinks=sinks)
    return engine


def due(query: str, by: int | None, arrived: dict[str, list[Row]]) -> Counter[Any] | None:
    """The rows that a query has of an epoch, as streams forget what is older; None if one cannot be computed."""
    found: Counter[Any] = Counter()
    for (a, b, c), n in expected(GRAPHS[query], None, arrived).items():
        if by is not None and b == by:
            return None
        quotient = None if b is None else 0 if by is None or abs(b - by) > 1 else b - by
        found[(a, b, c) if by is None else (a, b, c, quotient)] += n
    return found


def kept(path: Path) -> dict[str, Counter[Any]]:
    """The rows in force, as somebody sees them who only has the files."""
    found: dict[str, Counter[Any]] = {}
    for query, files in in_force(path).items():
        for file in files:
            some = rows_of(query_table(str(path / "results" / file.path), file.bit))
            assert some.total() == file.rows
            found[query] = found.get(query, Counter()) + some
    return found


def rows_of(found: Any) -> Counter[Any]:
    return Counter(zip(*(column.to_pylist() for column in found.columns), strict=True)) if found.num_rows else Counter()


@settings(deadline=None, derandomize=True, database=None, max_examples=25)
@given(st.integers(0, 10_000), st.integers(1, 3))
def test_oracle_a_query_whose_output_fails_takes_no_row_from_the_others(
    tmp_path_factory: pytest.TempPathFactory, seed: int, tasks: int
) -> None:
    drawn, path = random.Random(seed), tmp_path_factory.mktemp("troubled")
    arrived = [arriving(seed + epoch) for epoch in range(4)]
    values = [row[1] for epoch in arrived for row in expected(GRAPHS["q0"], None, epoch)]
    by: dict[str, int | None] = {}
    for name in FILTERS:
        common = [v for v in values if v is not None] or [0]
        by[name] = drawn.choice([None, None, 7, 1000, drawn.choice(common)])
    graphs = {n: GRAPHS[n] if by[n] is None else dividing(GRAPHS[n], by[n] or 0) for n in FILTERS}
    sinks: dict[str, Sink] = {n: drawn.choice([Keep, Keep, Noop, Sent])() for n in FILTERS}
    # Never resumed, it stays as it is; restarts change nothing.
    failed: set[str] = set()
    kept: dict[str, Counter[Any]] = {n: Counter() for n in FILTERS}
    engine = engine_of(path, plan_of(list(graphs), graphs), tasks, sinks)
    for epoch in arrived:
        if drawn.random() < 0.3:
            engine.close()
            engine = engine_of(path, plan_of(list(graphs), graphs), tasks, sinks)
        for name in [name for name in sorted(failed) if drawn.random() < 0.5]:
            with pytest.raises(PlaitError, match="MISSED_GONE"):
                engine.driver.services.parking.ask(name, skip=False)
            engine.driver.services.parking.ask(name, skip=True)
            failed.discard(name)
        found = engine.run({name: table(some) for name, some in epoch.items()})
        for name in FILTERS:
            wanted = None if name in failed else due(name, by[name], epoch)
            if wanted is None:
                failed.add(name)
                wanted = Counter()
            if sinks[name].reads_rows:
                assert rows_of(found[name]) == wanted, (name, by[name])
            assert engine.progress[-1]["rows_out"][name] == wanted.total()
            kept[name] += wanted
        records = {record.query: record for record in engine.driver.services.parking.records}
        assert set(records) == failed
        assert all((r.status, r.code) == ("failed", "DIVIDE_BY_ZERO") for r in records.values())
    in_force = ManifestLog(engine.checkpoint.files).results()
    for name, sink in sinks.items():
        if sink.keeps_rows:
            assert sum(file.rows for file in in_force.get(name, ())) == kept[name].total()
    engine.close()
    shutil.rmtree(path)


def test_where_no_query_would_go_on_the_error_ends_the_run_and_nothing_is_committed(tmp_path: Path) -> None:
    by = next(row[1] for row in expected(GRAPHS["q0"], None, arriving(0)) if row[1] is not None)
    graphs = {"q0": dividing(GRAPHS["q0"], by)}
    with engine_of(tmp_path, plan_of(["q0"], graphs), 1, {"q0": Keep()}) as engine:
        engine.change(on_query_error="auto")
        engine.driver.services.parking._config = engine.driver.services.config
        with pytest.raises(QueryError, match="column 'd' of query 'q0' cannot be computed"):
            engine.run({name: table(some) for name, some in arriving(0).items()})
        assert engine.live.epoch == -1
        assert not engine.driver.services.parking.records


@pytest.mark.parametrize("point", ["troubled", "commit.2", "commit.3"])
def test_killed_while_a_query_is_being_parked_nothing_of_the_others_is_lost_or_doubled(
    tmp_path: Path, point: str
) -> None:
    arrived = [arriving(seed) for seed in range(3)]
    by = next(row[1] for row in expected(GRAPHS["q1"], None, arrived[1]) if row[1] is not None)
    assert all(due("q1", by, arrived[epoch]) is not None for epoch in (0, 2))
    graphs = {"q0": GRAPHS["q0"], "q1": dividing(GRAPHS["q1"], by)}
    plan, sinks = plan_of(list(graphs), graphs), dict[str, Sink](q0=Keep(), q1=Keep())

    def go_on() -> None:
        with engine_of(tmp_path, plan, 2, sinks) as engine:
            for epoch in range(engine.live.epoch + 1, len(arrived)):
                engine.run({name: table(some) for name, some in arrived[epoch].items()})

    process = multiprocessing.get_context("fork").Process(target=go_on)
    with fault(point, 1):
        process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    go_on()
    with engine_of(tmp_path, plan, 2, sinks) as engine:
        (record,) = engine.driver.services.parking.records
        assert (record.query, record.since, record.status) == ("q1", 1, "failed")
    found = kept(tmp_path)
    assert {len(row) for row in found["q1"]} == {4}
    assert found["q0"] == sum((due("q0", None, some) or Counter() for some in arrived), Counter())
    assert found["q1"] == due("q1", by, arrived[0])


# ---------------------------------------------------------------- limits


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    made = Shop(tmp_path)
    yield made
    made.close()


def ids(*found: int) -> Any:
    """Rows (id, k=1, j=0, f=0): each matches all others."""
    return rows(*((number, 1, 0, 0, 0.0) for number in found))


def status_of(shop: Shop, name: str = "q") -> tuple[str | None, str]:
    assert shop.engine is not None
    record = shop.engine.driver.services.parking.of(name)
    return (None, "") if record is None else (record.status, record.code)


def files_of(shop: Shop, name: str) -> tuple[ResultFile, ...]:
    assert shop.engine is not None
    return shop.engine.checkpoint.log.results().get(name, ())


@pytest.mark.parametrize("sink", [Keep, Sent])
def test_a_query_with_more_rows_than_it_may_have_is_parked_with_them(shop: Shop, sink: type[Sink]) -> None:
    graph = join("a.k = b.k")
    shop.budgets = {"q": Budget(rows=3)}
    shop.start(q=(graph, "now"), other=(join("a.k = b.k", out="a.id"), "now"))
    assert shop.engine is not None
    shop.engine.change(sinks={"q": sink(), "other": Keep()})
    shop.run(s=ids(1), u=ids(1, 2, 3))
    assert status_of(shop) == (None, "")
    found = shop.run(s=ids(2), u=ids(4))
    assert (len(found["q"]), len(found["other"])) == (5, 5)
    assert status_of(shop) == ("parked", "TOO_MANY_ROWS")
    told = shop.engine.progress[-1]["catalog"]["queries"]["q"]
    assert "it gave 5 rows in one epoch, more than max_rows_per_epoch=3" in told["error"]
    found = shop.run(s=ids(3))
    assert (len(found["q"]), len(found["other"])) == (4, 4)
    assert sorted((file.rows, file.held) for file in files_of(shop, "q") if not file.passing)[-2:] == [(4, 2), (5, 1)]
    # With a higher limit it goes on, and nothing is missing.
    shop.budgets = {"q": Budget(rows=100)}
    shop.start(q=(graph, "now"), other=(join("a.k = b.k", out="a.id"), "now"))
    assert status_of(shop) == ("parked", "TOO_MANY_ROWS")
    shop.engine.driver.services.parking.ask("q", skip=False)
    shop.run(s=ids(4))
    assert status_of(shop) == (None, "")
    shop.run(s=ids(5))
    assert all(file.held is None for file in files_of(shop, "q"))
    assert sorted(file.rows for file in files_of(shop, "q")) == [3, 4, 4, 4, 5]


def test_rows_that_could_never_be_kept_are_not_even_made(shop: Shop) -> None:
    shop.budgets = {"q": Budget(rows=3), "dropped": Budget(rows=3)}
    graph = join("a.k = b.k")
    shop.start(q=(graph, "now"), dropped=(graph, "now"), other=(graph, "now"))
    assert shop.engine is not None
    shop.engine.change(parked_bytes="100", chunk_rows=8, sinks={"q": Sent(), "dropped": Noop(), "other": Keep()})
    found = shop.run(s=ids(*range(20)), u=ids(*range(20)))
    assert len(found["other"]) == 400
    assert not found.get("q")
    assert (status_of(shop), status_of(shop, "dropped")) == (("failed", "TOO_MANY_ROWS"), ("parked", "TOO_MANY_ROWS"))
    found = shop.run(s=ids(50))
    assert {name: len(some) for name, some in found.items()} == {"other": 20}
    assert shop.engine.progress[-1]["rows_out"]["q"] == 0


def test_the_share_of_the_state_counts_a_store_that_two_use_by_half(shop: Shop) -> None:
    by_k, by_j = join("a.k = b.k"), join("a.j = b.j")
    shop.start(one=(by_k, "now"), two=(by_k, "now"), three=(by_j, "now"))
    shop.run(s=ids(*range(50)), u=ids(*range(50)))
    assert shop.engine is not None
    report = shop.engine.progress[-1]
    shares = {name: q["state_bytes"] for name, q in report["catalog"]["queries"].items()}
    assert shares["one"] == shares["two"]
    assert abs(sum(shares.values()) - report["state_bytes"]) <= 2
    shop.budgets = {"three": Budget(state_bytes=shares["three"] + 1), "one": Budget(state_bytes=shares["one"] - 1)}
    shop.start(one=(by_k, "now"), two=(by_k, "now"), three=(by_j, "now"))
    shop.run(s=ids(99))
    assert (status_of(shop, "one"), status_of(shop, "two")) == (("parked", "TOO_MUCH_STATE"), (None, ""))
    assert status_of(shop, "three") == (None, "")
    shop.run(s=ids(100))
    assert status_of(shop, "three") == ("parked", "TOO_MUCH_STATE")


def test_the_shares_of_queries_add_up_to_what_their_stores_hold() -> None:
    def of(*stores: str) -> QueryStatus:
        return QueryStatus("live", 0, (), {}, stores=frozenset(stores))

    catalog = CatalogInForce(queries={"p": of("x", "y"), "q": of("x"), "r": of("x", "z"), "s": of()})
    shares = catalog.state_shares({"x": 30, "y": 5, "z": 7, "unused": 1000})
    assert shares == {"p": 15, "q": 10, "r": 17, "s": 0}


@pytest.mark.parametrize("limit", [0, -1, True, 1.5])
def test_a_limit_is_a_number_above_zero(limit: Any) -> None:
    with pytest.raises(QueryError, match="BUDGET"):
        Budget(rows=limit)
