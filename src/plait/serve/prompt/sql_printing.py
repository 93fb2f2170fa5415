"""What statements of `plait sql` print: rows to `out`, everything else that is said to `notes`."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO
from zoneinfo import ZoneInfo

from rich.console import Console
from rich.text import Text

from plait.errors import QueryError
from plait.serve.prompt.sql_rows import RowWriter, converters
from plait.sql.catalyst.read_query import said

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from plait.serve.prompt.sql_prompt import Interrupts

LOOK_EVERY_SECONDS = 0.1


class Quit(Exception):
    """The user wants to leave."""


class Stopped(Exception):
    """The user has stopped a statement before its end."""


@dataclasses.dataclass(slots=True)
class Settings:
    """What `\\format`, `\\rows`, `\\follow` and `\\once` change."""

    format: str = "table"
    follow: bool = False
    rows: int = 100
    checkpoint: str | None = None
    """Where SELECTs over streams keep what they have read; None forgets it."""


@dataclasses.dataclass
class Printer:
    """Prints what Spark reads."""

    spark: SparkSession
    settings: Settings
    interrupts: Interrupts
    out: TextIO
    notes: Console

    def say(self, text: str, style: str = "") -> None:
        """Anything but rows."""
        self.notes.print(Text(text, style), soft_wrap=True, highlight=False)

    def writer(self) -> RowWriter:
        """Of rows, as the settings say."""
        return RowWriter(self.settings.format, self.out, self.settings.rows)

    def show(self, frame: DataFrame) -> None:
        """Prints a frame; Ctrl-C cancels the jobs that make it (Stopped)."""
        said = self._interruptible(lambda: self.written(self.writer(), frame))
        self.say(said, "dim")

    def written(self, writer: RowWriter, frame: DataFrame) -> str:
        """Writes a frame; says how many rows it has."""
        zone = ZoneInfo(self.spark.conf.get("spark.sql.session.timeZone") or "UTC")
        plain = converters(frame.schema, zone)
        # A table shows few rows: no more than those are made.
        rows = frame.limit(writer.most + 1).collect() if writer.format == "table" else frame.toLocalIterator()
        return writer.write(
            frame.columns, ([make(value) for make, value in zip(plain, row, strict=True)] for row in rows)
        )

    def _interruptible(self, work: Callable[[], str]) -> str:
        """Works in a thread, so that Ctrl-C need not break into a call of the JVM."""
        from pyspark import InheritableThread

        from plait.runtime.spark.failures import translated

        context = self.spark.sparkContext
        group = f"plait-sql-{time.monotonic_ns()}"
        outcome: list[str | BaseException] = []

        def go() -> None:
            try:
                context.setJobGroup(group, "plait sql")
                outcome.append(work())
            except BaseException as error:
                outcome.append(error)

        thread = InheritableThread(target=go)
        thread.start()
        cancelled = False
        while thread.is_alive():
            thread.join(LOOK_EVERY_SECONDS)
            if self.interrupts.noted and not cancelled:
                cancelled = True
                context.cancelJobGroup(group)
        found = outcome[0]
        if isinstance(found, str):
            return found
        if cancelled:
            raise Stopped from None
        raise found if isinstance(found, BrokenPipeError) else translated(found) from found

    def batch(self, sql: str) -> DataFrame:
        """What Spark makes of a text over its tables and views."""
        from pyspark.errors import AnalysisException

        try:
            frame = self.spark.sql(sql)
        except AnalysisException as error:
            raise QueryError("ANALYSIS", briefly(error), "correct the query as Spark's message says") from error
        twice = sorted({name for name in frame.columns if frame.columns.count(name) > 1})
        if twice:
            raise QueryError("DUPLICATE_COLUMN", f"two columns are called {twice[0]!r}", "name them apart with AS")
        return frame


def briefly(error: Exception) -> str:
    """What Spark says, without its code and where: at the prompt the text is in sight."""
    return re.sub(r"^\[[\w.]+\] |; line \d+ pos \d+$", "", said(error))
