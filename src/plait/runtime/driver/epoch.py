"""A row's way: one micro-batch, from buckets to observed results, as one visible tuple of steps.

    source → bucketise → exchange → append to its store → probe by the plan, hop by hop → materialise
           → commit (manifest) → sinks → replan: the next epoch's catalog and plan → observe
                                 └──→ answers, while the next epoch is joined

Bucketising runs in the source's own tasks (runtime/task/bucketise.py, part of the streaming query); exchange, append,
probe and materialise are one Spark job, built by `join` (runtime/task/hops.py); the rest is the driver's.  What lives
from epoch to epoch is `driver.py`'s.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from pyspark.sql import DataFrame

from plait.errors import CheckpointError
from plait.runtime.driver.commit import commit
from plait.runtime.driver.deliver import arrive, deliver
from plait.runtime.driver.driver import Driver, Epoch
from plait.runtime.driver.feedback import observe, replan
from plait.runtime.driver.join import finish, join
from plait.runtime.driver.offsets import same_source
from plait.runtime.driver.prepare import prepare
from plait.runtime.driver.result_merge import merge_results
from plait.state.log.checkpoint import Checkpoint
from plait.state.log.manifest import Manifest

STEPS: tuple[Callable[[Epoch], None], ...] = (
    prepare,
    join,
    finish,
    merge_results,
    arrive,
    commit,
    deliver,
    replan,
    observe,
)
"""The order of work in an epoch.  `join` holds exchange → append → probe → materialise, hop by hop."""


def run_epoch(driver: Driver, buckets: DataFrame, number: int) -> None:
    """Called by Spark for every micro-batch, in order; again for one that Spark has not seen committed."""
    epoch = Epoch(number, buckets, driver)
    begun = time.perf_counter()
    checkpoint, committed = driver.services.checkpoint, driver.now.live.epoch
    done = checkpoint.log.read(number) if number <= committed else None
    if done is not None:
        _same_input(checkpoint, done)
        epoch.manifest = done
        deliver(epoch)
        driver.services.behind.wait()
        driver.replays = False
        return
    if number != committed + 1:
        raise _gap(f"Spark asks for epoch {number}", checkpoint.log.last())
    for step in STEPS:
        start = time.perf_counter()
        step(epoch)
        epoch.seconds[step.__name__] = time.perf_counter() - start
    driver.feedback.work = _work(epoch)
    epoch.seconds["total"] = driver.feedback.seconds = time.perf_counter() - begun


def refuse_gap(checkpoint: Checkpoint) -> None:
    """Raises if Spark has committed an epoch that Plait has not: a manifest is gone, and Spark would not say so."""
    names = checkpoint.files.names("spark/commits")
    newest = max((int(name) for name in names if name.isdigit()), default=-1)
    last = checkpoint.log.last()
    if newest > (-1 if last is None else last):
        raise _gap(f"Spark has committed epoch {newest}", last)


def _gap(what: str, last: int | None) -> CheckpointError:
    there = "no manifest is there" if last is None else f"the last manifest is that of epoch {last}"
    return CheckpointError(
        "EPOCH_GAP",
        f"{what}, but {there}",
        "restore the whole checkpoint directory, Spark's part and Plait's, from one copy",
    )


def _work(epoch: Epoch) -> float:
    """Seconds that tasks worked, as far as more tasks would share it: segments are written beside the join."""
    return sum(seconds for name, seconds in epoch.account.seconds.items() if name != "append")


def _same_input(checkpoint: Checkpoint, done: Manifest) -> None:
    """A replayed epoch must be the one that was committed; a tampered Spark checkpoint would lose or repeat rows."""
    if not same_source(checkpoint.files, done.epoch, done.source):
        raise CheckpointError(
            "OFFSETS_CHANGED",
            f"epoch {done.epoch} was committed with other source offsets than Spark replays now",
            "restore the whole checkpoint directory, Spark's part and Plait's, from one copy",
        )
