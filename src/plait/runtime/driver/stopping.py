"""An orderly stop: the running epoch is committed, and no other begins.

Spark's own `stop` cancels the jobs of an epoch that is half done: its work would be lost, and the error looks like a
failure.  So a stop is asked for first (`ask`); Spark is stopped when no epoch is at work.  An epoch that Spark begins
in between is turned away (`turn_away`) with the one error that Spark takes for the end of a query that was stopped.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

_PATIENCE_SECONDS = 30.0
"""How long an epoch that was turned away waits for Spark to be stopped: much longer than that takes."""


class Interrupted(Exception):
    """Looks to Spark as if its own call had been interrupted, which is how it knows that a query was stopped."""

    def __init__(self) -> None:
        super().__init__(
            "py4j.protocol.Py4JJavaError: An error occurred while calling o0.stop.\n: java.lang.InterruptedException"
        )


@dataclass
class Stopping:
    """Whether a run is to end, and how."""

    active: Callable[[], bool] = lambda: False
    """Whether Spark still runs the query."""
    admit: Callable[[], object] = lambda: None
    """Admits changes of queries before an epoch begins."""
    asked: bool = False
    impatient: bool = False
    """Whoever stops does not wait for the running epoch."""
    last_rows: float = field(default_factory=time.monotonic)
    """When an epoch with rows has ended, or the run has begun."""
    at_work: int | None = None
    """The thread that an epoch runs in."""

    def ask(self, wait: bool) -> None:
        """No epoch begins from here on.  A sink that stops its own run cannot wait for the epoch that it is part of."""
        self.asked = True
        self.impatient = self.impatient or not wait or self.at_work == threading.get_ident()

    def turn_away(self) -> None:
        """Ends an epoch that has not begun, once Spark knows that it was stopped; else it would tell of a failure."""
        until = time.monotonic() + _PATIENCE_SECONDS
        while self.active() and time.monotonic() < until:
            time.sleep(0.005)
        raise Interrupted
