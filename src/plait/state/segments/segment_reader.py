"""Opening segments: bytes are checked before they are parsed, and what is open stays open for a while.

Contract.  `open_segment` returns exactly the rows that were written, or raises.  The bytes that a segment's checksum
covers are read whole the first time a host sees them (with `verified_dir`), else once per process; a deep segment's
blocks carry checksums of their own, which are compared at every read.  A segment that rests elsewhere is read from this
host's cache (`files/segment_home.py`), all its blocks are compared when it comes, and a copy that is not what was
committed is fetched once more before anything is raised.

Cost.  Opening what was opened before: one `stat`.  Rows are read from disk as they are touched.  A process keeps the
last 4096 segments mapped; those deleted meanwhile are let go from time to time, so that their disk space is.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
import uuid
from collections import OrderedDict

import numpy as np
import pyarrow as pa
import xxhash

from plait.errors import CorruptionError, StorageError
from plait.query.store import HASH
from plait.state.files.mapped_file import announce, map_file
from plait.state.files.segment_home import ATTEMPTS, SegmentHome, wiped
from plait.state.files.storage import RESTORE, create_file
from plait.state.segments.block_segment import DeepSegment
from plait.state.segments.columns import in_utc
from plait.state.segments.other_keys import split
from plait.state.segments.run import MemoryRun, ends_of
from plait.state.segments.segment import SegmentInfo

Segment = MemoryRun | DeepSegment

CACHED = 4096
_SWEEP = 256
_QUICK = 4 << 20
"""Bytes that every process checks for itself: that takes less time than to leave a note, and to look for one."""
_Identity = tuple[int, int, int]
_open: OrderedDict[tuple[str, str], tuple[_Identity, str, Segment]] = OrderedDict()
_opened = 0
_lock = threading.Lock()


def open_segment(home: SegmentHome, info: SegmentInfo, verified_dir: str | None = None) -> Segment:
    """Map a segment into memory; its bytes are checked once per process, or per host where `verified_dir` is given."""
    if home.remote is None:
        return _open_here(home.directory, info, verified_dir)
    spoilt: CorruptionError | None = None
    for _ in range(ATTEMPTS):
        if home.fetch(info):
            _let_go()
        try:
            return _open_here(home.directory, info, verified_dir, copied=True)
        except CorruptionError as error:
            if error.code == "SEGMENT_MISSING":
                continue
            home.drop(info.path)
            if spoilt is not None:
                message = f"segment {home.remote.where(info.path)} is damaged: {error.cause}"
                raise CorruptionError(error.code, message, RESTORE) from error
            spoilt = error
    raise wiped(os.path.join(home.directory, info.path))


def _open_here(state_dir: str, info: SegmentInfo, verified_dir: str | None, copied: bool = False) -> Segment:
    full = os.path.join(state_dir, info.path)
    identity = _identity(full, info)
    key = (state_dir, info.path)
    with _lock:
        cached = _open.get(key)
        if cached is not None and cached[0] == identity and cached[1] == info.checksum:
            _open.move_to_end(key)
            return cached[2].trimmed(info.first)
    segment = _map(full, info, identity, verified_dir, copied)
    with _lock:
        _keep(key, identity, info.checksum, segment)
        sweep = _opened % _SWEEP == 0
    if sweep and verified_dir is not None:
        _sweep_markers(state_dir, verified_dir)
    return segment.trimmed(info.first)


def _identity(full: str, info: SegmentInfo) -> _Identity:
    """Inode, time and size: what tells whether a file still is the one that was verified."""
    try:
        found = os.stat(full)
    except (FileNotFoundError, NotADirectoryError):
        raise _missing(full, info) from None
    except OSError as error:
        raise _unreadable(full, error) from error
    if found.st_size != info.bytes:
        raise CorruptionError(
            "SEGMENT_TRUNCATED", f"segment {full} has {found.st_size} bytes instead of {info.bytes}", RESTORE
        )
    return found.st_ino, found.st_mtime_ns, found.st_size


def _map(full: str, info: SegmentInfo, identity: _Identity, verified_dir: str | None, copied: bool) -> Segment:
    try:
        content = map_file(full, random=info.deep)
    except FileNotFoundError:
        raise _missing(full, info) from None
    except OSError as error:
        raise _unreadable(full, error) from error
    mark = f"{info.checksum} {' '.join(map(str, identity))}"
    quick = content.size - info.meta <= _QUICK
    marker = None if verified_dir is None or quick else os.path.join(verified_dir, info.path.replace("/", "-"))
    if marker is None or _read_marker(marker) != mark:
        announce(content, np.array([info.meta]), np.array([content.size]))
        if content.size != info.bytes or xxhash.xxh3_128_hexdigest(content.slice(info.meta)) != info.checksum:
            raise CorruptionError("SEGMENT_CORRUPT", f"the bytes of segment {full} are not those committed", RESTORE)
        if copied and info.deep:
            DeepSegment.of(full, content).check()
        if marker is not None:
            _write_marker(marker, mark)
    if info.deep:
        return DeepSegment.of(full, content, copied)
    table = pa.ipc.open_file(content).read_all()
    hashes = table.column(HASH)
    # Columns beyond 2 GB of text do not fit one batch; then, and only then, this copies.
    array = hashes.chunk(0) if hashes.num_chunks == 1 else hashes.combine_chunks()
    values = array.to_numpy()
    rows, indexes = split(table.drop_columns([HASH]))
    return MemoryRun(values, in_utc(rows), ends=ends_of(values), indexes=indexes)


def _missing(full: str, info: SegmentInfo) -> CorruptionError:
    return CorruptionError("SEGMENT_MISSING", f"segment {full} of epoch {info.epoch} is gone", RESTORE)


def _unreadable(full: str, error: OSError) -> StorageError:
    return StorageError(
        "STATE_UNREADABLE",
        f"segment {full} cannot be read: {error.strerror or error}",
        "check the disk and the permissions of the state directory, then restart",
    )


def _keep(key: tuple[str, str], identity: _Identity, checksum: str, segment: Segment) -> None:
    global _opened
    _open[key] = (identity, checksum, segment)
    _open.move_to_end(key)
    _opened += 1
    while len(_open) > CACHED:
        _open.popitem(last=False)
    if _opened % _SWEEP == 0:
        _drop_gone()


def _let_go() -> None:
    """What is not in the cache any more is not kept mapped either: its disk space would not be free."""
    with _lock:
        _drop_gone()


def _drop_gone() -> None:
    for gone in [k for k in _open if not os.path.exists(os.path.join(*k))]:
        del _open[gone]


def _read_marker(path: str) -> str | None:
    """What a marker says, if nobody else can have written it."""
    try:
        if not _private(os.path.dirname(path)):
            return None
        with open(path) as file:
            return file.read()
    except OSError:
        return None


def _write_marker(path: str, text: str) -> None:
    """A marker that cannot be written, or not safely, costs a second verification, nothing else."""
    folder, draft = os.path.dirname(path), f"{path}.{uuid.uuid4().hex}"
    with contextlib.suppress(OSError):
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        # In the temporary folder, which is anybody's, somebody may have made it, or a link, before us.
        if _private(folder):
            with create_file(draft) as file:
                file.write(text.encode())
            os.replace(draft, path)


def _private(folder: str) -> bool:
    """Whether it is a directory of this user that nobody else can write to."""
    found = os.lstat(folder)
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022


def _sweep_markers(state_dir: str, verified_dir: str) -> None:
    """Remove the markers of segments that are gone."""
    with contextlib.suppress(OSError):
        for name in os.listdir(verified_dir) if _private(verified_dir) else ():
            if not os.path.exists(os.path.join(state_dir, name.replace("-", "/", 1))):
                os.unlink(os.path.join(verified_dir, name))
