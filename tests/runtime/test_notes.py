"""Notes of tasks: each comes back as it was written, and paths in them cannot lead out of the checkpoint."""

from __future__ import annotations

import json
from typing import get_args

import pytest

from plait.errors import CorruptionError
from plait.query.observed import Driven, EdgeCount, Sample, SetSample
from plait.runtime.task.notes import (
    CopyNote,
    FailedNote,
    KeysNote,
    LoadNote,
    MergeNote,
    Note,
    ResultNote,
    SampleNote,
    SegmentNote,
    SetsNote,
    SourceNote,
    WorkNote,
    read_note,
    written,
)
from plait.state.log.manifest import ResultFile
from plait.state.segments.filter_sets import Sets
from plait.state.segments.run import Meter
from plait.state.segments.segment import SegmentInfo

INFO = SegmentInfo(
    path="ab/one.arrow", store="a[k]", epoch=3, tier=0, run="r", rows=10, bytes=100, lo_group=0, hi_group=1024, keys=7,
    min_time=None, max_time=5, max_arrived=None, checksum="00", min_born=3, max_born=3, sets=Sets(bits=("f1",)),
)  # fmt: skip
FILE = ResultFile(query="q", path="cd/two.parquet", rows=4, bytes=40, checksum="11", tier=1)
NOTES: list[Note] = [
    SourceNote("a", rows=5, late=1, max_event_ms=-3, marks_ms={"a": 2}, row_bytes=1.5),
    SegmentNote(INFO),
    MergeNote("a[k]", (INFO,), ("ab/old.arrow",), written=100, let_go=-1),
    CopyNote("a[m]", (INFO, INFO), let_go=2),
    ResultNote("q", 4, (FILE,)),
    FailedNote("q", "DIVIDE_BY_ZERO", "column 'x' cannot be computed", "correct the rows", 4),
    WorkNote({12: EdgeCount(lookups=3, gallop=0.5)}, {"a": Driven(0.25, 4)}, {"probe": 0.5}, Meter(blocks_read=2)),
    SampleNote(Sample(1, (), (("a[k]", ()), ("b[k]", (1, 2))), {3: [2, 5, 0]}, 9)),
    SetsNote(SetSample(1, 2**64 - 1, 12.5, (3, 4), ((7, 1 << 70, 2.5),), (("b[k]", (5,), ((7, 1, 1.0),)),))),
    KeysNote({"a[k]": 50.0}),
    LoadNote(341, (0, 12, 5000000000)),
]


@pytest.mark.parametrize("note", NOTES, ids=lambda note: type(note).__name__)
def test_a_note_comes_back_as_it_was_written(note: Note) -> None:
    assert read_note(written(note)) == note


def test_every_kind_of_note_is_tried() -> None:
    assert {type(note) for note in NOTES} == set(get_args(Note))


@pytest.mark.parametrize("path", ["/etc/passwd", "../outside"])
@pytest.mark.parametrize("note", [SegmentNote(INFO), ResultNote("q", 4, (FILE,))], ids=["segment", "result"])
def test_a_path_that_leads_out_is_refused(note: Note, path: str) -> None:
    text = written(note).decode()
    mine = INFO.path if isinstance(note, SegmentNote) else FILE.path
    with pytest.raises(CorruptionError):
        read_note(text.replace(json.dumps(mine), json.dumps(path)).encode())
