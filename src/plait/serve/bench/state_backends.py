"""Part `backends` of `plait bench state`: one operator, three ways of keeping its state, in one process each.

`runs`    Plait's own: sorted runs on disk
`memory`  sorted runs in this process's memory, never on disk: paper 002's MultiStream setting
`rocksdb` RocksDB, through rocksdict: key → all rows of the key, read and rewritten as rows are added

The query is the papers' (four columns, all bigint), run by `LocalEngine`: the engine's own tasks without Spark, so that
nothing but the state differs.  A row is 8 bytes per column for RocksDB, which is the best case for it; its lookups are
batched (`multi_get`), its memory is half of the limit, and it writes no log.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from plait.config import Config
from plait.kernels import I64, U64
from plait.query.plan import HASH, IngestEdge
from plait.runtime.hops import Span
from plait.runtime.sinks import Noop
from plait.runtime.task import Work
from plait.serve.bench import data
from plait.serve.bench.orders import graph, relations
from plait.serve.bench.state_cgroup import run_limited
from plait.serve.bench.workloads import FOUR
from plait.share.reoptimise import Planner
from plait.state.run import Found, MemoryRun, Run
from plait.testing import LocalEngine

if TYPE_CHECKING:
    from rich.console import Console

    from plait.serve.bench.state import Setup

BACKENDS = ("runs", "memory", "rocksdb")
RATIOS = (None, 1.0, 0.5, 0.25)
"""Memory for the state, as shares of what the state weighs; None is no limit."""
PATIENCE_SECONDS = 900.0
_SLACK = 16 << 20


@dataclass(frozen=True, slots=True)
class BackendJob:
    """One run; `memory` is what the state may use."""

    backend: str
    data: str
    work: str = ""
    memory: int | None = None
    epochs: int | None = None
    """None is all of them."""


class MemoryWork(Work):
    """State in the memory of this process: runs are merged when there are four of a size, as on disk."""

    held: dict[str, list[MemoryRun]] = {}  # noqa: RUF012 - the state itself, of the only engine in the process

    def append(self, edge: IngestEdge, table: pa.Table) -> None:
        """Keeps the rows."""
        if edge.store is not None:
            store = self.context.plan.store_by_id[edge.store]
            rows = table.select([c.name for c in store.columns])
            self.current.setdefault(store.id, []).append(MemoryRun(table.column(HASH).to_numpy(), rows))

    def runs_of(self, store: str, sees_current: bool, times: Span = (None, None)) -> list[Run]:
        """All runs, and this epoch's where the rank rule says so."""
        return [*self.held.get(store, []), *(self.current.get(store, []) if sees_current else [])]

    def merge(self) -> None:
        """This epoch's rows become part of the state."""
        from plait.kernels.runs import merge_order
        from plait.state.columns import take_table

        for store, runs in self.current.items():
            kept = self.held.setdefault(store, [])
            kept += [run for run in runs if isinstance(run, MemoryRun)]
            while len(kept) > 3 and len(kept[-4].hashes) < 4 * len(kept[-1].hashes):
                last, kept[-4:] = kept[-4:], []
                order = merge_order([run.hashes for run in last])
                table = take_table(pa.concat_tables([run.table for run in last]).combine_chunks(), order)
                kept.append(MemoryRun(np.concatenate([run.hashes for run in last])[order], table))


class RocksRun:
    """All rows of a store in RocksDB; those that were found lie in `_blobs`, numbered through."""

    first = 0

    def __init__(self, database: Any, columns: Sequence[str]) -> None:
        self._database, self._columns = database, list(columns)
        self._blobs: list[I64] = []
        self._starts = [0]

    @property
    def hashes(self) -> U64:
        """Not known: RocksDB is asked for keys, not walked through."""
        return np.empty(0, np.uint64)

    @property
    def width(self) -> float:
        """Bytes of a row."""
        return 8.0 * (1 + len(self._columns))

    def find(self, probes: U64) -> Found:
        """One batched lookup."""
        distinct, back = np.unique(probes, return_inverse=True)
        values = self._database.get(keys_of(distinct))
        counts = np.array([0 if v is None else len(v) // (8 * len(self._columns)) for v in values], np.int64)
        blob = np.frombuffer(b"".join(v for v in values if v is not None), np.int64).reshape(-1, len(self._columns))
        base = self._starts[-1]
        self._blobs.append(blob)
        self._starts.append(base + len(blob))
        ends = base + np.cumsum(counts)
        at = np.flatnonzero(counts[back] > 0)
        return Found(at, (ends - counts)[back[at]], ends[back[at]], len(probes), float(len(probes)))

    def announce(self, rows: I64) -> None:
        """They are here already."""

    def take(self, names: Sequence[str], rows: I64) -> list[pa.Array]:
        """Columns of rows that were found; all of one call are from one `find`."""
        if not len(rows):
            return [pa.array([], pa.int64()) for _ in names]
        which = int(np.searchsorted(self._starts, rows[0], side="right")) - 1
        found = self._blobs[which][rows - self._starts[which]]
        return [pa.array(np.ascontiguousarray(found[:, self._columns.index(name)])) for name in names]

    def slice(self, begin: int, end: int) -> pa.Table:
        """Merging is RocksDB's own affair."""
        raise NotImplementedError


class RocksWork(MemoryWork):
    """State in RocksDB, one database per store."""

    directory = ""
    memory: int | None = None
    databases: dict[str, Any] = {}  # noqa: RUF012 - open for as long as the only engine of the process

    def database(self, store: str) -> Any:
        """The database of a store."""
        if store not in self.databases:
            share = None if self.memory is None else self.memory // len(self.context.plan.stores)
            self.databases[store] = open_database(f"{self.directory}/{len(self.databases)}", share)
        return self.databases[store]

    def runs_of(self, store: str, sees_current: bool, times: Span = (None, None)) -> list[Run]:
        """The database, and this epoch's rows where the rank rule says so."""
        columns = [c.name for c in self.context.plan.store_by_id[store].columns]
        mine: list[Run] = [RocksRun(self.database(store), columns)]
        return [*mine, *(self.current.get(store, []) if sees_current else [])]

    def merge(self) -> None:
        """This epoch's rows are added to their keys."""
        from rocksdict import WriteBatch

        from plait.kernels.runs import group_starts

        for store, runs in self.current.items():
            database = self.database(store)
            for run in runs:
                assert isinstance(run, MemoryRun)
                bounds = group_starts(run.hashes)
                keys = keys_of(run.hashes[bounds[:-1]])
                rows = np.stack([c.to_numpy() for c in run.table.columns], axis=1).astype(np.int64).tobytes()
                width = 8 * run.table.num_columns
                batch = WriteBatch(raw_mode=True)
                for key, old, a, b in zip(
                    keys, database.get(keys), bounds[:-1].tolist(), bounds[1:].tolist(), strict=True
                ):
                    batch.put(key, (old or b"") + rows[a * width : b * width])
                database.write(batch)


def keys_of(hashes: U64) -> list[bytes]:
    """Hashes as RocksDB's keys."""
    text = hashes.astype(">u8").tobytes()
    return [text[i : i + 8] for i in range(0, len(text), 8)]


def open_database(path: str, memory: int | None) -> Any:
    """RocksDB as Flink sets it up: Bloom filters, a block cache, no log."""
    from rocksdict import BlockBasedOptions, Cache, Options, Rdict, WriteOptions

    options = Options(raw_mode=True)
    options.create_if_missing(True)
    table = BlockBasedOptions()
    table.set_bloom_filter(10, False)
    table.set_block_cache(Cache(memory // 2 if memory else 512 << 20))
    options.set_block_based_table_factory(table)
    options.set_write_buffer_size(max(1 << 20, memory // 4 if memory else 64 << 20))
    database = Rdict(path, options)
    writes = WriteOptions()
    writes.disable_wal = True  # type: ignore[method-assign,assignment]
    database.set_write_options(writes)
    return database


def backends(out: Path, setup: Setup, console: Console) -> dict[str, Any]:
    """Each way of keeping state under each limit."""
    folder = data.ensure(FOUR, out / "data", setup.sf, setup.epochs)
    runs: list[dict[str, Any]] = []
    weighs = 0
    # What a process needs before much state is there.
    base = _trial(BackendJob("runs", str(folder), epochs=2), 0, out / "scratch")["peak_held"] + _SLACK
    for ratio in RATIOS[:2] if setup.quick else RATIOS:
        for backend in BACKENDS:
            memory = None if ratio is None else int(weighs * ratio)
            found = _trial(BackendJob(backend, str(folder), memory=memory), base, out / "scratch")
            if ratio is None:
                weighs = max(weighs, found["state_bytes"] if backend == "runs" else 0)
            runs.append({"ratio": ratio, **found})
            said = found["outcome"] if found["outcome"] != "finished" else f"{found['seconds']:.1f} s"
            console.print(f"  {backend}, {'ample' if ratio is None else f'{ratio:g} of the state'}: {said}")
    rows = {run["rows"] for run in runs if run["outcome"] == "finished"}
    return {"part": "backends", "title": f"Ways of keeping state: {FOUR.title}", "runs": runs, "equal": len(rows) == 1}


def _trial(job: BackendJob, base: int, scratch: Path) -> dict[str, Any]:
    scratch.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f"backend-{job.backend}-", dir=scratch))
    try:
        (work / "job.json").write_text(json.dumps(asdict(job) | {"work": str(work)}))
        ended = run_limited(
            [sys.executable, "-m", __name__, str(work / "job.json")],
            None if job.memory is None else base + job.memory,
            work / "log.txt",
            cwd=work,
            patience=PATIENCE_SECONDS,
        )
        written = work / "result.json"
        finished = ended.code == 0 and written.exists()
        outcome = "finished" if finished else "killed" if ended.over_limit else "late" if ended.late else "failed"
        result = json.loads(written.read_text()) if finished else {"seconds": ended.seconds, "rows": 0}
        common = {"backend": job.backend, "outcome": outcome, "limit": ended.limit, "enforced": ended.enforced}
        common |= {"peak_bytes": ended.peak_bytes, "peak_held": ended.peak_held}
        return {**common, "failure": "" if finished else (work / "log.txt").read_text()[-500:], **result}
    finally:
        shutil.rmtree(work, ignore_errors=True)


def main(file: str) -> None:
    """Run the job in `file`."""
    import pyarrow.parquet as pq

    job = BackendJob(**json.loads(Path(file).read_text()))
    work = Path(job.work)
    config = Config(tasks=1, sync=False, history=100_000)
    RocksWork.directory, RocksWork.memory = str(work / "rocksdb"), None if job.memory is None else job.memory // 2
    (work / "rocksdb").mkdir()
    kind = {"runs": Work, "memory": MemoryWork, "rocksdb": RocksWork}[job.backend]
    planner = Planner({"q": graph("CuCrWrSr")}, relations(), config)
    files = {t: sorted(Path(job.data, t).glob("*.parquet")) for t in relations()}
    with LocalEngine(work / "checkpoint", planner.plan, config, work=kind) as engine:
        engine.driver.sinks = {"q": Noop()}
        seconds, rows = 0.0, 0
        for number in range(job.epochs or max(len(f) for f in files.values())):
            arrived = {t: pq.read_table(f[number]) for t, f in files.items() if number < len(f)}
            begun = time.perf_counter()
            engine.run(arrived)
            seconds += time.perf_counter() - begun
            rows += engine.driver.progress[-1]["rows_out"]["q"]
        state = engine.driver.progress[-1]["state_bytes"]
    result = {"seconds": seconds, "rows": rows, "state_bytes": state}
    (work / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1])
