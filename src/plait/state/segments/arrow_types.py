"""Arrow and numpy types of Spark's, derived from the table in `query/types.py`."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from plait.query.types import NATIVE, TIMES, TYPES, digits

_ARROW = {t.name: pa.type_for_alias(t.arrow) for t in TYPES if t.name in NATIVE and t.name not in TIMES}
_RESULT_TIMES = {"timestamp": pa.timestamp("us", "UTC"), "timestamp_ntz": pa.timestamp("us")}
BUFFERS = {pa.type_for_alias(t.arrow): np.dtype(t.numpy) for t in TYPES if t.numpy is not None and t.name not in TIMES}
"""The numpy type of an Arrow array's values, by its Arrow type; times and decimals depend on more than that."""


def arrow_type(kind: str) -> pa.DataType | None:
    """Of a Spark type that tasks compute with, as operators see it; None of another."""
    decimal = digits(kind)
    return _ARROW.get(kind) if decimal is None else pa.decimal128(*decimal)


def inner_type(kind: str) -> pa.DataType:
    """Of values inside an expression: times are microseconds."""
    return pa.int64() if kind in TIMES else arrow_type(kind)


def result_type(kind: str) -> pa.DataType:
    """Of values that leave an expression: times are instants in UTC, or times without a zone."""
    return _RESULT_TIMES.get(kind) or arrow_type(kind)
