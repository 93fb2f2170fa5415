"""Queries whose deliveries wait, because their sink or expression failed: one small file each in a checkpoint.

    parked/<digest of the query's id>.json     put when a query is parked, deleted when it has caught up

Contract.  A record names the first epoch that the query's sink has not taken; every later epoch is owed as well.  The
rows of owed epochs are result files that manifests name (`ResultFile.held`), so they survive crashes and garbage
collection like any other result.  A record is written before the query goes on being left out, and moves on only after
a sink has taken an epoch: a kill in between hands the same epoch over again, with the same number and rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from plait.errors import CorruptionError, PlaitError
from plait.state.files.storage import Files
from plait.state.log.sealed import seal, unseal

FOLDER = "parked"
PARKED = "parked"
FAILED = "failed"


@dataclass(frozen=True)
class ParkedQuery:
    """A query that gets no rows until it is resumed."""

    query: str
    """Its id."""
    name: str
    since: int
    """The first epoch that its sink has not taken."""
    code: str
    cause: str
    remedy: str
    status: str = PARKED
    """`failed` once it missed more than may be kept, or could not be computed: its missed rows are gone."""
    before_ms: Mapping[str, int] | None = None
    """Of an answer: what watermarks were made of before the first missed epoch; None if it had begun with that."""
    asked: str = ""
    """`deliver` or `skip` once somebody has asked to resume it."""

    @property
    def error(self) -> PlaitError:
        """Why it is parked, as an error to raise."""
        return PlaitError(self.code, self.cause, self.remedy)


def parked_queries(files: Files) -> dict[str, ParkedQuery]:
    """All of them, by id."""
    found = {}
    for name in sorted(files.names(FOLDER)):
        path = f"{FOLDER}/{name}"
        if not name.endswith(".json") or (data := files.read(path)) is None:
            continue
        value = unseal("plait-parked", data, files.where(path), "PARKED_CORRUPT")
        try:
            record = ParkedQuery(**value)
        except TypeError as error:
            where, remedy = files.where(path), "restore it from a copy"
            raise CorruptionError("PARKED_CORRUPT", f"{where} lacks something: {error}", remedy) from error
        found[record.query] = record
    return found


def put_parked(files: Files, record: ParkedQuery) -> None:
    """Writes a record, or another one in its place."""
    files.make_directory(FOLDER)
    files.replace(_name(record.query), seal("plait-parked", asdict(record)))


def remove_parked(files: Files, query: str) -> None:
    """The query is parked no more."""
    files.delete(_name(query))


def _name(query: str) -> str:
    return f"{FOLDER}/{hashlib.sha256(query.encode()).hexdigest()[:16]}.json"
