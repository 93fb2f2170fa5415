"""A directory of the parquet sink belongs to one query of one checkpoint; two drivers never share a draft."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from plait.config import Config
from plait.errors import CheckpointError, StorageError
from plait.runtime.driver import commit as commits
from plait.runtime.driver import sinks as module
from plait.runtime.driver.sinks import PARQUET_OWNER, Parquet
from plait.state.files.owner import Owner, owner_of
from plait.state.files.storage import put_if_absent
from plait.state.log.checkpoint import Checkpoint
from plait.state.log.manifest import ResultFile
from tests.state.test_manifest import manifest

CONFIG = Config(sync=False)


def owner(checkpoint: Path, query: str = "q") -> Owner:
    with Checkpoint(str(checkpoint), CONFIG) as it:
        return owner_of(it.files, it.id, query)


def claim(target: Path, by: Owner, ran: bool = False) -> Parquet:
    sink = Parquet(str(target), sync=False)
    sink.claim(by, ran)
    return sink


def deliver(sink: Parquet, epoch: int, text: bytes) -> None:
    source = Path(sink.path).with_name("source")
    source.write_bytes(text)
    sink.deliver(epoch, [str(source)], lambda: None)  # type: ignore[arg-type, return-value]


def test_another_query_and_another_checkpoint_are_refused(tmp_path: Path) -> None:
    mine = owner(tmp_path / "one")
    deliver(claim(tmp_path / "out", mine), 0, b"mine")
    for other in (owner(tmp_path / "one", "p"), owner(tmp_path / "two")):
        for ran in (False, True):
            with pytest.raises(CheckpointError, match=r"SINK_OWNED.*query 'q'.*/one.*directory of its own"):
                claim(tmp_path / "out", other, ran)
    claim(tmp_path / "out", mine)
    claim(tmp_path / "out", mine, ran=True)
    assert (tmp_path / "out" / f"epoch-{0:012d}-0000.parquet").read_bytes() == b"mine"


def test_a_renamed_checkpoint_keeps_its_directories_and_a_copy_has_none(tmp_path: Path) -> None:
    claim(tmp_path / "out", owner(tmp_path / "one"))
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    with pytest.raises(CheckpointError, match="SINK_OWNED"):
        claim(tmp_path / "out", owner(tmp_path / "copy"), ran=True)
    (tmp_path / "one").rename(tmp_path / "moved")
    claim(tmp_path / "out", owner(tmp_path / "moved"), ran=True)
    # As the remedy says.
    (tmp_path / "out" / PARQUET_OWNER).unlink()
    claim(tmp_path / "out", owner(tmp_path / "copy"), ran=True)


def test_what_an_earlier_version_wrote_is_that_of_a_checkpoint_that_has_run(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / f"epoch-{0:012d}-0000.parquet").write_bytes(b"old")
    with pytest.raises(CheckpointError, match=r"SINK_OWNED.*has not run yet"):
        claim(tmp_path / "out", owner(tmp_path / "fresh"))
    assert not (tmp_path / "out" / PARQUET_OWNER).exists()
    claim(tmp_path / "out", owner(tmp_path / "ran"), ran=True)
    with pytest.raises(CheckpointError, match="SINK_OWNED"):
        claim(tmp_path / "out", owner(tmp_path / "fresh"), ran=True)


def test_files_that_are_nobody_s_do_not_matter(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "_SUCCESS").touch()
    claim(tmp_path / "out", owner(tmp_path / "fresh"))


def test_a_path_that_is_a_file_is_unwritable(tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    with pytest.raises(StorageError, match="SINK_UNWRITABLE"):
        claim(tmp_path / "out", owner(tmp_path / "fresh"))


def test_two_drivers_that_deliver_one_epoch_do_not_share_a_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = owner(tmp_path / "one")
    first, second = claim(tmp_path / "out", mine), claim(tmp_path / "out", mine)
    late: list[Any] = [lambda: deliver(second, 3, b"the same rows")]

    def reached(point: str, epoch: int) -> None:
        if point == "sink.draft" and late:
            late.pop()()

    monkeypatch.setattr(module, "reached", reached)
    deliver(first, 3, b"the same rows")
    assert sorted(os.listdir(tmp_path / "out")) == [PARQUET_OWNER, f"epoch-{3:012d}-0000.parquet"]
    assert (tmp_path / "out" / f"epoch-{3:012d}-0000.parquet").read_bytes() == b"the same rows"


def test_a_draft_goes_with_the_attempt_or_when_it_is_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = owner(tmp_path / "one")
    sink = claim(tmp_path / "out", mine)
    with pytest.raises(StorageError, match="SINK_UNWRITABLE"):
        sink.deliver(0, [str(tmp_path / "nothing")], lambda: None)  # type: ignore[arg-type, return-value]

    def full(*_: object) -> None:
        raise OSError(28, "no space")

    monkeypatch.setattr(module.shutil, "copyfileobj", full)
    with pytest.raises(StorageError, match="SINK_UNWRITABLE"):
        deliver(sink, 0, b"x")
    assert os.listdir(tmp_path / "out") == [PARQUET_OWNER]
    for name, age in ((".draft-young", 60), (".draft-old", 7200), (".draft-000000000000-0000", 7200)):
        (tmp_path / "out" / name).touch()
        os.utime(tmp_path / "out" / name, (time.time() - age,) * 2)
    claim(tmp_path / "out", mine)
    assert sorted(os.listdir(tmp_path / "out")) == [".draft-young", PARQUET_OWNER]


def test_a_fenced_driver_calls_no_sink(tmp_path: Path) -> None:
    called: list[tuple[str, int]] = []

    def sink(query: str) -> Any:
        def take(epoch: int, _files: list[ResultFile]) -> None:
            called.append((query, epoch))
            if query == "a" and epoch == 1:
                # Another driver takes over while this one is at its sinks.
                put_if_absent(str(tmp_path / "fence" / f"{it.token + 1:012d}.json"), b"{}", False)

        return take

    sinks = {query: sink(query) for query in ("a", "b")}
    with Checkpoint(str(tmp_path), CONFIG) as it:
        commits.deliver(it, manifest(0), sinks)
        with pytest.raises(CheckpointError, match="FENCED"):
            commits.deliver(it, manifest(1), sinks)
        with pytest.raises(CheckpointError, match="FENCED"):
            commits.deliver(it, manifest(2), sinks)
        # What has its receipt needs no sink.
        commits.deliver(it, manifest(0), sinks)
    assert called == [("a", 0), ("b", 0), ("a", 1)]
