"""What SHOW tells at the prompt: column names, and rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from plait.errors import QueryError
from plait.serve.progress import epoch_seconds, in_bytes

if TYPE_CHECKING:
    from plait.serve.prompt.sql_session import Session

Shown = tuple[list[str], list[list[Any]]]


def queries(session: Session) -> Shown:
    """The pipeline's queries, and how far they are."""
    names = ["name", "mode", "state", "epochs", "rows_in", "rows_out", "last_epoch_seconds"]
    background = session.background
    if background is None:
        return names, [[q.name, q.output_mode, "not started", 0, 0, 0, None] for q in session.pipeline.queries]
    if not background.closed:
        background.count()
    return names, [list(background.row_of(query).values()) for query in session.pipeline.queries]


def streams(session: Session) -> Shown:
    """The streams of the file."""
    names = ["name", "format", "path", "watermark", "ttl"]
    return names, [
        [s.name, s.format, s.path, ", ".join(s.watermark) if s.watermark else None, s.ttl]
        for s in session.pipeline.streams
    ]


def tables(session: Session) -> Shown:
    """The static tables of the file."""
    return ["name", "format", "path"], [[t.name, t.format, t.path] for t in session.pipeline.tables]


def progress(session: Session) -> Shown:
    """The last epochs of the run in the background."""
    if session.background is None:
        raise QueryError("NOT_STARTED", "nothing runs in the background", "START the pipeline")
    if not session.background.closed:
        session.background.count()
    return of_epochs(list(session.background.totals.recent.values()), session.settings.format)


def of_epochs(reports: Sequence[Mapping[str, Any]], format: str) -> Shown:
    """What is told of some epochs, by their reports."""
    names = ["epoch", "rows_in", "rows_out", "rows_late", "state_rows", "state_bytes", "seconds"]
    rows = []
    for report in reports:
        sums = [sum(report[key].values()) for key in ("rows_in", "rows_out", "rows_late")]
        size = in_bytes(report["state_bytes"]) if format == "table" else report["state_bytes"]
        rows.append([report["epoch"], *sums, report["state_rows"], size, round(epoch_seconds(report), 3)])
    return names, rows


SHOWN: dict[str, Callable[[Session], Shown]] = {
    "queries": queries,
    "streams": streams,
    "tables": tables,
    "progress": progress,
}
