"""A relation is a named stream, and a physical column is a named expression over its columns."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ColumnDef:
    """A physical column: what travels, rests and is probed.  Spark computes it from the stream, once.

    `name` is the stream's own column name, or `=<sql>` for a computed one; `sql` is over the stream's columns;
    `type` is Spark's simple string (`bigint`, `decimal(10,2)` …).
    """

    name: str
    sql: str
    type: str


@dataclass(frozen=True, slots=True)
class Relation:
    """A stream as the planner sees it: columns with Spark types, event time and watermark delay, TTL.

    `needed` is SQL over its columns: rows for which it is true outlive the TTL.
    """

    name: str
    columns: tuple[tuple[str, str], ...]
    time_column: str | None = None
    delay_ms: int | None = None
    ttl_us: int | None = None
    needed: str | None = None
    keep: str = "used"
    """`used`: what queries use is stored.  `all`: so are all rows as they are, for queries to come."""
    corrupt: str | None = None
    """The column in which a permissive reader leaves what it could not parse."""

    def type_of(self, column: str) -> str:
        """Spark's simple type string of a column."""
        return dict(self.columns)[column]
