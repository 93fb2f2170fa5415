"""What all files on disk have in common: durable names, and errors that say what to do.

Contract.  `put_if_absent` and `replace_file` are atomic: a file has all of its bytes, or its name does not exist.
With `sync` they are durable too: bytes first, then the name (`sync_directory`).  `storage_error` turns an OSError into
a StorageError with a stable code: `<PREFIX>_FULL` where space or quota ran out, else `<PREFIX>_UNWRITABLE`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import uuid

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


def numbered(directory: str) -> list[int]:
    """The numbers n of the files `<n>.json` in a directory, ascending."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise storage_error("CHECKPOINT", directory, error) from error
    return sorted(int(n[:-5]) for n in names if n.endswith(".json") and n[:-5].isdigit())


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
