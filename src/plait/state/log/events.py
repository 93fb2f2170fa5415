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


def events(files: Files) -> Iterator[dict[str, Any]]:
    """All events that are there, oldest first; a line that is being written is left out."""
    for name in (BEFORE, CURRENT):
        for line in (files.read(name) or b"").splitlines():
            with contextlib.suppress(ValueError):
                yield json.loads(line)
