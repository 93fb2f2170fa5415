"""Partial rows of several queries' aggregates, read once: with sets of *places*, the queries' numbers among these.

Files that queries share have sets of their own, a query's own files none (`task/shared_groups.py`); here both become
rows with sets of places, or rows per query with its place.

Cost: a file is read once for all of these queries.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from plait.kernels.sets import within
from plait.query.expr import ColumnRef
from plait.query.grouping import MAX, Grouping, GroupValue
from plait.query.store import SET, SET_BITS
from plait.runtime.answers.result_reader import SMALL_BYTES, ResultRows
from plait.runtime.task.file_sets import mapped, sets_in, width_of, with_sets
from plait.runtime.task.group_writer import merged
from plait.runtime.task.shared_groups import PLACE, by_set, each_query, fewest, split_sets
from plait.state.log.manifest import ResultFile
from plait.state.segments.sieve import as_words

NEW = "#new"
"""A value beside those of the group: 1 if it is from one of the last epoch's files."""
HERE_BYTES = 2 * SMALL_BYTES
"""Partial rows that come to so much, all queries' together, are merged in the driver."""
HELD_BYTES = 16 << 20
"""Merged groups of several queries are held up to so much."""


@dataclass(frozen=True)
class Placed:
    """A file with partial rows of some queries."""

    file: ResultFile
    bits: tuple[tuple[int, int | None], ...]
    """Their places, with the bit that each has in the file; None: all rows are its."""


def placed(files: Mapping[str, Sequence[ResultFile]], sources: Sequence[str]) -> dict[str, Placed]:
    """By path the files in force of these sources, whose places are their numbers."""
    bits: dict[str, dict[int, int | None]] = {}
    known: dict[str, ResultFile] = {}
    for place, source in enumerate(sources):
        for file in files.get(source, ()):
            bits.setdefault(file.path, {})[place] = file.bit
            known[file.path] = file
    return {path: Placed(replace(known[path], bit=None), tuple(of.items())) for path, of in bits.items()}


def flagged(grouping: Grouping) -> Grouping:
    """The same groups, with the flag of the last epoch's."""
    return replace(grouping, values=(*grouping.values, GroupValue(NEW, MAX, ColumnRef("", NEW, "bigint"), "bigint")))


@dataclass
class PlacedGroups:
    """What partial rows of some queries have come to, held while it is little: made from files, lost without harm."""

    held: dict[tuple[str, ...], tuple[dict[str, Placed], pa.Table]] = field(default_factory=dict)
    frames: dict[tuple[tuple[str, str], ...], DataFrame] = field(default_factory=dict)
    """By columns a frame without rows, over which plans are compared."""

    def merged(
        self, sources: tuple[str, ...], files: Mapping[str, Placed], new: frozenset[str], rows: ResultRows
    ) -> pa.Table | None:
        """One row per group and set of places, with NEW; None if that is for Spark to merge."""
        grouping = rows.plan.query_by_name[sources[0]].grouping
        if grouping is None or not all(placed.file.grouped or placed.file.whole for placed in files.values()):
            return None
        grouping, width = flagged(grouping), width_of(len(sources))
        known, table = self.held.pop(sources, ({}, None))
        # What is held does not say any more which groups a file has changed.
        if new & known.keys() or any(files.get(path) != placed for path, placed in known.items()):
            known, table = {}, None
        parts = [] if table is None else [table]
        parts += _tables(
            {path: placed for path, placed in files.items() if path not in known}, new, grouping, width, rows
        )
        if not parts:
            return None
        found = merged(parts, by_set(grouping, width))
        if found is None:
            return None
        groups, sets = fewest(*split_sets(found, grouping.names), grouping)
        found = with_sets(groups, sets)
        if found.nbytes <= HELD_BYTES:
            place = found.column_names.index(NEW)
            old = pa.array(np.zeros(len(found), np.int64))
            self.held[sources] = dict(files), found.set_column(place, NEW, old).select(by_set(grouping, width).names)
        return found

    def of_each(
        self, sources: tuple[str, ...], files: Mapping[str, Placed], new: frozenset[str], rows: ResultRows
    ) -> pa.Table | None:
        """One row per query and group, with PLACE and NEW; None if that is for Spark to merge."""
        found = self.merged(sources, files, new, rows)
        grouping = rows.plan.query_by_name[sources[0]].grouping
        if found is None or grouping is None:
            return None
        return each_query(*split_sets(found, flagged(grouping).names), flagged(grouping))


def _tables(
    files: Mapping[str, Placed], new: frozenset[str], grouping: Grouping, width: int, rows: ResultRows
) -> Iterator[pa.Table]:
    """The partial rows of files, with their sets of places."""
    everyone = as_words((1 << SET_BITS * width) - 1, width)
    tables = rows.tables(placed.file for placed in files.values())
    for (path, of), table in zip(files.items(), tables, strict=True):
        if not table.num_rows:
            continue
        batch = table.combine_chunks().to_batches()[0]
        sets = np.zeros((table.num_rows, width), np.uint64)
        sets |= as_words(sum(1 << place for place, bit in of.bits if bit is None), width)
        if some := [(bit, place) for place, bit in of.bits if bit is not None]:
            sets |= mapped(sets_in(batch), some, width)
        flag = pa.array(np.full(table.num_rows, path in new, np.int64))
        found = with_sets(table.append_column(NEW, flag).select(grouping.names), sets)
        yield found.filter(pa.array(within(sets, everyone))).select(by_set(grouping, width).names)


def frame_of_each(
    columns: tuple[tuple[str, str], ...], files: Mapping[str, Placed], new: frozenset[str], rows: ResultRows
) -> DataFrame:
    """The partial rows of files for Spark to merge: one per row and query, with NEW and PLACE."""
    alike: dict[tuple[tuple[tuple[int, int | None], ...], bool], list[ResultFile]] = {}
    for path, of in files.items():
        alike.setdefault((of.bits, path in new), []).append(of.file)
    frames = []
    for (bits, is_new), some in alike.items():
        words = sorted({bit // SET_BITS for _, bit in bits if bit is not None})
        read = rows.with_words(columns, words, some)
        places = F.explode(F.expr(_places_of(bits, words))).alias(PLACE)
        kept = [F.col(f"`{name}`") for name, _ in columns]
        frames.append(read.select(*kept, F.lit(int(is_new)).cast("bigint").alias(NEW), places))
    return reduce(DataFrame.union, frames)


def _places_of(bits: Sequence[tuple[int, int | None]], words: Sequence[int]) -> str:
    """SQL for an array of the places that a row belongs to."""
    always = [str(place) for place, bit in bits if bit is None]
    asked = [
        f"named_struct('place', {place}, 'word', {words.index(bit // SET_BITS)}, 'bit', {bit % SET_BITS})"
        for place, bit in bits
        if bit is not None
    ]
    if not asked:
        return f"array({', '.join(always)})"
    there = ", ".join(f"`{SET}{word}`" for word in words)
    having = f"(shiftright(array({there})[one.word], one.bit) & 1L) = 1L"
    found = f"transform(filter(array({', '.join(asked)}), one -> {having}), one -> one.place)"
    return f"concat({found}, array({', '.join(always)}))" if always else found
