"""Answers of whole queries: what Spark makes of the rows that the engine keeps for them.

Contract.  An answer after epoch n is the query's answer over all rows up to n, whatever was merged, replayed or
restarted in between: it is a function of the files that the manifests up to n name, and of nothing else.

Every epoch commits its joined rows as its tasks wrote them, or the groups that they made of them
(`task/group_writer.py`): no Spark job is spent on an epoch that nobody asks about.
Where many files have come together (`Sources.merged`) they become one, which the manifest marks as standing for all of
them: of a maintained aggregate the partial rows, one per group; of other sources the rows.

Cost: per answer one Spark job over the files in force, or over what is left of few rows when groups are merged and semi
and anti joins told here (`semi_join.py`); per source one more in every eighth epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from plait.errors import QueryError
from plait.query.group_filter import Among, Narrowing
from plait.query.plan import Plan
from plait.query.semi_join import Partners
from plait.query.store import watermark_ms
from plait.runtime.answers.live_results import FEW_BYTES, HELD_BYTES, LiveResults, mergeable
from plait.runtime.answers.placed_groups import HERE_BYTES, NEW, placed
from plait.runtime.answers.result_reader import SMALL_BYTES, ResultRows, stays_small
from plait.runtime.answers.semi_join import Others
from plait.runtime.driver.sinks import Sink
from plait.runtime.task import group_writer
from plait.runtime.task.shared_groups import SharedGroupWriter
from plait.runtime.task.shared_results import alike
from plait.sql.answer.residual import Residual, Source, finish, merged
from plait.state.log.manifest import ResultFile

MODES = ("append", "update", "complete")
MERGE_FILES = 8
"""Files of joined rows that may come together before a maintained aggregate makes partial rows of them."""
MOST_FILES = 64


@dataclass(eq=False)
class Answer:
    """One query with a part that Spark does."""

    name: str
    residual: Residual
    mode: str
    sink: Sink
    final_us: int = 0
    """In append mode: by how much the watermark has to be past the end of a group, for it to be final."""
    complete_us: Callable[[], int | None] = lambda: None
    """In append mode: groups that begin at or before this event time lack rows, and are not handed over."""

    def frame(self, rows: ResultRows, live: LiveResults) -> DataFrame:
        """The whole answer; in append mode, as far as it is final."""
        if self.mode == "append":
            return self._final(rows, live, None)
        return self.residual.answer(Committed(self.residual, rows, live))

    def delivered(self, rows: ResultRows, live: LiveResults) -> DataFrame:
        """What the sink gets after an epoch: all, the groups that have changed, or those that have become final."""
        if self.mode == "append":
            return self._final(rows, live, live.before_ms)
        if self.mode == "update":
            return self.residual.answer(Changed(self.residual, rows, live))
        return self.frame(rows, live)

    def caught_up(self, rows: ResultRows, live: LiveResults, before_ms: Mapping[str, int] | None) -> DataFrame:
        """What a sink gets that has missed some epochs, and had all before the watermark was made of `before_ms`.

        One answer stands for all that it missed: the whole, all groups, or those that have become final since then.
        """
        return self._final(rows, live, before_ms) if self.mode == "append" else self.frame(rows, live)

    def _final(self, rows: ResultRows, live: LiveResults, since_ms: Mapping[str, int] | None) -> DataFrame:
        assert self.residual.only_source is not None
        bounds = Bounds.of(self, self.residual.only_source.name, rows, live, since_ms)
        return self.residual.answer(Closed(self.residual, rows, live, bounds))


@dataclass(frozen=True)
class Committed:
    """The rows of a query's sources."""

    residual: Residual
    rows: ResultRows
    live: LiveResults

    def __call__(self, source: Source) -> DataFrame:
        """A source's files in force; where all of the query's are small, Spark answers in one task."""
        every = [file for s in self.residual.sources for file in self.live.files.get(s.name, ())]
        return read(self.residual, source, self.rows, self.live.files.get(source.name, ()), every)

    def merged(self, source: Source, narrowing: Narrowing) -> DataFrame:
        """Merged by Spark; few groups are merged here, which spares reading their files and a part of the plan."""
        assert source.maintained is not None
        name, groups = source.name, self.live.groups
        few = sum(file.weight for file in self.live.files.get(name, ())) <= FEW_BYTES
        table = self._groups(name, narrowing) if few or (narrowing and name not in groups.wide) else None
        if table is not None and table.nbytes <= FEW_BYTES:
            return self.rows.here(source.columns, table)
        if table is not None:
            groups.wide.add(name)
        return merged(self(source), source.maintained)

    def _groups(self, source: str, narrowing: Narrowing) -> pa.Table | None:
        """The merged rows of a source that a narrowing keeps; None if that is for Spark to say."""
        files, groups = self.live.files.get(source, ()), self.live.groups
        grouping = self.rows.plan.query_by_name[source].grouping
        keys = {among: self._keys(among) for among in narrowing.among}
        known = {among.column: values for among, values in keys.items() if values is not None}
        if not known or grouping is None or not mergeable(files):
            table = groups.of(source, files, self.rows, HELD_BYTES if narrowing else FEW_BYTES)
        else:
            # All partial rows of a group have its key: what is not needed is not merged.
            parts = groups.unmerged(source, files, self.rows)
            for column, values in known.items():
                parts = [p.filter(pc.is_in(p.column(column), values.cast(p.schema.field(column).type))) for p in parts]
            table = group_writer.merged(parts, grouping)
        return None if table is None else group_writer.having(table, narrowing.having)

    def _keys(self, among: Among) -> pa.Array | None:
        """The values that a column of the group may have."""
        others = self._groups(among.other, among.narrowing)
        return None if others is None else others.column(among.others).unique()

    def count(self, source: Source) -> int:
        """Rows in its files."""
        return self._count(source.name)

    def _count(self, source: str) -> int:
        return sum(file.rows for file in self.live.files.get(source, ()))

    def passing(self, source: Source, asked: Sequence[Partners]) -> DataFrame | None:
        """Told here, where all are small and few rows pass."""
        names = (source.name, *(partners.other for partners in asked))
        queries = [self.rows.plan.query_by_name[name] for name in names]
        files = [self.live.files.get(name, ()) for name in names]
        if any(q.select or q.where for q in queries) or any(sum(f.weight for f in fs) > SMALL_BYTES for fs in files):
            return None
        if not files[0]:
            return self.rows.read(source.columns, ())
        others = [self._others(source.name, partners) for partners in asked]
        passed: list[pa.Table] = []
        for rows in self.rows.tables(files[0]):
            for partners, other in zip(asked, others, strict=True):
                having = other.have(rows)
                if having is None:
                    return None
                rows = rows.filter(pa.array(having == partners.wanted))
            passed.append(rows.cast(passed[0].schema if passed else rows.schema))
            if sum(part.nbytes for part in passed) > FEW_BYTES:
                return None
        return self.rows.here(source.columns, pa.concat_tables(passed))

    def _others(self, source: str, partners: Partners) -> Others:
        """The rows that may be partners; of a long side only those with a key that occurs in the source."""
        parts = list(self._columns(partners.other, partners.columns))
        if not parts:
            return Others(partners, None)
        if self._count(partners.other) > self._count(source):
            keys = pa.concat_tables(self._columns(source, [partners.key[0]])).column(0).unique()
            parts = [part.filter(pc.is_in(part.column(partners.key[1]).cast(keys.type), keys)) for part in parts]
        return Others(partners, pa.concat_tables(parts))

    def _columns(self, source: str, names: list[str]) -> Iterator[pa.Table]:
        """Some columns of a source's rows, file by file, in the types of the first."""
        schema: pa.Schema | None = None
        for table in self.rows.tables(self.live.files.get(source, ()), names):
            schema = schema or table.schema
            yield table.cast(schema)


class Changed(Committed):
    """Of maintained aggregates, the rows of groups that the last epoch has changed."""

    def __call__(self, source: Source) -> DataFrame:
        """All partial rows of these groups."""
        assert source.maintained is not None
        frame = super().__call__(source)
        keys = source.maintained.keys
        new = self.live.new.get(source.name, ())
        found = read(self.residual, source, self.rows, new, new).select(*keys).distinct()
        touched = found.toDF(*(f"n{key}" for key in keys))
        same = [frame[key].eqNullSafe(touched[f"n{key}"]) for key in keys]
        return frame.join(touched, same, "left_semi") if keys else frame

    def merged(self, source: Source, narrowing: Narrowing) -> DataFrame:
        """Merged by Spark."""
        assert source.maintained is not None
        return merged(self(source), source.maintained)


@dataclass(frozen=True)
class Bounds:
    """Which groups of an append-mode answer are handed over now, in microseconds."""

    until_us: int | None
    """Groups that end at or before this are closed; None: none is."""
    since_us: int | None
    """Those that end at or before this have been handed over."""
    complete_us: int | None
    """Those that begin at or before this lack rows."""

    @staticmethod
    def of(
        answer: Answer, source: str, rows: ResultRows, live: LiveResults, since_ms: Mapping[str, int] | None
    ) -> Bounds:
        """Groups that no row can come to any more, if they were not closed when `since_ms` made the watermark."""
        marks = rows.plan.query_by_name[source].marks
        now = watermark_ms(marks, live.marks_ms, live.policy)
        now = live.of_all[1] if now is None else now
        before = None
        if since_ms is not None and source not in live.begun:
            before = watermark_ms(marks, since_ms, live.policy)
            before = live.of_all[0] if before is None else before
        until, since = (None if at is None else at * 1000 - answer.final_us for at in (now, before))
        return Bounds(until, since, answer.complete_us())


def ends_of(groups: DataFrame, source: Source) -> tuple[Column, Column]:
    """The times at which groups begin and end, in microseconds."""
    assert source.maintained is not None
    assert source.closing is not None
    key = groups[source.maintained.keys[source.closing.key]]
    field = source.closing.field
    return F.unix_micros(key if field is None else key["start"]), F.unix_micros(key if field is None else key[field])


@dataclass(frozen=True)
class Closed(Committed):
    """Of maintained aggregates, the groups that no row can come to any more."""

    bounds: Bounds

    def merged(self, source: Source, narrowing: Narrowing) -> DataFrame:
        """All rows of closed groups have been committed, so these are their last values."""
        groups, bounds = super().merged(source, narrowing), self.bounds
        begin, end = ends_of(groups, source)
        if bounds.until_us is None:
            return groups.where(F.lit(False))
        groups = groups.where(end <= bounds.until_us)
        if bounds.complete_us is not None:
            groups = groups.where(begin > bounds.complete_us)
        return groups if bounds.since_us is None else groups.where(end > bounds.since_us)


@dataclass
class Sources:
    """What the driver does for the maintained aggregates of all queries."""

    answers: Mapping[str, Answer] = field(default_factory=dict)
    live: LiveResults = field(default_factory=LiveResults)
    finished_alike: list[tuple[Answer, ...]] | None = None
    """Which answers can be finished together (`answers_together.py`), once that is known."""
    _sharing: tuple[Plan | None, list[tuple[str, ...]]] = (None, [])

    def source(self, graph: str) -> tuple[Residual, Source] | None:
        """What a join graph is a source of; None if its rows are a query's answer."""
        for answer in self.answers.values():
            for source in answer.residual.sources:
                if source.name == graph:
                    return answer.residual, source
        return None

    def sharing(self, plan: Plan, source: str) -> tuple[str, ...]:
        """The sources whose groups are in the same files as those of this one; none, if it has files of its own."""
        if self._sharing[0] is not plan:
            grouped = {query.name for query in plan.queries if query.grouping is not None}
            self._sharing = plan, [group for group in alike(plan, grouped) if group[0] in grouped]
        return next((group for group in self._sharing[1] if source in group), ())

    def merged_together(self, rows: ResultRows, sources: tuple[str, ...]) -> list[ResultFile] | None:
        """A file that stands for all files of these sources so far, if there are many; None: each must have its own."""
        every = [file for source in sources for file in self.live.files.get(source, ())]
        if not _is_due(every, MERGE_FILES):
            return []
        if sum(file.weight for file in every) > HERE_BYTES:
            return None
        files, query = placed(self.live.files, sources), rows.plan.query_by_name[sources[0]]
        table = self.live.groups.together.merged(sources, files, frozenset(), rows)
        if table is None or query.grouping is None:
            return None
        columns, results = [name for name, _ in query.columns], rows.checkpoint.results
        # Nothing is flushed before the end: it is in one piece already.
        sync = rows.checkpoint.config.sync
        writer = SharedGroupWriter(sources, columns, query.grouping, results, sync, HERE_BYTES)
        try:
            writer.add(table.drop_columns([NEW]))
            return [file for files in writer.close(whole=True).values() for file in files]
        except BaseException:
            writer.abandon()
            raise

    def merged(self, rows: ResultRows, residual: Residual, source: Source) -> list[ResultFile]:
        """A file that stands for all files of a source so far, if there are many; else none."""
        files = self.live.files.get(source.name, ())
        if not _is_due(files, MERGE_FILES if source.maintained is not None else MOST_FILES):
            return []
        if (groups := self.live.groups.of(source.name, files, rows)) is not None:
            return rows.written_here(source.name, groups, whole=True)
        query = rows.plan.query_by_name[source.name]
        small = stays_small(query if source.maintained is None else replace(query, select=()), files)
        frame = read(residual, source, rows, files, files)
        whole = frame if source.maintained is None else merged(frame, source.maintained)
        if small:
            return rows.written_here(source.name, whole.toArrow(), whole=True)
        return rows.written(source.name, whole, whole=True)


def _is_due(files: Sequence[ResultFile], many: int) -> bool:
    """Whether so much has come together since the last file that stands for all before it that one is due."""
    old = sum(file.weight for file in files if file.whole)
    parts = {file.path for file in files if not file.whole}
    new = sum(file.weight for file in files if not file.whole)
    return not ((len(parts) < many and new <= SMALL_BYTES) or (4 * new < old and len(parts) < MOST_FILES))


def read(
    residual: Residual, source: Source, rows: ResultRows, files: Iterable[ResultFile], every: Iterable[ResultFile]
) -> DataFrame:
    """What a source has committed in these files: partial rows of a maintained aggregate, or the rows themselves.

    If `every` file that the query reads is small, all is put into one partition: then Spark needs no exchange.
    """
    query = rows.plan.query_by_name[source.name]
    files, small = list(files), sum(file.weight for file in every) <= SMALL_BYTES
    made = [file for file in files if file.whole or file.grouped]
    frames = [rows.read(source.columns, made)] if made else []
    if len(made) < len(files) or not made:
        joined = finish(rows.read(query.columns, [file for file in files if file not in made]), query)
        joined = joined.coalesce(1) if small else joined
        frames.append(joined if source.maintained is None else residual.partial(source, joined))
    found = reduce(DataFrame.union, frames)
    return found.coalesce(1) if small else found


def output_mode(name: str, residual: Residual | None, asked: str | None) -> str:
    """The mode in which a query's answer is handed over; refused if it has no meaning for the query."""
    possible = ("append",) if residual is None else residual.modes
    if asked is None:
        return possible[-1]
    if asked not in MODES:
        raise QueryError("OUTPUT_MODE", f"there is no output mode {asked!r}", f"use one of: {', '.join(MODES)}")
    if asked not in possible:
        what = "rows that are final as soon as they are joined" if residual is None else "an answer that changes"
        windows = "; or group by window(…) of a stream's event time with a watermark" if asked == "append" else ""
        raise QueryError(
            "OUTPUT_MODE",
            f"query {name!r} gives {what}, which has no output mode {asked!r}",
            f"leave it out, or use {' or '.join(possible)}{windows}",
        )
    return asked
