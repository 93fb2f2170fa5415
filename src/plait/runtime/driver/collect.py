"""Step 2 of the commit (`commit.py`): the notes of all tasks of an epoch become one account of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from plait.config import KEY_GROUPS
from plait.errors import QueryError
from plait.query.observed import Driven, EdgeCount, Sample, SetSample
from plait.query.plan import Plan
from plait.runtime.task.notes import (
    CopyNote,
    FailedNote,
    KeysNote,
    LoadNote,
    MergeNote,
    ResultNote,
    SampleNote,
    SegmentNote,
    SetsNote,
    SourceNote,
    WorkNote,
    read_note,
)
from plait.state.log.manifest import ResultFile
from plait.state.segments.run import Meter
from plait.state.segments.segment import SegmentInfo


@dataclass
class Collected:
    """What the tasks of an epoch reported."""

    added: list[SegmentInfo] = field(default_factory=list)
    copied: list[SegmentInfo] = field(default_factory=list)
    """Segments of stores that are being built."""
    removed: list[str] = field(default_factory=list)
    results: list[ResultFile] = field(default_factory=list)
    merged_results: list[ResultFile] = field(default_factory=list)
    """Result files that hold the rows of those in `replaced`, which earlier epochs have written."""
    replaced: list[tuple[str, str]] = field(default_factory=list)
    """Queries, and paths that they need no more."""
    rows_in: dict[str, int] = field(default_factory=dict)
    rows_late: dict[str, int] = field(default_factory=dict)
    rows_out: dict[str, int] = field(default_factory=dict)
    failed: dict[str, QueryError] = field(default_factory=dict)
    """By join, why a task did not give all of its rows."""
    rows_null_key: dict[str, int] = field(default_factory=dict)
    """Rows without a value in a column that no query can do without."""
    rows_corrupt: dict[str, int] = field(default_factory=dict)
    """Rows that a permissive reader could not parse, of streams that say so."""
    rows_future: dict[str, int] = field(default_factory=dict)
    """Rows with an event time too far ahead to move a watermark."""
    max_event_ms: dict[str, int] = field(default_factory=dict)
    marks_ms: dict[str, int] = field(default_factory=dict)
    let_go: dict[str, int] = field(default_factory=dict)
    """By store the latest birth of a row that was let expire; -1 if none was."""
    row_bytes: float = 0.0
    """Mean bytes of the widest rows that sources have read."""
    edges: dict[int, EdgeCount] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    sets: list[SetSample] = field(default_factory=list)
    keys: dict[str, float] = field(default_factory=dict)
    """κ of every store, where the epoch was sampled."""
    driven: dict[str, Driven] = field(default_factory=dict)
    """By driving relation."""
    seconds: dict[str, float] = field(default_factory=dict)
    load: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(KEY_GROUPS))
    """What each key group has cost the tasks, in nanoseconds that only compare; nothing if there was one task."""
    merged_bytes: int = 0
    """Bytes written by merges."""
    reads: Meter = field(default_factory=Meter)
    """What reading state took."""


def collected(notes: Iterable[bytes], plan: Plan) -> Collected:
    """The account of an epoch that ran with this plan."""
    account = Collected(
        rows_in=dict.fromkeys(plan.ranks, 0),
        rows_late=dict.fromkeys(plan.ranks, 0),
        rows_out={query.name: 0 for query in plan.queries},
    )
    for payload in notes:
        match read_note(payload):
            case SourceNote() as note:
                _add_source(account, note)
            case SegmentNote(info):
                account.added.append(info)
            case MergeNote() as note:
                account.added.extend(note.added)
                account.removed.extend(note.removed)
                account.merged_bytes += note.written
                _let_go(account, note.store, note.let_go)
            case CopyNote() as note:
                account.copied.extend(note.added)
                _let_go(account, note.store, note.let_go)
            case ResultNote() as note:
                account.rows_out[note.query] += note.rows
                account.results.extend(note.files)
            case FailedNote() as note:
                account.failed[note.query] = QueryError(note.code, note.cause, note.remedy)
                account.rows_out[note.query] += note.rows
            case WorkNote() as note:
                _add_work(account, note)
            case SampleNote(sample):
                account.samples.append(sample)
            case SetsNote(sets):
                account.sets.append(sets)
            case KeysNote(keys):
                account.keys.update(keys)
            case LoadNote(first, cost):
                account.load[first : first + len(cost)] += cost
    return account


def _add_source(account: Collected, note: SourceNote) -> None:
    relation = note.relation
    account.row_bytes = max(account.row_bytes, note.row_bytes)
    counts = (
        (account.rows_in, note.rows),
        (account.rows_late, note.late),
        (account.rows_null_key, note.null_key),
        (account.rows_corrupt, note.corrupt),
        (account.rows_future, note.future),
    )
    for total, rows in counts:
        if rows or relation in total:
            total[relation] = total.get(relation, 0) + rows
    if note.max_event_ms is not None:
        account.max_event_ms[relation] = max(note.max_event_ms, account.max_event_ms.get(relation, note.max_event_ms))
    for mark, at in note.marks_ms.items():
        account.marks_ms[mark] = max(at, account.marks_ms.get(mark, at))


def _add_work(account: Collected, note: WorkNote) -> None:
    for node, count in note.edges.items():
        account.edges.setdefault(node, EdgeCount()).add(count)
    for relation, done in note.driven.items():
        account.driven.setdefault(relation, Driven()).add(done)
    for part, seconds in note.seconds.items():
        account.seconds[part] = account.seconds.get(part, 0.0) + seconds
    account.reads.add(note.reads)


def _let_go(account: Collected, store: str, birth: int) -> None:
    account.let_go[store] = max(birth, account.let_go.get(store, -1))
