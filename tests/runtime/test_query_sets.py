"""Query sets: hundreds of queries of one structure in one tree, each with its own rows."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.config import Config
from plait.kernels.sets import members_in, translated, union_of, weights_in, within
from plait.order.orders import fixed
from plait.query.expr import Call, ColumnRef, Expr, Literal
from plait.query.graph import Alias, Equality, JoinGraph, Output, Window
from plait.query.plan import Node, Plan, Seen, SlotColumn, Span, Step
from plait.query.relation import ColumnDef, Relation
from plait.query.store import MASK_BITS, Filter, mask_columns
from plait.runtime.driver.sinks import Noop
from plait.runtime.task.frames import Frame
from plait.runtime.task.judge import Judge
from plait.runtime.task.partial import Partial, Slot
from plait.share.probe_trees import build_plan
from plait.state.segments.filter_sets import Sets, packed
from plait.state.segments.run import MemoryRun
from plait.state.segments.sieve import Sieve, as_words
from plait.state.segments.view import View
from plait.testing import LocalEngine

COLUMNS = (("k", "bigint"), ("m", "bigint"), ("v", "bigint"), ("ts", "timestamp"))
RELATIONS = {n: Relation(n, COLUMNS) for n in "abc"}
QUICK = settings(deadline=None, derandomize=True, database=None, max_examples=60)


def ref(text: str) -> ColumnRef:
    alias, column = text.split(".")
    return ColumnRef(alias, column, dict(COLUMNS)[column])


def chain(filters: dict[str, str], window_us: int | None = None) -> JoinGraph:
    """a ⋈ b on k, b ⋈ c on m, so that tuples travel."""
    columns = tuple(ColumnDef(c, f"`{c}`", t) for c, t in COLUMNS)
    windows = () if window_us is None else (Window(ref("a.ts"), ref("b.ts"), -window_us, window_us),)
    return JoinGraph(
        "",
        tuple(Alias(n, n, filters.get(n), columns) for n in "abc"),
        (Equality(ref("a.k"), ref("b.k")), Equality(ref("b.m"), ref("c.m"))),
        tuple(Output(f"{n}v", "bigint", ref(f"{n}.v"), "", (ref(f"{n}.v"),)) for n in "abc"),
        windows,
    )


def meaning(text: str) -> Expr:
    """`v < 7`, `v IS NULL`, `true`, `false`, `null`."""
    if text in ("true", "false"):
        # k has no NULLs.
        return Call("isnotnull" if text == "true" else "isnull", (ColumnRef("", "k", "bigint"),), "boolean")
    column = ColumnRef("", "v", "bigint")
    if text == "null":
        return Call("<", (column, Literal(None, "bigint")), "boolean")
    if text == "v IS NULL":
        return Call("isnull", (column,), "boolean")
    _, op, number = text.split()
    return Call(op, (column, Literal(int(number), "bigint")), "boolean")


def passes(text: str | None, v: int | None) -> bool:
    if text is None or text in ("true", "false", "null"):
        return text in (None, "true")
    if text == "v IS NULL":
        return v is None
    _, op, number = text.split()
    return v is not None and (v < int(number) if op == "<" else v >= int(number))


Row = tuple[int, int, int | None, int]


def table(rows: list[Row]) -> pa.Table:
    kinds = (pa.int64(), pa.int64(), pa.int64(), pa.timestamp("us", "UTC"))
    return pa.table(
        [pa.array(c, k) for c, k in zip(zip(*rows, strict=True), kinds, strict=True)], names=["k", "m", "v", "ts"]
    )


def drawn(seed: int, size: int) -> list[Row]:
    rng = np.random.default_rng(seed)
    return [
        (int(rng.integers(6)), int(rng.integers(6)), None if rng.random() < 0.1 else int(rng.integers(200)), int(t))
        for t in rng.integers(0, 300, size)
    ]


def expected(query: JoinGraph, window_us: int | None, rows: dict[str, list[Row]]) -> Counter[Any]:
    texts = {alias.name: alias.filter for alias in query.aliases}
    mine = {n: [r for r in rows[n] if passes(texts[n], r[2])] for n in "abc"}
    return Counter(
        (a[2], b[2], c[2])
        for a in mine["a"]
        for b in mine["b"]
        if a[0] == b[0] and (window_us is None or abs(a[3] - b[3]) <= window_us)
        for c in mine["c"]
        if b[1] == c[1]
    )


def queries(count: int, windows: bool) -> dict[str, tuple[JoinGraph, int | None]]:
    """Filters that differ in every stream, some that let all or nothing pass, one for NULLs, one without any."""
    found: dict[str, tuple[JoinGraph, int | None]] = {}
    special: list[dict[str, str]] = [{}, {"a": "true"}, {"b": "false"}, {"c": "v IS NULL"}, {"a": "null"}]
    for i in range(count):
        texts = {"a": f"v < {200 - i}", "b": f"v >= {i // 4}", "c": f"v < {100 + i}"}
        window = 20 + 5 * (i % 40) if windows and i % 5 else None
        found[f"q{i}"] = chain(special[i] if i < len(special) else texts, window), window
    return found


def plan_of(graphs: dict[str, JoinGraph]) -> Plan:
    return build_plan(graphs, RELATIONS, {n: fixed(g) for n, g in graphs.items()}, tuple(RELATIONS))


@pytest.mark.parametrize(("count", "windows", "tasks"), [(200, False, 2), (70, True, 1), (140, True, 3)])
def test_oracle_hundreds_of_queries_with_filters_of_their_own_get_their_own_rows(
    tmp_path: Path, count: int, windows: bool, tasks: int
) -> None:
    asked = queries(count, windows)
    graphs = {name: graph for name, (graph, _) in asked.items()}
    plan = plan_of(graphs)
    # One way for all of them, whatever they filter.
    assert {len(tree.members) for tree in plan.trees} == {count}
    assert sum(1 for tree in plan.trees for top in tree.nodes for _ in top.walk()) == 6
    texts = {alias.filter for graph in graphs.values() for alias in graph.aliases if alias.filter is not None}
    predicates = {text: meaning(text) for text in texts}
    rows: dict[str, list[Row]] = {n: [] for n in "abc"}
    totals: dict[str, Counter[Any]] = {name: Counter() for name in asked}
    with LocalEngine(tmp_path, plan, Config(tasks=tasks, sync=False), predicates=predicates) as engine:
        for epoch in range(3):
            new = {n: drawn(100 * epoch + i, 20) for i, n in enumerate("abc")}
            for n in "abc":
                rows[n] += new[n]
            for name, found in engine.run({n: table(r) for n, r in new.items()}).items():
                totals[name] += Counter(zip(*(c.to_pylist() for c in found.columns), strict=True))
            for name, (graph, window) in asked.items():
                assert totals[name] == expected(graph, window, rows), (name, epoch)
        # One file per epoch and task for all of them; the queries that see every row show how much is written.
        files = {file.path: file for found in engine.results.files.values() for file in found}
        assert len(files) <= 3 * tasks
        assert len(engine.results.files) > count // 2
        written = sum(pq.read_metadata(engine.checkpoint.results.where(path)).num_rows for path in files)
        assert written == sum(file.rows for file in engine.results.files["q0"])


def test_rows_that_are_dropped_are_counted_for_each_query(tmp_path: Path) -> None:
    asked = queries(100, True)
    graphs = {name: graph for name, (graph, _) in asked.items()}
    texts = {alias.filter for graph in graphs.values() for alias in graph.aliases if alias.filter is not None}
    rows = {n: drawn(i, 60) for i, n in enumerate("abc")}
    plan = plan_of(graphs)
    with LocalEngine(tmp_path, plan, Config(tasks=2, sync=False), predicates={t: meaning(t) for t in texts}) as engine:
        engine.change(sinks={name: Noop() for name in asked})
        engine.run({n: table(r) for n, r in rows.items()})
        counted = engine.progress[-1]["rows_out"]
    assert counted == {name: sum(expected(graph, window, rows).values()) for name, (graph, window) in asked.items()}


def test_without_clearing_bits_queries_would_get_rows_of_others(tmp_path: Path) -> None:
    """The sets decide: a plan in which every member sees every row gives wrong answers."""
    asked = queries(12, False)
    graphs = {name: graph for name, (graph, _) in asked.items()}
    texts = {alias.filter for graph in graphs.values() for alias in graph.aliases if alias.filter is not None}

    def blind(node: Node) -> Node:
        step = replace(node.step, seen=(Seen(None, None, node.members),))
        return replace(node, step=step, children=tuple(map(blind, node.children)))

    plan = plan_of(graphs)
    plan = replace(plan, trees=tuple(replace(t, nodes=tuple(map(blind, t.nodes))) for t in plan.trees))
    rows = {n: drawn(i, 40) for i, n in enumerate("abc")}
    with LocalEngine(tmp_path, plan, predicates={t: meaning(t) for t in texts}) as engine:
        found = engine.run({n: table(r) for n, r in rows.items()})
    assert any(found[name].num_rows != sum(expected(graph, None, rows).values()) for name, (graph, _) in asked.items())


# ---------------------------------------------------------------- the parts


@QUICK
@given(
    st.lists(st.tuples(st.integers(0, 139), st.integers(0, (1 << 140) - 1)), min_size=1, max_size=12),
    st.lists(st.integers(0, (1 << 140) - 1), max_size=6),
)
def test_oracle_a_sieve_is_the_union_of_the_members_whose_filters_a_row_passes(
    seen: list[tuple[int, int]], masks: list[int]
) -> None:
    ids = tuple(1000 + i for i in range(140))
    known = {id: Filter(id, str(id)) for id in ids}
    flags = [np.array([mask >> i & 1 == 1 for mask in masks], np.bool_) for i in range(140)]
    words = dict(zip(mask_columns(140), map(pa.array, packed(flags, len(masks))), strict=True))
    run = MemoryRun(np.arange(len(masks), dtype=np.uint64), pa.table(words))
    view = View(run, Sets(bits=ids), 0, known)
    sieve = Sieve(tuple(Seen(ids[i], None, members) for i, members in seen), 3)
    found = sieve.of_all(view)
    for row, mask in enumerate(masks):
        whole = 0
        for i, members in seen:
            whole |= members if mask >> i & 1 else 0
        assert found[row].tolist() == as_words(whole, 3).tolist()
    assert len(words) == -(-140 // MASK_BITS)


SETS = st.lists(st.integers(0, (1 << 70) - 1), min_size=1, max_size=9)


@QUICK
@given(SETS, st.integers(0, (1 << 70) - 1))
def test_oracle_bit_loops_are_those_of_python(values: list[int], members: int) -> None:
    sets = np.stack([as_words(v, 2) for v in values])
    assert within(sets, as_words(members, 2)).tolist() == [v & members != 0 for v in values]
    assert members_in(sets).tolist() == [sum(v >> bit & 1 for v in values) for bit in range(128)]
    weights = np.arange(len(values)) - 1
    assert weights_in(sets, weights).tolist() == [
        sum((v >> bit & 1) * (i - 1) for i, v in enumerate(values)) for bit in range(128)
    ]
    half = len(values) // 2
    union = union_of(sets, np.array([0, half]), np.array([half, len(values) - half]))
    for found, part in zip(union, (values[:half], values[half:]), strict=True):
        whole = 0
        for v in part:
            whole |= v
        assert found.tolist() == as_words(whole, 2).tolist()


def test_translating_no_rows_gives_no_sets() -> None:
    assert translated(np.empty((0, 2), np.int64), np.zeros((16, 256, 3), np.uint64)).shape == (0, 3)


BOUNDS = st.one_of(st.none(), st.integers(-5, 5))
EDGE = 2**63 - 1


@QUICK
@given(
    st.lists(st.tuples(BOUNDS, BOUNDS).filter(lambda b: b != (None, None)), min_size=1, max_size=5),
    st.lists(
        st.tuples(*[st.one_of(st.none(), st.integers(-4, 4), st.sampled_from([EDGE, -EDGE]))] * 2),
        min_size=1,
        max_size=12,
    ),
)
def test_oracle_windows_of_many_lengths_keep_a_tuple_for_those_in_whose_window_it_lies(
    bounds: list[tuple[int | None, int | None]], times: list[tuple[int | None, int | None]]
) -> None:
    # Member 0 has no window; member i + 1 has bounds[i].
    span = Span(SlotColumn(1, "t"), SlotColumn(0, "t"), tuple((lo, hi, 2 << i) for i, (lo, hi) in enumerate(bounds)))
    everyone = (2 << len(bounds)) - 1
    columns = [pa.table({"t": pa.array(side, pa.timestamp("us"))}) for side in zip(*times, strict=True)]
    partial = Partial(np.arange(len(times), dtype=np.uint64), tuple(map(Slot, columns)))
    step = Step("b[k]", (), 1, True, False, spans=(span,))
    judge = Judge(step, everyone, 1)
    (found,) = Frame.of(partial, grouped=False).expanded(100, 1 << 20, judge)
    assert judge.tuples == len(times)
    assert found.sets is not None
    assert found.hashes.tolist() == list(range(len(times)))
    for (right, left), mine in zip(times, found.sets.ravel().tolist(), strict=True):
        known = left is not None and right is not None
        gap = left - right if left is not None and right is not None else 0
        inside = [known and (lo is None or gap >= lo) and (hi is None or gap <= hi) for lo, hi in bounds]
        assert mine == 1 + sum(2 << i for i, yes in enumerate(inside) if yes)
