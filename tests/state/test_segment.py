"""Segments: what is written is what is read, or an error."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from plait.errors import CorruptionError, StorageError
from plait.state.files.segment_home import SegmentHome
from plait.state.segments import segment_reader as reader
from plait.state.segments.run import MemoryRun
from plait.state.segments.segment import SegmentInfo, write_segment
from plait.state.segments.segment_reader import open_segment
from tests.state.rows import MOMENT, everything, sorted_rows, store, write, write_deep


@pytest.fixture(autouse=True)
def _fresh_process() -> None:
    reader._open.clear()


Write = Callable[..., SegmentInfo]
both = pytest.mark.parametrize("put", [write, write_deep], ids=["flat", "deep"])


def test_every_type_comes_back_as_it_was(tmp_path: Path) -> None:
    of = store(time="timestamp")
    rows, hashes = sorted_rows(pa.concat_tables([everything().slice(0, 2), everything().slice(2)]), of.key)
    info = write_segment(SegmentHome(str(tmp_path)), of, rows, hashes, epoch=3, tier=1, sync=True)
    read = open_segment(SegmentHome(str(tmp_path)), info)
    assert isinstance(read, MemoryRun)
    read.table.validate(full=True)
    assert read.table.equals(rows)
    assert read.hashes.tolist() == hashes.tolist()
    assert info == SegmentInfo.from_json(json.loads(json.dumps(info.to_json())))
    micros = int(np.datetime64(MOMENT.replace(second=0), "us").astype(int))
    assert (info.epoch, info.tier, info.rows, info.keys, info.max_arrived) == (3, 1, 6, 6, 9)
    assert (info.min_time, info.max_time) == (micros, micros + 4_000_000)
    assert info.bytes == os.path.getsize(tmp_path / info.path)


def test_reading_copies_nothing(tmp_path: Path) -> None:
    info = write(tmp_path, store(), pa.table({"k": np.arange(100_000), "v": np.arange(100_000)}))
    before = pa.total_allocated_bytes()
    read = open_segment(SegmentHome(str(tmp_path)), info)
    assert pa.total_allocated_bytes() - before < 10_000
    assert not read.hashes.flags.owndata
    assert not read.hashes.flags.writeable
    assert read.table.column("v").num_chunks == 1
    assert not [f for f in os.listdir("/proc/self/fd") if str(tmp_path) in _target(f)]


def _target(handle: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{handle}")
    except FileNotFoundError:
        return ""


def test_key_groups_are_the_hull_of_the_hashes(tmp_path: Path) -> None:
    hashes = np.array([5 << 54, 5 << 54, (7 << 54) + 1], np.uint64)
    info = write_segment(
        SegmentHome(str(tmp_path)), store(), pa.table({"k": [1, 1, 2]}), hashes, epoch=0, tier=0, sync=False
    )
    assert (info.lo_group, info.hi_group, info.keys) == (5, 8, 2)
    top = np.array([2**64 - 1], np.uint64)
    info = write_segment(SegmentHome(str(tmp_path)), store(), pa.table({"k": [1]}), top, epoch=0, tier=0, sync=False)
    assert (info.lo_group, info.hi_group) == (1023, 1024)


def test_what_users_type_never_becomes_a_path(tmp_path: Path) -> None:
    info = write(tmp_path / "state", store(name="../../etc/passwd\0"), pa.table({"k": [1]}))
    assert [p.name for p in tmp_path.iterdir()] == ["state"]
    folder, name = info.path.split("/")
    assert (len(folder), len(name)) == (16, 32 + len(".arrow"))


def test_an_empty_segment_is_never_written(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="without rows"):
        write(tmp_path, store(), pa.table({"k": pa.array([], pa.int64())}))


def test_every_flipped_bit_is_noticed_before_parsing(tmp_path: Path) -> None:
    info = write(tmp_path, store(), everything())
    path = tmp_path / info.path
    good = path.read_bytes()
    rng = np.random.default_rng(0)
    for at in {0, len(good) - 1, *rng.integers(0, len(good), 400).tolist()}:
        bad = bytearray(good)
        bad[at] ^= 1 << int(rng.integers(0, 8))
        path.write_bytes(bad)
        with pytest.raises(CorruptionError) as error:
            open_segment(SegmentHome(str(tmp_path)), info)
        assert error.value.code == "SEGMENT_CORRUPT"
        assert "backup" in error.value.remedy
    path.write_bytes(good)
    assert open_segment(SegmentHome(str(tmp_path)), info).table.num_rows == 6


@both
def test_a_file_of_another_length_is_refused(tmp_path: Path, put: Write) -> None:
    info = put(tmp_path, store(), everything())
    path = tmp_path / info.path
    good = path.read_bytes()
    for bad in (b"", good[:1], good[: len(good) // 2], good[:-1], good + b"\0"):
        path.write_bytes(bad)
        with pytest.raises(CorruptionError) as error:
            open_segment(SegmentHome(str(tmp_path)), info)
        assert error.value.code == "SEGMENT_TRUNCATED"


@both
def test_a_missing_file_is_noticed_even_when_it_was_open(tmp_path: Path, put: Write) -> None:
    info = put(tmp_path, store(), everything())
    read = open_segment(SegmentHome(str(tmp_path)), info)
    assert open_segment(SegmentHome(str(tmp_path)), info) is read
    (tmp_path / info.path).unlink()
    with pytest.raises(CorruptionError) as error:
        open_segment(SegmentHome(str(tmp_path)), info)
    assert error.value.code == "SEGMENT_MISSING"
    # What was open stays readable.
    assert read.slice(0, 6).to_pylist() == sorted_rows(everything(), store().key)[0].to_pylist()


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """However small segments are, what has been verified is noted for other processes."""
    monkeypatch.setattr(reader, "_QUICK", -1)


def flip_a_bit(path: Path) -> None:
    """As a disk would: neither size nor time of the file tell."""
    before = path.stat()
    bad = bytearray(path.read_bytes())
    bad[-100] ^= 1
    with path.open("r+b") as file:
        file.write(bad)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@both
def test_a_small_segment_is_verified_by_every_process(tmp_path: Path, put: Write) -> None:
    info = put(tmp_path, store(), everything())
    verified = tmp_path / "verified"
    open_segment(SegmentHome(str(tmp_path)), info, str(verified))
    assert not verified.exists()
    flip_a_bit(tmp_path / info.path)
    reader._open.clear()  # as a new process would begin
    with pytest.raises(CorruptionError, match="SEGMENT_CORRUPT"):
        open_segment(SegmentHome(str(tmp_path)), info, str(verified))


@pytest.mark.usefixtures("noted")
@both
def test_a_file_that_changed_while_it_was_open_is_checked_again(tmp_path: Path, put: Write) -> None:
    info = put(tmp_path, store(), everything())
    open_segment(SegmentHome(str(tmp_path)), info, str(tmp_path / "verified"))
    bad = bytearray((tmp_path / info.path).read_bytes())
    bad[-100] ^= 1
    (tmp_path / info.path).unlink()
    (tmp_path / info.path).write_bytes(bad)
    for _ in range(2):
        with pytest.raises(CorruptionError, match="SEGMENT_CORRUPT"):
            open_segment(SegmentHome(str(tmp_path)), info, str(tmp_path / "verified"))
        reader._open.clear()


@pytest.mark.usefixtures("noted")
@both
def test_a_host_verifies_a_segment_once(tmp_path: Path, put: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    info = put(tmp_path, store(), everything())
    calls = []
    real = reader.xxhash.xxh3_128_hexdigest
    monkeypatch.setattr(reader.xxhash, "xxh3_128_hexdigest", lambda b: (calls.append(1), real(b))[1])
    for _ in range(3):
        reader._open.clear()  # as a new process would begin
        open_segment(SegmentHome(str(tmp_path)), info, str(tmp_path / "verified"))
    assert len(calls) == 1
    for _ in range(3):
        open_segment(SegmentHome(str(tmp_path)), info, str(tmp_path / "verified"))
    assert len(calls) == 1
    reader._open.clear()
    open_segment(SegmentHome(str(tmp_path)), info)
    assert len(calls) == 2
    (tmp_path / "file").touch()
    reader._open.clear()
    open_segment(SegmentHome(str(tmp_path)), info, str(tmp_path / "file" / "verified"))  # no marker, no harm
    assert len(calls) == 3


@pytest.mark.usefixtures("noted")
@both
def test_markers_that_others_could_have_written_are_not_believed(tmp_path: Path, put: Write) -> None:
    info = put(tmp_path, store(), everything())
    verified = tmp_path / "verified"
    open_segment(SegmentHome(str(tmp_path)), info, str(verified))
    flip_a_bit(tmp_path / info.path)
    verified.chmod(0o777)
    reader._open.clear()
    with pytest.raises(CorruptionError, match="SEGMENT_CORRUPT"):
        open_segment(SegmentHome(str(tmp_path)), info, str(verified))


@pytest.mark.usefixtures("noted")
def test_markers_of_deleted_segments_are_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verified = tmp_path / "verified"
    infos = [write(tmp_path, store(), pa.table({"k": [n]})) for n in range(4)]
    for one in infos[:3]:
        open_segment(SegmentHome(str(tmp_path)), one, str(verified))
    assert len(os.listdir(verified)) == 3
    for one in infos[:2]:
        (tmp_path / one.path).unlink()
    monkeypatch.setattr(reader, "_SWEEP", 1)
    open_segment(SegmentHome(str(tmp_path)), infos[3], str(verified))
    assert sorted(os.listdir(verified)) == sorted(i.path.replace("/", "-") for i in infos[2:])


@both
def test_another_checksum_in_the_manifest_is_not_answered_from_the_cache(tmp_path: Path, put: Write) -> None:
    info = put(tmp_path, store(), everything())
    open_segment(SegmentHome(str(tmp_path)), info)
    with pytest.raises(CorruptionError, match="SEGMENT_CORRUPT"):
        open_segment(SegmentHome(str(tmp_path)), dataclasses.replace(info, checksum="0" * 32))


def test_only_so_many_segments_stay_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "CACHED", 3)
    monkeypatch.setattr(reader, "_SWEEP", 1)
    infos = [write(tmp_path, store(), pa.table({"k": [n]})) for n in range(5)]
    for info in infos:
        open_segment(SegmentHome(str(tmp_path)), info)
    assert [path for _, path in reader._open] == [i.path for i in infos[2:]]
    for info in infos[2:]:
        (tmp_path / info.path).unlink()
    open_segment(SegmentHome(str(tmp_path)), infos[0])
    assert [path for _, path in reader._open] == [infos[0].path]


def test_what_was_opened_last_stays_open_longest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "CACHED", 2)
    infos = [write(tmp_path, store(), pa.table({"k": [n]})) for n in range(3)]
    first = open_segment(SegmentHome(str(tmp_path)), infos[0])
    open_segment(SegmentHome(str(tmp_path)), infos[1])
    assert open_segment(SegmentHome(str(tmp_path)), infos[0]) is first
    open_segment(SegmentHome(str(tmp_path)), infos[2])
    assert [path for _, path in reader._open] == [infos[0].path, infos[2].path]


@both
def test_rows_that_a_merge_has_taken_over_are_not_seen(tmp_path: Path, put: Write) -> None:
    info = put(tmp_path, store(), everything())
    whole = open_segment(SegmentHome(str(tmp_path)), info)
    for first in (0, 1, 5):
        rest = open_segment(SegmentHome(str(tmp_path)), dataclasses.replace(info, first=first, rows=6 - first))
        assert (rest.first, rest.hashes.tolist()) == (first, whole.hashes[first:].tolist())
        assert rest.slice(first, 6).to_pylist() == whole.slice(first, 6).to_pylist()
        assert rest.find(whole.hashes).at.tolist() == list(range(first, 6))
    assert open_segment(SegmentHome(str(tmp_path)), info).hashes.tolist() == whole.hashes.tolist()


def test_a_state_directory_that_is_a_file_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError) as error:
        write(tmp_path / "file" / "state", store(), pa.table({"k": [1]}))
    assert error.value.code == "STATE_UNWRITABLE"
    assert str(tmp_path) in error.value.cause
    assert error.value.remedy


FULL = """
    import resource, sys
    import numpy as np, pyarrow as pa
    from plait.errors import StorageError
    from tests.state.rows import store, write
    if sys.argv[2] == "limit":
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
    try:
        write(sys.argv[1], store(), pa.table({"k": np.arange(100_000)}))
    except StorageError as error:
        print(error.code, error.remedy)
"""


def run_full(directory: Path, how: str) -> str:
    root = Path(__file__).resolve().parents[2]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root / "src"), str(root)])}
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(FULL), str(directory), how]
    return subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout


def leftovers(directory: Path) -> list[Path]:
    return [p for p in directory.rglob("*") if p.is_file()]


def test_a_full_disk_is_reported_and_leaves_nothing_behind(tmp_path: Path) -> None:
    assert run_full(tmp_path, "limit").startswith("STATE_FULL free space")
    assert leftovers(tmp_path) == []


def test_a_full_tmpfs_is_reported_and_leaves_nothing_behind(tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this user cannot mount")
    try:
        assert run_full(tmp_path, "mount").startswith("STATE_FULL free space")
        assert leftovers(tmp_path) == []
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
