"""The table of types says what Spark itself says."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import types as T
from pyspark.sql.pandas.types import to_arrow_type

from plait.query.types import FIXED, INTEGRAL, NATIVE, TYPES, WHOLE_DIGITS, digits, has_plain_equality, is_key_type
from plait.state.segments.arrow_types import BUFFERS, arrow_type, inner_type, result_type

SPARK = (
    *(T.ByteType(), T.ShortType(), T.IntegerType(), T.LongType(), T.FloatType(), T.DoubleType(), T.BooleanType()),
    *(T.StringType(), T.BinaryType(), T.DateType(), T.TimestampType(), T.TimestampNTZType()),
)
BY_NAME = {kind.simpleString(): kind for kind in SPARK}


def test_all_atomic_types_with_a_name_of_their_own_are_in_the_table_once() -> None:
    assert sorted(t.name for t in TYPES) == sorted(BY_NAME)


@pytest.mark.parametrize("name", NATIVE)
def test_arrow_types_are_those_in_which_spark_hands_rows_over(name: str) -> None:
    assert result_type(name) == to_arrow_type(BY_NAME[name], timezone="UTC")


def test_decimals_are_a_rule_beside_the_table() -> None:
    kind = T.DecimalType(12, 2)
    assert digits(kind.simpleString()) == (12, 2)
    assert arrow_type(kind.simpleString()) == to_arrow_type(kind)
    assert is_key_type(kind.simpleString())


@pytest.mark.parametrize("kind", ["array<int>", "struct<a:int>", "string collate UNICODE_CI", "interval day to second"])
def test_other_types_are_neither_keys_nor_computed_with(kind: str) -> None:
    assert not is_key_type(kind)
    assert not has_plain_equality(kind)
    assert arrow_type(kind) is None


def test_buffers_are_as_wide_as_arrow_s() -> None:
    assert {kind: dtype.itemsize * 8 for kind, dtype in BUFFERS.items()} == {kind: kind.bit_width for kind in BUFFERS}
    assert set(BUFFERS) == {inner_type(name) for name in FIXED} - {pa.bool_()}


def test_integral_types_widen_in_the_order_of_the_table_and_fit_their_decimals() -> None:
    widths = [BUFFERS[inner_type(name)] for name in INTEGRAL]
    assert widths == sorted(widths, key=lambda dtype: dtype.itemsize)
    for name, width in zip(INTEGRAL, widths, strict=True):
        assert len(str(np.iinfo(width).max)) <= WHOLE_DIGITS[name]
