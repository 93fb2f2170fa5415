"""Part `backends` of the benchmark `state`: one operator, three ways of keeping its state, in one process each.

`runs`    Plait's own: sorted runs on disk
`memory`  sorted runs in this process's memory, never on disk: paper 002's MultiStream setting
`rocksdb` RocksDB, through rocksdict: key → all rows of the key, read and rewritten as rows are added

The query is the papers' with all columns that are numbers, as bigint, run by `LocalEngine`: the engine's own tasks
without Spark, so that nothing but the state differs.  A row is 8 bytes per column for RocksDB, which is the best case
for it; its lookups are batched (`multi_get`), its block cache and memtables have half of the memory for the state,
the values it has found most of the rest, and it writes no log.

All three get the same limit: the *base*, and on top a share of the state.  The base is what the process holds with
`runs` apart from state: the peak of its memory without page cache over all epochs of a run that nothing limits.
"""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from benchmarks.jobs import Progress
from benchmarks.state.backend_state import MemoryWork, RocksWork
from benchmarks.state.trial import Trial, run_trial
from benchmarks.tpcds import data
from benchmarks.tpcds.workloads import FOUR, Workload
from benchmarks.without_spark import QUERY, bigint_relations, join_graph, local_engine
from plait.config import Config
from plait.query.expr import ColumnRef
from plait.query.graph import JoinGraph
from plait.runtime.task.join_task import Work
from plait.share.planner import Planner

if TYPE_CHECKING:
    from rich.console import Console

    from benchmarks.state.benchmark import Setup

BACKENDS = ("runs", "memory", "rocksdb")
RATIOS = (None, 1.0, 0.5, 0.25)
"""Memory for the state, as shares of its size; None is no limit."""
PATIENCE = 4.0
"""A backend is stopped when it has taken this many times as long as Plait's runs under the same limit."""
LEAST_PATIENCE_SECONDS = 60.0
CONFIG: dict[str, Any] = {"memory_limit": "128m", "chunk_rows": 1 << 14}
"""Plait's buffers are the same in all runs."""
SLACK = 32 << 20


def _prefixed(prefix: str, names: str) -> tuple[str, ...]:
    return tuple(f"{prefix}_{name}" for name in names.split())


_MONEY = "return_tax return_amt_inc_tax fee return_ship_cost refunded_cash reversed_charge net_loss"
_WHO = "refunded_customer_sk refunded_cdemo_sk refunded_hdemo_sk returning_customer_sk returning_cdemo_sk"
_MORE = "returning_hdemo_sk returning_addr_sk reason_sk order_number return_quantity item_sk returned_date_sk"
NUMBERS = Workload(
    "numbers",
    "TPC-DS returns by address, all columns that are numbers",
    FOUR.sql,
    {
        "store_returns": _prefixed(
            "sr",
            "addr_sk item_sk returned_date_sk return_time_sk customer_sk cdemo_sk hdemo_sk store_sk reason_sk "
            f"ticket_number return_quantity return_amt store_credit {_MONEY}",
        ),
        "customer": _prefixed(
            "c",
            "current_addr_sk customer_sk current_cdemo_sk current_hdemo_sk first_shipto_date_sk first_sales_date_sk "
            "birth_day birth_month birth_year last_review_date_sk",
        ),
        "web_returns": _prefixed(
            "wr",
            f"refunded_addr_sk returned_time_sk web_page_sk return_amt account_credit {_WHO} {_MORE} {_MONEY}",
        ),
        "catalog_returns": _prefixed(
            "cr",
            "refunded_addr_sk returned_time_sk call_center_sk catalog_page_sk ship_mode_sk warehouse_sk return_amount "
            f"store_credit {_WHO} {_MORE} {_MONEY}",
        ),
    },
)
"""The first column of a table is its key."""


@dataclass(frozen=True, slots=True)
class BackendJob:
    """One run of the backend `who`, whose state may use `memory` bytes."""

    who: str
    data: str
    memory: int | None = None
    config: dict[str, Any] = field(default_factory=CONFIG.copy)
    """Fields of `plait.Config`."""


def graph() -> JoinGraph:
    """The papers' query, which selects all columns of NUMBERS."""
    aliases = {table: (table, columns) for table, columns in NUMBERS.columns.items()}
    selected = [ColumnRef(table, column, "bigint") for table, columns in NUMBERS.columns.items() for column in columns]
    return join_graph(NUMBERS.sql, aliases, "customer", [(column.column, column) for column in selected])


def as_numbers(rows: pa.Table) -> pa.Table:
    """All columns as bigint: money in cents, NULL as -1, but for the key, which stays NULL."""
    made = {}
    for place, name in enumerate(rows.column_names):
        column = rows.column(name)
        if pa.types.is_decimal(column.type):
            column = pc.round(pc.multiply(column.cast(pa.float64()), 100.0))
        column = column.cast(pa.int64())
        made[name] = column if place == 0 else pc.fill_null(column, -1)
    return pa.table(made)


def backends(out: Path, setup: Setup, console: Console) -> dict[str, Any]:
    """Run each backend under each limit; `equal` if all that finished gave the same and `runs` always finished."""
    folder = data.ensure(NUMBERS, out / "data", setup.sf, setup.epochs)
    runs: list[dict[str, Any]] = []
    base = state = 0
    for ratio in RATIOS[:2] if setup.quick else RATIOS:
        patience = None
        for backend in BACKENDS:
            memory = None if ratio is None else int(state * ratio)
            limit = None if memory is None else base + memory
            job = BackendJob(backend, str(folder), memory)
            found = run_trial(run_backend, job, limit, out / "scratch", patience=patience)
            if backend == "runs":
                patience = max(LEAST_PATIENCE_SECONDS, PATIENCE * found.wall)
                if ratio is None:
                    base, state = found.peak_held + SLACK, found.state_bytes
            runs.append({"ratio": ratio, **asdict(found)})
            share = "ample" if ratio is None else f"{ratio:g} of the state"
            console.print(f"  {backend}, {share}: {_told(found, setup.epochs)}", highlight=False, soft_wrap=True)
    ended = [run for run in runs if run["outcome"] == "finished"]
    return {
        "part": "backends",
        "title": f"Ways of keeping state: {NUMBERS.title}",
        "base": base,
        "state_bytes": state,
        "patience": PATIENCE,
        "runs": runs,
        "equal": len({run["rows"] for run in ended}) == 1 and sum(r["who"] == "runs" for r in ended) * 3 == len(runs),
    }


def _told(found: Trial, epochs: int) -> str:
    limit = "none" if found.limit is None else f"{found.limit >> 20:,} MiB"
    return (
        f"{found.outcome} after {len(found.epochs)} of {epochs} epochs, {found.seconds:.1f} s, limit {limit}, "
        f"holds {found.peak_held >> 20:,} MiB, "
        f"disk {found.read_bytes >> 20:,} MiB read, {found.written_bytes >> 20:,} written"
    )


def run_backend(job: BackendJob, work: Path) -> dict[str, float]:
    """Run the query with its state in one of the backends; its seconds are the engine's, without reading the input."""
    config = Config(tasks=1, sync=False, history=100_000, **job.config)
    RocksWork.directory, RocksWork.memory = str(work / "rocksdb"), job.memory
    (work / "rocksdb").mkdir()
    kind = {"runs": Work, "memory": MemoryWork, "rocksdb": RocksWork}[job.who]
    planner = Planner({QUERY: graph()}, bigint_relations(NUMBERS.columns), config)
    files = {t: sorted(Path(job.data, t).glob("*.parquet")) for t in NUMBERS.tables}
    with (
        closing(Progress(work)) as progress,
        local_engine(work, planner, replans=False, work=kind) as engine,
    ):
        seconds = 0.0
        for number in range(max(len(f) for f in files.values())):
            arrived = {t: as_numbers(pq.read_table(f[number])) for t, f in files.items() if number < len(f)}
            begun = time.perf_counter()
            engine.run(arrived)
            seconds += time.perf_counter() - begun
            report = engine.progress[-1]
            kept = {key: report[key] for key in ("epoch", "state_bytes", "task_seconds", "state") if key in report}
            progress.tell(kept | {"at": seconds, "rows_out": report["rows_out"][QUERY]})
    return {"seconds": seconds}
