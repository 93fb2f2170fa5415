"""Attends to what other processes ask of a running engine (`state/log/requests.py`).

A thread looks for requests many times a second.  A query is read and checked here, beside the running epoch; what is
wrong with it is told to its sender at once.  Otherwise the sender gets its answer when the change is part of the
catalog: by then it outlives a crash.  A request that was not answered before one is attended to again after it; a
query that is there with the same text is as good as added.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from plait.catalog.catalog import Catalog
from plait.errors import PlaitError, QueryError
from plait.state.files.storage import Files
from plait.state.log.requests import MOST_KEPT_SECONDS, Answer, Request, put_answer, tidy, waiting

POLL_SECONDS, REMOTE_POLL_SECONDS = 0.02, 0.5
"""How often requests are looked for, on this machine and behind a URI."""
SINKS = ("noop", "memory", "console", "parquet")
"""Kinds of sinks that can be asked for from outside: no code comes with a request."""
REQUEST = "request"
"""The origin of a query that another process has added: it is restored from the catalog at the next start."""


@dataclass
class Attendant:
    """The requests of one engine, while it runs."""

    carry_out: Callable[[Request], Mapping[str, Any] | None]
    """Registers or drops what is asked for; raises a PlaitError, and changes nothing, if it cannot be.

    Of a request that is not to change anything: what it would do.
    """
    catalog: Callable[[], Catalog]
    """The catalog in force."""
    files: Files
    running: Callable[[], bool]
    """Whether the engine runs."""
    admitting: dict[str, Request] = field(default_factory=dict)
    """Carried out, but not yet part of the catalog; by id."""
    status: Callable[[str], str] = lambda _: "live"
    """By name of a query."""

    def start(self) -> None:
        """Attends until the engine does not run any more."""
        threading.Thread(target=self._attend_while_running, name="plait-requests", daemon=True).start()

    def _attend_while_running(self) -> None:
        looked = 0
        while self.running():
            try:
                self.attend()
                if looked % 4096 == 0:
                    tidy(self.files, time.time() - MOST_KEPT_SECONDS)
            except (PlaitError, OSError):
                # A disk that is full or away: the requests are still there when it is back.
                pass
            looked += 1
            time.sleep(POLL_SECONDS if self.files.local else REMOTE_POLL_SECONDS)

    def attend(self) -> None:
        """Looks for requests once, and answers those whose changes have been admitted."""
        for id, request in waiting(self.files):
            if isinstance(request, Answer):
                put_answer(self.files, id, request)
            elif id not in self.admitting:
                try:
                    refuse_code(request)
                    told = self.carry_out(request)
                    if told is None:
                        self.admitting[id] = request
                    else:
                        put_answer(self.files, id, Answer(True, "not added", preview=told))
                except PlaitError as error:
                    put_answer(self.files, id, Answer(False, code=error.code, cause=error.cause, remedy=error.remedy))
            # Others need not wait until all have been read.
            self.answer()
        self.answer()

    def answer(self) -> None:
        """Tells the senders of changes that are part of the catalog by now."""
        queries = self.catalog().queries
        for id, request in list(self.admitting.items()):
            entry = queries.get(request.name)
            if request.operation == "resume":
                # Carried out is done; what fails again is told by then.
                done: Answer | None = Answer(True, "gone" if entry is None else self.status(request.name))
            elif request.operation == "drop":
                done = Answer(True, "dropped") if entry is None else None
            else:
                is_there = entry is not None and entry.sql == request.sql
                done = Answer(True, entry.status, entry.live_since) if entry is not None and is_there else None
            if done is not None:
                put_answer(self.files, id, done)
                del self.admitting[id]


def refuse_code(request: Request) -> None:
    """Raises if a request wants a sink that would have to bring code with it."""
    kind = None if request.sink is None else request.sink["kind"]
    if kind is not None and kind not in SINKS:
        raise QueryError(
            "SINK", f"a request cannot have a sink of kind {kind!r}", f"use one of: {', '.join(SINKS)}, or none"
        )
