"""The result files in force, by query, and what the groups in them have come to, as far as that is held here."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial

import pyarrow as pa

from plait.runtime.answers.placed_groups import PlacedGroups
from plait.runtime.answers.result_reader import SMALL_BYTES, ResultRows
from plait.runtime.driver.sinks import Sink
from plait.runtime.task import group_writer
from plait.state.log.manifest import Manifest, ManifestLog, ResultFile, results_after

FEW_BYTES = 1 << 20
"""Groups that come to so much are held, and handed to Spark as they are instead of as files."""
HELD_BYTES = 64 << 20
"""Groups of a source of which few matter are held up to so much."""


@dataclass
class Groups:
    """What the groups of sources have come to, held here while they are few: made from files, and lost without harm."""

    held: dict[str, tuple[tuple[str, ...], pa.Table]] = field(default_factory=dict)
    parts: dict[str, dict[str, pa.Table]] = field(default_factory=dict)
    """By source and file: partial rows as they are."""
    wide: set[str] = field(default_factory=set)
    """Sources of which too many groups matter for telling here which do."""
    together: PlacedGroups = field(default_factory=PlacedGroups)
    """Groups of several queries."""

    def of(
        self, source: str, files: tuple[ResultFile, ...], rows: ResultRows, most: int = FEW_BYTES
    ) -> pa.Table | None:
        """The merged rows of these files, held if they come to `most` bytes; None if that is for Spark to merge."""
        grouping = rows.plan.query_by_name[source].grouping
        paths = tuple(file.path for file in files)
        known, table = self.held.pop(source, ((), None))
        if grouping is None or not mergeable(files):
            return None
        if table is None or paths[: len(known)] != known:
            known, table = (), None
        if paths != known:
            parts = list(rows.tables(files[len(known) :]))
            table = group_writer.merged(parts if table is None else [table, *parts], grouping)
        if table is not None and table.nbytes <= most:
            self.held[source] = paths, table
        return table

    def unmerged(self, source: str, files: tuple[ResultFile, ...], rows: ResultRows) -> list[pa.Table]:
        """The partial rows of these files."""
        known = self.parts.pop(source, {})
        new = [file for file in files if file.path not in known]
        known |= {file.path: table for file, table in zip(new, rows.tables(new), strict=True)}
        held = {file.path: known[file.path] for file in files}
        if sum(table.nbytes for table in held.values()) <= HELD_BYTES:
            self.parts[source] = held
        return list(held.values())


@dataclass
class LiveResults:
    """The result files in force, by query."""

    files: dict[str, tuple[ResultFile, ...]] = field(default_factory=dict)
    new: dict[str, tuple[ResultFile, ...]] = field(default_factory=dict)
    """Those that the last epoch has added."""
    marks_ms: Mapping[str, int] = field(default_factory=dict)
    """What watermarks are made of."""
    before_ms: Mapping[str, int] = field(default_factory=dict)
    """The same before the last epoch."""
    policy: str = "min"
    """How a watermark follows from them."""
    begun: frozenset[str] = frozenset()
    """Joins of queries of which the last epoch is the first: none of their groups were closed before."""
    of_all: tuple[int | None, int | None] = (None, None)
    """The one watermark that format 3 had, before and after its last epoch."""
    groups: Groups = field(default_factory=Groups)

    gone: dict[str, float] = field(default_factory=dict)
    """Files that have been in force, and since when (seconds since 1970) they are not: somebody may still read them."""

    @staticmethod
    def read(log: ManifestLog, sinks: Mapping[str, Sink] | None = None, policy: str = "min") -> LiveResults:
        """As the manifests say.  Where those of format 3 do not, `sinks` and receipts tell what was handed over."""
        found, manifests = LiveResults(policy=policy), log.since_snapshot()
        for manifest in manifests:
            if sinks is not None and any(file.passing is None for file in manifest.results):
                told = partial(_told, sinks, None if manifest is manifests[-1] else log.receipt(manifest.epoch))
                manifest = replace(manifest, results=tuple(map(told, manifest.results)))
            found.committed(manifest)
        return found

    def committed(self, manifest: Manifest) -> None:
        """One more epoch."""
        self.before_ms, self.marks_ms = manifest.before_marks_ms, manifest.marks_ms
        self.begun = frozenset(manifest.begins)
        # Format 3 had one watermark for all queries.
        self.of_all = (manifest.before_ms, manifest.watermark_ms) if manifest.catalog < 0 else (None, None)
        self.new = {}
        for file in manifest.results:
            if not file.whole:
                self.new[file.query] = (*self.new.get(file.query, ()), file)
        before, self.files = self.files, results_after(self.files, manifest)
        paths = self.paths()
        now = time.time()
        self.gone |= {file.path: now for files in before.values() for file in files if file.path not in paths}

    def paths(self) -> set[str]:
        """Those in force."""
        return {file.path for files in self.files.values() for file in files}

    def kept(self, since: float) -> set[str]:
        """Files that must stay: those in force, and those that were until after `since`; the others are forgotten."""
        self.gone = {path: left for path, left in self.gone.items() if left > since}
        return self.paths() | self.gone.keys()


def _told(sinks: Mapping[str, Sink], receipt: Set[str] | None, file: ResultFile) -> ResultFile:
    """A result file of format 3: nobody needs it once a sink that keeps no rows has taken it.

    Without a `receipt` it is of the last epoch, which is handed over before the next is committed.
    """
    sink = sinks.get(file.query)
    taken = sink is not None and not sink.keeps_rows and (receipt is None or file.query in receipt)
    return replace(file, passing=taken)


def mergeable(files: Sequence[ResultFile]) -> bool:
    """Whether files hold groups, and not too many to be merged here."""
    return all(file.whole or file.grouped for file in files) and sum(file.weight for file in files) <= SMALL_BYTES
