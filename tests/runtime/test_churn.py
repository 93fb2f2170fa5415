"""Thousands of queries come and go: plan, catalog, state and checkpoint are as small afterwards as they were."""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plait.admission import Admission, Asked, admitted
from plait.catalog.catalog import Catalog
from plait.catalog.changes import Definition
from plait.config import Config
from plait.query.graph import JoinGraph
from plait.query.relation import Relation
from plait.runtime.answers.answer import Sources
from plait.runtime.driver.sinks import Keep
from plait.share.lay_out import MOST_ERAS
from plait.share.planner import Planner
from plait.state.log import catalog_versions as catalogs
from plait.state.log.manifest import LiveState
from plait.testing import Clock, LocalEngine
from tests.runtime.test_changes import COLUMNS, join, more_than, rows

RELATIONS = {name: Relation(name, COLUMNS, ttl_us=3_000_000) for name in ("s", "u")}
KEYS = ("a.k = b.k", "a.j = b.j", "a.id = b.id")
LIMITS = 40
CONFIG = Config(
    tasks=1, sync=False, max_future=None, fan_in=2, gc_grace_seconds=0.0, snapshot_every=2, on_missing_query="drop"
)
BASE = join("a.k = b.k")


class Churn:
    """An engine whose queries change between two epochs, in place, as a running engine admits them."""

    def __init__(self, path: Path) -> None:
        self.path, self.clock, self.defined = path, Clock(), dict[str, Definition]()
        self.catalog = Catalog()
        self.seconds: list[float] = []
        self.engine: LocalEngine | None = None
        self.define("base", BASE)
        predicates = {f"f > {n}": more_than(n) for n in range(LIMITS)}
        opened = LocalEngine(path, self._first_plan(), CONFIG, predicates=predicates, clock=self.clock)
        self.engine = opened
        self.admit()

    def define(self, name: str, graph: JoinGraph) -> None:
        id = self.catalog.next_id(name)
        self.defined[name] = Definition(id, name, f"{name} {graph}", {id: graph}, "append", "now", False, None)

    def _first_plan(self) -> Any:
        now = admitted(Catalog(), self._asked(), LiveState())
        return Planner(now.running, RELATIONS, CONFIG, now.allocation).plan

    def _asked(self) -> Asked:
        return Asked(RELATIONS, frozenset(), dict(self.defined), on_missing="drop")

    def admit(self) -> None:
        """What `launching._admit_in_place` does, without Spark."""
        assert self.engine is not None
        driver, live = self.engine.driver, self.engine.live
        begun = time.perf_counter()
        before, last = self.catalog, driver.feedback.planner
        asked = self._asked()
        admission = Admission(self.engine.checkpoint, CONFIG, asked, admitted(before, asked, live), planner=last)  # type: ignore[arg-type]
        planner = admission.begin(live, None if last is None else last.knowledge())  # type: ignore[attr-defined]
        admission.put(before)
        sinks = {join: Keep() for join in admission.now.graphs}
        sources = Sources({}, driver.services.sources.live)
        driver.goes_on_with(replace(driver.services, sinks=sinks, changes=admission, sources=sources), planner)
        self.catalog, self.admission = admission.now.catalog, admission
        self.seconds.append(time.perf_counter() - begun)

    def run(self, seed: int) -> None:
        assert self.engine is not None
        self.clock.advance(1)
        drawn = random.Random(seed)
        new = {
            name: rows(*((i, drawn.randrange(5), drawn.randrange(5), drawn.randrange(50), 0.0) for i in range(10)))
            for name in ("s", "u")
        }
        self.engine.run(new)
        # The step `replan` may have made building queries live.
        self.catalog = self.admission.now.catalog

    def sizes(self) -> dict[str, int]:
        """What must not grow."""
        assert self.engine is not None
        layout = self.catalog.layout
        return {
            "queries": len(self.catalog.queries),
            "stores": len(layout.stores),
            "builds": len(layout.builds),
            "edges": sum(len(i.edges) for i in layout.inputs),
            "filters": sum(len(i.filters) for i in layout.inputs),
            "marks": sum(len(i.marks) for i in layout.inputs),
            "nodes": sum(1 for tree in self.engine.plan.trees for top in tree.nodes for _ in top.walk()),
            "parked": len(self.engine.driver.services.parking.records),
        }

    def bytes(self) -> int:
        """Of the catalog, with the newest era of each store."""
        layout = self.catalog.layout
        stores = tuple(replace(store, eras=store.eras[-1:]) for store in layout.stores)
        return len(json.dumps(self.catalog.with_layout(replace(layout, stores=stores)).to_json()))

    def files(self, folder: str) -> int:
        return sum(1 for path in (self.path / folder).rglob("*") if path.is_file())


def given(catalog: Catalog) -> tuple[dict[str, Any], dict[int, Any], set[str]]:
    """Which ids stand for what: stores, filters, queries."""
    stores = {s.id: (s.relation, s.key.columns, s.since) for s in catalog.layout.stores}
    filters = {f.id: (i.relation, f.text, f.marks) for i in catalog.layout.inputs for f in i.filters}
    return stores, filters, {query.id for query in catalog.queries.values()}


def same(known: dict[Any, Any], now: Mapping[Any, Any]) -> None:
    for id, what in now.items():
        assert known.setdefault(id, what) == what, f"{id} was {known[id]} and is {what}"


def churn(path: Path, changes: int, every: int) -> list[float]:
    """So many adds and drops, an epoch after `every` of them; the seconds of each admission."""
    it, drawn = Churn(path), random.Random(7)
    for seed in range(8):
        it.run(seed)
    before, folders = it.sizes(), {name: it.files(name) for name in ("catalog", "log", "state", "results")}
    stores: dict[str, Any] = {}
    filters: dict[int, Any] = {}
    queries: set[str] = set()
    bytes_before = it.bytes()
    live: list[str] = []
    for number in range(changes):
        if live and (drawn.random() < 0.5 or len(live) > 6):
            del it.defined[live.pop(drawn.randrange(len(live)))]
        else:
            name = f"q{number % 11}"
            if name in it.defined:
                continue
            above = {alias: drawn.randrange(LIMITS) for alias in "ab" if drawn.random() < 0.7}
            it.define(name, join(drawn.choice(KEYS), above=above))
            assert it.defined[name].id not in queries, "an id is given once"
            live.append(name)
        it.admit()
        now_stores, now_filters, now_queries = given(it.catalog)
        same(stores, now_stores)
        same(filters, now_filters)
        queries |= now_queries
        if number % every == 0:
            it.run(number)
    for name in live:
        del it.defined[name]
    it.admit()
    for seed in range(12):
        it.run(seed)
    after = it.sizes()
    assert it.engine is not None
    assert after == before
    # Eras are what stored rows once were; there are at most so many.  Else only counters have more digits.
    assert all(len(store.eras) <= MOST_ERAS for store in it.catalog.layout.stores)
    assert it.bytes() <= bytes_before + 100
    for name, files in folders.items():
        assert it.files(name) <= 2 * files + catalogs.KEPT, name
    # Bits of filters that are gone went with merges, and stores that nobody uses with a commit.
    known = {f.id for i in it.catalog.layout.inputs for f in i.filters}
    for store, infos in it.engine.live.segments.items():
        assert store in it.catalog.layout.store_by_id
        for info in infos:
            assert set(info.sets.bits) | set(info.sets.passed) <= known | {
                like for i in it.catalog.layout.inputs for f in i.filters for like in f.like
            }
    it.engine.close()
    return it.seconds


def test_hundreds_of_adds_and_drops_leave_nothing_behind(tmp_path: Path) -> None:
    churn(tmp_path, 200, every=6)


@pytest.mark.soak
def test_ten_thousand_adds_and_drops_leave_nothing_behind(tmp_path: Path) -> None:
    seconds = churn(tmp_path, 10_000, every=20)
    first, last = statistics.median(seconds[100:1100]), statistics.median(seconds[-1000:])
    print(f"an admission takes {1e3 * first:.1f} ms among the first, {1e3 * last:.1f} ms among the last of 10,000")
    assert last < 2 * first + 0.005
