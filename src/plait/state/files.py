"""What all files have in common, wherever they lie: atomic names, and errors that say what to do.

Contract.  `Files` is a directory tree as a checkpoint needs it; names are relative to its root.  `LocalFiles` is the
one on a mounted file system, below; `state/remote.py` the one behind a URI; `state/places.py` chooses.
`put_if_absent` is atomic: a file has all of its bytes, or its name does not exist, and of several writers one wins.
With `sync` local files are durable too: bytes first, then the name (`sync_directory`).  `storage_error` turns an
OSError into a StorageError with a stable code: `<PREFIX>_FULL` where space or quota ran out, else
`<PREFIX>_UNWRITABLE`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from plait.errors import StorageError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

RESTORE = "restore the file from a backup, or restart from an earlier copy of the checkpoint"

TEMPORARY = ".tmp-"
"""How the names of files that are still being written begin."""


def storage_error(prefix: str, path: str, error: OSError) -> StorageError:
    """The error to raise when writing `path` failed; `prefix` is STATE or CHECKPOINT."""
    reason = error.strerror or str(error)
    if error.errno in _FULL:
        return StorageError(
            f"{prefix}_FULL",
            f"there is no room to write {path}: {reason}",
            "free space, or move it to a larger disk; then restart: nothing committed is lost",
        )
    return StorageError(
        f"{prefix}_UNWRITABLE",
        f"{path} cannot be used: {reason}",
        "check that it is a directory on a mounted, writable file system that this user may read and write",
    )


def sync_directory(path: str) -> None:
    """Make the names in a directory durable."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_directory(path: str, sync: bool) -> None:
    """Create a directory and those above it, durably if asked; one that exists is left as it is."""
    if os.path.isdir(path):
        return
    above = os.path.dirname(os.path.abspath(path))
    make_directory(above, sync)
    try:
        os.mkdir(path)
    except FileExistsError:
        if not os.path.isdir(path):
            raise
    if sync:
        sync_directory(above)


def read_file(path: str) -> bytes | None:
    """The bytes of a small file, or None if there is none."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise storage_error("CHECKPOINT", path, error) from error


def unlink_older(path: str, than: float) -> bool:
    """Delete a file last changed at or before `than`; whether it was."""
    try:
        if os.lstat(path).st_mtime > than:
            return False
        os.unlink(path)
    except FileNotFoundError:
        return False
    return True


def put_if_absent(path: str, data: bytes, sync: bool) -> bool:
    """Create a file with all of `data`, or not at all; False if it exists already.  Atomic also between machines."""
    try:
        temporary = _write_temporary(path, data, sync)
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        finally:
            os.unlink(temporary)
        if sync:
            sync_directory(os.path.dirname(path))
    except OSError as error:
        raise storage_error("CHECKPOINT", path, error) from error
    return True


def replace_file(path: str, data: bytes, sync: bool) -> None:
    """Create or replace a file: readers see all of the old or all of the new."""
    try:
        os.replace(_write_temporary(path, data, sync), path)
        if sync:
            sync_directory(os.path.dirname(path))
    except OSError as error:
        raise storage_error("CHECKPOINT", path, error) from error


def _write_temporary(path: str, data: bytes, sync: bool) -> str:
    temporary = os.path.join(os.path.dirname(path), TEMPORARY + uuid.uuid4().hex)
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            if sync:
                os.fsync(file.fileno())
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    return temporary


class Files(Protocol):
    """A directory tree.  What is not there is no error to read, list or delete; what cannot be asked is."""

    @property
    def root(self) -> str:
        """Its path or URI."""
        ...

    @property
    def local(self) -> bool:
        """Whether every file is a path of this machine, so that it can be mapped and locked."""
        ...

    def where(self, name: str) -> str:
        """The path or URI of a file: what Spark reads and what errors say."""
        ...

    def names(self, folder: str) -> list[str]:
        """The names in a folder."""
        ...

    def walk(self, folder: str) -> Iterator[tuple[str, int]]:
        """The files below a folder, with their sizes; links are neither followed nor returned."""
        ...

    def read(self, name: str) -> bytes | None:
        """The bytes of a small file, or None if there is none."""
        ...

    def blocks(self, name: str) -> Iterator[bytes]:
        """The bytes of a large file, one piece after the other; raises FileNotFoundError."""
        ...

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """Create a file with all of `data`, or not at all; False if it exists already.  Atomic between machines."""
        ...

    def replace(self, name: str, data: bytes, durable: bool = True) -> None:
        """Create or replace a file.  A remote reader may find none for a moment, a part never."""
        ...

    def make_directory(self, name: str) -> None:
        """Create a directory and those above it; one that exists is left as it is."""
        ...

    def move(self, name: str, to: str) -> None:
        """Give a finished file a name that no other has."""
        ...

    def delete(self, name: str) -> None:
        """Delete a file, if that is possible: garbage collection finds what is left."""
        ...

    def delete_older(self, name: str, than: float) -> bool:
        """Delete a file last changed at or before `than`; whether it was."""
        ...

    def delete_tree(self, name: str) -> None:
        """Delete a folder and what is in it."""
        ...


@dataclass(frozen=True)
class LocalFiles:
    """Files below a directory of this machine, or of a file system that is mounted on all of them."""

    root: str
    sync: bool

    @property
    def local(self) -> bool:
        """Always."""
        return True

    def where(self, name: str) -> str:
        """Its path."""
        return os.path.join(self.root, name) if name else self.root

    def names(self, folder: str) -> list[str]:
        """The names in a folder."""
        try:
            return os.listdir(self.where(folder))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise storage_error("CHECKPOINT", self.where(folder), error) from error

    def walk(self, folder: str) -> Iterator[tuple[str, int]]:
        """Regular files, in the order of their names."""
        try:
            with os.scandir(self.where(folder)) as found:
                entries = sorted(found, key=lambda entry: entry.name)
        except OSError:
            return
        for entry in entries:
            inside = f"{folder}/{entry.name}" if folder else entry.name
            if entry.is_dir(follow_symlinks=False):
                yield from self.walk(inside)
            elif entry.is_file(follow_symlinks=False):
                with contextlib.suppress(FileNotFoundError):
                    yield inside, entry.stat(follow_symlinks=False).st_size

    def read(self, name: str) -> bytes | None:
        """The bytes of a small file, or None if there is none."""
        return read_file(self.where(name))

    def blocks(self, name: str) -> Iterator[bytes]:
        """A megabyte at a time."""
        with open(self.where(name), "rb") as file:
            while block := file.read(1 << 20):
                yield block

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """By a hard link, which refuses a name that exists."""
        return put_if_absent(self.where(name), data, self.sync)

    def replace(self, name: str, data: bytes, durable: bool = True) -> None:
        """Readers see all of the old or all of the new."""
        replace_file(self.where(name), data, self.sync and durable)

    def make_directory(self, name: str) -> None:
        """Create a directory and those above it."""
        make_directory(self.where(name), self.sync)

    def move(self, name: str, to: str) -> None:
        """Give a finished file a name that no other has."""
        os.replace(self.where(name), self.where(to))

    def delete(self, name: str) -> None:
        """Delete a file, if that is possible."""
        with contextlib.suppress(OSError):
            os.unlink(self.where(name))

    def delete_older(self, name: str, than: float) -> bool:
        """Delete a file last changed at or before `than`; whether it was."""
        return unlink_older(self.where(name), than)

    def delete_tree(self, name: str) -> None:
        """Delete a folder and what is in it."""
        shutil.rmtree(self.where(name))


def numbered(files: Files, folder: str) -> list[int]:
    """The numbers n of the files `<n>.json` in a folder, ascending."""
    return sorted(int(n[:-5]) for n in files.names(folder) if n.endswith(".json") and n[:-5].isdigit())
