"""Queries that come and go, case by case: each of these once gave other rows than the query would have given alone."""

from __future__ import annotations

import datetime as dt
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import count, product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from plait.admission import Admission, Asked, admitted, loaded
from plait.catalog.catalog import Catalog
from plait.catalog.changes import Definition
from plait.config import Config
from plait.query.budget import Budget
from plait.query.expr import Call, ColumnRef, Literal
from plait.query.graph import Alias, Equality, JoinGraph, Output, Window
from plait.query.relation import ColumnDef, Relation
from plait.runtime.driver.sinks import Keep
from plait.state.log import catalog_versions as catalogs
from plait.state.log.checkpoint import Checkpoint
from plait.testing import Clock, LocalEngine

COLUMNS = (("id", "bigint"), ("k", "int"), ("j", "int"), ("f", "int"), ("ts", "timestamp"))
BEGIN = dt.datetime(2033, 5, 18, tzinfo=dt.UTC)
STREAMS = (("a", "s"), ("b", "u"))
WIDE = "a.id a.k a.j b.id b.k b.j"


def more_than(number: int) -> Call:
    return Call(">", (ColumnRef("", "f", "int"), Literal(number, "int")), "boolean")


def join(
    *equal: str,
    of: Sequence[tuple[str, str]] = STREAMS,
    out: str = "a.id b.id",
    above: Mapping[str, int] | None = None,
    within: int | None = None,
) -> JoinGraph:
    """`join("a.k = b.k", above={"a": 5}, within=10)`: f > 5 in a, event times at most ten seconds apart."""

    def ref(text: str) -> ColumnRef:
        alias, column = text.split(".")
        return ColumnRef(alias, column, dict(COLUMNS)[column])

    sides = [tuple(map(ref, text.split(" = "))) for text in equal]
    times = [ref(f"{alias}.ts") for alias, _ in of] if within is not None else []
    used = [*(r for pair in sides for r in pair), *map(ref, out.split()), *times]
    aliases = []
    for name, relation in of:
        limit = (above or {}).get(name)
        columns = dict.fromkeys(ColumnDef(r.column, f"`{r.column}`", r.type) for r in used if r.alias == name)
        text = None if limit is None else f"f > {limit}"
        aliases.append(Alias(name, relation, text, tuple(columns), None, None if limit is None else more_than(limit)))
    span = () if within is None else (Window(times[0], times[1], -within * 1_000_000, within * 1_000_000),)
    outputs = [Output(f"c{i}", ref(t).type, ref(t), t, (ref(t),)) for i, t in enumerate(out.split())]
    return JoinGraph("", tuple(aliases), tuple(Equality(*pair) for pair in sides), tuple(outputs), span)


def rows(*values: tuple[int, int, int, int, float]) -> pa.Table:
    """Of (id, k, j, f, seconds)."""
    columns = list(zip(*values, strict=True))
    arrays = [pa.array(c, t) for c, t in zip(columns, (pa.int64(), pa.int32(), pa.int32(), pa.int32()), strict=False)]
    times = [BEGIN + dt.timedelta(seconds=s) for s in columns[4]]
    return pa.table([*arrays, pa.array(times, pa.timestamp("us", "UTC"))], names=[name for name, _ in COLUMNS])


class Shop:
    """One checkpoint that is started again and again with other queries."""

    def __init__(
        self,
        path: Path,
        timed: bool = False,
        keep: str = "used",
        tables: frozenset[str] = frozenset(),
        loads: Mapping[str, pa.Table] | None = None,
    ) -> None:
        self.path, self.tables, self.clock = path, tables | frozenset(loads or {}), Clock()
        self.budgets: dict[str, Budget] = {}
        self.loads = dict(loads or {})
        """Rows of tables, which are read when the engine would read them."""
        how: dict[str, Any] = {"time_column": "ts", "delay_ms": 0} if timed else {}
        self.relations = {name: Relation(name, COLUMNS, keep=keep, **how) for name in ("s", "u")}
        self.relations |= {name: Relation(name, COLUMNS) for name in self.loads}
        self.engine: LocalEngine | None = None

    def start(self, **queries: tuple[JoinGraph, str]) -> Catalog:
        """With these queries and no others: (graph, since)."""
        self.close()
        config = Config(tasks=1, sync=False, max_future=None, fan_in=2, gc_grace_seconds=0.0, on_missing_query="drop")
        with Checkpoint(str(self.path), config) as opened:
            found = catalogs.newest(opened.files)
            before = Catalog() if found is None else Catalog.from_json(found)
            defined = {}
            for name, (graph, since) in queries.items():
                lives, text = before.queries.get(name), f"{graph} {since}"
                id = lives.id if lives is not None and lives.sql == text else before.next_id(name)
                defined[name] = Definition(
                    id, name, text, {id: graph}, "append", since, False, None, budget=self.budgets.get(name, Budget())
                )
            asked = Asked(self.relations, self.tables, defined, on_missing="drop")
            live = opened.log.live()
            self.admission = Admission(opened, config, asked, admitted(before, asked, live))
            self.admission.put(before)
            planner = self.admission.begin(live, None)
        predicates = {f"f > {n}": more_than(n) for n in range(200)}
        how: dict[str, Any] = {"planner": planner, "changes": self.admission, "clock": self.clock}
        self.engine = LocalEngine(self.path, planner.plan, config, predicates=predicates, **how)
        self.admission.checkpoint = self.engine.checkpoint
        self.engine.change(sinks={name: Keep() for name in self.admission.now.graphs})
        return self.admission.now.catalog

    def run(self, **arrivals: pa.Table) -> dict[str, list[tuple[Any, ...]]]:
        """One epoch; the new rows of the queries that have some, by name."""
        assert self.engine is not None
        self.clock.advance(1)
        edges = loaded(self.admission.now, self.engine.live.epoch + 1) if self.loads else {}
        found = self.engine.run({**arrivals, **{name: self.loads[name] for name in edges}}, edges)
        return {
            name.partition("@")[0]: sorted(tuple(row.values()) for row in table.to_pylist())
            for name, table in found.items()
            if table.num_rows
        }

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()
            self.engine = None


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    made = Shop(tmp_path)
    yield made
    made.close()


@pytest.fixture
def timed(tmp_path: Path) -> Iterator[Shop]:
    made = Shop(tmp_path, timed=True)
    yield made
    made.close()


def test_rows_that_a_dropped_query_let_in_are_seen_by_nobody(shop: Shop) -> None:
    narrow, wide = join("a.k = b.k", above={"a": 5}), join("a.k = b.k")
    shop.start(narrow=(narrow, "now"), wide=(wide, "now"))
    shop.run(s=rows((1, 1, 1, 1, 0), (2, 1, 1, 9, 0)))
    shop.start(narrow=(narrow, "now"))
    assert shop.run(u=rows((50, 1, 1, 1, 0))) == {"narrow": [(2, 50)]}


def test_a_bit_of_a_dropped_filter_lets_no_row_of_a_later_query_pass(shop: Shop) -> None:
    for number in range(1, 12):
        asked = {f"q{n}": (join("a.k = b.k", above={"a": n}), "now") for n in range(number, number + 3)}
        shop.start(**asked)
        found = shop.run(s=rows((number, 1, 1, number, 0)), u=rows((100 + number, 1, 1, 0, 0)))
        for name, joined in found.items():
            limit = int(name[1:])
            # Rows are named like their f.
            assert all(row[0] > limit for row in joined), (number, name, joined)


def test_a_floor_lies_behind_what_a_shorter_window_let_expire(timed: Shop) -> None:
    short, long = join("a.k = b.k", within=10), join("a.k = b.k", within=60)
    timed.start(first=(short, "now"))
    for i in range(2):
        timed.run(s=rows((i, 1, 1, 1, 10 * i)), u=rows((100 + i, 1, 1, 1, 10 * i)))
    timed.start(second=(short, "new"))
    for i in range(2, 8):
        timed.run(s=rows((i, 1, 1, 1, 10 * i)), u=rows((100 + i, 1, 1, 1, 10 * i)))
    timed.start(second=(short, "new"), third=(long, "new"))
    timed.run()
    catalog = timed.start(second=(short, "new"), third=(long, "new"), fourth=(long, "now"))
    (floors,) = catalog.queries["fourth"].floors.values()
    found = timed.run(u=rows((200, 1, 1, 1, 79)))["fourth"]
    assert [row[0] for row in found] == list(range(floors["a"], 8))


def test_what_is_being_copied_does_not_expire_under_the_window_of_others(timed: Shop) -> None:
    out = "a.id a.j a.k b.id b.k b.j"
    long = join("a.k = b.k", out=out, within=6000)
    short = join("a.k = b.k", within=10)
    new = join("a.k = b.k", "a.j = b.j", within=6000)
    timed.start(long=(long, "now"), short=(short, "now"))
    for i in range(6):
        timed.run(s=rows((i, 1, 1, 1, 10 * i)), u=rows((100 + i, 1, 1, 1, 10 * i)))
    catalog = timed.start(short=(short, "now"), new=(new, "now"))
    assert catalog.queries["new"].status == "building"
    timed.run()
    found = timed.run(u=rows((500, 1, 1, 1, 50)))["new"]
    assert [row[0] for row in found] == list(range(6))


def test_a_query_goes_on_with_the_rows_of_a_table_that_it_has_seen(tmp_path: Path) -> None:
    shop = Shop(tmp_path, tables=frozenset({"u"}))
    plain, more = join("a.k = b.k"), join("a.k = b.k", out="a.id b.id b.f")
    shop.start(plain=(plain, "now"))
    assert shop.run(u=rows((1000, 1, 1, 1, 0)), s=rows((1, 1, 1, 1, 0))) == {"plain": [(1, 1000)]}
    catalog = shop.start(plain=(plain, "now"), more=(more, "now"))
    # The other query needs another column: the table is read again for it.
    assert [s.id for s in catalog.layout.stores if s.relation == "u"] == ["u[k]", "u[k]@1"]
    shop.run()
    shop.start(plain=(plain, "now"), more=(more, "now"))
    assert shop.run(s=rows((3, 1, 1, 1, 0))) == {"plain": [(3, 1000)]}
    shop.close()


def test_after_all_queries_are_dropped_nothing_is_left(shop: Shop) -> None:
    shop.start(one=(join("a.k = b.k"), "now"), two=(join("a.j = b.j", above={"b": 3}), "state"))
    for i in range(5):
        shop.run(s=rows((i, 1, 1, 1, 0)), u=rows((i, 1, 1, 9, 0)))
    shop.start(last=(join("a.f = b.f"), "new"))
    shop.run()
    assert shop.engine is not None
    assert shop.engine.live.segments == {}


@pytest.mark.parametrize("first", [("new", "old"), ("old", "new")])
def test_a_query_that_needs_no_past_does_not_wait_for_that_of_another(shop: Shop, first: tuple[str, str]) -> None:
    wide = join("a.k = b.k", out=WIDE)
    shop.start(wide=(wide, "now"))
    shop.run(s=rows((1, 1, 1, 1, 0)), u=rows((50, 1, 1, 1, 0)))
    since = {"new": "new", "old": "now"}
    asked = {name: (join("a.k = b.k", "a.j = b.j"), since[name]) for name in first}
    catalog = shop.start(wide=(wide, "now"), **asked)
    assert catalog.queries["new"].live_since == 1
    assert catalog.queries["new"].floors == {"new@1": {"a": 1, "b": 1}}
    assert catalog.queries["old"].status == "building"
    shop.run(s=rows((2, 1, 1, 1, 0)))
    assert shop.run(u=rows((51, 1, 1, 1, 0)))["new"] == [(2, 51)]
    # The other has all its past: rows of before it was there as well.
    assert shop.run(u=rows((52, 1, 1, 1, 0)))["old"] == [(1, 52), (2, 52)]


def test_a_query_that_needs_no_past_does_not_wait_for_a_build_that_is_going_on(shop: Shop) -> None:
    wide, both = join("a.k = b.k", out=WIDE), join("a.k = b.k", "a.j = b.j")
    shop.start(wide=(wide, "now"))
    shop.run(s=rows((1, 1, 1, 1, 0)), u=rows((50, 1, 1, 1, 0)))
    assert shop.start(wide=(wide, "now"), old=(both, "now")).queries["old"].status == "building"
    catalog = shop.start(wide=(wide, "now"), old=(both, "now"), new=(both, "new"))
    assert catalog.queries["new"].live_since == 1
    assert shop.run(s=rows((2, 1, 1, 1, 0)), u=rows((51, 1, 1, 1, 0)))["new"] == [(2, 51)]


def naive(graph: JoinGraph, tables: Mapping[str, pa.Table]) -> Counter[tuple[Any, ...]]:
    """The join, by trying all combinations."""
    names = [a.name for a in graph.aliases]
    found: Counter[tuple[Any, ...]] = Counter()
    for combination in product(*(tables[a.relation].to_pylist() for a in graph.aliases)):
        row = dict(zip(names, combination, strict=True))
        if all(row[e.left.alias][e.left.column] == row[e.right.alias][e.right.column] for e in graph.equalities):
            sources = [o.source for o in graph.outputs if o.source is not None]
            found[tuple(row[ref.alias][ref.column] for ref in sources)] += 1
    return found


@pytest.mark.parametrize("seed", range(12))
def test_a_join_of_tables_gives_all_its_rows_once_whatever_stores_are_there(tmp_path: Path, seed: int) -> None:
    choose = random.Random(seed)
    numbers = count(1)

    def some() -> pa.Table:
        return rows(*((next(numbers), choose.randrange(3), choose.randrange(3), 1, 0) for _ in range(5)))

    def over_tables() -> JoinGraph:
        names = choose.sample(["x", "y", "z"], choose.choice((2, 3)))
        of = [(name, choose.choice(["t1", "t2", "t3"])) for name in names]
        sides = [f"{choose.choice(names[:i])}.{{0}} = {name}.{{0}}" for i, name in enumerate(names) if i]
        outputs = [f"{name}.{column}" for name in names for column in ("id", *choose.sample(["k", "j"], 1))]
        return join(*(side.format(choose.choice("kj")) for side in sides), of=of, out=" ".join(outputs))

    def with_a_stream() -> JoinGraph:
        table, column = choose.choice(["t1", "t2", "t3"]), choose.choice("kj")
        return join(f"a.{column} = b.{column}", of=[("a", "s"), ("b", table)])

    shop = Shop(tmp_path, loads={name: some() for name in ("t1", "t2", "t3")})
    made: dict[str, tuple[JoinGraph, str]] = {"s0": (with_a_stream(), "now")}
    found: dict[str, Counter[tuple[Any, ...]]] = {}
    try:
        for start in range(4):
            shop.start(**made)
            for _ in range(choose.randint(2, 3)):
                for name, some_rows in shop.run(s=some()).items():
                    found.setdefault(name, Counter()).update(some_rows)
            for name, (graph, _) in made.items():
                if name.startswith("t"):
                    assert found.get(name, Counter()) == naive(graph, shop.loads), (start, name, str(graph))
            made[f"s{start + 1}"] = with_a_stream(), "now"
            made[f"t{start}"] = over_tables(), choose.choice(["now", "state", "new"])
    finally:
        shop.close()


def test_a_table_that_is_built_by_another_key_is_not_loaded_as_well(tmp_path: Path) -> None:
    shop = Shop(tmp_path, loads={f"t{i}": rows((i, 1, 1, 1, 0)) for i in (1, 2)})
    pairs = {
        "p": (join("a.k = b.k", of=[("a", "s"), ("b", "t1")], out="a.id a.k b.id b.k b.j"), "now"),
        "q": (join("a.k = b.k", of=[("a", "s"), ("b", "u")]), "now"),
    }
    shop.start(**pairs)
    assert shop.run(s=rows((9, 1, 1, 1, 0))) == {"p": [(9, 1, 1, 1, 1)]}
    chain = join("a.k = b.k", "b.j = c.j", of=[("a", "s"), ("b", "t1"), ("c", "t2")], out="a.id b.id c.id")
    catalog = shop.start(**pairs, chain=(chain, "state"))
    assert [(build.store, build.source) for build in catalog.layout.builds] == [("t1[j]@1", "t1[k]")]
    assert list(loaded(shop.admission.now, 1)) == ["t2"]
    found = [row for _ in range(3) for row in shop.run().get("chain", [])]
    assert found == [(9, 1, 2)]
    assert shop.engine is not None
    assert [info.rows for info in shop.engine.live.segments["t1[j]@1"]] == [1]
    # Without a past it does not wait, and the table is read.
    catalog = shop.start(**pairs, other=(chain, "new"))
    assert catalog.queries["other"].live_since == 4
    assert shop.run(s=rows((10, 1, 1, 1, 0)))["other"] == [(10, 1, 2)]
    shop.close()
