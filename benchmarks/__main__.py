"""The command `python -m benchmarks`: each sub-command is a benchmark, which checks its results and writes a report."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.jobs import exit_on_sigterm
from benchmarks.options import Options
from plait.errors import ConfigError
from plait.runtime.spark.java import require_java
from plait.serve.cli import run_app

OUT = Path("bench-out")
PACKAGES = ("duckdb", "duckdb_extension_tpcds", "matplotlib", "psutil")

app = typer.Typer(
    name="python -m benchmarks",
    help="Measure Plait, and check all results.  The exit code is 0 if they are right.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
Quick = Annotated[bool, typer.Option("--quick", help="Tiny data, a few epochs: shows that it works, measures nothing.")]
Out = Annotated[Path, typer.Option(help="Folder for NAME.json, NAME.md, NAME.png and the generated data.")]
Scale = Annotated[float | None, typer.Option(help="Scale factor of the generated data.")]
Epochs = Annotated[int | None, typer.Option(min=1, help="Number of micro-batches.")]
Part = Annotated[list[str] | None, typer.Option(help="Run only this part (repeatable); a wrong name lists them.")]
Who = Annotated[list[str] | None, typer.Option(help="Run only this contestant (repeatable); a wrong name lists them.")]
Repeat = Annotated[int | None, typer.Option(min=1, help="Number of timed runs of each contestant.")]
Heap = Annotated[str | None, typer.Option(help="Java heap of each contestant that uses Spark (8g).")]


@app.command()
def tpcds(
    quick: Quick = False,
    sf: Annotated[float | None, typer.Option(help="Scale factor; 1 is 554,000 input rows.")] = None,
    out: Out = OUT,
    epochs: Annotated[int | None, typer.Option(min=1, help="Micro-batches; by default 20, or 40 from SF 10.")] = None,
    part: Part = None,
    who: Who = None,
    repeat: Annotated[
        int | None, typer.Option(min=1, help="Timed runs of each; by default 3, or 1 from SF 10.")
    ] = None,
    verify: Annotated[bool, typer.Option(help="Check all results by checksum in extra, untimed runs.")] = True,
    memory: Heap = None,
) -> None:
    """Compare Plait with Spark's stream-stream joins and DuckDB on the papers' TPC-DS query and on a chain."""
    require_java()
    _run("tpcds", out, Options(quick, sf, epochs, tuple(part or ()), tuple(who or ()), repeat, verify, memory))


@app.command()
def tpch(
    quick: Quick = False,
    sf: Scale = None,
    out: Out = OUT,
    epochs: Epochs = None,
    part: Annotated[list[str] | None, typer.Option(help="The number of a query, or all (repeatable).")] = None,
    who: Who = None,
    repeat: Repeat = None,
    memory: Heap = None,
) -> None:
    """Compare Plait with Spark on whole TPC-H queries over streams, with an answer after every epoch."""
    require_java()
    _run("tpch", out, Options(quick, sf, epochs, tuple(part or ()), tuple(who or ()), repeat, memory=memory))


@app.command()
def orders(
    quick: Quick = False,
    sf: Scale = None,
    out: Out = OUT,
    epochs: Epochs = None,
    part: Part = None,
    repeat: Repeat = None,
) -> None:
    """Compare the orderers of paper 000 from all 24 initial orders, and let selectivities drift."""
    _run("orders", out, Options(quick, sf, epochs, tuple(part or ()), repeat=repeat))


@app.command()
def drivers(quick: Quick = False, out: Out = OUT, repeat: Repeat = None) -> None:
    """Compare the driver policies of paper 003 on its six datasets."""
    _run("drivers", out, Options(quick, repeat=repeat))


@app.command()
def ilp(quick: Quick = False, out: Out = OUT, part: Part = None, repeat: Repeat = None) -> None:
    """Optimise many queries together on random workloads, as paper 001 does: cost saved, size of the ILP, seconds."""
    _run("ilp", out, Options(quick, parts=tuple(part or ()), repeat=repeat))


@app.command()
def sets(
    quick: Quick = False,
    out: Out = OUT,
    epochs: Annotated[int | None, typer.Option(min=1, help="Epochs that count, after those that fill windows.")] = None,
    part: Part = None,
    count: Annotated[list[int] | None, typer.Option(min=1, help="A number of queries (repeatable).")] = None,
    repeat: Repeat = None,
    memory: Heap = None,
) -> None:
    """Run 1 to 500 queries in one engine by paper 004's generator: counted work, and overall data throughput."""
    counts = tuple(sorted(set(count or ())))
    _run("sets", out, Options(quick, None, epochs, tuple(part or ()), repeat=repeat, memory=memory, counts=counts))


@app.command()
def sharing(
    quick: Quick = False,
    sf: Scale = None,
    out: Out = OUT,
    epochs: Epochs = None,
    part: Part = None,
    who: Who = None,
    repeat: Repeat = None,
    memory: Heap = None,
) -> None:
    """Run five and ten multi-way joins over TPC-H apart and together, as paper 001 does: throughput and state."""
    _run("sharing", out, Options(quick, sf, epochs, tuple(part or ()), tuple(who or ()), repeat, memory=memory))


@app.command()
def state(
    quick: Quick = False,
    sf: Scale = None,
    out: Out = OUT,
    epochs: Epochs = None,
    part: Part = None,
    who: Who = None,
    memory: Annotated[str | None, typer.Option(help="Java heap of Plait's processes (512m).")] = None,
    state_gb: Annotated[float | None, typer.Option(help="Size to which the soak's state grows, in GB (20).")] = None,
    limit: Annotated[str | None, typer.Option(help="Memory of the soak's whole process tree (2g).")] = None,
    limits: Annotated[list[str] | None, typer.Option(help="Memory for the state, such as 256m (repeatable).")] = None,
    setting: Annotated[
        list[str] | None, typer.Option("--set", help="A field of Plait's Config, as fan_in=8 (repeatable).")
    ] = None,
) -> None:
    """Run Plait with state larger than memory: under limits (paper 002), in a soak, and on other backends."""
    require_java()
    options = Options(
        quick,
        sf,
        epochs,
        tuple(part or ()),
        tuple(who or ()),
        memory=memory,
        state_gb=state_gb,
        limit=limit,
        limits=tuple(limits or ()),
        settings=tuple(setting or ()),
    )
    _run("state", out, options)


def _run(name: str, out: Path, options: Options) -> None:
    """Run `benchmarks.NAME.benchmark` and end with its exit code."""
    for module in PACKAGES:
        if importlib.util.find_spec(module) is None:
            raise ConfigError("BENCH_EXTRA", f"{module} is not installed", "pip install 'plait[bench]'")
    exit_on_sigterm()
    out = out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    console = Console()
    code: int = importlib.import_module(f"benchmarks.{name}.benchmark").run(out, options, console)
    console.print(f"Written: {out}/{name}.json, {name}.md, {name}.png", highlight=False, soft_wrap=True)
    raise typer.Exit(code)


if __name__ == "__main__":
    run_app(app)
