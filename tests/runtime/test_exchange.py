"""What travels between tasks: every tuple arrives once, however little memory there is for it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.config import KEY_GROUPS
from plait.kernels.hashing import even_bounds, owner
from plait.query.store import HASH
from plait.runtime.task import exchange
from plait.runtime.task.exchange import DESCRIPTOR, Inbox, Outbox, encode
from plait.runtime.task.notes import KeysNote, SourceNote

QUICK = settings(deadline=None, derandomize=True, database=None, max_examples=50)
VALUE = st.one_of(st.integers(0, 2**64 - 1), st.sampled_from((0, 1, 1 << 54, (1 << 54) - 1, 2**63, 2**64 - 1)))


def bucket(hashes: list[int], first: int = 0) -> pa.Table:
    """Tuples with these hashes, sorted, each with a number of its own and a text."""
    ordered = pa.array(sorted(hashes), pa.uint64())
    numbers = np.arange(first, first + len(hashes))
    texts = pa.array([None if n % 5 == 0 else "x" * (n % 9) for n in numbers.tolist()], pa.string())
    return pa.table([ordered, numbers, texts], names=[HASH, "n", "s"])


def sent(outbox: Outbox) -> list[tuple[int, int, bytes]]:
    return [tuple(row.values()) for batch in outbox.batches() for row in batch.to_pylist()]  # type: ignore[misc]


def shipped(outbox: Outbox, tables: dict[int, pa.Table], tasks: int) -> list[pa.RecordBatch]:
    for edge, table in tables.items():
        outbox.ship(edge, table, even_bounds(tasks))
    outbox.note(0, KeysNote({"a[k]": 3.0}))
    return list(outbox.batches())


TABLES = st.dictionaries(st.integers(0, 3), st.lists(VALUE, max_size=60).map(bucket), max_size=3)


@QUICK
@given(TABLES, st.integers(1, 7), st.sampled_from((0, 700, float("inf"))), st.sampled_from((1, 200, 8 << 20)))
def test_every_tuple_goes_to_the_owner_of_its_key_group(
    tables: dict[int, pa.Table], tasks: int, limit: float, bucket_bytes: int
) -> None:
    outbox = Outbox(limit=limit)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "_BUCKET_BYTES", bucket_bytes)
        batches = shipped(outbox, tables, tasks)
    found: dict[int, list[dict[str, Any]]] = {}
    notes = 0
    for batch in batches:
        for task, edge, payload in zip(*(c.to_pylist() for c in batch.columns), strict=True):
            if edge == DESCRIPTOR:
                notes += 1
                continue
            table = exchange.decode(payload)
            assert set(owner(table.column(HASH).to_numpy(), even_bounds(tasks)).tolist()) == {task}
            found.setdefault(edge, []).extend(table.to_pylist())
    assert notes == 1
    assert found == {edge: table.to_pylist() for edge, table in tables.items() if table.num_rows}
    assert (outbox.rows, outbox.held, outbox.spill.size) == ([], 0, 0)


def test_beyond_its_limit_an_outbox_holds_nothing_in_memory() -> None:
    table = bucket(list(range(1000)))
    outbox = Outbox(limit=2.5 * table.nbytes)
    for _ in range(5):
        outbox.ship(1, table, even_bounds(1))
    assert [isinstance(kept, pa.Table) for _, _, kept in outbox.rows] == [True, True, False, False, False]
    assert outbox.spill.size == 3 * len(encode(table))
    assert [row[2] for row in sent(outbox)] == [encode(table)] * 5
    # Empty again, it starts anew.
    outbox.ship(1, table, even_bounds(1))
    assert outbox.spill.size == 0
    assert len(sent(outbox)) == 1


def test_the_next_hop_of_the_same_task_gets_buckets_and_leaves_descriptors() -> None:
    one, other = bucket(list(range(1000))), bucket([5, 6])
    outbox = Outbox(limit=1.5 * one.nbytes)
    outbox.note(0, SourceNote("a"))
    for edge, table in ((1, one), (2, other), (1, one)):
        outbox.ship(edge, table, even_bounds(1))
    assert outbox.spill.size
    inbox = outbox.delivered()
    assert {edge: [t.to_pylist() for t in tables] for edge, tables in inbox.buckets.items()} == {
        1: [one.to_pylist()] * 2,
        2: [other.to_pylist()],
    }
    assert not inbox.notes
    assert inbox.bytes == 2 * one.nbytes + other.nbytes
    assert (outbox.held, outbox.spill.size) == (0, 0)
    assert [row[1] for row in sent(outbox)] == [DESCRIPTOR]
    assert not outbox.delivered().buckets


def test_what_spark_gets_at_a_time_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "_BUCKET_BYTES", 1000)
    outbox = Outbox(limit=5000)
    outbox.ship(1, bucket(list(range(2000))), even_bounds(1))
    sizes = [batch.nbytes for batch in outbox.batches()]
    assert len(sizes) > 5
    assert max(sizes) < 8 * 1000


def test_of_a_slice_only_its_own_rows_travel() -> None:
    table = bucket(list(range(10_000)))
    assert len(encode(table.slice(5, 10))) < 2000
    assert exchange.decode(encode(table.slice(5, 10))).to_pylist() == table.slice(5, 10).to_pylist()


# ---------------------------------------------------------------- inbox


def groups_of(task: int, tasks: int) -> tuple[int, int]:
    return task * KEY_GROUPS // tasks, (task + 1) * KEY_GROUPS // tasks


@QUICK
@given(
    st.lists(st.tuples(st.integers(0, 2), st.lists(VALUE, min_size=1, max_size=40)), max_size=6),
    st.integers(1, 5),
    st.sampled_from((0, 900, float("inf"))),
    st.sampled_from((1, 100, 600, 3000, float("inf"))),
)
def test_every_tuple_is_in_exactly_one_slice_with_all_tuples_of_its_key(
    parts: list[tuple[int, list[int]]], tasks: int, memory: float, limit: float
) -> None:
    tables = [(edge, bucket(hashes, 100 * i)) for i, (edge, hashes) in enumerate(parts)]
    outbox = Outbox()
    for edge, table in tables:
        outbox.ship(edge, table, even_bounds(tasks))
    received = list(outbox.batches())
    everything: dict[int, Counter[tuple[Any, ...]]] = {}
    for task in range(tasks):
        mine = [
            pa.RecordBatch.from_pylist([row for row in batch.to_pylist() if row["task"] == task], schema=batch.schema)
            for batch in received
        ]
        inbox = Inbox.read(mine, memory)
        highest = -1
        slices = list(inbox.slices(limit, groups_of(task, tasks)))
        assert limit < float("inf") or len(slices) == 1
        for tables_of in slices:
            hashes = [h for table in tables_of.values() for h in table.column(HASH).to_pylist()]
            assert all(h > highest for h in hashes), "a key is in two slices, or slices do not ascend"
            highest = max(hashes, default=highest)
            for edge, table in tables_of.items():
                values = table.column(HASH).to_pylist()
                assert values == sorted(values)
                assert values, "an edge without tuples is left out"
                rows = zip(*(c.to_pylist() for c in table.columns), strict=True)
                everything.setdefault(edge, Counter()).update(rows)
    expected: dict[int, Counter[tuple[Any, ...]]] = {}
    for edge, table in tables:
        rows = zip(*(c.to_pylist() for c in table.columns), strict=True)
        expected.setdefault(edge, Counter()).update(rows)
    assert everything == expected


@QUICK
@given(
    st.lists(st.tuples(st.sampled_from((1, 4)), st.lists(VALUE, min_size=1, max_size=40)), max_size=6),
    st.sampled_from((0, 900, float("inf"))),
    st.sampled_from((1, 700, 1 << 20)),
)
def test_rows_that_have_come_whole_are_cut_into_buckets(
    parts: list[tuple[int, list[int]]], memory: float, cut_bytes: int
) -> None:
    """Edge 1 stands for two edges, of which the second leaves out rows without a text; edge 4 has come sorted."""
    tables = [(edge, bucket(hashes, 100 * i)) for i, (edge, hashes) in enumerate(parts)]
    sizes = []

    def cut(rows: pa.Table) -> list[tuple[int, pa.Table]]:
        sizes.append(len(rows))
        some = rows.filter(rows.column("s").is_valid())
        return [(1, rows.sort_by(HASH)), *([(2, some.sort_by(HASH))] if len(some) else [])]

    outbox = Outbox()
    for edge, table in tables:
        outbox.ship_to(0, edge, table)
    outbox.note(0, SourceNote("a"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "_CUT_BYTES", cut_bytes)
        inbox = Inbox.read(list(outbox.batches()), memory, {1: cut})
    whole = [table for edge, table in tables if edge == 1]
    assert sum(sizes) == sum(map(len, whole))
    if cut_bytes == 1 or memory == 0:
        assert len(sizes) == len(whole)
    elif cut_bytes == 1 << 20 and memory == float("inf"):
        assert len(sizes) == min(1, len(whole))
    assert len(inbox.notes) == 1
    found = {edge: [row for table in of for row in table.to_pylist()] for edge, of in inbox.buckets.items()}
    expected: dict[int, list[dict[str, Any]]] = {}
    for edge, table in tables:
        expected.setdefault(edge, []).extend(table.to_pylist())
    if some := [row for row in expected.get(1, []) if row["s"] is not None]:
        expected[2] = some
    by_number = {edge: sorted(rows, key=lambda row: row["n"]) for edge, rows in found.items()}
    assert by_number == expected
    for of in inbox.buckets.values():
        assert all(table.column(HASH).to_pylist() == sorted(table.column(HASH).to_pylist()) for table in of)


def received(count: int, rows: int) -> list[pa.RecordBatch]:
    rng = np.random.default_rng(count)
    outbox = Outbox()
    for number in range(count):
        outbox.ship(1, bucket(rng.integers(0, 2**64, rows, np.uint64).tolist(), number * rows), even_bounds(1))
    outbox.note(0, KeysNote({"a[k]": 3.0}))
    return list(outbox.batches())


def test_beyond_its_limit_an_inbox_holds_nothing_in_memory() -> None:
    batches = received(20, 2000)
    size = sum(len(p) for b in batches for p in b.column(2).to_pylist())
    # As Spark does it: a batch is there once, and then gone.
    before = pa.total_allocated_bytes()
    inbox = Inbox.read((pa.RecordBatch.from_pylist(b.to_pylist(), schema=b.schema) for b in batches), 0)
    assert pa.total_allocated_bytes() - before < size / 10
    assert len(inbox.notes) == 1
    assert inbox.bytes == size - len(inbox.notes[0])
    (tables,) = inbox.slices(float("inf"), (0, KEY_GROUPS))
    assert sorted(tables[1].column("n").to_pylist()) == list(range(40_000))


def test_slices_are_about_as_large_as_they_may_be() -> None:
    inbox = Inbox.read(received(5, 2000))
    sizes = [sum(t.nbytes for t in tables.values()) for tables in inbox.slices(inbox.bytes / 10, (0, KEY_GROUPS))]
    assert len(sizes) == 10
    assert max(sizes) < 1.3 * inbox.bytes / 10


def test_an_empty_inbox_has_one_empty_slice() -> None:
    assert list(Inbox.read([]).slices(1, (0, KEY_GROUPS))) == [{}]
