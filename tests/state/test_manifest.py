"""Manifests: round trip, corruption, gaps, snapshots, receipts."""

from __future__ import annotations

import dataclasses
import os
import random
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from plait.errors import CheckpointError, CorruptionError, StorageError
from plait.state.files.storage import LocalFiles, put_if_absent
from plait.state.log.manifest import (
    LOG,
    LiveState,
    Manifest,
    ManifestLog,
    ResultFile,
    manifest_name,
    results_after,
)
from plait.state.log.sealed import FORMAT, seal
from plait.state.segments.segment import SegmentInfo
from tests.state.rows import info


def manifest(epoch: int, **changes: object) -> Manifest:
    plain = Manifest(
        epoch=epoch, token=1, plan="p", source="s", clock_us=epoch, watermark_ms=None, max_event_ms={}, added=(),
        removed=(), results=(), rows_in={"orders": 3}, rows_late={}, rows_out={"q": 1}, snapshot=None,
    )  # fmt: skip
    return dataclasses.replace(plain, **changes)  # type: ignore[arg-type]


def log(tmp_path: Path) -> ManifestLog:
    for folder in ("log", "receipts"):
        (tmp_path / folder).mkdir(exist_ok=True)
    return ManifestLog(LocalFiles(str(tmp_path), sync=False))


FULL = manifest(
    7, watermark_ms=-5, max_event_ms={"żółć": 1}, added=(info(1, max_time=3), info(2)), removed=("a/b", "c/d"),
    results=(ResultFile('q "quoted"\n', "r/1", 2, 3, "ff", passing=True),), snapshot=(info(3),),
    merged=(ResultFile("q", "r/2", 2, 3, "ff", tier=2, passing=False),), replaced=(("q", "r/0"), (None, "r/9")),
    snapshot_results=(ResultFile("q", "r/2", 2, 3, "ff", tier=2, passing=False),),
)  # fmt: skip


@pytest.mark.parametrize("one", [manifest(0), FULL])
def test_a_manifest_comes_back_as_it_was(one: Manifest) -> None:
    assert Manifest.decode(one.encode()) == one


def test_a_damaged_manifest_is_never_read() -> None:
    good = FULL.encode()
    version = len(b"plait-manifest ")
    for at in range(len(good)):
        for bit in range(8):
            bad = bytearray(good)
            bad[at] ^= 1 << bit
            with pytest.raises(CheckpointError) as error:
                Manifest.decode(bytes(bad))
            # A flip that turns the version into a higher one reads as a newer format: refused as well.
            assert error.value.code == "MANIFEST_CORRUPT" or at == version
    for length in range(len(good)):
        with pytest.raises(CorruptionError, match="MANIFEST_CORRUPT"):
            Manifest.decode(good[:length])
    with pytest.raises(CorruptionError, match="MANIFEST_CORRUPT"):
        Manifest.decode(seal("plait-manifest", {"epoch": 1}))


def of_format_3(one: Manifest) -> bytes:
    """As the release before this one would have written it."""
    value = dataclasses.asdict(one)
    for later in ("merged", "replaced", "snapshot_results"):
        del value[later]
    for file in value["results"]:
        del file["tier"], file["passing"], file["bit"]
    return seal("plait-manifest", value).replace(f" {FORMAT} ".encode(), b" 3 ", 1)


def test_a_manifest_of_the_format_before_is_read_as_it_is() -> None:
    plain = dataclasses.replace(FULL, results=(ResultFile("q", "r/1", 2, 3, "ff"),))
    found = Manifest.decode(of_format_3(plain))
    assert found == dataclasses.replace(plain, merged=(), replaced=(), snapshot_results=None)
    assert found.results[0].passing is None


def test_a_newer_format_is_refused_with_both_versions() -> None:
    newer = FULL.encode().replace(f"plait-manifest {FORMAT}".encode(), b"plait-manifest 12")
    with pytest.raises(CheckpointError, match=r"FORMAT_NEWER.*format 12.*up to 4.*upgrade plait"):
        Manifest.decode(newer)


def test_an_older_format_is_refused_with_what_to_do() -> None:
    older = FULL.encode().replace(f"plait-manifest {FORMAT}".encode(), b"plait-manifest 1")
    with pytest.raises(CheckpointError, match=r"FORMAT_OLDER.*format 1;.*reads formats from 3 to 4.*new checkpoint"):
        Manifest.decode(older)


def test_a_segment_that_a_merge_has_eaten_into_goes_on_as_the_last_manifest_says() -> None:
    state = LiveState().after(manifest(0, added=(info(0), info(1))))
    shorter = info(0, first=4, rows=6, into="x")
    state = state.after(manifest(1, removed=(info(0).path,), added=(shorter, info(2, tier=1, run="x"))))
    assert state.segments == {"s": (info(1), shorter, info(2, tier=1, run="x"))}
    state = state.after(manifest(2, removed=(shorter.path, info(1).path)))
    assert state.segments == {"s": (info(2, tier=1, run="x"),)}


def test_an_epoch_is_committed_once(tmp_path: Path) -> None:
    it = log(tmp_path)
    assert (it.read(0), it.last(), it.epochs()) == (None, None, [])
    it.append(manifest(0))
    with pytest.raises(CheckpointError, match="EPOCH_COMMITTED_ELSEWHERE"):
        it.append(manifest(0, token=2))
    assert it.read(0) == manifest(0)
    assert it.last() == 0
    assert it.files.names(LOG) == ["000000000000.json"]


def test_of_many_writers_exactly_one_wins(tmp_path: Path) -> None:
    won: list[int] = []
    path = str(tmp_path / "file")
    start = threading.Barrier(8)

    def write(n: int) -> None:
        start.wait()
        if put_if_absent(path, str(n).encode() * 1000, sync=True):
            won.append(n)

    threads = [threading.Thread(target=write, args=(n,)) for n in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(won) == 1
    assert Path(path).read_bytes() == str(won[0]).encode() * 1000
    assert os.listdir(tmp_path) == ["file"]


def test_a_directory_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="CHECKPOINT_UNWRITABLE"):
        put_if_absent(str(tmp_path / "file" / "x"), b"", sync=False)
    with pytest.raises(StorageError, match="CHECKPOINT_UNWRITABLE"):
        ManifestLog(LocalFiles(str(tmp_path / "file"), False)).append(manifest(0))


def history(epochs: int, every: int | None) -> list[Manifest]:
    """A made-up run that adds and removes segments, with a snapshot every so many epochs."""
    rng = random.Random(2)
    live: list[SegmentInfo] = []
    out = []
    for epoch in range(epochs):
        gone = [i for i in live if rng.random() < 0.3]
        added = [info(epoch * 10 + n, store=f"store {n}", epoch=epoch) for n in range(rng.randint(0, 3))]
        live = [i for i in live if i not in gone] + added
        snapshot = tuple(live) if every and epoch % every == every - 1 else None
        out.append(
            manifest(epoch, added=tuple(added), removed=tuple(i.path for i in gone), snapshot=snapshot,
                     watermark_ms=epoch, max_event_ms={"orders": epoch * 2}, token=1 + epoch // 10)
        )  # fmt: skip
    return out


@pytest.mark.parametrize("every", [None, 1, 4, 7])
def test_the_log_and_the_driver_agree_on_what_is_live(tmp_path: Path, every: int | None) -> None:
    it, state = log(tmp_path), LiveState()
    assert it.live() == state
    for one in history(30, every):
        it.append(one)
        state = state.after(one)
        found = it.live()
        assert {s: set(i) for s, i in found.segments.items()} == {s: set(i) for s, i in state.segments.items()}
        assert dataclasses.replace(found, segments={}) == dataclasses.replace(state, segments={})
        if one.snapshot is not None:
            assert {i for infos in state.segments.values() for i in infos} == set(one.snapshot)
    assert (state.epoch, state.watermark_ms, state.max_event_ms, state.token) == (29, 29, {"orders": 58}, 3)


def test_a_gap_after_the_snapshot_is_an_error_and_one_before_is_not(tmp_path: Path) -> None:
    it = log(tmp_path)
    for one in history(12, 8):
        it.append(one)
    expected = it.live()
    for gone in (0, 3, 6):
        os.unlink(it.files.where(manifest_name(gone)))
        assert it.live() == expected
    os.unlink(it.files.where(manifest_name(9)))
    with pytest.raises(CorruptionError, match=r"MANIFEST_MISSING.*epoch 9 is gone"):
        it.live()


def test_a_lost_snapshot_or_beginning_is_an_error(tmp_path: Path) -> None:
    it = log(tmp_path)
    for one in history(5, 4):
        it.append(one)
    os.unlink(it.files.where(manifest_name(3)))
    with pytest.raises(CorruptionError, match="MANIFEST_MISSING"):
        it.live()
    for epoch in (0, 1, 2):
        os.unlink(it.files.where(manifest_name(epoch)))
    with pytest.raises(CorruptionError, match="MANIFEST_MISSING"):
        it.live()
    with pytest.raises(CorruptionError, match="MANIFEST_MISSING"):
        LiveState().after(manifest(1))


def test_a_manifest_under_another_epochs_name_is_refused(tmp_path: Path) -> None:
    it = log(tmp_path)
    it.append(manifest(0))
    os.rename(it.files.where(manifest_name(0)), it.files.where(manifest_name(1)))
    with pytest.raises(CorruptionError, match="MANIFEST_CORRUPT"):
        it.read(1)


def result(path: str, query: str = "q", **more: Any) -> ResultFile:
    return ResultFile(query, path, 1, 1, "", **{"passing": False, **more})


def paths(files: Mapping[str, Sequence[ResultFile]]) -> dict[str, list[str]]:
    return {query: [file.path for file in found] for query, found in files.items()}


def test_results_in_force_are_those_of_all_epochs_less_what_was_replaced(tmp_path: Path) -> None:
    it = log(tmp_path)
    it.append(manifest(0, results=(result("a"), result("b"), result("c", "other"))))
    it.append(manifest(1, results=(result("sent", "sunk", passing=True), result("d"))))
    assert paths(it.results()) == {"q": ["a", "b", "d"], "other": ["c"], "sunk": ["sent"]}
    it.append(manifest(2, results=(result("e"),), merged=(result("ab", tier=1),), replaced=(("q", "a"), ("q", "b"))))
    assert paths(it.results()) == {"q": ["d", "ab", "e"], "other": ["c"]}
    it.append(manifest(3, results=(result("all", whole=True), result("f"))))
    assert paths(it.results()) == {"q": ["all", "f"], "other": ["c"]}


def test_a_shared_file_is_replaced_for_the_queries_that_say_so(tmp_path: Path) -> None:
    it = log(tmp_path)
    it.append(manifest(0, results=(result("a", "p", bit=0), result("a", "q", bit=1), result("b", "q"))))
    assert [file.bit for file in it.results()["q"]] == [1, None]
    it.append(manifest(1, replaced=(("p", "a"),)))
    assert paths(it.results()) == {"q": ["a", "b"]}
    # Before files were shared, a path was enough.
    value = dataclasses.asdict(manifest(2))
    assert it.files.put_if_absent(manifest_name(2), seal("plait-manifest", {**value, "replaced": ["a"]}))
    assert paths(it.results()) == {"q": ["b"]}


@pytest.mark.parametrize("replaced", [["../a"], [["q", "../a"]], [["q"]], [1], [["q", 1]], [["q", "a", "b"]]])
def test_what_is_replaced_is_a_file_of_the_checkpoint(replaced: list[Any]) -> None:
    value = {**dataclasses.asdict(manifest(0)), "replaced": replaced}
    with pytest.raises(CorruptionError, match=r"PATH_OUTSIDE|MANIFEST_CORRUPT"):
        Manifest.decode(seal("plait-manifest", value))


@pytest.mark.parametrize("every", [1, 3, 7])
def test_a_snapshot_stands_for_all_results_before_it(tmp_path: Path, every: int) -> None:
    it, rng = log(tmp_path), random.Random(every)
    files: dict[str, tuple[ResultFile, ...]] = {}
    for epoch in range(40):
        new = tuple(
            result(f"{epoch}/{n}", rng.choice("pqr"), passing=rng.random() < 0.3) for n in range(rng.randint(0, 3))
        )
        old = [f for found in files.values() for f in found if not f.passing and f.query == "p"]
        gone = old[: rng.randint(2, 5)] if len(old) > 5 else []
        merged = (result(f"{epoch}/m", "p", tier=1),) if gone else ()
        one = manifest(epoch, results=new, merged=merged, replaced=tuple((f.query, f.path) for f in gone))
        files = results_after(files, one)
        if epoch % every == 0:
            one = dataclasses.replace(one, snapshot=(), snapshot_results=tuple(f for fs in files.values() for f in fs))
        it.append(one)
        assert it.results() == files
        it.prune(2e10)
        assert it.results() == files
        assert len(it.epochs()) <= every
    os.unlink(it.files.where(manifest_name(it.epochs()[-1])))
    if every > 3:
        os.unlink(it.files.where(manifest_name(it.epochs()[-2])))
        with pytest.raises(CorruptionError, match="MANIFEST_MISSING"):
            it.results()


def test_a_log_of_the_format_before_is_read_whole_until_the_first_new_snapshot(tmp_path: Path) -> None:
    it = log(tmp_path)
    for one in history(20, 8):
        # Manifests without results were pruned, others never: gaps are no damage.
        if one.epoch in (2, 5) or one.epoch >= 15:
            old = dataclasses.replace(one, results=(ResultFile("q", f"{one.epoch}", 1, 1, ""),))
            assert it.files.put_if_absent(manifest_name(one.epoch), of_format_3(old))
    expected = it.live()
    assert paths(it.results()) == {"q": ["2", "5", "15", "16", "17", "18", "19"]}
    # A snapshot that says nothing of results lets nothing be deleted.
    assert it.prune(2e10) == 0
    files = it.results()["q"]
    snapshot = tuple(i for infos in expected.segments.values() for i in infos)
    it.append(manifest(20, snapshot=snapshot, snapshot_results=files))
    assert it.prune(2e10) == 7
    assert it.epochs() == [20]
    assert it.results() == {"q": files}
    assert it.live().segments == expected.segments


def test_receipts_add_up(tmp_path: Path) -> None:
    it = log(tmp_path)
    assert it.receipt(3) == set()
    it.record_receipt(3, ["a"])
    it.record_receipt(3, ["b", "a"])
    assert it.receipt(3) == {"a", "b"}
    assert it.receipt(2) == set()
    assert it.files.names("receipts") == ["000000000003.json"]


def test_pruning_keeps_the_newest_snapshot_and_what_follows(tmp_path: Path) -> None:
    it = log(tmp_path)
    for one in history(20, 8):
        results = (result("r"),) if one.epoch == 4 else ()
        full = None if one.snapshot is None else ((result("r"),) if one.epoch > 4 else ())
        it.append(dataclasses.replace(one, results=results, snapshot_results=full))
        it.record_receipt(one.epoch, ["q"])
    expected = it.live()
    assert it.prune(0.0) == 0
    # In the order of epochs, up to the first that is too young.
    for epoch in range(20):
        os.utime(it.files.where(manifest_name(epoch)), (epoch, epoch))
        os.utime(it.files.where(f"receipts/{epoch:012d}.json"), (epoch, epoch))
    assert it.prune(9.5) == 10 + 10
    assert it.epochs() == list(range(10, 20))
    assert it.prune(2e10) == 5 + 5
    assert it.epochs() == [15, 16, 17, 18, 19]
    assert it.prune(2e10) == 0
    assert it.live() == expected
    assert paths(it.results()) == {"q": ["r"]}
    # A receipt stays as long as its manifest: without it, the rows would count as not delivered.
    assert it.receipt(15) == it.receipt(19) == {"q"}
    assert it.receipt(14) == set()


def test_results_are_read_while_the_log_is_pruned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    it = log(tmp_path)
    for one in history(20, 8)[:16]:
        it.append(dataclasses.replace(one, snapshot_results=() if one.snapshot is not None else None))
    listed, more = it.epochs, iter(range(2))

    def epochs() -> list[int]:
        found = listed()
        # Meanwhile the next snapshot is committed, and what was listed is deleted.
        if next(more, None) == 0:
            it.append(manifest(16, snapshot=(), snapshot_results=(result("r"),)))
            for epoch in range(16):
                os.unlink(it.files.where(manifest_name(epoch)))
        return found

    monkeypatch.setattr(it, "epochs", epochs)
    assert paths(it.results()) == {"q": ["r"]}
