"""A segment: an immutable file of rows sorted by the hash of their store's key.  One file, written once.

Contract.  A *flat* segment is an Arrow IPC file, uncompressed, HASH column first, one record batch, so that a memory
map gives zero-copy arrays; `block_segment.py` has the format for what does not fit memory.  A segment's name is new for
every attempt and holds nothing a user typed; only what a manifest names exists.  Its xxh3-128 lives in its
`SegmentInfo`, hence in the manifest, and is checked *before* the bytes are parsed, because Arrow does not notice
flipped bits (`state/segments/segment_reader.py`).

A *run* is one segment or several that follow each other in hash order: merges write their result piece by piece.

Cost.  Writing: one pass, hashing on the way.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from plait.kernels import U64
from plait.kernels.hashing import key_group
from plait.kernels.runs import group_starts
from plait.query.store import ARRIVED, BORN, HASH, Store
from plait.state.files.checksummed_file import ChecksummedFile
from plait.state.files.segment_home import SegmentHome
from plait.state.files.storage import inside, storage_error, sync_directory
from plait.state.segments.filter_sets import Sets
from plait.state.segments.other_keys import index_columns, searched_in

NO_SETS = Sets()


@dataclass(frozen=True, slots=True)
class Origin:
    """What the rows of a segment have in common, beyond their store."""

    births: tuple[int, int]
    """The first and the last epoch in which one of them arrived."""
    sets: Sets = NO_SETS


@dataclass(frozen=True, slots=True)
class SegmentInfo:
    """What a manifest knows of a segment.  Times are event times in microseconds; groups are half-open."""

    store: str
    path: str
    epoch: int
    tier: int
    run: str
    """The run it is a piece of."""
    rows: int
    keys: int
    bytes: int
    """Of the whole file."""
    checksum: str
    lo_group: int
    hi_group: int
    min_time: int | None
    max_time: int | None
    max_arrived: int | None
    first: int = 0
    """Rows at the front that a merge has taken over: they are no longer part of the segment."""
    into: str | None = None
    """The run that it is being merged into."""
    meta: int = 0
    """Where the part that `checksum` covers begins: 0 in a flat segment, behind the blocks in a deep one."""
    min_born: int = 0
    """The first and the last epoch in which one of its rows arrived."""
    max_born: int = 0
    has_born: bool = False
    """Whether every row has its birth in the column BORN."""
    sets: Sets = NO_SETS

    @property
    def live_bytes(self) -> int:
        """Bytes of the rows that are still part of it, about."""
        return self.bytes * self.rows // (self.first + self.rows)

    @property
    def deep(self) -> bool:
        """Whether its rows lie in compressed blocks."""
        return self.path.endswith(".deep")

    def overlaps(self, times: tuple[int | None, int | None]) -> bool:
        """The zone map: whether rows can have such event times, both ends included; None is unbounded."""
        low, high = times
        if self.min_time is None or self.max_time is None:
            return True
        return (low is None or self.max_time >= low) and (high is None or self.min_time <= high)

    def to_json(self) -> dict[str, Any]:
        """A JSON value; `from_json` gives the info back."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(value: dict[str, Any], where: str = "a segment's description") -> SegmentInfo:
        """The inverse of `to_json`; `where` names the file it was read from in errors.

        What format 3 does not say of births follows from the epoch.
        """
        sets = value.get("sets", {"bits": (), "passed": ()})
        last = value["epoch"]
        births = {"min_born": last if value["tier"] == 0 else 0, "max_born": last}
        info = SegmentInfo(**{**births, **value, "sets": Sets(tuple(sets["bits"]), tuple(sets["passed"]))})
        inside(info.path, where)
        return info


class Summary:
    """What a `SegmentInfo` says of rows, gathered while they are written."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.rows = self.keys = 0
        self.ends: list[np.uint64] = []
        self.times: tuple[int | None, int | None] = (None, None)
        self.max_arrived: int | None = None
        self.births: tuple[int, int] | None = None

    def add(self, hashes: U64, table: pa.Table) -> None:
        """Takes in rows that follow those before in hash order."""
        again = bool(self.ends) and self.ends[-1] == hashes[0]
        self.rows += len(hashes)
        self.keys += len(group_starts(hashes)) - 1 - int(again)
        self.ends = [self.ends[0] if self.ends else hashes[0], hashes[-1]]
        low, high = _bounds(table, self.store.time_column)
        self.times = (_least(self.times[0], low, min), _least(self.times[1], high, max))
        self.max_arrived = _least(self.max_arrived, _bounds(table, ARRIVED)[1], max)
        first, last = _bounds(table, BORN)
        if first is not None and last is not None:
            known = self.births or (first, last)
            self.births = min(first, known[0]), max(last, known[1])

    def info(
        self,
        path: str,
        out: ChecksummedFile,
        *,
        epoch: int,
        tier: int,
        run: str,
        meta: int = 0,
        origin: Origin | None = None,
    ) -> SegmentInfo:
        """The description of a file with these rows, which have arrived in this epoch if nothing else is said."""
        groups = key_group(np.array(self.ends, np.uint64))
        origin = origin or Origin((epoch, epoch))
        first, last = self.births if self.births is not None else origin.births
        return SegmentInfo(
            store=self.store.id,
            path=path,
            epoch=epoch,
            tier=tier,
            run=run,
            rows=self.rows,
            keys=self.keys,
            bytes=out.size,
            checksum=out.digest.hexdigest(),
            lo_group=int(groups[0]),
            hi_group=int(groups[1]) + 1,
            min_time=self.times[0],
            max_time=self.times[1],
            max_arrived=self.max_arrived,
            meta=meta,
            min_born=first,
            max_born=last,
            has_born=self.births is not None,
            sets=origin.sets,
        )


def new_run() -> str:
    """A name for a run that no other has."""
    return uuid.uuid4().hex[:16]


def new_path(store: Store, kind: str) -> str:
    """A name for a file that no other has, below the state directory."""
    folder = hashlib.sha256(store.id.encode()).hexdigest()[:16]
    return f"{folder}/{uuid.uuid4().hex}.{kind}"


@contextmanager
def writing(home: SegmentHome, path: str, sync: bool) -> Iterator[ChecksummedFile]:
    """A new file that exists, durably if asked, when the block ends well, and not at all when it does not."""
    full = os.path.join(home.directory, path)
    cached = home.remote is not None
    sync = sync and not cached
    try:
        file = home.create(path, sync)
        try:
            with file:
                yield ChecksummedFile(file)
                file.flush()
                if sync:
                    os.fsync(file.fileno())
                home.publish(file, path)
            if sync:
                # The store's own directory may be new as well, made by a task that did not live to sync it.
                sync_directory(os.path.dirname(full))
                sync_directory(home.directory)
        except BaseException:
            # The error that led here is the one to report; garbage collection finds the rest.
            with contextlib.suppress(OSError):
                os.unlink(file.name)
            raise
    except OSError as error:
        if not cached:
            raise storage_error("STATE", full, error) from error
        # What is cached can be had again: the next attempt finds room.
        home.shrink(limit=0)
        raise storage_error("CACHE", full, error) from error


def write_segment(
    home: SegmentHome,
    store: Store,
    table: pa.Table,
    hashes: U64,
    *,
    epoch: int,
    tier: int,
    sync: bool,
    run: str | None = None,
    origin: Origin | None = None,
) -> SegmentInfo:
    """Write `table`, already sorted by `hashes`, as a new flat segment of `store`."""
    rows = len(hashes)
    assert rows > 0, "a segment without rows is never written"
    # A store that keeps nothing but the hash has tables without columns, and Arrow does not count their rows.
    assert not table.num_columns or table.num_rows == rows, f"{table.num_rows} rows but {rows} hashes"
    # What an epoch adds is merged soon, with an index then.
    indexes = index_columns(table, searched_in(table, store)) if tier else {}
    columns = [pa.chunked_array([pa.array(hashes, pa.uint64())]), *table.combine_chunks().columns]
    columns += [pa.chunked_array([values]) for values in indexes.values()]
    names = [HASH, *table.column_names, *indexes]
    # Plain fields: segments of one store must agree in schema, whatever their rows came from.
    schema = pa.schema([pa.field(n, c.type) for n, c in zip(names, columns, strict=True)])
    path = new_path(store, "arrow")
    with writing(home, path, sync) as out, pa.ipc.new_file(pa.PythonFile(out, mode="w"), schema) as writer:
        writer.write_table(pa.Table.from_arrays(columns, schema=schema))
    summary = Summary(store)
    summary.add(hashes, table)
    return summary.info(path, out, epoch=epoch, tier=tier, run=run or new_run(), origin=origin)


def microseconds(column: Any) -> Any:
    """A timestamp or integer column as int64 microseconds; NULL stays NULL."""
    if pa.types.is_timestamp(column.type) and column.type.unit != "us":
        column = column.cast(pa.timestamp("us", column.type.tz))
    return column.cast(pa.int64())


def _bounds(table: pa.Table, name: str | None) -> tuple[int | None, int | None]:
    if name is None or name not in table.column_names:
        return None, None
    found = pc.min_max(microseconds(table.column(name))).as_py()
    return found["min"], found["max"]


def _least(a: int | None, b: int | None, choose: Any) -> int | None:
    """The least, or the greatest, of what there is."""
    known = [value for value in (a, b) if value is not None]
    return choose(known) if known else None
