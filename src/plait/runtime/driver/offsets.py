"""What Spark has logged of an epoch's input, as far as the epoch's commit relies on it.

    spark/offsets/<epoch>        `v1`, metadata, one line per source; `v2` has lines `name:offset`, in any order
    spark/sources/<source>/<n>   of a file source: the files that its n-th listing found (`n.compact`: and all before)

Contract.  `source_digest` covers which rows an epoch reads: the offsets, and the files that a file source's offsets
stand for.  It leaves out what changes when the same rows are planned again: the time, the watermark, settings.
`make_durable` syncs these files, which Spark does not: whoever commits an epoch must be able to rely on them after a
power cut.  Hadoop's checksums beside them are left out: where they are missing or empty, they are not compared.
`remove_torn` deletes drafts that a stop has left of Spark's logs, and what a power cut has left empty of an epoch that
was never committed, or of Spark's own commit of one that was: Spark would not start on it, and does without it.

Cost.  Two small files read; two fsyncs, and two per source, while the epoch is joined.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import xxhash

from plait.state.files.storage import Files, LocalFiles, storage_error, sync_directory, sync_file
from plait.state.log.checkpoint import Checkpoint

_DIGEST = "input:"
"""How a digest of the input begins.  Earlier versions took one of the whole file, and wrote it without this."""

_POOL = ThreadPoolExecutor(8, thread_name_prefix="plait-sync")
"""A file system syncs many files in little more time than one."""

_seen: dict[str, tuple[int, int]] = {}
"""Folders that change seldom, as they were when they were last synced."""


def source_digest(files: Files, number: int) -> str:
    """Ties a manifest to the very rows that Spark reads in this epoch."""
    data = files.read(f"spark/offsets/{number}")
    if data is None:
        return ""
    return _DIGEST + xxhash.xxh3_128_hexdigest(json.dumps(list(_input(files, number))).encode())


def same_source(files: Files, number: int, committed: str) -> bool:
    """Whether Spark reads in this epoch what it read when it was committed with this digest."""
    if not committed or committed.startswith(_DIGEST):
        return not committed or source_digest(files, number) == committed
    return xxhash.xxh3_128_hexdigest(files.read(f"spark/offsets/{number}") or b"") == committed


def make_durable(checkpoint: Checkpoint, number: int) -> Callable[[], None]:
    """Begins to sync what Spark has written of this epoch's input; the function that it returns waits until it is.

    Behind a URI there is nothing to do.
    """
    files = checkpoint.files
    if not (checkpoint.config.sync and isinstance(files, LocalFiles)):
        return _nothing
    try:
        names = [files.where(name) for name in (f"spark/offsets/{number}", *_logs(files, number))]
        if not os.path.exists(names[0]):
            return _nothing
        folders = {os.path.dirname(name) for name in names}
        above = [files.where(name) for name in ("spark", "spark/sources") if _changed(files.where(name))]
        if above and os.path.exists(metadata := files.where("spark/metadata")):
            names.append(metadata)
    except OSError as error:
        raise storage_error("CHECKPOINT", checkpoint.spark_dir, error) from error
    syncing = [
        *(_POOL.submit(sync_file, name) for name in names),
        *(_POOL.submit(sync_directory, folder) for folder in (*folders, *above)),
    ]

    def wait() -> None:
        try:
            for done in syncing:
                done.result()
        except OSError as error:
            raise storage_error("CHECKPOINT", checkpoint.spark_dir, error) from error

    return wait


def _nothing() -> None:
    """There is nothing to wait for."""


def _changed(folder: str) -> bool:
    """Whether a folder has got other names since it was last seen here."""
    try:
        found = os.stat(folder)
    except FileNotFoundError:
        return False
    now = (found.st_ino, found.st_mtime_ns)
    before = _seen.get(folder)
    _seen[folder] = now
    return now != before


def remove_torn(checkpoint: Checkpoint) -> None:
    """Deletes drafts of Spark's logs, and empty ones, which a power cut leaves of files not yet synced.

    Listings in use stay.
    """
    files, last = checkpoint.files, checkpoint.log.last()
    # A query that is stopped while it writes its first offsets leaves a draft; Spark starts on an empty folder only.
    for folder in ("spark/offsets", "spark/commits"):
        names = files.names(folder)
        logs = any(name.isdigit() for name in names)
        for name in names:
            if name.startswith(".") and (not logs or name.endswith((".tmp", ".tmp.crc"))):
                files.delete(f"{folder}/{name}")
    if not files.local:
        return
    relied = {} if last is None else _offsets(files, last)
    # Without its offsets Spark plans the epoch again; `same_source` then tells whether that is the same one.
    folders = {"spark/commits": -1, "spark/offsets": -1 if last is None else last - 1}
    for source in files.names("spark/sources"):
        folders[f"spark/sources/{source}"] = _listing(relied.get(source, ""))
    torn = ["spark/metadata"]
    for folder, kept in folders.items():
        numbers = {name: name.removesuffix(".compact") for name in files.names(folder)}
        torn += [f"{folder}/{name}" for name, n in numbers.items() if n.isdigit() and int(n) > kept]
    for name in torn:
        with contextlib.suppress(FileNotFoundError):
            if os.path.getsize(files.where(name)) == 0:
                files.delete(name)
                folder, _, file = name.rpartition("/")
                files.delete(f"{folder}/.{file}.crc")


def _offsets(files: Files, number: int) -> dict[str, str]:
    """The offset of every source after an epoch, by its number or its name; empty before the first epoch."""
    data = files.read(f"spark/offsets/{number}") if number >= 0 else None
    version, *lines = (data or b"").decode(errors="replace").split("\n")
    if version.strip() == "v1":
        return {str(source): offset for source, offset in enumerate(lines[1:])}
    named = (line.partition(":") for line in lines[1:])
    return {source: offset for source, _, offset in named}


def _listing(offset: str) -> int:
    """The number of a file source's listing that an offset means; −1 if it means none."""
    with contextlib.suppress(ValueError):
        value = json.loads(offset)
        if isinstance(value, dict) and list(value) == ["logOffset"] and isinstance(value["logOffset"], int):
            return value["logOffset"]
    return -1


def _listings(files: Files, number: int) -> Iterator[tuple[str, str, range]]:
    """Every source with its offset and the listings that this epoch reads: more than one, after a crash in between."""
    before = _offsets(files, number - 1)
    for source, offset in sorted(_offsets(files, number).items()):
        last = _listing(offset)
        first = _listing(before.get(source, "")) + 1 if before or not number else last
        yield source, offset, range(min(first, last), last + 1) if last >= 0 else range(0)


def _log(files: Files, source: str, listing: int) -> str | None:
    """The file that holds a listing: its own, or the next that was compacted."""
    folder = f"spark/sources/{source}"
    # Spark keeps many; one look at the very names is cheaper than at all of them.
    for name in (f"{folder}/{listing}", f"{folder}/{listing}.compact"):
        if files.local and os.path.exists(files.where(name)):
            return name
    names = files.names(folder)
    if str(listing) in names:
        return f"{folder}/{listing}"
    compacted = (int(name[:-8]) for name in names if name.endswith(".compact") and name[:-8].isdigit())
    later = min((n for n in compacted if n >= listing), default=None)
    return None if later is None else f"{folder}/{later}.compact"


def _logs(files: Files, number: int) -> Iterator[str]:
    """The logs of the sources that this epoch's offsets stand for; all there are of a source that is no file source."""
    for source, _, listings in _listings(files, number):
        if listings:
            yield from filter(None, (_log(files, source, listing) for listing in listings))
            continue
        for name in files.names(f"spark/sources/{source}"):
            if name.isdigit():
                yield f"spark/sources/{source}/{name}"


def _input(files: Files, number: int) -> Iterator[list[object]]:
    """What decides which rows an epoch reads: per source its offset, and the files behind it."""
    for source, offset, listings in _listings(files, number):
        found: list[list[object]] = []
        for listing in listings:
            log = _log(files, source, listing)
            mine = f'"batchId":{listing}}}'.encode()
            for line in ((files.read(log) if log else None) or b"").split(b"\n")[1:]:
                if line.strip().endswith(mine):
                    entry = json.loads(line)
                    found.append([entry.get("path"), entry.get("timestamp")])
        yield [source, offset, sorted(found, key=json.dumps)]
