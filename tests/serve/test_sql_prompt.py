"""The prompt of `plait sql`: what is typed, how rows are printed, and the command in a process of its own."""

from __future__ import annotations

import csv
import fcntl
import io
import json
import os
import pty
import re
import select
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from zoneinfo import ZoneInfo

import duckdb
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import types as T

from plait.errors import QueryError
from plait.runtime.answers.answer import MODES
from plait.serve.pipeline import OUTPUT_MODES
from plait.serve.prompt.sql_prompt import state_folder
from plait.serve.prompt.sql_rows import RowWriter, converters
from plait.serve.prompt.sql_statements import Statement, ends_itself, parse, split, statements
from tests.serve.test_cli import plait

# --- statements


@pytest.mark.parametrize(
    ("text", "statement"),
    [
        ("SELECT 1", Statement("select", "SELECT 1")),
        (
            "-- why\nwith x as (select 1) select * from x",
            Statement("select", "-- why\nwith x as (select 1) select * from x"),
        ),
        ("(SELECT 1)", Statement("select", "(SELECT 1)")),
        ("explain SELECT /*+ STATE_TTL('o', '1d') */ 1", Statement("explain", "SELECT /*+ STATE_TTL('o', '1d') */ 1")),
        ("EXPLAIN STAGES\n(SELECT 1)", Statement("explain", "(SELECT 1)", stages=True)),
        ("EXPLAIN big", Statement("explain", "big")),
        ("EXPLAIN STAGES", Statement("explain", "", stages=True)),
        ("show Queries;", Statement("show", "queries")),
        ("DESC `orders`", Statement("describe", "orders")),
        ("create query q as SELECT 1", Statement("create", "SELECT 1", name="q")),
        (
            "-- why\nCREATE OR REPLACE QUERY q SINCE 'State' AS\nSELECT /*+ STATE_TTL('o', '1d') */ 1",
            Statement("create", "SELECT /*+ STATE_TTL('o', '1d') */ 1", name="q", since="state", replaces=True),
        ),
        ("DROP QUERY q", Statement("drop", name="q")),
        ("START", Statement("start")),
        ("start every '2 seconds'", Statement("start", "2 seconds")),
        ("stop", Statement("stop")),
        ("Exit", Statement("quit")),
        (r"\q", Statement("quit")),
        (r"\format CSV", Statement("format", "csv")),
        (r"\rows 5", Statement("rows", "5")),
    ],
)
def test_a_statement_is_recognised(text: str, statement: Statement) -> None:
    assert parse(text) == statement


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("DROP TABLE orders", "'DROP TABLE orders' is not a statement of the prompt"),
        ("CREATE QUERY q", "'CREATE QUERY q' is not understood"),
        ("CREATE TABLE q AS SELECT 1", "is not understood"),
        ("SELCT 1", "did you mean SELECT?"),
        ("STOP it", "'STOP it' is not a statement of the prompt"),
        ("SHOW QUERY", "there is no SHOW QUERY; did you mean QUERIES?"),
        ("EXPLAIN DROP x", "EXPLAIN needs a SELECT"),
        ("START now", "START now is not understood"),
        (r"\format xml", r"\format xml is not understood"),
        (r"\rows none", r"\rows none is not understood"),
    ],
)
def test_what_cannot_be_asked_is_refused_with_what_can(text: str, said: str) -> None:
    with pytest.raises(QueryError) as caught:
        parse(text)
    assert caught.value.code == "STATEMENT"
    assert said in caught.value.cause
    assert caught.value.remedy


@pytest.mark.parametrize(
    "text",
    ["';'", '";"', "`;`", r"'it\'s;'", r"r'\' ", "-- ;\n", "/* ; /* ; */ ; */", "'/*'", "'--'"],
)
def test_quotes_and_comments_hide_a_semicolon(text: str) -> None:
    assert split(f"SELECT {text} ; x") == ([f"SELECT {text}".strip()], " x")


def test_what_is_not_closed_goes_on() -> None:
    for text in ("SELECT 'a;", "SELECT /* a;", "SELECT `a;"):
        assert split(text) == ([], text)


def test_lines_become_statements() -> None:
    lines = ["SHOW QUERIES", "-- a comment", "SELECT 1;", "", "SELECT", "2; STOP", "SELECT 3"]
    assert list(statements(lines)) == ["SHOW QUERIES", "SELECT 1", "SELECT\n2", "STOP", "SELECT 3"]


def test_only_the_prompts_own_statements_end_without_a_semicolon() -> None:
    assert ends_itself("DESCRIBE orders")
    assert ends_itself("quit ;")
    assert not ends_itself("EXPLAIN orders")
    assert not ends_itself("SELECT stop")


# --- rows

SCHEMA = T.StructType(
    [
        T.StructField("d", T.DecimalType(12, 2)),
        T.StructField("at", T.TimestampType()),
        T.StructField("local", T.TimestampNTZType()),
        T.StructField("tags", T.ArrayType(T.StructType([T.StructField("x", T.DoubleType())]))),
        T.StructField("map", T.MapType(T.LongType(), T.BooleanType())),
    ]
)
NOW = datetime(2024, 2, 29, 12, 30, tzinfo=UTC)
# As PySpark gives a TIMESTAMP: local time, without a zone.
ROW = (Decimal("1234567890.10"), NOW.astimezone().replace(tzinfo=None), datetime(2024, 1, 1), [(1.5,), None], {1: True})


def written(format: str, *rows: tuple[object, ...], names: tuple[str, ...] = tuple(SCHEMA.names)) -> str:
    out = io.StringIO()
    RowWriter(format, out, most=2).write(names, rows)
    return out.getvalue()


def plain_row() -> tuple[object, ...]:
    made = converters(SCHEMA, ZoneInfo("Europe/Berlin"))
    return tuple(make(value) for make, value in zip(made, ROW, strict=True))


def test_json_keeps_digits_and_instants() -> None:
    assert json.loads(written("json", plain_row())) == {
        "d": "1234567890.10",
        "at": "2024-02-29T13:30:00+01:00",
        "local": "2024-01-01T00:00:00",
        "tags": [{"x": 1.5}, None],
        "map": {"1": True},
    }
    assert json.loads(written("json", (None,), names=("a",))) == {"a": None}


def test_csv_has_one_header_and_leaves_null_empty() -> None:
    text = written("csv", (1, None, 'say "hi", twice'), (2, True, ""), names=("a", "b", "c"))
    assert text == 'a,b,c\n1,,"say ""hi"", twice"\n2,true,\n'
    assert written("csv", names=("a",)) == "a\n", "no rows, but columns"


def test_a_table_shows_no_more_rows_than_asked_for() -> None:
    out = io.StringIO()
    said = RowWriter("table", out, most=2).write(["n"], [[1], [None], [3]])
    assert said == "the first 2 rows; \\rows N shows more"
    assert re.findall(r"\S+", out.getvalue())[-2:] == ["1", "NULL"]
    assert "3" not in out.getvalue()


def test_history_lies_where_xdg_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert state_folder() == tmp_path / "plait"
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    assert state_folder() == Path.home() / ".local" / "state" / "plait"


def test_the_pipeline_file_knows_the_engines_output_modes() -> None:
    assert OUTPUT_MODES == MODES


# --- the command

PIPELINE = """
[engine]
checkpoint = "checkpoint"

[spark]
master = "local[2]"
"spark.sql.session.timeZone" = "UTC"

[streams.orders]
format = "parquet"
path = "orders"
schema = "id BIGINT, customer BIGINT, amount DECIMAL(10,2), ts TIMESTAMP"
options = { maxFilesPerTrigger = 1 }

[streams.customers]
format = "parquet"
path = "customers"
schema = "id BIGINT, region BIGINT, name STRING"

[tables.regions]
format = "csv"
path = "regions.csv"
options = { header = true, inferSchema = true }

[queries.named]
sql = "SELECT o.id, c.name FROM orders o JOIN customers c ON o.customer = c.id"
"""
JOINED = "SELECT o.id, o.amount, o.ts, c.name FROM orders o JOIN customers c ON o.customer = c.id"
BY_REGION = """SELECT r.label, count(*) AS n, sum(o.amount) AS total
    FROM orders o JOIN customers c ON o.customer = c.id JOIN regions r ON r.region = c.region GROUP BY r.label"""


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    for epoch in range(2):
        ids = range(epoch * 10, epoch * 10 + 10)
        write_orders(tmp_path, epoch, list(ids))
    customers = {"id": [0, 1, 2], "region": [7, 8, 7], "name": ["ann", None, 'b"ob, jr']}
    write(tmp_path / "customers" / "0.parquet", pa.table(customers))
    (tmp_path / "regions.csv").write_text("region,label\n7,north\n8,south\n")
    file = tmp_path / "pipeline.toml"
    file.write_text(PIPELINE)
    return file


def write_orders(folder: Path, epoch: int, ids: list[int]) -> None:
    columns = {
        "id": ids,
        "customer": [i % 4 for i in ids],
        "amount": pa.array([Decimal(i) / 4 if i % 5 else None for i in ids], pa.decimal128(10, 2)),
        "ts": pa.array([datetime(2024, 1, 1 + i, 12, i, tzinfo=UTC) for i in ids], pa.timestamp("us", "UTC")),
    }
    write(folder / "orders" / f"{epoch}.parquet", pa.table(columns))


def write(file: Path, table: pa.Table) -> None:
    file.parent.mkdir(exist_ok=True)
    # Spark lists a folder while we write to it: a file appears whole.
    pq.write_table(table, file.parent.parent / f".{file.name}")
    os.rename(file.parent.parent / f".{file.name}", file)


def from_duckdb(folder: Path, sql: str) -> list[tuple[object, ...]]:
    with duckdb.connect() as oracle:
        oracle.execute("SET TimeZone = 'UTC'")
        for name in ("orders", "customers"):
            oracle.execute(f"CREATE VIEW {name} AS FROM read_parquet('{folder}/{name}/*.parquet')")
        oracle.execute(f"CREATE VIEW regions AS FROM read_csv('{folder}/regions.csv')")
        return oracle.execute(sql).fetchall()


@pytest.mark.spark
def test_answers_go_to_stdout_as_json_or_csv_and_an_error_ends_it_with_code_1(pipeline: Path) -> None:
    folder = pipeline.parent
    done = plait(
        *(
            "sql",
            str(pipeline),
            "--format",
            "json",
            "-c",
            JOINED,
            "-c",
            f"\\format csv\n{BY_REGION}; SELECT id FROM regions",
        )
    )
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    cut = lines.index("label,n,total")

    found = [json.loads(line) for line in lines[:cut]]
    expected = from_duckdb(folder, JOINED)
    assert len(found) == 15
    assert [type(row["amount"]) for row in found if row["amount"] is not None] == [str] * 12
    read = [
        (r["id"], None if r["amount"] is None else Decimal(r["amount"]), datetime.fromisoformat(r["ts"]), r["name"])
        for r in found
    ]
    assert sorted(read) == sorted(expected)

    table = list(csv.DictReader(lines[cut:]))
    sums = sorted((r["label"], int(r["n"]), Decimal(r["total"])) for r in table)
    assert sums == sorted(from_duckdb(folder, BY_REGION))

    errors = [line for line in done.stderr.splitlines() if line.startswith("error")]
    assert len(errors) == 1
    assert "error [ANALYSIS]" in errors[0]
    assert "`id` cannot be resolved" in errors[0]
    assert "Traceback" not in done.stderr
    assert not (folder / "checkpoint").exists(), "the pipeline's own checkpoint is not touched"


class Terminal:
    """`plait sql` on a terminal of its own."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        self.master, slave = pty.openpty()
        command = [sys.executable, "-c", "from plait.serve.cli import main; main()", "sql", *arguments]
        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=os.environ | {"TERM": "dumb", "COLUMNS": "120"} | environment,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(slave)
        self.text = ""

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def until(self, expected: str, seconds: float = 240) -> str:
        """What is shown up to a text (a regular expression); what follows is left for the next time."""
        deadline = time.monotonic() + seconds
        while (found := re.search(expected, self.text)) is None:
            assert time.monotonic() < deadline, f"no {expected!r} in {self.text!r}"
            if select.select([self.master], [], [], 0.2)[0]:
                try:
                    self.text += os.read(self.master, 1 << 16).decode(errors="replace").replace("\r", "")
                except OSError:  # the other end is closed
                    assert re.search(expected, self.text), f"no {expected!r} in {self.text!r}"
        before, self.text = self.text[: found.end()], self.text[found.end() :]
        return before

    def interrupt_until(self, expected: str) -> str:
        """Press Ctrl-C until a text is shown.

        A signal between Python's look at its signals and readline's select() is only seen with the next key or signal:
        a user presses again, and so does this.
        """
        for _ in range(60):
            self.type("\x03")
            try:
                return self.until(expected, seconds=4)
            except AssertionError:
                continue
        raise AssertionError(f"no {expected!r} in {self.text!r}")

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, 9)
        self.process.wait()
        os.close(self.master)


@pytest.fixture
def terminal(pipeline: Path, tmp_path: Path) -> Iterator[Terminal]:
    opened = Terminal(str(pipeline), "--run", XDG_STATE_HOME=str(tmp_path / "state"))
    yield opened
    opened.close()


@pytest.mark.spark
def test_a_session_at_the_prompt(terminal: Terminal, pipeline: Path, tmp_path: Path) -> None:
    terminal.until("The pipeline runs")
    terminal.until("queries: named\n")
    terminal.until("plait> ")
    terminal.type("WAIT\n")
    terminal.until("plait> ")
    terminal.type("SHOW QUERIES\n")
    assert re.search(r"named +append +ended +2 +23 +15 ", terminal.until("plait> "))
    terminal.type("SELECT count(*) AS n\nFROM named WHERE name IS NOT NULL;\n")
    assert re.search(r"\n +n +\n[ ─]+\n +10 +\n", terminal.until("1 row\n"))

    terminal.until("plait> ")
    terminal.type("SELECT nonsense ")
    terminal.until("nonsense ")
    terminal.interrupt_until("plait> ")
    terminal.type("SELECT wrong FROM orders;\n")
    terminal.until(r"error \[UNKNOWN_COLUMN\] no column is called wrong")

    terminal.until("plait> ")
    terminal.type("\\follow\n")
    terminal.until("plait> ")
    terminal.type("SELECT count(*) AS n FROM orders JOIN customers ON customer = customers.id;\n")
    terminal.until("epoch 1\n")
    assert re.search(r"\n +15 +\n", terminal.until("1 row\n"))
    write_orders(tmp_path, 2, [20, 21, 22])
    terminal.until("epoch 2\n")
    assert re.search(r"\n +18 +\n", terminal.until("1 row\n"))
    java = [p for p in psutil.Process(terminal.process.pid).children(recursive=True) if p.name() == "java"]
    assert java
    terminal.type("\x03")
    terminal.until("Stopped following")

    terminal.until("plait> ")
    terminal.type("sel\t")  # Tab completes keywords in the case begun, and names
    terminal.until("select")
    terminal.type(" id from custo\t")
    terminal.until("custo\x07mer")  # and rings, since several names begin so
    terminal.type("\x15SELECT 6 * 7 AS answer;\n")  # Ctrl-U gives the line up
    terminal.until("\n +42 +\n")
    terminal.until("plait> ")
    terminal.type("\\q\n")
    assert terminal.process.wait(60) == 0
    psutil.wait_procs(java, timeout=10)
    assert not [p for p in java if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    typed = (tmp_path / "state" / "plait" / "sql_history").read_text().splitlines()
    assert "SELECT count(*) AS n FROM named WHERE name IS NOT NULL;" in typed
