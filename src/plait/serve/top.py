"""`plait top`: a running engine at a glance, from its progress reports in the checkpoint.

What is shown is a `Glance`, made by pure functions from the newest reports and what is known of the queries; nothing is
asked of the engine, and no lock is taken.  Rates are over the reports of the last `WINDOW_SECONDS`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from plait.serve.other_engine import OtherEngine, how, told
from plait.serve.progress import builds, epoch_seconds, in_bytes
from plait.state.log.events import newest_events
from plait.state.log.parked import parked_queries

WINDOW_SECONDS = 30.0


@dataclass(frozen=True)
class Rates:
    """What the last epochs add up to."""

    rows_in: Mapping[str, float]
    """Rows per second by stream."""
    rows_out: Mapping[str, float]
    """Rows per second by query."""
    epoch_seconds: float
    """Of an epoch, on average."""
    slowest_seconds: float
    epochs: int


@dataclass(frozen=True)
class Glance:
    """One look at an engine."""

    checkpoint: str
    running: bool
    epoch: int | None
    """The last one; None before the first."""
    age_seconds: float | None
    """How long ago it was reported."""
    last_seconds: float | None
    """How long it took."""
    rates: Rates
    tasks: int
    state_rows: int
    state_bytes: int
    builds: Mapping[str, float]
    """By store that is being filled, which share is done."""
    changes: Mapping[str, Any]
    queries: Sequence[Mapping[str, Any]]

    @property
    def json(self) -> dict[str, Any]:
        """A JSON value."""
        return asdict(self)


def glance(engine: OtherEngine, now: float | None = None) -> Glance:
    """A look at an engine."""
    now = time.time() if now is None else now
    reports = newest_events(engine.files)
    last: Mapping[str, Any] = reports[-1] if reports else {}
    parked = parked_queries(engine.files)
    recent, share = rates(reports), engine.first_pass(last)
    queries = [
        told(entry, last, parked, share) | {"rows_per_second": round(recent.rows_out.get(entry.name, 0.0), 3)}
        for entry in engine.catalog.queries.values()
    ]
    return Glance(
        checkpoint=engine.checkpoint,
        running=engine.runs,
        epoch=last.get("epoch"),
        age_seconds=round(max(0.0, now - last["timestamp"]), 3) if last else None,
        last_seconds=epoch_seconds(last) if last else None,
        rates=recent,
        tasks=last.get("tasks", 0),
        state_rows=last.get("state_rows", 0),
        state_bytes=last.get("state_bytes", 0),
        builds=builds(last),
        changes=last.get("changes", {}),
        queries=queries,
    )


def rates(reports: Sequence[Mapping[str, Any]], window: float = WINDOW_SECONDS) -> Rates:
    """Of the reports of the last seconds before the newest one.

    An epoch lasts from the report before it; of the first report that is not known, so it only begins the time.

    >>> reports = [{"epoch": e, "timestamp": 10.0 + e, "rows_in": {"a": 6}, "rows_out": {"q.1": 2, "q.2": 2},
    ...             "seconds": {"total": 0.5}} for e in range(3)]
    >>> found = rates(reports)
    >>> found.rows_in, found.rows_out, found.epoch_seconds, found.epochs
    ({'a': 6.0}, {'q': 4.0}, 0.5, 3)
    """
    near = [report for report in reports if report["timestamp"] >= reports[-1]["timestamp"] - window]
    # After a restart the clock stood still: that is no time of this run.
    begins = max((i for i in range(1, len(near)) if near[i]["epoch"] != near[i - 1]["epoch"] + 1), default=0)
    near = near[begins:]
    rows_in, rows_out = Counter[str](), Counter[str]()
    counted = near[1:] or near
    for report in counted:
        rows_in.update(report["rows_in"])
        for join, rows in report["rows_out"].items():
            rows_out[join.partition(".")[0]] += rows
    seconds = [epoch_seconds(report) for report in near]
    span = near[-1]["timestamp"] - near[0]["timestamp"] if len(near) > 1 else sum(seconds)
    return Rates(
        rows_in={name: rows / span for name, rows in rows_in.items()} if span else {},
        rows_out={name: rows / span for name, rows in rows_out.items()} if span else {},
        epoch_seconds=sum(seconds) / len(seconds) if seconds else 0.0,
        slowest_seconds=max(seconds, default=0.0),
        epochs=len(near),
    )


def table(seen: Glance) -> RenderableType:
    """A look at an engine, for people."""
    facts = Table.grid(padding=(0, 2))
    state = Text("running", "green") if seen.running else Text("not running", "bold red")
    facts.add_row(Text(seen.checkpoint), state, "", "")
    if seen.epoch is None:
        facts.add_row("no epoch has been reported", "", "", "")
    else:
        r = seen.rates
        facts.add_row("epoch", f"{seen.epoch}, {seen.age_seconds:.1f} s ago", "tasks", str(seen.tasks))
        facts.add_row(
            "seconds",
            f"{seen.last_seconds:.2f} s",
            f"last {r.epochs}",
            f"{r.epoch_seconds:.2f} s, at most {r.slowest_seconds:.2f} s",
        )
        facts.add_row("rows in/s", f"{sum(r.rows_in.values()):,.0f}", "results/s", f"{sum(r.rows_out.values()):,.0f}")
        facts.add_row("state", f"{seen.state_rows:,} rows", "on disk", in_bytes(seen.state_bytes))
    changes = seen.changes
    if changes.get("last"):
        done = f"{changes['in_place']} in place, {changes['restarts']} by a restart"
        facts.add_row("changes", done, "last", f"waited {changes['waited_seconds']:.2f} s")
    for store, share in seen.builds.items():
        facts.add_row("building", Text(store), f"{100 * share:.0f} %", "")
    queries = Table("query", "status", "rows", "rows/s", "state", "sink", "from", box=None)
    for query in seen.queries:
        style = "bold red" if query["error"] else ""
        cells = (
            query["name"],
            how(query),
            f"{query['rows']:,}",
            f"{query['rows_per_second']:,.0f}",
            in_bytes(query["state_bytes"]),
            query["sink"] or "kept",
            query["origin"],
        )
        queries.add_row(*(Text(str(cell), style) for cell in cells))
    errors = [Text(f"{q['name']}, since epoch {q['missed_since']}: {q['error']}") for q in seen.queries if q["error"]]
    return Group(facts, Text(""), queries, *errors)
