"""The commit of an epoch.  After step 3 its results are part of the answer; before it, nothing happened.

1. Tasks write segments and result files under fresh names, and sync them.         (runtime/task/join_task.py)
2. The driver collects their notes, which carry the checksums.               `collect.py`
3. The manifest `log/<epoch>.json` is created, put-if-absent: the commit point.    `commit`
4. Sinks are called with the epoch's number.                                       `deliver`
5. The receipt is recorded.                                                        `deliver`
6. foreachBatch returns and Spark commits the batch.                               (runtime/driver/epoch.py)

A replayed epoch that has its manifest computes nothing: it repeats 4 and 5 for the sinks without a receipt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from plait.runtime.faults import reached
from plait.state.log.checkpoint import Checkpoint
from plait.state.log.manifest import LiveState, Manifest, ResultFile


def commit(checkpoint: Checkpoint, live: LiveState, manifest: Manifest) -> LiveState:
    """Step 3: after this the epoch is part of the answer."""
    reached("commit.2", manifest.epoch)
    checkpoint.check_fence()
    checkpoint.log.append(manifest)
    reached("commit.3", manifest.epoch)
    return live.after(manifest)


def deliver(
    checkpoint: Checkpoint, manifest: Manifest, sinks: Mapping[str, Callable[[int, list[ResultFile]], None]]
) -> None:
    """Steps 4 and 5: every sink without a receipt gets the epoch's rows, then the receipt is written.

    A driver that another has taken over from calls no sink: the other one does, or did.
    """
    done = checkpoint.log.receipt(manifest.epoch)
    for query, sink in sinks.items():
        if query in done:
            continue
        checkpoint.check_fence()
        sink(manifest.epoch, [file for file in manifest.results if file.query == query])
        reached("commit.4", manifest.epoch)
        done = done | {query}
        checkpoint.log.record_receipt(manifest.epoch, done)
        reached("receipt", manifest.epoch)
    reached("commit.5", manifest.epoch)
