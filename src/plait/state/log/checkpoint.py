"""The checkpoint: one directory, or one URI; one driver.

    plait.json    format and id             driver.lock   held by the running driver (flock)
    catalog.json  the queries of format 3   fence/        one file per driver that ever started
    log/          manifests                 receipts/     sinks that have taken an epoch
    results/      rows of queries without sink            spark/  Spark's own checkpoint
    settings.json what Spark's settings made of SQL       statistics.json  what the optimiser has learnt
    catalog/      versions of the catalog                 spark_names.json  names of Spark's sources
    state/        segments, unless `Config.state_dir` says where: then `<state_dir>/<id>`, with owner.json, owner.lock

Contract.  `open` creates what is missing, takes the lock, then the next fencing token.  The lock refuses a second
driver on this machine at once; the token stops a first one that the lock could not see (another machine, a
file system without locks, a URI) at its next `check_fence`, and what that one has written too late does not count
(`state/log/takeover.py`).  Paths and URIs: `state/files/places.py`.
Segments outside of the checkpoint belong to it alone: a copy of it finds them owned (`state/files/owner.py`).
Everything is this user's alone; what an earlier version has left open to others is shut when it is opened.

A checkpoint of an older format is upgraded by whoever opens it.  All of its files are read as they are, so the upgrade
is one step: `plait.json` gets the new number, before anything is written that older releases do not understand.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
import uuid
from typing import Any

import xxhash

from plait.config import Config, bytes_of
from plait.errors import CheckpointError, CorruptionError, PlaitError, StorageError
from plait.state.files.owner import IDENTITY, claim, owner_of
from plait.state.files.places import place
from plait.state.files.remote import RemoteFiles
from plait.state.files.segment_home import SegmentHome
from plait.state.files.storage import RESTORE, TEMPORARY, Files, make_private, numbered, storage_error
from plait.state.log import takeover as takeovers
from plait.state.log.manifest import (
    LOG,
    LiveState,
    Manifest,
    ManifestLog,
    manifest_name,
)
from plait.state.log.sealed import FORMAT, refuse_newer, refuse_older, seal, unseal
from plait.state.log.takeover import Takeover

LOCK, OWNER, OWNER_LOCK = "driver.lock", "owner.json", "owner.lock"
_FOLDERS = ("log", "receipts", "results", "fence", "spark")
_UPGRADE = "plait-upgrade.json"
"""What `plait.json` is being replaced by: where files cannot be replaced at once, a kill would leave none."""
_WALKED_PER_EPOCH = 64
"""Files that looking for garbage may cost per epoch: it waits until as many epochs have gone by."""


def identity(name: str) -> bytes:
    """The bytes of the file that gives a checkpoint its id: JSON, so that every release can tell the format."""
    return json.dumps({"format": FORMAT, "id": name, "checksum": _checksum(FORMAT, name)}).encode()


def _checksum(format: int, name: str) -> str:
    return xxhash.xxh3_128_hexdigest(f"{format} {name}".encode())


class Checkpoint:
    """An engine's checkpoint directory; open from `open` to `close`."""

    id: str
    token: int
    state_dir: str
    """Where segments rest: a path or a URI, as the next three are."""
    home: SegmentHome
    """The same as tasks see it."""

    def __init__(self, path: str, config: Config) -> None:
        self.files = place(path, config.sync)
        self.path = self.files.root
        self.config = config
        self.results_dir = self.files.where("results")
        self.spark_dir = self.files.where("spark")
        self.results = place(self.results_dir, config.sync)
        self.log = ManifestLog(self.files, self._refuse_overtaken)
        self.opened = 0.0
        """When, by this machine's clock."""
        self.walked = (-1, 0)
        """The epoch after which its directories were last looked through for garbage, and how many files there were."""
        self._locks: list[int] = []
        self._open = False
        self._takeover: Takeover | None = None

    def open(self, take_over: bool = False) -> Checkpoint:
        """Create what is missing and become its only driver.

        With `take_over` segments in `Config.state_dir` are its own from now on, if their owner is not to be found.
        """
        assert not self._open, "already open"
        try:
            self.files.make_directory("")
            if isinstance(self.files, RemoteFiles):
                self.files.prove()
            self.id = self.identify()
            self.home = segment_home(self.files, self.config, self.id)
            self.state_dir = self.home.files.root
            for folder in _FOLDERS:
                self.files.make_directory(folder)
            rest = place(self.state_dir, self.config.sync)
            rest.make_directory("")
            _tighten(self.files, "", *_FOLDERS)
            _tighten(rest, "")
            self._open, self.opened = True, time.time()
            try:
                if self.files.local:
                    self._locks.append(locked(self.files, LOCK))
                # Before anybody remembers which file gives it its id.
                self._upgrade()
                if self.config.state_dir:
                    self._own(rest, take_over)
                self.token = self._take_token()
                # The first driver takes over from nobody.
                self._takeover = takeovers.note(self.files, self.token) if self.token > 1 else None
            except BaseException:
                self.close()
                raise
        except OSError as error:
            raise storage_error("CHECKPOINT", self.path, error) from error
        return self

    def close(self) -> None:
        """Let the next driver in.  Closing twice is harmless."""
        self._open = False
        while self._locks:
            lock = self._locks.pop()
            # Who reads the file sees that nobody holds it.  It keeps its size: a full disk has room for the next name.
            with contextlib.suppress(OSError):
                os.pwrite(lock, b"-", 0)
            os.close(lock)

    def __enter__(self) -> Checkpoint:
        return self if self._open else self.open()

    def __exit__(self, *_: object) -> None:
        self.close()

    def check_fence(self) -> None:
        """Raise if another driver has started on this checkpoint since `open`."""
        newest = max(numbered(self.files, "fence"), default=0)
        if newest > self.token:
            raise CheckpointError(
                "FENCED",
                f"driver {newest} has taken over {self.path} from driver {self.token}, which is this one",
                "stop this driver; nothing it does from here on can be committed",
            )

    def _refuse_overtaken(self, manifest: Manifest) -> None:
        """Raises for a manifest that an earlier driver wrote after this one, or the last one, had taken over."""
        takeover = self._takeover if self._open else takeovers.newest(self.files)
        takeovers.refuse_overtaken(takeover, manifest, self.files)

    def catalog(self) -> dict[str, Any] | None:
        """What a release with format 3 was made for; None if there is none."""
        data = self.files.read("catalog.json")
        where = self.files.where("catalog.json")
        return None if data is None else unseal("plait-catalog", data, where, "CATALOG_CORRUPT")

    def settings(self, now: dict[str, str]) -> dict[str, str]:
        """The settings that the checkpoint was made with: `now`, if none are recorded yet."""
        data = self.files.read("settings.json")
        if data is None:
            self.files.put_if_absent("settings.json", seal("plait-settings", now))
            data = self.files.read("settings.json") or b""
        return unseal("plait-settings", data, self.files.where("settings.json"), "CHECKPOINT_CORRUPT")

    def statistics(self) -> dict[str, Any] | None:
        """What `put_statistics` stored last.  It is advice only: None if there is none, or it cannot be read."""
        try:
            data = self.files.read("statistics.json")
            where = self.files.where("statistics.json")
            return None if data is None else unseal("plait-statistics", data, where, "CHECKPOINT_CORRUPT")
        except PlaitError:
            return None

    def put_statistics(self, statistics: dict[str, Any]) -> None:
        """Replace the statistics; failing to costs a restarted engine what it had learnt, nothing else."""
        with contextlib.suppress(StorageError):
            self.files.replace("statistics.json", seal("plait-statistics", statistics), durable=False)

    def identify(self) -> str:
        """Its id, a new one if there is nothing yet."""
        path = self.files.where(IDENTITY)
        data = self.files.read(IDENTITY)
        if data is None:
            data = self.files.read(_UPGRADE)
        if data is None:
            if numbered(self.files, LOG):
                raise CorruptionError("CHECKPOINT_CORRUPT", f"{path} is gone, but manifests exist", RESTORE)
            self.files.put_if_absent(IDENTITY, identity(uuid.uuid4().hex))
            data = self.files.read(IDENTITY) or b""
        found, name = self._read_identity(data)
        refuse_newer(found, path)
        refuse_older(found, path)
        return name

    def _read_identity(self, data: bytes) -> tuple[int, str]:
        """Format and id."""
        path = self.files.where(IDENTITY)
        try:
            value = json.loads(data)
            found, name = value["format"], uuid.UUID(value["id"]).hex
            if not isinstance(found, int) or isinstance(found, bool) or found < 1:
                raise ValueError(f"format {found!r}")
            # Format 3 had no checksum; what newer ones have is theirs.
            if found == FORMAT and value["checksum"] != _checksum(found, name):
                raise ValueError("its checksum is another")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptionError("CHECKPOINT_CORRUPT", f"{path} cannot be understood: {error}", RESTORE) from error
        return found, name

    def _upgrade(self) -> None:
        """Makes it one of this format.  A kill at any point leaves one that this release opens, and upgrades then."""
        data = self.files.read(IDENTITY)
        if data is not None and self._read_identity(data)[0] == FORMAT and self.files.read(_UPGRADE) is None:
            return
        self.files.put_if_absent(_UPGRADE, identity(self.id))
        self.files.replace(IDENTITY, identity(self.id))
        self.files.delete(_UPGRADE)

    def _own(self, rest: Files, take_over: bool) -> None:
        """The segments in `rest` belong to this checkpoint, or it is refused."""
        if rest.local:
            try:
                self._locks.append(locked(rest, OWNER_LOCK))
            except OSError as error:
                raise storage_error("STATE", rest.root, error) from error
        other = claim(rest, OWNER, owner_of(self.files, self.id), take_over)
        if other is not None:
            gone = "" if other.stands_beside(owner_of(self.files, self.id)) else ", which is not to be seen from here"
            raise CheckpointError(
                "STATE_OWNED_ELSEWHERE",
                f"the segments in {rest.root} belong to the checkpoint {other.path} on host {other.host}{gone}; "
                f"{self.path} is a copy of it, or was moved from another file system",
                "if it was moved: `plait state adopt CHECKPOINT --state-dir DIR`; if it is a copy: the same with "
                "--copy, which gives it an id and segments of its own",
            )

    def _take_token(self) -> int:
        while True:
            token = max(numbered(self.files, "fence"), default=0) + 1
            who = {"pid": os.getpid(), "host": socket.gethostname(), "started": time.time(), "nonce": uuid.uuid4().hex}
            if self.files.put_if_absent(_fence_name(token), json.dumps(who).encode()):
                return token


def locked(files: Files, name: str) -> int:
    """An open file that this process has locked."""
    handle = os.open(files.where(name), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        # Whoever can open it can lock it.
        make_private(handle)
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(handle, 4096).decode(errors="replace").strip() or "another process"
        os.close(handle)
        raise CheckpointError(
            "CHECKPOINT_IN_USE",
            f"{files.root} is in use by {holder}",
            "stop that driver, or give this one a checkpoint of its own",
        ) from None
    except BaseException:
        os.close(handle)
        raise
    try:
        name_of_holder = f"pid {os.getpid()} on host {socket.gethostname()}\n".encode()
        os.pwrite(handle, name_of_holder, 0)
        os.ftruncate(handle, len(name_of_holder))
    except BaseException:
        os.close(handle)
        raise
    return handle


def _tighten(files: Files, *folders: str) -> None:
    for folder in folders if files.local else ():
        make_private(files.where(folder))


def _fence_name(token: int) -> str:
    return f"fence/{token:012d}.json"


def segment_home(files: Files, config: Config, name: str) -> SegmentHome:
    """Where the segments of the checkpoint `name` lie: below it, or where `Config.state_dir` says."""
    rest = place(os.path.join(config.state_dir, name) if config.state_dir else files.where("state"), config.sync)
    if not isinstance(rest, RemoteFiles):
        return SegmentHome(rest.root)
    limit = None if config.cache_limit is None else bytes_of("cache_limit", config.cache_limit)
    return SegmentHome(os.path.abspath(config.cache_dir) if config.cache_dir else "", rest, name, limit)


def collect_garbage(
    checkpoint: Checkpoint, live: LiveState, keep_results: set[str], grace_seconds: float, now: float
) -> int:
    """Delete what no manifest needs and nobody can still be writing or reading; returns how many files.

    Segments that are not in `live`, results that are not in `keep_results` (paths within the results directory, or
    absolute), manifests before the newest snapshot, temporary files and old fences.  What an earlier driver has left
    of results lies here for the grace period as well: somebody may still have a DataFrame of it.

    Cost: what there is to delete, and a walk through all files.  The more there are, the more seldom it is made, so
    that it comes to the same per epoch.
    """
    checkpoint.check_fence()
    files, results = checkpoint.files, checkpoint.results
    if isinstance(files, RemoteFiles):
        # By the clock that the files are dated by: whoever is ahead of it would take new files for old ones.
        now = min(now, files.modified(manifest_name(live.epoch)) or 0.0)
    limit = now - grace_seconds
    deleted = checkpoint.log.prune(limit)
    epoch, walked = checkpoint.walked
    if epoch <= live.epoch < epoch + walked // _WALKED_PER_EPOCH:
        return deleted
    named = {info.path for infos in live.segments.values() for info in infos}
    kept = {os.path.relpath(path, results.root) if os.path.isabs(path) else path for path in keep_results}
    walked = 0
    for rest, keep, old in (
        (checkpoint.home.files, named, True),
        (results, kept, checkpoint.opened <= limit),
    ):
        for path, _ in rest.walk(""):
            walked += 1
            if old and path not in keep and path not in (OWNER, OWNER_LOCK):
                deleted += rest.delete_older(path, limit)
    for folder in ("", "log", "receipts", "fence"):
        for name in files.names(folder):
            if name.startswith(TEMPORARY):
                deleted += files.delete_older(f"{folder}/{name}" if folder else name, limit)
    for token in numbered(files, "fence"):
        if token < checkpoint.token:
            deleted += files.delete_older(_fence_name(token), limit)
    for token in takeovers.tokens(files):
        if token < checkpoint.token:
            deleted += files.delete_older(takeovers.note_name(token), limit)
    checkpoint.walked = (live.epoch, walked)
    return deleted
