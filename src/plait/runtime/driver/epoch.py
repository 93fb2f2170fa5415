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

from plait.config import KEY_GROUPS
from plait.errors import CheckpointError
from plait.runtime.driver.commit import commit
from plait.runtime.driver.deliver import arrive, deliver
from plait.runtime.driver.driver import Driver, Epoch
from plait.runtime.driver.feedback import observe, replan
from plait.runtime.driver.join import finish, join
from plait.runtime.driver.missed import catch_up_parked
from plait.runtime.driver.offsets import last_batch, same_source
from plait.runtime.driver.prepare import prepare
from plait.runtime.driver.result_merge import merge_results
from plait.runtime.driver.troubled import park_troubled
from plait.runtime.spark.frames import cloned
from plait.runtime.task.exchange import nothing_arrived
from plait.state.log.checkpoint import Checkpoint
from plait.state.log.manifest import Manifest

STEPS: tuple[Callable[[Epoch], None], ...] = (
    prepare,
    join,
    park_troubled,
    finish,
    merge_results,
    arrive,
    commit,
    catch_up_parked,
    deliver,
    replan,
    observe,
)
"""The order of work in an epoch.  `join` holds exchange → append → probe → materialise, hop by hop."""


def run_epoch(driver: Driver, buckets: DataFrame, batch: int) -> None:
    """Called by Spark for every micro-batch, in order; again for one that Spark has not seen committed."""
    live = driver.now.live
    if batch <= live.batch:
        _replay(driver, buckets, batch)
    elif batch != live.batch + 1:
        raise _gap(f"Spark asks for batch {batch}", live.batch)
    else:
        _run(Epoch(live.epoch + 1, buckets, driver, batch))


def run_idle(driver: Driver) -> None:
    """An epoch without a batch, for what does not need one: first passes over state, and builds."""
    _run(Epoch(driver.now.live.epoch + 1, nothing_arrived(cloned(driver.services.spark)), driver, None))


def has_idle_work(driver: Driver) -> bool:
    """Whether there is something to do for an epoch without rows; not before Spark has seen the last one committed."""
    live, files = driver.now.live, driver.services.checkpoint.files
    going = any(live.builds.get(build.store, 0) < KEY_GROUPS for build in driver.now.catalog.builds)
    if live.epoch < 0 or driver.replays or not (going or any(tree.replays for tree in driver.now.plan.trees)):
        return False
    return live.batch < 0 or str(live.batch) in files.names("spark/commits")


def _replay(driver: Driver, buckets: DataFrame, batch: int) -> None:
    """What sinks have not got of an epoch that was committed."""
    checkpoint = driver.services.checkpoint
    number = driver.now.live.epoch
    while (done := checkpoint.log.read(number)) is not None and (done.idle or done.spark_batch > batch):
        number -= 1
    if done is None:
        raise _gap(f"Spark asks for batch {batch}", driver.now.live.batch)
    _same_input(checkpoint, done)
    epoch = Epoch(done.epoch, buckets, driver, batch)
    epoch.manifest = done
    deliver(epoch)
    driver.services.behind.wait()
    driver.replays = False


def _run(epoch: Epoch) -> None:
    driver, begun = epoch.driver, time.perf_counter()
    for step in STEPS:
        start = time.perf_counter()
        step(epoch)
        epoch.seconds[step.__name__] = time.perf_counter() - start
    driver.feedback.work = _work(epoch)
    epoch.seconds["total"] = driver.feedback.seconds = time.perf_counter() - begun
    _mind_latency(driver)


def refuse_gap(checkpoint: Checkpoint) -> None:
    """Raises if Spark has committed an epoch that Plait has not: a manifest is gone, and Spark would not say so."""
    names = checkpoint.files.names("spark/commits")
    newest = max((int(name) for name in names if name.isdigit()), default=-1)
    last = last_batch(checkpoint)
    if newest > last:
        raise _gap(f"Spark has committed batch {newest}", last)


def _gap(what: str, last: int) -> CheckpointError:
    there = "no manifest is there" if last < 0 else f"the last manifest is that of batch {last}"
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
    if not same_source(checkpoint.files, done.spark_batch, done.source):
        raise CheckpointError(
            "OFFSETS_CHANGED",
            f"epoch {done.epoch} was committed with other source offsets than Spark replays now",
            "restore the whole checkpoint directory, Spark's part and Plait's, from one copy",
        )


def _mind_latency(driver: Driver) -> None:
    config, feedback = driver.services.config, driver.feedback
    if config.tasks == "auto":
        capacity = driver.services.capacity
        feedback.scaling = feedback.scaling.for_latency(feedback.seconds, config.latency_seconds, capacity)
