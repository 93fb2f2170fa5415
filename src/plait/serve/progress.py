"""Shows a run while it runs: a live table on a terminal, one line per epoch elsewhere.

Everything shown comes from `run.last_progress` and `run.recent_progress`; the functions that turn a report into
text or a table are pure.  Ctrl-C (or SIGTERM) stops the run between two looks at it; a second one insists.
"""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from plait.run import Run

Progress = Mapping[str, Any]
LOOK_EVERY_SECONDS = 0.2
SWITCHES_SHOWN = 3
BAR_WIDTH = 40
REPORTS_KEPT = 10
"""Progress reports that a display holds: what is shown of the past is summed up."""


def watch(
    run: Run, console: Console, interrupted: list[int] | None = None, look: Callable[[], None] = lambda: None
) -> int:
    """Show `run` until it ends; the signal that stopped it, else 0.  A failed run raises its PlaitError.

    `interrupted` are the signals that came before; `look` is called now and then.
    """
    with interrupts(interrupted) as interrupted:
        show = _show_live if console.is_terminal else _show_lines
        show(run, console, interrupted, look)
        if interrupted:
            console.print("stopping …")
            run.stop()
        run.await_termination()
    return interrupted[0] if interrupted else 0


def epoch_seconds(progress: Progress) -> float:
    """How long an epoch took: its total if the report has one, else the sum of its steps.

    >>> epoch_seconds({"seconds": {"probe": 0.5, "commit": 0.25}})
    0.75
    """
    seconds: Mapping[str, float] = progress.get("seconds", {})
    return seconds["total"] if "total" in seconds else sum(seconds.values())


def epoch_line(progress: Progress) -> str:
    """One epoch in one line.

    >>> epoch_line({"epoch": 3, "rows_in": {"a": 10, "b": 20}, "rows_out": {"q": 7}, "state_rows": 90,
    ...             "state_bytes": 2048, "seconds": {"probe": 0.5}})
    'epoch 3: 30 rows in, 7 results, 60 rows/s, state 90 rows 2.0 KiB, 0.50 s'
    """
    rows, results, seconds = _total(progress, "rows_in"), _total(progress, "rows_out"), epoch_seconds(progress)
    late = _total(progress, "rows_late")
    return (
        f"epoch {progress.get('epoch', '?')}: {rows:,} rows in, {results:,} results, "
        f"{rows / seconds if seconds else 0:,.0f} rows/s, "
        f"state {progress.get('state_rows', 0):,} rows {in_bytes(progress.get('state_bytes', 0))}, {seconds:.2f} s"
        + (f", {late:,} late" if late else "")
        + "".join(f", building {store} {100 * done:.0f} %" for store, done in builds(progress).items())
    )


def builds(progress: Progress) -> dict[str, float]:
    """The stores that are being filled from others, and which share of each is done.

    >>> builds({"builds": {"a[m]@2": 0.25, "b[]@2": 1.0}})
    {'a[m]@2': 0.25}
    """
    return {store: done for store, done in progress.get("builds", {}).items() if done < 1}


def in_bytes(n: float) -> str:
    """A size for people.

    >>> in_bytes(5 * 2**20)
    '5.0 MiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} TiB"


@dataclass
class Totals:
    """What all epochs of a run add up to.  Few reports are kept, however long the run is."""

    recent: dict[int, Progress] = field(default_factory=dict)
    """The newest reports by epoch, oldest first."""
    epochs: int = 0
    rows_in: Counter[str] = field(default_factory=Counter)
    rows_out: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    @property
    def last(self) -> Progress | None:
        """The newest report."""
        return self.recent[next(reversed(self.recent))] if self.recent else None

    def add(self, reports: Iterable[Progress]) -> None:
        """Takes in the reports that are new, and what has come to others since, such as Spark's parts of them."""
        for report in reports:
            epoch = report["epoch"]
            if not self.recent or epoch > next(reversed(self.recent)):
                self.epochs += 1
                self.rows_in.update(report.get("rows_in", {}))
                self.rows_out.update(report.get("rows_out", {}))
                self.seconds += epoch_seconds(report)
                self.recent[epoch] = report
            elif epoch in self.recent:
                self.recent[epoch] = report
        for old in list(self.recent)[:-REPORTS_KEPT]:
            del self.recent[old]


def dashboard(totals: Totals) -> RenderableType:
    """All there is to see after the last epoch."""
    last = totals.last
    if last is None:
        return "waiting for the first epoch …"
    seconds, rows = totals.seconds, totals.rows_in.total()
    facts = Table.grid(padding=(0, 2))
    facts.add_row("epoch", f"{last.get('epoch')}", "this epoch", f"{epoch_seconds(last):.2f} s")
    facts.add_row("rows in", f"{_total(last, 'rows_in'):,}", "rows/s", f"{rows / seconds if seconds else 0:,.0f}")
    facts.add_row("results", f"{totals.rows_out.total():,}", "late", f"{_total(last, 'rows_late'):,}")
    facts.add_row("state", f"{last.get('state_rows', 0):,} rows", "on disk", in_bytes(last.get("state_bytes", 0)))
    steps = "  ".join(f"{step} {s:.3f}" for step, s in last.get("seconds", {}).items() if step != "total")
    orders = Table("query", "input", "probes, in order", box=None)
    for query, inputs in last.get("orders", {}).items():
        for alias, order in inputs.items():
            orders.add_row(query, alias, " → ".join(order))
    bars = Table.grid(padding=(0, 2))
    for store, done in builds(last).items():
        bar = ProgressBar(total=1.0, completed=done, width=BAR_WIDTH)
        bars.add_row(Text(f"building {store}"), bar, f"{100 * done:.0f} %")
    said = Text("\n".join(switches(last)[-SWITCHES_SHOWN:]))
    return Group(facts, *([bars] if bars.row_count else []), Text(f"seconds per step: {steps}"), orders, said)


def switches(progress: Progress) -> list[str]:
    """The probe orders that were replaced so far, with the reasons, oldest first."""
    return [switch["text"] for switch in progress.get("optimiser", {}).get("switches", [])]


def _show_live(run: Run, console: Console, interrupted: Sequence[int], look: Callable[[], None]) -> None:
    totals = Totals()
    with Live(console=console, refresh_per_second=8, transient=False) as live:
        while True:
            active = run.is_active
            totals.add(run.recent_progress)
            live.update(dashboard(totals))
            if interrupted or not active:
                return
            look()
            time.sleep(LOOK_EVERY_SECONDS)


def _show_lines(run: Run, console: Console, interrupted: Sequence[int], look: Callable[[], None]) -> None:
    shown = -1
    while True:
        active = run.is_active
        for progress in run.recent_progress:
            if progress["epoch"] > shown:
                shown = progress["epoch"]
                console.print(epoch_line(progress), soft_wrap=True, highlight=False)
                said = [text for text in switches(progress) if text.startswith(f"after epoch {shown}:")]
                for text in said:
                    console.print(f"  {text}", soft_wrap=True, highlight=False, markup=False)
        if interrupted or not active:
            return
        look()
        time.sleep(LOOK_EVERY_SECONDS)


@contextmanager
def interrupts(caught: list[int] | None = None) -> Iterator[list[int]]:
    """Collects the first SIGINT or SIGTERM instead of raising it: PySpark's handler would cancel the epoch's job.

    PySpark sets its own handler when a session begins: what waits for signals before that must do so again after it.
    """
    caught = [] if caught is None else caught

    def note(number: int, _frame: object) -> None:
        if caught:
            raise KeyboardInterrupt
        caught.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _total(progress: Progress, key: str) -> int:
    return sum(progress.get(key, {}).values())
