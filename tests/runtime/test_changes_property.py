"""Queries come and go between runs: each gives the rows it would give alone, since its floors, as bags.

The model of floors is the tests' own.  A stream's row is known to a query if it was born at the query's floor or later;
the floor of an alias follows from which queries lived when, and from what they needed of the stream (`Past.floor`).
"""

from __future__ import annotations

import datetime as dt
import random
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plait.admission import Admission, Asked, admitted
from plait.catalog.catalog import Catalog
from plait.catalog.changes import Definition
from plait.config import Config
from plait.query.expr import Expr
from plait.query.graph import JoinGraph
from plait.query.relation import Relation
from plait.query.store import watermark_ms
from plait.runtime import faults
from plait.runtime.driver.sinks import Keep
from plait.runtime.task.file_sets import query_table
from plait.state.log import catalog_versions as catalogs
from plait.state.log.checkpoint import Checkpoint
from plait.testing import Clock, LocalEngine, fault
from tests.oracle import Bag, Oracle, bag
from tests.random_joins import START, Case, cases, stamped

# A process that is killed closes no file; here it lives on.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")

COMMON = settings(deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
SINCE = ("now", "state", "new")
POINTS = (
    *("task.append", "task.probe", "task.merge", "task.replay", "task.build", "task.end", "task.hop"),
    *("results.merge", "commit.2", "commit.3", "commit.4", "receipt", "commit.5"),
)
"""Where an epoch may die (`runtime/faults.py`)."""


class Killed(BaseException):
    """What a killed process is to a test that lives on."""


@dataclass
class Living:
    """A query that lives, as the test knows it."""

    id: str
    of: str
    """The query of the case whose graph it has."""
    since: str
    live_since: int
    floors: Mapping[str, int]
    found: Bag = field(default_factory=Counter)
    before: Bag = field(default_factory=Counter)
    """What the oracle says of rows born before it lived: not part of its results, unless it began with the state."""


class Changing:
    """An engine whose queries change, on one checkpoint; `restart` opens it anew with others."""

    def __init__(
        self,
        directory: str,
        case: Case,
        choose: random.Random,
        keep: Mapping[str, str],
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self.directory, self.case, self.choose, self.config = directory, case, choose, config or {}
        self.relations = {n: replace(r, keep=keep[n]) for n, r in case.relations.items()}
        self.graphs = {name: _evaluable(graph, case.predicates) for name, graph in case.graphs.items()}
        self.clock = Clock()
        self.engine: LocalEngine | None = None
        self.admission: Admission | None = None
        self.asked: tuple[Mapping[str, tuple[str, str]], dict[str, Any]] = {}, {}
        """The queries and settings of the last start."""
        self.kills = 0

    def restart(self, queries: Mapping[str, tuple[str, str]], dropped: frozenset[str], **config: Any) -> Catalog:
        """Opens the checkpoint with these queries, by name: (query of the case, since)."""
        self.close()
        self.asked = queries, config
        fixed = {"tasks": 1, "sync": False, "max_future": None, "gc_grace_seconds": 0.0}
        settings = Config(**{**fixed, **config, **self.config})
        with Checkpoint(self.directory, settings) as opened:
            found = catalogs.newest(opened.files)
            before = Catalog() if found is None else Catalog.from_json(found)
            live = opened.log.live()
            asked = Asked(
                self.relations, frozenset(), {n: self._definition(before, n, *q) for n, q in queries.items()}, dropped
            )
            now = admitted(before, asked, live, sharing=settings.sharing)
            admission = Admission(opened, settings, asked, now)
            admission.put(before)
            planner = admission.begin(live, None)
        self.engine = LocalEngine(
            self.directory,
            planner.plan,
            settings,
            predicates=self.case.predicates,
            clock=self.clock,
            planner=planner,
            changes=admission,
            seed=self.choose.randrange(1000),
        )
        admission.checkpoint = self.engine.checkpoint
        self.engine.change(sinks={join: Keep() for join in now.graphs})
        self.admission = admission
        return now.catalog

    def change_in_place(
        self, queries: Mapping[str, tuple[str, str]], dropped: frozenset[str], dies: str = ""
    ) -> Catalog:
        """Other queries without opening the checkpoint anew, as a running engine admits them.

        A process that `dies` before the new version is written, or after, is started again with the same queries.
        """
        assert self.engine is not None
        assert self.admission is not None
        last, live = self.admission.planner, self.engine.live
        assert last is not None
        config = self.asked[1]
        before = self.admission.now.catalog
        defined = {n: self._definition(before, n, *q) for n, q in queries.items()}
        asked = Asked(self.relations, frozenset(), defined, dropped)
        services = self.engine.driver.services
        admission = Admission(
            self.engine.checkpoint, services.config, asked, admitted(before, asked, live), planner=last
        )
        planner = admission.begin(live, last.knowledge())
        if dies != "before":
            admission.put(before)
        if dies:
            self.kills += 1
            return self.restart(queries, dropped, **config)
        sinks = {join: Keep() for join in admission.now.graphs}
        self.engine.driver.goes_on_with(replace(services, sinks=sinks, changes=admission), planner)
        self.admission, self.asked = admission, (queries, config)
        return admission.now.catalog

    def _definition(self, before: Catalog, name: str, of: str, since: str) -> Definition:
        lives = before.queries.get(name)
        text = f"{of} {since}"
        id = lives.id if lives is not None and lives.sql == text else before.next_id(name)
        return Definition(id, name, text, {id: self.graphs[of]}, "append", since, False, None)

    def run(self, arrivals: Mapping[str, pa.Table], die_at: str | None = None) -> dict[str, pa.Table]:
        """One epoch.  Where it dies, the same program is started again, and does what is not committed once more."""
        assert self.engine is not None
        epoch = self.engine.live.epoch + 1
        if die_at is None:
            return self.engine.run(arrivals)
        try:
            with fault(die_at, epoch), pytest.MonkeyPatch.context() as patch:
                patch.setattr(faults, "die", _raise_killed)
                return self.engine.run(arrivals)
        except Killed:
            self.kills += 1
        queries, config = self.asked
        self.restart(queries, frozenset(), **config)
        assert self.engine is not None
        if self.engine.live.epoch < epoch:
            return self.engine.run(arrivals)
        manifest = self.engine.checkpoint.log.read(epoch)
        found: dict[str, list[pa.Table]] = {join: [] for join in manifest.begins}
        for file in manifest.results:
            data = self.engine.checkpoint.results.read(file.path)
            assert data is not None
            found.setdefault(file.query, []).append(query_table(pa.BufferReader(data), file.bit))
        return {join: pa.concat_tables(tables) if tables else pa.table({}) for join, tables in found.items()}

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()
            self.engine = None


def _raise_killed() -> None:
    raise Killed


def _evaluable(graph: JoinGraph, predicates: Mapping[str, Expr]) -> JoinGraph:
    """With filters that tasks can evaluate on rows at rest."""
    aliases = [a if a.filter is None else replace(a, condition=predicates[a.filter]) for a in graph.aliases]
    return replace(graph, aliases=tuple(aliases))


def floored(case: Case, query: str, floors: Mapping[str, int], born_before: int | None = None) -> str:
    """The query in the oracle's words, over rows that were born at the floors or later."""
    sql = case.queries[query].sql
    for alias in case.graphs[query].aliases:
        upper = "" if born_before is None else f" AND born < {born_before}"
        old = f"(SELECT * FROM {alias.relation}"
        where = f" WHERE {alias.filter}" if alias.filter else ""
        condition = f"born >= {floors[alias.name]}{upper}" + (f" AND ({alias.filter})" if alias.filter else "")
        assert f"{old}{where}) {alias.name}" in sql
        sql = sql.replace(f"{old}{where}) {alias.name}", f"{old} WHERE {condition}) {alias.name}", 1)
    return sql


@dataclass
class Past:
    """What lived when: enough to say from which birth on the rows of a stream are all there."""

    eras: dict[str, list[tuple[int, set[tuple[str | None, frozenset[str]]], bool]]] = field(default_factory=dict)
    """By stream: since which epoch, (filter, required columns) of the aliases that read it, and whether all is kept."""

    def note(self, epoch: int, graphs: list[JoinGraph], relations: Mapping[str, Relation]) -> None:
        for name, relation in relations.items():
            readers = {
                (alias.filter, graph.required(alias.name))
                for graph in graphs
                for alias in graph.aliases
                if alias.relation == name
            }
            mine = self.eras.setdefault(name, [])
            if mine and mine[-1][0] == epoch:
                mine.pop()
            mine.append((epoch, readers, relation.keep == "all"))

    def bounds(self, graph: JoinGraph, alias: str, epoch: int) -> tuple[int, int]:
        """The least that a floor can be, and what it must not exceed, for an alias that is admitted for an epoch."""
        of = graph.alias(alias)
        eras = self.eras.get(of.relation, [])
        least = epoch
        for since, readers, everything in reversed(eras):
            # Rows that the alias can use were let in by nobody.
            if not everything and not any(text in (None, of.filter) for text, _ in readers):
                break
            least = since
        whole = epoch
        for since, _, everything in reversed(eras):
            if not everything:
                break
            whole = since
        return least, whole


@settings(COMMON, max_examples=10)
@given(cases(most_aliases=3, most_queries=3, rows=(24, 16), spread=(6, 3), epochs=(6,)), st.integers(0, 2**32 - 1))
def test_oracle_queries_that_come_and_go_give_what_they_would_give_alone(case: Case, seed: int) -> None:
    check(case, seed)


@settings(COMMON, max_examples=7)
@given(
    cases(windows=True, most_aliases=3, most_queries=2, rows=(24, 16), spread=(4, 3), epochs=(6,)),
    st.integers(0, 2**32 - 1),
)
def test_oracle_windowed_queries_that_come_and_go(case: Case, seed: int) -> None:
    check(in_order(case, seed), seed, since=("now", "new"))


@settings(COMMON, max_examples=8)
@given(
    cases(windows=True, most_aliases=3, most_queries=3, rows=(24, 16), spread=(4, 3), epochs=(6,)),
    st.integers(0, 2**32 - 1),
)
def test_a_query_gives_the_same_rows_alone_and_beside_others_whatever_is_late(case: Case, seed: int) -> None:
    check_alone(case, seed)


@pytest.mark.soak
@settings(COMMON, max_examples=400)
@given(cases(most_aliases=4, most_queries=4, epochs=(8, 6)), st.integers(0, 2**32 - 1))
def test_oracle_hundreds_of_changes(case: Case, seed: int) -> None:
    check(case, seed)


def in_order(case: Case, seed: int) -> Case:
    """The same case with event times that ascend from epoch to epoch: nothing is late, and state expires."""
    choose = random.Random(seed)
    relations = {n: replace(r, delay_ms=None if r.delay_ms is None else 10_000) for n, r in case.relations.items()}
    arrivals = []
    for epoch, tables in enumerate(case.arrivals):
        begin = START + dt.timedelta(seconds=10 * epoch)
        timed = {}
        for name, table in tables.items():
            times = [begin + dt.timedelta(milliseconds=choose.randrange(10_000)) for _ in range(table.num_rows)]
            values = pa.array([t if choose.random() < 0.95 else None for t in times], pa.timestamp("us"))
            place = table.column_names.index("ts")
            timed[name] = table.set_column(place, "ts", values.cast(table.schema.field("ts").type))
        arrivals.append(timed)
    return replace(case, relations=relations, arrivals=arrivals)


def check(case: Case, seed: int, since: Sequence[str] = SINCE, kills: float = 0.3, **config: Any) -> int:
    """Runs a case, changing its queries between epochs; after every epoch each query's rows are the oracle's.

    Some epochs are killed on the way, and done again; how many is what it returns.
    """
    choose = random.Random(seed)
    keep = {name: choose.choice(("used", "used", "all")) for name in case.relations}
    with tempfile.TemporaryDirectory(prefix="plait-changes-") as directory, Oracle() as oracle:
        empty = {n: _born(stamped(s.empty_table(), 0), 0) for n, s in case.schemas.items()}
        oracle.load(empty)
        changing = Changing(directory, case, choose, keep, config)
        living: dict[str, Living] = {}
        past = Past()
        try:
            for epoch, arrivals in enumerate(case.arrivals):
                if epoch == 0 or choose.random() < 0.6:
                    _change(changing, living, past, epoch, choose, since)
                assert changing.engine is not None
                changing.engine.change(tasks=choose.randint(1, 3))
                changing.clock.advance(1)
                added = changing.run(arrivals, choose.choice(POINTS) if choose.random() < kills else None)
                for name, table in arrivals.items():
                    oracle.append(name, _born(stamped(table, changing.clock.now_us), epoch))
                _compare(changing, case, living, oracle, epoch, added)
            _drop_all(changing, living, len(case.arrivals))
        finally:
            changing.close()
        return changing.kills


def check_alone(case: Case, seed: int) -> None:
    """One query, with and without others that come and go: in every epoch the same rows, and the same watermark.

    It begins with the checkpoint, or later and without a past: then it gives what it would give on a new checkpoint.
    """
    choose = random.Random(seed)
    target, begin = choose.choice(list(case.queries)), choose.choice((0, 0, 1, 3))
    beside = _rows_of(case, target, begin, random.Random(seed), beside=True)
    alone = _rows_of(replace(case, arrivals=case.arrivals[begin:]), target, 0, random.Random(seed), beside=False)
    assert beside == alone


def _rows_of(case: Case, target: str, begin: int, choose: random.Random, beside: bool) -> list[tuple[Bag, int | None]]:
    """By epoch the rows and the watermark of a query that begins with an epoch, and does not look back."""
    found: list[tuple[Bag, int | None]] = []
    others: dict[str, tuple[str, str]] = {}
    with tempfile.TemporaryDirectory(prefix="plait-alone-") as directory:
        changing = Changing(directory, case, choose, dict.fromkeys(case.relations, "used"))
        try:
            for epoch, arrivals in enumerate(case.arrivals):
                before = others
                if beside and (not others or choose.random() < 0.6):
                    kept = {name: q for name, q in others.items() if choose.random() < 0.5}
                    new = {f"n{epoch}{i}": (choose.choice(list(case.queries)), choose.choice(SINCE)) for i in range(2)}
                    others = {**kept, **new}
                if epoch in (0, begin) or others != before:
                    mine = {"target": (target, "new")} if epoch >= begin else {}
                    changing.restart({**others, **mine}, frozenset(before))
                assert changing.engine is not None
                changing.clock.advance(1)
                added = changing.run(arrivals, choose.choice(POINTS) if beside and choose.random() < 0.2 else None)
                if epoch >= begin:
                    assert changing.admission is not None
                    id = changing.admission.now.catalog.queries["target"].id
                    marks = changing.admission.now.allocation.marks[id]
                    rows = bag(added[id]) if id in added else Counter()
                    found.append((rows, watermark_ms(marks, changing.engine.live.marks_ms, "min")))
        finally:
            changing.close()
    return found


def _born(table: pa.Table, epoch: int) -> pa.Table:
    return table.append_column("born", pa.array([epoch] * table.num_rows, pa.int64()))


def _change(
    changing: Changing,
    living: dict[str, Living],
    past: Past,
    epoch: int,
    choose: random.Random,
    starts: Sequence[str],
) -> None:
    """Other queries from this epoch on: some are dropped, some are added, some are replaced under their name."""
    case = changing.case
    names = [f"n{i}" for i in range(3)]
    wanted = {name: (q.of, q.since) for name, q in living.items() if choose.random() < 0.6}
    for name in names:
        if name not in wanted and (not wanted or choose.random() < 0.5):
            wanted[name] = (choose.choice(list(case.queries)), choose.choice(list(starts)))
    config = {
        "fan_in": choose.randint(2, 3),
        "snapshot_every": choose.choice((1, 2, 16)),
        "compress_above": choose.choice((None, "0")),
        "merge_share": choose.choice((0.01, 0.9)),
        # Stores of one setting are there when the next one begins.
        "sharing": choose.choice(("naive", "independent")),
    }
    if changing.engine is None or choose.random() < 0.3:
        catalog = changing.restart(wanted, frozenset(living), **config)
    else:
        if choose.random() < 0.5:
            # One more, which is gone before an epoch has run with it.
            more = {"more": (choose.choice(list(case.queries)), choose.choice(list(starts)))}
            changing.change_in_place({n: (q.of, q.since) for n, q in living.items()} | more, frozenset())
        dies = choose.choice(("", "", "before", "after"))
        catalog = changing.change_in_place(wanted, frozenset({*living, "more"}), dies)
    for name, entry in catalog.queries.items():
        if name in living and living[name].id == entry.id:
            assert entry.floors[entry.id] == living[name].floors, "floors never change"
            continue
        of, since = wanted[name]
        floors = entry.floors[entry.id]
        for alias, floor in floors.items():
            least, whole = past.bounds(case.graphs[of], alias, epoch)
            if since == "new":
                # It has no past, and so waits for none.
                assert floor == epoch == entry.live_since
            elif len(starts) < len(SINCE):
                # What was let expire is missing: a query with a longer window begins behind it.
                assert least <= floor <= epoch
            else:
                assert least <= floor <= max(whole, least), (name, alias, floor, least, whole)
        living[name] = Living(entry.id, of, since, -1, floors)
    for name in list(living):
        if name not in wanted:
            del living[name]
    graphs = [case.graphs[q.of] for q in living.values()]
    past.note(epoch, graphs, changing.relations)


def _compare(
    changing: Changing,
    case: Case,
    living: dict[str, Living],
    oracle: Oracle,
    epoch: int,
    added: Mapping[str, pa.Table],
) -> None:
    assert changing.admission is not None
    entries = changing.admission.now.catalog.queries
    for name, query in living.items():
        entry = entries[name]
        if entry.live_since is None or entry.live_since > epoch:
            assert query.id not in added or not added[query.id].num_rows
            continue
        if query.live_since < 0:
            query.live_since = entry.live_since
            if query.since != "state":
                query.before = oracle.bag(floored(case, query.of, query.floors, entry.live_since))
        query.found += bag(added.get(query.id, pa.table({})))
        expected = oracle.bag(floored(case, query.of, query.floors)) - query.before
        assert query.found == expected, (
            f"{name} ({query.since}) after epoch {epoch}: missing {expected - query.found}, "
            f"extra {query.found - expected}"
        )


def _drop_all(changing: Changing, living: dict[str, Living], epoch: int) -> None:
    """After dropping all queries, what is kept whole is all that is left."""
    (first,) = list(changing.case.queries)[:1]
    changing.restart({"last": (first, "new")}, frozenset(living))
    assert changing.engine is not None
    changing.engine.run({})
    used = {s.id for s in changing.engine.plan.stores}
    assert set(changing.engine.live.segments) <= used
    new = {s for s in used if "@" in s}
    whole = {s.id for s in changing.engine.plan.stores if not s.key.columns}
    left = {store for store, infos in changing.engine.live.segments.items() if infos}
    assert left <= whole, (left, new)
