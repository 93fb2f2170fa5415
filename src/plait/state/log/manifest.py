"""Manifests: what each epoch committed.  A file that no manifest names does not exist.

Contract.  `log/<epoch>.json` is created with put-if-absent; its creation is the commit of the epoch.  Epochs are
numbered 0, 1, 2 … without gaps.  Every n-th manifest is a snapshot that lists all live segments and all result files
in force, so a restart reads the newest snapshot and what follows, and nothing before it is needed any more.  Files
are sealed (`state/log/sealed.py`).

An *amendment* `log/<epoch>-<n>.json` is a snapshot of the state after that epoch, rewritten without a new epoch
(`state/log/compact.py`); the newest one of an epoch stands for it.

Invariant.  `live()` is the state after the last committed epoch, or raises; a flipped bit, a truncated file or a
missing number are never taken for a smaller state.  `LiveState.after` says the same without reading anything.
`results()` are the result files in force after that epoch; `results_after` says the same without reading.

Cost.  An append is one small file and two fsyncs; `live()` and `results()` read at most `Config.snapshot_every` files.
A log of format 3, whose snapshots say nothing of results, is read whole until the first snapshot of format 4.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from plait.errors import CheckpointError, CorruptionError
from plait.query.layout import Layout
from plait.state.files.storage import RESTORE, Files, inside, numbered
from plait.state.log.sealed import seal, unseal
from plait.state.segments.filter_sets import Sets
from plait.state.segments.segment import SegmentInfo

LOG, RECEIPTS = "log", "receipts"
_ATTEMPTS = 5
"""How often the log is listed again because what was listed has been pruned meanwhile."""


@dataclass(frozen=True)
class ResultFile:
    """Joined rows of a query that rest in the checkpoint.

    Several queries may name one file, each with an entry of its own; it is needed as long as one of them is in force.
    """

    query: str
    path: str
    rows: int
    """Rows of the query."""
    bytes: int
    """Bytes of the file; `checksum` is of these."""
    checksum: str
    whole: bool = False
    """It stands for all files that earlier epochs have of the query."""
    grouped: bool = False
    """Its rows are those of a maintained aggregate, made by the join's tasks."""
    unpacked: int = 0
    """Bytes of its rows in memory, or as many of them as were counted; 0 in files of earlier releases."""
    tier: int = 0
    """How often its rows have been merged into a larger file."""
    passing: bool | None = None
    """Whether it is there for a sink only, until the next epoch is committed.  Format 3 did not say: None."""
    bit: int | None = None
    """The query's rows are those with this bit in the file's own sets (`runtime/task/file_sets.py`); None: all rows."""
    held: int | None = None
    """The epoch whose rows these are, of a parked query that has missed it; None: nobody waits for them."""
    raw: bool = False
    """Spark's part of the query failed, and is still to be done: these are joined rows."""

    @property
    def weight(self) -> int:
        """What its rows take: text that repeats is a hundred times larger in memory than in Parquet."""
        return self.unpacked if self.bit is not None else max(self.bytes, self.unpacked)

    @staticmethod
    def from_json(value: dict[str, Any], where: str = "a result file's description") -> ResultFile:
        """The inverse of `dataclasses.asdict`; `where` names the file it was read from in errors."""
        file = ResultFile(**value)
        inside(file.path, where)
        return file


@dataclass(frozen=True)
class Retention:
    """What decides whether a row of a store can still be reached, for those who do not know the queries."""

    time_column: str | None
    horizon_us: int | None
    """Rows up to this event time cannot."""
    ttl_us: int | None


@dataclass(frozen=True)
class Manifest:
    """One committed epoch.  `snapshot` are all segments live after it, where it carries them; likewise results."""

    epoch: int
    token: int
    plan: str
    source: str
    """Digest of Spark's offsets of this epoch."""
    clock_us: int
    watermark_ms: int | None
    max_event_ms: dict[str, int]
    added: tuple[SegmentInfo, ...]
    removed: tuple[str, ...]
    """Paths of segments that were live before this epoch; one that is in `added` too goes on as that says."""
    results: tuple[ResultFile, ...]
    rows_in: dict[str, int]
    rows_late: dict[str, int]
    rows_out: dict[str, int]
    snapshot: tuple[SegmentInfo, ...] | None
    retention: dict[str, Retention] = field(default_factory=dict)
    """How long each store's rows can be reached."""
    before_ms: int | None = None
    """The watermark before this epoch: the least of all queries."""
    merged: tuple[ResultFile, ...] = ()
    """Result files that hold exactly the rows of those in `replaced`."""
    replaced: tuple[tuple[str | None, str], ...] = ()
    """(query, path) of result files in force before this epoch: the query's rows are in `merged`, or serve nobody.

    Other queries that name the same file go on doing so.  Before files were shared there was no query: None.
    """
    snapshot_results: tuple[ResultFile, ...] | None = None
    """All result files in force after this epoch, where it carries a snapshot."""
    catalog: int = 0
    """The version of the catalog that the epoch ran with; −1 in format 3, which had none."""
    marks_ms: dict[str, int] = field(default_factory=dict)
    """By mark the latest event time less the delay of its stream."""
    before_marks_ms: dict[str, int] = field(default_factory=dict)
    """The same before this epoch: by it rows were dropped as late."""
    begins: tuple[str, ...] = ()
    """Joins of queries that were not there before this epoch."""
    let_go: dict[str, int] = field(default_factory=dict)
    """By store the latest birth of a row that was let expire."""
    builds: dict[str, int] = field(default_factory=dict)
    """By store that is being built, the key groups of its source that are copied."""
    batch: int | None = None
    """The last of Spark's batches that is committed; None in manifests of earlier releases: the epoch's number."""
    idle: bool = False
    """Whether it has no batch of its own: it was run while no rows arrived."""

    @property
    def spark_batch(self) -> int:
        """The last of Spark's batches that is committed with it."""
        return self.epoch if self.batch is None else self.batch

    def encode(self) -> bytes:
        """The bytes of its file."""
        return seal("plait-manifest", dataclasses.asdict(self))

    @staticmethod
    def decode(data: bytes, where: str = "a manifest") -> Manifest:
        """The inverse of `encode`; `where` names the file in errors."""
        value = unseal("plait-manifest", data, where, "MANIFEST_CORRUPT")
        try:
            value.setdefault("catalog", -1)
            value["added"] = tuple(SegmentInfo.from_json(v, where) for v in value["added"])
            value["removed"] = tuple(inside(path, where) for path in value["removed"])
            value["begins"] = tuple(value.get("begins", ()))
            value["results"] = tuple(ResultFile.from_json(v, where) for v in value["results"])
            value["merged"] = tuple(ResultFile.from_json(v, where) for v in value.get("merged", ()))
            value["replaced"] = tuple(_replaced(entry, where) for entry in value.get("replaced", ()))
            value["retention"] = {
                store: _retention(v, value["watermark_ms"]) for store, v in value["retention"].items()
            }
            if value["snapshot"] is not None:
                value["snapshot"] = tuple(SegmentInfo.from_json(v, where) for v in value["snapshot"])
            if value.get("snapshot_results") is not None:
                found = [ResultFile.from_json(v, where) for v in value["snapshot_results"]]
                value["snapshot_results"] = tuple(found)
            return Manifest(**value)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorruptionError("MANIFEST_CORRUPT", f"{where} lacks something: {error}", RESTORE) from error


@dataclass(frozen=True)
class LiveState:
    """What is true after an epoch: live segments by store, watermark, clock.  Epoch −1 is before the first."""

    epoch: int = -1
    segments: dict[str, tuple[SegmentInfo, ...]] = field(default_factory=dict)
    watermark_ms: int | None = None
    max_event_ms: dict[str, int] = field(default_factory=dict)
    clock_us: int = 0
    token: int = 0
    retention: dict[str, Retention] = field(default_factory=dict)
    catalog: int = 0
    marks_ms: dict[str, int] = field(default_factory=dict)
    let_go: dict[str, int] = field(default_factory=dict)
    builds: dict[str, int] = field(default_factory=dict)
    batch: int = -1
    """The last of Spark's batches that is committed."""
    legacy: bool = False
    """Whether format 3 wrote it: its segments do not say what their query sets mean."""

    def after(self, manifest: Manifest) -> LiveState:
        """The state after one more epoch; a snapshot stands for itself."""
        if manifest.snapshot is not None:
            alive: Iterable[SegmentInfo] = manifest.snapshot
        elif manifest.epoch != self.epoch + 1:
            raise _missing(self.epoch + 1, manifest.epoch)
        else:
            gone = set(manifest.removed)
            before = (info for infos in self.segments.values() for info in infos)
            # A segment that a merge has eaten into is removed as it was and added as it is.
            alive = [*(info for info in before if info.path not in gone), *manifest.added]
        segments: dict[str, list[SegmentInfo]] = {}
        for info in alive:
            segments.setdefault(info.store, []).append(info)
        return LiveState(
            epoch=manifest.epoch,
            segments={store: tuple(infos) for store, infos in segments.items()},
            watermark_ms=manifest.watermark_ms,
            max_event_ms={**self.max_event_ms, **manifest.max_event_ms},
            clock_us=manifest.clock_us,
            token=manifest.token,
            retention=manifest.retention,
            catalog=manifest.catalog,
            marks_ms=manifest.marks_ms,
            let_go=manifest.let_go,
            builds=manifest.builds,
            batch=manifest.spark_batch,
            legacy=manifest.catalog < 0,
        )


def modernised(live: LiveState, layout: Layout, filters: Mapping[str, tuple[int, ...]]) -> LiveState:
    """State that format 3 wrote, with what its segments did not say: whose bits their query sets have.

    `filters` are, by stream, those of the bits.  It had one watermark for all queries; every stream has its own now.
    """
    segments = {}
    for name, infos in live.segments.items():
        of = layout.store_by_id[name]
        known = filters[of.relation]
        # It had bits by text only, and none where there was one text.
        sets = Sets(bits=known) if len(known) > 1 else Sets(passed=known)
        segments[name] = tuple(dataclasses.replace(info, sets=sets) for info in infos)
    marks = {
        key: live.max_event_ms[i.relation] - (i.delay_ms or 0)
        for key, (i, _) in layout.marks.items()
        if i.relation in live.max_event_ms
    }
    return dataclasses.replace(live, segments=segments, marks_ms=marks)


def _retention(value: dict[str, Any], watermark_ms: int | None) -> Retention:
    """Format 3 says how long rows are kept, by one watermark for all queries."""
    if "horizon_us" in value:
        return Retention(**value)
    kept = value["keep_us"]
    horizon = None if kept is None or watermark_ms is None else watermark_ms * 1000 - kept
    return Retention(value["time_column"], horizon, value["ttl_us"])


def _replaced(entry: str | list[Any], where: str) -> tuple[str | None, str]:
    """Before files were shared it was a path."""
    query, path = (None, entry) if isinstance(entry, str) else entry
    return query, inside(path, where)


def results_after(
    before: Mapping[str, tuple[ResultFile, ...]], manifest: Manifest
) -> dict[str, tuple[ResultFile, ...]]:
    """The result files in force after one more epoch, by query, in the order of epochs; a snapshot stands for itself.

    A file that is `whole` stands for all before it, one of `merged` for those that it replaces; one that was only
    `passing` has been taken by its sink when the next epoch is committed.
    """
    found: dict[str, list[ResultFile]] = {}
    if manifest.snapshot_results is not None:
        for file in manifest.snapshot_results:
            found.setdefault(file.query, []).append(file)
    else:
        gone, whole = set(manifest.replaced), {file.query for file in manifest.results if file.whole}
        for query, files in before.items():
            left = [f for f in files if not f.passing and not {(query, f.path), (None, f.path)} & gone]
            if left and query not in whole:
                found[query] = left
        for file in (*manifest.merged, *manifest.results):
            found.setdefault(file.query, []).append(file)
    return {query: tuple(files) for query, files in found.items()}


def _missing(epoch: int, found: int) -> CorruptionError:
    return CorruptionError("MANIFEST_MISSING", f"the manifest of epoch {epoch} is gone, but {found} exists", RESTORE)


class ManifestLog:
    """The manifests in the folder `log` of a checkpoint, and the sinks' receipts in `receipts` beside it."""

    def __init__(self, files: Files, check: Callable[[Manifest], None] = lambda manifest: None) -> None:
        """`check` raises for manifests that do not count: `state/log/takeover.py`."""
        self.files = files
        self._check = check

    def append(self, manifest: Manifest) -> None:
        """Commit an epoch.  It must not be committed yet."""
        name = manifest_name(manifest.epoch)
        if not self.files.put_if_absent(name, manifest.encode()):
            raise CheckpointError(
                "EPOCH_COMMITTED_ELSEWHERE",
                f"epoch {manifest.epoch} already has its manifest {self.files.where(name)}",
                "another driver runs on this checkpoint: stop one of them, then restart the other",
            )

    def amend(self, manifest: Manifest) -> None:
        """Commit a snapshot that replaces the state after an epoch that is committed already."""
        assert manifest.snapshot is not None, "an amendment stands for itself"
        numbers = self._amendments().get(manifest.epoch, [0])
        name = manifest_name(manifest.epoch, max(numbers) + 1)
        if not self.files.put_if_absent(name, manifest.encode()):
            where = self.files.where(name)
            raise CheckpointError("EPOCH_COMMITTED_ELSEWHERE", f"{where} exists already", "stop the other process")

    def amendment(self, epoch: int) -> Manifest | None:
        """The newest amendment of an epoch."""
        number = max(self._amendments().get(epoch, [0]))
        name = manifest_name(epoch, number)
        return Manifest.decode(self.files.read(name) or b"", self.files.where(name)) if number else None

    def _amendments(self) -> dict[int, list[int]]:
        """The numbers of amendments by epoch."""
        found: dict[int, list[int]] = {}
        for name in self.files.names(LOG):
            if match := re.fullmatch(r"(\d{12})-(\d{6})\.json", name):
                found.setdefault(int(match[1]), []).append(int(match[2]))
        return found

    def read(self, epoch: int) -> Manifest | None:
        """The manifest of an epoch, or None if it is not committed."""
        name = manifest_name(epoch)
        data = self.files.read(name)
        if data is None:
            return None
        manifest = Manifest.decode(data, self.files.where(name))
        if manifest.epoch != epoch:
            where = self.files.where(name)
            raise CorruptionError("MANIFEST_CORRUPT", f"{where} holds epoch {manifest.epoch}", RESTORE)
        self._check(manifest)
        return manifest

    def epochs(self) -> list[int]:
        """The committed epochs whose manifests are still there, ascending."""
        return numbered(self.files, LOG)

    def last(self) -> int | None:
        """The last committed epoch."""
        return max(self.epochs(), default=None)

    def live(self) -> LiveState:
        """The state after the last committed epoch."""
        pending: list[Manifest] = []
        amendments = self._amendments()
        for epoch in reversed(self.epochs()):
            amended = self.amendment(epoch) if epoch in amendments else None
            if amended is not None and pending and pending[-1].token < amended.token:
                raise _overtaken(pending[-1], self.files.where(manifest_name(epoch, max(amendments[epoch]))))
            pending.append(amended or self._read_existing(epoch))
            if pending[-1].snapshot is not None:
                break
        # `after` refuses a gap, and a first manifest that is neither epoch 0 nor a snapshot.
        state = LiveState()
        for manifest in reversed(pending):
            state = state.after(manifest)
        return state

    def since_snapshot(self) -> list[Manifest]:
        """The manifests from the newest one that lists the results in force on; all, where none does (format 3)."""
        for _ in range(_ATTEMPTS):
            found: list[Manifest] = []
            for epoch in reversed(self.epochs()):
                manifest = self.read(epoch)
                if manifest is None:
                    break
                found.append(manifest)
                if manifest.snapshot_results is not None:
                    # Format 3 pruned manifests that named no results: only after a snapshot must there be no gap.
                    for later, earlier in pairwise(found):
                        if later.epoch != earlier.epoch + 1:
                            raise _missing(earlier.epoch + 1, later.epoch)
                    return found[::-1]
            else:
                return found[::-1]
        raise _missing(epoch, epoch + 1)

    def results(self) -> dict[str, tuple[ResultFile, ...]]:
        """The result files in force after the last committed epoch, by query."""
        found: dict[str, tuple[ResultFile, ...]] = {}
        for manifest in self.since_snapshot():
            found = results_after(found, manifest)
        return found

    def record_receipt(self, epoch: int, queries: Iterable[str]) -> None:
        """Note that the sinks of these queries have taken the epoch; those noted before stay noted."""
        known = self.receipt(epoch) | set(queries)
        self.files.replace(_receipt_name(epoch), seal("plait-receipt", {"epoch": epoch, "queries": sorted(known)}))

    def receipt(self, epoch: int) -> set[str]:
        """The queries whose sinks have taken the epoch."""
        name = _receipt_name(epoch)
        if (data := self.files.read(name)) is None:
            return set()
        return set(unseal("plait-receipt", data, self.files.where(name), "RECEIPT_CORRUPT")["queries"])

    def prune(self, older_than: float) -> int:
        """Delete manifests before the newest snapshot, with their receipts; returns how many files.

        They go in the order of epochs, up to the first that is too young: what is left needs no second look.
        """
        epochs = self.epochs()
        newest = next((e for e in reversed(epochs) if self._read_existing(e).snapshot_results is not None), 0)
        deleted = 0
        for epoch, numbers in self._amendments().items():
            for number in numbers if epoch < newest else ():
                deleted += self.files.delete_older(manifest_name(epoch, number), older_than)
        left = newest
        for epoch in epochs:
            if epoch >= newest:
                break
            if not self.files.delete_older(manifest_name(epoch), older_than):
                left = epoch
                break
            deleted += 1
        # A receipt is not deleted before its manifest: without it the rows would count as not delivered.
        for epoch in numbered(self.files, RECEIPTS):
            if epoch >= left or not self.files.delete_older(_receipt_name(epoch), older_than):
                break
            deleted += 1
        return deleted

    def _read_existing(self, epoch: int) -> Manifest:
        manifest = self.read(epoch)
        if manifest is None:
            raise _missing(epoch, epoch + 1)
        return manifest


def manifest_name(epoch: int, amendment: int = 0) -> str:
    """Where a manifest lies in the checkpoint."""
    suffix = f"-{amendment:06d}" if amendment else ""
    return f"{LOG}/{epoch:012d}{suffix}.json"


def _receipt_name(epoch: int) -> str:
    return f"{RECEIPTS}/{epoch:012d}.json"


def _overtaken(manifest: Manifest, amendment: str) -> CheckpointError:
    return CheckpointError(
        "COMPACTED_WHILE_RUNNING",
        f"epoch {manifest.epoch} was committed while the state before it was being compacted into {amendment}",
        "stop both, delete that file, and start the engine again: nothing is lost, the compaction is undone",
    )
