"""`plait add | drop | replace | ls | show`: an engine of another process, by its checkpoint, without Spark or Java.

A change is a file in the checkpoint, which the engine answers (`state/log/requests.py`).  Exit codes: 0 done, 2 refused
with the reason, 3 the engine does not run, 4 no answer in time.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from plait.catalog.catalog import Catalog, QueryEntry
from plait.config import Config
from plait.errors import CheckpointError, ConfigError, PlaitError, QueryError
from plait.state.files.storage import Files
from plait.state.log import catalog_versions as catalogs
from plait.state.log.checkpoint import LOCK, Checkpoint
from plait.state.log.events import events
from plait.state.log.parked import ParkedQuery, parked_queries
from plait.state.log.requests import Answer, Request, answer_to, ask, withdraw

NOT_RUNNING_EXIT = 3
NO_ANSWER_EXIT = 4
_POLL_SECONDS = 0.05

CheckpointPath = Annotated[str, typer.Argument(help="The checkpoint of the engine.", metavar="CHECKPOINT")]
Name = Annotated[str, typer.Argument(help="The name of the query.")]
Sql = Annotated[str, typer.Argument(help="Its SQL text; @FILE reads it from a file.", metavar="SQL")]
Since = Annotated[str | None, typer.Option(help="With which past it begins: now, state or new.")]
Mode = Annotated[str | None, typer.Option("--mode", help="Output mode: append, update or complete.")]
SinkKind = Annotated[
    str | None, typer.Option("--sink", help="noop, memory, console or parquet; without, rows are kept.")
]
SinkOption = Annotated[
    list[str] | None, typer.Option("--option", help="An option of the sink, as key=value (repeatable).")
]
MaxRows = Annotated[
    int | None, typer.Option("--max-rows-per-epoch", min=1, help="Joined rows of an epoch, over which it is parked.")
]
MaxState = Annotated[
    str | None, typer.Option("--max-state", help="Its share of the state, such as 2g, over which it is parked.")
]
Wait = Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until the change is admitted.")]
Timeout = Annotated[float, typer.Option(min=0.1, help="Seconds to wait for the engine's answer.")]
Queue = Annotated[
    bool, typer.Option("--queue", help="If the engine does not run, leave the change for its next start.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def add_to(app: typer.Typer) -> None:
    """The commands, as part of an application."""
    for command in (add, replace, drop, resume, ls, show):
        app.command()(command)


def add(
    checkpoint: CheckpointPath,
    name: Name,
    sql: Sql,
    since: Since = None,
    mode: Mode = None,
    sink: SinkKind = None,
    option: SinkOption = None,
    max_rows: MaxRows = None,
    max_state: MaxState = None,
    wait: Wait = True,
    timeout: Timeout = 60.0,
    queue: Queue = False,
    as_json: AsJson = False,
) -> None:
    """Add a query to a running engine."""
    where = _sink(sink, option)
    request = Request("add", name, _text(sql), since, mode, where, max_rows_per_epoch=max_rows, max_state=max_state)
    _send(checkpoint, request, wait, timeout, queue, as_json)


def replace(
    checkpoint: CheckpointPath,
    name: Name,
    sql: Sql,
    since: Since = None,
    mode: Mode = None,
    sink: SinkKind = None,
    option: SinkOption = None,
    max_rows: MaxRows = None,
    max_state: MaxState = None,
    wait: Wait = True,
    timeout: Timeout = 60.0,
    queue: Queue = False,
    as_json: AsJson = False,
) -> None:
    """Replace a query of a running engine by another one under its name."""
    where = _sink(sink, option)
    request = Request("replace", name, _text(sql), since, mode, where, max_rows_per_epoch=max_rows, max_state=max_state)
    _send(checkpoint, request, wait, timeout, queue, as_json)


def drop(
    checkpoint: CheckpointPath,
    name: Name,
    wait: Wait = True,
    timeout: Timeout = 60.0,
    queue: Queue = False,
    as_json: AsJson = False,
) -> None:
    """End a query of a running engine; one that is not there is no error."""
    _send(checkpoint, Request("drop", name), wait, timeout, queue, as_json)


def resume(
    checkpoint: CheckpointPath,
    name: Name,
    skip: Annotated[bool, typer.Option("--skip", help="Without the epochs that it missed.")] = False,
    max_rows: MaxRows = None,
    max_state: MaxState = None,
    wait: Wait = True,
    timeout: Timeout = 60.0,
    queue: Queue = False,
    as_json: AsJson = False,
) -> None:
    """Let a parked query of a running engine go on, with the epochs that it missed."""
    request = Request("resume", name, skip=skip, max_rows_per_epoch=max_rows, max_state=max_state)
    _send(checkpoint, request, wait, timeout, queue, as_json)


def ls(checkpoint: CheckpointPath, as_json: AsJson = False) -> None:
    """List the queries that live on a checkpoint."""
    files = _files(checkpoint)
    catalog, last = _catalog(files), _last_progress(files)
    rows_out = last.get("rows_out", {})
    parked = parked_queries(files)
    found = [_told(entry, rows_out, parked) for entry in catalog.queries.values()]
    if as_json:
        typer.echo(json.dumps({"running": runs(files), "epoch": last.get("epoch"), "queries": found}, indent=1))
        return
    console = Console()
    state = "running" if runs(files) else "not running"
    console.print(f"{checkpoint}: {state}, after epoch {last.get('epoch', 'none')}", highlight=False, soft_wrap=True)
    table = Table("query", "status", "since", "live from", "mode", "sink", "from", "rows, last epoch", box=None)
    for q in found:
        live = "" if q["live_since"] is None else f"epoch {q['live_since']}"
        cells = (
            q["name"],
            q["status"],
            q["since"],
            live,
            q["mode"],
            q["sink"] or "kept",
            q["origin"],
            f"{q['rows']:,}",
        )
        table.add_row(*(Text(str(cell)) for cell in cells))
    console.print(table)
    for q in found:
        if q["error"] is not None:
            console.print(Text.assemble((f"{q['name']} is {q['status']}: ", "bold red"), q["error"]), soft_wrap=True)


def show(checkpoint: CheckpointPath, name: Name, as_json: AsJson = False) -> None:
    """Show one query: its text, what it sees, where its rows go."""
    files = _files(checkpoint)
    queries = _catalog(files).queries
    if name not in queries:
        raise QueryError("NO_QUERY", f"no query is called {name!r}", f"use one of: {', '.join(queries) or 'none yet'}")
    entry = queries[name]
    told = _told(entry, _last_progress(files).get("rows_out", {}), parked_queries(files))
    told |= {"sql": entry.sql, "floors": dict(entry.floors)}
    if as_json:
        typer.echo(json.dumps(told, indent=1))
        return
    console = Console()
    for key, value in told.items():
        console.print(Text.assemble((f"{key}: ", "bold"), str(value)), soft_wrap=True)


def _told(entry: QueryEntry, rows_out: dict[str, int], parked: Mapping[str, ParkedQuery]) -> dict[str, Any]:
    record = parked.get(entry.id)
    return {
        "name": entry.name,
        "status": entry.status if record is None else record.status,
        "since": entry.since,
        "live_since": entry.live_since,
        "mode": entry.mode,
        "sink": None if entry.sink is None else entry.sink["kind"],
        "origin": entry.origin,
        "rows": sum(rows for join, rows in rows_out.items() if join.partition(".")[0] == entry.name),
        "error": None if record is None else str(record.error),
        "missed_since": None if record is None else record.since,
    }


def _send(checkpoint: str, request: Request, wait: bool, timeout: float, queue: bool, as_json: bool) -> None:
    files = _files(checkpoint)
    console = Console(stderr=True)
    if not runs(files):
        if not queue:
            console.print(f"The engine of {checkpoint} does not run; --queue leaves the change for its next start.")
            raise typer.Exit(NOT_RUNNING_EXIT)
        ask(files, request)
        _print({"queued": request.id}, f"Left for the next start: {request.operation} {request.name}.", as_json)
        return
    ask(files, request)
    if not wait:
        _print({"asked": request.id}, f"Asked to {request.operation} {request.name}.", as_json)
        return
    answer = _await_answer(files, request, timeout)
    if answer is None:
        withdraw(files, request.id)
        console.print(f"No answer within {timeout:g} s; the request is withdrawn.")
        raise typer.Exit(NO_ANSWER_EXIT)
    if not answer.ok:
        raise PlaitError(answer.code, answer.cause, answer.remedy)
    since = "" if answer.epoch is None else f", with results from epoch {answer.epoch} on"
    told = {"name": request.name, "status": answer.status, "live_since": answer.epoch}
    _print(told, f"{request.name} is {answer.status}{since}.", as_json)


def _await_answer(files: Files, request: Request, timeout: float) -> Answer | None:
    until = time.monotonic() + timeout
    while time.monotonic() < until:
        if (answer := answer_to(files, request.id)) is not None:
            return answer
        time.sleep(_POLL_SECONDS)
    return None


def _print(value: dict[str, Any], text: str, as_json: bool) -> None:
    typer.echo(json.dumps(value) if as_json else text)


def _text(sql: str) -> str:
    if not sql.startswith("@"):
        return sql
    try:
        with open(sql[1:], encoding="utf-8") as file:
            return file.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            "SQL_FILE", f"{sql[1:]} cannot be read: {error}", "give the SQL text, or @ and a file"
        ) from None


def _sink(kind: str | None, options: list[str] | None) -> dict[str, Any] | None:
    if kind is None:
        if options:
            raise ConfigError("SINK", "--option belongs to a sink", "give --sink too")
        return None
    pairs = [option.partition("=") for option in options or ()]
    if any(not equals for _, equals, _ in pairs):
        raise ConfigError("SINK", "an --option is written key=value", "for example --option path=out")
    values = {key: int(value) if re.fullmatch(r"-?\d{1,18}", value) else value for key, _, value in pairs}
    if kind == "parquet" and isinstance(values.get("path"), str):
        # Relative to the sender, not to wherever the engine was started.
        path = str(values["path"])
        values["path"] = path if "://" in path else os.path.abspath(path)
    return {"kind": kind, "options": values}


def _files(checkpoint: str) -> Files:
    files = Checkpoint(checkpoint, Config()).files
    if files.read("plait.json") is None:
        raise CheckpointError("NOT_A_CHECKPOINT", f"{checkpoint} has no plait.json", "give a checkpoint directory")
    return files


def _catalog(files: Files) -> Catalog:
    found = catalogs.newest(files)
    return Catalog() if found is None else Catalog.from_json(found)


def _last_progress(files: Files) -> dict[str, Any]:
    last: dict[str, Any] = {}
    for event in events(files):
        last = event
    return last


def runs(files: Files) -> bool:
    """Whether a process holds the checkpoint, as far as can be told without touching its lock.

    Behind a URI there is no lock, and on another host no process to ask: such an engine counts as running.
    """
    if not files.local:
        return True
    found = re.fullmatch(r"pid (\d+) on host (.*)\n?", (files.read(LOCK) or b"").decode(errors="replace"))
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
