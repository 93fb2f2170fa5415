"""Versions of the catalog at rest: `catalog/<n>.json`, sealed, put-if-absent.

Contract.  A version that is there is never changed.  The newest is the one that the next epoch runs with.
"""

from __future__ import annotations

import json
from typing import Any

from plait.errors import CheckpointError
from plait.query.layout import Layout
from plait.state.files.storage import Files, numbered
from plait.state.log.sealed import seal, unseal

FOLDER = "catalog"
KEPT = 8
"""Versions that stay: the newest ones."""


def newest(files: Files) -> dict[str, Any] | None:
    """The newest version, or None before the first start."""
    versions = numbered(files, FOLDER)
    return read(files, versions[-1]) if versions else None


def read(files: Files, version: int) -> dict[str, Any]:
    """One version."""
    name = _name(version)
    return unseal("plait-catalog", files.read(name) or b"", files.where(name), "CATALOG_CORRUPT")


def layout_of(files: Files) -> Layout | None:
    """The layout of the newest version."""
    found = newest(files)
    return None if found is None else Layout.from_json(json.dumps(found["layout"]))


def put(files: Files, version: int, value: dict[str, Any]) -> None:
    """A new version."""
    files.make_directory(FOLDER)
    name = _name(version)
    if not files.put_if_absent(name, seal("plait-catalog", value)):
        raise CheckpointError(
            "CATALOG_CHANGED_ELSEWHERE",
            f"{files.where(name)} exists already",
            "another driver runs on this checkpoint: stop one of them, then restart the other",
        )
    for old in numbered(files, FOLDER)[:-KEPT]:
        files.delete(_name(old))


def _name(version: int) -> str:
    return f"{FOLDER}/{version:012d}.json"
