"""Rewiring (paper 001, VI-A): intermediate results come and go by cost while epochs run; no row is lost or doubled."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings

from plait.admission import Admission, Asked, admitted
from plait.catalog.catalog import Catalog
from plait.catalog.changes import Definition
from plait.config import Config
from plait.order.cost import Coefficients
from plait.query.expr import Expr
from plait.query.graph import JoinGraph
from plait.query.relation import Relation
from plait.runtime.task import prober
from plait.share.mirs import keeps_of
from plait.share.planner import Planner
from plait.share.store_choice import StoreUse
from plait.share.together import RunningCost, in_pieces
from plait.state.log import catalog_versions as catalogs
from plait.state.log.checkpoint import Checkpoint
from plait.testing import Clock, LocalEngine
from tests.oracle import Bag, Oracle, bag
from tests.random_joins import Case, Model, cases
from tests.share.streams import joined, rows, streams


class Wired:
    """A checkpoint, and an engine on it whose catalog changes as its planner wishes; it can be started again."""

    def __init__(
        self,
        path: Path,
        graphs: Mapping[str, JoinGraph],
        relations: Mapping[str, Relation],
        config: Config,
        predicates: Mapping[str, Expr] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.path, self.config, self.predicates, self.clock = str(path), config, predicates or {}, clock or Clock()
        definitions = {n: Definition(n, n, n, {n: g}, "append", None, False, None) for n, g in graphs.items()}
        self.asked = Asked(relations, frozenset(), definitions)
        self.engine = self.start()

    def start(self) -> LocalEngine:
        with Checkpoint(self.path, self.config).open() as checkpoint:
            found = catalogs.newest(checkpoint.files)
            before = Catalog() if found is None else Catalog.from_json(found)
            live = checkpoint.log.live()
            admission = Admission(
                checkpoint, self.config, self.asked, admitted(before, self.asked, live, "min", self.config.sharing)
            )
            planner = admission.begin(live, checkpoint.statistics())
            admission.put(before)
        self.engine = LocalEngine(
            self.path, planner.plan, self.config, planner=planner, changes=admission,
            predicates=self.predicates, clock=self.clock,
        )  # fmt: skip
        admission.checkpoint = self.engine.checkpoint
        return self.engine

    def again(self) -> None:
        """As after a stop, or a kill: from what is on disk."""
        self.engine.close()
        self.start()

    @property
    def planner(self) -> Planner:
        found = self.engine.driver.feedback.planner
        assert isinstance(found, Planner)
        return found

    @property
    def mirs(self) -> list[str]:
        return [store.id for store in self.engine.plan.stores if store.mir is not None]


@pytest.fixture
def fixed_prices(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a loaded machine measures must not decide whether something is kept."""
    monkeypatch.setattr(Coefficients, "blended", lambda self, _: self)


def arrivals(epoch: int, chosen: random.Random, tiny: bool) -> dict[str, pa.Table]:
    """r is fast; s, t and u are slow, and hardly meet once their join has become tiny."""
    wide = 4000 if tiny else 40

    def some(count: int, k: int, m: int) -> pa.Table:
        return rows(*[(chosen.randrange(k), chosen.randrange(m)) for _ in range(count)])

    return {"r": some(600, 50, 1), "s": some(20, 50, wide), "t": some(20, 40, wide), "u": some(20, 40, 1)}


def test_a_join_that_becomes_tiny_is_kept_by_itself_and_the_rows_stay_the_same(
    tmp_path: Path, fixed_prices: None
) -> None:
    graph = joined("r.k = s.k", "s.m = t.m", "t.k = u.k")
    settings = {"tasks": 1, "sync": False, "replan_epochs": 2}
    plain = Wired(tmp_path / "naive", {"q": graph}, streams("rstu"), Config(**settings))
    wired = Wired(
        tmp_path / "ilp", {"q": graph}, streams("rstu"), Config(**settings, sharing="ilp", sharing_seconds=10)
    )
    kept: list[int] = []
    for epoch in range(12):
        new = [arrivals(epoch, random.Random(epoch), epoch > 2) for _ in range(2)]
        found = [bag(of.engine.run(mine)["q"]) for of, mine in zip((wired, plain), new, strict=True)]
        assert found[0] == found[1], epoch
        if len(kept) > 1 and kept[-2] == 0 < kept[-1]:
            # This epoch filled the MIRs under a plan of its own: its nodes say nothing of those of the next.
            assert wired.planner._period.edges == {}
        kept.append(len(wired.mirs))
        if epoch == 9:
            before = wired.mirs
            wired.again()
            assert wired.mirs == before
    assert kept[0] == 0
    assert kept[-1] > 0
    assert wired.planner.failures == 0
    # New rows of r look up one store, not three, and so do fewer keys.
    probes = [sum(c.lookups for c in of.engine.driver.feedback.progress[-1].edges.values()) for of in (wired, plain)]
    tree = next(t for t in wired.engine.plan.trees if t.relation == "r")
    assert [node.step.store in wired.mirs for node in tree.nodes] == [True]
    assert probes[0] < probes[1]
    wired.engine.close()
    plain.engine.close()


KINDS = ("integral", "string")
COMMON = settings(
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
)


def test_oracle_whatever_is_kept_after_any_epoch(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planner that takes every gain, however small: intermediate results come and go between most epochs."""
    monkeypatch.setattr("plait.share.replan.HORIZON_PERIODS", 10**9)
    # Keeping them costs nothing: with so few rows hardly any would be worth it.
    monkeypatch.setattr(RunningCost, "store", lambda self, kept: (0.0, ()))
    seen: Counter[str] = Counter()

    @settings(COMMON, max_examples=50)
    @given(
        cases(kinds=("integral", "string"), most_aliases=4, most_queries=3, alike=(0, 2), rows=(24, 40), epochs=(6, 4))
    )
    def check(case: Case) -> None:
        choose = random.Random(case.seed)
        config = Config(
            tasks=choose.randint(1, 3), sync=False, max_future=None, replan_epochs=1, replan_gain=0.0,
            sharing="ilp", sharing_seconds=0.3, snapshot_every=choose.choice((1, 2, 16)), fan_in=choose.randint(2, 4),
        )  # fmt: skip
        path = tmp_path_factory.mktemp("rewired")
        wired = Wired(path, case.graphs, case.relations, config, case.predicates)
        totals: dict[str, Bag] = {name: Counter() for name in case.queries}
        model, before = Model(case), wired.mirs
        with Oracle() as oracle:
            model.prepare(oracle)
            for number, new in enumerate(case.arrivals):
                if number and choose.random() < 0.3:
                    wired.config = replace(wired.config, sharing=choose.choice(("ilp", "auto", "naive", "independent")))
                    wired.again()
                wired.clock.advance(case.clocks[number])
                added = wired.engine.run(new)
                model.arrive(oracle, new, wired.clock.now_us)
                for name, table in added.items():
                    totals[name] += bag(table)
                    expected = oracle.bag(model.sql(name))
                    assert totals[name] == expected, (name, number, wired.mirs)
                seen["changed"] += wired.mirs != before
                seen["kept"] += bool(wired.mirs)
                seen["failed"] += wired.planner.failures
                before = wired.mirs
        wired.engine.close()

    check()
    assert seen["failed"] == 0
    # Else nothing was tested.
    assert seen["changed"] > 10, seen
    assert seen["kept"] > 10


def test_an_order_is_cut_where_members_of_something_kept_stand_in_a_row() -> None:
    parts = [frozenset("bc"), frozenset("bcd")]
    assert in_pieces(("a", "c", "b", "d"), parts) == [("a",), ("c", "b", "d")]
    assert in_pieces(("b", "a", "c"), parts) == [("b",), ("a",), ("c",)]
    assert in_pieces((), parts) == []


def test_what_is_kept_is_wanted_again_by_those_who_still_live(tmp_path: Path, fixed_prices: None) -> None:
    graph: Any = joined("r.k = s.k", "s.m = t.m", "t.k = u.k")
    config = Config(tasks=1, sync=False, replan_epochs=2, sharing="ilp", sharing_seconds=10)
    wired = Wired(tmp_path, {"q": graph, "again": graph}, streams("rstu"), config)
    for epoch in range(8):
        wired.engine.run(arrivals(epoch, random.Random(epoch), epoch > 2))
    layout = wired.planner.layout.allocation.layout
    assert wired.mirs
    assert {query for keep in keeps_of(layout, ("q", "again")) for query, _ in keep.uses} == {"q", "again"}
    assert {query for keep in keeps_of(layout, ("again",)) for query, _ in keep.uses} == {"again"}
    assert keeps_of(layout, ()) == ()
    wired.engine.close()


def test_oracle_whichever_stores_go_while_running(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stores go by chance after any period and at any start; the rest is searched, and no row is lost or doubled."""
    monkeypatch.setattr(StoreUse, "saved", lambda use, tasks: random.Random(repr(use)).uniform(-1, 3) * 1e9)
    monkeypatch.setattr(prober, "FEWEST_ASKED", 1)
    seen: Counter[str] = Counter()

    @settings(COMMON, max_examples=15)
    @given(cases(most_aliases=5, most_queries=2, alike=(0, 1), rows=(24, 40), epochs=(6, 4)))
    def check(case: Case) -> None:
        choose = random.Random(case.seed)
        config = Config(
            tasks=choose.randint(1, 3), sync=False, max_future=None, replan_epochs=1, stores="auto",
            snapshot_every=choose.choice((1, 2, 16)), fan_in=choose.randint(2, 4),
            compress_above=choose.choice((None, "0")), sharing=choose.choice(("naive", "naive", "ilp")),
            sharing_seconds=0.2,
        )  # fmt: skip
        wired = Wired(tmp_path_factory.mktemp("fewer"), case.graphs, case.relations, config, case.predicates)
        totals: dict[str, Bag] = {name: Counter() for name in case.queries}
        model, before = Model(case), len(wired.engine.plan.stores)
        with Oracle() as oracle:
            model.prepare(oracle)
            for number, new in enumerate(case.arrivals):
                if number and choose.random() < 0.3:
                    wired.config = replace(wired.config, tasks=choose.randint(1, 3))
                    wired.again()
                wired.clock.advance(case.clocks[number])
                added = wired.engine.run(new)
                model.arrive(oracle, new, wired.clock.now_us)
                for name, table in added.items():
                    totals[name] += bag(table)
                    assert totals[name] == oracle.bag(model.sql(name)), (name, number)
                after = len(wired.engine.plan.stores)
                seen["gone"] += max(0, before - after)
                seen["searches"] += len(wired.engine.plan.searches)
                seen["failed"] += wired.planner.failures
                before = after
        wired.engine.close()

    check()
    assert seen["failed"] == 0
    # Else nothing was tested.
    assert seen["gone"] > 10
    assert seen["searches"] > 10
