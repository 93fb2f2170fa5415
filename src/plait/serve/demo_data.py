"""Four drifting streams shaped like those of the papers' TPC-DS query, made with numpy: nothing is downloaded.

Each epoch is one Parquet file per stream.  Two things drift: the share of the rows each stream gets (returns come in
waves, customers fade), and the addresses they speak of (a window that slides over all addresses).  The same seed
gives the same files.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

STREAMS: dict[str, tuple[str, tuple[str, ...]]] = {
    "store_returns": ("sr_addr_sk", ("sr_item_sk", "sr_ticket_number")),
    "customer": ("c_current_addr_sk", ("c_customer_sk",)),
    "web_returns": ("wr_refunded_addr_sk", ("wr_item_sk", "wr_order_number")),
    "catalog_returns": ("cr_refunded_addr_sk", ("cr_item_sk", "cr_order_number")),
}
"""Stream → its address column, its other columns."""

SHARES = (0.48, 0.17, 0.12, 0.23)
"""Of all rows, on average; about TPC-DS's."""

ITEMS = 18_000
CATEGORIES = ("Books", "Electronics", "Home", "Music", "Sports")

QUERY = """
SELECT cu.c_customer_sk, wr.wr_item_sk, cr.cr_item_sk, sr.sr_item_sk
FROM store_returns sr, customer cu, web_returns wr, catalog_returns cr
WHERE cu.c_current_addr_sk = cr.cr_refunded_addr_sk
  AND cu.c_current_addr_sk = sr.sr_addr_sk
  AND cu.c_current_addr_sk = wr.wr_refunded_addr_sk
"""


def write_streams(folder: Path, epochs: int, rows: int, seed: int) -> None:
    """Write `rows` rows in all, as `folder`/STREAM/EPOCH.parquet."""
    random = np.random.default_rng(seed)
    for epoch in range(epochs):
        now = epoch / max(epochs - 1, 1)
        for (name, (key, others)), count in zip(STREAMS.items(), rows_of_epoch(now, rows // epochs), strict=True):
            columns = {key: addresses(random, now, count, rows // 8)}
            columns |= {other: random.integers(1, ITEMS, count) for other in others}
            file = folder / name / f"{epoch:04}.parquet"
            file.parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(pa.table(columns), file)
            # Spark's file source reads in order of modification time.
            os.utime(file, (1_700_000_000 + epoch, 1_700_000_000 + epoch))


def write_items(folder: Path) -> None:
    """Write a table of the items that the streams speak of, as `folder`/item/0.parquet."""
    items = np.arange(1, ITEMS)
    columns = {"i_item_sk": items, "i_category": [CATEGORIES[item % len(CATEGORIES)] for item in items]}
    (folder / "item").mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), folder / "item" / "0.parquet")


def rows_of_epoch(now: float, rows: int) -> tuple[int, ...]:
    """Rows per stream at time `now` in [0, 1]: the catalogue grows, the stores shrink, the web comes in a wave.

    >>> rows_of_epoch(0.0, 1000), rows_of_epoch(1.0, 1000)
    ((575, 188, 66, 169), (352, 166, 88, 393))
    """
    drift = np.array([1.3 - 0.7 * now, 1.2 - 0.4 * now, 0.6 + 0.8 * np.sin(np.pi * now) ** 2, 0.8 + 0.6 * now])
    share = np.array(SHARES) * drift
    return tuple(int(n) for n in share / share.sum() * rows)


def addresses(random: np.random.Generator, now: float, count: int, total: int) -> np.ndarray:
    """Address keys: most from a window over half of all addresses that slides with time, some from anywhere."""
    recent = random.integers(0, total // 2 + 1, count) + int(now * (total // 2))
    anywhere = random.integers(0, total + 1, count)
    return np.where(random.random(count) < 0.7, recent, anywhere) + 1
