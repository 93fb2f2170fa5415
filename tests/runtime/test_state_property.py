"""Property: joins are right whatever state does meanwhile: merges cut anywhere, deep runs, next to no memory."""

from __future__ import annotations

import datetime as dt
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plait.config import Config
from plait.order.orders import fixed
from plait.query.graph import Equality, Window
from plait.query.plan import Plan
from plait.query.relation import Relation
from plait.runtime.driver import prepare
from plait.runtime.task import hops as task
from plait.runtime.task import join_task, upkeep
from plait.runtime.task import prober as hops
from plait.runtime.task.passes import Passes, Reads
from plait.share.planner import Planner
from plait.share.probe_trees import build_plan
from plait.state.log.inspect import Inspection
from plait.state.log.manifest import LiveState
from plait.state.segments import block_segment as deep
from plait.state.segments import segment_reader as reader
from plait.state.segments import tiers
from plait.testing import LocalEngine, state_tables
from tests.random_joins import ARROW, SECOND, START, Builder, Case, cases, check_case
from tests.share.streams import joined, streams
from tests.state.rows import put_old_catalog

COMMON = settings(
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
)
WIDE = {"kinds": ("string", "double", "decimal(18,0)", "binary"), "rows": (400, 250), "spread": (300, 80)}
"""Rows enough that a merge has several parts: it takes 64 at least."""


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments, parts and blocks of a few rows, deep runs from the second tier on, one part of a merge per epoch."""
    monkeypatch.setattr(tiers, "SEGMENT_BYTES", 700)
    monkeypatch.setattr(deep, "BLOCK_BYTES", 300)
    monkeypatch.setattr(upkeep, "PART_BYTES", 1)
    monkeypatch.setattr("plait.runtime.driver.prepare.IDLE_MERGE_SECONDS", 0.0)


@pytest.fixture
def cramped(monkeypatch: pytest.MonkeyPatch) -> None:
    """4 KB of memory per task: what arrives is sliced and spilled, lists are read in pieces, next to nothing cached."""
    monkeypatch.setattr(prepare, "task_memory", lambda *_: 4096)


@settings(COMMON, max_examples=14)
@given(cases(most_aliases=4, most_queries=2))
def test_oracle_next_to_no_memory_changes_nothing(tiny: None, cramped: None, case: Case) -> None:
    check_case(case)


WAYS: Counter[str] = Counter()
"""How epochs of one task went through their hops."""


def noted(way: str, function: Any) -> Any:
    def called(*arguments: Any) -> Any:
        WAYS[way] += 1
        return function(*arguments)

    return called


MANY_HOPS = {"shapes": ("chain", "tree", "cycle"), "most_aliases": 4, "most_queries": 2, "rows": (24, 40)}


@pytest.mark.parametrize("memory", [2048, 1 << 28])
@settings(COMMON, max_examples=10)
@given(case=cases(**MANY_HOPS))
def test_oracle_one_task_that_runs_all_hops_gives_what_many_would(tiny: None, memory: int, case: Case) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "task_memory", lambda *_: memory)
        patch.setattr(task, "_all_here", noted("at once", task._all_here))
        patch.setattr(task, "later_hop", noted("slice by slice", task.later_hop))
        check_case(case, most_tasks=1)


def test_epochs_of_one_task_were_cut_into_slices_and_were_not() -> None:
    """Looks at what the test before has met: otherwise it would show nothing."""
    if not WAYS:
        pytest.skip("the test before did not run")
    assert min(WAYS["at once"], WAYS["slice by slice"]) >= 5


class Merges:
    """What was seen of merges on the way; and at any commit the live segments are sound."""

    def __init__(self) -> None:
        self.begun = self.deep = self.trimmed = self.flat = 0

    def __call__(self, engine: LocalEngine) -> None:
        infos = [info for found in engine.live.segments.values() for info in found]
        self.begun += any(info.into is not None for info in infos)
        self.trimmed += any(info.first > 0 for info in infos)
        self.deep += any(info.deep for info in infos)
        self.flat += any(not info.deep and info.tier > 0 for info in infos)


SEEN = Merges()
PASSES: list[int] = []
"""How many passes tasks have made."""


def many_passes(stores: Mapping[str, Reads], _room: int) -> Passes:
    """Passes over every store that has rows, whether they pay or not."""
    dense = frozenset(store for store, reads in stores.items() if reads.blocks)
    PASSES.append(len(dense))
    return Passes(5, dense) if dense else Passes()


@pytest.mark.parametrize("in_passes", [False, True])
@settings(COMMON, max_examples=5)
@given(case=cases(**WIDE, most_aliases=4, most_queries=2, epochs=(6, 9)), roomy=st.booleans())
def test_oracle_merges_cut_anywhere_lose_and_repeat_nothing(
    tiny: None, case: Case, roomy: bool, in_passes: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if in_passes:
            patch.setattr(join_task, "passes_for", many_passes)
        if not roomy:
            patch.setattr(prepare, "task_memory", lambda *_: 4096)
        check_case(case, settings={"merge_share": 0.01}, look=SEEN)


def test_merges_were_cut_and_runs_were_deep_and_flat() -> None:
    """Looks at what the test before has met: otherwise it would show nothing."""
    if not SEEN.deep:
        pytest.skip("the test before did not run")
    assert min(SEEN.begun, SEEN.trimmed, SEEN.flat) > 1
    assert sum(dense > 1 for dense in PASSES) > 3


@settings(COMMON, max_examples=5)
@given(cases(**WIDE, windows=True, ttl=True, most_aliases=3, most_queries=2, epochs=(6, 9)))
def test_oracle_expired_rows_and_cut_merges_lose_nothing(tiny: None, case: Case) -> None:
    check_case(case, settings={"merge_share": 0.01, "compress_above": "0"})


# ---------------------------------------------------------------- a long life of one store

PLAN = Planner({"q": joined("a.k = b.k")}, streams("ab"), Config(sync=False, replan_epochs=0)).plan


def arrivals(number: int, rows: int = 120) -> pa.Table:
    """Keys that come again and again, each with an id of its own; one of them is hot."""
    rng = np.random.default_rng(number)
    keys = np.where(rng.random(rows) < 0.05, 7, rng.integers(0, 4000, rows))
    ids = np.arange(number * rows, (number + 1) * rows)
    return pa.table({"id": ids, "k": keys, "m": ids}).cast(pa.schema([(n, pa.int64()) for n in ("id", "k", "m")]))


class Life:
    """An engine that is opened again and again on one checkpoint, and what it should have given so far."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        self.directory = directory
        self.settings = {"sync": False, "tasks": 1, "fan_in": 2, "merge_share": 0.01, "compress_above": "0", **settings}
        self.seen: dict[str, list[pa.Table]] = {"a": [], "b": []}
        self.found: Counter[tuple[int, int]] = Counter()

    def start_config(self, **settings: Any) -> Config:
        return Config(**{**self.settings, **settings})

    def start(self, **settings: Any) -> LocalEngine:
        return LocalEngine(self.directory, PLAN, self.start_config(**settings))

    def step(self, engine: LocalEngine) -> None:
        number = len(self.seen["a"])
        new = {"a": arrivals(2 * number), "b": arrivals(2 * number + 1)}
        for name, table in new.items():
            self.seen[name].append(table)
        rows = engine.run(new)["q"]
        if rows.num_rows:
            self.found.update(zip(*(rows.column(c).to_pylist() for c in ("a_id", "b_id")), strict=True))

    def check(self, engine: LocalEngine) -> None:
        a, b = (pa.concat_tables(self.seen[n]) for n in "ab")
        pairs = a.join(b, "k", join_type="inner", left_suffix="_a", right_suffix="_b")
        expected = Counter(zip(pairs.column("id_a").to_pylist(), pairs.column("id_b").to_pylist(), strict=True))
        assert self.found == expected
        rest = state_tables(engine)
        assert sorted(rest["a[k]"].column("id").to_pylist()) == sorted(a.column("id").to_pylist())
        assert sorted(rest["b[k]"].column("id").to_pylist()) == sorted(b.column("id").to_pylist())

    def catalogue(self, engine: LocalEngine) -> None:
        stores = {s.id: {"columns": [[c.name, c.type] for c in s.columns]} for s in PLAN.stores}
        put_old_catalog(engine.checkpoint, {"queries": {}, "streams": {}, "stores": stores, "filters": {}})

    def sound(self) -> None:
        with self.start() as engine:
            self.catalogue(engine)
        assert list(Inspection(str(self.directory)).findings()) == []


def begun(live: LiveState) -> bool:
    return any(info.into is not None for infos in live.segments.values() for info in infos)


def test_a_merge_goes_on_after_a_restart(tmp_path: Path, tiny: None) -> None:
    life = Life(tmp_path)
    interrupted = 0
    for _ in range(6):
        with life.start() as engine:
            for _ in range(2):
                life.step(engine)
            life.check(engine)
            interrupted += begun(engine.live)
    assert interrupted > 2
    life.sound()


def test_the_number_of_tasks_may_change_in_the_middle_of_merges(tmp_path: Path, tiny: None) -> None:
    life = Life(tmp_path)
    interrupted = 0
    with life.start() as engine:
        for tasks in (1, 3, 3, 2, 5, 1, 1, 4, 2, 2, 1, 1):
            engine.change(tasks=tasks)
            interrupted += begun(engine.live)
            life.step(engine)
        life.check(engine)
        assert interrupted > 3
    life.sound()


def test_compression_may_be_switched_in_the_middle_of_merges(tmp_path: Path, tiny: None) -> None:
    life = Life(tmp_path)
    kinds: set[tuple[bool, ...]] = set()
    for above in ("0", None, "0", None, "1k", "0"):
        with life.start(compress_above=above) as engine:
            for _ in range(2):
                life.step(engine)
            life.check(engine)
            runs: dict[str, set[bool]] = {}
            for info in engine.live.segments["a[k]"]:
                runs.setdefault(info.run, set()).add(info.deep)
            kinds |= {tuple(sorted(found)) for found in runs.values()}
    assert (False, True) in kinds, "no run was flat at its front and deep behind"
    life.sound()


def test_merges_that_are_given_time_leave_few_runs_and_no_old_files(tmp_path: Path) -> None:
    life = Life(tmp_path, merge_share=0.9)
    with life.start() as engine:
        for _ in range(20):
            life.step(engine)
        life.check(engine)
        infos = engine.live.segments["a[k]"]
        assert len({info.run for info in infos}) <= 2 * 5
        report = engine.progress[-1]["state"]
        assert report["amplification"]["read"] <= 10
        # What merges have replaced is kept up to a quarter of the state.
        live = [info for found in engine.live.segments.values() for info in found]
        names = {info.path for info in live}
        files = [p for p in Path(engine.checkpoint.state_dir).rglob("*") if p.is_file()]
        old = [p for p in files if str(p.relative_to(engine.checkpoint.state_dir)) not in names]
        assert sum(p.stat().st_size for p in old) <= 0.25 * sum(info.live_bytes for info in live)


# ---------------------------------------------------------------- zone maps


def timed(windows: tuple[tuple[str, str], ...], outputs: tuple[str, ...] = ("id",)) -> tuple[Plan, pa.Schema]:
    """Three streams on one key; these pairs of aliases within five seconds of each other."""
    columns = (("id", "bigint"), ("d0", "bigint"), ("ts", "timestamp"))
    relations = {f"r{i}": Relation(f"r{i}", columns, "ts", 10**9) for i in range(3)}
    builder = Builder(relations, {})
    builder.aliases = [(f"a{i}", f"r{i}") for i in range(3)]
    builder.equalities = [Equality(builder.ref("a0", "d0"), builder.ref(f"a{i}", "d0")) for i in (1, 2)]
    builder.windows = [
        Window(builder.ref(one, "ts"), builder.ref(other, "ts"), -5 * SECOND, 5 * SECOND) for one, other in windows
    ]
    builder.outputs = [builder.ref(alias, column) for alias, _ in builder.aliases for column in outputs]
    graph = builder.query(ttl=False).graph
    plan = build_plan({"q": graph}, relations, {"q": fixed(graph)}, tuple(relations))
    return plan, pa.schema([(c, ARROW[k]) for c, k in columns])


WINDOWS = [(("a1", "a2"),), (("a0", "a1"),), (("a0", "a1"), ("a1", "a2")), (("a2", "a0"), ("a1", "a0"), ("a1", "a2"))]


@pytest.mark.parametrize("windows", WINDOWS, ids=str)
@pytest.mark.parametrize("probe", ["factorised", "iterative"])
def test_segments_outside_a_window_are_left_out_and_no_others(
    tmp_path: Path, windows: tuple[tuple[str, str], ...], probe: str
) -> None:
    plan, schema = timed(windows)
    rng = np.random.default_rng(len(windows))
    seen: dict[str, list[int]] = {f"r{i}": [] for i in range(3)}
    found: Counter[tuple[int, ...]] = Counter()
    skipped = 0
    with LocalEngine(tmp_path, plan, Config(sync=False, tasks=1, fan_in=8, probe=probe)) as engine:
        for epoch_number in range(6):
            arriving = {}
            for name in seen:
                # An id is its row's time in seconds; one row has no time at all, and in one epoch there are stragglers.
                begin, width = (0, 600) if epoch_number == 3 else (100 * epoch_number, 12)
                times = (begin + rng.integers(0, width, 4)).tolist()
                seen[name] += times
                moments = [*(START + dt.timedelta(seconds=t) for t in times), None]
                arrays = [[*times, -1], [1] * 5, moments]
                arriving[name] = pa.table(
                    [pa.array(c, t) for c, t in zip(arrays, schema.types, strict=True)], schema=schema
                )
            rows = engine.run(arriving)["q"]
            skipped += engine.progress[-1]["state"]["skipped"]
            if rows.num_rows:
                found.update(zip(*(c.to_pylist() for c in rows.columns), strict=True))
    expected: Counter[tuple[int, ...]] = Counter()
    bound = {alias for pair in windows for alias in pair}
    for times in product(*(seen[f"r{i}"] + ([] if f"a{i}" in bound else [-1] * 6) for i in range(3))):
        at = {f"a{i}": t for i, t in enumerate(times)}
        expected[times] += all(abs(at[one] - at[other]) <= 5 for one, other in windows)
    assert found == +expected
    assert skipped > 0


# ---------------------------------------------------------------- the zone's name


@pytest.mark.parametrize("compress_above", [None, "0"], ids=["flat", "deep"])
@pytest.mark.parametrize("release", ["before", "now"])
def test_what_a_session_calls_its_zone_is_no_part_of_the_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compress_above: str | None, release: str
) -> None:
    plan, schema = timed((), ("id", "ts"))
    config = Config(sync=False, tasks=1, fan_in=2, merge_share=0.9, compress_above=compress_above)
    found: Counter[tuple[int, ...]] = Counter()
    with LocalEngine(tmp_path, plan, config) as engine:
        zones = ("Etc/UTC", "Etc/UTC", "Etc/UTC") if release == "before" else ("UTC", "Etc/UTC", "Asia/Tokyo")
        for number, zone in enumerate((*zones, "GMT", "UTC")):
            with monkeypatch.context() as patch:
                if release == "before" and number < 3:
                    # Releases before wrote and read the session's name for the zone.
                    for place in (
                        "runtime.task.bucketise.in_utc",
                        "state.segments.segment_reader.in_utc",
                        "state.segments.block_segment.schema_in_utc",
                    ):
                        patch.setattr(f"plait.{place}", lambda table: table)
                else:
                    monkeypatch.setattr(reader, "_open", OrderedDict())
                moments = [START + dt.timedelta(hours=number), None]
                named = schema.set(2, pa.field("ts", pa.timestamp("us", zone)))
                columns = ([number, -1 - number], [1, 1], moments)
                rows = pa.table([pa.array(c, t) for c, t in zip(columns, named.types, strict=True)], schema=named)
                added = engine.run(dict.fromkeys(plan.ranks, rows))["q"]
            found.update(zip(*(added.column(n).to_pylist() for n in added.column_names[::2]), strict=True))
        (info, *_) = engine.live.segments["r0[d0]"]
        assert info.tier > 0, "nothing was merged"
        kept = state_tables(engine)["r0[d0]"]
    every = [n for number in range(5) for n in (number, -1 - number)]
    assert found == Counter(product(every, repeat=3))
    assert kept.schema.field("ts").type == pa.timestamp("us", "UTC")


# ---------------------------------------------------------------- a hot key


@pytest.fixture
def in_hand(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """The most rows that one list, and one piece of results, ever had; and the most bytes that Arrow held."""
    most = {"read": 0, "tuples": 0, "bytes": 0}
    before = pa.total_allocated_bytes()
    read, expanded = hops.Matches.read, hops.Frame.expanded

    def noted_read(self: Any) -> Any:
        fresh = self.table is None
        table, starts = read(self)
        if fresh:
            most["read"] = max(most["read"], table.num_rows)
        most["bytes"] = max(most["bytes"], pa.total_allocated_bytes() - before)
        return table, starts

    def noted_expanded(self: Any, *how: Any) -> Any:
        for partial in expanded(self, *how):
            most["tuples"] = max(most["tuples"], len(partial.hashes))
            most["bytes"] = max(most["bytes"], pa.total_allocated_bytes() - before)
            yield partial

    monkeypatch.setattr(hops.Matches, "read", noted_read)
    monkeypatch.setattr(hops.Frame, "expanded", noted_expanded)
    return most


@pytest.mark.parametrize("compress_above", [None, "0"], ids=["flat", "deep"])
@pytest.mark.parametrize("probe", ["factorised", "iterative"])
def test_a_hot_key_with_200_000_partners_takes_little_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_hand: dict[str, int], compress_above: str | None, probe: str
) -> None:
    memory = 8 << 20
    monkeypatch.setattr(prepare, "task_memory", lambda *_: memory)
    partners = 200_000
    plan: Plan = Planner({"q": joined("a.k = b.k", "b.k = c.k")}, streams("abc"), Config(replan_epochs=0)).plan
    schema = pa.schema([(n, pa.int64()) for n in ("id", "k", "m")])

    def table(ids: Any, key: int) -> pa.Table:
        return pa.table([np.asarray(ids), np.full(len(ids), key), np.asarray(ids)], schema=schema)

    config = Config(sync=False, tasks=1, fan_in=2, merge_share=0.9, compress_above=compress_above, probe=probe)
    with LocalEngine(tmp_path, plan, config) as engine:
        for half in np.split(np.arange(partners), 2):
            engine.run({"b": table(half, 1), "c": table([], 1)})
        # An idle epoch merges.
        engine.run({})
        (info,) = engine.live.segments["b[k]"]
        assert (info.rows, info.deep) == (partners, compress_above == "0")
        engine.run({"c": table([7], 1)})
        for key in in_hand:
            in_hand[key] = 0
        found = engine.run({"a": table([3], 1)})["q"]
    assert found.num_rows == partners
    assert sorted(found.column("b_id").to_pylist()) == list(range(partners))
    assert set(found.column("a_id").to_pylist()) == {3}
    assert set(found.column("c_id").to_pylist()) == {7}
    # The budget of a list is a sixteenth of the memory; a row of b weighs 16 bytes at least.
    assert 0 < in_hand["read"] <= memory // 16 // 8
    assert 0 < in_hand["tuples"] <= memory // 16 // 8
    # What was read before stays in the cache, which has half.
    assert in_hand["bytes"] < memory
