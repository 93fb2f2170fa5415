"""The checkpoint: layout, lock, fence, garbage."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pytest

from plait.config import Config
from plait.errors import CheckpointError, CorruptionError, StorageError
from plait.state.files import storage as module
from plait.state.files.places import local_path
from plait.state.files.storage import TEMPORARY, LocalFiles, put_if_absent
from plait.state.log.checkpoint import Checkpoint, collect_garbage
from plait.state.log.manifest import LiveState
from plait.state.log.sealed import FORMAT
from plait.state.segments.segment import SegmentInfo
from tests.state.rows import put_old_catalog, store, write
from tests.state.test_manifest import manifest

CONFIG = Config(sync=False)


def test_opening_creates_the_layout_and_opening_again_finds_it(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    with Checkpoint(str(path), Config()) as first:
        assert {p.name for p in path.iterdir()} == {
            "plait.json", "driver.lock", "log", "receipts", "results", "state", "fence", "spark",
        }  # fmt: skip
        name, token = first.id, first.token
        first.log.append(manifest(0))
    with Checkpoint(f"file:{path}", Config()) as second:
        assert (second.id, second.token) == (name, token + 1)
        assert second.log.last() == 0
        second.check_fence()


def test_state_may_live_elsewhere(tmp_path: Path) -> None:
    config = Config(sync=False, state_dir=str(tmp_path / "shm"))
    with Checkpoint(str(tmp_path / "one"), config) as one, Checkpoint(str(tmp_path / "two"), config) as two:
        assert one.state_dir == str(tmp_path / "shm" / one.id)
        assert one.state_dir != two.state_dir
        assert os.path.isdir(two.state_dir)


def test_paths_and_file_uris_mean_the_same() -> None:
    for text in ("/tmp/a b", "file:/tmp/a b", "file:///tmp/a%20b", "file://localhost/tmp/a b"):
        assert local_path(text) == "/tmp/a b"
    assert local_path("rel:ative") == os.path.abspath("rel:ative")


def test_a_path_below_a_file_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="CHECKPOINT_UNWRITABLE"):
        Checkpoint(str(tmp_path / "file" / "x"), CONFIG).open()
    with pytest.raises(StorageError, match="CHECKPOINT_UNWRITABLE"):
        Checkpoint(str(tmp_path / "file"), CONFIG).open()


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "7", '{"format": 1}', '{"format": "1", "id": "x"}', f'{{"format": 0, "id": "{1:032x}"}}']
)
def test_a_damaged_identity_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "plait.json").write_text(text)
    with pytest.raises(CorruptionError, match="CHECKPOINT_CORRUPT"):
        Checkpoint(str(tmp_path), CONFIG).open()


def test_a_newer_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plait.json").write_text(json.dumps({"format": 9, "id": f"{1:032x}"}))
    with pytest.raises(CheckpointError, match=r"FORMAT_NEWER.*format 9.*up to 4.*upgrade plait"):
        Checkpoint(str(tmp_path), CONFIG).open()


def test_an_older_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plait.json").write_text(json.dumps({"format": 1, "id": f"{1:032x}"}))
    with pytest.raises(
        CheckpointError, match=r"FORMAT_OLDER.*format 1;.*reads formats from 3 to 4.*finish with the version"
    ):
        Checkpoint(str(tmp_path), CONFIG).open()


OLD = {"format": 3, "id": f"{1:032x}"}


def identity_of(path: Path) -> tuple[int, str]:
    """As every release reads it."""
    value = json.loads((path / "plait.json").read_text())
    return value["format"], value["id"]


def test_an_older_checkpoint_is_upgraded_by_opening_it(tmp_path: Path) -> None:
    (tmp_path / "plait.json").write_text(json.dumps(OLD))
    with Checkpoint(str(tmp_path), CONFIG) as it:
        assert it.id == OLD["id"]
        assert identity_of(tmp_path) == (FORMAT, OLD["id"])
        assert not (tmp_path / "plait-upgrade.json").exists()


class Killed(BaseException):
    """Nothing after it happens."""


@pytest.mark.parametrize("step", ["before", "between", "after"])
def test_an_upgrade_that_is_killed_half_way_goes_on_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    (tmp_path / "plait.json").write_text(json.dumps(OLD))

    def killed(files: LocalFiles, name: str, data: bytes, durable: bool = True) -> None:
        if step == "between":
            # Where renames refuse a target that exists, there is none for a moment.
            (tmp_path / name).unlink()
        if step == "after":
            (tmp_path / name).write_bytes(data)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(LocalFiles, "replace", killed)
        with pytest.raises(Killed):
            Checkpoint(str(tmp_path), CONFIG).open()
    # What older releases look at first says that it is of a newer format, or is untouched.
    assert (tmp_path / "plait.json").exists() == (step != "between")
    with Checkpoint(str(tmp_path), CONFIG) as it:
        assert it.id == OLD["id"]
        it.log.append(manifest(0))
    assert identity_of(tmp_path) == (FORMAT, OLD["id"])
    assert not (tmp_path / "plait-upgrade.json").exists()
    with Checkpoint(str(tmp_path), CONFIG) as it:
        assert (it.id, it.log.last()) == (OLD["id"], 0)


def test_a_lost_identity_is_not_replaced(tmp_path: Path) -> None:
    with Checkpoint(str(tmp_path), CONFIG) as it:
        it.log.append(manifest(0))
    (tmp_path / "plait.json").unlink()
    with pytest.raises(CorruptionError, match="CHECKPOINT_CORRUPT"):
        Checkpoint(str(tmp_path), CONFIG).open()


def test_a_second_driver_in_one_process_is_refused(tmp_path: Path) -> None:
    first = Checkpoint(str(tmp_path), CONFIG).open()
    with pytest.raises(CheckpointError, match=f"CHECKPOINT_IN_USE.*pid {os.getpid()} on host"):
        Checkpoint(str(tmp_path), CONFIG).open()
    first.close()
    first.close()
    Checkpoint(str(tmp_path), CONFIG).open().close()


HOLD = """
import sys
from plait.config import Config
from plait.state.log.checkpoint import Checkpoint
with Checkpoint(sys.argv[1], Config(sync=False)) as it:
    print(it.token, flush=True)
    sys.stdin.readline()
    try:
        it.check_fence()
    except Exception as error:
        print(error.code, flush=True)
    sys.stdin.readline()
"""


def test_a_second_process_is_refused_and_a_fenced_one_notices(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdin is not None
        token = int(other.stdout.readline())
        with pytest.raises(CheckpointError, match=f"CHECKPOINT_IN_USE.*pid {other.pid} on host"):
            Checkpoint(str(tmp_path), CONFIG).open()
        # On another machine the lock may not be seen: there the token is all that stops the first driver.
        (tmp_path / "driver.lock").unlink()
        with Checkpoint(str(tmp_path), CONFIG) as mine:
            assert mine.token == token + 1
            mine.check_fence()
            print(file=other.stdin, flush=True)
            assert other.stdout.readline().strip() == "FENCED"
        other.kill()
    # A killed driver leaves no lock behind.
    Checkpoint(str(tmp_path), CONFIG).open().close()


def test_a_token_taken_by_another_driver_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raced = []

    def put(path: str, data: bytes, sync: bool) -> bool:
        if "fence" in path and not raced:
            raced.append(put_if_absent(path, b"the other one", sync))
        return put_if_absent(path, data, sync)

    monkeypatch.setattr(module, "put_if_absent", put)
    with Checkpoint(str(tmp_path), CONFIG) as it:
        assert it.token == 2
        it.check_fence()


def test_the_catalog_of_format_3_is_checked(tmp_path: Path) -> None:
    with Checkpoint(str(tmp_path), CONFIG) as it:
        assert it.catalog() is None
        put_old_catalog(it, {"queries": {"q": "SELECT 1"}})
        assert it.catalog() == {"queries": {"q": "SELECT 1"}}
        path = tmp_path / "catalog.json"
        path.write_bytes(path.read_bytes().replace(b"SELECT 1", b"SELECT 2"))
        with pytest.raises(CorruptionError, match="CATALOG_CORRUPT"):
            it.catalog()


def test_garbage_is_what_no_manifest_names_and_nobody_can_be_writing(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").touch()
    with Checkpoint(str(tmp_path / "cp"), CONFIG) as it:
        kept, dropped, fresh = (write(it.state_dir, store(), pa.table({"k": [n]})) for n in range(3))
        (Path(it.results_dir) / "q").mkdir()
        for name in ("q/kept.arrow", "q/dropped.arrow", "absolute.arrow"):
            (Path(it.results_dir) / name).touch()
        os.symlink(outside, Path(it.state_dir) / "link")
        os.symlink(outside / "precious", Path(it.state_dir) / "file link")
        (Path(it.path, "log") / f"{TEMPORARY}1").touch()
        (Path(it.spark_dir) / "offsets").touch()
        now = time.time() + 1000
        os.utime(Path(it.state_dir) / fresh.path, (now, now))
        live = LiveState(epoch=0, segments={kept.store: (kept,)})
        results = {"q/kept.arrow", str(Path(it.results_dir) / "absolute.arrow")}
        assert collect_garbage(it, live, results, 5000, now) == 0
        assert collect_garbage(it, live, results, 500, now) == 3
        assert exists(it, kept)
        assert exists(it, fresh)
        assert not exists(it, dropped)
        assert sorted(p.name for p in Path(it.results_dir).rglob("*.arrow")) == ["absolute.arrow", "kept.arrow"]
        assert (outside / "precious").exists()
        assert (Path(it.state_dir) / "link").is_symlink()
        assert (Path(it.spark_dir) / "offsets").exists()
        assert it.files.names("log") == []


def test_the_more_files_there_are_the_more_seldom_they_are_walked_through(tmp_path: Path) -> None:
    with Checkpoint(str(tmp_path), CONFIG) as it:
        kept = {f"q/{n}" for n in range(500)}
        stray = Path(it.results_dir) / "q" / "stray"
        stray.parent.mkdir()
        for name in kept:
            (Path(it.results_dir) / name).touch()
        swept = []
        for epoch in range(32):
            stray.touch()
            collect_garbage(it, LiveState(epoch=epoch), kept, 0, time.time() + 10)
            if not stray.exists():
                swept.append(epoch)
        assert swept == [0, 7, 14, 21, 28]


def test_results_that_an_earlier_driver_has_left_are_kept_for_the_grace_period(tmp_path: Path) -> None:
    """A DataFrame that was made before the restart may still read them."""
    with Checkpoint(str(tmp_path), CONFIG) as it:
        stray = Path(it.results_dir) / "old"
        stray.touch()
        os.utime(stray, (1, 1))
        collect_garbage(it, LiveState(), set(), 500, time.time() + 400)
        assert stray.exists()
        collect_garbage(it, LiveState(), set(), 500, time.time() + 600)
        assert not stray.exists()


def exists(it: Checkpoint, info: SegmentInfo) -> bool:
    return os.path.exists(os.path.join(it.state_dir, info.path))


def test_old_fences_are_collected_but_never_the_newest(tmp_path: Path) -> None:
    for _ in range(3):
        Checkpoint(str(tmp_path), CONFIG).open().close()
    with Checkpoint(str(tmp_path), CONFIG) as it:
        # Three tokens, and what the second and the third driver noted when they took over.
        assert collect_garbage(it, LiveState(), set(), 0, time.time() + 10) == 5
        assert sorted(it.files.names("fence")) == ["000000000004-after.json", "000000000004.json"]
    with Checkpoint(str(tmp_path), CONFIG) as it:
        assert it.token == 5


def test_a_fenced_driver_collects_nothing(tmp_path: Path) -> None:
    with Checkpoint(str(tmp_path), CONFIG) as it:
        segment = write(it.state_dir, store(), pa.table({"k": [1]}))
        put_if_absent(os.path.join(it.path, "fence", f"{it.token + 1:012d}.json"), b"{}", False)
        with pytest.raises(CheckpointError, match="FENCED"):
            collect_garbage(it, LiveState(), set(), 0, time.time() + 10)
        assert exists(it, segment)
