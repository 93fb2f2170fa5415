"""What a join must give: DuckDB's batch join of the input so far, or a naive loop, as bags of comparable rows.

Rows are compared as bags (`Counter`): NaN is one value, −0.0 is 0.0, timestamps are microseconds, bytes are bytes,
decimals and integers are what they are worth.
"""

from __future__ import annotations

import datetime as dt
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

Bag = Counter[tuple[Any, ...]]
NAN = "NaN"


def plain(value: Any) -> Any:
    """A value that equals exactly what Spark's `=` calls equal, and can be counted."""
    if isinstance(value, float):
        return NAN if math.isnan(value) else value + 0.0
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    if isinstance(value, dt.datetime):
        zoned = value if value.tzinfo else value.replace(tzinfo=dt.UTC)
        return (zoned - dt.datetime(1970, 1, 1, tzinfo=dt.UTC)) // dt.timedelta(microseconds=1)
    if isinstance(value, bool):
        # True == 1 for Python; a boolean column must not pass for a number.
        return ("bool", value)
    return value


def rows_of(table: pa.Table) -> list[tuple[Any, ...]]:
    """The rows of a table, comparable."""
    columns = []
    for column in table.columns:
        if pa.types.is_timestamp(column.type):
            column = pc.cast(pc.cast(column, pa.timestamp("us")), pa.int64())
        columns.append([plain(value) for value in column.to_pylist()])
    return list(zip(*columns, strict=True)) if columns else [()] * table.num_rows


def bag(rows: pa.Table | Iterable[Sequence[Any]]) -> Bag:
    """Rows as a bag; of a table, or of tuples such as Spark's `collect` gives."""
    if isinstance(rows, pa.Table):
        return Counter(rows_of(rows))
    return Counter(tuple(plain(value) for value in row) for row in rows)


def naive_zone(table: pa.Table) -> pa.Table:
    """Without time zones: DuckDB compares zoned times the same, but needs one more extension for them."""
    fields = [pa.field(f.name, pa.timestamp("us") if pa.types.is_timestamp(f.type) else f.type) for f in table.schema]
    return table.cast(pa.schema(fields))


class Oracle:
    """Batch joins in DuckDB over the input so far."""

    def __init__(self) -> None:
        self.connection = duckdb.connect(config={"threads": 1, "autoload_known_extensions": False})

    def __enter__(self) -> Oracle:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()

    def load(self, tables: Mapping[str, pa.Table]) -> None:
        """These are all the rows there are."""
        for name, table in tables.items():
            self.connection.register(f"{name}__arrow", naive_zone(table))
            self.connection.execute(f'CREATE OR REPLACE TABLE "{name}" AS SELECT * FROM "{name}__arrow"')
            self.connection.unregister(f"{name}__arrow")

    def append(self, name: str, table: pa.Table) -> None:
        """More rows of a table that `load` made."""
        self.connection.register("more__arrow", naive_zone(table))
        self.connection.execute(f'INSERT INTO "{name}" SELECT * FROM "more__arrow"')
        self.connection.unregister("more__arrow")

    def table(self, sql: str) -> pa.Table:
        """What the query gives."""
        return self.connection.execute(sql).to_arrow_table()

    def count(self, sql: str) -> int:
        """How many rows the query gives."""
        return int(self.connection.execute(f"SELECT count(*) FROM ({sql})").fetchall()[0][0])

    def bag(self, sql: str) -> Bag:
        """What the query gives, as a bag."""
        return bag(self.table(sql))


def batch_join(tables: Mapping[str, pa.Table], sql: str) -> Bag:
    """One query over tables, in DuckDB."""
    with Oracle() as oracle:
        oracle.load(tables)
        return oracle.bag(sql)


def nested_loops(
    tables: Sequence[Sequence[tuple[Any, ...]]], condition: Callable[..., bool | None]
) -> Counter[tuple[tuple[Any, ...], ...]]:
    """All combinations of one row of each table for which the condition is true, not NULL."""
    return Counter(rows for rows in itertools.product(*tables) if condition(*rows) is True)
