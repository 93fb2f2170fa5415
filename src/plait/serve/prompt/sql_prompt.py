"""`plait sql`: reads statements, one after the other, from a prompt, from `-c` or from standard input.

Ctrl-C while nothing runs clears the line; while a statement runs it stops that statement, and a second one leaves.
At the prompt an error is said and forgotten; elsewhere it is the end, with exit code 1.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from plait.config import Config
from plait.errors import PlaitError
from plait.runtime.spark.java import require_java
from plait.serve import demo_data
from plait.serve import pipeline as pipelines
from plait.serve.other_engine import OtherEngine
from plait.serve.pipeline import Pipeline, QuerySpec, StreamSpec, TableSpec
from plait.serve.prompt.sql_attached import AttachedSession
from plait.serve.prompt.sql_printing import Printer, Quit, Settings, Stopped
from plait.serve.prompt.sql_session import Session
from plait.serve.prompt.sql_statements import KEYWORDS, ends_itself, parse, split, statements

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FINE, FAILED, INTERRUPTED, TERMINATED = 0, 1, 130, 143
PROMPT, CONTINUED = "plait> ", "  ...> "
DEMO_EPOCHS, DEMO_ROWS = 4, 40_000
HISTORY_LINES = 2000
Remember = Callable[[str], None]


def run(file: Path | str | None, commands: Sequence[str], settings: Settings, start: bool) -> int:
    """The command `plait sql`; without a file, on the demo's streams.  Returns the exit code.

    A text instead of a path is the checkpoint of an engine of another process.
    """
    notes = Console(stderr=True)
    with ExitStack() as stack:
        if isinstance(file, str):
            OtherEngine.at(file)
            pipeline = Pipeline(Path(file), file, Config(), "plait-sql", None, {}, (), (), None)
        elif file is not None:
            pipeline = pipelines.load(file, needs_queries=False)
        else:
            pipeline = demo_pipeline(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="plait-demo-"))))
        require_java()
        if notes.is_terminal:
            notes.print("Starting Spark …", style="dim")
        interactive = not commands and sys.stdin.isatty()
        spark = _spark(pipeline, state_folder() / "spark.log" if interactive else None)
        stack.callback(spark.stop)
        interrupts = stack.enter_context(Interrupts())
        if isinstance(file, str):
            session: Session | AttachedSession = AttachedSession(
                file, Printer(spark, settings, interrupts, sys.stdout, notes)
            )
        else:
            session = Session(pipeline, spark, settings, interrupts, sys.stdout, notes)
        stack.callback(session.close)
        prompt = Prompt(session, interrupts, notes)
        try:
            if start:
                prompt.execute("START")
            if commands:
                return prompt.batch([line for command in commands for line in (*command.splitlines(), ";")])
            return prompt.interact() if interactive else prompt.batch(sys.stdin)
        except KeyboardInterrupt:
            return TERMINATED if interrupts.leaving else INTERRUPTED
        except BrokenPipeError:
            # Nobody reads any more (`| head`); nor shall Python's flush at exit complain.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return FINE


class Insisted(KeyboardInterrupt):
    """Ctrl-C for the second time."""


class Interrupts:
    """Ctrl-C raises KeyboardInterrupt at the prompt; while a statement works it is noted, and the second one raises.

    PySpark's own handler would cancel all jobs, those of the pipeline in the background as well.
    """

    def __init__(self) -> None:
        self.noted = 0
        self.leaving = False
        """SIGTERM or SIGHUP: the end, not only of a statement."""
        self._working = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> Interrupts:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    @contextmanager
    def working(self) -> Iterator[None]:
        """While a statement works."""
        self.noted, self._working = 0, True
        try:
            yield
        finally:
            self._working = False

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.leaving = self.leaving or number != signal.SIGINT
        if not self._working:
            raise KeyboardInterrupt
        self.noted += 1
        if self.noted > 1:
            raise Insisted


class Prompt:
    """Reads statements and has them executed."""

    def __init__(self, session: Session | AttachedSession, interrupts: Interrupts, notes: Console) -> None:
        self.session = session
        self.interrupts = interrupts
        self.notes = notes

    def execute(self, text: str) -> None:
        """One statement; raises PlaitError, Stopped or Quit."""
        with self.interrupts.working():
            self.session.execute(parse(text))

    def batch(self, lines: Iterable[str]) -> int:
        """All statements, up to the first that fails or is stopped; Ctrl-C is how following ends."""
        try:
            for statement in statements(line.rstrip("\n") for line in lines):
                self.execute(statement)
                if self.interrupts.noted:
                    break
        except PlaitError as error:
            self._say_error(error)
            return FAILED
        except Stopped:
            self.session.say("Stopped.")
            return INTERRUPTED
        except Quit:
            return FINE
        return TERMINATED if self.interrupts.leaving else FINE

    def interact(self) -> int:
        """The prompt, until the user leaves."""
        self._greet()
        with history(cache(self.session.words)) as remember:
            while not self.interrupts.leaving:
                try:
                    if (failure := self.session.failure()) is not None:
                        self.session.say("The pipeline has failed:")
                        self._say_error(failure)
                    text = self._statement()
                    remember(text)
                    for statement in split(f"{text}\n;")[0]:
                        self.execute(statement)
                except Insisted:
                    raise
                except KeyboardInterrupt:
                    self.notes.print()
                except Stopped:
                    self.session.say("Stopped.")
                except PlaitError as error:
                    self._say_error(error)
                except (EOFError, Quit):
                    break
        return TERMINATED if self.interrupts.leaving else FINE

    def _statement(self) -> str:
        """Lines up to a `;` outside quotes and comments, or one line of the prompt's own."""
        text = self._line(PROMPT)
        if ends_itself(text):
            return text
        while split(text)[1].strip():
            text += "\n" + self._line(CONTINUED)
        return text

    def _line(self, prompt: str) -> str:
        if sys.stdout.isatty():
            return input(prompt)
        # input() would write the prompt among the rows.
        sys.stderr.write(prompt)
        sys.stderr.flush()
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.rstrip("\n")

    def _greet(self) -> None:
        self.session.say(f"Plait {version('plait')}: {self.session.greeting()}")
        self.session.say("HELP says what can be typed; a statement ends with ; and Ctrl-D leaves.", "dim")

    def _say_error(self, error: PlaitError) -> None:
        text = Text.assemble(("error ", "bold red"), str(error))
        self.notes.print(text, soft_wrap=True, highlight=False)


def state_folder() -> Path:
    """Where the history and Spark's log are: below XDG_STATE_HOME, by default ~/.local/state."""
    state = os.environ.get("XDG_STATE_HOME", "")
    return (Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state") / "plait"


@contextmanager
def history(words: Callable[[], list[str]]) -> Iterator[Remember]:
    """Line editing with a history that lasts, and completion; nothing of it where Python has no readline."""
    try:
        import readline
    except ImportError:
        yield lambda _: None
        return
    file = state_folder() / "sql_history"

    def complete(begin: str, number: int) -> str | None:
        lower = begin.islower()
        found = [w for w in words() if w.lower().startswith(begin.lower())]
        word = found[number] if number < len(found) else None
        return word.lower() if word is not None and lower and word in KEYWORDS else word

    def remember(statement: str) -> None:
        if not statement.strip():
            return
        # One entry for a statement of several lines, unless a comment would swallow the rest.
        readline.add_history(statement if "--" in statement else " ".join(statement.splitlines()))
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(file)

    with suppress(OSError):
        readline.read_history_file(file)
    readline.set_history_length(HISTORY_LINES)
    readline.set_auto_history(False)
    readline.set_completer(complete)
    readline.parse_and_bind("tab: complete")
    yield remember


def demo_pipeline(folder: Path) -> Pipeline:
    """The demo's generated streams, a table of their items, and its query."""
    demo_data.write_streams(folder, DEMO_EPOCHS, DEMO_ROWS, seed=1)
    demo_data.write_items(folder)
    streams = tuple(
        StreamSpec(
            name=name,
            format="parquet",
            path=str(folder / name),
            schema=", ".join(f"{column} BIGINT" for column in (key, *others)),
            options={"maxFilesPerTrigger": "1"},
            watermark=None,
            ttl=None,
            needed=None,
        )
        for name, (key, others) in demo_data.STREAMS.items()
    )
    return Pipeline(
        file=Path("demo"),
        checkpoint=str(folder / "checkpoint"),
        config=Config(),
        app="plait-sql",
        master=None,
        settings={},
        streams=streams,
        queries=(QuerySpec("returns_by_address", demo_data.QUERY.strip(), None),),
        every=None,
        tables=(TableSpec("item", "parquet", str(folder / "item"), None, {}),),
    )


def _spark(pipeline: Pipeline, log: Path | None) -> SparkSession:
    from pyspark.logger import PySparkLogger

    import plait

    # Processes started here inherit that SIGINT is blocked: Ctrl-C in a terminal goes to all of them, and would end
    # the Python workers in the middle of an epoch.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with _stderr_in(log) if log is not None else nullcontext():
            spark = plait.session(app=pipeline.app, master=pipeline.master, settings=pipeline.settings)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    spark.sparkContext.setLogLevel("ERROR")
    # It logs every wrong query with its stack trace; the error says it all.
    PySparkLogger.getLogger("SQLQueryContextLogger").disabled = True
    return spark


@contextmanager
def _stderr_in(log: Path) -> Iterator[None]:
    """Processes started meanwhile write their errors to a file: a prompt is no place for the log of a JVM."""
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    except OSError:
        yield
        return
    terminal = os.dup(2)
    os.dup2(file, 2)
    try:
        yield
    finally:
        os.dup2(terminal, 2)
        os.close(terminal)
        os.close(file)
