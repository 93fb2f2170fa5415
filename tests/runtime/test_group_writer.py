"""Groups made by join tasks, against the same made in plain Python."""

from __future__ import annotations

import datetime as dt
from collections import defaultdict
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.query.expr import Call, ColumnRef, Literal
from plait.query.grouping import COUNT, MAX, MIN, SUM, Grouping, GroupKey, GroupValue
from plait.query.plan import Emit, SlotColumn
from plait.runtime.task.group_writer import GroupWriter, grouped, having, merged
from plait.runtime.task.partial import Partial, Slot
from plait.state.files.storage import LocalFiles
from plait.state.log.manifest import ResultFile
from tests.oracle import plain

NAME = ColumnRef("", "name", "string")
DAY = ColumnRef("", "day", "date")
PRICE = ColumnRef("", "price", "decimal(15,2)")
DISCOUNT = ColumnRef("", "discount", "decimal(15,2)")
NUMBER = ColumnRef("", "number", "int")
SCHEMA = pa.schema(
    [
        ("name", pa.string()),
        ("day", pa.date32()),
        ("price", pa.decimal128(15, 2)),
        ("discount", pa.decimal128(15, 2)),
        ("number", pa.int32()),
    ]
)
REVENUE = Call("*", (PRICE, Call("-", (Literal("1", "decimal(1,0)"), DISCOUNT), "decimal(16,2)")), "decimal(32,4)")
OF_ANN = Call(
    "case",
    (Call("=", (NAME, Literal("ann", "string")), "boolean"), REVENUE, Literal("0", "decimal(32,4)")),
    "decimal(32,4)",
)
GROUPING = Grouping(
    (GroupKey("g0", NAME), GroupKey("g1", DAY)),
    (
        GroupValue("p0", SUM, REVENUE, "decimal(38,4)"),
        GroupValue("p1", COUNT, None, "bigint"),
        GroupValue("p2", COUNT, NUMBER, "bigint"),
        GroupValue("p3", MIN, NUMBER, "int"),
        GroupValue("p4", MAX, DAY, "date"),
        GroupValue("p5", SUM, NUMBER, "bigint"),
        GroupValue("p6", SUM, OF_ANN, "decimal(38,4)"),
    ),
)
CENTS = st.integers(-(10**14), 10**14).map(lambda n: Decimal(n).scaleb(-2))
ROWS = st.lists(
    st.tuples(
        st.sampled_from(["ann", "bob", "", None]),
        st.sampled_from([dt.date(2024, 2, 29), dt.date(1969, 12, 31), None]),
        st.none() | CENTS,
        st.none() | st.sampled_from([Decimal("0.00"), Decimal("0.07"), Decimal("1.00")]),
        st.none() | st.integers(-(2**31), 2**31 - 1),
    ),
    max_size=40,
)


def table(rows: list[tuple[Any, ...]]) -> pa.Table:
    return pa.Table.from_pylist([dict(zip(SCHEMA.names, row, strict=True)) for row in rows], SCHEMA)


def expected(rows: list[tuple[Any, ...]]) -> set[tuple[Any, ...]]:
    groups: dict[tuple[Any, Any], list[tuple[Any, ...]]] = defaultdict(list)
    for row in rows:
        groups[row[0], row[1]].append(row)
    found = set()
    for (name, day), members in groups.items():
        revenues = [p * (1 - d) for _, _, p, d, _ in members if p is not None and d is not None]
        numbers = [n for *_, n in members if n is not None]
        found.add(
            (
                *(name, day, sum(revenues) if revenues else None, len(members), len(numbers)),
                *(min(numbers, default=None), day, sum(numbers) if numbers else None),
                (sum(revenues) if revenues else None) if name == "ann" else Decimal(0),
            )
        )
    return found


def rows_of(found: pa.Table) -> set[tuple[Any, ...]]:
    rows = [tuple(map(plain, row.values())) for row in found.to_pylist()]
    assert len(set(rows)) == len(rows)
    return set(rows)


@settings(deadline=None)
@given(rows=ROWS, cuts=st.lists(st.integers(0, 40), max_size=3))
def test_groups_of_pieces_merge_to_the_groups_of_all(rows: list[tuple[Any, ...]], cuts: list[int]) -> None:
    bounds = [0, *sorted(cuts), len(rows)]
    parts = [grouped(table(rows[a:b]), GROUPING) for a, b in pairwise(bounds)]
    assert all(part is not None for part in parts)
    whole = merged([part for part in parts if part is not None], GROUPING)
    assert whole is not None
    assert rows_of(whole) == expected(rows)
    again = merged([whole, whole.slice(0, 0)], GROUPING)
    assert again is not None
    assert rows_of(again) == expected(rows)
    types = [whole.schema.field(name).type for name in ("p0", "p1", "p3", "p5")]
    assert types == [pa.decimal128(38, 4), pa.int64(), pa.int32(), pa.int64()]


def test_no_keys_are_one_group() -> None:
    counting = Grouping((), (GroupValue("p0", COUNT, None, "bigint"),))
    found = grouped(table([("ann", None, None, None, 1)] * 3), counting)
    assert found is not None
    assert found.to_pylist() == [{"p0": 3}]


def test_having_keeps_what_fulfils_all_conditions_and_what_only_spark_can_judge() -> None:
    rows = pa.table({"g0": [1, 2, 3, None], "p0": [2**62, None, 5, 7]})
    g0, p0 = ColumnRef("", "g0", "bigint"), ColumnRef("", "p0", "bigint")
    above = Call(">", (p0, Literal(4, "bigint")), "boolean")
    assert having(rows, []).to_pydict() == rows.to_pydict()
    assert having(rows, [above]).to_pydict() == {"g0": [1, 3, None], "p0": [2**62, 5, 7]}
    assert having(rows, [above, Call("isnotnull", (g0,), "boolean")]).to_pydict() == {"g0": [1, 3], "p0": [2**62, 5]}
    # Doubling the first value leaves its type: nobody is dropped, Spark will say what that means.
    doubled = Call(">", (Call("*", (p0, Literal(4, "bigint")), "bigint"), g0), "boolean")
    assert having(rows, [doubled]).to_pydict() == rows.to_pydict()
    assert having(rows, [doubled, above]).num_rows == 3


def test_groups_without_values_are_the_distinct_keys() -> None:
    found = grouped(table([("ann", None, None, None, 1), ("ann", None, None, None, 2)]), Grouping(GROUPING.keys, ()))
    assert found is not None
    assert found.to_pylist() == [{"g0": "ann", "g1": None}]


def summing(kind: str, result: str) -> Grouping:
    return Grouping((GroupKey("g0", NAME),), (GroupValue("p0", SUM, ColumnRef("", "x", kind), result),))


@pytest.mark.parametrize(
    ("kind", "values", "result"),
    [
        (pa.int64(), [2**62, 2**62], "bigint"),
        (pa.decimal128(38, 0), [Decimal(6 * 10**36)] * 2, "decimal(38,0)"),
        (pa.decimal128(38, 2), [-Decimal(9 * 10**34)] * 12, "decimal(38,2)"),
    ],
)
def test_a_sum_that_might_not_fit_is_left_to_spark(kind: pa.DataType, values: list[Any], result: str) -> None:
    rows = pa.table({"name": ["ann"] * len(values), "x": pa.array(values, kind)})
    grouping = summing("bigint", result)
    assert grouped(rows, grouping) is None
    one = grouped(rows.slice(0, 1), grouping)
    assert one is not None
    assert merged([one] * len(values), grouping) is None


def write(folder: Path, chunks: list[list[tuple[Any, ...]]], limit: int) -> tuple[list[ResultFile], int]:
    results = LocalFiles(str(folder), sync=False)
    writer = GroupWriter("q", tuple(SCHEMA.names), GROUPING, results, sync=False, limit=limit)
    emit = Emit("q", tuple(SlotColumn(0, name) for name in SCHEMA.names))
    for chunk in chunks:
        rows = table(chunk)
        writer.write(emit, Partial(pa.array(range(len(rows)), pa.uint64()).to_numpy(), (Slot(rows),)))
    return writer.close(), writer.rows


@pytest.mark.parametrize("limit", [0, 1 << 20])
def test_a_task_writes_one_file_of_groups(tmp_path: Path, limit: int) -> None:
    row = ("ann", dt.date(2024, 2, 29), Decimal("10.00"), Decimal("0.10"), 7)
    files, rows = write(tmp_path, [[row] * 5, [row] * 6, [("bob", *row[1:])]], limit)
    (file,) = files
    assert (rows, file.grouped, file.whole, file.rows) == (12, True, False, 3 if limit == 0 else 2)
    whole = merged([pq.read_table(tmp_path / file.path)], GROUPING)
    assert whole is not None
    assert rows_of(whole) == expected([row] * 11 + [("bob", *row[1:])])


def test_rows_that_cannot_be_grouped_are_written_as_they_are(tmp_path: Path) -> None:
    results = LocalFiles(str(tmp_path), sync=False)
    grouping = summing("decimal(38,0)", "decimal(38,0)")
    writer = GroupWriter("q", ("name", "x"), grouping, results, sync=False, limit=1 << 20)
    emit = Emit("q", (SlotColumn(0, "name"), SlotColumn(0, "x")))
    for value in (10**37, 1):
        rows = pa.table({"name": ["ann"] * 3, "x": pa.array([Decimal(value)] * 3, pa.decimal128(38, 0))})
        writer.write(emit, Partial(pa.array(range(3), pa.uint64()).to_numpy(), (Slot(rows),)))
    plainly, groups = writer.close()
    assert (plainly.grouped, plainly.rows, groups.grouped, groups.rows) == (False, 3, True, 1)
    assert writer.rows == 6


def test_a_failed_task_leaves_no_file(tmp_path: Path) -> None:
    results = LocalFiles(str(tmp_path), sync=False)
    writer = GroupWriter("q", tuple(SCHEMA.names), GROUPING, results, sync=False, limit=0)
    emit = Emit("q", tuple(SlotColumn(0, name) for name in SCHEMA.names))
    rows = table([("ann", None, Decimal(1), Decimal(0), 1)])
    writer.write(emit, Partial(pa.array([0], pa.uint64()).to_numpy(), (Slot(rows),)))
    assert list(tmp_path.rglob("*.parquet"))
    writer.abandon()
    assert not list(tmp_path.rglob("*.parquet"))
