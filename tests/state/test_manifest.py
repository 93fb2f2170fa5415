"""Manifests: round trip, corruption, gaps, snapshots, receipts."""

from __future__ import annotations

import dataclasses
import os
import random
import threading
from pathlib import Path

import pytest

from plait.errors import CheckpointError, CorruptionError, StorageError
from plait.state.files import LocalFiles, put_if_absent
from plait.state.manifest import FORMAT, LOG, LiveState, Manifest, ManifestLog, ResultFile, manifest_name, seal
from plait.state.segment import SegmentInfo
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
    results=(ResultFile('q "quoted"\n', "r/1", 2, 3, "ff"),), snapshot=(info(3),),
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


def test_a_newer_format_is_refused_with_both_versions() -> None:
    newer = FULL.encode().replace(f"plait-manifest {FORMAT}".encode(), b"plait-manifest 12")
    with pytest.raises(CheckpointError, match=r"FORMAT_NEWER.*format 12.*up to 3.*upgrade plait"):
        Manifest.decode(newer)


def test_an_older_format_is_refused_with_what_to_do() -> None:
    older = FULL.encode().replace(f"plait-manifest {FORMAT}".encode(), b"plait-manifest 1")
    with pytest.raises(CheckpointError, match=r"FORMAT_OLDER.*format 1;.*reads format 3.*new checkpoint"):
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


def test_results_are_listed_in_the_order_of_epochs(tmp_path: Path) -> None:
    it = log(tmp_path)
    files = [ResultFile("q", f"r/{n}", n, n, "") for n in range(4)]
    it.append(manifest(0, results=(files[0], files[1])))
    it.append(manifest(1))
    it.append(manifest(2, results=(files[2], files[3])))
    assert list(it.results()) == files


def test_receipts_add_up(tmp_path: Path) -> None:
    it = log(tmp_path)
    assert it.receipt(3) == set()
    it.record_receipt(3, ["a"])
    it.record_receipt(3, ["b", "a"])
    assert it.receipt(3) == {"a", "b"}
    assert it.receipt(2) == set()
    assert it.files.names("receipts") == ["000000000003.json"]


def test_pruning_keeps_results_snapshots_and_what_follows(tmp_path: Path) -> None:
    it = log(tmp_path)
    for one in history(20, 8):
        it.append(dataclasses.replace(one, results=(ResultFile("q", "r", 1, 1, ""),) if one.epoch == 4 else ()))
        it.record_receipt(one.epoch, ["q"])
    expected = it.live()
    assert it.prune(0.0, set()) == 0
    assert it.prune(2e10, {"r"}) == 14 + 14
    assert it.epochs() == [4, 15, 16, 17, 18, 19]
    assert it.prune(2e10, {"r"}) == 0
    assert it.live() == expected
    assert [r.path for r in it.results()] == ["r"]
    # A receipt stays as long as its manifest: without it, the rows would count as not delivered.
    assert it.receipt(4) == it.receipt(15) == it.receipt(19) == {"q"}
    assert it.receipt(14) == set()
    # Once nobody keeps the rows, nothing keeps the manifest.
    assert it.prune(2e10, set()) == 2
    assert it.epochs() == [15, 16, 17, 18, 19]
    assert it.live() == expected
