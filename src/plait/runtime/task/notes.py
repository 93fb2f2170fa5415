"""Notes: what tasks tell the driver, as small JSON rows that travel through the same exchanges as buckets.

Contract.  `read_note(written(note)) == note` for every kind of note.  Files that a note adds are checked to lie
in their folder when it is read.  A note counts only when its epoch is committed: before, nobody refers to its files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from plait.query.observed import Driven, EdgeCount, Sample, SetSample
from plait.state.log.manifest import ResultFile
from plait.state.segments.run import Meter
from plait.state.segments.segment import SegmentInfo

CUT = "CUT"
"""The code of a query of which a task has stopped to give rows, because there are more than could ever be kept."""


@dataclass
class SourceNote:
    """What one source task saw of one stream; it counts as it goes."""

    relation: str
    rows: int = 0
    """Rows that have all columns which no query can do without, late ones included."""
    late: int = 0
    """Rows that are late for every query that would see them."""
    null_key: int = 0
    """Rows without a value in a column that no query can do without."""
    corrupt: int = 0
    """Rows that the reader could not parse."""
    future: int = 0
    """Rows with an event time so far ahead that it moves no watermark."""
    max_event_ms: int | None = None
    marks_ms: dict[str, int] = field(default_factory=dict)
    row_bytes: float = 0.0
    """Mean bytes of a row in the slice with the widest ones."""


@dataclass(frozen=True)
class SegmentNote:
    """A task has appended a segment to a store."""

    info: SegmentInfo


@dataclass(frozen=True)
class MergeNote:
    """A task has merged segments of a store: those added stand for those removed."""

    store: str
    added: tuple[SegmentInfo, ...]
    removed: tuple[str, ...]
    """Paths."""
    written: int
    """Bytes."""
    let_go: int
    """The latest birth of a row that was let expire; -1 if none was."""


@dataclass(frozen=True)
class CopyNote:
    """A task has copied its part of some key groups into a store that is being built."""

    store: str
    added: tuple[SegmentInfo, ...]
    let_go: int
    """The latest birth of a row that was let expire; -1 if none was."""


@dataclass(frozen=True)
class ResultNote:
    """Result rows of a query that a task has completed, and the files that it has written of them, if any."""

    query: str
    rows: int
    files: tuple[ResultFile, ...]


@dataclass(frozen=True)
class FailedNote:
    """A task has not given all rows of a query: one cannot be computed, or there are far too many (`CUT`)."""

    query: str
    code: str
    cause: str
    remedy: str
    rows: int
    """Rows that it had counted by then."""


@dataclass(frozen=True)
class WorkNote:
    """What a task has done at one hop."""

    edges: Mapping[int, EdgeCount]
    """By node of the plan."""
    driven: Mapping[str, Driven]
    """By driving relation."""
    seconds: Mapping[str, float]
    """By part of the work."""
    reads: Meter


@dataclass(frozen=True)
class SampleNote:
    """A task has looked the smallest new keys of an input up."""

    sample: Sample


@dataclass(frozen=True)
class SetsNote:
    """A task has sampled which query sets rows have."""

    sample: SetSample


@dataclass(frozen=True)
class KeysNote:
    """κ of every store, estimated by a task that has sampled."""

    keys: Mapping[str, float]


@dataclass(frozen=True)
class LoadNote:
    """What the key groups of a task have cost at a hop, in nanoseconds that only compare."""

    first: int
    """The first of them."""
    cost: tuple[int, ...]

    @staticmethod
    def of(first: int, cost: npt.NDArray[np.float64]) -> LoadNote:
        """Whole numbers are shorter, and exact enough."""
        return LoadNote(first, tuple(cost.astype(np.int64).tolist()))


Note = (
    LoadNote
    | SourceNote
    | SegmentNote
    | MergeNote
    | CopyNote
    | ResultNote
    | FailedNote
    | WorkNote
    | SampleNote
    | SetsNote
    | KeysNote
)


def written(note: Note) -> bytes:
    """A note as JSON; `read_note` gives it back."""
    content = {"sample": note.sample.to_json()} if isinstance(note, SampleNote | SetsNote) else _shallow(note)
    return json.dumps({"kind": _KINDS[type(note)], **content}, default=_shallow).encode()


def _shallow(value: Any) -> dict[str, Any]:
    """The fields of a dataclass; what they hold the encoder goes into by itself, far faster than `asdict` copies it."""
    return {f.name: getattr(value, f.name) for f in fields(value)}


def read_note(payload: bytes) -> Note:
    """The inverse of `written`."""
    content = json.loads(payload)
    return _READERS[content.pop("kind")](content)


def _infos(values: list[dict[str, Any]]) -> tuple[SegmentInfo, ...]:
    return tuple(SegmentInfo.from_json(value) for value in values)


def _read_merge(content: dict[str, Any]) -> MergeNote:
    return MergeNote(**{**content, "added": _infos(content["added"]), "removed": tuple(content["removed"])})


def _read_copy(content: dict[str, Any]) -> CopyNote:
    return CopyNote(**{**content, "added": _infos(content["added"])})


def _read_result(content: dict[str, Any]) -> ResultNote:
    return ResultNote(**{**content, "files": tuple(ResultFile.from_json(file) for file in content["files"])})


def _read_work(content: dict[str, Any]) -> WorkNote:
    return WorkNote(
        edges={int(node): EdgeCount(**count) for node, count in content["edges"].items()},
        driven={relation: Driven(**done) for relation, done in content["driven"].items()},
        seconds=content["seconds"],
        reads=Meter(**content["reads"]),
    )


_READERS: dict[str, Callable[[dict[str, Any]], Note]] = {
    "source": lambda content: SourceNote(**content),
    "segment": lambda content: SegmentNote(SegmentInfo.from_json(content["info"])),
    "merge": _read_merge,
    "copy": _read_copy,
    "result": _read_result,
    "failed": lambda content: FailedNote(**content),
    "work": _read_work,
    "sample": lambda content: SampleNote(Sample.from_json(content["sample"])),
    "sets": lambda content: SetsNote(SetSample.from_json(content["sample"])),
    "keys": lambda content: KeysNote(content["keys"]),
    "load": lambda content: LoadNote(content["first"], tuple(content["cost"])),
}
_KINDS: dict[type[Note], str] = {
    SourceNote: "source",
    SegmentNote: "segment",
    MergeNote: "merge",
    CopyNote: "copy",
    ResultNote: "result",
    FailedNote: "failed",
    WorkNote: "work",
    SampleNote: "sample",
    SetsNote: "sets",
    KeysNote: "keys",
    LoadNote: "load",
}
