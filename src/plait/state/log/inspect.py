"""A checkpoint seen from outside: what is in it, and whether it holds what it says.

Contract.  Reads only, takes no lock, needs no Spark: safe beside a running engine, though files that it merges away
meanwhile may then be reported as missing.  `findings` checks every checksum and every invariant that a restart relies
on; without findings a restart finds exactly the rows that were committed.  What rests behind a URI is downloaded for
that, past the host's cache: the copies there are not what is to be verified.

Cost.  `report` reads the manifests; `findings` reads every live byte once, and the result files in force.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import xxhash

from plait.config import KEY_GROUPS, Config
from plait.errors import CheckpointError, CorruptionError, PlaitError, without_secrets
from plait.kernels.hashing import key_group
from plait.kernels.runs import group_starts
from plait.query.layout import Layout
from plait.query.store import UNTIL
from plait.state.files.segment_home import SegmentHome, scratch_dir
from plait.state.files.storage import TEMPORARY
from plait.state.log import catalog_versions as catalogs
from plait.state.log.checkpoint import Checkpoint, segment_home
from plait.state.log.manifest import LiveState, Manifest, ResultFile
from plait.state.segments.run import ends_of
from plait.state.segments.segment import SegmentInfo
from plait.state.segments.segment_reader import open_segment
from plait.state.segments.tiers import runs_per_lookup


@dataclass(frozen=True, slots=True)
class StoreReport:
    """One store at rest."""

    store: str
    segments: int
    tiers: dict[int, int]
    """Runs per tier."""
    merging: int
    """Bytes in runs that are being merged into the next tier."""
    deep_bytes: int
    """Bytes in compressed segments."""
    rows: int
    keys: int
    """Keys of all segments together: one that is in several is counted in each."""
    bytes: int
    epochs: tuple[int, int] | None
    """First and last epoch that wrote one of its live segments."""
    event_time_us: tuple[int, int] | None
    runs: float
    """Read amplification: runs that a lookup goes through, averaged over the key groups that have any."""


@dataclass(frozen=True, slots=True)
class Report:
    """A checkpoint after its last committed epoch."""

    path: str
    state_dir: str
    epoch: int
    watermark_ms: int | None
    queries: dict[str, str]
    stores: tuple[StoreReport, ...]
    bytes: int
    disk_bytes: int
    """What lies in the state directory, garbage that is not collected yet included."""
    written_bytes: int
    """Segments written in the epochs whose manifests are still there, merged ones included."""
    appended_bytes: int
    """Of those, what arrived: segments of tier 0."""

    @property
    def space_amplification(self) -> float:
        """Bytes on disk over live bytes."""
        return self.disk_bytes / self.bytes if self.bytes else 1.0

    @property
    def write_amplification(self) -> float:
        """Bytes written over bytes that arrived."""
        return self.written_bytes / self.appended_bytes if self.appended_bytes else 1.0

    def to_json(self) -> str:
        """All of it."""
        amplification = {"space": self.space_amplification, "write": self.write_amplification}
        return json.dumps({**asdict(self), "amplification": amplification}, indent=1)


@dataclass(frozen=True, slots=True)
class Usage:
    """Who uses a store, and what it has of the past."""

    readers: dict[str, int] = field(default_factory=dict)
    """By query and alias: the first epoch whose rows it sees.  Without any, the store goes with the next epoch, unless
    its stream is kept whole."""
    build: tuple[str, float] | None = None
    """The store that it is being filled from, and which share is done."""
    eras: tuple[tuple[int, tuple[str, ...]], ...] = ()
    """Since which epoch its rows have which columns."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is not as it should be."""

    code: str
    where: str
    what: str


@dataclass(frozen=True)
class Inspection:
    """A checkpoint that is looked at.  `state_dir` is needed only if the engine ran with `Config.state_dir`."""

    path: str
    state_dir: str | None = None

    def __post_init__(self) -> None:
        if self._checkpoint.files.read("plait.json") is None:
            raise CheckpointError("NOT_A_CHECKPOINT", f"{self.path} has no plait.json", "give a checkpoint directory")

    @property
    def _checkpoint(self) -> Checkpoint:
        return Checkpoint(self.path, Config())

    @property
    def home(self) -> SegmentHome:
        """Where the segments lie."""
        checkpoint = self._checkpoint
        named = self.state_dir is not None or not checkpoint.files.local
        name = checkpoint.identify() if named else ""
        return segment_home(checkpoint.files, Config(state_dir=self.state_dir), name)

    def catalog(self) -> dict[str, Any]:
        """Its queries by name, and its stores with their columns; empty before the first start."""
        found = catalogs.newest(self._checkpoint.files)
        if found is None:
            # Format 3 has one file; before the first start there is none.
            return self._checkpoint.catalog() or {"queries": {}, "stores": {}}
        layout = Layout.from_json(json.dumps(found["layout"]))
        stores = {
            s.id: {
                "columns": [[c.name, c.type] for c in s.columns if c.name != UNTIL],
                "changed": len(s.eras) > 1,
                "joins": [] if s.mir is None else list(s.mir.relations),
            }
            for s in layout.stores
        }
        return {"queries": {q["name"]: q["sql"] for q in found["queries"]}, "stores": stores}

    def usage(self, store: str) -> Usage:
        """Who uses a store, and what it has of the past."""
        found = catalogs.newest(self._checkpoint.files)
        if found is None:
            return Usage()
        readers = {
            f"{query['name']}.{alias}": query["floors"][join][alias]
            for query in found["queries"]
            for join, aliases in query["stores"].items()
            for alias, stores in aliases.items()
            if store in stores
        }
        layout = Layout.from_json(json.dumps(found["layout"]))
        of = layout.store_by_id.get(store)
        used = {} if of is None or of.mir is None else {use.query: use.aliases for use in of.mir.uses}
        readers |= {
            f"{query['name']}.{alias}": floors[alias]
            for query in found["queries"]
            for join, floors in query["floors"].items()
            for alias in used.get(join, ())
        }
        build = next((b for b in layout.builds if b.store == store), None)
        done = self.live().builds.get(store, 0) / KEY_GROUPS
        eras = () if of is None else tuple((era.since, era.columns) for era in of.eras)
        return Usage(readers, None if build is None else (build.source, done), eras)

    def live(self) -> LiveState:
        """The state after the last committed epoch."""
        return self._checkpoint.log.live()

    def report(self) -> Report:
        """What is in it."""
        checkpoint, live, catalog = self._checkpoint, self.live(), self.catalog()
        added = [i for epoch in checkpoint.log.epochs() for i in _manifest(checkpoint, epoch).added if i.epoch == epoch]
        names = sorted({*catalog["stores"], *live.segments})
        return Report(
            path=without_secrets(checkpoint.path),
            state_dir=without_secrets(self.home.files.root),
            epoch=live.epoch,
            watermark_ms=live.watermark_ms,
            queries=catalog["queries"],
            stores=tuple(_store_report(name, live.segments.get(name, ())) for name in names),
            bytes=sum(info.live_bytes for infos in live.segments.values() for info in infos),
            disk_bytes=_disk_bytes(self.home),
            written_bytes=sum(info.bytes for info in added),
            appended_bytes=sum(info.bytes for info in added if info.tier == 0),
        )

    def findings(self) -> Iterator[Finding]:
        """Everything that is wrong, as it is found."""
        checkpoint = self._checkpoint
        for epoch in checkpoint.log.epochs():
            yield from _told(partial(_manifest, checkpoint, epoch), f"manifest of epoch {epoch}")
            yield from _told(partial(checkpoint.log.amendment, epoch), f"amendment of epoch {epoch}")
            yield from _told(partial(checkpoint.log.receipt, epoch), f"receipt of epoch {epoch}")
        yield from _told(self.catalog, "catalog")
        try:
            live, catalog = self.live(), self.catalog()
        except PlaitError as error:
            yield Finding(error.code, "log", error.cause)
            return
        yield from self._result_findings(checkpoint)
        with tempfile.TemporaryDirectory(prefix="plait-verify-", dir=scratch_dir()) as folder:
            home = self.home
            yield from self._state_findings(home if home.remote is None else replace(home, path=folder), live, catalog)

    def _result_findings(self, checkpoint: Checkpoint) -> Iterator[Finding]:
        """Result files in force that are not what was committed."""
        by_path: dict[str, list[ResultFile]] = {}
        for _, files in sorted(checkpoint.log.results().items()):
            for file in files:
                by_path.setdefault(file.path, []).append(file)
        for path, entries in by_path.items():
            what, digest, size = f"a result file of {_queries(entries)}", xxhash.xxh3_128(), 0
            try:
                for block in checkpoint.results.blocks(path):
                    digest.update(block)
                    size += len(block)
            except FileNotFoundError:
                # Format 3 did not say which files are gone because their sink has taken them.
                if any(entry.passing is not None for entry in entries):
                    yield Finding("RESULT_MISSING", path, f"{what} is gone")
                continue
            except (OSError, PlaitError) as error:
                yield Finding("RESULT_CORRUPT", path, f"{what}: {error}")
                continue
            if any((size, digest.hexdigest()) != (entry.bytes, entry.checksum) for entry in entries):
                yield Finding("RESULT_CORRUPT", path, f"{what} is damaged")

    def _state_findings(self, home: SegmentHome, live: LiveState, catalog: dict[str, Any]) -> Iterator[Finding]:
        for store, infos in sorted(live.segments.items()):
            if store not in catalog["stores"]:
                yield Finding("STORE_UNKNOWN", store, "the catalog does not know this store")
                continue
            of = catalog["stores"][store]
            # Segments of before a change have the columns of then.
            columns = None if of.get("changed") else [name for name, _ in of["columns"]]
            paths = [info.path for info in infos]
            for path in sorted({p for p in paths if paths.count(p) > 1}):
                yield Finding("SEGMENT_TWICE", path, f"{store} names it more than once")
            for info in infos:
                yield from self._segment_findings(home, info, columns)
            yield from self._run_findings(home, infos)

    def _segment_findings(self, home: SegmentHome, info: SegmentInfo, columns: list[str] | None) -> Iterator[Finding]:
        end = info.first + info.rows
        try:
            segment = open_segment(home, info)
            # A deep segment's blocks are verified as they are read.
            for begin in range(info.first, end, _ROWS):
                segment.slice(begin, min(begin + _ROWS, end))
        except PlaitError as error:
            yield Finding(error.code, f"{info.store}, epoch {info.epoch}", error.cause)
            return
        hashes = segment.hashes
        keys = hashes[group_starts(hashes)[:-1]]
        claims: dict[str, tuple[Any, Any]] = {
            "rows": (info.rows, len(hashes)),
            "keys": (info.keys, len(keys)),
            "keys that a lookup finds": (len(keys), len(segment.find(keys).at)),
            "ascending": (True, bool(np.all(hashes[1:] >= hashes[:-1]))),
            "key groups": ((info.lo_group, info.hi_group), _groups(hashes)),
        }
        if columns is not None:
            found = [c for c in segment.slice(info.first, info.first + 1).column_names if c[0] != "#"]
            claims["columns"] = (columns, found)
        for what, (said, found) in claims.items():
            if said != found:
                yield Finding("SEGMENT_CLAIM", info.path, f"{what}: the manifest says {said}, the segment has {found}")

    def _run_findings(self, home: SegmentHome, infos: tuple[SegmentInfo, ...]) -> Iterator[Finding]:
        """The segments of one run follow each other: no hash is in two of them."""
        runs: dict[str, list[tuple[int, int, str]]] = {}
        for info in infos:
            with contextlib.suppress(PlaitError):
                runs.setdefault(info.run, []).append((*ends_of(open_segment(home, info).hashes), info.path))
        for pieces in runs.values():
            for (_, high, path), (low, _, other) in pairwise(sorted(pieces)):
                if low <= high:
                    yield Finding("RUN_OVERLAP", path, f"segment {other} of the same run has hashes in its range")


_ROWS = 1 << 16
"""Rows read at a time."""


def _told(read: Callable[[], object], where: str) -> Iterator[Finding]:
    """What reading something raises, as a finding."""
    try:
        read()
    except PlaitError as error:
        yield Finding(error.code, where, error.cause)


def _queries(entries: list[ResultFile]) -> str:
    """Whose rows are in a file: the first three by name."""
    names = [repr(entry.query) for entry in entries]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"query {names[0]}" if len(names) == 1 else f"queries {', '.join(names[:3])}{more}"


def _manifest(checkpoint: Checkpoint, epoch: int) -> Manifest:
    found = checkpoint.log.read(epoch)
    if found is None:
        raise CorruptionError(
            "MANIFEST_MISSING", f"the manifest of epoch {epoch} is gone", "look again: it was collected"
        )
    return found


def _groups(hashes: Any) -> tuple[int, int]:
    ends = key_group(hashes[[0, -1]])
    return int(ends[0]), int(ends[1]) + 1


def _store_report(name: str, infos: tuple[SegmentInfo, ...]) -> StoreReport:
    tiers: dict[int, set[str]] = {}
    for info in infos:
        tiers.setdefault(info.tier, set()).add(info.run)
    times = [(i.min_time, i.max_time) for i in infos if i.min_time is not None and i.max_time is not None]
    return StoreReport(
        store=name,
        segments=len(infos),
        tiers={tier: len(runs) for tier, runs in sorted(tiers.items())},
        merging=sum(i.live_bytes for i in infos if i.into is not None),
        deep_bytes=sum(i.live_bytes for i in infos if i.deep),
        rows=sum(i.rows for i in infos),
        keys=sum(i.keys for i in infos),
        bytes=sum(i.live_bytes for i in infos),
        epochs=(min(i.epoch for i in infos), max(i.epoch for i in infos)) if infos else None,
        event_time_us=(min(t[0] for t in times), max(t[1] for t in times)) if times else None,
        runs=runs_per_lookup(infos),
    )


def _disk_bytes(home: SegmentHome) -> int:
    return sum(size for name, size in home.files.walk("") if not name.rpartition("/")[2].startswith(TEMPORARY))
