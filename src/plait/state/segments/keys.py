"""Keys: from columns to hashes, and real equality where a hash is not enough.

Contract.  Two keys that Spark's `=` calls equal have equal hashes, whatever the width they are stored in: integers
are sign-extended, −0.0 is 0.0, every NaN is the one NaN, decimals count by their unscaled value.  A single
fixed-width column (`Key.exact`) hashes by a bijection; for all others compare with `same_keys`.  NULL keys never
match anything and must be dropped before (`null_rows`).

Cost.  One pass over each key column; no copy of a 64-bit column, nor of strings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from plait.kernels import I64, U64, Flags
from plait.kernels.hashing import combine, hash_bytes, mix64
from plait.query.store import Key
from plait.state.segments.arrow_types import BUFFERS


def hash_key(batch: pa.RecordBatch | pa.Table, key: Key) -> U64:
    """The 64-bit hash of every row's key."""
    hashes: U64 | None = None
    for name in key.columns:
        column = _hash_column(batch.column(name), name)
        hashes = column if hashes is None else combine(hashes, column)
    assert hashes is not None, "a key has at least one column"
    return hashes


def null_rows(batch: pa.RecordBatch | pa.Table, key: Key) -> Flags | None:
    """Which rows have a NULL in their key; None if there are none."""
    nulls: Flags | None = None
    for name in key.columns:
        column = batch.column(name)
        if column.null_count:
            here = pc.is_null(column).to_numpy(zero_copy_only=False)
            nulls = here if nulls is None else nulls | here
    return nulls


def same_keys(
    left: pa.Table, left_rows: I64, right: pa.Table, right_rows: I64, columns: Sequence[tuple[str, str]]
) -> Flags:
    """Whether row left_rows[i] of `left` and row right_rows[i] of `right` agree in all pairs of columns."""
    same = np.ones(len(left_rows), np.bool_)
    for left_name, right_name in columns:
        same &= _equal(left.column(left_name).take(left_rows), right.column(right_name).take(right_rows))
    return same


def homogeneous(table: pa.Table, hashes: U64, key: Key) -> bool:
    """Whether neighbours of equal hash always have equal keys: then a lookup in these rows needs one comparison."""
    if key.exact or len(hashes) < 2:
        return True
    apart = hashes[1:] != hashes[:-1]
    if apart.all():
        return True
    for name in key.columns:
        column = table.column(name)
        if not (apart | _equal(column.slice(0, len(hashes) - 1), column.slice(1))).all():
            return False
    return True


def _chunks(column: Any) -> list[Any]:
    return [c for c in column.chunks if len(c)] if isinstance(column, pa.ChunkedArray) else [column]


def _hash_column(column: Any, name: str) -> U64:
    assert column.null_count == 0, f"key column {name} holds NULL: rows with NULL keys are dropped before hashing"
    parts = [_hash_array(chunk) for chunk in _chunks(column)]
    return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.uint64), *parts])


def _hash_array(array: pa.Array) -> U64:
    if _is_bytes(array.type):
        return hash_bytes(*_offsets_and_bytes(array))
    low, high = _words(array)
    hashes = mix64(low)
    if high is not None:
        # A value that fits 64 bits hashes as if it were stored in 64: decimal(18,0) meets decimal(38,0).
        wide = high != _sign(low)
        if wide.any():
            hashes[wide] = combine(mix64(low[wide]), mix64(high[wide]))
    return hashes


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_string(kind) or pa.types.is_large_string(kind)
        or pa.types.is_binary(kind) or pa.types.is_large_binary(kind)
    )  # fmt: skip


def _offsets_and_bytes(array: pa.Array) -> tuple[I64, Any]:
    """Offsets and bytes of a string or binary array; slices respected."""
    if len(array) == 0:
        return np.zeros(1, np.int64), np.empty(0, np.uint8)
    _, offsets, data = array.buffers()
    large = pa.types.is_large_string(array.type) or pa.types.is_large_binary(array.type)
    width: Any = np.dtype(np.int64 if large else np.int32)
    ends = np.frombuffer(offsets, width, len(array) + 1, array.offset * width.itemsize)
    return ends.astype(np.int64, copy=False), np.frombuffer(data, np.uint8) if data else np.empty(0, np.uint8)


def _words(array: pa.Array) -> tuple[U64, U64 | None]:
    """Fixed-width values as 64-bit words, with the upper words of wide decimals.  Under NULL stands anything."""
    kind = array.type
    if pa.types.is_boolean(kind):
        return pc.fill_null(array, False).cast(pa.uint8()).to_numpy().astype(np.uint64), None
    if pa.types.is_timestamp(kind):
        if kind.unit != "us":
            array = array.cast(pa.timestamp("us", kind.tz))
        width: Any = np.int64
    elif pa.types.is_decimal(kind):
        width = {32: np.int32, 64: np.int64, 128: np.int64}.get(kind.bit_width)
    else:
        width = BUFFERS.get(kind)
    if width is None:
        raise TypeError(f"values of Arrow type {kind} cannot be join keys")
    per = 2 if pa.types.is_decimal128(kind) else 1
    values: Any = np.empty(0, width)
    if len(array):
        begin = array.offset * per * np.dtype(width).itemsize
        values = np.frombuffer(array.buffers()[1], width, len(array) * per, begin)
    if per == 2:
        # Little-endian: the lower word comes first.
        words: U64 = values.view(np.uint64)
        return words[0::2], words[1::2]
    wide = _float_words(values) if values.dtype.kind == "f" else values.astype(np.int64, copy=False)
    return wide.view(np.uint64), None


def _float_words(values: Any) -> Any:
    """As doubles, with one zero and one NaN."""
    with np.errstate(invalid="ignore"):  # signalling NaNs would warn
        doubles = values.astype(np.float64)
        doubles[doubles == 0.0] = 0.0
        doubles[np.isnan(doubles)] = np.nan
    return doubles


def _sign(low: U64) -> U64:
    """The upper word of a 64-bit value that is sign-extended to 128."""
    return (low.view(np.int64) >> 63).view(np.uint64)


def _equal(left: Any, right: Any) -> Flags:
    """Elementwise equality as Spark's `=`, where NULL equals nothing."""
    if len(left) == 0:
        return np.empty(0, np.bool_)
    if _is_bytes(left.type):
        if left.type != right.type:
            right = right.cast(left.type)
        same: Flags = pc.fill_null(pc.equal(left, right), False).to_numpy(zero_copy_only=False)
        return same
    left_low, left_high = _all_words(left)
    right_low, right_high = _all_words(right)
    same = left_low == right_low
    if left_high is not None or right_high is not None:
        same &= (_sign(left_low) if left_high is None else left_high) == (
            _sign(right_low) if right_high is None else right_high
        )
    for side in (left, right):
        if side.null_count:
            same &= pc.is_valid(side).to_numpy(zero_copy_only=False)
    return same


def _all_words(column: Any) -> tuple[U64, U64 | None]:
    parts = [_words(chunk) for chunk in _chunks(column)]
    if len(parts) == 1:
        low, high = parts[0]
        return np.ascontiguousarray(low), high
    highs = [high for _, high in parts if high is not None]
    return np.concatenate([low for low, _ in parts]), np.concatenate(highs) if highs else None
