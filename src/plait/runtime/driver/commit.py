"""The commit of an epoch.  After step 3 its results are part of the answer; before it, nothing happened.

1. Tasks write segments and result files under fresh names, and sync them.         (runtime/task/join_task.py)
2. The driver collects their descriptors, which carry the checksums.               `collected`
3. The manifest `log/<epoch>.json` is created, put-if-absent: the commit point.    `commit`
4. Sinks are called with the epoch's number.                                       `deliver`
5. The receipt is recorded.                                                        `deliver`
6. foreachBatch returns and Spark commits the batch.                               (runtime/driver/epoch.py)

A replayed epoch that has its manifest computes nothing: it repeats 4 and 5 for the sinks without a receipt.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from plait.query.observed import EdgeCount, Sample
from plait.query.plan import Plan
from plait.runtime.faults import reached
from plait.state.log.checkpoint import Checkpoint
from plait.state.log.manifest import LiveState, Manifest, ResultFile
from plait.state.segments.segment import SegmentInfo


@dataclass
class Collected:
    """What the tasks of an epoch reported."""

    added: list[SegmentInfo] = field(default_factory=list)
    copied: list[SegmentInfo] = field(default_factory=list)
    """Segments of stores that are being built."""
    removed: list[str] = field(default_factory=list)
    results: list[ResultFile] = field(default_factory=list)
    merged_results: list[ResultFile] = field(default_factory=list)
    """Result files that hold the rows of those in `replaced`, which earlier epochs have written."""
    replaced: list[str] = field(default_factory=list)
    rows_in: dict[str, int] = field(default_factory=dict)
    rows_late: dict[str, int] = field(default_factory=dict)
    rows_out: dict[str, int] = field(default_factory=dict)
    rows_null_key: dict[str, int] = field(default_factory=dict)
    """Rows without a value in a column that no query can do without."""
    rows_corrupt: dict[str, int] = field(default_factory=dict)
    """Rows that a permissive reader could not parse, of streams that say so."""
    rows_future: dict[str, int] = field(default_factory=dict)
    """Rows with an event time too far ahead to move a watermark."""
    max_event_ms: dict[str, int] = field(default_factory=dict)
    marks_ms: dict[str, int] = field(default_factory=dict)
    let_go: dict[str, int] = field(default_factory=dict)
    row_bytes: float = 0.0
    """Mean bytes of the widest rows that sources have read."""
    edges: dict[int, EdgeCount] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    keys: dict[str, float] = field(default_factory=dict)
    """κ of every store, where the epoch was sampled."""
    driven: dict[str, dict[str, float]] = field(default_factory=dict)
    """Per driving relation: seconds, and results complete without another exchange."""
    seconds: dict[str, float] = field(default_factory=dict)
    merged_bytes: int = 0
    """Written by merges."""
    reads: dict[str, int] = field(default_factory=dict)
    """What reading state took: `state/segments/run.py`'s Meter."""


def collected(notes: Iterable[bytes], plan: Plan) -> Collected:
    """Step 2: descriptors become one account of the epoch."""
    account = Collected()
    account.rows_in = dict.fromkeys(plan.ranks, 0)
    account.rows_late = dict.fromkeys(plan.ranks, 0)
    account.rows_out = {query.name: 0 for query in plan.queries}
    for note in notes:
        content = json.loads(note)
        _ACCOUNTS[content["kind"]](account, content)
    return account


def _source(account: Collected, note: Mapping[str, object]) -> None:
    relation, event, marks = note["relation"], note["max_event_ms"], note["marks_ms"]
    width = note["row_bytes"]
    assert isinstance(relation, str)
    assert isinstance(marks, dict)
    assert isinstance(width, int | float)
    account.row_bytes = max(account.row_bytes, width)
    counts = (
        (account.rows_in, "rows"),
        (account.rows_late, "late"),
        (account.rows_null_key, "null_key"),
        (account.rows_corrupt, "corrupt"),
        (account.rows_future, "future"),
    )
    for total, name in counts:
        rows = note[name]
        assert isinstance(rows, int)
        if rows or relation in total:
            total[relation] = total.get(relation, 0) + rows
    if isinstance(event, int):
        account.max_event_ms[relation] = max(event, account.max_event_ms.get(relation, event))
    for mark, at in marks.items():
        account.marks_ms[mark] = max(at, account.marks_ms.get(mark, at))


def _segment(account: Collected, note: Mapping[str, object]) -> None:
    account.added.append(SegmentInfo.from_json(note["info"]))  # type: ignore[arg-type]


def _merge(account: Collected, note: Mapping[str, object]) -> None:
    added, removed, written = note["added"], note["removed"], note["written"]
    store, let_go = note["store"], note["let_go"]
    assert isinstance(store, str)
    assert isinstance(let_go, int)
    account.let_go[store] = max(let_go, account.let_go.get(store, -1))
    assert isinstance(added, list)
    assert isinstance(removed, list)
    assert isinstance(written, int)
    account.added.extend(SegmentInfo.from_json(info) for info in added)
    account.removed.extend(removed)
    account.merged_bytes += written


def _copy(account: Collected, note: Mapping[str, object]) -> None:
    store, infos, let_go = note["store"], note["infos"], note["let_go"]
    assert isinstance(store, str)
    assert isinstance(infos, list)
    assert isinstance(let_go, int)
    account.copied.extend(SegmentInfo.from_json(info) for info in infos)
    account.let_go[store] = max(let_go, account.let_go.get(store, -1))


def _result(account: Collected, note: Mapping[str, object]) -> None:
    query, rows, files = note["query"], note["rows"], note["files"]
    assert isinstance(query, str)
    assert isinstance(rows, int)
    assert isinstance(files, list)
    account.rows_out[query] += rows
    account.results += [ResultFile.from_json(file) for file in files]


def _work(account: Collected, note: Mapping[str, object]) -> None:
    edges, seconds = note["edges"], note["seconds"]
    assert isinstance(edges, dict)
    assert isinstance(seconds, dict)
    for edge, counts in edges.items():
        account.edges.setdefault(int(edge), EdgeCount()).add(EdgeCount(**counts))
    for relation, done in note["driven"].items():  # type: ignore[attr-defined]
        total = account.driven.setdefault(relation, {"seconds": 0.0, "rows": 0})
        for name, value in done.items():
            total[name] += value
    for name, value in note["reads"].items():  # type: ignore[attr-defined]
        account.reads[name] = account.reads.get(name, 0) + value
    for name, value in seconds.items():
        account.seconds[name] = account.seconds.get(name, 0.0) + value


def _sample(account: Collected, note: Mapping[str, object]) -> None:
    account.samples.append(Sample.from_json(note["sample"]))  # type: ignore[arg-type]


def _keys(account: Collected, note: Mapping[str, object]) -> None:
    account.keys.update(note["keys"])  # type: ignore[call-overload]


_ACCOUNTS: dict[str, Callable[[Collected, Mapping[str, object]], None]] = {
    "source": _source,
    "segment": _segment,
    "merge": _merge,
    "copy": _copy,
    "result": _result,
    "work": _work,
    "sample": _sample,
    "keys": _keys,
}


def commit(checkpoint: Checkpoint, live: LiveState, manifest: Manifest) -> LiveState:
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
