"""Types that survive the way of a row: Arrow in the tasks, Arrow IPC at rest, Parquet in the results."""

from __future__ import annotations

import re

from plait.errors import QueryError

_LOST = re.compile(
    r"(?<![\w`])(interval[\w ]*|variant|void|null|time\(\d\)|geometry|geography|udt|vector|matrix)(?=[,>(]|$)"
)


def refuse_type(kind: str, what: str) -> None:
    """Raise a QueryError if values of this Spark type cannot travel; `what` names the column.

    >>> refuse_type("array<struct<a:int,b:decimal(3,2)>>", "x")
    >>> refuse_type("interval day to second", "a.ts - b.ts")
    Traceback (most recent call last):
    plait.errors.QueryError: [TYPE] a.ts - b.ts has type interval day to second, which Parquet and Arrow cannot hold ...
    """
    if _LOST.search(kind):
        raise QueryError(
            "TYPE",
            f"{what} has type {kind}, which Parquet and Arrow cannot hold for Plait",
            f"cast it, for example CAST({what} AS STRING)",
        )
