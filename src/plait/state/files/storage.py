"""What all files have in common, wherever they lie: atomic names, and errors that say what to do.

Contract.  `Files` is a directory tree as a checkpoint needs it; names are relative to its root.  `LocalFiles` is the
one on a mounted file system, below; `state/files/remote.py` the one behind a URI; `state/files/places.py` chooses.
`put_if_absent` is atomic: a file has all of its bytes, or its name does not exist, and of several writers one wins.
No name leads out of its tree: `inside` checks names where they are read from a file, the trees check them again, and
nothing is written or deleted through a symbolic link.  What Plait makes is this user's alone: 0700, 0600.
With `sync` local files are durable too: bytes first, then the name (`sync_directory`).  `storage_error` turns an
OSError into a StorageError with a stable code: `<PREFIX>_FULL` where space or quota ran out, else
`<PREFIX>_UNWRITABLE`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Protocol

from plait.errors import CheckpointError, CorruptionError, StorageError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

RESTORE = "restore the file from a backup, or restart from an earlier copy of the checkpoint"

TEMPORARY = ".tmp-"
"""How the names of files that are still being written begin."""


PRIVATE = 0o700
"""The mode of directories that Plait makes for itself."""

_PLAIN = re.compile(r"[^/\\:\x00-\x1f\x7f]{1,255}")
"""A component of a path that means the same on every file system and in every URI."""


def inside(path: object, where: str) -> str:
    """`path`, which the file `where` names, if it is sure to lie in the folder it is relative to.

    >>> inside("aa/0.arrow", "a manifest")
    'aa/0.arrow'
    """
    if isinstance(path, str) and all(_PLAIN.fullmatch(p) and p not in (".", "..") for p in path.split("/")):
        return path
    raise CorruptionError("PATH_OUTSIDE", f"{where} names {path!r}, which is no file of the checkpoint", RESTORE)


def refuse_outside(root: str, name: str) -> None:
    """Raise if `name` leads, or could lead, out of the tree at `root`; the empty name is the tree itself."""
    if name and ("\0" in name or any(part in ("", ".", "..") for part in name.split("/"))):
        raise CorruptionError("PATH_OUTSIDE", f"{name!r} is no file below {root}", RESTORE)


def beneath(root: str, name: str) -> str:
    """The path of `name` below `root`, to be written or deleted: no folder on the way is a symbolic link.

    The root itself may be reached through links: they are the user's.
    """
    refuse_outside(root, name)
    full = root
    for part in name.split("/")[:-1]:
        full = os.path.join(full, part)
        if os.path.islink(full):
            raise CheckpointError(
                "LINK_INSIDE",
                f"{full} is a symbolic link: what is written or deleted through it may be anybody's",
                "replace the link by what it leads to; only the checkpoint and state_dir themselves may be links",
            )
    return os.path.join(root, name) if name else root


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


def sync_file(path: str) -> None:
    """Makes the bytes of a file durable that another process has written."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def create_file(path: str) -> BinaryIO:
    """A new file, this user's alone, to write and read; a name that exists is refused, a link too."""
    return open(path, "x+b", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o600))


def make_private(path: str | int) -> None:
    """Shut a directory or file of this user, or an open one, to others; another user's is left as it is."""
    found = os.stat(path)
    if found.st_uid == os.geteuid() and found.st_mode & 0o077:
        os.chmod(path, stat.S_IMODE(found.st_mode) & ~0o077)


def make_directory(path: str, sync: bool, mode: int = 0o777) -> None:
    """Create a directory with this mode, and those above it, durably if asked; one that exists is left as it is."""
    if os.path.isdir(path):
        return
    above = os.path.dirname(os.path.abspath(path))
    make_directory(above, sync)
    try:
        os.mkdir(path, mode)
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
        with create_file(temporary) as file:
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
        refuse_outside(self.root, name)
        return os.path.join(self.root, name) if name else self.root

    def _mine(self, name: str) -> str:
        return beneath(self.root, name)

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
        return put_if_absent(self._mine(name), data, self.sync)

    def replace(self, name: str, data: bytes, durable: bool = True) -> None:
        """Readers see all of the old or all of the new."""
        replace_file(self._mine(name), data, self.sync and durable)

    def make_directory(self, name: str) -> None:
        """Create a directory that only this user can look into, and those above it."""
        make_directory(self._mine(name), self.sync, PRIVATE)

    def move(self, name: str, to: str) -> None:
        """Give a finished file a name that no other has."""
        os.replace(self._mine(name), self._mine(to))

    def delete(self, name: str) -> None:
        """Delete a file, if that is possible."""
        with contextlib.suppress(OSError):
            os.unlink(self._mine(name))

    def delete_older(self, name: str, than: float) -> bool:
        """Delete a file last changed at or before `than`; whether it was."""
        return unlink_older(self._mine(name), than)

    def delete_tree(self, name: str) -> None:
        """Delete a folder and what is in it."""
        shutil.rmtree(self._mine(name))


def numbered(files: Files, folder: str) -> list[int]:
    """The numbers n of the files `<n>.json` in a folder, ascending."""
    return sorted(int(n[:-5]) for n in files.names(folder) if n.endswith(".json") and n[:-5].isdigit())
