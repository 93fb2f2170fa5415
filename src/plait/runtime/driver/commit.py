"""The commit of an epoch.  After step 3 its results are part of the answer; before it, nothing happened.

1. Tasks write segments and result files under fresh names, and sync them.         (runtime/task/join_task.py)
2. The driver collects their notes, which carry the checksums.                     `collect.py`
3. The manifest `log/<epoch>.json` is created, put-if-absent: the commit point.    `commit`
4. Sinks are called with the epoch's number.                                       `deliver`
5. The receipt is recorded.                                                        `deliver`
6. foreachBatch returns and Spark commits the batch.                               (runtime/driver/epoch.py)

A replayed epoch that has its manifest computes nothing: it repeats 4 and 5 for the sinks without a receipt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from plait.runtime.driver.driver import Epoch, InForce, Services
from plait.runtime.driver.offsets import source_digest
from plait.runtime.driver.watermarks import horizons_us, latest, least_watermark_ms, marks_before
from plait.runtime.faults import reached
from plait.runtime.task.epoch_task import EpochTask
from plait.state.log.checkpoint import Checkpoint
from plait.state.log.manifest import LiveState, Manifest, ResultFile, Retention, results_after
from plait.state.segments.tiers import let_go


def commit(epoch: Epoch) -> None:
    """The manifest makes the epoch part of the answer."""
    driver, services, account = epoch.driver, epoch.driver.services, epoch.account
    epoch.await_durable()
    manifest, before = _manifest(epoch), driver.now.live
    if epoch.number % services.config.snapshot_every == 0 or before.legacy:
        results = results_after(services.sources.live.files, manifest)
        manifest = _with_snapshot(manifest, before.after(manifest), results)
    driver.now = replace(driver.now, live=append(services.checkpoint, before, manifest))
    driver.feedback.state.committed(before, driver.now.live)
    services.sources.live.committed(manifest)
    # What this run has just written need not be read back.
    driver.now.rows.known.update(file.path for file in (*account.results, *account.merged_results))
    epoch.manifest = manifest


def _manifest(epoch: Epoch) -> Manifest:
    """All that the epoch changes."""
    services, now, plan = epoch.driver.services, epoch.driver.now, epoch.plan
    account, task, policy = epoch.account, epoch.task, services.watermark_policy
    assert task is not None
    known = {mark.key for i in plan.inputs for mark in i.marks}
    marks = {k: at for k, at in latest(now.live.marks_ms, account.marks_ms).items() if k in known}
    horizons = horizons_us(plan, marks, policy)
    return Manifest(
        epoch=epoch.number,
        token=services.checkpoint.token,
        plan=plan.digest,
        source="" if epoch.batch is None else source_digest(services.checkpoint.files, epoch.batch),
        clock_us=task.clock_us,
        watermark_ms=least_watermark_ms(plan, marks, policy),
        max_event_ms=latest(now.live.max_event_ms, account.max_event_ms),
        added=(*account.added, *account.copied),
        removed=(*account.removed, *(info.path for info in epoch.dropped)),
        results=tuple(_committed(services, epoch.number, file) for file in account.results),
        rows_in=account.rows_in,
        rows_late=account.rows_late,
        rows_out=account.rows_out,
        snapshot=None,
        retention={s.id: Retention(s.time_column, horizons.get(s.id), s.ttl_us) for s in plan.stores},
        before_ms=now.live.watermark_ms,
        catalog=now.catalog.version,
        marks_ms=marks,
        let_go=_let_go(epoch, task),
        builds=_built(now, task),
        merged=tuple(account.merged_results),
        replaced=(*account.replaced, *_of_dropped(services)),
        before_marks_ms=marks_before(now.live),
        begins=now.catalog.begins(epoch.number),
        batch=now.live.batch if epoch.batch is None else epoch.batch,
        idle=epoch.batch is None,
    )


def _committed(services: Services, epoch: int, file: ResultFile) -> ResultFile:
    """A result file as the manifest has it: kept, there until its sink has taken it, or held for a parked query."""
    keeps = services.sinks[file.query].keeps_rows
    if services.parking.holds(file.query):
        return replace(file, passing=False, held=epoch)
    return replace(file, passing=not keeps or file.raw)


def _let_go(epoch: Epoch, task: EpochTask) -> dict[str, int]:
    """By store the latest birth of a row that was let expire, so far."""
    found = dict(epoch.driver.now.live.let_go)
    dropped = [(info.store, let_go(info, task.horizons.get(info.store))) for info in epoch.dropped]
    for store, birth in (*epoch.account.let_go.items(), *dropped):
        found[store] = max(birth, found.get(store, -1))
    for build in epoch.driver.now.catalog.builds:
        found[build.store] = max(found.get(build.store, -1), found.get(build.source, -1))
    return {store: birth for store, birth in found.items() if birth >= 0 and store in epoch.plan.store_by_id}


def _built(now: InForce, task: EpochTask) -> dict[str, int]:
    """By store that is being built, the key groups that are copied after this epoch."""
    going = {build.store for build in now.catalog.builds}
    done = {**now.live.builds, **{copy.store: copy.end for copy in task.copies}}
    return {store: groups for store, groups in done.items() if store in going}


def _of_dropped(services: Services) -> tuple[tuple[str, str], ...]:
    """Result files in force of queries that are no more: nobody can ask for their rows."""
    live = services.sources.live.files
    return tuple((query, file.path) for query, files in live.items() if query not in services.sinks for file in files)


def _with_snapshot(manifest: Manifest, after: LiveState, results: Mapping[str, Sequence[ResultFile]]) -> Manifest:
    return replace(
        manifest,
        snapshot=tuple(info for infos in after.segments.values() for info in infos),
        snapshot_results=tuple(file for files in results.values() for file in files),
    )


def append(checkpoint: Checkpoint, live: LiveState, manifest: Manifest) -> LiveState:
    """Step 3: after this the epoch is part of the answer.

    Another driver may have taken over between the look at the fence and the manifest.  Whoever finds no newer token
    when the manifest is there can be sure that the next driver sees it; else it may not count, and this one stops.
    """
    reached("commit.2", manifest.epoch)
    checkpoint.check_fence()
    checkpoint.log.append(manifest)
    checkpoint.check_fence()
    reached("commit.3", manifest.epoch)
    return live.after(manifest)


def deliver(
    checkpoint: Checkpoint,
    manifest: Manifest,
    sinks: Mapping[str, Callable[[int, list[ResultFile]], None]],
    failed: Callable[[str, Exception], None] | None = None,
) -> None:
    """Steps 4 and 5: every sink without a receipt gets the epoch's rows, then the receipt is written.

    A driver that another has taken over from calls no sink: the other one does, or did.  `failed` is told of a sink
    that raises an error, and may raise it again: else the others get their rows, and this one has no receipt.
    """
    done = checkpoint.log.receipt(manifest.epoch)
    for query, sink in sinks.items():
        if query in done:
            continue
        checkpoint.check_fence()
        try:
            sink(manifest.epoch, [file for file in manifest.results if file.query == query])
        except Exception as error:
            if failed is None:
                raise
            failed(query, error)
            reached("parked", manifest.epoch)
            continue
        reached("commit.4", manifest.epoch)
        done = done | {query}
        checkpoint.log.record_receipt(manifest.epoch, done)
        reached("receipt", manifest.epoch)
    reached("commit.5", manifest.epoch)
