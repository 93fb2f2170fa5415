"""Segments outside of the checkpoint belong to one checkpoint, and not to a copy of it."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from plait.config import Config
from plait.errors import CheckpointError, CorruptionError
from plait.query.graph import JoinGraph
from plait.serve.cli import app
from plait.share.planner import Planner
from plait.state.files import owner as module
from plait.state.files.owner import owner_of
from plait.state.log.checkpoint import OWNER, OWNER_LOCK, Checkpoint, collect_garbage
from plait.state.log.inspect import Inspection
from plait.testing import LocalEngine, state_tables
from tests.share.streams import joined, rows, streams
from tests.webhdfs import WebHdfs

JOIN: JoinGraph = joined("a.k = b.k")


class Home:
    """A checkpoint whose segments lie elsewhere."""

    def __init__(self, base: Path) -> None:
        self.base, self.checkpoint, self.rest = base, base / "checkpoint", base / "rest"
        self.config = Config(tasks=1, sync=False, fan_in=2, state_dir=str(self.rest), gc_grace_seconds=0.0)

    def run(self, epochs: int = 1, checkpoint: Path | None = None) -> dict[str, int]:
        """Some epochs more; rows per store afterwards, all of which can be read."""
        planner = Planner({"q": JOIN}, streams("ab"), self.config)
        with LocalEngine(checkpoint or self.checkpoint, planner.plan, self.config, planner=planner) as engine:
            for _ in range(epochs):
                engine.run({name: rows(*range(20)) for name in "ab"})
            return {store: table.num_rows for store, table in state_tables(engine).items()}

    def segments(self) -> set[str]:
        return {str(p.relative_to(self.rest)) for p in self.rest.rglob("*.arrow")}

    def adopt(self, checkpoint: Path, *options: str) -> CheckpointError | None:
        done = CliRunner().invoke(app, ["state", "adopt", str(checkpoint), "--state-dir", str(self.rest), *options])
        assert done.exception is None or isinstance(done.exception, CheckpointError), done.exception
        return done.exception


@pytest.fixture
def home(tmp_path: Path) -> Home:
    made = Home(tmp_path)
    assert made.run(3) == {"a[k]": 60, "b[k]": 60}
    return made


def test_a_copy_is_refused_and_the_original_goes_on(home: Home) -> None:
    copy = Path(shutil.copytree(home.checkpoint, home.base / "copy"))
    before = home.segments()
    with pytest.raises(
        CheckpointError, match=r"STATE_OWNED_ELSEWHERE.*/checkpoint on host.*plait state adopt"
    ) as caught:
        home.run(checkpoint=copy)
    assert "--copy" in caught.value.remedy
    assert CliRunner().invoke(app, ["state", "compact", str(copy), "--state-dir", str(home.rest)]).exit_code == 1
    assert home.segments() == before
    # Nobody takes them from an owner that is there.
    refused = home.adopt(copy)
    assert refused is not None
    assert refused.code == "STATE_OWNED_ELSEWHERE"
    assert home.run() == {"a[k]": 80, "b[k]": 80}


def test_a_copy_gets_segments_of_its_own_by_adopting(home: Home) -> None:
    copy = Path(shutil.copytree(home.checkpoint, home.base / "copy"))
    assert home.adopt(copy, "--copy") is None
    assert home.run(4, checkpoint=copy) == {"a[k]": 140, "b[k]": 140}
    assert home.run(5) == {"a[k]": 160, "b[k]": 160}
    assert home.run(1, checkpoint=copy) == {"a[k]": 160, "b[k]": 160}
    assert len(os.listdir(home.rest)) == 2


def test_a_copy_that_cannot_be_made_changes_nothing(home: Home) -> None:
    copy = Path(shutil.copytree(home.checkpoint, home.base / "copy"))
    identity = (copy / "plait.json").read_bytes()
    it = Inspection(str(copy), str(home.rest))
    victim = Path(it.home.directory) / it.live().segments["a[k]"][0].path
    good = victim.read_bytes()
    victim.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    refused = home.adopt(copy, "--copy")
    assert isinstance(refused, CorruptionError)
    assert (copy / "plait.json").read_bytes() == identity
    assert len(os.listdir(home.rest)) == 1
    victim.write_bytes(good)
    assert home.run() == {"a[k]": 80, "b[k]": 80}


def test_a_renamed_checkpoint_goes_on_and_its_old_path_is_free(home: Home) -> None:
    moved = home.base / "moved"
    home.checkpoint.rename(moved)
    assert home.run(checkpoint=moved) == {"a[k]": 80, "b[k]": 80}
    # A new one at the old path is another checkpoint.
    assert home.run() == {"a[k]": 20, "b[k]": 20}
    assert home.run(checkpoint=moved) == {"a[k]": 100, "b[k]": 100}
    moved.rename(home.base / "again")
    assert home.run(checkpoint=home.base / "again") == {"a[k]": 120, "b[k]": 120}


def test_a_checkpoint_restored_in_place_goes_on(home: Home) -> None:
    shutil.copytree(home.base, home.base.with_name("backup"))
    home.run(2)
    shutil.rmtree(home.base)
    shutil.copytree(home.base.with_name("backup"), home.base)
    assert home.run() == {"a[k]": 80, "b[k]": 80}


def test_one_that_was_moved_from_another_disk_adopts_its_segments(home: Home) -> None:
    moved = Path(shutil.copytree(home.checkpoint, home.base / "moved"))
    shutil.rmtree(home.checkpoint)
    with pytest.raises(CheckpointError, match=r"STATE_OWNED_ELSEWHERE.*not to be seen from here"):
        home.run(checkpoint=moved)
    assert home.adopt(moved) is None
    assert home.run(checkpoint=moved) == {"a[k]": 80, "b[k]": 80}


def test_the_same_path_on_another_machine_is_another_checkpoint(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    twin = Path(shutil.copytree(home.checkpoint, home.base / "twin"))
    home.checkpoint.rename(home.base / "there")
    twin.rename(home.checkpoint)
    monkeypatch.setattr(module.socket, "gethostname", lambda: "another")
    with pytest.raises(CheckpointError, match="STATE_OWNED_ELSEWHERE"):
        home.run()


def test_two_drivers_on_one_state_directory_are_told_apart_by_its_lock(home: Home) -> None:
    with Checkpoint(str(home.checkpoint), home.config):
        copy = Path(shutil.copytree(home.checkpoint, home.base / "copy"))
        for options in ((), ("--copy",)):
            refused = home.adopt(copy, *options)
            assert refused is not None
            assert refused.code == "CHECKPOINT_IN_USE"
            assert f"pid {os.getpid()}" in refused.cause


def test_garbage_collection_leaves_the_owner(home: Home) -> None:
    with Checkpoint(str(home.checkpoint), home.config) as it:
        collect_garbage(it, it.log.live(), set(), -1000, 2e9)
        assert {OWNER, OWNER_LOCK} <= set(os.listdir(it.state_dir))
    home.run()


def test_segments_of_an_earlier_version_get_an_owner(home: Home) -> None:
    (owner,) = home.rest.glob(f"*/{OWNER}")
    owner.unlink()
    assert home.run() == {"a[k]": 80, "b[k]": 80}
    assert owner.exists()
    owner.write_bytes(owner.read_bytes()[:-1])
    with pytest.raises(CorruptionError, match="OWNER_CORRUPT"):
        home.run()


def test_behind_a_uri_the_uri_tells(home: Home, tmp_path: Path) -> None:
    service = WebHdfs(tmp_path / "service")
    try:
        config = dataclasses.replace(home.config, state_dir=service.uri("rest"))
        with Checkpoint(str(tmp_path / "one"), config) as one:
            assert owner_of(one.files, one.id).inode is not None
        shutil.copytree(tmp_path / "one", tmp_path / "two")
        with pytest.raises(CheckpointError, match="STATE_OWNED_ELSEWHERE"):
            Checkpoint(str(tmp_path / "two"), config).open()
        Checkpoint(str(tmp_path / "one"), config).open().close()
        with Checkpoint(service.uri("shared"), home.config) as shared:
            assert owner_of(shared.files, shared.id).inode is None
        Checkpoint(service.uri("shared"), home.config).open().close()
    finally:
        service.stop()
