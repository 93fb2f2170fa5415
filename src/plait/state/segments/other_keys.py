"""The index of a segment by a key that its rows are not sorted by: the rows' numbers, in the order of its hashes.

Contract.  Entries are ascending by hash, one for every row; rows with NULL in the key come last, and have no number.
An index is written with the segment when rows are merged, or compressed, and never changes.  What an epoch has added
has none: its rows are searched one by one until they are merged (`searched.py`).

Cost.  12 bytes a row in a flat segment, 16 in a compressed one, and sorting the hashes once per merge.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from plait.kernels import U64
from plait.query.store import Key, Store
from plait.state.segments.columns import single
from plait.state.segments.keys import hash_key, null_rows

Numbers = npt.NDArray[np.unsignedinteger]
Index = tuple[U64, Numbers]
"""Hashes, and the number of the row of each: counted from the segment's first row."""

_HASH, _ROW = "#by hash", "#by row"
NO_ROW = 2**32 - 1
"""Of an entry whose key is NULL."""


def searched_in(table: pa.Table, store: Store) -> list[Key]:
    """The keys by which rows of a store are searched, of which these rows have the columns."""
    return [key for key in store.searched if set(key.columns) <= set(table.column_names)]


def hashes_by(table: pa.Table, key: Key) -> tuple[U64, npt.NDArray[np.bool_] | None]:
    """By another key, the hash of every row, and which rows have NULL in it: their hash is the greatest."""
    rows = table.select(list(key.columns))
    nulls = null_rows(rows, key)
    if nulls is None:
        return hash_key(rows, key), None
    hashes = np.full(table.num_rows, 2**64 - 1, np.uint64)
    if not nulls.all():
        hashes[~nulls] = hash_key(rows.filter(pa.array(~nulls)), key)
    return hashes, nulls


def index_of(hashes: U64, nulls: npt.NDArray[np.bool_] | None) -> Index:
    """The index of rows with these hashes."""
    numbers = np.arange(len(hashes), dtype=np.uint32)
    if nulls is not None:
        numbers[nulls] = NO_ROW
    order = np.lexsort((numbers, hashes)) if nulls is not None else np.argsort(hashes, kind="stable")
    return hashes[order], numbers[order]


def index_columns(table: pa.Table, keys: Iterable[Key]) -> dict[str, pa.Array]:
    """The indexes of a flat segment, as columns that stand beside its rows."""
    found: dict[str, pa.Array] = {}
    for key in keys:
        hashes, numbers = index_of(*hashes_by(table, key))
        found |= {name: pa.array(values) for name, values in zip(_names(key.columns), (hashes, numbers), strict=True)}
    return found


def split(table: pa.Table) -> tuple[pa.Table, Mapping[str, Index]]:
    """The rows of a flat segment, and its indexes."""
    named = [name.removeprefix(_HASH) for name in table.column_names if name.startswith(_HASH)]
    found: dict[str, Index] = {}
    for name in named:
        hashes, numbers = (single(table.column(kind + name)).to_numpy() for kind in (_HASH, _ROW))
        found[name] = hashes, numbers
    return table.drop_columns([kind + name for name in named for kind in (_HASH, _ROW)]), found


def called(columns: Sequence[str]) -> str:
    """What an index by these columns is called."""
    return "".join(f" {len(column)} {column}" for column in columns)


def _names(columns: Sequence[str]) -> tuple[str, str]:
    return _HASH + called(columns), _ROW + called(columns)
