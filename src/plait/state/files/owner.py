"""Who a directory belongs to: one checkpoint, and no copy of it.

Contract.  Where a checkpoint writes outside of itself (`<state_dir>/<id>`, the directory of a parquet sink) it leaves a
sealed file that says who it is.  `claim` creates the file, or finds another owner there.  A checkpoint is known by its
id, its path and the inode of its `plait.json`: renaming keeps the inode, restoring in place keeps the path, and a copy
has neither.  Behind a URI there is no inode: there the URI alone tells.

Cost.  One small file read per directory and start.
"""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import asdict, dataclass

from plait.errors import CorruptionError, without_secrets
from plait.state.files.storage import RESTORE, Files
from plait.state.log.sealed import seal, unseal

IDENTITY = "plait.json"


@dataclass(frozen=True)
class Owner:
    """A checkpoint, or one query of it, as others can recognise it."""

    id: str
    path: str
    """Path or URI of the checkpoint."""
    inode: int | None
    """Of its `plait.json`; None behind a URI."""
    host: str
    query: str = ""
    """The query that writes, where it is a sink's directory."""

    def is_one_with(self, mine: Owner) -> bool:
        """Whether `mine`, which is at its path now, is this owner: unchanged, renamed, or restored in place."""
        if (self.id, self.query) != (mine.id, mine.query):
            return False
        if self.path == mine.path:
            return self.inode == mine.inode or self.host == mine.host
        return self.inode is not None and self.inode == mine.inode and not self.stands_beside(mine)

    def stands_beside(self, mine: Owner) -> bool:
        """Whether this owner's path still holds its checkpoint, and that is not the very one at `mine`'s path."""
        if self.path == mine.path:
            return False
        here, there = (os.path.join(path, IDENTITY) for path in (mine.path, self.path))
        with contextlib.suppress(OSError):
            with open(there, "rb") as file:
                found = file.read(1 << 16)
            return self.id.encode() in found and not os.path.samefile(here, there)
        return False


def owner_of(files: Files, name: str, query: str = "") -> Owner:
    """Who the checkpoint in `files` with the id `name` is."""
    inode = os.stat(files.where(IDENTITY)).st_ino if files.local else None
    return Owner(name, without_secrets(files.root), inode, socket.gethostname(), query)


def claim(rest: Files, name: str, mine: Owner, take_over: bool = False) -> Owner | None:
    """Makes the directory `rest` belong to `mine`, by its file `name`; the other owner, if it has one.

    With `take_over` it belongs to `mine` afterwards, unless the other one still stands where it stood.
    """
    if (data := rest.read(name)) is None:
        rest.put_if_absent(name, _encoded(mine))
        data = rest.read(name)
    found = _decoded(data or b"", rest.where(name))
    if found == mine:
        return None
    if not found.is_one_with(mine) and not (take_over and not found.stands_beside(mine)):
        return found
    rest.replace(name, _encoded(mine))
    return None


def _encoded(owner: Owner) -> bytes:
    return seal("plait-owner", asdict(owner))


def _decoded(data: bytes, where: str) -> Owner:
    value = unseal("plait-owner", data, where, "OWNER_CORRUPT")
    try:
        return Owner(**value)
    except TypeError as error:
        raise CorruptionError("OWNER_CORRUPT", f"{where} lacks something: {error}", RESTORE) from error
