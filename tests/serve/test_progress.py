"""A run is shown until it ends; the first Ctrl-C stops it in an orderly way."""

from __future__ import annotations

import io
import os
import signal
from typing import Any

import pytest
from rich.console import Console

from plait.errors import SourceError
from plait.serve.progress import BAR_WIDTH, REPORTS_KEPT, Totals, dashboard, epoch_line, watch

REPORT: dict[str, Any] = {
    "epoch": 0,
    "rows_in": {"a": 1000, "b": 500},
    "rows_out": {"q": 42},
    "rows_late": {"a": 3},
    "state_rows": 1500,
    "state_bytes": 3 << 20,
    "seconds": {"join": 0.4, "commit": 0.1, "total": 0.5},
    "orders": {"q": {"a": ["b", "c"]}},
}


class ScriptedRun:
    """Ends after as many looks as it has reports; a look may interrupt, the end may fail."""

    def __init__(self, reports: int, interrupt_at: int | None = None, failure: Exception | None = None) -> None:
        self.reports, self.interrupt_at, self.failure = reports, interrupt_at, failure
        self.looks, self.stopped = 0, False

    @property
    def is_active(self) -> bool:
        self.looks += 1
        if self.looks == self.interrupt_at:
            os.kill(os.getpid(), signal.SIGINT)
        return not self.stopped and self.looks < self.reports

    @property
    def recent_progress(self) -> list[dict[str, Any]]:
        return [REPORT | {"epoch": e} for e in range(min(self.looks, self.reports))]

    def stop(self) -> None:
        self.stopped = True

    def await_termination(self, timeout: float | None = None) -> bool:
        if self.failure:
            raise self.failure
        return True


def shown(run: ScriptedRun, terminal: bool = False) -> tuple[int, str]:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=100)
    stopped = watch(run, console)  # type: ignore[arg-type]
    assert isinstance(console.file, io.StringIO)
    return stopped, console.file.getvalue()


def test_without_a_terminal_each_epoch_is_one_line() -> None:
    stopped, text = shown(ScriptedRun(3))
    assert not stopped
    assert [line.split(":")[0] for line in text.splitlines()] == ["epoch 0", "epoch 1", "epoch 2"]
    assert "1,500 rows in, 42 results, 3,000 rows/s, state 1,500 rows 3.0 MiB, 0.50 s, 3 late" in text


def test_on_a_terminal_orders_and_steps_are_shown() -> None:
    _, text = shown(ScriptedRun(2), terminal=True)
    assert "b → c" in text
    assert "join 0.400" in text


def test_a_store_that_is_being_built_has_a_bar() -> None:
    totals = Totals()
    totals.add([REPORT | {"builds": {"a[m]@2": 0.25, "b[]@2": 1.0}}])
    console = Console(file=io.StringIO(), force_terminal=True, color_system=None, width=100)
    console.print(dashboard(totals))
    assert isinstance(console.file, io.StringIO)
    lines = [line.strip() for line in console.file.getvalue().splitlines() if "building" in line]
    # One that is complete is no build any more, though the epoch that completed it names it.
    (line,) = lines
    assert line.startswith("building a[m]@2")
    assert line.endswith("25 %")
    assert line.count("━") == BAR_WIDTH // 4
    # Nothing is built: there is no line about it.
    totals.add([REPORT | {"epoch": 1, "builds": {}}])
    console.print(dashboard(totals))
    assert console.file.getvalue().count("building") == 1


def test_a_line_says_how_far_builds_are() -> None:
    assert epoch_line(REPORT | {"builds": {"a[m]@2": 0.25}}).endswith(", building a[m]@2 25 %")
    assert "building" not in epoch_line(REPORT | {"builds": {"a[m]@2": 1.0}})


def test_ctrl_c_stops_the_run_instead_of_raising() -> None:
    before = signal.getsignal(signal.SIGINT)
    run = ScriptedRun(1000, interrupt_at=2)
    stopped, text = shown(run)
    assert stopped
    assert run.stopped
    assert "stopping" in text
    assert signal.getsignal(signal.SIGINT) is before


def test_a_failed_run_raises_its_error() -> None:
    with pytest.raises(SourceError):
        shown(ScriptedRun(1, failure=SourceError("SOURCE", "a file is corrupt", "remove it")))


def test_before_the_first_epoch_there_is_something_to_see() -> None:
    assert dashboard(Totals()) == "waiting for the first epoch …"


def test_a_long_run_is_summed_up_and_few_reports_are_held() -> None:
    totals = Totals()
    window: list[dict[str, Any]] = []
    for epoch in range(1000):
        window = [*window[-127:], REPORT | {"epoch": epoch}]
        totals.add(window)
    assert (totals.epochs, totals.rows_in, totals.rows_out) == (1000, {"a": 1_000_000, "b": 500_000}, {"q": 42_000})
    assert totals.seconds == pytest.approx(500)
    assert list(totals.recent) == list(range(1000 - REPORTS_KEPT, 1000))
    # What Spark says of an epoch comes later than what the engine does.
    totals.add([REPORT | {"epoch": 999, "spark_seconds": {"addBatch": 0.3}}, REPORT | {"epoch": 3}])
    assert totals.last is not None
    assert totals.last["spark_seconds"] == {"addBatch": 0.3}
    assert (totals.epochs, len(totals.recent)) == (1000, REPORTS_KEPT)
