"""The soak's input: orders, payments, shipments and returns, one file per stream and epoch, made while it is read.

Order numbers are even and count up.  The other streams name an order some time after it, `DELAY_EPOCHS` on average and
exponentially less often later, or (`OLD`) any order there ever was, or (`NEVER`) an odd number, which never comes: only
a filter can tell it without reading.  A row is integers, a time, a word out of few, and 100 to 200 bytes of random
printable text, which no block compression makes smaller than 0.82 of it.
What must come out is known without a join: an order with p payments, s shipments and r returns gives p·s·r rows.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.epoch_files import SEED, date_by_epoch, epoch_file
from benchmarks.tpcds.workloads import Workload

SOAK = Workload(
    "soak",
    "orders, payments, shipments and returns",
    """
SELECT o_id, o_customer, o_time, o_status, o_note, p_cents, p_time, p_method, p_note,
       s_weight, s_time, s_carrier, s_note, r_cents, r_time, r_reason, r_note
FROM orders, payments, shipments, returns
WHERE o_id = p_order AND o_id = s_order AND o_id = r_order
""",
    {
        "orders": ("o_id", "o_customer", "o_time", "o_status", "o_note"),
        "payments": ("p_order", "p_cents", "p_time", "p_method", "p_note"),
        "shipments": ("s_order", "s_weight", "s_time", "s_carrier", "s_note"),
        "returns": ("r_order", "r_cents", "r_time", "r_reason", "r_note"),
    },
)
SHARES = {"orders": 0.3, "payments": 0.3, "shipments": 0.25, "returns": 0.15}
"""Shares of an epoch's rows."""
WORDS = {
    "orders": ("new", "paid", "packed", "sent", "closed"),
    "payments": ("card", "transfer", "invoice", "cash"),
    "shipments": ("north express", "harbour freight", "blue post"),
    "returns": ("broken", "too late", "wrong size", "not wanted", "other"),
}
OLD, NEVER = 0.01, 0.10
DELAY_EPOCHS = 1.0
TEXT = (100, 200)
ROW_BYTES = 170
"""Bytes of state per row that the number of rows is chosen by: the least that compression can leave."""
START_MS, EPOCH_MS = 1_700_000_000_000, 60_000
_PRINTABLE = np.frombuffer(bytes(33 + b % 94 for b in range(256)), dtype=np.uint8)


@dataclass
class Feed:
    """Makes epochs in order, a few ahead of the reader, and removes files that have been read."""

    folder: Path
    rows: int
    """Number of rows of all streams per epoch."""
    epochs: int
    ahead: int = 6
    made: int = 0
    expected: list[int] = field(default_factory=list)
    """Rows that must have come out after each epoch, cumulative."""
    starved: int = 0
    """Number of times that the reader had read everything there was."""

    def __post_init__(self) -> None:
        self.size = {stream: max(int(self.rows * share), 1) for stream, share in SHARES.items()}
        most = self.size["orders"] * self.epochs
        self._seen = {stream: np.zeros(most, dtype=np.uint8) for stream in SHARES if stream != "orders"}
        self._removed = 0
        for stream in SHARES:
            (self.folder / stream).mkdir(parents=True, exist_ok=True)

    @property
    def total_rows(self) -> int:
        """Number of rows of all streams and epochs."""
        return sum(self.size.values()) * self.epochs

    def keep_ahead(self, read: dict[str, int]) -> None:
        """Make at most one epoch more and remove what has been read, given the number of rows read of each stream."""
        done = min((read.get(stream, 0) // size for stream, size in self.size.items()), default=0)
        if self.made < self.epochs and self.made < done + self.ahead:
            self.starved += done > 0 and self.made <= done
            self.make()
        # Spark may still have the newest file open.
        while self._removed < done - 2:
            for stream in SHARES:
                self._file(stream, self._removed).unlink(missing_ok=True)
            self._removed += 1

    def make(self) -> None:
        """Make the files of the next epoch; they get their names together, at the end."""
        epoch = self.made
        random = np.random.default_rng([SEED, epoch])
        keys = self._keys(random, epoch)
        made = []
        for stream in SHARES:
            part = self.folder / f".{stream}.making"
            pq.write_table(_rows(random, stream, keys[stream], epoch), part, compression="none", use_dictionary=False)
            date_by_epoch(part, epoch)
            made.append((part, self._file(stream, epoch)))
        for part, file in made:
            part.rename(file)
        self.expected.append(self._count(keys) + (self.expected[-1] if self.expected else 0))
        self.made += 1

    def remove(self) -> None:
        """Remove all files."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _file(self, stream: str, epoch: int) -> Path:
        return epoch_file(self.folder / stream, epoch)

    def _keys(self, random: np.random.Generator, epoch: int) -> dict[str, np.ndarray]:
        per_epoch = self.size["orders"]
        first, until = epoch * per_epoch, (epoch + 1) * per_epoch
        keys = {"orders": 2 * random.permutation(np.arange(first, until))}
        for stream in self._seen:
            size = self.size[stream]
            ago = random.exponential(DELAY_EPOCHS * per_epoch, size).astype(np.int64)
            chosen = until - 1 - ago % until
            kind = random.random(size)
            old, never = kind < OLD, kind > 1 - NEVER
            chosen[old] = random.integers(0, until, int(old.sum()))
            # Odd, among the even ones: no range tells them from orders.
            keys[stream] = 2 * chosen + never
        return keys

    def _count(self, keys: dict[str, np.ndarray]) -> int:
        """The number of results that this epoch adds; only orders that it names can have new ones."""
        real = {stream: keys[stream][keys[stream] % 2 == 0] // 2 for stream in self._seen}
        touched = np.unique(np.concatenate(list(real.values())))
        before = self._products(touched)
        for stream, named in real.items():
            # An order is named a handful of times: 8 bits are far from full.
            np.add.at(self._seen[stream], named, 1)
        return int((self._products(touched) - before).sum())

    def _products(self, orders: np.ndarray) -> np.ndarray:
        counts = [seen[orders].astype(np.int64) for seen in self._seen.values()]
        product: np.ndarray = counts[0] * counts[1] * counts[2]
        return product


def rows_for(state_bytes: float, epochs: int) -> int:
    """The number of rows per epoch with which the state ends at this size.

    >>> rows_for(17_000_000, 10)
    10000
    """
    return max(int(state_bytes / epochs / ROW_BYTES), 40)


def _rows(random: np.random.Generator, stream: str, keys: np.ndarray, epoch: int) -> pa.Table:
    size = len(keys)
    times = START_MS + epoch * EPOCH_MS + np.sort(random.integers(0, EPOCH_MS, size))
    words = pa.array(WORDS[stream]).take(pa.array(random.integers(0, len(WORDS[stream]), size)))
    columns = (
        pa.array(keys, pa.int64()),
        pa.array(random.integers(1, 1_000_000, size), pa.int64()),
        pa.array(times, pa.timestamp("ms", tz="UTC")).cast(pa.timestamp("us", tz="UTC")),
        words,
        _texts(random, size),
    )
    return pa.table(dict(zip(SOAK.columns[stream], columns, strict=True)))


def _texts(random: np.random.Generator, size: int) -> pa.Array:
    offsets = np.zeros(size + 1, dtype=np.int32)
    np.cumsum(random.integers(TEXT[0], TEXT[1] + 1, size), out=offsets[1:])
    letters = _PRINTABLE[random.integers(0, 256, int(offsets[-1]), dtype=np.uint8)]
    return pa.StringArray.from_buffers(size, pa.py_buffer(offsets), pa.py_buffer(letters))
