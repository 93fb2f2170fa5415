"""Frames, matches and the prober against naive loops, without files and without Spark."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.order.orders import fixed
from plait.query.expr import Call, ColumnRef
from plait.query.graph import Alias, Condition, Equality, JoinGraph, Output
from plait.query.plan import Plan, Seen, SlotColumn, Step
from plait.query.relation import ColumnDef, Relation
from plait.query.store import HASH, MASK, Filter, Key
from plait.runtime.task.frames import Frame, Matches, arrived
from plait.runtime.task.partial import Partial, Slot
from plait.runtime.task.prober import Prober
from plait.share.probe_trees import build_plan
from plait.state.segments.filter_sets import Sets
from plait.state.segments.keys import hash_key, null_rows
from plait.state.segments.run import MemoryRun
from plait.state.segments.view import View

RELATIONS = {n: Relation(n, (("k", "bigint"), ("s", "string"), ("m", "bigint"), ("v", "bigint"))) for n in "abcd"}


def ref(alias: str, column: str) -> ColumnRef:
    return ColumnRef(alias, column, dict(RELATIONS["a"].columns)[column])


def graph(*equalities: tuple[str, str], outputs: str = "abc", checks: tuple[tuple[str, str], ...] = ()) -> JoinGraph:
    """`graph(("a.k", "b.k"), …)`: outputs are the aliases' v."""
    pairs = [tuple(ref(*side.split(".")) for side in pair) for pair in equalities]
    names = sorted({r.alias for pair in pairs for r in pair})
    columns = tuple(ColumnDef(c, f"`{c}`", t) for c, t in RELATIONS["a"].columns)
    conditions = [(ref(*one.split(".")), ref(*other.split("."))) for one, other in checks]
    return JoinGraph(
        "",
        tuple(Alias(n, n, None, columns) for n in names),
        tuple(Equality(*pair) for pair in pairs),
        tuple(Output(f"{a}v", "bigint", ref(a, "v"), "", (ref(a, "v"),)) for a in outputs if a in names),
        conditions=tuple(Condition("", pair, Call("<", pair, "boolean")) for pair in conditions),
    )


def plan_of(query: JoinGraph) -> Plan:
    return build_plan({"q": query}, RELATIONS, {"q": fixed(query)}, tuple(RELATIONS))


Row = tuple[Any, ...]
COLUMNS = ("k", "s", "m", "v")


def run_of(rows: list[Row], key: Key) -> MemoryRun:
    table = pa.table(
        [pa.array([r[i] for r in rows], pa.string() if c == "s" else pa.int64()) for i, c in enumerate(COLUMNS)],
        names=list(COLUMNS),
    )
    nulls = null_rows(table, key)
    if nulls is not None:
        table = table.filter(pa.array(~nulls))
    hashes = hash_key(table, key)
    order = np.argsort(hashes, kind="stable")
    return MemoryRun(hashes[order], table.take(pa.array(order)))


class Loop:
    """Drives one relation's tree through all hops in this process: what is shipped arrives again."""

    def __init__(
        self,
        plan: Plan,
        state: dict[str, list[Row]],
        iterative: bool = False,
        chunk: int = 1 << 18,
        budget: int = 1 << 20,
    ) -> None:
        self.plan, self.state = plan, state
        self.shipped: list[tuple[Any, pa.Table]] = []
        self.results: dict[str, list[Row]] = {}
        self.largest = 0
        ship = lambda n, t: self.shipped.append((n, t))  # noqa: E731
        keep = lambda *_: 0  # noqa: E731
        self.prober = Prober(plan, iterative, chunk, budget, 0, self.runs, ship, self.emit, keep, epoch=1)

    def runs(self, step: Step, times: object = None, hashes: object = None) -> list[View]:
        store = self.plan.store_by_id[step.store]
        rows = self.state[store.relation]
        # In two runs, as two epochs would leave them.
        halves = [run_of(rows[: len(rows) // 2], store.key), run_of(rows[len(rows) // 2 :], store.key)]
        return [View(run, Sets(), 0, {}) for run in halves]

    def emit(self, emits: Any, partial: Partial) -> None:
        self.largest = max(self.largest, len(partial.hashes))
        for emit in emits:
            mine = partial.of_member(emit.member)
            columns = [mine.column(c).to_pylist() for c in emit.columns]
            self.results.setdefault(emit.query, []).extend(zip(*columns, strict=True))

    def drive(self, relation: str) -> list[Row]:
        for tree in (t for t in self.plan.trees if t.relation == relation):
            edge = next(e for i in self.plan.inputs for e in i.edges if e.id == tree.edge)
            run = run_of(self.state[relation], edge.key)
            base = Partial(run.hashes, (Slot(run.table),))
            for node in tree.nodes:
                self.prober.visit(node, self.prober.frame(node, base), tree.width)
        travelled = 0
        while travelled < len(self.shipped):
            node, table = self.shipped[travelled]
            travelled += 1
            if table.num_rows:
                partial = arrived(table, self._slots(node.id))
                self.prober.visit(node, self.prober.frame(node, partial), 1)
        return self.results.get("q", [])

    def _slots(self, wanted: int) -> int:
        def depth(node: Any, slots: int) -> int | None:
            if node.id == wanted:
                return slots
            return next((d for child in node.children if (d := depth(child, slots + 1)) is not None), None)

        return next(d for t in self.plan.trees for n in t.nodes if (d := depth(n, 1)) is not None)


def naive(query: JoinGraph, state: dict[str, list[Row]]) -> Counter[Row]:
    names = [alias.name for alias in query.aliases]
    found: Counter[Row] = Counter()
    for rows in itertools.product(*(state[n] for n in names)):
        at = {(n, c): v for n, row in zip(names, rows, strict=True) for c, v in zip(COLUMNS, row, strict=True)}
        sides = [(at[e.left.alias, e.left.column], at[e.right.alias, e.right.column]) for e in query.equalities]
        less = [tuple(at[r.alias, r.column] for r in c.refs) for c in query.conditions]
        if all(a is not None and a == b for a, b in sides) and all(None not in p and p[0] < p[1] for p in less):
            found[tuple(at[o.source.alias, o.source.column] for o in query.outputs if o.source)] += 1
    return found


GRAPHS = {
    "one key": graph(("a.k", "b.k"), ("b.k", "c.k")),
    "one text key": graph(("a.s", "b.s"), ("b.s", "c.s")),
    "chain": graph(("a.k", "b.k"), ("b.m", "c.m")),
    "chain over text": graph(("a.s", "b.s"), ("b.m", "c.m"), ("c.s", "d.s"), outputs="abcd"),
    "composite": graph(("a.k", "b.k"), ("a.s", "b.s"), ("b.m", "c.m")),
    "cycle": graph(("a.k", "b.k"), ("b.m", "c.m"), ("c.k", "a.m")),
    "condition": graph(("a.k", "b.k"), ("b.k", "c.k"), checks=(("a.v", "c.v"),)),
    "condition between hops": graph(("a.k", "b.k"), ("b.m", "c.m"), checks=(("a.m", "b.k"), ("c.k", "a.v"))),
}
ROWS = st.lists(
    st.tuples(
        st.sampled_from([None, 0, 1, 2]),
        st.sampled_from([None, "", "x", "yy"]),
        st.sampled_from([None, 0, 1]),
        st.integers(0, 5),
    ),
    max_size=5,
)
QUICK = settings(deadline=None, derandomize=True, database=None, max_examples=25)


@pytest.mark.parametrize("name", GRAPHS)
@QUICK
@given(
    state=st.fixed_dictionaries(dict.fromkeys("abcd", ROWS)),
    iterative=st.booleans(),
    chunk=st.integers(1, 9),
    budget=st.sampled_from([1, 100, 400, 1 << 20]),
)
def test_every_driver_finds_what_nested_loops_find(
    name: str, state: dict[str, list[Row]], iterative: bool, chunk: int, budget: int
) -> None:
    query = GRAPHS[name]
    expected = naive(query, state)
    for alias in query.aliases:
        loop = Loop(plan_of(query), state, iterative, chunk, budget)
        assert Counter(loop.drive(alias.name)) == expected, alias.name


def test_a_hot_key_is_multiplied_out_in_chunks() -> None:
    state = {n: [(1, "x", 1, i) for i in range(30)] for n in "abcd"}
    loop = Loop(plan_of(GRAPHS["one key"]), state, chunk=100)
    assert len(loop.drive("a")) == 27_000
    assert loop.largest == 100


def test_between_tasks_only_the_columns_still_needed_travel() -> None:
    state = {n: [(1, "x", 1, i) for i in range(2)] for n in "abcd"}
    loop = Loop(plan_of(graph(("a.k", "b.k"), ("b.m", "c.m"), ("c.k", "d.k"), outputs="ad")), state)
    loop.drive("a")
    assert [table.column_names for _, table in loop.shipped[:1]] == [[HASH, "0.v"]]
    # c's own columns have served; what c carries on to d is the hash of its k.
    assert loop.shipped[-1][1].column_names == [HASH, "0.v"]


def test_a_null_key_does_not_travel() -> None:
    state = {"a": [(1, "x", 1, 0)], "b": [(1, "x", None, 0), (1, "x", 1, 1)], "c": [(1, "x", 1, 0)], "d": []}
    loop = Loop(plan_of(GRAPHS["chain"]), state)
    loop.drive("a")
    assert [table.num_rows for _, table in loop.shipped] == [1]


def test_a_key_without_a_match_is_dropped_before_a_row_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"a": [(i, "x", 1, i) for i in range(9)], "b": [(i, "x", 1, i) for i in range(9)], "c": [(3, "x", 1, 7)]}
    read = []
    original = Matches.read
    monkeypatch.setattr(Matches, "read", lambda self: read.append(int(self.counts.sum())) or original(self))
    loop = Loop(plan_of(GRAPHS["one key"]), {**state, "d": []})
    assert loop.drive("a") == [(3, 3, 7)]
    assert read == [1, 1]
    counted = {c.lookups for c in loop.prober.counts.values()}
    assert counted == {9}


def test_edge_counts_are_lookups_hits_and_rows() -> None:
    state = {"a": [(1, "", 0, 0), (2, "", 0, 0)], "b": [(1, "", 0, 0)] * 3, "c": [(1, "", 0, 0)], "d": []}
    loop = Loop(plan_of(GRAPHS["one key"]), state)
    loop.drive("a")
    first = next(t for t in loop.plan.trees if t.relation == "a").nodes[0]
    count = loop.prober.counts[first.id]
    assert (count.lookups, count.hits, count.rows) == (2, 1, 3)


def test_a_filter_bit_hides_rows_of_other_queries() -> None:
    plan = plan_of(graph(("a.k", "b.k")))

    class Masked(Loop):
        def runs(self, step: Step, times: object = None, hashes: object = None) -> list[View]:
            found = []
            for view in super().runs(step, times):
                assert isinstance(view.run, MemoryRun)
                masked = view.run.table.append_column(MASK, pa.array([1, 2, 3][: len(view.hashes)]))
                known = {f: Filter(f, str(f)) for f in (7, 9)}
                found.append(View(MemoryRun(view.hashes, masked), Sets(bits=(7, 9)), 0, known))
            return found

    state = {"a": [(1, "", 0, 9)], "b": [(1, "", 0, i) for i in range(6)], "c": [], "d": []}
    for wanted, expected in ((7, [0, 2, 3, 5]), (9, [1, 2, 4, 5])):
        trees = [
            replace(t, nodes=tuple(replace(n, step=replace(n.step, seen=(Seen(wanted, None, 1),))) for n in t.nodes))
            for t in plan.trees
        ]
        loop = Masked(replace(plan, trees=tuple(trees)), state)
        assert sorted(b for _, b in loop.drive("a")) == expected


@QUICK
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=6), st.integers(1, 7))
def test_a_frame_expands_to_the_product_of_its_lists(sizes: list[tuple[int, int]], chunk: int) -> None:
    # Key g has sizes[g][0] + 1 driving tuples and sizes[g][1] matching rows.
    hashes = np.repeat(np.arange(len(sizes), dtype=np.uint64), [s[0] + 1 for s in sizes])
    base = Partial(hashes, (Slot(pa.table({"n": np.arange(len(hashes))})),))
    frame = Frame.of(base)
    counts = np.array([s[1] for s in sizes], np.int64)
    table = pa.table({"m": np.arange(int(counts.sum()))})
    matches = Matches(counts, ("m",), [], table, np.cumsum(counts) - counts)
    parts = list(replace(frame, lists=(matches,)).expanded(chunk, 1 << 20))
    assert all(len(p.hashes) <= chunk for p in parts)
    found = [
        pair
        for p in parts
        for pair in zip(
            p.hashes.tolist(),
            p.column(SlotColumn(0, "n")).to_pylist(),
            p.column(SlotColumn(1, "m")).to_pylist(),
            strict=True,
        )
    ]
    owners = np.repeat(np.arange(len(sizes)), counts)
    expected = [(h, n, m) for n, h in enumerate(hashes.tolist()) for m, o in enumerate(owners.tolist()) if o == h]
    assert sorted(found) == sorted(expected)
    assert [h for h, _, _ in found] == sorted(h for h, _, _ in found)
