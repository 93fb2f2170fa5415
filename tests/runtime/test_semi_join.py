"""Semi and anti joins told without Spark: equal to a nested loop in plain Python."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.query.expr import Call, ColumnRef, Expr
from plait.query.semi_join import OTHER, OWN, Partners, key_of
from plait.query.types import has_plain_equality
from plait.runtime.answers import semi_join as module
from plait.runtime.answers.semi_join import Others

KEYS: dict[str, Any] = {
    "bigint": st.integers(-3, 3),
    "string": st.sampled_from(["", "a", "A", "b "]),
    "date": st.sampled_from([dt.date(1969, 12, 31), dt.date(2024, 2, 29)]),
    "decimal(9,2)": st.integers(-2, 2).map(lambda n: Decimal(n).scaleb(-2)),
}
TYPES = {"bigint": pa.int64(), "string": pa.string(), "date": pa.date32(), "decimal(9,2)": pa.decimal128(9, 2)}


def ref(side: str, column: str, kind: str = "bigint") -> ColumnRef:
    return ColumnRef(side, column, kind)


DIFFERENT = Call("not", (Call("=", (ref(OWN, "x"), ref(OTHER, "y")), "boolean"),), "boolean")
LATER = Call("<", (ref(OWN, "x"), ref(OTHER, "y")), "boolean")
CONDITIONS: dict[str, tuple[Expr | None, Any]] = {
    "key alone": (None, lambda x, y: True),
    "different": (DIFFERENT, lambda x, y: None not in (x, y) and x != y),
    "both": (Call("and", (DIFFERENT, LATER), "boolean"), lambda x, y: None not in (x, y) and x < y),
    "of its own": (Call("isnull", (ref(OWN, "x"),), "boolean"), lambda x, y: x is None),
}


def partners(condition: Expr | None) -> Partners:
    return Partners("other", ("k", "j"), condition)


def table(names: str, kind: str, rows: list[tuple[Any, Any]]) -> pa.Table:
    key, value = names
    schema = pa.schema([(key, TYPES[kind]), (value, pa.int64())])
    return pa.Table.from_pylist([{key: a, value: b} for a, b in rows], schema=schema)


@settings(deadline=None, derandomize=True, database=None, max_examples=150)
@given(st.data())
@pytest.mark.parametrize("condition", CONDITIONS)
def test_rows_have_partners_where_a_nested_loop_finds_one(condition: str, data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(sorted(KEYS)))
    rows = st.lists(st.tuples(st.none() | KEYS[kind], st.none() | st.integers(0, 3)), max_size=12)
    own, other = data.draw(rows), data.draw(rows)
    expression, holds = CONDITIONS[condition]
    found = Others(partners(expression), table("jy", kind, other)).have(table("kx", kind, own))
    assert found is not None
    assert found.tolist() == [any(k is not None and k == j and holds(x, y) for j, y in other) for k, x in own]


def test_many_pairs_and_values_that_leave_their_type_are_left_to_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    many = table("jy", "bigint", [(7, n) for n in range(100)])
    monkeypatch.setattr(module, "MOST_PAIRS", 250)
    others = Others(partners(DIFFERENT), many)
    assert others.have(table("kx", "bigint", [(7, 5)] * 2)) is not None
    assert others.have(table("kx", "bigint", [(7, 5)] * 3)) is None
    # Without a further condition nothing is compared.
    assert np.all(Others(partners(None), many).have(table("kx", "bigint", [(7, 5)] * 3)))
    sum_ = Call("+", (ref(OWN, "x"), ref(OTHER, "y")), "bigint")
    assert (
        Others(partners(Call("<", (sum_, ref(OWN, "x")), "boolean")), many).have(
            table("kx", "bigint", [(7, 2**63 - 1)])
        )
        is None
    )


def test_a_key_is_an_equality_of_the_sides_in_a_type_with_plain_equality() -> None:
    def equal(*args: Expr) -> Call:
        return Call("=", args, "boolean")

    assert key_of(equal(ref(OTHER, "j"), ref(OWN, "k"))) == ("k", "j")
    assert key_of(equal(ref(OWN, "x"), ref(OWN, "k"))) is None
    assert key_of(equal(ref(OWN, "k", "double"), ref(OTHER, "j", "double"))) is None
    assert key_of(LATER) is None
    assert not has_plain_equality("float")


def test_without_any_others_no_row_has_a_partner() -> None:
    own = table("kx", "string", [("a", 1), (None, 2)])
    for condition in (None, DIFFERENT):
        for others in (None, table("jy", "string", []), table("jy", "string", [(None, 1)])):
            assert np.array_equal(Others(partners(condition), others).have(own), [False, False])


def test_what_is_read_of_the_other_side_is_named_once() -> None:
    condition = Call("and", (DIFFERENT, Call("<", (ref(OTHER, "j"), ref(OTHER, "y")), "boolean")), "boolean")
    assert partners(condition).columns == ["j", "y"]
    assert partners(None).columns == ["j"]
