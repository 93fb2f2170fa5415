"""Input as one Parquet file per table and epoch, made once and kept.

    DIR/data/four-sf1-e20/TABLE/0007.parquet

A folder appears under its name only when it is complete, so an interrupted run leaves nothing half made.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

SEED = 20_260
START_SECONDS = 1_700_000_000


def shuffled(rows: pa.Table, number: int) -> pa.Table:
    """The rows in a random order that is always the same; `number` is the table's, so that each has its own order."""
    return rows.take(pa.array(np.random.default_rng(SEED + number).permutation(len(rows))))


def write_epochs(rows: pa.Table, folder: Path, epochs: int) -> None:
    """Write equal slices of `rows`, one file each."""
    folder.mkdir(parents=True)
    bounds = np.linspace(0, len(rows), epochs + 1).astype(int)
    for epoch, (low, high) in enumerate(pairwise(bounds)):
        file = epoch_file(folder, epoch)
        pq.write_table(rows.slice(low, high - low), file)
        date_by_epoch(file, epoch)


def epoch_file(folder: Path, epoch: int) -> Path:
    """The file of a table's folder that holds an epoch.

    >>> epoch_file(Path("orders"), 7).name
    '0007.parquet'
    """
    return folder / f"{epoch:04}.parquet"


def date_by_epoch(file: Path, epoch: int) -> None:
    """Set the modification time, by which Spark's file source orders what it reads."""
    os.utime(file, (START_SECONDS + epoch, START_SECONDS + epoch))


@contextmanager
def complete(target: Path) -> Iterator[Path]:
    """A new folder that gets its name when it is finished."""
    making = target.with_name(f"{target.name}.making")
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir(parents=True)
    yield making
    making.rename(target)
