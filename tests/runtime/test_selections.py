"""Selections that source tasks evaluate give the rows and bits that Spark would."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.query.expr import Call, ColumnRef, Expr, Literal
from plait.query.relation import ColumnDef
from plait.query.store import Filter, IngestEdge, Input, Key, mask_columns
from plait.runtime.task.selections import (
    FEWEST,
    Selection,
    covers,
    masked_by_task,
    selection_of,
    widened,
    with_bits,
)

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
    selection = selection_of(MANY)
    assert selection.names == ["k", "v"]
    batch = pa.record_batch({"k": [1], "v": [5]})
    assert with_bits(batch, selection, MANY).column_names == ["k", *mask_columns(70)]


def test_oracle_every_row_has_the_bits_of_the_conditions_it_meets() -> None:
    values = [0, 9, 10, 349, 689, 690, 10_000, None, -3]
    found = with_bits(
        pa.record_batch({"k": list(range(9)), "v": pa.array(values, pa.int64())}), selection_of(MANY), MANY
    )
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
    batch = pa.record_batch({"k": [1, 2], "v": pa.array([None, 10_000], pa.int64())})
    found = with_bits(batch, selection_of(everything), everything)
    assert found.column("k").to_pylist() == [1, 2]
    assert found.column("#mask1").to_pylist() == [1 << 70 - 62] * 2


def rows(selection: Selection, values: list[int | None]) -> pa.RecordBatch:
    """What Spark hands over of rows with these values of v, k being their number."""
    kept = [(k, v) for k, v in enumerate(values) if selection.passing is None or _meets(selection.passing, v)]
    columns: dict[str, Any] = {"k": [k for k, _ in kept], "v": pa.array([v for _, v in kept], pa.int64())}
    for word, name in enumerate(mask_columns(len(selection.bits))):
        texts = selection.bits[62 * word : 62 * word + 62]
        words = [sum(1 << i for i, t in enumerate(texts) if _meets([t], v)) for _, v in kept]
        columns[name] = pa.array(words, pa.int64())
    return pa.record_batch({name: columns[name] for name in selection.names})


def _meets(texts: Iterable[str | None], v: int | None) -> bool:
    return any(text is None or (v is not None and v < int(text.split()[-1])) for text in texts)


def _bits(table: pa.Table, source: Input) -> dict[int, set[str | None]]:
    """By k, the conditions that a row meets."""
    texts, found = source.texts, {}
    for row in table.to_pylist():
        words = [row[name] for name in mask_columns(len(texts))] if len(texts) > 1 else [1]
        found[row["k"]] = {text for i, text in enumerate(texts) if words[i // 62] >> (i % 62) & 1}
    return found


@settings(deadline=None, derandomize=True, database=None, max_examples=150)
@given(
    st.lists(st.lists(st.sampled_from([None, 10, 20, 30, 40]), unique=True, max_size=5), min_size=2, max_size=5),
    st.lists(st.one_of(st.none(), st.integers(-5, 50)), max_size=12),
    st.booleans(),
)
def test_oracle_queries_that_change_within_a_selection_get_what_one_of_their_own_would_give(
    lives: list[list[int | None]], values: list[int | None], opaque: bool
) -> None:
    """`opaque` conditions are Spark's alone."""
    selection: Selection | None = None
    for filters in lives:
        now = source(*(less(n) if n is not None else Filter(0, None) for n in filters))
        if opaque:
            now = replace(now, filters=tuple(replace(f, expr=None) for f in now.filters))
        selection = selection_of(now) if selection is None else selection
        if not covers(selection, now):
            selection = widened(selection, now)
        assert covers(selection, now)
        found = with_bits(rows(selection, values), selection, now)
        wanted = {k: {t for t in now.texts if _meets([t], v)} for k, v in enumerate(values)}
        assert _bits(found, now) == {k: texts for k, texts in wanted.items() if texts}


def test_what_goes_beyond_a_selection_needs_another_one() -> None:
    one = selection_of(source(less(10)))
    assert one.passing == ("v < 10",)
    assert not covers(one, source(less(10), less(20))), "Spark leaves rows out that the second condition lets pass"
    assert not covers(one, source(Filter(0, None)))
    assert covers(one, replace(source(less(10)), filters=(), edges=())), "nobody has to read what is handed over"
    everything = selection_of(source(Filter(0, None)))
    assert not covers(everything, source(less(10))), "v is not handed over"
    assert covers(widened(everything, source(less(10))), source(Filter(0, None), less(10), less(20)))
    assert not covers(widened(one, source(less(10))), source(Filter(9, "rlike(s, 'x')"))), "only Spark can tell"
    other = replace(source(Filter(0, None)), columns=(ColumnDef("=k + 1", "k + 1", "bigint"),))
    assert not covers(everything, other)
    assert covers(widened(everything, other), source(Filter(0, None))), "what was handed over still is"
