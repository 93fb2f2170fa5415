"""Input data: generated once, shuffled with a fixed seed, split into epochs, kept in DIR/data.

    DIR/data/tpcds-sf1/TABLE.parquet              what DuckDB's dsdgen gives, all columns
    DIR/data/four-sf1-e20/TABLE/0007.parquet      the rows of one epoch
    DIR/data/four-sf1-e20/warm/TABLE/0000.parquet the first rows again, for the warm-up run

A folder appears under its name only when it is complete, so an interrupted run leaves nothing half made.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.tpcds.workloads import CHAIN, FIXED, ROWS_AT_SF1, TPCDS_TABLES, Workload

SEED = 20_260
CHAIN_FAN_OUT = 2
FIXED_ROWS = 10
"""Rows per table and epoch when only the fixed cost is measured."""
WARM_ROWS, WARM_EPOCHS = 500, 2


def ensure(workload: Workload, folder: Path, sf: float, epochs: int) -> Path:
    """The folder with this workload's epochs, made if it is not there."""
    size = "" if workload is FIXED else f"-sf{sf:g}"
    target = folder / f"{workload.name}{size}-e{epochs}"
    if not target.exists():
        read = _reader(workload, folder, sf, epochs)
        with complete(target) as made:
            for number, (table, columns) in enumerate(workload.columns.items()):
                rows = read(table, columns)
                shuffled = rows.take(pa.array(np.random.default_rng(SEED + number).permutation(len(rows))))
                write_epochs(shuffled, made / table, epochs)
                write_epochs(shuffled.slice(0, WARM_ROWS), made / "warm" / table, WARM_EPOCHS)
    return target


def write_epochs(rows: pa.Table, folder: Path, epochs: int) -> None:
    """Equal slices of `rows`, one file each."""
    folder.mkdir(parents=True)
    bounds = np.linspace(0, len(rows), epochs + 1).astype(int)
    for epoch, (low, high) in enumerate(pairwise(bounds)):
        file = folder / f"{epoch:04}.parquet"
        pq.write_table(rows.slice(low, high - low), file)
        # Spark's file source reads in order of modification time.
        os.utime(file, (1_700_000_000 + epoch, 1_700_000_000 + epoch))


def _reader(workload: Workload, folder: Path, sf: float, epochs: int) -> Callable[[str, tuple[str, ...]], pa.Table]:
    if workload is CHAIN:
        return lambda table, columns: _random_table(table, columns, int(ROWS_AT_SF1 * sf) // 4, CHAIN_FAN_OUT)
    if workload is FIXED:
        return lambda table, columns: _random_table(table, columns, FIXED_ROWS * epochs, 1)
    source = _tpcds(folder, sf)
    return lambda table, columns: pq.read_table(source / f"{table}.parquet", columns=list(columns) or None)


def _random_table(table: str, columns: tuple[str, ...], rows: int, fan_out: int) -> pa.Table:
    """Uniform keys, of which each occurs `fan_out` times on average; a payload column counts the rows."""
    random = np.random.default_rng([SEED, *table.encode()])
    keys = max(rows // fan_out, 1)
    *key_columns, payload = columns
    return pa.table({c: random.integers(0, keys, rows) for c in key_columns} | {payload: np.arange(rows)})


def _tpcds(folder: Path, sf: float) -> Path:
    """The four tables from DuckDB's TPC-DS extension.  It makes all 24 tables, so let it spill to disk."""
    target = folder / f"tpcds-sf{sf:g}"
    if not target.exists():
        import duckdb

        with complete(target) as made, duckdb.connect(str(made / "tpcds.duckdb")) as connection:
            connection.execute("SET memory_limit = '8GB'; SET threads = 2")
            connection.execute(f"LOAD '{_tpcds_extension()}'")
            connection.execute(f"CALL dsdgen(sf = {sf:g})")
            for table in TPCDS_TABLES:
                connection.execute(f"COPY {table} TO '{made / table}.parquet' (FORMAT parquet)")
            connection.close()
            for left in made.glob("tpcds.duckdb*"):
                left.unlink()
    return target


def _tpcds_extension() -> Path:
    """The wheel `duckdb-extension-tpcds` carries the extension as a file."""
    import duckdb_extension_tpcds

    return next(Path(duckdb_extension_tpcds.__file__).parent.rglob("tpcds.duckdb_extension"))


@contextmanager
def complete(target: Path) -> Iterator[Path]:
    """A folder that gets its name when it is finished."""
    making = target.with_name(f"{target.name}.making")
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir(parents=True)
    yield making
    making.rename(target)
