"""Stores and tables that the tests of this folder share."""

from __future__ import annotations

import dataclasses
import datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa

from plait.query.relation import ColumnDef
from plait.query.store import ARRIVED, MASK, Key, Store
from plait.query.types import is_exact_key
from plait.state.files.segment_home import SegmentHome
from plait.state.log.checkpoint import Checkpoint
from plait.state.log.sealed import seal
from plait.state.segments.block_segment import writing_deep
from plait.state.segments.keys import hash_key
from plait.state.segments.segment import SegmentInfo, new_run, write_segment

UTC = datetime.UTC
DAY = datetime.date(2024, 2, 29)
MOMENT = datetime.datetime(2024, 2, 29, 12, 30, 15, 123456)

KEYS: dict[str, tuple[pa.DataType, list[object]]] = {
    "tinyint": (pa.int8(), [-128, -1, 0, 1, 127]),
    "smallint": (pa.int16(), [-32768, -1, 0, 1, 32767]),
    "int": (pa.int32(), [-(2**31), -1, 0, 1, 2**31 - 1]),
    "bigint": (pa.int64(), [-(2**63), -1, 0, 1, 2**63 - 1]),
    "boolean": (pa.bool_(), [True, False, True, True, False]),
    "date": (pa.date32(), [DAY, DAY, datetime.date(1900, 1, 1), datetime.date(1970, 1, 1), DAY]),
    "timestamp": (pa.timestamp("us", "UTC"), [MOMENT.replace(tzinfo=UTC, second=s) for s in range(5)]),
    "timestamp_ntz": (pa.timestamp("us"), [MOMENT.replace(second=s) for s in range(5)]),
    "float": (pa.float32(), [0.0, 1.5, -1.5, float("inf"), 3.0]),
    "double": (pa.float64(), [0.0, 1.5, 1e300, float("-inf"), 0.1]),
    "decimal(18,2)": (pa.decimal128(18, 2), [Decimal(n).scaleb(-2) for n in (0, -1, 1, 10**18 - 1, -(10**18) + 1)]),
    "decimal(38,0)": (pa.decimal128(38, 0), [Decimal(n) for n in (0, -1, 2**63, 10**38 - 1, -(10**38) + 1)]),
    "string": (pa.string(), ["", "a", "ab", "eight ch", "żółć and a longer one"]),
    "binary": (pa.binary(), [b"", b"\0", b"\0\0", b"12345678", b"123456789"]),
}
"""Every key type: its Arrow type and five values."""

PAYLOAD = pa.struct({"tags": pa.list_(pa.string()), "scores": pa.map_(pa.string(), pa.float64())})


def key(*columns: tuple[str, str]) -> Key:
    kinds = tuple(kind for _, kind in columns)
    return Key(tuple(name for name, _ in columns), kinds, len(columns) == 1 and is_exact_key(kinds[0]))


def store(
    by: Key | None = None, *, name: str = "orders by k", time: str | None = None, keep_us: int | None = None,
    ttl_us: int | None = None, columns: tuple[str, ...] = ("k",),
) -> Store:  # fmt: skip
    defs = tuple(ColumnDef(c, c, "bigint") for c in columns)
    return Store(name, "orders", by or key(("k", "bigint")), defs, False, time, keep_us, ttl_us)


def sorted_rows(table: pa.Table, by: Key) -> tuple[pa.Table, np.ndarray]:
    hashes = hash_key(table, by)
    order = np.argsort(hashes, kind="stable")
    return table.take(order), hashes[order]


def write(directory: object, of: Store, table: pa.Table, epoch: int = 0, tier: int = 0) -> SegmentInfo:
    rows, hashes = sorted_rows(table, of.key)
    return write_segment(SegmentHome(str(directory)), of, rows, hashes, epoch=epoch, tier=tier, sync=False)


def write_deep(directory: object, of: Store, table: pa.Table, epoch: int = 0, pieces: int = 1) -> SegmentInfo:
    """The rows as a deep segment, written in so many pieces."""
    rows, hashes = sorted_rows(table, of.key)
    width = 8 + rows.nbytes / len(hashes)
    step = -(-len(hashes) // pieces)
    with writing_deep(SegmentHome(str(directory)), of, rows.schema, width, sync=False) as out:
        for begin in range(0, len(hashes), step):
            out.write(hashes[begin : begin + step], rows.slice(begin, step))
    return out.info(epoch=epoch, tier=2, run=new_run())


def everything(times: int = 1) -> pa.Table:
    """Six rows of every type, each with a NULL; `times` over, with a k of their own."""
    columns = {kind: pa.array([*values, None] * times, arrow) for kind, (arrow, values) in KEYS.items()}
    nested = [{"tags": ["a", None], "scores": [("x", 1.5)]}, None, {"tags": None, "scores": []}]
    columns["k"] = pa.array(range(6 * times), pa.int64())
    columns["nested"] = pa.array(nested * 2 * times, PAYLOAD)
    columns["void"] = pa.nulls(6 * times)
    columns[MASK] = pa.array([1, 2, 3, 1, 2, 3] * times, pa.int64())
    columns[ARRIVED] = pa.array([7, 8, 9, 7, 8, 9] * times, pa.int64())
    return pa.table(columns)


def info(n: int = 0, **changes: object) -> SegmentInfo:
    plain = SegmentInfo(
        store="s", path=f"aa/{n:032x}.arrow", epoch=n, tier=0, rows=10, keys=5, bytes=1000, checksum="00",
        run=f"run {n}", lo_group=0, hi_group=1024, min_time=None, max_time=None, max_arrived=None,
    )  # fmt: skip
    return dataclasses.replace(plain, **changes)  # type: ignore[arg-type]


def put_old_catalog(checkpoint: Checkpoint, value: dict[str, Any]) -> None:
    """What a release with format 3 was made for."""
    checkpoint.files.put_if_absent("catalog.json", seal("plait-catalog", value))
