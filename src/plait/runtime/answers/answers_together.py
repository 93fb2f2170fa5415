"""Answers that are finished together: one Spark job for all queries with the same finishing plan, then each its part.

Contract.  A query's part is its answer, row for row, as `Answer.delivered` gives it.  Queries are finished together if
their answers are maintained aggregates, filtered and projected alike (`Residual.finishes_like`), in the same output
mode; the joins below, filters and windows may differ.  Where their partial rows cannot be read together, or the job
fails, every query is answered by itself: so one query's error stays its own.

Cost: partial rows are read once for all; small ones are merged here, others by Spark.  An answer of some megabytes
waits in the driver until its sinks have it, a larger one in files.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from plait.query.types import is_key_type
from plait.runtime.answers.answer import Answer, Bounds, Sources, ends_of
from plait.runtime.answers.live_results import LiveResults
from plait.runtime.answers.placed_groups import HERE_BYTES, NEW, Placed, frame_of_each, placed
from plait.runtime.answers.result_reader import SMALL_BYTES, ResultRows
from plait.runtime.task import group_writer
from plait.runtime.task.shared_groups import PLACE
from plait.runtime.task.shared_results import SHARED
from plait.sql.answer.residual import Source, merged

COLLECTED_BYTES = 4 * SMALL_BYTES
"""Partial rows that come to more may have an answer too large for the driver."""
_LOG = logging.getLogger("plait")


def alike(
    answers: Iterable[Answer], rows: ResultRows, frames: dict[tuple[tuple[str, str], ...], DataFrame]
) -> list[tuple[Answer, ...]]:
    """Answers that can be finished together; one alone is in none of the groups."""
    found: dict[object, list[list[Answer]]] = {}
    for answer in answers:
        source = _source(answer)
        if source is None:
            continue
        assert source.maintained is not None
        closing = None if source.closing is None else (source.closing.key, source.closing.field)
        key = (answer.mode, source.columns, tuple(source.maintained.merging()), closing)
        groups = found.setdefault(key, [])
        if source.columns not in frames:
            frames[source.columns] = rows.nothing((*source.columns, (PLACE, "int")))
        for group in groups:
            if group[0].residual.finishes_like(answer.residual, frames[source.columns]):
                group.append(answer)
                break
        else:
            groups.append([answer])
    return [tuple(group) for groups in found.values() for group in groups if len(group) > 1]


def _source(answer: Answer) -> Source | None:
    """The aggregate that an answer is, if tasks group it and its rows can wait in Arrow's types."""
    source = answer.residual.only_source
    if source is None or source.graph is None or source.graph.grouping is None:
        return None
    kinds = [kind for _, kind in (*answer.residual.output, *source.columns)]
    names = [name.lower() for name, _ in answer.residual.output]
    return source if all(map(is_key_type, kinds)) and PLACE not in names and NEW not in names else None


@dataclass
class Together:
    """The answers after one epoch, of those of some queries that can be finished together."""

    sources: Sources
    rows: ResultRows
    asked: Sequence[Answer]
    """Those whose sinks are going to ask."""
    _groups: dict[str, Group] = field(init=False)

    def __post_init__(self) -> None:
        names = {answer.name for answer in self.asked}
        self._groups = {}
        if self.sources.finished_alike is None:
            self.sources.finished_alike = self._alike()
        for group in self.sources.finished_alike:
            mine = tuple(answer for answer in group if answer.name in names)
            if len(mine) > 1:
                made = Group(mine, self.rows, self.sources.live)
                self._groups |= {answer.name: made for answer in mine}

    def _alike(self) -> list[tuple[Answer, ...]]:
        try:
            return alike(self.sources.answers.values(), self.rows, self.sources.live.groups.together.frames)
        except Exception as error:
            # Then each is answered by itself, and fails alone if it must.
            _LOG.debug("plans of answers cannot be compared: %s", error)
            return []

    def delivered(self, answer: Answer) -> DataFrame:
        """What its sink gets."""
        group = self._groups.get(answer.name)
        found = None if group is None else group.frame(answer)
        return answer.delivered(self.rows, self.sources.live) if found is None else found

    @contextmanager
    def one_file(self, answer: Answer) -> Iterator[list[str]]:
        """The same as one file of this machine, or none, for as long as the block runs."""
        group = self._groups.get(answer.name)
        table = None if group is None else group.table(answer)
        with self.rows.one_file(answer.name, self.delivered(answer) if table is None else table) as paths:
            yield paths

    def close(self) -> None:
        """Removes what waits in files."""
        for group in {id(group): group for group in self._groups.values()}.values():
            group.close()


@dataclass
class Group:
    """Queries with the same finishing plan; a query's place is its number among them."""

    answers: tuple[Answer, ...]
    rows: ResultRows
    live: LiveResults
    _parts: Parts | None = None
    _failed: bool = False

    def frame(self, answer: Answer) -> DataFrame | None:
        """A query's part; None if it must be answered by itself."""
        parts = self._made()
        return None if parts is None else parts.frame(self.answers.index(answer))

    def table(self, answer: Answer) -> pa.Table | None:
        """The same, if it is here."""
        parts = self._made()
        return None if parts is None else parts.table(self.answers.index(answer))

    def close(self) -> None:
        """Removes what waits in files."""
        if self._parts is not None:
            self._parts.close()

    def _made(self) -> Parts | None:
        if self._parts is None and not self._failed:
            try:
                self._parts = self._finished()
            except Exception as error:
                # Whose error it is shows when each is answered by itself.
                names = ", ".join(answer.name for answer in self.answers)
                _LOG.debug("answers of %s are finished one by one: %s", names, error)
            self._failed = self._parts is None
        return self._parts

    def _finished(self) -> Parts | None:
        sources = [_named(answer) for answer in self.answers]
        names = tuple(source.name for source in sources)
        files = placed(self.live.files, names)
        size = sum(file.weight for name in names for file in self.live.files.get(name, ()))
        if not files or not all(of.file.grouped or of.file.whole for of in files.values()):
            return None
        new = frozenset(file.path for name in names for file in self.live.new.get(name, ()))
        groups = self._merged(names, sources[0], files, new, size)
        answers = self.answers[0].residual.finished(self._wanted(groups, sources))
        if size <= COLLECTED_BYTES:
            return Parts.of_table(self.rows, answers, len(self.answers))
        return Parts.of_files(self.rows, answers)

    def _merged(
        self, names: tuple[str, ...], source: Source, files: Mapping[str, Placed], new: frozenset[str], size: int
    ) -> DataFrame:
        """One row per query and group, with NEW and PLACE."""
        assert source.maintained is not None
        rows, aggregate = self.rows, self.answers[0].residual.aggregate
        assert aggregate is not None
        table = None
        if size <= HERE_BYTES:
            table = self.live.groups.together.of_each(names, files, new, rows)
        if table is None:
            return merged(frame_of_each(source.columns, files, new, rows), source.maintained, PLACE, NEW)
        if self.answers[0].mode == "update":
            table = table.filter(pc.equal(table.column(NEW), 1))
        if self.answers[0].mode != "append":
            # HAVING spares Spark the groups that it would leave out.
            table = group_writer.having(table, aggregate[0].narrowing.having)
        columns = (*source.columns, (NEW, "bigint"), (PLACE, "int"))
        return rows.here(columns, table.select([name for name, _ in columns]))

    def _wanted(self, groups: DataFrame, sources: Sequence[Source]) -> DataFrame:
        """The groups that are handed over in this mode, without NEW."""
        mode = self.answers[0].mode
        if mode == "update":
            groups = groups.where(F.col(f"`{NEW}`") == 1)
        if mode == "append":
            bounds = [
                Bounds.of(answer, source.name, self.rows, self.live, self.live.before_ms)
                for answer, source in zip(self.answers, sources, strict=True)
            ]
            begin, end = ends_of(groups, sources[0])
            since, complete = (_of_place([getattr(b, name) for b in bounds]) for name in ("since_us", "complete_us"))
            groups = groups.where(
                (end <= _of_place([b.until_us for b in bounds]))
                & (since.isNull() | (end > since))
                & (complete.isNull() | (begin > complete))
            )
        return groups.drop(NEW)


def _of_place(values: Sequence[int | None]) -> Column:
    """The value of a row's query."""
    return F.get(F.array(*(F.lit(value).cast("bigint") for value in values)), F.col(f"`{PLACE}`"))


def _named(answer: Answer) -> Source:
    source = answer.residual.only_source
    assert source is not None
    return source


@dataclass
class Parts:
    """The answers of queries, by place."""

    rows: ResultRows
    schema: T.StructType
    here: list[pa.Table] | None
    """None: they wait in files."""
    frame_at: Callable[[int], DataFrame]
    close: Callable[[], None]

    @staticmethod
    def of_table(rows: ResultRows, answers: DataFrame, places: int) -> Parts:
        """All answers are collected, and split here."""
        table, schema = answers.toArrow(), T.StructType(answers.schema.fields[:-1])
        place = table.column(PLACE).to_numpy()
        order = np.argsort(place, kind="stable")
        table = table.select(table.column_names[:-1]).take(pa.array(order))
        bounds = np.searchsorted(place[order], np.arange(places + 1))
        here = [table.slice(a, b - a) for a, b in pairwise(bounds)]
        return Parts(rows, schema, here, lambda at: rows.local(schema, here[at]), lambda: None)

    @staticmethod
    def of_files(rows: ResultRows, answers: DataFrame) -> Parts:
        """All answers are written, each query's to a folder of its own."""
        schema, results = T.StructType(answers.schema.fields[:-1]), rows.checkpoint.results
        target = f"{SHARED}/{uuid.uuid4().hex}"
        full = f"file://{results.where(target)}" if results.local else results.where(target)
        answers.withColumnRenamed(PLACE, "place").write.partitionBy("place").mode("error").parquet(full)
        there = {name for name in results.names(target) if name.startswith("place=")}

        def frame_at(place: int) -> DataFrame:
            if f"place={place}" not in there:
                return rows.spark.createDataFrame([], schema)
            return rows.spark.read.schema(schema).parquet(f"{full}/place={place}")

        return Parts(rows, schema, None, frame_at, lambda: results.delete_tree(target))

    def frame(self, place: int) -> DataFrame:
        """A query's answer."""
        return self.frame_at(place)

    def table(self, place: int) -> pa.Table | None:
        """The same, if it is here."""
        return None if self.here is None else self.here[place]
