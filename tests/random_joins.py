"""Random joins, and the check that every epoch's results are the oracle's.

A `Case` is a few relations, some queries over them and what arrives in each epoch.  Hypothesis draws its structure
(shapes, key types, filters, windows); the rows come from a seed.  Every relation has the columns

    id         unique            f   int, for filters           v   double, for conditions
    d0 d1 …    one per domain    e0 e1 …   a second one         p   anything        ts   event time

Columns of one domain can be compared with each other, so any two of them can be a join key.
"""

from __future__ import annotations

import datetime as dt
import random
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from itertools import combinations
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import strategies as st

from plait.config import Config
from plait.order.orders import Orders
from plait.query.expr import Call, ColumnRef, Expr, Literal
from plait.query.graph import Alias, Condition, Equality, JoinGraph, Output, Window
from plait.query.plan import Plan
from plait.query.relation import ColumnDef, Relation
from plait.runtime.task.join_task import Work
from plait.share.planner import Planner
from plait.share.probe_trees import build_plan
from plait.share.store_choice import is_executable
from plait.share.structure import groups_of
from plait.testing import Clock, LocalEngine
from tests.oracle import Bag, Oracle, bag

SECOND = 1_000_000
MOST_RESULTS = 800
START = dt.datetime(2024, 1, 1)
WIDTHS = ("tinyint", "smallint", "int", "bigint")
ARROW = {
    "tinyint": pa.int8(), "smallint": pa.int16(), "int": pa.int32(), "bigint": pa.int64(),
    "boolean": pa.bool_(), "string": pa.string(), "binary": pa.binary(), "date": pa.date32(),
    "timestamp": pa.timestamp("us", "UTC"), "timestamp_ntz": pa.timestamp("us"),
    "float": pa.float32(), "double": pa.float64(),
    "decimal(9,2)": pa.decimal128(9, 2), "decimal(18,0)": pa.decimal128(18, 0), "decimal(38,10)": pa.decimal128(38, 10),
}  # fmt: skip
EXACT = (
    "integral",
    "boolean",
    "date",
    "timestamp",
    "timestamp_ntz",
    "float",
    "double",
    "decimal(9,2)",
    "decimal(18,0)",
)
COMPARED = ("string", "binary", "decimal(38,10)")
KINDS = (*EXACT, *COMPARED)


def value(kind: str, number: int) -> Any:
    """The number-th value of a type; nearby numbers are the awkward ones."""
    if kind in WIDTHS:
        return (0, -1, 1, 127, -128)[number] if number < 5 else number % 128 if kind == "tinyint" else number
    if kind == "boolean":
        return number % 2 == 1
    if kind == "string":
        return (
            ("", "a", "a\0", "ä", "eight..8", "eight..8\0", "sixteen bytes ..")[number] if number < 7 else f"s{number}"
        )
    if kind == "binary":
        return (b"", b"\0", b"\0\0", b"\xff")[number] if number < 4 else b"b" * number
    if kind == "date":
        return dt.date(1970, 1, 1) + dt.timedelta(days=(number - 2) * 400)
    if kind in ("timestamp", "timestamp_ntz"):
        return dt.datetime(1970, 1, 1) + dt.timedelta(microseconds=number - 1, days=number % 3)
    if kind in ("float", "double"):
        return (0.0, -0.0, float("nan"), float("inf"), -1.5)[number] if number < 5 else number / 4
    if kind == "decimal(38,10)":
        # The second and third differ only above 64 bits of the unscaled value.
        return Decimal((0, 1, 1 + 2**64, -1, -1 - 2**64)[number] if number < 5 else number << 70).scaleb(-10)
    return Decimal(number - 2).scaleb(-2 if kind == "decimal(9,2)" else 0)


# ---------------------------------------------------------------- what a case is


@dataclass
class Query:
    """A graph, and the same thing in the oracle's words."""

    graph: JoinGraph
    sql: str


@dataclass
class Case:
    relations: dict[str, Relation]
    schemas: dict[str, pa.Schema]
    queries: dict[str, Query]
    predicates: dict[str, Expr]
    arrivals: list[dict[str, pa.Table]]
    clocks: list[int]
    """Seconds that pass before each epoch."""
    seed: int
    results: int = 0
    """About how many rows come out in the end."""

    def __repr__(self) -> str:
        parts = [f"{name}: {query.sql}" for name, query in self.queries.items()]
        parts += [
            f"{r.name}: {r.columns} delay {r.delay_ms} ttl {r.ttl_us} needed {r.needed}"
            for r in self.relations.values()
        ]
        parts += [f"rows {[{n: t.num_rows for n, t in a.items()} for a in self.arrivals]}", f"seed {self.seed}"]
        return "\n".join(parts)

    @property
    def graphs(self) -> dict[str, JoinGraph]:
        return {name: query.graph for name, query in self.queries.items()}

    def filters(self, relation: str) -> set[str | None]:
        aliases = [alias for query in self.queries.values() for alias in query.graph.aliases]
        return {alias.filter for alias in aliases if alias.relation == relation}

    def required(self, relation: str) -> set[str]:
        """Columns in which no alias of the relation can use a NULL."""
        found = []
        for graph in self.graphs.values():
            refs = [r for pair in (*graph.equalities, *graph.windows) for r in (pair.left, pair.right)]
            aliases = [alias.name for alias in graph.aliases if alias.relation == relation]
            found += [{r.column for r in refs if r.alias == alias} for alias in aliases]
        return set.intersection(*found)


def quoted(name: str) -> str:
    return f"`{name}`"


@dataclass
class Builder:
    """Puts one query together while its structure is drawn."""

    relations: dict[str, Relation]
    predicates: dict[str, Expr]
    aliases: list[tuple[str, str]] = field(default_factory=list)
    filters: dict[str, list[str]] = field(default_factory=dict)
    equalities: list[Equality] = field(default_factory=list)
    windows: list[Window] = field(default_factory=list)
    conditions: list[Condition] = field(default_factory=list)
    outputs: list[ColumnRef] = field(default_factory=list)

    def ref(self, alias: str, column: str) -> ColumnRef:
        return ColumnRef(alias, column, self.relations[dict(self.aliases)[alias]].type_of(column))

    def filter(self, alias: str, text: str, meaning: Expr) -> None:
        self.filters.setdefault(alias, [])
        if text not in self.filters[alias]:
            self.filters[alias].append(text)
        self.predicates[text] = meaning

    def query(self, ttl: bool) -> Query:
        self._filter_twins()
        texts = {a: " AND ".join(sorted(self.filters[a])) if self.filters.get(a) else None for a, _ in self.aliases}
        for alias, text in texts.items():
            if text is not None and text not in self.predicates:
                meaning = [self.predicates[t] for t in sorted(self.filters[alias])]
                self.predicates[text] = _conjunction(meaning)
        names = dict(self.aliases)
        refs = [r for e in self.equalities for r in (e.left, e.right)]
        refs += [r for w in self.windows for r in (w.left, w.right)] + [r for c in self.conditions for r in c.refs]
        refs = list(dict.fromkeys(refs + self.outputs))
        graph = JoinGraph(
            sql="",
            aliases=tuple(
                Alias(
                    a, r, texts[a], tuple(ColumnDef(x.column, quoted(x.column), x.type) for x in refs if x.alias == a)
                )
                for a, r in self.aliases
            ),
            equalities=tuple(self.equalities),
            outputs=tuple(Output(f"c{i}", r.type, r, str(r), (r,)) for i, r in enumerate(self.outputs)),
            windows=tuple(self.windows),
            conditions=tuple(self.conditions),
        )
        where = [str(e) for e in self.equalities] + [c.sql for c in self.conditions]
        for window in self.windows:
            gap = f"(epoch_us({window.left}) - epoch_us({window.right}))"
            where += [f"{gap} >= {window.lower_us}"] if window.lower_us is not None else []
            where += [f"{gap} <= {window.upper_us}"] if window.upper_us is not None else []
        if ttl:
            newest = f"greatest({', '.join(f'{a}.at' for a, _ in self.aliases)})"
            for alias, relation in self.aliases:
                kept, needed = self.relations[relation].ttl_us, self.relations[relation].needed
                # The predicates are over the one column f.
                still = "" if needed is None else f" OR {needed.replace('f', f'{alias}.f', 1)}"
                where += [f"({alias}.at + {kept} > {newest}{still})"] if kept is not None else []
        tables = [f"(SELECT * FROM {names[a]}{f' WHERE {texts[a]}' if texts[a] else ''}) {a}" for a, _ in self.aliases]
        select = ", ".join(f"{ref} AS c{i}" for i, ref in enumerate(self.outputs))
        return Query(graph, f"SELECT {select} FROM {', '.join(tables)} WHERE {' AND '.join(where)}")

    def _filter_twins(self) -> None:
        """An alias carries an attribute once; a second column of it is a filter, as in `sql/join/graph_rules.py`."""
        probe = JoinGraph("", tuple(Alias(a, r, None, ()) for a, r in self.aliases), tuple(self.equalities), ())
        for members in probe.attributes:
            for alias, _ in self.aliases:
                mine = sorted({r.column for r in members if r.alias == alias})
                for twin in mine[1:]:
                    one, other = self.ref(alias, mine[0]), self.ref(alias, twin)
                    self.filter(alias, f"({mine[0]} = {twin})", Call("=", (one, other), "boolean"))


def _conjunction(meaning: list[Expr]) -> Expr:
    result = meaning[0]
    for more in meaning[1:]:
        result = Call("and", (result, more), "boolean")
    return result


# ---------------------------------------------------------------- drawing one

SHAPES = ("star", "one key", "chain", "tree", "cycle")


@st.composite
def cases(
    draw: st.DrawFn,
    *,
    kinds: Sequence[str] = KINDS,
    windows: bool = False,
    ttl: bool = False,
    most_aliases: int = 6,
    most_queries: int = 3,
    rows: Sequence[int] = (24, 40, 12, 30, 0),
    spread: Sequence[int] = (6, 2, 12),
    epochs: Sequence[int] = (4, 3, 6, 5, 1),
    shapes: Sequence[str] = SHAPES,
    alike: Sequence[int] = (0,),
) -> Case:
    """A random case; `rows` of each relation, `spread` different values of a key.

    Of each query there are `alike` more of the same structure, with other names, filters, windows and outputs.
    """
    domains = [draw(st.sampled_from(kinds)) for _ in range(draw(st.sampled_from((2, 1, 3))))]
    names = [f"r{i}" for i in range(draw(st.sampled_from((3, 1, 2, 5))))]
    seed = draw(st.integers(0, 2**32 - 1))
    choose = random.Random(seed)
    relations = {name: _relation(name, domains, choose, windows, ttl) for name in names}
    predicates: dict[str, Expr] = {t: e for t, e in FILTERS if t is not None and e is not None}
    queries = {}
    for number in range(draw(st.sampled_from(range(most_queries, 0, -1)))):
        shape = draw(st.sampled_from(shapes))
        size = draw(st.sampled_from(range(2, most_aliases + 1)))
        twins = draw(st.booleans())
        builder = Builder(relations, predicates)
        _draw_joins(draw, builder, choose, names, len(domains), shape, size, twins)
        _draw_rest(draw, builder, choose, windows)
        queries[f"q{number}"] = builder.query(ttl)
        for copy in range(draw(st.sampled_from(alike))):
            twin = _twin(builder, choose, "xyz"[copy % 3])
            _draw_rest(draw, twin, choose, windows)
            queries[f"q{number}_{copy}"] = twin.query(ttl)
    schemas = {
        name: pa.schema([(c, ARROW[kind]) for c, kind in relation.columns]) for name, relation in relations.items()
    }
    count = draw(st.sampled_from(epochs))
    size, values = draw(st.sampled_from(rows)), draw(st.sampled_from(spread))
    arrivals, results = _arrivals(relations, schemas, queries, count, size, values, choose)
    clocks = [choose.choice((0, 1, 5, 11)) for _ in range(count)]
    return Case(relations, schemas, queries, predicates, arrivals, clocks, seed, results)


def fewer_stores(case: Case, searches: bool = True) -> Case:
    """The case with random keys left out, as many as can be, or some; without `searches`, none that a driver needs."""
    choose = random.Random(case.seed + 1)
    graphs = {name: thinned(query.graph, choose, searches) for name, query in case.queries.items()}
    return replace(case, queries={name: replace(q, graph=graphs[name]) for name, q in case.queries.items()})


def thinned(graph: JoinGraph, choose: random.Random, searches: bool = True) -> JoinGraph:
    """A join whose aliases are stored by fewer keys."""
    keys = [(a.name, key) for a in graph.aliases for key in graph.every_key_of(a.name)]
    choose.shuffle(keys)
    share = choose.choice((1.0, 1.0, 0.5))
    for one in keys:
        kept = frozenset((a.name, key) for a in graph.aliases for key in graph.keys_of(a.name)) - {one}
        if choose.random() < share and {alias for alias, _ in kept} == {a.name for a in graph.aliases}:
            fewer = replace(graph, stored=kept)
            graph = fewer if searches or is_executable(fewer) else graph
    return graph


def _relation(name: str, domains: Sequence[str], choose: random.Random, windows: bool, ttl: bool) -> Relation:
    columns = [("id", "bigint"), ("f", "int"), ("v", "double"), ("p", choose.choice(list(ARROW))), ("ts", "timestamp")]
    for number, domain in enumerate(domains):
        for letter in "de":
            columns.append((f"{letter}{number}", choose.choice(WIDTHS) if domain == "integral" else domain))
    timed = windows and choose.random() < 0.9
    kept = choose.choice((2, 6, 12)) * SECOND if ttl and choose.random() < 0.7 else None
    return Relation(
        name=name,
        columns=tuple(columns),
        time_column="ts" if timed else None,
        delay_ms=choose.choice((0, 1000, 5000)) if timed else None,
        ttl_us=kept,
        needed=None if kept is None else choose.choice(FILTERS)[0],
    )


def _draw_joins(
    draw: st.DrawFn,
    builder: Builder,
    choose: random.Random,
    names: Sequence[str],
    domains: int,
    shape: str,
    size: int,
    twins: bool,
) -> None:
    builder.aliases = [(f"a{i}", choose.choice(names)) for i in range(size)]
    letters = "de" if twins else "d"

    def equate(one: int, other: int, domain: int) -> None:
        left = builder.ref(f"a{one}", f"{choose.choice(letters)}{domain}")
        right = builder.ref(f"a{other}", f"{choose.choice(letters)}{domain}")
        builder.equalities.append(Equality(left, right))

    composite = draw(st.booleans())
    for i in range(1, size):
        parent = {"star": 0, "one key": 0, "chain": i - 1}.get(shape, choose.randrange(i))
        domain = 0 if shape == "one key" else choose.randrange(domains)
        equate(parent, i, domain)
        if composite and domains > 1 and choose.random() < 0.5:
            equate(parent, i, (domain + 1) % domains)
    if shape == "cycle" and size > 2:
        for _ in range(draw(st.integers(1, 2))):
            equate(*sorted(choose.sample(range(size), 2)), choose.randrange(domains))


def _twin(builder: Builder, choose: random.Random, letter: str) -> Builder:
    """The same joins in other words, written in another order."""
    twin = Builder(builder.relations, builder.predicates)
    called = {alias: f"{letter}{alias}" for alias, _ in builder.aliases}
    twin.aliases = [(called[alias], relation) for alias, relation in builder.aliases]
    choose.shuffle(twin.aliases)

    def renamed(ref: ColumnRef) -> ColumnRef:
        return ColumnRef(called[ref.alias], ref.column, ref.type)

    twin.equalities = [Equality(renamed(e.left), renamed(e.right)) for e in builder.equalities]
    if choose.random() < 0.3:
        choose.shuffle(twin.equalities)
    return twin


def _draw_rest(draw: st.DrawFn, builder: Builder, choose: random.Random, windows: bool) -> None:
    aliases = [alias for alias, _ in builder.aliases]
    if draw(st.booleans()):
        for alias in aliases:
            text, meaning = choose.choice(FILTERS)
            if text is not None and meaning is not None:
                builder.filter(alias, text, meaning)
    if draw(st.booleans()):
        one, other = choose.sample(aliases, 2)
        left, right = builder.ref(one, "v"), builder.ref(other, "v")
        op = choose.choice(("<", "<=", ">", ">=", "<=>"))
        text = f"{left} IS NOT DISTINCT FROM {right}" if op == "<=>" else f"{left} {op} {right}"
        builder.conditions.append(Condition(text, (left, right), Call(op, (left, right), "boolean")))
    if windows:
        timed = [a for a, r in builder.aliases if builder.relations[r].time_column]
        whole = draw(st.booleans())
        for one, other in combinations(timed, 2):
            if choose.random() < (0.9 if whole else 0.4):
                lower, upper = sorted((choose.randint(-9, 2), choose.randint(-2, 9)))
                low = None if choose.random() < 0.1 else lower * SECOND
                high = None if choose.random() < 0.1 else upper * SECOND
                if (low, high) != (None, None):
                    builder.windows.append(Window(builder.ref(one, "ts"), builder.ref(other, "ts"), low, high))
    builder.outputs = [builder.ref(alias, "id") for alias in aliases]
    for alias in aliases:
        columns = [c for c, _ in builder.relations[dict(builder.aliases)[alias]].columns]
        if choose.random() < 0.5:
            builder.outputs.append(builder.ref(alias, choose.choice(columns)))
    choose.shuffle(builder.outputs)


def _number(column: str, op: str, constant: int) -> Expr:
    return Call(op, (ColumnRef("", column, "int"), Literal(constant, "int")), "boolean")


FILTERS: tuple[tuple[str | None, Expr | None], ...] = (
    (None, None),
    ("(f < 4)", _number("f", "<", 4)),
    ("(f >= 2)", _number("f", ">=", 2)),
    ("(f IS NULL)", Call("isnull", (ColumnRef("", "f", "int"),), "boolean")),
    ("(f = 1)", _number("f", "=", 1)),
    ("(f < 0)", _number("f", "<", 0)),
)


def _arrivals(
    relations: dict[str, Relation],
    schemas: dict[str, pa.Schema],
    queries: dict[str, Query],
    epochs: int,
    rows: int,
    spread: int,
    choose: random.Random,
) -> tuple[list[dict[str, pa.Table]], int]:
    """Rows for every epoch, few enough that the results stay small; and how many results there are."""
    nulls, skew = choose.choice((0.0, 0.0, 0.2)), choose.random() < 0.3
    tables = {
        name: _rows(relation, schemas[name], rows, spread, nulls, skew, epochs, choose)
        for name, relation in relations.items()
    }
    with Oracle() as oracle:
        while True:
            oracle.load({name: stamped(table, 0) for name, table in tables.items()})
            results = sum(oracle.count(query.sql) for query in queries.values())
            if results <= MOST_RESULTS:
                break
            tables = {name: table.slice(0, table.num_rows * 2 // 3) for name, table in tables.items()}
    arrivals: list[dict[str, pa.Table]] = [{} for _ in range(epochs)]
    for name, table in tables.items():
        cuts = sorted(choose.randrange(table.num_rows + 1) for _ in range(epochs - 1))
        if choose.random() < 0.2:
            cuts = [table.num_rows] * (epochs - 1) if choose.random() < 0.5 else [0] * (epochs - 1)
        for number, (begin, end) in enumerate(zip([0, *cuts], [*cuts, table.num_rows], strict=True)):
            if end > begin or choose.random() < 0.5:
                arrivals[number][name] = table.slice(begin, end - begin)
    return arrivals, results


def _rows(
    relation: Relation,
    schema: pa.Schema,
    rows: int,
    spread: int,
    nulls: float,
    skew: bool,
    epochs: int,
    choose: random.Random,
) -> pa.Table:
    columns: dict[str, list[Any]] = {}
    for name, kind in relation.columns:
        if name == "id":
            columns[name] = list(range(rows))
        elif name == "ts":
            # Time moves on with the rows, with stragglers behind.
            columns[name] = [
                None
                if choose.random() < 0.03
                else START + dt.timedelta(milliseconds=500 * i - choose.choice((0, 3000, 9000)))
                for i in range(rows)
            ]
        else:
            empty = nulls if name[0] in "de" else 0.2
            columns[name] = [
                None
                if choose.random() < empty
                else value(kind, 0 if skew and choose.random() < 0.5 else choose.randrange(spread))
                for _ in range(rows)
            ]
    return pa.table([pa.array(columns[f.name], f.type) for f in schema], schema=schema)


def stamped(table: pa.Table, clock_us: int) -> pa.Table:
    """The rows with the time at which they arrived."""
    return table.append_column("at", pa.array(np.full(table.num_rows, clock_us, np.int64)))


# ---------------------------------------------------------------- running one


def random_orders(graph: JoinGraph, choose: random.Random) -> Orders:
    """Any valid probe order for every driving alias."""
    orders: Orders = {}
    for driver in [alias.name for alias in graph.aliases]:
        joined, order = [driver], []
        while len(joined) < len(graph.aliases):
            names = [a.name for a in graph.aliases if a.name not in joined]
            order.append(choose.choice([n for n in names if graph.can_search(joined, n)]))
            joined.append(order[-1])
        orders[driver] = tuple(order)
    return orders


def orders_for(graphs: Mapping[str, JoinGraph], choose: random.Random) -> dict[str, Orders]:
    """Random orders; most of the time queries of the same structure have the same."""
    orders = {name: random_orders(graph, choose) for name, graph in graphs.items()}
    for lead, group in groups_of(graphs).items():
        for name in group.members:
            if choose.random() < 0.8:
                orders[name] = group.orders_of(name, orders[lead])
    return orders


@dataclass
class Seen:
    """What a run has shown after one epoch."""

    results: dict[str, Bag]
    expected: dict[str, Bag]
    report: dict[str, Any]
    """The engine's progress: what `run.last_progress` would say."""


def run_case(
    case: Case,
    change: Callable[[Plan], Plan] = lambda plan: plan,
    steady: bool = False,
    *,
    replan: float = 0.6,
    planner: Callable[[Case], Planner] | None = None,
    settings: Mapping[str, Any] | None = None,
    most_tasks: int = 5,
    look: Callable[[LocalEngine], None] = lambda _: None,
) -> Iterator[Seen]:
    """Runs a case epoch by epoch with settings that change all the time (unless `steady`), next to the oracle.

    `replan` is how often other orders and ranks are drawn.  With a `planner` it is the one to choose, and starts anew
    whenever the engine does.  `settings` of the engine stay as they are given; `look` sees it after every epoch.  In
    half of the engines an epoch of one task runs all hops in it, in the others each hop is a task of its own.
    """
    choose = random.Random(case.seed)
    ranks = list(case.relations)
    choose.shuffle(ranks)
    orders = orders_for(case.graphs, choose)
    # Every third case as with sharing="independent".
    apart = case.seed % 3 == 0
    plan = build_plan(case.graphs, case.relations, orders, tuple(ranks), apart=apart)
    clock = Clock()
    totals: dict[str, Bag] = {name: Counter() for name in case.queries}
    model = Model(case)
    with tempfile.TemporaryDirectory(prefix="plait-case-") as directory, Oracle() as oracle:
        model.prepare(oracle)

        def started() -> LocalEngine:
            drawn = {
                "fan_in": choose.randint(2, 4),
                "snapshot_every": choose.choice((1, 2, 16)),
                "compress_above": choose.choice((None, "0")),
                "merge_share": choose.choice((0.01, 0.25, 0.9)),
            }
            config = Config(**{"sync": False, "tasks": 1, "max_future": None, **drawn, **(settings or {})})
            chosen = None if planner is None else planner(case)
            return LocalEngine(
                directory,
                change(plan) if chosen is None else chosen.plan,
                config,
                predicates=case.predicates,
                clock=clock,
                planner=chosen,
                seed=(seed := choose.randrange(1000)),
                work=(None, Work)[seed % 2],
            )

        engine = started()
        try:
            for number, arrivals in enumerate(case.arrivals):
                if not steady and number and choose.random() < 0.3:
                    engine.close()
                    engine = started()
                if not steady and number and choose.random() < replan:
                    choose.shuffle(ranks)
                    orders = orders_for(case.graphs, choose)
                    plan = build_plan(case.graphs, case.relations, orders, tuple(ranks), apart=apart)
                engine.change(
                    change(plan) if planner is None else None,
                    tasks=choose.randint(1, most_tasks),
                    probe=choose.choice(("factorised", "iterative")),
                    chunk_rows=choose.choice((1, 3, 7, 61) if case.results < 100 else (61, 1 << 18)),
                )
                clock.advance(case.clocks[number])
                added = engine.run(arrivals)
                model.arrive(oracle, arrivals, clock.now_us)
                for name, table in added.items():
                    totals[name] += bag(table)
                assert engine.live.watermark_ms == model.watermark_ms
                look(engine)
                report = engine.progress[-1]
                assert report["rows_late"] == {r: model.late.get(r, 0) for r in plan.ranks}
                assert report["rows_out"] == {name: table.num_rows for name, table in added.items()}
                yield Seen(totals, {name: oracle.bag(model.sql(name)) for name in case.queries}, report)
        finally:
            engine.close()


def check_case(case: Case, **how: Any) -> list[dict[str, Any]]:
    """After every epoch the committed rows are the oracle's; returns what the engine reported of each epoch."""
    reports = []
    for number, seen in enumerate(run_case(case, **how)):
        for name, expected in seen.expected.items():
            found = seen.results[name]
            assert found == expected, (
                f"{name} after epoch {number}: missing {expected - found}, extra {found - expected}"
            )
        reports.append(seen.report)
    return reports


@dataclass
class Model:
    """Spark's rule for late rows, query by query: at or below the query's watermark at the end of the epoch before.

    The watermark of a query is the least, over its streams, of the latest event time less the delay; it does not exist
    before every stream was seen, and never goes back.  Late rows count for it as well; rows that the query cannot use
    do not.  In the oracle's tables every row says for which queries it is late.
    """

    case: Case
    marks_ms: dict[tuple[str, str], int] = field(default_factory=dict)
    """By query and stream."""
    late: dict[str, int] = field(default_factory=dict)
    """By stream, the rows of the last epoch that were late for every query that can use them."""

    def prepare(self, oracle: Oracle) -> None:
        empty = {n: stamped(s.empty_table(), 0) for n, s in self.case.schemas.items()}
        for name in self.case.queries:
            empty = {n: t.append_column(f"late_{name}", pa.array([], pa.bool_())) for n, t in empty.items()}
        oracle.load(empty)

    def sql(self, query: str) -> str:
        """The query over the rows that are not late for it."""
        seen = rf"FROM (SELECT * FROM \1 WHERE NOT late_{query})"
        return re.sub(r"FROM (r\d+)\b", seen, self.case.queries[query].sql)

    def watermark(self, query: str) -> int | None:
        graph = self.case.graphs[query]
        timed = {a.relation for a in graph.aliases if self.case.relations[a.relation].delay_ms is not None}
        marks = [self.marks_ms[query, r] for r in timed if (query, r) in self.marks_ms]
        return min(marks) if marks and len(marks) == len(timed) else None

    @property
    def watermark_ms(self) -> int | None:
        """The least of all."""
        known = [at for query in self.case.queries if (at := self.watermark(query)) is not None]
        return min(known, default=None)

    def arrive(self, oracle: Oracle, arrivals: dict[str, pa.Table], clock_us: int) -> None:
        self.late = {}
        before = {query: self.watermark(query) for query in self.case.queries}
        for name, table in arrivals.items():
            relation = self.case.relations[name]
            oracle.load({"new": stamped(table, clock_us)})
            marks = {q: at if relation.time_column is not None else None for q, at in before.items()}
            late = {
                q: "false" if at is None else f"coalesce(epoch_us(ts) <= {at * 1000}, false)" for q, at in marks.items()
            }
            columns = ", ".join(["*", *(f"{text} AS late_{q}" for q, text in late.items())])
            oracle.connection.execute(f"INSERT INTO {name} SELECT {columns} FROM new")
            readers = [(q, a) for q, g in self.case.graphs.items() for a in g.aliases if a.relation == name]
            if relation.time_column is None or not readers:
                continue
            present = " AND ".join(["true", *(f"{c} IS NOT NULL" for c in sorted(self.case.required(name)))])
            usable = " OR ".join(f"({a.filter or 'true'})" for _, a in readers)
            seen = " OR ".join(f"(({a.filter or 'true'}) AND NOT {late[q]})" for q, a in readers)
            gone = f"SELECT * FROM new WHERE {present} AND ({usable}) AND ({seen}) IS NOT TRUE"
            self.late[name] = oracle.count(gone)
            for query in {q for q, _ in readers}:
                self._move(oracle, query, relation)

    def _move(self, oracle: Oracle, query: str, relation: Relation) -> None:
        graph = self.case.graphs[query]
        mine = [a for a in graph.aliases if a.relation == relation.name]
        required = frozenset.intersection(*(graph.required(a.name) for a in mine))
        wanted = " OR ".join(f"({a.filter or 'true'})" for a in mine)
        wanted = " AND ".join([f"({wanted})", *(f"{c} IS NOT NULL" for c in sorted(required))])
        newest = oracle.connection.execute(f"SELECT max(epoch_us(ts)) FROM new WHERE {wanted}").fetchall()[0][0]
        if newest is not None:
            at = newest // 1000 - (relation.delay_ms or 0)
            self.marks_ms[query, relation.name] = max(at, self.marks_ms.get((query, relation.name), at))
