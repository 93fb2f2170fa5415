"""Sets of queries in result files: which rows of a shared file are whose (paper 004's query sets, where they rest).

Contract.  A file that several queries share has, after its columns, `#set0`, `#set1`, …: 64-bit words of the set of
queries that a row belongs to.  Bits are positions among the queries that share this very file; `ResultFile.bit` says
which is a query's.  So a file can be read without any plan, and no bit ever changes its meaning.  Words are signed,
because Spark has no other ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from plait.kernels import I64, U64
from plait.kernels.sets import translated
from plait.query.store import SET, SET_BITS
from plait.state.segments.sieve import as_words

_ROWS_AT_A_TIME = 1 << 14


def width_of(queries: int) -> int:
    """Words of a set of so many queries."""
    return -(-queries // SET_BITS)


def set_column(bit: int) -> str:
    """The column that a bit is in."""
    return f"{SET}{bit // SET_BITS}"


def with_sets(table: pa.Table, sets: U64) -> pa.Table:
    """Rows with their sets beside them."""
    for word in range(sets.shape[1]):
        signed = np.ascontiguousarray(sets[:, word]).view(np.int64)
        table = table.append_column(f"{SET}{word}", pa.array(signed))
    return table


def without_sets(names: Sequence[str]) -> list[str]:
    """The columns of a shared file that are the queries'."""
    return [name for name in names if not name.startswith(SET)]


def sets_in(rows: pa.RecordBatch) -> U64:
    """The sets of rows of a shared file."""
    words = [rows.column(name).to_numpy() for name in rows.schema.names if name.startswith(SET)]
    return np.stack(words, axis=1).view(np.uint64)


def of_bit(rows: pa.RecordBatch, bit: int) -> pa.RecordBatch:
    """The rows of a shared file that have a bit, without sets."""
    words = rows.column(set_column(bit)).to_numpy()
    mine = pa.array(words >> np.int64(bit % SET_BITS) & 1 == 1)
    return rows.select(without_sets(rows.schema.names)).filter(mine)


def query_batches(
    file: pq.ParquetFile, bit: int | None, columns: list[str] | None = None, size: int = _ROWS_AT_A_TIME
) -> Iterator[pa.RecordBatch]:
    """A query's rows of a result file, some at a time: all columns, or these."""
    if bit is None:
        yield from file.iter_batches(size, columns=columns)
        return
    names = columns if columns is not None else without_sets(file.schema_arrow.names)
    for rows in file.iter_batches(size, columns=[*names, set_column(bit)]):
        yield of_bit(rows, bit)


def query_table(source: str | pa.NativeFile, bit: int | None, columns: list[str] | None = None) -> pa.Table:
    """A query's rows of a result file: all columns, or these.  Rows of others are held for a moment only."""
    if bit is None:
        # Nothing in a path says anything of the rows.
        return pq.read_table(source, columns=columns, partitioning=None)
    with pq.ParquetFile(source) as file:
        names = columns if columns is not None else without_sets(file.schema_arrow.names)
        schema = pa.schema([file.schema_arrow.field(name) for name in names])
        return pa.Table.from_batches((rows.select(names) for rows in query_batches(file, bit, names)), schema)


def mapped(sets: U64, bits: Sequence[tuple[int, int]], width: int) -> U64:
    """Sets in `width` other words: of each pair (old, new), bit `new` is what bit `old` was; other bits are 0.

    >>> mapped(np.array([[5], [2]], np.uint64), [(2, 0), (1, 70)], 2).tolist()
    [[1, 0], [0, 64]]
    """
    return translated(np.ascontiguousarray(sets).view(np.int64), _table(tuple(bits), sets.shape[1], width))


@lru_cache(maxsize=64)
def _table(bits: tuple[tuple[int, int], ...], words: int, width: int) -> U64:
    """[byte, value, word] for `translated`."""
    table = np.zeros((8 * words, 256, width), np.uint64)
    for old, new in bits:
        byte, bit = divmod(old, 8)
        table[byte, np.arange(256) >> bit & 1 == 1] |= as_words(1 << new, width)
    return table


def row_bytes(table: pa.Table) -> I64:
    """Bytes of each row in memory, at most; of nested values, their mean."""
    found, fixed = np.zeros(table.num_rows, np.int64), 0
    for column in table.columns:
        kind = column.type
        if pa.types.is_string(kind) or pa.types.is_binary(kind):
            found += pc.binary_length(column).fill_null(0).to_numpy()
            fixed += 5
            continue
        try:
            fixed += kind.bit_width // 8 + 2
        except ValueError:
            fixed += column.nbytes // max(1, table.num_rows) + 1
    return found + fixed
