"""`plait add | drop | replace | resume | ls | show | top`: an engine of another process, without Spark or Java.

A change is a file in the checkpoint, which the engine answers (`state/log/requests.py`).  Exit codes: 0 done, 2 refused
with the reason, 3 the engine does not run, 4 no answer in time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import time
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from plait.errors import ConfigError
from plait.serve.other_engine import OtherEngine, how, told
from plait.serve.top import glance, table
from plait.state.log.parked import parked_queries
from plait.state.log.requests import Request, ask

NOT_RUNNING_EXIT = 3
NO_ANSWER_EXIT = 4

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
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Only show what it would do: plan, floors, builds, expected cost.")
]
Wait = Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until the change is admitted.")]
Timeout = Annotated[float, typer.Option(min=0.1, help="Seconds to wait for the engine's answer.")]
Queue = Annotated[
    bool, typer.Option("--queue", help="If the engine does not run, leave the change for its next start.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def add_to(app: typer.Typer) -> None:
    """The commands, as part of an application."""
    for command in (add, replace, drop, resume, ls, show, top):
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
    dry_run: DryRun = False,
    wait: Wait = True,
    timeout: Timeout = 60.0,
    queue: Queue = False,
    as_json: AsJson = False,
) -> None:
    """Add a query to a running engine."""
    request = Request("add", name, _text(sql), since, mode, _sink(sink, option))
    request = dataclasses.replace(request, max_rows_per_epoch=max_rows, max_state=max_state, dry_run=dry_run)
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
    dry_run: DryRun = False,
    wait: Wait = True,
    timeout: Timeout = 60.0,
    queue: Queue = False,
    as_json: AsJson = False,
) -> None:
    """Replace a query of a running engine by another one under its name."""
    request = Request("replace", name, _text(sql), since, mode, _sink(sink, option))
    request = dataclasses.replace(request, max_rows_per_epoch=max_rows, max_state=max_state, dry_run=dry_run)
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
    engine = OtherEngine.at(checkpoint)
    found, epoch = engine.queries(), engine.last_progress.get("epoch")
    if as_json:
        typer.echo(json.dumps({"running": engine.runs, "epoch": epoch, "queries": found}, indent=1))
        return
    console = Console()
    state = "running" if engine.runs else "not running"
    after = "none" if epoch is None else epoch
    console.print(f"{checkpoint}: {state}, after epoch {after}", highlight=False, soft_wrap=True)
    table = Table("query", "status", "since", "live from", "mode", "sink", "from", "rows, last epoch", box=None)
    for q in found:
        live = "" if q["live_since"] is None else f"epoch {q['live_since']}"
        cells = (
            q["name"],
            how(q),
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
    engine = OtherEngine.at(checkpoint)
    entry = engine.query(name)
    known = told(entry, engine.last_progress, parked_queries(engine.files))
    known |= {"sql": entry.sql, "floors": dict(entry.floors)}
    if as_json:
        typer.echo(json.dumps(known, indent=1))
        return
    console = Console()
    for key, value in known.items():
        console.print(Text.assemble((f"{key}: ", "bold"), str(value)), soft_wrap=True)


def top(
    checkpoint: CheckpointPath,
    once: Annotated[bool, typer.Option("--once", help="Look once; 3 if the engine does not run.")] = False,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print every look as one line of JSON.")] = False,
) -> None:
    """Watch a running engine: queries, rows per second, epochs, state, builds, and what is parked."""
    engine, console = OtherEngine.at(checkpoint), Console()
    if once or not (as_json or console.is_terminal):
        seen = glance(engine)
        if as_json:
            typer.echo(json.dumps(seen.json))
        else:
            console.print(table(seen))
        raise typer.Exit(0 if seen.running else NOT_RUNNING_EXIT)
    with contextlib.suppress(KeyboardInterrupt), contextlib.ExitStack() as stack:
        live = None if as_json else stack.enter_context(Live(console=console, auto_refresh=False, screen=True))
        while True:
            seen = glance(engine)
            if live is None:
                typer.echo(json.dumps(seen.json))
            else:
                live.update(table(seen), refresh=True)
            time.sleep(every)


def _send(checkpoint: str, request: Request, wait: bool, timeout: float, queue: bool, as_json: bool) -> None:
    engine = OtherEngine.at(checkpoint)
    console = Console(stderr=True)
    if not engine.runs:
        if not queue or request.dry_run:
            console.print(f"The engine of {checkpoint} does not run; --queue leaves the change for its next start.")
            raise typer.Exit(NOT_RUNNING_EXIT)
        ask(engine.files, request)
        _print({"queued": request.id}, f"Left for the next start: {request.operation} {request.name}.", as_json)
        return
    if not wait and not request.dry_run:
        ask(engine.files, request)
        _print({"asked": request.id}, f"Asked to {request.operation} {request.name}.", as_json)
        return
    answer = engine.change(request, timeout)
    if answer is None:
        console.print(f"No answer within {timeout:g} s; the request is withdrawn.")
        raise typer.Exit(NO_ANSWER_EXIT)
    since = "" if answer.epoch is None else f", with results from epoch {answer.epoch} on"
    if answer.preview is not None:
        _print(dict(answer.preview), str(answer.preview["text"]), as_json)
        return
    value = {"name": request.name, "status": answer.status, "live_since": answer.epoch}
    _print(value, f"{request.name} is {answer.status}{since}.", as_json)


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
