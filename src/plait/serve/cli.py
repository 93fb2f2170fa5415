"""The command `plait`.  A `PlaitError` is shown as three lines, not as a traceback (PLAIT_TRACEBACK=1 shows it)."""

from __future__ import annotations

import os
import tempfile
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from plait.errors import PlaitError
from plait.runtime.spark.java import require_java
from plait.serve import remote_cli, state_cli

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from plait.serve.pipeline import Pipeline

ERROR_EXIT = 2
PARKED_EXIT = 5
"""A pipeline has come to its end, but queries of it are parked: they have not got all of their rows."""
SIGNAL_EXIT = 128
"""What a shell adds to the number of a signal that ends a command: 130 after Ctrl-C, 143 after SIGTERM."""


class Formats(StrEnum):
    """How `plait sql` prints rows."""

    table = "table"
    json = "json"
    csv = "csv"


app = typer.Typer(
    name="plait",
    help="Multi-way stream joins on Apache Spark.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(state_cli.app, name="state")
remote_cli.add_to(app)
PipelineFile = Annotated[Path, typer.Argument(metavar="pipeline.toml", help="A pipeline file.")]


def main() -> None:
    """The entry point of the command `plait`."""
    run_app(app)


def run_app(app: typer.Typer) -> None:
    """Run a command-line application; a `PlaitError` ends it with a message instead of a traceback."""
    try:
        app()
    except PlaitError as error:
        if os.environ.get("PLAIT_TRACEBACK") == "1":
            raise
        show_error(error, Console(stderr=True))
        raise SystemExit(ERROR_EXIT) from None


def show_error(error: PlaitError, console: Console) -> None:
    """Code and cause, then the remedy."""
    console.print(Text.assemble(("error ", "bold red"), (f"[{error.code}] ", "bold"), error.cause), soft_wrap=True)
    if error.remedy:
        console.print(Text.assemble(("  → ", "bold"), error.remedy), soft_wrap=True)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"plait {version('plait')}")
        raise typer.Exit


@app.callback()
def options(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Multi-way stream joins on Apache Spark."""


@app.command()
def demo(
    epochs: Annotated[int, typer.Option(min=1, help="Micro-batches.")] = 8,
    rows: Annotated[int, typer.Option(min=100, help="Input rows in all.")] = 400_000,
    seed: Annotated[int, typer.Option(help="The same seed gives the same streams.")] = 1,
) -> None:
    """Join four drifting streams live, then check the result against a batch join."""
    require_java()
    from plait.serve.demo import run_demo

    raise typer.Exit(run_demo(Console(), epochs, rows, seed))


@app.command()
def run(
    file: PipelineFile,
    follow: Annotated[
        bool, typer.Option("--watch", help="Go on until Ctrl-C, and apply changes of the file's queries meanwhile.")
    ] = False,
) -> None:
    """Run the queries of a pipeline file until its sources end or Ctrl-C; 5 if queries are parked then."""
    from plait.serve import pipeline as pipelines
    from plait.serve.progress import interrupts, watch
    from plait.serve.watching import EVERY, Watching

    pipeline = pipelines.load(file)
    require_java()
    import plait

    console = Console()
    # From here on a signal is noted, and heeded where it does no harm; PySpark takes Ctrl-C over when it starts.
    with interrupts() as signals:
        spark = _session(pipeline)
        with interrupts(signals):
            try:
                with plait.Engine(spark, checkpoint=pipeline.checkpoint, config=pipeline.config) as engine:
                    pipelines.build(pipeline, engine, spark)
                    every = pipeline.every or (EVERY if follow else None)
                    started = engine.start(available_now=True) if every is None else engine.start(every=every)
                    watching = Watching(pipeline, engine, lambda said: console.print(Text(said), soft_wrap=True))
                    watch(started, console, signals, watching.look if follow else lambda: None)
                    parked = [(q.name, q.status, q.error) for q in engine.queries() if q.error is not None]
            finally:
                spark.stop()
    for name, status, error in parked:
        console.print(Text.assemble((f"{name} is {status}: ", "bold red"), str(error)), soft_wrap=True)
    if signals:
        console.print("Stopped; run again to continue from the checkpoint.")
        raise typer.Exit(SIGNAL_EXIT + signals[0])
    console.print(
        "All sources are read, but not every query got all rows." if parked else "Done: all sources are read."
    )
    if parked:
        raise typer.Exit(PARKED_EXIT)


@app.command()
def explain(file: PipelineFile) -> None:
    """Show the plan of a pipeline file: join graphs, stores, probe orders, exchanges.  Runs nothing."""
    from plait.serve import pipeline as pipelines

    pipeline = pipelines.load(file)
    require_java()
    import plait

    spark = _session(pipeline)
    try:
        # A checkpoint of its own, so that a running engine can be explained too.
        with (
            tempfile.TemporaryDirectory(prefix="plait-explain-") as checkpoint,
            plait.Engine(spark, checkpoint=checkpoint, config=pipeline.config) as engine,
        ):
            pipelines.build(pipeline, engine, spark)
            typer.echo(engine.explain())
    finally:
        spark.stop()


@app.command()
def sql(
    file: Annotated[
        str | None,
        typer.Argument(metavar="[pipeline.toml | CHECKPOINT]", help="A pipeline file, or the checkpoint of an engine."),
    ] = None,
    command: Annotated[
        list[str] | None, typer.Option("--command", "-c", help="Run this and leave (repeatable).")
    ] = None,
    format: Annotated[Formats, typer.Option(help="How rows are printed.")] = Formats.table,
    follow: Annotated[
        bool, typer.Option("--follow/--once", help="Go on after every epoch until Ctrl-C, or read what there is.")
    ] = False,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Keep what SELECTs over streams have read here; the same SELECT continues.")
    ] = None,
    start: Annotated[bool, typer.Option("--run", help="Run the pipeline's queries meanwhile (as START does).")] = False,
    rows: Annotated[int, typer.Option(min=1, help="Rows that a table shows.")] = 100,
    demo: Annotated[bool, typer.Option("--demo", help="On generated streams instead of a pipeline file.")] = False,
) -> None:
    """Ask SQL questions of streams, or of an engine of another process: a prompt, or -c, or standard input."""
    from plait.serve.prompt import sql_prompt
    from plait.serve.prompt.sql_printing import Settings

    if demo == (file is not None):
        raise typer.BadParameter("give either a pipeline file or --demo")
    settings = Settings(format.value, follow, rows, str(checkpoint.absolute()) if checkpoint else None)
    attaches = file is not None and ("://" in file or os.path.isdir(file))
    if attaches and (start or follow or checkpoint is not None):
        raise typer.BadParameter("--run, --follow and --checkpoint are for a pipeline file")
    where = Path(file) if file is not None and not attaches else file
    raise typer.Exit(sql_prompt.run(where, command or [], settings, start))


def _session(pipeline: Pipeline) -> SparkSession:
    import plait

    spark = plait.session(app=pipeline.app, master=pipeline.master, settings=pipeline.settings)
    spark.sparkContext.setLogLevel("ERROR")
    return spark


if __name__ == "__main__":
    main()
