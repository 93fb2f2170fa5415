"""Moving rows of Arrow columns: gathers that cost what the rows weigh.

pyarrow's own `take` is right for every type; for fixed-width columns without NULLs, which is what most keys and
numbers are, a numpy gather on the raw buffer is about twice as fast.  All other columns are taken in one call: apart,
each costs 20 µs, which is more than a few hundred of its values do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Rows = npt.NDArray[np.int64]

_WIDTHS = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64, 128: np.complex128}
"""A type of that many bits, to move values as they are; of 128 bits numpy has no integers."""


_UTC = "UTC"


def in_utc(table: pa.Table) -> pa.Table:
    """The same rows with every time zone called UTC; no value moves.

    A timestamp with a zone is an instant, and the name is that of the session it was read in.  Rows that rest must not
    depend on it: Arrow does not put columns together whose zones have different names.
    """
    schema = table.schema
    wanted = schema_in_utc(schema)
    return table if wanted is schema else table.cast(wanted)


def schema_in_utc(schema: pa.Schema) -> pa.Schema:
    """The schema of `in_utc`; the same object where nothing changes."""
    fields = [_field_in_utc(field) for field in schema]
    changed = any(new.type != old.type for new, old in zip(fields, schema, strict=True))
    return pa.schema(fields, schema.metadata) if changed else schema


def _field_in_utc(field: pa.Field) -> pa.Field:
    return field.with_type(_type_in_utc(field.type))


def _type_in_utc(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(kind):
        return kind if kind.tz in (None, _UTC) else pa.timestamp(kind.unit, _UTC)
    if pa.types.is_map(kind):
        return pa.map_(_field_in_utc(kind.key_field), _field_in_utc(kind.item_field))
    if pa.types.is_large_list(kind):
        return pa.large_list(_field_in_utc(kind.value_field))
    if pa.types.is_list(kind):
        return pa.list_(_field_in_utc(kind.value_field))
    if pa.types.is_struct(kind):
        return pa.struct([_field_in_utc(kind.field(i)) for i in range(kind.num_fields)])
    return kind


def single(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    """The column in one chunk."""
    if isinstance(column, pa.Array):
        return column
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def raw(array: pa.Array) -> npt.NDArray[np.generic] | None:
    """The values of a fixed-width array without NULLs as bits of that width; None for any other array."""
    fixed = pa.types.is_primitive(array.type) or pa.types.is_decimal128(array.type)
    if array.null_count or not fixed or array.type.bit_width not in _WIDTHS:
        return None
    values: npt.NDArray[np.generic] = np.frombuffer(array.buffers()[1] or b"", dtype=_WIDTHS[array.type.bit_width])
    return values[array.offset : array.offset + len(array)]


def take(arrays: Sequence[pa.Array], rows: Rows) -> list[pa.Array]:
    """`array[rows]` of arrays of one length."""
    plain = [raw(array) for array in arrays]
    others = [array for array, values in zip(arrays, plain, strict=True) if values is None]
    taken: Iterator[pa.Array] = iter(())
    if others:
        batch = pa.RecordBatch.from_arrays(others, names=[str(i) for i in range(len(others))])
        taken = iter(batch.take(pa.array(rows)).columns)
    return [
        next(taken) if values is None else from_raw(array.type, values.take(rows))
        for array, values in zip(arrays, plain, strict=True)
    ]


def from_raw(kind: pa.DataType, values: npt.NDArray[np.generic]) -> pa.Array:
    """An Arrow array without NULLs over these bits."""
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)])


def decimals(unscaled: pa.Array, precision: int, scale: int) -> pa.Array:
    """Decimals of these unscaled 64-bit values.

    >>> decimals(pa.array([-150, None], pa.int64()), 9, 2).to_pylist()
    [Decimal('-1.50'), None]
    """
    rows, begin = len(unscaled), unscaled.offset
    low = np.frombuffer(unscaled.buffers()[1] or b"", np.int64)[begin : begin + rows]
    words = np.empty((rows, 2), np.int64)
    words[:, 0] = low
    words[:, 1] = low >> 63
    valid = unscaled.is_valid().buffers()[1] if unscaled.null_count else None
    return pa.Array.from_buffers(pa.decimal128(precision, scale), rows, [valid, pa.py_buffer(words)])


def take_table(table: pa.Table, rows: Rows) -> pa.Table:
    """All columns of `table[rows]`."""
    return pa.table(take([single(c) for c in table.columns], rows), schema=table.schema)


def gather(picked: Sequence[Sequence[pa.Array]], places: Sequence[Rows], total: int) -> list[pa.Array]:
    """Columns of `total` values with the values of `picked[i]` put at `places[i]`; the places cover all of it."""
    if len(picked) == 1 and _ascending(places[0]):
        return list(picked[0])
    columns = list(zip(*picked, strict=True))
    plain = [[found for part in parts if (found := raw(part)) is not None] for parts in columns]
    others = [parts for parts, values in zip(columns, plain, strict=True) if len(values) < len(parts)]
    taken: Iterator[pa.Array] = iter(())
    if others:
        source = np.empty(total, np.int64)
        source[np.concatenate(places)] = np.arange(total)
        taken = iter(take([single(pa.chunked_array(parts)) for parts in others], source))
    return [
        next(taken) if len(values) < len(parts) else from_raw(parts[0].type, _scatter(values, places, total))
        for parts, values in zip(columns, plain, strict=True)
    ]


def _scatter(values: Sequence[npt.NDArray[np.generic]], places: Sequence[Rows], total: int) -> npt.NDArray[np.generic]:
    out = np.empty(total, values[0].dtype)
    for value, place in zip(values, places, strict=True):
        out[place] = value
    return out


def _ascending(places: Rows) -> bool:
    """Whether the values come in their final order already: the places cover all."""
    return bool(np.all(places[:-1] < places[1:]))
