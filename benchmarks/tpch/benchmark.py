"""`python -m benchmarks tpch`: whole SQL queries over streams, against Spark.

Plait and Spark take turns, each in a process of its own that runs all queries; medians over the rounds.  Answers after
the last epoch and after two in between must equal DuckDB's over the same files.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import jobs as race
from benchmarks.options import Options
from benchmarks.tpch import data as tpch_data
from benchmarks.tpch import report as tpch_report
from benchmarks.tpch.contestants import CONTESTANTS, TpchJob
from benchmarks.tpch.queries import QUERIES, SCHEMAS
from plait.errors import ConfigError

PAPER = (2, 3, 5, 7, 8, 9, 10, 11, 15, 18, 21)
"""The queries of paper 002, Table 3."""
_TOLERANCE = 1e-9


HEAP = "8g"


@dataclass(frozen=True, slots=True)
class Setup:
    """Options with every default filled in; `parts` are queries by number, or `all`."""

    sf: float
    epochs: int
    queries: tuple[int, ...]
    who: tuple[str, ...]
    repeat: int
    memory: str

    @property
    def checked(self) -> tuple[int, ...]:
        """The epochs after which answers are compared."""
        return tuple(sorted({self.epochs // 3, 2 * self.epochs // 3, self.epochs - 1}))


def settle(options: Options) -> Setup:
    """Fill in the defaults.

    >>> settle(Options(parts=("3", "5"))).queries, settle(Options(quick=True)).sf
    ((3, 5), 0.01)
    """
    sf = options.sf or (0.01 if options.quick else 0.1)
    if not 0.001 <= sf <= 100:
        raise ConfigError("BENCH_SF", f"scale factor {sf:g} is out of range", "give a number from 0.001 to 100")
    named = [str(n) for n in QUERIES] if "all" in options.parts else options.parts
    for part in named:
        if not part.isdigit() or int(part) not in QUERIES:
            raise ConfigError("BENCH_NAME", f"TPC-H has no query {part!r}", "give numbers from 1 to 22, or all")
    for who in options.who:
        if who not in CONTESTANTS:
            raise ConfigError("BENCH_NAME", f"there is no contestant {who!r}", f"use {', '.join(CONTESTANTS)}")
    return Setup(
        sf=sf,
        epochs=options.epochs or (3 if options.quick else 10),
        queries=tuple(map(int, named)) or ((3, 11) if options.quick else PAPER),
        who=options.who or ("plait", "spark"),
        repeat=options.repeat or (1 if options.quick else 3),
        memory=options.memory or HEAP,
    )


def run(out: Path, options: Options, console: Console) -> int:
    """Run it, write tpch.json, tpch.md and tpch.png into `out`; 0 if all answers are right."""
    setup = settle(options)
    # Being told to end must end the contestants too: SystemExit runs the clean-up.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    folder = tpch_data.ensure(out / "data", setup.sf, setup.epochs)
    expected = {query: expected_answers(folder, query, setup.checked) for query in setup.queries}
    runs: dict[int, dict[str, list[dict[str, Any]]]] = {q: {who: [] for who in setup.who} for q in setup.queries}
    for number in range(setup.repeat):
        for who in setup.who:
            console.print(f"  round {number + 1}: {who} …", highlight=False)
            found = _contest(
                TpchJob(who, setup.queries, str(folder), "", setup.epochs, setup.memory, setup.checked), out
            )
            for query in setup.queries:
                mine = found[str(query)]
                mine["equal"] = all(
                    same_rows(mine["answers"].get(str(epoch)), rows) for epoch, rows in expected[query].items()
                )
                del mine["answers"]
                runs[query][who].append(mine)
                said = "" if mine["equal"] else ", NOT EQUAL to DuckDB's answer"
                console.print(f"    Q{query}: {mine['seconds']:.1f} s{said}", highlight=False)
    rows_in = sum(_count(folder, table, setup.epochs) for table in SCHEMAS)
    document = {
        "benchmark": "tpch",
        "machine": race.machine(),
        "setup": asdict(setup) | {"checked": setup.checked},
        "rows": {str(q): _rows_read(q, folder, setup.epochs) for q in setup.queries},
        "rows_in": rows_in,
        "queries": {str(q): {who: _summary(r) for who, r in of.items()} for q, of in runs.items()},
    }
    console.print(tpch_report.write(document, out), markup=False, highlight=False)
    return 0 if all(r["equal"] for of in runs.values() for all_runs in of.values() for r in all_runs) else 1


def _summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    middle = statistics.median_low([run["seconds"] for run in runs])
    chosen = next(run for run in runs if run["seconds"] == middle)
    return {
        "seconds": middle,
        "all_seconds": [run["seconds"] for run in runs],
        "epochs": chosen["epochs"],
        "parts": chosen["parts"],
        "how": chosen["how"],
        "equal": all(run["equal"] for run in runs),
    }


def _contest(job: TpchJob, out: Path) -> dict[str, Any]:
    scratch = out / "scratch"
    scratch.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f"tpch-{job.who}-", dir=scratch))
    try:
        (work / "job.json").write_text(json.dumps(asdict(job) | {"work": str(work)}))
        path = os.pathsep.join(filter(None, [str(race.SOURCE), os.environ.get("PYTHONPATH")]))
        environment = os.environ | {"PYSPARK_PYTHON": sys.executable, "PYTHONPATH": path}
        command = [sys.executable, "-m", "benchmarks.tpch.contestants", str(work / "job.json")]
        with (work / "log.txt").open("wb") as said:
            process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, env=environment, cwd=work)
            try:
                process.wait()
            finally:
                race.end(process)
        if process.returncode != 0:
            raise ConfigError("BENCH_RUN", race.last_words(work / "log.txt", process.returncode), "see the message")
        found: dict[str, Any] = json.loads((work / "result.json").read_text())
        return found
    finally:
        shutil.rmtree(work, ignore_errors=True)


def expected_answers(folder: Path, query: int, epochs: tuple[int, ...]) -> dict[int, list[tuple[Any, ...]]]:
    """DuckDB's answers after some epochs."""
    import duckdb

    found = {}
    for epoch in epochs:
        with duckdb.connect() as connection:
            for table in SCHEMAS:
                files = tpch_data.prefix(folder, table, epoch)
                connection.execute(f"CREATE VIEW {table} AS SELECT * FROM read_parquet({files})")
            found[epoch] = connection.execute(QUERIES[query]).fetchall()
    return found


def same_rows(found: list[list[Any]] | None, expected: list[tuple[Any, ...]]) -> bool:
    """Whether two answers are the same, up to the order of rows and the last digits of averages.

    >>> same_rows([["b", "2.00"], ["a", None]], [("a", None), ("b", 2.0)])
    True
    """
    if found is None or len(found) != len(expected):
        return False
    mine, theirs = (sorted(([_plain(v) for v in row] for row in rows), key=str) for rows in (found, expected))
    return all(_same(a, b) for one, other in zip(mine, theirs, strict=True) for a, b in zip(one, other, strict=True))


def _plain(value: Any) -> Any:
    """Numbers as floats, whatever their type was before JSON; everything else as text."""
    if value is None:
        return None
    try:
        return round(float(value), 6)
    except (TypeError, ValueError):
        return str(value)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= max(_TOLERANCE * abs(one), 2e-6)
    return bool(one == other)


def _count(folder: Path, table: str, epochs: int) -> int:
    import pyarrow.parquet as pq

    return sum(pq.read_metadata(file).num_rows for file in tpch_data.prefix(folder, table, epochs - 1))


def _rows_read(query: int, folder: Path, epochs: int) -> int:
    """Rows of the tables that a query names."""
    text = QUERIES[query].lower()
    words = set("".join(c if c.isalnum() or c == "_" else " " for c in text).split())
    return sum(_count(folder, table, epochs) for table in SCHEMAS if table in words)
