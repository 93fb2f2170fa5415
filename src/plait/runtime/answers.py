"""Answers of whole queries: what Spark makes of the rows that the engine keeps for them.

Contract.  An answer after epoch n is the query's answer over all rows up to n, whatever was merged, replayed or
restarted in between: it is a function of the files that the manifests up to n name, and of nothing else.

Every epoch commits its joined rows as its tasks wrote them: no Spark job is spent on an epoch that nobody asks about.
Where many files have come together (`Sources.merged`) they become one, which the manifest marks as standing for all of
them: of a maintained aggregate the partial rows, one per group; of other sources the rows.

Cost: per answer one Spark job over the files in force; per source one more in every eighth epoch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce

from pyspark.sql import DataFrame

from plait.errors import QueryError
from plait.runtime.rows import SMALL_BYTES, ResultRows
from plait.runtime.sinks import Sink
from plait.sql.residual import Residual, Source, finish, merged
from plait.state.manifest import Manifest, ManifestLog, ResultFile

MODES = ("append", "update", "complete")
MERGE_FILES = 8
"""Files of joined rows that may come together before a maintained aggregate makes partial rows of them."""
MOST_FILES = 64


@dataclass
class LiveResults:
    """The result files in force, by query."""

    files: dict[str, tuple[ResultFile, ...]] = field(default_factory=dict)
    new: dict[str, tuple[ResultFile, ...]] = field(default_factory=dict)
    """Those that the last epoch has added."""

    @staticmethod
    def read(log: ManifestLog) -> LiveResults:
        """As the manifests say."""
        found = LiveResults()
        for epoch in log.epochs():
            manifest = log.read(epoch)
            if manifest is not None:
                found.committed(manifest)
        return found

    def committed(self, manifest: Manifest) -> None:
        """One more epoch.  A file that is `whole` stands for all before it."""
        self.new = {}
        for query in {file.query for file in manifest.results}:
            mine = tuple(file for file in manifest.results if file.query == query)
            self.new[query] = tuple(file for file in mine if not file.whole)
            earlier = () if any(file.whole for file in mine) else self.files.get(query, ())
            self.files[query] = (*earlier, *mine)


@dataclass(eq=False)
class Answer:
    """One query with a part that Spark does."""

    name: str
    residual: Residual
    mode: str
    sink: Sink

    def frame(self, rows: ResultRows, live: LiveResults) -> DataFrame:
        """The whole answer."""
        return self.residual.answer(Committed(self.residual, rows, live))

    def delivered(self, rows: ResultRows, live: LiveResults) -> DataFrame:
        """What the sink gets after an epoch: the whole answer, or (update) the rows of groups that have changed."""
        if self.mode != "update":
            return self.frame(rows, live)

        return self.residual.answer(Changed(self.residual, rows, live))


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

    def count(self, source: Source) -> int:
        """Rows in its files."""
        return sum(file.rows for file in self.live.files.get(source.name, ()))


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


@dataclass
class Sources:
    """What the driver does for the maintained aggregates of all queries."""

    answers: Mapping[str, Answer] = field(default_factory=dict)
    live: LiveResults = field(default_factory=LiveResults)

    def source(self, graph: str) -> tuple[Residual, Source] | None:
        """What a join graph is a source of; None if its rows are a query's answer."""
        for answer in self.answers.values():
            for source in answer.residual.sources:
                if source.name == graph:
                    return answer.residual, source
        return None

    def merged(self, rows: ResultRows, residual: Residual, source: Source) -> list[ResultFile]:
        """A file that stands for all files of a source so far, if there are many; else none."""
        files = self.live.files.get(source.name, ())
        old = sum(file.bytes for file in files if file.whole)
        parts = [file for file in files if not file.whole]
        new = sum(file.bytes for file in parts)
        few = len(parts) < (MERGE_FILES if source.maintained is not None else MOST_FILES)
        if (few and new <= SMALL_BYTES) or (4 * new < old and len(parts) < MOST_FILES):
            return []
        frame = read(residual, source, rows, files, files)
        whole = frame if source.maintained is None else merged(frame, source.maintained)
        small = sum(file.bytes for file in files) <= SMALL_BYTES
        return (rows.written_here if small else rows.written)(source.name, whole, whole=True)


def read(
    residual: Residual, source: Source, rows: ResultRows, files: Iterable[ResultFile], every: Iterable[ResultFile]
) -> DataFrame:
    """What a source has committed in these files: partial rows of a maintained aggregate, or the rows themselves.

    If `every` file that the query reads is small, all is put into one partition: then Spark needs no exchange.
    """
    query = rows.plan.query_by_name[source.name]
    files, small = list(files), sum(file.bytes for file in every) <= SMALL_BYTES
    whole = [file for file in files if file.whole]
    frames = [rows.read(source.columns, whole)] if whole else []
    if len(whole) < len(files) or not whole:
        joined = finish(rows.read(query.columns, [file for file in files if not file.whole]), query)
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
        raise QueryError(
            "OUTPUT_MODE",
            f"query {name!r} gives {what}, which has no output mode {asked!r}",
            f"leave it out, or use {' or '.join(possible)}",
        )
    return asked
