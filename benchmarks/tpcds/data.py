"""Input of the benchmarks on TPC-DS: generated once, shuffled with a fixed seed, split into epochs.

DIR/data/tpcds-sf1/TABLE.parquet              all columns, from DuckDB's dsdgen
DIR/data/four-sf1-e20/TABLE/0007.parquet      the rows of one epoch
DIR/data/four-sf1-e20/warm/TABLE/0000.parquet the first rows again, for the warm-up run
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.epoch_files import SEED, complete, shuffled, write_epochs
from benchmarks.tpcds.workloads import CHAIN, COMPUTED, FIXED, ROWS_AT_SF1, TPCDS_TABLES, Workload

CHAIN_FAN_OUT = 2
FIXED_ROWS = 10
"""Rows per table and epoch when only the fixed cost is measured."""
WARM_ROWS, WARM_EPOCHS = 500, 2


def ensure(workload: Workload, folder: Path, sf: float, epochs: int) -> Path:
    """The folder with the epochs of a workload, made if it does not exist yet."""
    size = "" if workload is FIXED else f"-sf{sf:g}"
    target = folder / f"{workload.name}{size}-e{epochs}"
    if not target.exists():
        read = _reader(workload, folder, sf, epochs)
        with complete(target) as made:
            for number, (table, columns) in enumerate(workload.columns.items()):
                rows = shuffled(read(table, columns), number)
                write_epochs(rows, made / table, epochs)
                write_epochs(rows.slice(0, WARM_ROWS), made / "warm" / table, WARM_EPOCHS)
    return target


def count_results(workload: Workload, folder: Path) -> int:
    """The number of rows that the query gives over all epochs, by DuckDB."""
    import duckdb

    with duckdb.connect() as connection:
        for table in workload.tables:
            connection.execute(f"CREATE VIEW {table} AS FROM '{folder}/{table}/*.parquet'")
        row = connection.execute(f"SELECT count(*) FROM ({workload.sql})").fetchone()
    assert row is not None
    return int(row[0])


def _reader(workload: Workload, folder: Path, sf: float, epochs: int) -> Callable[[str, tuple[str, ...]], pa.Table]:
    if workload in (CHAIN, COMPUTED):
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
    """The folder with the four tables from DuckDB's TPC-DS extension, which makes all 24 and may spill to disk."""
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
    """The extension's file, which the wheel `duckdb-extension-tpcds` carries."""
    import duckdb_extension_tpcds

    return next(Path(duckdb_extension_tpcds.__file__).parent.rglob("tpcds.duckdb_extension"))
