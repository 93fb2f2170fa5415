"""Result files that queries share: a row is written once, each query reads its own, and nobody loses a file."""

from __future__ import annotations

import random
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
from plait.errors import QueryError
from plait.order.orders import fixed
from plait.query.expr import Call, ColumnRef, Literal
from plait.query.graph import JoinGraph
from plait.query.plan import Emit, Plan, SlotColumn
from plait.query.relation import Relation
from plait.runtime.driver import commit as commits
from plait.runtime.driver import result_merge
from plait.runtime.driver.result_merge import FAN_IN
from plait.runtime.driver.sinks import Keep, Noop, Parquet, Sink
from plait.runtime.task.file_sets import mapped, query_table, row_bytes
from plait.runtime.task.partial import Partial, Slot
from plait.runtime.task.shared_results import SHARED, Share, SharedWriter, alike, rounds
from plait.share.probe_trees import build_plan
from plait.state.files.storage import LocalFiles
from plait.state.log.inspect import Finding, Inspection
from plait.state.log.manifest import ManifestLog, ResultFile
from plait.state.segments.sieve import as_words
from plait.testing import LocalEngine
from tests.runtime.test_query_sets import COLUMNS, chain, drawn, expected, meaning, table

FORGETFUL = {n: Relation(n, COLUMNS, ttl_us=1) for n in "abc"}
"""Rows meet those of their own epoch only, so that an epoch's results are known whatever was there before."""
FILTERS = {
    "q0": {},
    "q1": {"a": "v < 150"},
    "q2": {"a": "v < 150"},
    "q3": {"b": "v >= 60", "c": "v < 120"},
    "q4": {"a": "v >= 150"},
}
GRAPHS = {name: chain(dict(texts)) for name, texts in FILTERS.items()}
PREDICATES = {text: meaning(text) for texts in FILTERS.values() for text in texts.values()}


class Sent(Noop):
    """A sink that takes rows and keeps none."""

    reads_rows = True
    delivers = True


class Failing(Sent):
    """A sink that cannot take rows now."""

    def deliver(self, epoch: int, files: list[str], rows: Any) -> None:
        raise RuntimeError("not now")


def plan_of(names: list[str] | tuple[str, ...], graphs: dict[str, JoinGraph] = GRAPHS) -> Plan:
    mine = {name: graphs[name] for name in names}
    return build_plan(mine, FORGETFUL, {n: fixed(g) for n, g in mine.items()}, tuple(FORGETFUL))


class Ticking:
    """Every epoch is a second after the one before, also after a restart."""

    def __init__(self, directory: Path) -> None:
        last = ManifestLog(LocalFiles(str(directory), False)).last()
        self.now = 1_600_000_000_000_000 + (0 if last is None else last + 1) * 1_000_000

    def __call__(self) -> int:
        self.now += 1_000_000
        return self.now


def started(directory: Path, names: list[str] | tuple[str, ...], tasks: int = 1, **sinks: Sink) -> LocalEngine:
    config = Config(
        sync=False, on_query_error="stop", tasks=tasks, replan_epochs=0, snapshot_every=2, gc_grace_seconds=0
    )
    clock: Any = Ticking(directory)
    engine = LocalEngine(directory, plan_of(names), config, clock=clock, predicates=PREDICATES)
    engine.change(sinks={name: sinks.get(name, Keep()) for name in names})
    return engine


def arriving(epoch: int) -> dict[str, Any]:
    return {n: drawn(1000 * epoch + i, 12) for i, n in enumerate("abc")}


def step(engine: LocalEngine) -> None:
    engine.run({n: table(rows) for n, rows in arriving(engine.live.epoch + 1).items()})


def change(engine: LocalEngine, names: list[str] | tuple[str, ...], **sinks: Sink) -> None:
    engine.change(plan=plan_of(names), sinks={name: sinks.get(name, Keep()) for name in names})


def in_force(directory: Path) -> dict[str, tuple[ResultFile, ...]]:
    return ManifestLog(LocalFiles(str(directory), False)).results()


def kept(directory: Path) -> dict[str, Counter[Any]]:
    """The rows in force, as somebody sees them who only has the files."""
    found: dict[str, Counter[Any]] = {}
    for query, files in in_force(directory).items():
        found[query] = Counter()
        assert len({file.path for file in files}) == len(files)
        for file in files:
            rows = query_table(str(directory / "results" / file.path), file.bit)
            assert rows.num_rows == file.rows > 0
            assert file.bit is None or rows.nbytes <= file.unpacked
            assert rows.column_names == ["av", "bv", "cv"]
            found[query].update(zip(*(c.to_pylist() for c in rows.columns), strict=True))
    return found


def due(query: str, epochs: range | list[int]) -> Counter[Any]:
    found: Counter[Any] = Counter()
    for epoch in epochs:
        found += expected(GRAPHS[query], None, arriving(epoch))
    return found


def on_disk(directory: Path) -> set[str]:
    return {str(path.relative_to(directory / "results")) for path in (directory / "results").rglob("*.parquet")}


def paths(directory: Path, query: str) -> set[str]:
    return {file.path for file in in_force(directory).get(query, ())}


def wrong(directory: Path) -> list[Finding]:
    """What is wrong with result files; a local engine has no catalog."""
    return [found for found in Inspection(str(directory)).findings() if found.code.startswith("RESULT")]


# ---------------------------------------------------------------- written once


@pytest.mark.parametrize("tasks", [1, 2])
def test_rows_of_queries_with_the_same_columns_are_written_once(tmp_path: Path, tasks: int) -> None:
    with started(tmp_path, list(GRAPHS), tasks) as engine:
        for _ in range(3):
            step(engine)
    assert kept(tmp_path) == {query: due(query, range(3)) for query in GRAPHS}
    every = {file.path: file for files in in_force(tmp_path).values() for file in files}
    assert on_disk(tmp_path) == set(every)
    assert all(path.startswith(f"{SHARED}/") for path in every)
    assert len(every) <= 3 * tasks
    # The query without filters has every row: the files hold no more than these.
    assert sum(pq.read_metadata(tmp_path / "results" / path).num_rows for path in every) == due("q0", range(3)).total()


def test_two_equal_queries_are_one_file_without_sets(tmp_path: Path) -> None:
    with started(tmp_path, ["q1", "q2"]) as engine:
        step(engine)
    found = in_force(tmp_path)
    assert {file.path for file in found["q1"]} == {file.path for file in found["q2"]} == on_disk(tmp_path)
    assert len(on_disk(tmp_path)) == 1
    assert {file.bit for files in found.values() for file in files} == {None}
    assert pq.read_schema(tmp_path / "results" / found["q1"][0].path).names == ["av", "bv", "cv"]
    assert kept(tmp_path) == {query: due(query, range(1)) for query in ("q1", "q2")}


def test_a_query_alone_has_its_own_files_and_no_sets(tmp_path: Path) -> None:
    with started(tmp_path, ["q3"]) as engine:
        step(engine)
    assert [file.bit for file in in_force(tmp_path)["q3"]] == [None]
    assert not any(path.startswith(SHARED) for path in on_disk(tmp_path))


def test_queries_with_other_columns_do_not_share() -> None:
    renamed = replace(GRAPHS["q1"], outputs=tuple(replace(o, name=o.name.upper()) for o in GRAPHS["q1"].outputs))
    fewer = replace(GRAPHS["q1"], outputs=GRAPHS["q1"].outputs[:2])
    graphs = {**GRAPHS, "renamed": renamed, "fewer": fewer}
    assert [set(group) for group in alike(plan_of(list(graphs), graphs), set(graphs))] == [set(GRAPHS)]
    assert alike(plan_of(["q0", "renamed"], graphs), {"q0", "renamed"}) == []
    # Whose rows are dropped does not matter, nor does who is called like a set.
    assert alike(plan_of(["q0", "q1"]), {"q0"}) == []
    hashed = {n: replace(GRAPHS[n], outputs=(replace(GRAPHS[n].outputs[0], name="#Set0"),)) for n in ("q0", "q1")}
    assert alike(plan_of(["q0", "q1"], hashed), {"q0", "q1"}) == []


def test_a_sink_that_copies_files_has_its_own_unless_all_rows_are_everyone_s(tmp_path: Path) -> None:
    sink = Parquet(str(tmp_path / "out"), sync=False)
    with started(tmp_path / "state", ["q0", "q1", "q3"], q1=sink) as engine:
        step(engine)
    found = in_force(tmp_path / "state")
    assert {file.bit for file in found["q1"]} == {None}
    assert not paths(tmp_path / "state", "q1") & paths(tmp_path / "state", "q0")
    assert paths(tmp_path / "state", "q0") == paths(tmp_path / "state", "q3")
    assert delivered(tmp_path / "out") == due("q1", range(1))
    with started(tmp_path / "equal", ["q1", "q2"], q1=Parquet(str(tmp_path / "other"), sync=False)) as engine:
        step(engine)
    assert len(on_disk(tmp_path / "equal")) == 1
    assert delivered(tmp_path / "other") == due("q1", range(1))


def delivered(directory: Path) -> Counter[Any]:
    rows = pq.read_table(directory)
    assert rows.column_names == ["av", "bv", "cv"]
    return Counter(zip(*(c.to_pylist() for c in rows.columns), strict=True))


def test_a_shared_file_is_split_for_a_sink_that_copies_files(tmp_path: Path) -> None:
    """The sink was another one when the rows were written, and failed."""
    with started(tmp_path / "state", ["q0", "q1", "q3"], q1=Failing()) as engine, pytest.raises(Exception, match="not"):
        step(engine)
    log = ManifestLog(LocalFiles(str(tmp_path / "state"), False))
    manifest = log.read(0)
    assert manifest is not None
    files = [file for file in manifest.results if file.query == "q1"]
    assert [file.bit is None for file in files] == [False]
    with started(tmp_path / "state", ["q0", "q1", "q3"]) as engine:
        sink = Parquet(str(tmp_path / "out"), sync=False)
        with engine.driver.now.rows.apart(files) as copies:
            sink.deliver(0, copies, lambda: None)  # type: ignore[arg-type, return-value]
        assert not any(Path(path).exists() for path in copies)
    assert delivered(tmp_path / "out") == due("q1", range(1))
    assert kept(tmp_path / "state")["q0"] == due("q0", range(1))


# ---------------------------------------------------------------- how long a file lives


def test_a_dropped_query_takes_no_rows_of_others_with_it(tmp_path: Path) -> None:
    with started(tmp_path, ["q0", "q1"]) as engine:
        for _ in range(3):
            step(engine)
        shared = paths(tmp_path, "q1")
        change(engine, ["q0"])
        for _ in range(4):
            step(engine)
        assert "q1" not in in_force(tmp_path)
        assert shared <= on_disk(tmp_path)
        assert kept(tmp_path) == {"q0": due("q0", range(7))}
        # The last one that names them is gone.
        change(engine, ["q3"])
        for _ in range(4):
            step(engine)
        assert not shared & on_disk(tmp_path)
        assert kept(tmp_path) == {"q3": due("q3", range(7, 11))}


def test_queries_that_share_files_share_the_merged_one(tmp_path: Path) -> None:
    with started(tmp_path, ["q0", "q1", "q2", "q3"]) as engine:
        for _ in range(3 * FAN_IN):
            step(engine)
    found = in_force(tmp_path)
    assert {file.tier for files in found.values() for file in files} == {0, 1}
    assert len({file.path for files in found.values() for file in files if file.tier}) == 2
    assert kept(tmp_path) == {query: due(query, range(3 * FAN_IN)) for query in ("q0", "q1", "q2", "q3")}
    assert len({file.path for files in found.values() for file in files}) < 2 + FAN_IN + 1
    assert not wrong(tmp_path)


def test_of_equal_queries_the_merged_file_has_no_sets_either(tmp_path: Path) -> None:
    with started(tmp_path, ["q1", "q2"]) as engine:
        for _ in range(FAN_IN + 2):
            step(engine)
    found = in_force(tmp_path)
    assert {file.bit for files in found.values() for file in files} == {None}
    assert any(file.tier for file in found["q1"])
    assert paths(tmp_path, "q1") == paths(tmp_path, "q2")
    assert kept(tmp_path) == {query: due(query, range(FAN_IN + 2)) for query in ("q1", "q2")}


def test_queries_that_have_not_begun_together_merge_together(tmp_path: Path) -> None:
    with started(tmp_path, ["q0"]) as engine:
        for _ in range(4):
            step(engine)
        change(engine, ["q0", "q1"])
        for _ in range(6):
            step(engine)
        merged = {file.path for file in in_force(tmp_path)["q0"] if file.tier}
        assert merged
        assert paths(tmp_path, "q1") == paths(tmp_path, "q0")
        assert kept(tmp_path) == {"q0": due("q0", range(10)), "q1": due("q1", range(4, 10))}
        for _ in range(20):
            step(engine)
        assert kept(tmp_path) == {"q0": due("q0", range(30)), "q1": due("q1", range(4, 30))}


def test_what_one_query_merges_stays_there_for_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the other one could not take part."""
    plain = result_merge._mergeable

    def of_one(epoch: Any, whole: set[str]) -> dict[str, list[ResultFile]]:
        return {query: files for query, files in plain(epoch, whole).items() if query == "q0"}

    monkeypatch.setattr(result_merge, "_mergeable", of_one)
    with started(tmp_path, ["q0", "q1", "q3"]) as engine:
        for _ in range(2 * FAN_IN + 2):
            step(engine)
        both = in_force(tmp_path)
        assert [file.tier for file in both["q0"]].count(1) == 2
        assert all(file.bit is None for file in both["q0"] if file.tier)
        assert not any(file.tier for file in both["q1"])
        assert paths(tmp_path, "q1") - paths(tmp_path, "q0")
        assert kept(tmp_path) == {query: due(query, range(2 * FAN_IN + 2)) for query in ("q0", "q1", "q3")}
        monkeypatch.undo()
        for _ in range(4):
            step(engine)
        assert any(file.tier for file in in_force(tmp_path)["q1"])
    assert kept(tmp_path) == {query: due(query, range(2 * FAN_IN + 6)) for query in ("q0", "q1", "q3")}


def test_a_file_that_one_sink_has_taken_stays_for_those_who_keep_it(tmp_path: Path) -> None:
    with started(tmp_path, ["q0", "q1", "q3"], q1=Sent(), q3=Sent()) as engine:
        step(engine)
        first = paths(tmp_path, "q1")
        assert first == paths(tmp_path, "q0") == paths(tmp_path, "q3")
        for _ in range(4):
            step(engine)
        assert first <= on_disk(tmp_path)
        assert not first & (paths(tmp_path, "q1") | paths(tmp_path, "q3"))
        assert kept(tmp_path)["q0"] == due("q0", range(5))
        # It is another query's from now on: files that only sinks take go when all have taken them.
        change(engine, ["q1", "q3"], q1=Sent(), q3=Sent())
        for _ in range(4):
            step(engine)
        named = {file.path for files in in_force(tmp_path).values() for file in files}
        assert on_disk(tmp_path) <= named | engine.results.gone.keys()
        assert kept(tmp_path) == {query: due(query, range(8, 9)) for query in ("q1", "q3")}


def test_a_receipt_of_one_query_is_none_of_the_other(tmp_path: Path) -> None:
    with started(tmp_path, ["q0", "q1", "q3"], q1=Sent(), q3=Failing()) as engine:
        with pytest.raises(Exception, match="not now"):
            step(engine)
        assert engine.checkpoint.log.receipt(0) == {"q1"}
    # Whoever has not taken the rows still finds them after a restart.
    with started(tmp_path, ["q0", "q1", "q3"], q1=Sent(), q3=Sent()) as engine:
        assert kept(tmp_path)["q3"] == due("q3", range(1))
        step(engine)
    assert kept(tmp_path)["q3"] == due("q3", range(1, 2))
    assert kept(tmp_path)["q0"] == due("q0", range(2))


@pytest.mark.parametrize("seed", range(4))
def test_whatever_happens_every_query_has_its_rows(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries come and go, sinks change, drivers die before and after the commit; garbage is collected all the time."""
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
    names, sinks, tasks = ["q0", "q1", "q2"], dict[str, Sink](), rng.choice([1, 2])
    there: dict[str, set[int]] = {}
    """By query the epochs whose rows are there; and the one that a sink has taken, until the next is committed."""
    passing: dict[str, int] = {}
    engine = started(tmp_path, names, tasks)
    for number in range(40):
        if rng.random() < 0.25:
            names = sorted(rng.sample(sorted(GRAPHS), rng.randint(1, 4)))
            sinks = {name: Sent() for name in names if rng.random() < 0.3}
            change(engine, names, **sinks)
        dying[0] = rng.choice(["", "", "", "", "before", "after"])
        if dying[0]:
            with pytest.raises(RuntimeError, match="killed"):
                step(engine)
            engine.close()
            crashed, dying[0] = dying[0], ""
            engine = started(tmp_path, names, tasks, **sinks)
            if crashed == "before":
                step(engine)
        else:
            step(engine)
        there = {name: there.get(name, set()) for name in names}
        for name in names:
            # What a sink took in the last epoch stays if the next one keeps rows.
            if name in passing and name in sinks:
                there[name].discard(passing[name])
            there[name].add(number)
        passing = dict.fromkeys(sinks, number)
        rows = kept(tmp_path)
        assert engine.live.epoch == number
        assert engine.checkpoint.log.results() == engine.results.files
        for name in names:
            assert rows.get(name, Counter()) == due(name, sorted(there[name])), (name, number)
        assert not set(rows) - set(names)
    engine.close()
    assert not wrong(tmp_path)


def test_a_damaged_shared_file_is_told_of_once_with_its_queries(tmp_path: Path) -> None:
    with started(tmp_path, list(GRAPHS)) as engine:
        step(engine)
    (path,) = on_disk(tmp_path)
    with open(tmp_path / "results" / path, "ab") as file:
        file.write(b"x")
    (found,) = wrong(tmp_path)
    assert (found.code, found.where) == ("RESULT_CORRUPT", path)
    assert found.what == "a result file of queries 'q0', 'q1', 'q2' and 2 more is damaged"
    (tmp_path / "results" / path).unlink()
    assert [finding.code for finding in wrong(tmp_path)] == ["RESULT_MISSING"]


# ---------------------------------------------------------------- the parts


def members(*sets: int, width: int = 1) -> Any:
    return np.stack([as_words(value, width) for value in sets])


def test_a_query_that_emits_twice_has_both_results(tmp_path: Path) -> None:
    """As by two driving aliases of one stream: the same columns, but not the same results."""
    writer = SharedWriter(["p", "q"], ["x"], LocalFiles(str(tmp_path), False), False)
    columns = (SlotColumn(0, "x"),)
    emits = [Emit("p", columns, (), 0), Emit("q", columns, (), 1), Emit("p", columns, (), 2)]
    partial = Partial(np.arange(3, dtype=np.uint64), (Slot(pa.table({"x": [1, 2, 3]})),), members(0b101, 0b010, 0b111))
    shares = {query: Share(query, writer) for query in "pq"}
    for together, some in rounds([(shares[emit.query], emit) for emit in emits]):
        together.write(some, partial)
    assert (shares["p"].rows, shares["q"].rows) == (4, 2)
    found = {
        query: sorted(x for f in share.close() for x in query_table(str(tmp_path / f.path), f.bit)["x"].to_pylist())
        for query, share in shares.items()
    }
    assert found == {"p": [1, 1, 3, 3], "q": [2, 3]}


def test_nothing_is_written_of_a_chunk_with_a_row_that_cannot_be_computed(tmp_path: Path) -> None:
    writer = SharedWriter(["p", "q"], ["x"], LocalFiles(str(tmp_path), False), False)
    values = (Call("/", (Literal(1.0, "double"), ColumnRef("0", "x", "double")), "double"),)
    emits = [Emit("p", (SlotColumn(0, "x"),), values, 0), Emit("q", (SlotColumn(0, "x"),), values, 1)]
    partial = Partial(np.arange(2, dtype=np.uint64), (Slot(pa.table({"x": [2.0, 0.0]})),), members(0b01, 0b10))
    shares = {query: Share(query, writer) for query in "pq"}
    ((together, some),) = rounds([(shares[emit.query], emit) for emit in emits])
    with pytest.raises(QueryError, match="divide by zero"):
        together.write(some, partial)
    assert not any(together.close().values())


SETS = st.lists(st.integers(0, (1 << 70) - 1), min_size=1, max_size=9)


@settings(deadline=None, derandomize=True, database=None, max_examples=60)
@given(st.lists(SETS, min_size=1, max_size=4), st.sets(st.integers(0, 69), max_size=70), st.booleans())
def test_oracle_a_query_reads_the_rows_with_its_bit(
    tmp_path_factory: pytest.TempPathFactory, chunks: list[list[int]], apart: set[int], everyone: bool
) -> None:
    folder = tmp_path_factory.mktemp("shared")
    queries = [f"q{i}" for i in range(70)]
    writer = SharedWriter(queries, ["x"], LocalFiles(str(folder), False), False, {f"q{i}" for i in apart})
    wanted: dict[str, list[str]] = {query: [] for query in queries}
    for number, chunk in enumerate(chunks):
        texts = [f"{number}/{i}" * (i + 1) for i in range(len(chunk))]
        sets = np.stack([as_words(value, 2) for value in chunk])
        places = [(i, writer.place[query]) for i, query in enumerate(queries)]
        writer.add(pa.table({"x": texts}), None if everyone and number % 2 else mapped(sets, places, 2))
        for i, query in enumerate(queries):
            all_rows = everyone and number % 2
            wanted[query] += [t for t, value in zip(texts, chunk, strict=True) if all_rows or value >> i & 1]
    found = writer.close()
    for i, query in enumerate(queries):
        tables = [query_table(str(folder / file.path), file.bit) for file in found[query]]
        assert sorted(x for rows in tables for x in rows["x"].to_pylist()) == sorted(wanted[query])
        assert int(writer.rows[writer.place[query]]) == sum(file.rows for file in found[query]) == len(wanted[query])
        assert all(rows.num_rows == file.rows for rows, file in zip(tables, found[query], strict=True))
        assert all(
            rows.nbytes <= file.unpacked
            for rows, file in zip(tables, found[query], strict=True)
            if file.bit is not None
        )
        assert all(file.bit is None or i not in apart for file in found[query])


def test_rows_weigh_at_least_what_they_take() -> None:
    rows = pa.table(
        {
            "n": pa.array([1, None, 3], pa.int32()),
            "b": [True, None, False],
            "t": ["", "é" * 100, None],
            "d": pa.array([1, 2, None], pa.decimal128(20, 2)),
            "l": [[1, 2], None, []],
        }
    )
    found = row_bytes(rows)
    assert found.sum() >= rows.nbytes
    assert found[1] - found[0] == 200
