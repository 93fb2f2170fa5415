"""A checkpoint whose segments, in `Config.state_dir`, belong to another: it was moved, or it is a copy.  Offline.

Contract.  `adopt` makes the segments belong to this checkpoint, unless the one they belong to still stands where it
stood.  `adopt_copy` leaves them to their owner: every live segment is copied, checksums compared, and then, as its
last act, the checkpoint gets a new id, under which the copies lie.  Killed before, the checkpoint is as it was.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import uuid
from dataclasses import dataclass

from plait.config import Config
from plait.errors import PlaitError
from plait.state.files.owner import IDENTITY
from plait.state.files.places import place
from plait.state.files.remote import RemoteFiles
from plait.state.files.segment_home import SegmentHome, scratch_dir
from plait.state.files.storage import Files, beneath, create_file, make_directory, sync_directory
from plait.state.log.checkpoint import LOCK, OWNER_LOCK, Checkpoint, identity, locked, segment_home
from plait.state.segments.block_segment import DeepSegment
from plait.state.segments.segment import SegmentInfo
from plait.state.segments.segment_reader import open_segment


@dataclass(frozen=True)
class Adopted:
    """Where the segments of a checkpoint lie now, and how many were copied."""

    state_dir: str
    segments: int
    bytes: int


def adopt(path: str, config: Config) -> Adopted:
    """Makes the segments of a checkpoint that was moved its own."""
    with Checkpoint(path, config).open(take_over=True) as checkpoint:
        return Adopted(checkpoint.state_dir, 0, 0)


def adopt_copy(path: str, config: Config) -> Adopted:
    """Gives a checkpoint that is a copy an id of its own, and copies of the segments."""
    checkpoint, name = Checkpoint(path, config), uuid.uuid4().hex
    files = checkpoint.files
    old, new = (segment_home(files, config, n) for n in (checkpoint.identify(), name))
    with contextlib.ExitStack() as stack:
        # Nobody merges segments away while they are copied.
        for tree, lock in ((files, LOCK), (old.files, OWNER_LOCK)):
            if tree.local:
                tree.make_directory("")
                stack.callback(os.close, locked(tree, lock))
        infos = [info for infos in checkpoint.log.live().segments.values() for info in infos]
        target = place(new.files.root, config.sync)
        target.make_directory("")
        try:
            for info in infos:
                _copy(old, new, info, config.sync)
            files.replace(IDENTITY, identity(name))
        except BaseException:
            with contextlib.suppress(OSError, PlaitError):
                target.delete_tree("")
            raise
    return Adopted(new.files.root, len(infos), sum(info.bytes for info in infos))


def _copy(old: SegmentHome, new: SegmentHome, info: SegmentInfo, sync: bool) -> None:
    """Copies one segment, once its bytes are known to be those that were committed."""
    segment = open_segment(old, info)
    if isinstance(segment, DeepSegment):
        segment.check()
    with tempfile.TemporaryDirectory(prefix="plait-adopt-", dir=scratch_dir()) as folder:
        target: Files = new.files
        full = os.path.join(folder, "segment") if isinstance(target, RemoteFiles) else beneath(target.root, info.path)
        make_directory(os.path.dirname(full), sync, 0o700)
        with create_file(full) as file:
            for block in old.files.blocks(info.path):
                file.write(block)
            file.flush()
            if isinstance(target, RemoteFiles):
                target.upload(file, info.path)
            elif sync:
                os.fsync(file.fileno())
                sync_directory(os.path.dirname(full))
