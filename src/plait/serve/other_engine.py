"""An engine of another process, by its checkpoint: what it runs, what it has told of itself, what it is asked to do.

Contract.  Looking takes no lock and needs neither Spark nor Java.  A change is a request file, which the engine answers
(`state/log/requests.py`); one that got no answer in time is withdrawn.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from plait.catalog.catalog import Catalog, QueryEntry
from plait.config import Config
from plait.errors import CheckpointError, PlaitError, QueryError
from plait.state.files.storage import Files
from plait.state.log import catalog_versions as catalogs
from plait.state.log.checkpoint import LOCK, Checkpoint
from plait.state.log.events import newest_events
from plait.state.log.parked import ParkedQuery, parked_queries
from plait.state.log.passes import told_share
from plait.state.log.requests import Answer, Request, answer_to, ask, withdraw

_POLL_SECONDS = 0.02
"""How often an answer is looked for."""


@dataclass(frozen=True)
class OtherEngine:
    """An engine, seen from outside."""

    checkpoint: str
    files: Files

    @staticmethod
    def at(checkpoint: str) -> OtherEngine:
        """The engine of a checkpoint, which must be one."""
        files = Checkpoint(checkpoint, Config()).files
        if files.read("plait.json") is None:
            raise CheckpointError("NOT_A_CHECKPOINT", f"{checkpoint} has no plait.json", "give a checkpoint directory")
        return OtherEngine(checkpoint, files)

    @property
    def catalog(self) -> Catalog:
        """The newest version."""
        found = catalogs.newest(self.files)
        return Catalog() if found is None else Catalog.from_json(found)

    @property
    def last_progress(self) -> dict[str, Any]:
        """The newest progress report; empty if there is none."""
        return next(reversed(newest_events(self.files)), {})

    @property
    def runs(self) -> bool:
        """Whether a process holds the checkpoint, as far as can be told without touching its lock.

        Behind a URI there is no lock, and on another host no process to ask: such an engine counts as running.
        """
        if not self.files.local:
            return True
        found = re.fullmatch(r"pid (\d+) on host (.*)\n?", (self.files.read(LOCK) or b"").decode(errors="replace"))
        if found is None:
            return False
        if found[2] != socket.gethostname():
            return True
        try:
            os.kill(int(found[1]), 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True

    def queries(self) -> list[dict[str, Any]]:
        """What is known of every query that lives there."""
        last, parked = self.last_progress, parked_queries(self.files)
        share = self.first_pass(last)
        return [told(entry, last, parked, share) for entry in self.catalog.queries.values()]

    def first_pass(self, last: Mapping[str, Any]) -> float | None:
        """Which share of the first pass over state is done that the epoch after the last report makes, if any."""
        return told_share(self.files, last.get("epoch", -1) + 1)

    def query(self, name: str) -> QueryEntry:
        """One query, by name."""
        queries = self.catalog.queries
        if name not in queries:
            known = ", ".join(queries) or "none yet"
            raise QueryError("NO_QUERY", f"no query is called {name!r}", f"use one of: {known}")
        return queries[name]

    def change(self, request: Request, timeout: float) -> Answer | None:
        """Asks for a change, and waits for the answer; None if there is none in time.  Raises if it is refused."""
        ask(self.files, request)
        until = time.monotonic() + timeout
        while (answer := answer_to(self.files, request.id)) is None:
            if time.monotonic() > until:
                withdraw(self.files, request.id)
                return None
            time.sleep(_POLL_SECONDS)
        if not answer.ok:
            raise PlaitError(answer.code, answer.cause, answer.remedy)
        return answer


def _build_share(entry: QueryEntry, last: Mapping[str, Any]) -> float | None:
    """Which share is done of the stores that a query waits for."""
    mine = {store for of in entry.stores.values() for stores in of.values() for store in stores}
    shares = [share for store, share in last.get("builds", {}).items() if store in mine]
    return sum(shares) / len(shares) if shares and entry.live_since is None else None


def how(query: Mapping[str, Any]) -> str:
    """Its status, and how far what it waits for is.

    >>> how({"status": "building", "building": 0.25, "first_pass": None})
    'building 25 %'
    >>> how({"status": "live", "building": None, "first_pass": 0.5})
    'live, first pass 50 %'
    """
    if query["building"] is not None:
        return f"{query['status']} {100 * query['building']:.0f} %"
    if query["first_pass"] is not None:
        return f"{query['status']}, first pass {100 * query['first_pass']:.0f} %"
    return str(query["status"])


def told(
    entry: QueryEntry, last: Mapping[str, Any], parked: Mapping[str, ParkedQuery], first_pass: float | None = None
) -> dict[str, Any]:
    """What people are told of a query; `last` is the newest progress report, and of it, how far a first pass is."""
    begins = entry.since == "state" and entry.live_since == last.get("epoch", -1) + 1
    record = parked.get(entry.id)
    known = last.get("catalog", {}).get("queries", {}).get(entry.name, {})
    rows_out: Mapping[str, int] = last.get("rows_out", {})
    return {
        "name": entry.name,
        "status": entry.status if record is None else record.status,
        "first_pass": first_pass if begins else None,
        "building": _build_share(entry, last),
        "since": entry.since,
        "live_since": entry.live_since,
        "mode": entry.mode,
        "sink": None if entry.sink is None else entry.sink["kind"],
        "origin": entry.origin,
        "rows": sum(rows for join, rows in rows_out.items() if join.partition(".")[0] == entry.name),
        "state_bytes": known.get("state_bytes", 0),
        "max_rows_per_epoch": entry.budget.rows,
        "max_state_bytes": entry.budget.state_bytes,
        "error": None if record is None else str(record.error),
        "missed_since": None if record is None else record.since,
    }
