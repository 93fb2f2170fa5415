"""Measures shared execution without Spark: seconds of tasks, counted work and bytes of state, by `Config.sharing`.

Everything runs in this process through the engine's own tasks, state and commit (`LocalEngine`), in one task, with
results dropped.  Every query's number of results must be DuckDB's.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.epoch_files import epoch_file
from benchmarks.sharing.workload import SharingQuery, relations, tables_of, used_columns
from benchmarks.without_spark import rewired_engine
from plait.config import Config
from plait.testing import Clock


@dataclass(slots=True)
class Local:
    """One engine over all epochs."""

    sharing: str
    epochs: list[float] = field(default_factory=list)
    """Seconds of each."""
    cpu: float = 0.0
    """Processor seconds of all epochs, planning included: they do not depend on what else the machine does."""
    tasks: dict[str, float] = field(default_factory=dict)
    """Seconds of what tasks do, by its name."""
    lookups: int = 0
    rows: int = 0
    """Rows found."""
    tuples: int = 0
    state_rows: int = 0
    state_bytes: int = 0
    stores: dict[str, int] = field(default_factory=dict)
    """Rows at rest, by store."""
    mirs: list[str] = field(default_factory=list)
    """Intermediate results that are kept at the end."""
    said: list[str] = field(default_factory=list)
    """What the optimiser said, once each."""
    rows_out: dict[str, int] = field(default_factory=dict)


def arrivals(folder: Path, tables: tuple[str, ...], epoch: int) -> dict[str, pa.Table]:
    """The rows of an epoch, with the columns that are used."""
    return {
        table: pq.read_table(epoch_file(folder / table, epoch), columns=list(used_columns(table))) for table in tables
    }


def local(scratch: Path, asked: list[SharingQuery], folder: Path, epochs: int, sharing: str, **settings: Any) -> Local:
    """Run the queries in one engine."""
    tables = tables_of(asked)
    config = Config(tasks=1, sync=False, sharing=sharing, history=max(128, epochs + 8), **settings)
    found, results, tasks = Local(sharing), Counter[str](), Counter[str]()
    graphs = {query.name: query.graph for query in asked}
    with rewired_engine(scratch, graphs, relations(tables), config, Clock()) as engine:
        for epoch in range(epochs):
            arrived = arrivals(folder, tables, epoch)
            begun, worked = time.perf_counter(), time.process_time()
            engine.run(arrived)
            found.epochs.append(time.perf_counter() - begun)
            found.cpu += time.process_time() - worked
        for progress in engine.progress:
            results.update(progress["rows_out"])
            tasks.update(progress["task_seconds"])
            for count in progress["edges"].values():
                found.lookups += count["lookups"]
                found.rows += count["rows"]
                found.tuples += count["tuples"]
        last = engine.progress[-1]
        found.state_rows, found.state_bytes = last["state_rows"], last["state_bytes"]
        found.stores = {store: sum(i.rows for i in infos) for store, infos in engine.live.segments.items()}
        found.mirs = [store.id for store in engine.plan.stores if store.mir is not None]
        found.said = list(dict.fromkeys(progress["optimiser"]["said"] for progress in engine.progress))
    found.rows_out, found.tasks = dict(results), dict(tasks)
    return found
