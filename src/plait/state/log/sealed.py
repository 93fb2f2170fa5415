"""Sealed files: a JSON object behind a line that names its kind, format and checksum.

    <kind> <format> <xxh3-128 of the rest>
    {…}

Contract.  `unseal(kind, seal(kind, value), …) == value`; a flipped bit, a file cut short or one of another kind is
never taken for what was sealed.  All small files of a checkpoint that matter are sealed: manifests, catalog, receipts.
"""

from __future__ import annotations

import json
from typing import Any

import xxhash

from plait.errors import CheckpointError, CorruptionError
from plait.state.files.storage import RESTORE

FORMAT = 4
"""The format that is written."""
OLDEST_FORMAT = 3
"""The oldest format that is still read: what it lacks takes defaults."""


def seal(kind: str, value: dict[str, Any]) -> bytes:
    """A JSON object behind a line that names its kind, format and checksum."""
    body = json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
    return f"{kind} {FORMAT} {xxhash.xxh3_128_hexdigest(body)}\n".encode() + body


def unseal(kind: str, data: bytes, where: str, code: str) -> dict[str, Any]:
    """The inverse of `seal`; raises CorruptionError `code` if the bytes are not what was sealed."""
    head, _, body = data.partition(b"\n")
    words = head.split(b" ")
    if len(words) != 3 or words[0] != kind.encode() or not words[1].isdigit():
        raise CorruptionError(code, f"{where} does not begin as a {kind} file does", RESTORE)
    if words[2] != xxhash.xxh3_128_hexdigest(body).encode():
        raise CorruptionError(code, f"the bytes of {where} are not those that were written", RESTORE)
    refuse_newer(int(words[1]), where)
    refuse_older(int(words[1]), where)
    value: dict[str, Any] = json.loads(body)
    return value


def refuse_newer(found: int, where: str) -> None:
    """Raise if `where` is of a format this version does not know."""
    if found > FORMAT:
        raise CheckpointError(
            "FORMAT_NEWER",
            f"{where} has format {found}; this version of plait reads formats up to {FORMAT}",
            "upgrade plait",
        )


def refuse_older(found: int, where: str) -> None:
    """Raise if `where` is of a format that this version no longer reads."""
    if found < OLDEST_FORMAT:
        raise CheckpointError(
            "FORMAT_OLDER",
            f"{where} has format {found}; this version of plait reads formats from {OLDEST_FORMAT} to {FORMAT}",
            "finish with the version that wrote it, or start on a new checkpoint",
        )
