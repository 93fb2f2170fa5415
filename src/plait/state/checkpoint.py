"""The checkpoint: one directory, one driver.

    plait.json    format and id             driver.lock   held by the running driver (flock)
    catalog.json  the registered queries    fence/        one file per driver that ever started
    log/          manifests                 receipts/     sinks that have taken an epoch
    results/      rows of queries without sink            spark/  Spark's own checkpoint
    statistics.json  what the optimiser has learnt
    state/        segments, unless `Config.state_dir` says where: then `<state_dir>/<id>`

Contract.  `open` creates what is missing, takes the lock, then the next fencing token.  The lock refuses a second
driver on this machine at once; the token stops a first one that the lock could not see (another machine, a
file system without locks) at its next `check_fence`.  Only local paths and `file:` URIs are understood.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import socket
import stat
import time
import uuid
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote, urlsplit

from plait.config import Config
from plait.errors import CheckpointError, CorruptionError, PlaitError, StorageError
from plait.state import files
from plait.state.files import RESTORE, TEMPORARY, make_directory, storage_error
from plait.state.manifest import FORMAT, LiveState, ManifestLog, refuse_newer, refuse_older, seal, unseal

_FOLDERS = ("log", "receipts", "results", "fence", "spark")


def local_path(path: str) -> str:
    """The absolute local path that a plain path or a `file:` URI means.

    >>> local_path("file:///tmp/a%20b")
    '/tmp/a b'
    """
    scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]*):/", path)
    if scheme is None:
        return os.path.abspath(path)
    parts = urlsplit(path)
    if scheme[1].lower() != "file" or parts.netloc not in ("", "localhost"):
        raise CheckpointError(
            "SCHEME",
            f"{path} is not a local path: scheme {scheme[1]!r} is not supported",
            "give a local directory, or a shared file system that is mounted on all machines",
        )
    return os.path.abspath(unquote(parts.path))


class Checkpoint:
    """An engine's checkpoint directory; open from `open` to `close`."""

    id: str
    token: int
    state_dir: str

    def __init__(self, path: str, config: Config) -> None:
        self.path = local_path(path)
        self.config = config
        self.log_dir = os.path.join(self.path, "log")
        self.results_dir = os.path.join(self.path, "results")
        self.spark_dir = os.path.join(self.path, "spark")
        self.fence_dir = os.path.join(self.path, "fence")
        self.log = ManifestLog(self.log_dir, config.sync)
        self._lock: int | None = None

    def open(self) -> Checkpoint:
        """Create what is missing and become its only driver."""
        assert self._lock is None, "already open"
        try:
            make_directory(self.path, self.config.sync)
            self.id = self._identify()
            base = self.config.state_dir
            self.state_dir = os.path.join(local_path(base), self.id) if base else os.path.join(self.path, "state")
            for folder in (*(os.path.join(self.path, f) for f in _FOLDERS), self.state_dir):
                make_directory(folder, self.config.sync)
            self._lock = self._take_lock()
            try:
                self.token = self._take_token()
            except BaseException:
                self.close()
                raise
        except OSError as error:
            raise storage_error("CHECKPOINT", self.path, error) from error
        return self

    def close(self) -> None:
        """Let the next driver in.  Closing twice is harmless."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Checkpoint:
        return self if self._lock is not None else self.open()

    def __exit__(self, *_: object) -> None:
        self.close()

    def check_fence(self) -> None:
        """Raise if another driver has started on this checkpoint since `open`."""
        newest = max(files.numbered(self.fence_dir), default=0)
        if newest > self.token:
            raise CheckpointError(
                "FENCED",
                f"driver {newest} has taken over {self.path} from driver {self.token}, which is this one",
                "stop this driver; nothing it does from here on can be committed",
            )

    def catalog(self) -> dict[str, Any] | None:
        """What `put_catalog` stored, or None."""
        path = os.path.join(self.path, "catalog.json")
        data = files.read_file(path)
        return None if data is None else unseal("plait-catalog", data, path, "CATALOG_CORRUPT")

    def put_catalog(self, catalog: dict[str, Any]) -> bool:
        """Store the catalog unless there is one; whether it was stored."""
        path = os.path.join(self.path, "catalog.json")
        return files.put_if_absent(path, seal("plait-catalog", catalog), self.config.sync)

    def statistics(self) -> dict[str, Any] | None:
        """What `put_statistics` stored last.  It is advice only: None if there is none, or it cannot be read."""
        path = os.path.join(self.path, "statistics.json")
        try:
            data = files.read_file(path)
            return None if data is None else unseal("plait-statistics", data, path, "CHECKPOINT_CORRUPT")
        except PlaitError:
            return None

    def put_statistics(self, statistics: dict[str, Any]) -> None:
        """Replace the statistics; failing to costs a restarted engine what it had learnt, nothing else."""
        with contextlib.suppress(StorageError):
            path = os.path.join(self.path, "statistics.json")
            files.replace_file(path, seal("plait-statistics", statistics), sync=False)

    def _identify(self) -> str:
        path = os.path.join(self.path, "plait.json")
        data = files.read_file(path)
        if data is None:
            if files.numbered(self.log_dir):
                raise CorruptionError("CHECKPOINT_CORRUPT", f"{path} is gone, but manifests exist", RESTORE)
            files.put_if_absent(path, json.dumps({"format": FORMAT, "id": uuid.uuid4().hex}).encode(), self.config.sync)
            data = files.read_file(path) or b""
        try:
            value = json.loads(data)
            found, name = value["format"], uuid.UUID(value["id"]).hex
            if not isinstance(found, int) or isinstance(found, bool) or found < 1:
                raise ValueError(f"format {found!r}")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptionError("CHECKPOINT_CORRUPT", f"{path} cannot be understood: {error}", RESTORE) from error
        refuse_newer(found, path)
        refuse_older(found, path)
        return name

    def _take_lock(self) -> int:
        path = os.path.join(self.path, "driver.lock")
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(handle, 4096).decode(errors="replace").strip() or "another process"
            os.close(handle)
            raise CheckpointError(
                "CHECKPOINT_IN_USE",
                f"{self.path} is in use by {holder}",
                "stop that driver, or give this one a checkpoint of its own",
            ) from None
        except BaseException:
            os.close(handle)
            raise
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"pid {os.getpid()} on host {socket.gethostname()}\n".encode(), 0)
        return handle

    def _take_token(self) -> int:
        while True:
            token = max(files.numbered(self.fence_dir), default=0) + 1
            who = {"pid": os.getpid(), "host": socket.gethostname(), "started": time.time()}
            path = os.path.join(self.fence_dir, f"{token:012d}.json")
            if files.put_if_absent(path, json.dumps(who).encode(), self.config.sync):
                return token


def collect_garbage(
    checkpoint: Checkpoint, live: LiveState, keep_results: set[str], grace_seconds: float, now: float
) -> int:
    """Delete what no manifest needs and nobody can still be writing; returns how many files.

    Segments that are not in `live`, results that are not in `keep_results` (paths within the results directory, or
    absolute), manifests before the newest snapshot that name no such result, temporary files and old fences.
    """
    checkpoint.check_fence()
    limit = now - grace_seconds
    named = {info.path for infos in live.segments.values() for info in infos}
    results, deleted = checkpoint.results_dir, 0
    kept = {os.path.relpath(path, results) if os.path.isabs(path) else path for path in keep_results}
    for root, keep in ((checkpoint.state_dir, named), (results, kept)):
        for path in _regular_files(root):
            if os.path.relpath(path, root) not in keep:
                deleted += files.unlink_older(path, limit)
    for folder in (checkpoint.path, *(os.path.join(checkpoint.path, f) for f in ("log", "receipts", "fence"))):
        for name in os.listdir(folder):
            if name.startswith(TEMPORARY):
                deleted += files.unlink_older(os.path.join(folder, name), limit)
    for token in files.numbered(checkpoint.fence_dir):
        if token < checkpoint.token:
            deleted += files.unlink_older(os.path.join(checkpoint.fence_dir, f"{token:012d}.json"), limit)
    return deleted + checkpoint.log.prune(limit, kept)


def _regular_files(root: str) -> Iterator[str]:
    """Files below a directory; links are neither followed nor returned."""
    for folder, folders, names in os.walk(root, followlinks=False):
        folders.sort()
        for name in sorted(names):
            path = os.path.join(folder, name)
            try:
                if stat.S_ISREG(os.lstat(path).st_mode):
                    yield path
            except FileNotFoundError:
                continue
