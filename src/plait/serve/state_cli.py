"""`plait state`: a checkpoint seen from outside.  Reads only; no Spark, no Java, no lock."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from plait.errors import ConfigError
from plait.serve.progress import in_bytes
from plait.state.inspect import Inspection, Report

app = typer.Typer(no_args_is_help=True, help="Look into a checkpoint: stores, segments, sizes; verify it offline.")

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
    """List the live segments of one store."""
    inspection = Inspection(checkpoint, state_dir)
    live = inspection.live().segments
    known = sorted({*live, *inspection.catalog()["stores"]})
    if store not in known:
        raise ConfigError("STORE", f"there is no store {store!r}", f"use one of: {', '.join(known) or 'none yet'}")
    infos = sorted(live.get(store, ()), key=lambda i: (-i.tier, i.epoch, i.lo_group))
    if as_json:
        typer.echo(json.dumps([info.to_json() for info in infos], indent=1))
        return
    table = Table("tier", "epoch", "key groups", "rows", "keys", "size", "file", title=Text(store), box=None)
    for info in infos:
        table.add_row(
            f"{info.tier}",
            f"{info.epoch}",
            f"{info.lo_group}–{info.hi_group - 1}",
            f"{info.rows:,}",
            f"{info.keys:,}",
            in_bytes(info.bytes),
            info.path,
        )
    Console().print(table)


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


def stores_table(report: Report) -> Table:
    """The stores of a checkpoint, one line each."""
    # As text: the brackets of a store's name are no markup.
    table = Table(
        Column("store", no_wrap=True), "rows", "keys ≤", "size", "files", "tiers", "runs/lookup", "epochs", box=None
    )
    for store in report.stores:
        table.add_row(
            Text(store.store),
            f"{store.rows:,}",
            f"{store.keys:,}",
            in_bytes(store.bytes),
            f"{store.segments}",
            " ".join(f"{tier}:{n}" for tier, n in store.tiers.items()),
            f"{store.runs:.1f} (≤ {store.most_runs})",
            "" if store.epochs is None else f"{store.epochs[0]}–{store.epochs[1]}",
        )
    return table
