"""Selections that source tasks evaluate give the rows and bits that Spark would."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa

from plait.query.expr import Call, ColumnRef, Expr, Literal
from plait.query.relation import ColumnDef
from plait.query.store import Filter, IngestEdge, Input, Key, mask_columns
from plait.runtime.task.bucketise import selected_columns
from plait.runtime.task.selections import FEWEST, extra_columns, masked_by_task, with_bits

K, V = ColumnRef("", "k", "bigint"), ColumnRef("", "v", "bigint")


def less(number: int) -> Filter:
    expr: Expr = Call("<", (V, Literal(number, "bigint")), "boolean")
    return Filter(number, f"v < {number}", expr=expr)


def source(*filters: Filter) -> Input:
    edge = IngestEdge(0, Key(("k",), ("bigint",), True), None)
    return Input("a", (ColumnDef("k", "`k`", "bigint"),), ("k",), filters, ("k",), None, None, None, (edge,))


MANY = source(*(less(10 * i) for i in range(70)))


def test_few_conditions_or_one_that_only_spark_knows_are_left_to_spark() -> None:
    assert masked_by_task(MANY)
    assert not masked_by_task(replace(MANY, filters=MANY.filters[: FEWEST - 1]))
    assert not masked_by_task(replace(MANY, filters=(*MANY.filters, Filter(900, "rlike(s, 'x')"))))
    # A condition that lets all pass needs no meaning.
    assert masked_by_task(replace(MANY, filters=(*MANY.filters, Filter(901, None))))


def test_columns_that_only_conditions_read_are_handed_over_and_left_behind() -> None:
    assert extra_columns(MANY) == ["v"]
    assert selected_columns(MANY) == ["k", "v"]
    batch = pa.record_batch({"k": [1], "v": [5]})
    assert with_bits(batch, MANY).column_names == ["k", *mask_columns(70)]


def test_oracle_every_row_has_the_bits_of_the_conditions_it_meets() -> None:
    values = [0, 9, 10, 349, 689, 690, 10_000, None, -3]
    found = with_bits(pa.record_batch({"k": list(range(9)), "v": pa.array(values, pa.int64())}), MANY)
    wanted = {
        k: [i for i, f in enumerate(MANY.filters) if v is not None and v < f.id]
        for k, v in enumerate(values)
        if v is not None and v < 690
    }
    assert found.column("k").to_pylist() == list(wanted), "rows that meet none, and NULL, are left out"
    words = [found.column(name).to_pylist() for name in mask_columns(70)]
    for row, bits in enumerate(wanted.values()):
        assert [i for i in range(70) if words[i // 62][row] >> (i % 62) & 1] == bits


def test_a_condition_that_lets_all_pass_keeps_all_rows() -> None:
    everything = replace(MANY, filters=(*MANY.filters, Filter(901, None)))
    found = with_bits(pa.record_batch({"k": [1, 2], "v": pa.array([None, 10_000], pa.int64())}), everything)
    assert found.column("k").to_pylist() == [1, 2]
    assert found.column("#mask1").to_pylist() == [1 << 70 - 62] * 2
