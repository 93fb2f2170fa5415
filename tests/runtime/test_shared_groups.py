"""Partial rows that queries share: each query's groups are those of its own rows, whatever the others' sets are."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.order.orders import fixed
from plait.query.expr import Call, ColumnRef, Literal
from plait.query.graph import JoinGraph
from plait.query.grouping import COUNT, MAX, MIN, SUM, Grouping, GroupKey, GroupValue
from plait.query.plan import Emit, Plan, SlotColumn
from plait.runtime.driver import commit as commits
from plait.runtime.task.file_sets import query_table
from plait.runtime.task.group_writer import merged
from plait.runtime.task.partial import Partial, Slot
from plait.runtime.task.shared_groups import SharedGroupWriter, each_query, fewest, groups_of_all
from plait.runtime.task.shared_results import SHARED, Share, alike, rounds
from plait.share.probe_trees import build_plan
from plait.state.files.storage import LocalFiles
from plait.state.log.manifest import ResultFile
from plait.state.segments.sieve import as_words
from plait.testing import LocalEngine
from tests.runtime.test_query_sets import expected
from tests.runtime.test_shared_results import (
    FILTERS,
    FORGETFUL,
    GRAPHS,
    arriving,
    change,
    in_force,
    on_disk,
    started,
    step,
    wrong,
)

AV, BV, CV = (ColumnRef(alias, "v", "bigint") for alias in "abc")
PARITY = Call("mod", (BV, Literal(2, "bigint")), "bigint")
GROUPING = Grouping(
    (GroupKey("g0", PARITY),),
    (
        GroupValue("p0", COUNT, None, "bigint"),
        GroupValue("p1", SUM, AV, "bigint"),
        GroupValue("p2", MIN, CV, "bigint"),
        GroupValue("p3", MAX, AV, "bigint"),
        GroupValue("p4", COUNT, CV, "bigint"),
    ),
)
GROUPED = {name: replace(graph, grouping=GROUPING) for name, graph in GRAPHS.items()}
BY_VALUE = replace(GROUPING, keys=(GroupKey("g0", AV),))
Row = tuple[Any, ...]


def grouped_plan(names: list[str] | tuple[str, ...], graphs: dict[str, JoinGraph] = GROUPED) -> Plan:
    mine = {name: graphs[name] for name in names}
    return build_plan(mine, FORGETFUL, {n: fixed(g) for n, g in mine.items()}, tuple(FORGETFUL))


@pytest.fixture(autouse=True)
def _aggregates(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engines of `test_shared_results`, with the same groups above their queries."""
    monkeypatch.setattr("tests.runtime.test_shared_results.plan_of", grouped_plan)


def groups_of(rows: Counter[Row]) -> set[Row]:
    """What GROUPING makes of joined rows, in plain Python."""
    found: dict[int | None, list[Row]] = defaultdict(list)
    for av, bv, cv in rows.elements():
        found[None if bv is None else bv % 2].append((av, cv))
    return {
        (
            key,
            len(members),
            sum(a for a, _ in members if a is not None) if any(a is not None for a, _ in members) else None,
            min((c for _, c in members if c is not None), default=None),
            max((a for a, _ in members if a is not None), default=None),
            sum(c is not None for _, c in members),
        )
        for key, members in found.items()
    }


def due(query: str, epochs: range | list[int]) -> set[Row]:
    rows: Counter[Row] = Counter()
    for epoch in epochs:
        rows += expected(GRAPHS[query], None, arriving(epoch))
    return groups_of(rows)


def kept(directory: Path) -> dict[str, set[Row]]:
    """The groups in force, as somebody sees them who only has the files."""
    found = {}
    for query, files in in_force(directory).items():
        parts = []
        for file in files:
            assert file.grouped
            rows = query_table(str(directory / "results" / file.path), file.bit)
            assert rows.num_rows == file.rows > 0
            assert file.bit is None or rows.nbytes <= file.unpacked
            assert rows.column_names == list(GROUPING.names)
            parts.append(rows)
        found[query] = rows_of(merged(parts, GROUPING))
    return found


def rows_of(table: pa.Table | None) -> set[Row]:
    assert table is not None
    rows = [tuple(row.values()) for row in table.to_pylist()]
    assert len(set(rows)) == len(rows)
    return set(rows)


@pytest.mark.parametrize("tasks", [1, 2])
def test_groups_are_written_once_for_all_queries_of_a_structure(tmp_path: Path, tasks: int) -> None:
    with started(tmp_path, list(GRAPHS), tasks) as engine:
        for _ in range(3):
            step(engine)
        assert sum(p["rows_out"]["q0"] for p in engine.progress) == sum(
            expected(GRAPHS["q0"], None, arriving(epoch)).total() for epoch in range(3)
        )
    assert kept(tmp_path) == {query: due(query, range(3)) for query in GRAPHS}
    every = {file.path for files in in_force(tmp_path).values() for file in files}
    assert on_disk(tmp_path) == every
    assert all(path.startswith(f"{SHARED}/") for path in every)
    assert len(every) <= 3 * tasks
    written = sum(pq.read_metadata(tmp_path / "results" / path).num_rows for path in every)
    assert written <= sum(file.rows for files in in_force(tmp_path).values() for file in files)


def test_queries_that_make_other_groups_do_not_share() -> None:
    graphs = {**GROUPED, "by_value": replace(GRAPHS["q1"], grouping=BY_VALUE), "rows": GRAPHS["q3"]}
    graphs["more_rows"] = GRAPHS["q4"]
    found = {frozenset(group) for group in alike(grouped_plan(list(graphs), graphs), set(graphs))}
    assert found == {frozenset(GROUPED), frozenset({"rows", "more_rows"})}


@pytest.mark.parametrize("seed", range(3))
def test_whatever_happens_every_query_has_its_groups(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queries come and go, drivers die before and after the commit; garbage is collected all the time."""
    rng = random.Random(seed)
    plain, dying = commits.append, [""]

    def append(checkpoint: Any, live: Any, manifest: Any) -> Any:
        if dying[0] == "before":
            raise RuntimeError("killed")
        state = plain(checkpoint, live, manifest)
        if dying[0] == "after":
            raise RuntimeError("killed")
        return state

    monkeypatch.setattr(commits, "append", append)
    names, tasks = ["q0", "q1", "q2"], rng.choice([1, 2])
    there: dict[str, list[int]] = {}
    engine = started(tmp_path, names, tasks)
    for number in range(20):
        if rng.random() < 0.3:
            names = sorted(rng.sample(sorted(FILTERS), rng.randint(1, 4)))
            change(engine, names)
        dying[0] = rng.choice(["", "", "", "before", "after"])
        if dying[0]:
            with pytest.raises(RuntimeError, match="killed"):
                step(engine)
            engine.close()
            crashed, dying[0] = dying[0], ""
            engine = started(tmp_path, names, tasks)
            if crashed == "before":
                step(engine)
        else:
            step(engine)
        there = {name: [*there.get(name, []), number] for name in names}
        rows = kept(tmp_path)
        assert {name: rows.get(name, set()) for name in names} == {name: due(name, there[name]) for name in names}
        assert not set(rows) - set(names)
    engine.close()
    assert not wrong(tmp_path)


# ---------------------------------------------------------------- the parts

SUMS = Grouping(
    (GroupKey("g0", ColumnRef("", "k", "bigint")),),
    (GroupValue("p0", SUM, ColumnRef("", "x", "bigint"), "bigint"), GroupValue("p1", COUNT, None, "bigint")),
)
ALL = replace(SUMS, keys=())
QUERIES = 70
CHUNK = st.lists(
    st.tuples(st.sampled_from([0, 1, None]), st.none() | st.integers(-9, 9), st.integers(0, (1 << QUERIES) - 1)),
    min_size=1,
    max_size=12,
)


def chunk_of(rows: list[tuple[Any, Any, int]]) -> Partial:
    table = pa.table({"k": pa.array([k for k, _, _ in rows], pa.int64()), "x": pa.array([x for _, x, _ in rows])})
    table = table.set_column(1, "x", table.column("x").cast(pa.int64()))
    sets = np.stack([as_words(members, 2) for *_, members in rows])
    return Partial(np.arange(len(rows), dtype=np.uint64), (Slot(table),), sets)


def sums_of(grouping: Grouping, rows: list[tuple[Any, Any]]) -> set[Row]:
    found: dict[tuple[Any, ...], list[Any]] = defaultdict(list)
    for k, x in rows:
        found[(k,) if grouping.keys else ()].append(x)
    return {
        (*key, sum(x for x in values if x is not None) if any(x is not None for x in values) else None, len(values))
        for key, values in found.items()
    }


@settings(deadline=None, derandomize=True, database=None, max_examples=40)
@given(chunks=st.lists(CHUNK, min_size=1, max_size=4), limit=st.sampled_from([0, 1 << 20]), keys=st.booleans())
def test_oracle_a_query_s_groups_are_those_with_its_bit(
    tmp_path_factory: pytest.TempPathFactory, chunks: list[list[tuple[Any, Any, int]]], limit: int, keys: bool
) -> None:
    folder, grouping = tmp_path_factory.mktemp("groups"), SUMS if keys else ALL
    queries = [f"q{i}" for i in range(QUERIES)]
    writer = SharedGroupWriter(queries, ["k", "x"], grouping, LocalFiles(str(folder), False), False, limit)
    shares = {query: Share(query, writer) for query in queries}
    # A query's member is not its place.
    emits = [Emit(f"q{i}", (SlotColumn(0, "k"), SlotColumn(0, "x")), (), QUERIES - 1 - i) for i in range(QUERIES)]
    for chunk in chunks:
        for together, some in rounds([(shares[emit.query], emit) for emit in emits]):
            together.write(some, chunk_of(chunk))
    for emit in emits:
        mine = [(k, x) for chunk in chunks for k, x, members in chunk if members >> emit.member & 1]
        files = shares[emit.query].close()
        parts = [query_table(str(folder / file.path), file.bit) for file in files]
        assert shares[emit.query].rows == len(mine)
        assert [part.num_rows for part in parts] == [file.rows for file in files]
        assert all(part.nbytes <= file.unpacked for part, file in zip(parts, files, strict=True))
        if mine or parts:
            assert rows_of(merged(parts, grouping)) == sums_of(grouping, mine)


def test_many_sets_become_rows_of_each_query(tmp_path: Path) -> None:
    """Each row has another set: with sets that would be a row per joined row, apart it is a group per query."""
    rng = np.random.default_rng(1)
    rows = [(int(rng.integers(2)), 1, int(rng.integers(1, 1 << 10))) for _ in range(400)]
    files = written(tmp_path, 10, rows)
    assert {file.path for found in files.values() for file in found} == {next(iter(files.values()))[0].path}
    path = tmp_path / files["q0"][0].path
    assert pq.read_metadata(path).num_rows == sum(found[0].rows for found in files.values()) == 20


def test_few_sets_stay_sets(tmp_path: Path) -> None:
    rows = [(i % 2, 1, (1 << 10) - 1 if i % 3 else 7) for i in range(400)]
    files = written(tmp_path, 10, rows)
    assert pq.read_metadata(tmp_path / files["q0"][0].path).num_rows == 4
    assert [found[0].rows for found in files.values()] == [4] * 3 + [2] * 7


def written(folder: Path, queries: int, rows: list[tuple[Any, Any, int]]) -> dict[str, list[ResultFile]]:
    names = [f"q{i}" for i in range(queries)]
    writer = SharedGroupWriter(names, ["k", "x"], SUMS, LocalFiles(str(folder), False), False, 1 << 20)
    emits = [Emit(name, (SlotColumn(0, "k"), SlotColumn(0, "x")), (), i) for i, name in enumerate(names)]
    writer.write(emits, chunk_of(rows))
    return writer.close()


def test_groups_of_all_queries_are_counted_and_made() -> None:
    table = pa.table({"g0": [None, 1, 1], "p0": [5, 6, 7], "p1": [1, 1, 1]})
    sets = np.array([[0b11], [0b01], [0b11]], np.uint64)
    assert groups_of_all(table, sets, SUMS) == 4
    found = each_query(table, sets, SUMS)
    assert rows_of(found) == {(0, None, 5, 1), (1, None, 5, 1), (0, 1, 13, 2), (1, 1, 7, 1)}
    assert fewest(table, sets, SUMS)[0] is table
    nothing = each_query(table.slice(0, 0), sets[:0], SUMS)
    assert nothing is not None
    assert nothing.num_rows == groups_of_all(table.slice(0, 0), sets[:0], SUMS) == 0


def test_what_cannot_be_grouped_is_kept_as_rows_with_sets(tmp_path: Path) -> None:
    """A sum that might not fit: Spark says what becomes of it, for each query alone."""
    rows = [(1, 2**62, 0b01), (1, 2**62, 0b11), (2, 1, 0b10)]
    files = written(tmp_path, 2, rows)
    assert {(file.grouped, file.rows) for file in files["q0"]} == {(False, 2)}
    assert {(file.grouped, file.rows) for file in files["q1"]} == {(False, 2)}
    (file,) = files["q1"]
    found = query_table(str(tmp_path / file.path), file.bit)
    assert found.to_pylist() == [{"k": 1, "x": 2**62}, {"k": 2, "x": 1}]


def test_a_failed_task_leaves_no_file(tmp_path: Path) -> None:
    writer = SharedGroupWriter(["p", "q"], ["k", "x"], SUMS, LocalFiles(str(tmp_path), False), False, 0)
    emits = [Emit(name, (SlotColumn(0, "k"), SlotColumn(0, "x")), (), i) for i, name in enumerate("pq")]
    writer.write(emits, chunk_of([(1, 2, 3)]))
    writer.write(emits, chunk_of([(1, 2**62, 3)] * 2))
    assert list(tmp_path.rglob("*.parquet"))
    writer.abandon()
    assert not list(tmp_path.rglob("*.parquet"))


def test_a_query_alone_has_its_own_groups_without_sets(tmp_path: Path) -> None:
    with started(tmp_path, ["q3"]) as engine:
        assert isinstance(engine, LocalEngine)
        step(engine)
    assert [(file.bit, file.grouped) for file in in_force(tmp_path)["q3"]] == [(None, True)]
    assert not any(path.startswith(SHARED) for path in on_disk(tmp_path))
    assert kept(tmp_path) == {"q3": due("q3", range(1))}
