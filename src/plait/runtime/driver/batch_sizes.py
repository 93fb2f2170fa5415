"""How large the Arrow batches are in which Spark hands rows to Python.

Spark's limit in bytes costs a look at all columns after every row: a fifth of what a source task does for narrow rows,
and nothing beside the bytes of wide ones.  So an engine begins with the limit, reads sources without it after an epoch
of narrow rows only (then the limit in rows is enough), and with it again when they get wide: without it, 10,000 rows of
100 KB are a batch of 1 GB.  What tasks send to each other are buckets, few and large: those always come with the limit,
or a task would get all of them in one batch, which Java holds whole.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pyspark.sql import SparkSession

LIMIT = "spark.sql.execution.arrow.maxBytesPerBatch"
BATCH_BYTES = 16 << 20
UNLIMITED = 2**31 - 1
NARROW_BYTES = 1 << 10
"""Mean bytes of a row up to which the batches of sources are limited in rows only."""


@dataclass
class Batches:
    """The limit in the session of a streaming query, from one plan to the next."""

    row_bytes: float = math.inf
    """Mean bytes of the widest rows of the last epoch that had any."""
    _set: str | None = None
    """The value in force; another one than ours is left alone."""

    def for_sources(self, session: SparkSession) -> None:
        """Of what is planned next: rows of sources."""
        self._put(session, UNLIMITED if self.row_bytes <= NARROW_BYTES else BATCH_BYTES)

    def for_buckets(self, session: SparkSession) -> None:
        """Of what is planned next: buckets."""
        self._put(session, BATCH_BYTES)

    def saw(self, row_bytes: float) -> None:
        """How wide the rows of an epoch were; 0 if there were none."""
        self.row_bytes = row_bytes or self.row_bytes

    def _put(self, session: SparkSession, wanted: int) -> None:
        if self._set is None:
            self._set = session.conf.get(LIMIT, "") or ""
        if self._set != str(wanted) and self._set in (str(BATCH_BYTES), str(UNLIMITED)):
            session.conf.set(LIMIT, str(wanted))
            self._set = str(wanted)
