"""Where segments lie, as a task sees it: a directory, or a cache of segments that rest behind a URI.

Contract.  A segment is written and mapped in `directory`.  Without `remote` that is where it rests.  With it the
directory is this host's read-through cache: what is written is uploaded before it is reported (`create`, `publish`),
what is not there is downloaded (`fetch`), both under a temporary name until they are whole, so the workers of a host
share it without a lock.
Losing the cache, whole or in part, at any moment, costs time and nothing else.

Invariant.  Files at rest in the cache are at most `limit` bytes, or the one segment in use if that is larger.  The
least recently used go first.  A segment that is mapped outlives its name, as long as it is mapped.

Cost.  A segment that is there: a few system calls.  One that is not: its download, and a look at the whole directory.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import tempfile
import time
import uuid
from collections.abc import Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

from plait.errors import CorruptionError, StorageError
from plait.state.files.remote import RemoteFiles
from plait.state.files.storage import (
    PRIVATE,
    RESTORE,
    TEMPORARY,
    Files,
    LocalFiles,
    beneath,
    create_file,
    make_directory,
    storage_error,
)
from plait.state.segments.run import METER

if TYPE_CHECKING:
    from plait.state.segments.segment import SegmentInfo

MOST = 64 << 30
"""What the cache takes at most where nobody says."""

ATTEMPTS = 10
"""How often something is done again because somebody has emptied the cache meanwhile."""

_STALE = 3600.0
"""Seconds after which a temporary file is nobody's any more."""


def scratch_dir() -> str:
    """A place for this host's temporary files: what the cluster gives to executors, or the system's."""
    given = os.environ.get("LOCAL_DIRS") or os.environ.get("SPARK_LOCAL_DIRS") or ""
    return given.split(",")[0].strip() or tempfile.gettempdir()


def _draft(full: str) -> str:
    """A name beside a file of the cache under which it is made."""
    return os.path.join(os.path.dirname(full), TEMPORARY + uuid.uuid4().hex)


def wiped(where: str) -> StorageError:
    """Somebody deletes what is in use."""
    return StorageError(
        "CACHE_WIPED",
        f"{where} was deleted from the cache while it was needed",
        "see who deletes it, or set Config.cache_dir to another directory; then start again: nothing committed is lost",
    )


@dataclass(frozen=True)
class SegmentHome:
    """Frozen and small: it travels to tasks."""

    path: str
    """Where segments rest, or this host's cache directory; empty for the default one, which every host has itself."""
    remote: RemoteFiles | None = None
    name: str = ""
    """Of the checkpoint, for the default cache directory."""
    limit: int | None = None
    """Bytes that the cache may hold; None is a quarter of what the disk has, up to `MOST`."""

    @property
    def directory(self) -> str:
        """Where this host maps segments from."""
        if self.remote is None:
            return self.path
        return os.path.join(self.path or scratch_dir(), f"plait-cache-{os.geteuid()}-{self.name}")

    @property
    def files(self) -> Files:
        """Where segments rest."""
        return self.remote or LocalFiles(self.path, False)

    def create(self, path: str, sync: bool) -> BinaryIO:
        """A new file to write a segment into: its own name, or one in the cache that nobody evicts."""
        full = beneath(self.directory, path)
        if self.remote is None:
            make_directory(os.path.dirname(full), sync, PRIVATE)
            return create_file(full)
        for _ in range(ATTEMPTS):
            self.prepare()
            with contextlib.suppress(FileNotFoundError):
                make_directory(os.path.dirname(full), False, PRIVATE)
                return create_file(_draft(full))
        raise wiped(os.path.dirname(full))

    def publish(self, file: BinaryIO, path: str) -> None:
        """A segment that this host has written is complete: from here on every host can have it.

        It is sent from the open file, so it does not matter if its name is gone.
        """
        if self.remote is None:
            return
        self.remote.upload(file, path)
        with contextlib.suppress(FileNotFoundError):
            os.replace(file.name, beneath(self.directory, path))
        self.shrink(keep=path)

    def fetch(self, info: SegmentInfo) -> bool:
        """Makes sure that a segment is in the cache, unless somebody empties it meanwhile; whether it had to come."""
        self.prepare()
        full = beneath(self.directory, info.path)
        try:
            found = os.stat(full)
            if found.st_size == info.bytes:
                # The time of the last use; that of the last change tells a file that was verified.
                os.utime(full, ns=(time.time_ns(), found.st_mtime_ns))
                METER.cache_hits += 1
                return False
        except OSError:
            pass
        self._download(info, full)
        METER.cache_misses += 1
        METER.cache_bytes += info.bytes
        self.shrink(keep=info.path)
        return True

    def drop(self, path: str) -> None:
        """Takes a segment out of the cache."""
        if self.remote is not None:
            with contextlib.suppress(OSError):
                os.unlink(beneath(self.directory, path))

    def delete(self, path: str) -> None:
        """A segment that nobody needs; garbage collection finds what is left."""
        self.files.delete(path)
        self.drop(path)

    def prepare(self) -> None:
        """The cache directory is there, and nobody else can put anything into it."""
        directory = self.directory
        try:
            os.makedirs(directory, mode=0o700, exist_ok=True)
            found = os.lstat(directory)
        except FileNotFoundError:
            # Wiped in between: whoever wanted something in it finds out.
            return
        except OSError as error:
            raise storage_error("CACHE", directory, error) from error
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise StorageError(
                "CACHE_NOT_PRIVATE",
                f"{directory} is not a directory that only this user may write to",
                "remove it, or set Config.cache_dir to a directory of this user",
            )

    def shrink(self, keep: str = "", limit: int | None = None) -> None:
        """Deletes what was used longest ago, down to the limit."""
        held = sorted(self._held())
        total = sum(size for _, size, _ in held)
        allowed = self._allowed(total) if limit is None else limit
        for _, size, path in held:
            if total <= allowed:
                return
            if path != keep:
                total -= size
                METER.cache_evicted += 1
                self.drop(path)

    def forget(self, live: Set[str], older_than: float) -> None:
        """Takes out what is not live any more; younger files may be of an epoch that is being run."""
        if self.remote is not None:
            for _, _, path in self._held():
                full = os.path.join(self.directory, path)
                with contextlib.suppress(OSError):
                    if path not in live and os.stat(full).st_mtime < older_than:
                        os.unlink(full)

    def _allowed(self, total: int) -> int:
        if self.limit is not None:
            return self.limit
        try:
            return min(MOST, (shutil.disk_usage(self.directory).free + total) // 4)
        except OSError:
            return MOST

    def _held(self) -> list[tuple[float, int, str]]:
        """What is in the cache: last use, size, path.  Left-overs of killed downloads go."""
        held: list[tuple[float, int, str]] = []
        with contextlib.suppress(OSError):
            for folder in os.scandir(self.directory):
                with contextlib.suppress(OSError):
                    for file in os.scandir(folder.path):
                        with contextlib.suppress(OSError):
                            found = file.stat(follow_symlinks=False)
                            if not file.name.startswith(TEMPORARY):
                                held.append((found.st_atime, found.st_size, f"{folder.name}/{file.name}"))
                            elif found.st_mtime < time.time() - _STALE:
                                os.unlink(file.path)
        return held

    def _download(self, info: SegmentInfo, full: str) -> None:
        assert self.remote is not None
        draft = _draft(full)
        try:
            try:
                self._copy(info, draft)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                # Whatever else is cached can be had again.
                self.shrink(limit=0)
                self._copy(info, draft)
            os.replace(draft, full)
        except FileNotFoundError:
            # The directory was wiped meanwhile: whoever wanted the segment looks again.
            return
        except OSError as error:
            raise storage_error("CACHE", full, error) from error
        finally:
            with contextlib.suppress(OSError):
                os.unlink(draft)

    def _copy(self, info: SegmentInfo, draft: str) -> None:
        assert self.remote is not None
        os.makedirs(os.path.dirname(draft), mode=0o700, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(draft)
        try:
            self.remote.download(info.path, draft)
        except FileNotFoundError:
            # Or the directory was wiped under the draft: no word on the segment.
            if self.remote.modified(info.path) is not None:
                raise
            where = self.remote.where(info.path)
            message = f"segment {where} of epoch {info.epoch} is gone"
            raise CorruptionError("SEGMENT_MISSING", message, RESTORE) from None
