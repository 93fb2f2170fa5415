"""Progress at rest: `events.jsonl` in the checkpoint, one line of JSON per epoch, for whoever looks on from outside.

Contract.  Lines are only ever added; at `LIMIT` bytes the file becomes `events.1.jsonl`, which replaces the one before,
so at most twice as much is there.  Nothing depends on it: it is not synced, and failing to write it is no failure.
Readers take no lock.  Behind a URI, where nothing can be appended, there is none.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

from plait.state.files.storage import Files

CURRENT, BEFORE = "events.jsonl", "events.1.jsonl"
LIMIT = 8 << 20
RECENT_BYTES = 1 << 20
"""As many are read by who wants to know how an engine is doing now."""


def add_event(files: Files, event: Mapping[str, Any], limit: int = LIMIT) -> None:
    """Adds one line."""
    if not files.local:
        return
    line = json.dumps(event, separators=(",", ":"), default=str).encode() + b"\n"
    with contextlib.suppress(OSError):
        path = files.where(CURRENT)
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            size = os.fstat(handle).st_size
            os.write(handle, line)
        finally:
            os.close(handle)
        if size + len(line) >= limit:
            os.replace(path, files.where(BEFORE))


def newest_events(files: Files, most_bytes: int = RECENT_BYTES) -> list[dict[str, Any]]:
    """The newest events, oldest first: as many as these bytes hold, and one at least if there is any."""
    found: list[dict[str, Any]] = []
    for name in (CURRENT, BEFORE):
        for line in reversed(_tail(files, name, most_bytes)):
            most_bytes -= len(line)
            if most_bytes < 0 and found:
                return found[::-1]
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
    return found[::-1]


def _tail(files: Files, name: str, most_bytes: int) -> list[bytes]:
    """The last lines of a file, and the whole file where these bytes do not hold one line."""
    if not files.local:
        return []
    try:
        handle = os.open(files.where(name), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return []
    with os.fdopen(handle, "rb") as file:
        begin = max(0, file.seek(0, os.SEEK_END) - max(0, most_bytes))
        file.seek(begin)
        lines = file.read().splitlines()
        if begin and len(lines) < 2:
            file.seek(0)
            return file.read().splitlines()
    # The first one is a part only.
    return lines[1:] if begin else lines


def mean_rows(files: Files, last: int = 32) -> dict[str, float]:
    """By stream the rows of an epoch, on average over the last ones that had any."""
    found = [event["rows_in"] for event in newest_events(files) if any(event.get("rows_in", {}).values())][-last:]
    names = {name for rows in found for name in rows}
    return {name: sum(rows.get(name, 0) for rows in found) / len(found) for name in sorted(names)}


def events(files: Files) -> Iterator[dict[str, Any]]:
    """All events that are there, oldest first; a line that is being written is left out."""
    for name in (BEFORE, CURRENT):
        for line in (files.read(name) or b"").splitlines():
            with contextlib.suppress(ValueError):
                yield json.loads(line)
