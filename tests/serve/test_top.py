"""`plait top` shows what an engine of another process has told of itself."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from typer.testing import CliRunner

from plait.query.budget import Budget
from plait.serve.cli import app
from plait.serve.other_engine import OtherEngine
from plait.serve.top import glance, rates, table
from plait.state.files.storage import LocalFiles
from plait.state.log.events import BEFORE, CURRENT, add_event, newest_events
from tests.runtime.test_changes import Shop, join, rows

RUN = CliRunner()


def some(count: int) -> Any:
    return rows(*((i, 1, i, 0, 0.0) for i in range(count)))


def top(path: Path) -> tuple[int, dict[str, Any]]:
    done = RUN.invoke(app, ["top", str(path), "--once", "--json"])
    return done.exit_code, json.loads(done.stdout)


def test_a_look_tells_of_queries_rates_state_and_what_is_parked(tmp_path: Path) -> None:
    shop = Shop(tmp_path)
    shop.budgets = {"many": Budget(rows=10)}
    shop.start(many=(join("a.k = b.k"), "now"), few=(join("a.id = b.id"), "now"))
    code, seen = top(tmp_path)
    assert (code, seen["running"], seen["epoch"], seen["age_seconds"]) == (0, True, None, None)
    for _ in range(3):
        shop.run(s=some(4), u=some(4))
    code, seen = top(tmp_path)
    assert (code, seen["running"], seen["epoch"]) == (0, True, 2)
    queries = {q["name"]: q for q in seen["queries"]}
    assert (queries["few"]["status"], queries["many"]["status"]) == ("live", "parked")
    assert (queries["few"]["rows"], queries["many"]["rows"]) == (20, 80)
    assert "max_rows_per_epoch=10" in queries["many"]["error"]
    assert queries["many"]["missed_since"] == 0
    assert abs(sum(q["state_bytes"] for q in queries.values()) - seen["state_bytes"]) <= 2
    assert set(seen["rates"]["rows_in"]) == {"s", "u"}
    assert queries["few"]["rows_per_second"] > 0
    text = Console(width=150, record=True, file=io.StringIO())
    text.print(table(glance(OtherEngine.at(str(tmp_path)))))
    shown = text.export_text()
    assert "few" in shown
    assert "many, since epoch 0: [TOO_MANY_ROWS] it gave 16 rows in one epoch" in shown
    shop.close()
    code, seen = top(tmp_path)
    assert (code, seen["running"], seen["epoch"]) == (3, False, 2)
    assert "not running" in RUN.invoke(app, ["top", str(tmp_path)]).stdout


def test_what_is_no_checkpoint_is_an_error(tmp_path: Path) -> None:
    done = RUN.invoke(app, ["top", str(tmp_path), "--once"])
    assert "NOT_A_CHECKPOINT" in str(done.exception)


def test_rates_are_those_of_the_last_seconds_and_of_one_run() -> None:
    def report(epoch: int, at: float, n: int) -> dict[str, Any]:
        return {"epoch": epoch, "timestamp": at, "rows_in": {"a": n}, "rows_out": {"q": n}, "seconds": {"total": 1.0}}

    assert rates([]).epochs == 0
    assert rates([report(0, 5, 10)]).rows_in == {"a": 10.0}
    reports = [report(0, 0, 1000), report(1, 100, 10), report(2, 110, 20), report(3, 120, 30)]
    assert rates(reports).rows_in == {"a": 50 / 20}
    # The checkpoint was given another engine between 7 and 3: those before are of another life.
    assert rates([report(7, 99, 5000), *reports[1:]]).rows_in == {"a": 50 / 20}


def test_the_newest_events_are_read_from_the_end_of_the_files(tmp_path: Path) -> None:
    files = LocalFiles(str(tmp_path), False)
    assert newest_events(files) == []
    for number in range(100):
        add_event(files, {"epoch": number, "filler": "x" * 50}, limit=4000)
    assert (tmp_path / BEFORE).exists()
    assert [event["epoch"] for event in newest_events(files, 400)] == list(range(95, 100))
    assert newest_events(files, 1)[-1]["epoch"] == 99
    everything = newest_events(files)
    assert [event["epoch"] for event in everything] == list(range(everything[0]["epoch"], 100))
    # A line that is being written is left out; the file may just have been turned over.
    with open(tmp_path / CURRENT, "ab") as file:
        file.write(b'{"epoch": 100')
    assert newest_events(files, 400)[-1]["epoch"] == 99
    (tmp_path / CURRENT).unlink()
    assert newest_events(files, 400)
