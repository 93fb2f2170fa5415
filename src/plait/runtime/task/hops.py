"""What runs inside Spark's tasks: the first hop appends and probes, later hops probe.

All are plain functions from record batches to record batches (`exchange.SCHEMA`), made for one epoch from a frozen
`EpochTask`; the work itself is `join_task.py`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import pyarrow as pa
from pyspark import TaskContext

from plait.runtime.faults import reached
from plait.runtime.task.epoch_task import EpochTask
from plait.runtime.task.exchange import Inbox
from plait.runtime.task.join_task import Work

TaskFunction = Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]


def first_hop(context: EpochTask, task: int | None = None, kind: type[Work] | None = None) -> TaskFunction:
    """Append every bucket to its store, then probe with it, then merge what the plan gave this task to merge.

    Spark says which `task` this is, unless the caller does.  Another `kind` of work keeps state in another way
    (`python -m benchmarks state` compares).
    """

    def run(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with _abandoning((kind or Work)(context, _task_number() if task is None else task)) as work:
            yield from _first(work, work.received(batches))

    return run


def later_hop(context: EpochTask, hop: int, task: int | None = None) -> TaskFunction:
    """Probe with the tuples that travelled here; the descriptors among them name this epoch's new segments."""

    def run(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with _abandoning(Work(context, _task_number() if task is None else task)) as work:
            inbox = Inbox.read(batches, work.inbox_bytes)
            work.forward(inbox.notes)
            for _ in work.probe_arrived(inbox, hop):
                yield from work.outbox.batches()
            yield from work.finish()
            reached("task.hop", context.epoch)

    return run


def every_hop(context: EpochTask, task: int | None = None) -> TaskFunction:
    """All hops one after the other, for an epoch of one task: what would travel is there already."""

    def run(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        number = _task_number() if task is None else task
        with _abandoning(Work(context, number)) as work:
            inbox = work.received(batches)
            if inbox.count(work.inbox_bytes) == 1:
                yield from _all_here(work, inbox)
                return
            # A later hop probes what all slices have appended, not only what the last one did: as if it had travelled.
            rows = _first(work, inbox)
            for hop in range(2, context.plan.hops + 1):
                rows = later_hop(context, hop, number)(rows)
            yield from rows

    return run


def _first(work: Work, inbox: Inbox) -> Iterator[pa.RecordBatch]:
    work.forward(inbox.notes)
    for _ in work.append_and_probe(inbox):
        yield from work.outbox.batches()
    work.keep_up()
    yield from work.finish()
    reached("task.end", work.context.epoch)


def _all_here(work: Work, inbox: Inbox) -> Iterator[pa.RecordBatch]:
    """What has been appended is still in memory, and tuples go to their next hop as they are."""
    work.prober.sees_all = True
    work.forward(inbox.notes)
    for _ in work.append_and_probe(inbox):
        pass
    work.keep_up()
    for hop in range(2, work.context.plan.hops + 1):
        for _ in work.probe_arrived(work.outbox.delivered(), hop):
            pass
        reached("task.hop", work.context.epoch)
    yield from work.finish()
    reached("task.end", work.context.epoch)


@contextmanager
def _abandoning(work: Work) -> Iterator[Work]:
    """A task that fails removes the result files it has begun: they would only fill the disk further."""
    try:
        yield work
    except Exception:
        work.results.abandon()
        raise
    finally:
        work.pen.shutdown(cancel_futures=True)


def _task_number() -> int:
    context = TaskContext.get()
    assert context is not None, "runs inside a Spark task"
    return context.partitionId()
