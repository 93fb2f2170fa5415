"""TPC-H's tables: made by tpchgen-cli, shuffled with a fixed seed, split into epochs.

DIR/data/tpch-sf0.1/TABLE.parquet            as generated
DIR/data/tpch-sf0.1-e10/TABLE/0007.parquet   the rows of one epoch
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.epoch_files import complete, epoch_file, shuffled, write_epochs
from benchmarks.tpch.queries import SCHEMAS
from plait.errors import ConfigError

_ARROW = {"bigint": pa.int64(), "int": pa.int32(), "string": pa.string(), "date": pa.date32()}


def ensure(folder: Path, sf: float, epochs: int) -> Path:
    """The folder with the epochs, made if it does not exist yet."""
    target = folder / f"tpch-sf{sf:g}-e{epochs}"
    if not target.exists():
        made = _generated(folder, sf)
        with complete(target) as parts:
            for number, table in enumerate(SCHEMAS):
                rows = pq.read_table(made / f"{table}.parquet").cast(schema_of(table))
                write_epochs(shuffled(rows, number), parts / table, epochs)
    return target


def schema_of(table: str) -> pa.Schema:
    """The schema of a table in Arrow's types."""
    fields = [column.strip().split(" ", 1) for column in SCHEMAS[table].replace("(15,2)", "").split(",")]
    return pa.schema([(name, _ARROW.get(kind, pa.decimal128(15, 2))) for name, kind in fields])


def prefix(folder: Path, table: str, epoch: int) -> list[str]:
    """The files of a table up to and including an epoch."""
    return [str(epoch_file(folder / table, e)) for e in range(epoch + 1)]


def _generated(folder: Path, sf: float) -> Path:
    target = folder / f"tpch-sf{sf:g}"
    if not target.exists():
        beside = Path(sys.executable).parent / "tpchgen-cli"
        program = str(beside) if beside.exists() else shutil.which("tpchgen-cli")
        if program is None:
            raise ConfigError("BENCH_EXTRA", "tpchgen-cli is not installed", "pip install 'plait[bench]'")
        with complete(target) as made:
            command = [program, "parquet", "-s", f"{sf:g}", f"--output-dir={made}"]
            subprocess.run(command, check=True, capture_output=True)
    return target
