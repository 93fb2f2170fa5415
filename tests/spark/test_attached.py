"""`plait sql CHECKPOINT`: questions to an engine of another process, beside it."""

from __future__ import annotations

import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from rich.console import Console

from plait.attached import AttachedEngine
from plait.errors import PlaitError
from plait.serve.prompt.sql_attached import AttachedSession
from plait.serve.prompt.sql_printing import Printer, Settings
from plait.serve.prompt.sql_prompt import Interrupts
from plait.serve.prompt.sql_statements import parse
from tests.oracle import bag
from tests.spark.test_running_changes import JOIN, PACE, Shop, rows_of

pytestmark = pytest.mark.spark


class Asking:
    """A prompt, whose rows are JSON."""

    def __init__(self, spark: SparkSession, checkpoint: str) -> None:
        self.out, self.notes = io.StringIO(), io.StringIO()
        printer = Printer(spark, Settings("json"), Interrupts(), self.out, Console(file=self.notes, width=200))
        self.session = AttachedSession(checkpoint, printer)

    def __call__(self, text: str) -> list[dict[str, Any]]:
        self.out.seek(0)
        self.out.truncate()
        self.session.execute(parse(text))
        return [json.loads(line) for line in self.out.getvalue().splitlines() if line.startswith("{")]

    @property
    def printed(self) -> str:
        return self.out.getvalue()


def test_another_process_asks_explains_creates_and_drops(spark: SparkSession, tmp_path: Path) -> None:
    shop, path = Shop(spark, tmp_path), str(tmp_path / "checkpoint")
    counts = "SELECT a.k, count(*) AS n FROM a JOIN b ON a.k = b.k GROUP BY a.k"
    with shop.engine(keep="all") as engine:
        first = engine.query("first", JOIN)
        engine.query("counts", counts)
        engine.query("sent", JOIN).foreach_batch(lambda rows, epoch: None)
        run = engine.start(every=PACE)
        shop.arrived(run)
        ask = Asking(spark, path)
        listed = {q["name"]: q["status"] for q in ask("SHOW QUERIES")}
        assert listed == {"first": "live", "counts": "live", "sent": "live"}
        assert [s["columns"] for s in ask("SHOW STREAMS")] == ["k bigint, v bigint"] * 2
        assert ask("SHOW TABLES") == []
        assert ask("DESCRIBE counts") == [{"column": "k", "type": "bigint"}, {"column": "n", "type": "bigint"}]
        assert [e["epoch"] for e in ask("SHOW PROGRESS")] == [p["epoch"] for p in run.recent_progress][-10:]
        # What is committed by now, of rows and of answers.
        found = Counter((row["av"], row["bv"]) for row in ask("SELECT * FROM first"))
        assert found == shop.joined() == rows_of(first)
        (row,) = ask("SELECT sum(c.n) AS n, count(*) AS k FROM counts c JOIN (SELECT k FROM counts) d ON c.k = d.k")
        assert row == {"n": shop.joined().total(), "k": 3}
        ask("CREATE QUERY late SINCE 'state' AS " + JOIN)
        assert "late is live" in ask.notes.getvalue()
        shop.add(1)
        shop.arrived(run)
        (row,) = ask("SELECT count(*) AS n FROM late")
        assert row == {"n": shop.joined().total()}
        ask("EXPLAIN late")
        assert "Query late" in ask.printed
        assert "Query first" not in ask.printed
        ask("EXPLAIN SELECT a.v FROM a JOIN b ON a.v = b.v")
        assert "expected cost" in ask.printed
        assert [q.name for q in engine.queries()] == ["first", "counts", "sent", "late"]
        ask("CREATE OR REPLACE QUERY late AS " + JOIN + " WHERE a.v > 3")
        ask("DROP QUERY late")
        assert "late" not in {q["name"] for q in ask("SHOW QUERIES")}
        for text, code in (
            ("SELECT * FROM late", "NO_QUERY"),
            ("SELECT * FROM a", "STREAM_ELSEWHERE"),
            ("SELECT * FROM sent", "RESULTS_NOT_KEPT"),
            ("SELECT nothing FROM first", "ANALYSIS"),
            ("CREATE QUERY wrong AS SELECT nonsense", "UNKNOWN_COLUMN"),
            ("DROP QUERY nobody", "NO_QUERY"),
            ("START", "STATEMENT"),
        ):
            with pytest.raises(PlaitError) as caught:
                ask(text)
            assert caught.value.code == code, text
        run.stop()
    # Of an engine that does not run, all but changes.
    with pytest.raises(PlaitError, match="NOT_RUNNING"):
        ask("CREATE QUERY late AS " + JOIN)
    (row,) = ask("SELECT count(*) AS n FROM first")
    assert row == {"n": shop.joined().total()}
    assert bag(AttachedEngine(spark, path).results("first").toArrow()) == shop.joined()
