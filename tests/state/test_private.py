"""A checkpoint, the notes of a run and the cache are this user's alone, whatever the umask says."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from plait.config import Config
from plait.errors import CheckpointError, StorageError
from plait.runtime.driver import verified
from plait.share.planner import Planner
from plait.state.files.segment_home import SegmentHome
from plait.state.log.checkpoint import Checkpoint
from plait.state.segments import segment_reader as reader
from plait.state.segments.segment_reader import open_segment
from plait.testing import LocalEngine
from tests.share.streams import joined, rows, streams
from tests.state.rows import store, write

CONFIG = Config(sync=False)


@pytest.fixture
def careless() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.mark.usefixtures("careless")
def test_directories_are_0700_and_files_0600_whatever_the_umask(tmp_path: Path) -> None:
    config = Config(tasks=1, sync=False, fan_in=2, compress_above="0", state_dir=str(tmp_path / "rest"))
    planner = Planner({"q": joined("a.k = b.k")}, streams("ab"), config)
    with LocalEngine(tmp_path / "checkpoint", planner.plan, config, planner=planner) as engine:
        for _ in range(3):
            engine.run({name: rows(*range(20)) for name in "ab"})
        engine.checkpoint.put_statistics({})
        engine.checkpoint.log.record_receipt(0, ["q"])
        places = [Path(engine.checkpoint.path), Path(engine.checkpoint.state_dir)]
    found = [path for place in places for path in (place, *place.rglob("*"))]
    assert {path.suffix for path in found} >= {".json", ".lock", ".deep", ".parquet"}
    assert {mode(path) for path in found if path.is_dir()} == {0o700}
    assert {mode(path) for path in found if path.is_file()} == {0o600}


def test_what_an_earlier_version_left_open_is_shut_when_it_is_opened(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    Checkpoint(str(path), CONFIG).open().close()
    for folder in (path, *path.iterdir()):
        folder.chmod(0o755 if folder.is_dir() else 0o644)
    with Checkpoint(str(path), CONFIG):
        assert mode(path) == 0o700
        assert {p.name: mode(p) for p in path.iterdir() if p.is_dir()} == dict.fromkeys(
            ("fence", "log", "receipts", "results", "spark", "state"), 0o700
        )
        assert mode(path / "driver.lock") == 0o600


def test_a_lock_is_not_a_link(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    Checkpoint(str(path), CONFIG).open().close()
    (tmp_path / "precious").write_text("not ours")
    (path / "driver.lock").unlink()
    os.symlink(tmp_path / "precious", path / "driver.lock")
    with pytest.raises(StorageError, match="CHECKPOINT_UNWRITABLE"):
        Checkpoint(str(path), CONFIG).open()
    assert (tmp_path / "precious").read_text() == "not ours"


def test_the_identity_has_a_checksum_and_the_plain_one_of_earlier_versions_is_read(tmp_path: Path) -> None:
    with Checkpoint(str(tmp_path), CONFIG) as it:
        name = it.id
    file = tmp_path / "plait.json"
    data = file.read_bytes()
    for at in range(len(data)):
        for bit in range(8):
            bad = bytearray(data)
            bad[at] ^= 1 << bit
            file.write_bytes(bad)
            # White space, or a digit of the id in upper case, means the same.
            with contextlib.suppress(CheckpointError):
                assert Checkpoint(str(tmp_path), CONFIG).identify() == name
    file.write_text(f'{{"format": 3, "id": "{name}"}}')
    with Checkpoint(str(tmp_path), CONFIG) as it:
        assert it.id == name


def test_notes_are_not_left_where_others_could_have_put_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_QUICK", -1)
    info = write(tmp_path / "state", store(), pa.table({"k": [1, 2, 3]}))
    home = SegmentHome(str(tmp_path / "state"))
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    theirs.chmod(0o777)
    linked = tmp_path / "linked"
    mine = tmp_path / "mine"
    mine.mkdir(mode=0o700)
    os.symlink(mine, linked)
    for folder in (theirs, linked):
        open_segment(home, info, str(folder))
        reader._open.clear()
    assert os.listdir(theirs) == []
    assert os.listdir(mine) == []
    open_segment(home, info, str(mine))
    assert [mode(mine / name) for name in os.listdir(mine)] == [0o600]


def test_the_place_for_notes_cannot_be_guessed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verified.tempfile, "gettempdir", lambda: str(tmp_path))
    with Checkpoint(str(tmp_path / "checkpoint"), CONFIG) as it:
        places = {verified.verified_dir(it) for _ in range(3)}
        assert len(places) == 3
        for place in places:
            os.mkdir(place)
        (tmp_path / "other").mkdir()
        verified.forget_verified(it)
        assert sorted(os.listdir(tmp_path)) == ["checkpoint", "other"]
