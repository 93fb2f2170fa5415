"""`plait state`: a checkpoint seen from outside, without Spark or Java.

All commands but `compact` and `adopt` read only, without lock.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from plait.config import Config
from plait.errors import ConfigError
from plait.serve.progress import in_bytes
from plait.state.log.adopt import adopt as adopt_moved
from plait.state.log.adopt import adopt_copy
from plait.state.log.catalog_versions import layout_of
from plait.state.log.checkpoint import Checkpoint
from plait.state.log.compact import Compacted
from plait.state.log.compact import compact as compacted
from plait.state.log.inspect import Inspection, Report, Usage

app = typer.Typer(
    no_args_is_help=True, help="Look into a checkpoint: stores, segments, sizes; verify or compact it offline."
)

Path = Annotated[str, typer.Argument(help="The checkpoint directory.", metavar="CHECKPOINT")]
StateDir = Annotated[str | None, typer.Option(help="Config.state_dir, if the engine ran with one.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@app.command()
def ls(checkpoint: Path, state_dir: StateDir = None, as_json: AsJson = False) -> None:
    """List the stores: rows, keys, sizes, runs per tier, amplification."""
    report = Inspection(checkpoint, state_dir).report()
    if as_json:
        typer.echo(report.to_json())
        return
    console = Console()
    console.print(f"{report.path}: after epoch {report.epoch}", highlight=False, soft_wrap=True)
    console.print(stores_table(report))
    console.print(
        f"{in_bytes(report.bytes)} live, {in_bytes(report.disk_bytes)} on disk "
        f"(space amplification {report.space_amplification:.2f}); write amplification {report.write_amplification:.2f}",
        highlight=False,
        soft_wrap=True,
    )


@app.command()
def show(
    checkpoint: Path,
    store: Annotated[str, typer.Argument(help="A store, as `plait state ls` calls it.")],
    state_dir: StateDir = None,
    as_json: AsJson = False,
) -> None:
    """Say who uses one store, since when it has which columns, and list its live segments."""
    inspection = Inspection(checkpoint, state_dir)
    live = inspection.live().segments
    known = sorted({*live, *inspection.catalog()["stores"]})
    if store not in known:
        raise ConfigError("STORE", f"there is no store {store!r}", f"use one of: {', '.join(known) or 'none yet'}")
    infos = sorted(live.get(store, ()), key=lambda i: (-i.tier, i.epoch, i.lo_group))
    if as_json:
        typer.echo(json.dumps([info.to_json() for info in infos], indent=1))
        return
    table = Table("tier", "run", "epoch", "key groups", "rows", "keys", "size", "", "file", title=Text(store), box=None)
    for info in infos:
        merged = info.first / (info.first + info.rows)
        table.add_row(
            f"{info.tier}",
            info.run[:6],
            f"{info.epoch}",
            f"{info.lo_group}–{info.hi_group - 1}",
            f"{info.rows:,}",
            f"{info.keys:,}",
            in_bytes(info.live_bytes),
            " ".join([*(["deep"] if info.deep else []), *([f"{merged:.0%} merged" if info.into else ""])]),
            info.path,
        )
    console = Console()
    for line in _usage(store, inspection.usage(store)):
        console.print(Text(line), soft_wrap=True)
    console.print(table)


def _usage(store: str, usage: Usage) -> Iterator[str]:
    """Reference counts, floors, builds and eras, in sentences."""
    count = len(usage.readers)
    if count:
        yield f"used by {count} {'alias' if count == 1 else 'aliases'}:"
    elif "[]" in store:
        yield "used by no query: the stream is kept whole for those to come"
    else:
        yield "used by no query: it goes with the next epoch"
    for reader, floor in usage.readers.items():
        yield f"  {reader} sees rows of epoch {floor} and later"
    if usage.build is not None:
        source, share = usage.build
        yield f"being built from {source}: {share:.0%} of its key groups are copied"
    for since, columns in usage.eras if len(usage.eras) > 1 else ():
        yield f"since epoch {since}: {', '.join(columns) or 'no columns'}"


@app.command()
def verify(checkpoint: Path, state_dir: StateDir = None, as_json: AsJson = False) -> None:
    """Check every checksum and every invariant; the exit code is 1 if anything is wrong."""
    inspection = Inspection(checkpoint, state_dir)
    found = list(inspection.findings())
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in found], indent=1))
    else:
        for finding in found:
            typer.echo(f"[{finding.code}] {finding.where}: {finding.what}")
        if not found:
            live = inspection.live()
            segments = sum(len(infos) for infos in live.segments.values())
            rows = sum(i.rows for infos in live.segments.values() for i in infos)
            typer.echo(f"Sound: epoch {live.epoch}, {segments} segments, {rows:,} rows, every byte as committed.")
    raise typer.Exit(1 if found else 0)


@app.command()
def compact(
    checkpoint: Path,
    state_dir: StateDir = None,
    as_json: AsJson = False,
    compress: Annotated[bool, typer.Option(help="Write compressed segments with Bloom filters.")] = True,
) -> None:
    """Merge every store into one run and drop what has expired.  The engine must be stopped."""
    Inspection(checkpoint, state_dir)
    console = Console(stderr=True)
    found = []
    with Checkpoint(checkpoint, Config(state_dir=state_dir)) as opened, console.status("compacting"):
        for done in compacted(opened, time.time_ns() // 1000, compress, layout_of(opened.files)):
            found.append(done)
            if not as_json:
                # As text: the brackets of a store's name are no markup.
                console.print(Text(_told(done)), soft_wrap=True)
    if as_json:
        typer.echo(json.dumps([asdict(done) for done in found], indent=1))
    elif not found:
        typer.echo("Nothing to do: every store is one run already.")


@app.command()
def adopt(
    checkpoint: Path,
    state_dir: Annotated[str, typer.Option(help="Config.state_dir, where the segments lie.")],
    copy: Annotated[bool, typer.Option("--copy", help="It is a copy: give it an id and segments of its own.")] = False,
) -> None:
    """Take over the segments in a state directory: the checkpoint was moved, or copied (STATE_OWNED_ELSEWHERE)."""
    Inspection(checkpoint, state_dir)
    done = (adopt_copy if copy else adopt_moved)(checkpoint, Config(state_dir=state_dir))
    what = f"{done.segments} segments, {in_bytes(done.bytes)}, copied: it" if copy else "It"
    typer.echo(f"{what} has its segments in {done.state_dir}, and they belong to nobody else.")


def _told(done: Compacted) -> str:
    (files, now), (rows, left), (size, new) = done.segments, done.rows, done.bytes
    expired = f", {rows - left:,} expired rows dropped" if left < rows else ""
    return f"{done.store}: {files} → {now} segments, {in_bytes(size)} → {in_bytes(new)}{expired}"


def stores_table(report: Report) -> Table:
    """The stores of a checkpoint, one line each."""
    # As text: the brackets of a store's name are no markup.
    names = ("rows", "keys ≤", "size", "deep", "files", "tiers", "runs/lookup", "epochs")
    table = Table(Column("store", no_wrap=True), *names, box=None)
    for store in report.stores:
        table.add_row(
            Text(store.store),
            f"{store.rows:,}",
            f"{store.keys:,}",
            in_bytes(store.bytes),
            f"{store.deep_bytes / store.bytes if store.bytes else 0:.0%}",
            f"{store.segments}",
            " ".join(f"{tier}:{n}" for tier, n in store.tiers.items()),
            f"{store.runs:.1f}",
            "" if store.epochs is None else f"{store.epochs[0]}–{store.epochs[1]}",
        )
    return table
