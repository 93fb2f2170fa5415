"""One checksum of a bag of rows that Spark and DuckDB compute alike, whatever the order of the rows.

Each value becomes an integer v (decimals in hundredths, strings by the front of their MD5, NULL its own number);
a row becomes h = Σ (v mod 1048573)·pᵢ mod (2³¹−1); the checksum is Σ h² over the rows.  Squaring makes it depend on
which values stand in one row together, not only on each column's total.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

Dialect = Literal["spark", "duckdb"]
Columns = Sequence[tuple[str, str]]
"""Names and types, as `DataFrame.dtypes` or DuckDB's DESCRIBE gives them."""

_SMALL, _LARGE = 1_048_573, 2_147_483_647


def checksum_sql(columns: Columns, dialect: Dialect) -> str:
    """The checksum as an aggregate expression over rows with these columns."""
    terms = [
        f"(coalesce({_value(name, kind, dialect)}, -1) + 2) % {_SMALL} * {2_654_435_761 * (2 * i + 1) % _LARGE}"
        for i, (name, kind) in enumerate(columns)
    ]
    row = f"(({' + '.join(terms)}) % {_LARGE})"
    return f"coalesce(sum(CAST({row} * {row} AS DECIMAL(38,0))), 0)"


def _value(name: str, kind: str, dialect: Dialect) -> str:
    kind = kind.lower()
    if kind in ("string", "varchar"):
        front = f"substr(md5({name}), 1, 8)"
        return f"CAST(conv({front}, 16, 10) AS BIGINT)" if dialect == "spark" else f"CAST('0x' || {front} AS BIGINT)"
    return f"CAST({name} * 100 AS BIGINT)" if kind.startswith("decimal") else f"CAST({name} AS BIGINT)"
