"""Rows as people and programs read them: a table, one JSON object per line, or CSV.

Values keep their meaning: decimals are texts with all their digits, times are texts in ISO form (with the offset of
the session's time zone, if the type has one), binary is base64, NULL is null in JSON and empty in CSV.
"""

from __future__ import annotations

import base64
import csv
import json
import math
from collections.abc import Callable, Iterable, Sequence
from datetime import date, datetime, tzinfo
from decimal import Decimal
from itertools import islice
from typing import TYPE_CHECKING, Any, TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from pyspark.sql.types import DataType, StructType

Value = Callable[[Any], Any]
NOT_A_TERMINAL_WIDTH = 10_000
"""A table in a file is as wide as it needs to be."""


class RowWriter:
    """Writes rows in one format to one stream; CSV gets its header once."""

    def __init__(self, format: str, out: TextIO, most: int) -> None:
        self.format = format
        self.out = out
        self.most = most
        """Rows a table shows; the other formats write all."""
        self._header: tuple[str, ...] = ()

    def write(self, names: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
        """Writes the rows and says how many they were."""
        if self.format == "table":
            return self._table(names, rows)
        count = 0
        for count, row in enumerate(rows, 1):  # noqa: B007 - counted
            self._line(names, row)
        if not count and self.format == "csv":
            self._csv_header(names)
        self.out.flush()
        return many(count, "row")

    def _line(self, names: Sequence[str], row: Sequence[Any]) -> None:
        if self.format == "json":
            self.out.write(json.dumps(dict(zip(names, row, strict=True)), ensure_ascii=False) + "\n")
        else:
            self._csv_header(names)
            csv.writer(self.out, lineterminator="\n").writerow([as_csv(value) for value in row])

    def _csv_header(self, names: Sequence[str]) -> None:
        if self._header != tuple(names):
            self._header = tuple(names)
            csv.writer(self.out, lineterminator="\n").writerow(names)

    def _table(self, names: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
        shown = list(islice(rows, self.most + 1))
        more, shown = len(shown) > self.most, shown[: self.most]
        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        for column, name in enumerate(names):
            numbers = all(_is_number(row[column]) for row in shown)
            table.add_column(Text(name), justify="right" if numbers and shown else "left", overflow="fold")
        for row in shown:
            table.add_row(*(Text("NULL", "dim") if value is None else Text(as_text(value)) for value in row))
        console = Console(file=self.out, highlight=False)
        if not console.is_terminal:
            console.width = NOT_A_TERMINAL_WIDTH
        console.print(table)
        self.out.flush()
        return f"the first {many(self.most, 'row')}; \\rows N shows more" if more else many(len(shown), "row")


def many(number: int, what: str) -> str:
    """A count with its noun.

    >>> many(1, "row"), many(1200, "row")
    ('1 row', '1,200 rows')
    """
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def as_text(value: Any) -> str:
    """A plain value in a table or in CSV.

    >>> as_text(True), as_text([1, None]), as_text("x"), as_text(0.1)
    ('true', '[1, null]', 'x', '0.1')
    """
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def as_csv(value: Any) -> str:
    """A plain value in CSV: NULL is empty."""
    return "" if value is None else as_text(value)


def converters(schema: StructType, zone: tzinfo) -> list[Value]:
    """What makes the values of each column plain: texts, numbers, booleans, lists and dicts."""
    return [converter(field.dataType, zone) for field in schema.fields]


def converter(kind: DataType, zone: tzinfo) -> Value:
    """What makes a value of this type plain."""
    from pyspark.sql import types as T

    def unless_null(convert: Value) -> Value:
        return lambda value: None if value is None else convert(value)

    if isinstance(kind, T.StructType):
        inner = converters(kind, zone)
        return unless_null(lambda row: {n: c(v) for n, c, v in zip(kind.names, inner, row, strict=True)})
    if isinstance(kind, T.ArrayType):
        element = converter(kind.elementType, zone)
        return unless_null(lambda items: [element(item) for item in items])
    if isinstance(kind, T.MapType):
        key, value = converter(kind.keyType, zone), converter(kind.valueType, zone)
        return unless_null(lambda entries: {as_text(key(k)): value(v) for k, v in entries.items()})
    if isinstance(kind, T.TimestampType):
        # PySpark gives it as local time without a zone.
        return unless_null(lambda time: time.astimezone(zone).isoformat())
    return unless_null(plain)


def plain(value: Any) -> Any:
    """A value that is no collection and has no time zone, as JSON can hold it.

    >>> plain(Decimal("1.50")), plain(date(2024, 2, 29)), plain(float("nan")), plain(b"x")
    ('1.50', '2024-02-29', 'NaN', 'eA==')
    """
    if isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {math.inf: "Infinity", -math.inf: "-Infinity"}.get(value, "NaN")
    if isinstance(value, Decimal):
        return format(value, "f")
    if isinstance(value, date | datetime):
        return value.isoformat()
    if isinstance(value, bytes | bytearray):
        return base64.b64encode(value).decode()
    return str(value)


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))
