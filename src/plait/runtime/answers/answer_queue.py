"""Answers on their way to sinks while the next epoch is joined.

Contract.  At most one epoch's answers are under way: the next epoch commits only when they have arrived, receipts
included.  So a crash leaves at most those of the last committed epoch undelivered, and the next start hands them over
(`deliver.catch_up`).  What fails here fails the run.

Cost.  An answer is a Spark job of its own.  Beside the next epoch it costs its work, but not its time.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Behind:
    """One piece of work at a time, in one thread.  Spark's jobs from there are not those of the streaming query."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._work: Future[None] | None = None
        self.failed: Callable[[BaseException], None] = lambda _: None
        """Called once the work has failed: the next epoch may be far away."""

    @property
    def busy(self) -> bool:
        """Whether something is under way."""
        return self._work is not None and not self._work.done()

    def start(self, work: Callable[[], None]) -> None:
        """Begins with it; what was begun before must have been waited for."""
        assert not self.busy, "one epoch's answers at a time"
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="plait-answers")
        self._work = self._pool.submit(work)
        self._work.add_done_callback(self._ended)

    def _ended(self, work: Future[None]) -> None:
        """In the thread, when those who wait have been woken: they may be what the run's end waits for."""
        if (error := work.exception()) is not None:
            self.failed(error)

    def wait(self) -> None:
        """Until it is done.  Raises what it has raised, every time."""
        if self._work is not None:
            self._work.result()

    def close(self) -> None:
        """Waits, whatever comes of it, and lets the thread go."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)
            self._pool = None
