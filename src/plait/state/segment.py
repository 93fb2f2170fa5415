"""A segment: an immutable file of rows sorted by the hash of their store's key.  One file, written once.

Contract.  An Arrow IPC file, uncompressed, HASH column first, one record batch, so that a memory map gives
zero-copy arrays.  Its name is new for every attempt and holds nothing a user typed; only what a manifest names
exists.  The xxh3-128 of its bytes lives in its `SegmentInfo`, hence in the manifest, and is checked *before* the
bytes are parsed, because Arrow does not notice flipped bits.

Invariant.  `open_segment` returns exactly the rows that were written, or raises.

Cost.  Writing: one pass, hashing on the way.  Opening: one pass over the file the first time a host sees it (with
`verified_dir`), else microseconds; rows are read from disk as they are touched.  A process keeps the last 4096
segments mapped; those deleted meanwhile are let go from time to time, so that their disk space is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import threading
import uuid
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from plait.errors import CorruptionError, StorageError
from plait.kernels import U64
from plait.kernels.hashing import key_group
from plait.kernels.runs import group_starts
from plait.query.plan import ARRIVED, HASH, Store
from plait.state.files import make_directory, storage_error, sync_directory
from plait.state.keys import homogeneous

RESTORE = "restore the file from a backup, or restart from an earlier copy of the checkpoint"


@dataclass(frozen=True, slots=True)
class SegmentInfo:
    """What a manifest knows of a segment.  Times are event times in microseconds; groups are half-open."""

    store: str
    path: str
    epoch: int
    tier: int
    rows: int
    keys: int
    bytes: int
    checksum: str
    lo_group: int
    hi_group: int
    min_time: int | None
    max_time: int | None
    max_arrived: int | None
    homogeneous: bool

    def to_json(self) -> dict[str, Any]:
        """A JSON value; `from_json` gives the info back."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(value: dict[str, Any]) -> SegmentInfo:
        """The inverse of `to_json`."""
        return SegmentInfo(**value)


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """An open segment: hashes and rows, both views of the memory map."""

    info: SegmentInfo
    hashes: U64
    table: pa.Table
    """All columns but HASH."""


class _Tee:
    """A file for Arrow to write to, which hashes and counts what passes."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.digest, self.size, self.closed = file, xxhash.xxh3_128(), 0, False

    def write(self, data: Any) -> int:
        self.digest.update(data)
        self.file.write(data)
        self.size += len(data)
        return len(data)

    def flush(self) -> None:
        self.file.flush()

    def close(self) -> None:
        self.closed = True


def write_segment(
    state_dir: str, store: Store, table: pa.Table, hashes: U64, *, epoch: int, tier: int, sync: bool
) -> SegmentInfo:
    """Write `table`, already sorted by `hashes`, as a new segment of `store`."""
    rows = len(hashes)
    assert rows > 0, "a segment without rows is never written"
    # A store that keeps nothing but the hash has tables without columns, and Arrow does not count their rows.
    assert not table.num_columns or table.num_rows == rows, f"{table.num_rows} rows but {rows} hashes"
    columns = [pa.chunked_array([pa.array(hashes, pa.uint64())]), *table.combine_chunks().columns]
    # Plain fields: segments of one store must agree in schema, whatever their rows came from.
    schema = pa.schema([pa.field(n, c.type) for n, c in zip([HASH, *table.column_names], columns, strict=True)])
    folder = hashlib.sha256(store.id.encode()).hexdigest()[:16]
    path = f"{folder}/{uuid.uuid4().hex}.arrow"
    full = os.path.join(state_dir, path)
    try:
        make_directory(os.path.dirname(full), sync)
        try:
            with open(full, "xb") as file:
                tee = _Tee(file)
                with pa.ipc.new_file(pa.PythonFile(tee, mode="w"), schema) as writer:
                    writer.write_table(pa.Table.from_arrays(columns, schema=schema))
                file.flush()
                if sync:
                    os.fsync(file.fileno())
            if sync:
                # The store's own directory may be new as well, made by a task that did not live to sync it.
                sync_directory(os.path.dirname(full))
                sync_directory(state_dir)
        except BaseException:
            _remove(full)
            raise
    except OSError as error:
        raise storage_error("STATE", full, error) from error
    low, high = _bounds(table, store.time_column)
    groups = key_group(hashes[[0, -1]])
    return SegmentInfo(
        store=store.id,
        path=path,
        epoch=epoch,
        tier=tier,
        rows=rows,
        keys=len(group_starts(hashes)) - 1,
        bytes=tee.size,
        checksum=tee.digest.hexdigest(),
        lo_group=int(groups[0]),
        hi_group=int(groups[1]) + 1,
        min_time=low,
        max_time=high,
        max_arrived=_bounds(table, ARRIVED)[1],
        homogeneous=homogeneous(table, hashes, store.key),
    )


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


def _remove(path: str) -> None:
    # The error that led here is the one to report; garbage collection finds the rest.
    with contextlib.suppress(OSError):
        os.unlink(path)


CACHED = 4096
_SWEEP = 256
_Identity = tuple[int, int, int]
_open: OrderedDict[tuple[str, str], tuple[_Identity, Segment]] = OrderedDict()
_opened = 0
_lock = threading.Lock()


def open_segment(state_dir: str, info: SegmentInfo, verified_dir: str | None = None) -> Segment:
    """Map a segment into memory; its bytes are checked once per process, or per host where `verified_dir` is given."""
    full = os.path.join(state_dir, info.path)
    identity = _identity(full, info)
    key = (state_dir, info.path)
    with _lock:
        cached = _open.get(key)
        if cached is not None and cached[0] == identity and cached[1].info.checksum == info.checksum:
            _open.move_to_end(key)
            return cached[1]
    segment = _map(full, info, identity, verified_dir)
    with _lock:
        _keep(key, identity, segment)
        sweep = _opened % _SWEEP == 0
    if sweep and verified_dir is not None:
        _sweep_markers(state_dir, verified_dir)
    return segment


def _identity(full: str, info: SegmentInfo) -> _Identity:
    """Inode, time and size: what tells whether a file still is the one that was verified."""
    try:
        found = os.stat(full)
    except (FileNotFoundError, NotADirectoryError):
        raise CorruptionError("SEGMENT_MISSING", f"segment {full} of epoch {info.epoch} is gone", RESTORE) from None
    except OSError as error:
        raise _unreadable(full, error) from error
    if found.st_size != info.bytes:
        raise CorruptionError(
            "SEGMENT_TRUNCATED", f"segment {full} has {found.st_size} bytes instead of {info.bytes}", RESTORE
        )
    return found.st_ino, found.st_mtime_ns, found.st_size


def _map(full: str, info: SegmentInfo, identity: _Identity, verified_dir: str | None) -> Segment:
    try:
        with pa.memory_map(full) as file:
            content = file.read_buffer()
    except OSError as error:
        raise _unreadable(full, error) from error
    mark = f"{info.checksum} {' '.join(map(str, identity))}"
    marker = None if verified_dir is None else os.path.join(verified_dir, info.path.replace("/", "-"))
    if marker is None or _read_marker(marker) != mark:
        if content.size != info.bytes or xxhash.xxh3_128_hexdigest(content) != info.checksum:
            raise CorruptionError("SEGMENT_CORRUPT", f"the bytes of segment {full} are not those committed", RESTORE)
        if marker is not None:
            _write_marker(marker, mark)
    table = pa.ipc.open_file(content).read_all()
    hashes = table.column(HASH)
    # Columns beyond 2 GB of text do not fit one batch; then, and only then, this copies.
    array = hashes.chunk(0) if hashes.num_chunks == 1 else hashes.combine_chunks()
    return Segment(info, array.to_numpy(), table.drop_columns([HASH]))


def _unreadable(full: str, error: OSError) -> StorageError:
    return StorageError(
        "STATE_UNREADABLE",
        f"segment {full} cannot be read: {error.strerror or error}",
        "check the disk and the permissions of the state directory, then restart",
    )


def _keep(key: tuple[str, str], identity: _Identity, segment: Segment) -> None:
    global _opened
    _open[key] = (identity, segment)
    _open.move_to_end(key)
    _opened += 1
    while len(_open) > CACHED:
        _open.popitem(last=False)
    if _opened % _SWEEP == 0:
        for gone in [k for k in _open if not os.path.exists(os.path.join(*k))]:
            del _open[gone]


def _read_marker(path: str) -> str | None:
    """What a marker says, if nobody else can have written it."""
    try:
        folder = os.lstat(os.path.dirname(path))
        if folder.st_uid != os.geteuid() or folder.st_mode & 0o022:
            return None
        with open(path) as file:
            return file.read()
    except OSError:
        return None


def _write_marker(path: str, text: str) -> None:
    """A marker that cannot be written costs a second verification, nothing else."""
    with contextlib.suppress(OSError):
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        with open(f"{path}.{os.getpid()}", "w") as file:
            file.write(text)
        os.replace(f"{path}.{os.getpid()}", path)


def _sweep_markers(state_dir: str, verified_dir: str) -> None:
    """Remove the markers of segments that are gone."""
    with contextlib.suppress(OSError):
        for name in os.listdir(verified_dir):
            if not os.path.exists(os.path.join(state_dir, name.replace("-", "/", 1))):
                os.unlink(os.path.join(verified_dir, name))
