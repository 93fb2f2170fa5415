"""What files say never leads out of the checkpoint: neither a path in a manifest nor a symbolic link."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from plait.config import Config
from plait.errors import CheckpointError, CorruptionError
from plait.runtime.task.result_writer import ResultWriter
from plait.serve.cli import app
from plait.share.planner import Planner
from plait.state.files.places import place
from plait.state.files.segment_home import SegmentHome
from plait.state.files.storage import Files, LocalFiles, inside
from plait.state.log.checkpoint import Checkpoint
from plait.state.log.manifest import Manifest, ResultFile
from plait.state.log.sealed import seal
from plait.state.segments.segment import SegmentInfo
from plait.testing import LocalEngine
from tests.share.streams import joined, rows, streams
from tests.state.rows import info
from tests.state.test_manifest import FULL, manifest
from tests.webhdfs import WebHdfs

OUTSIDE = (
    "/etc/passwd", "../x", "a/../../x", "..", ".", "a/./b", "", "a//b", "a/", "/", "a\\..\\b", "c:/x", "file:/x",
    "a\0b", "a\nb", "x" * 300, None, 7, ["a"],
)  # fmt: skip


USES: tuple[Callable[[Files, str], object], ...] = (
    lambda files, name: files.read(name),
    lambda files, name: list(files.blocks(name)),
    lambda files, name: files.delete(name),
    lambda files, name: files.delete_older(name, 1e12),
    lambda files, name: files.delete_tree(name),
    lambda files, name: files.put_if_absent(name, b""),
    lambda files, name: files.replace(name, b""),
    lambda files, name: files.move("plait.json", name),
    lambda files, name: files.make_directory(name),
    lambda files, name: files.where(name),
)


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A checkpoint of three epochs, with something precious beside it."""
    path = tmp_path / "checkpoint"
    planner = Planner({"q": joined("a.k = b.k")}, streams("ab"), Config(sync=False))
    with LocalEngine(path, planner.plan, Config(tasks=1, sync=False), planner=planner) as engine:
        for epoch in range(3):
            engine.run({name: rows(*range(epoch, 20 + epoch)) for name in "ab"})
    (tmp_path / "precious").write_text("not ours")
    return path


@pytest.fixture
def remote(tmp_path: Path) -> Iterator[Files]:
    service = WebHdfs(tmp_path / "service")
    yield place(service.uri("checkpoint"), sync=False)
    service.stop()


@pytest.mark.parametrize("path", OUTSIDE, ids=repr)
def test_a_path_that_is_not_plain_is_refused_wherever_it_is_decoded(path: object) -> None:
    with pytest.raises(CorruptionError, match=r"PATH_OUTSIDE.*the file names"):
        inside(path, "the file")
    bad = dataclasses.replace(info(1), path=path)  # type: ignore[arg-type]
    result = ResultFile("q", path, 1, 1, "00")  # type: ignore[arg-type]
    for changes in ({"added": (bad,)}, {"snapshot": (bad,)}, {"removed": (path,)}, {"results": (result,)}):
        data = seal("plait-manifest", dataclasses.asdict(manifest(0, **changes)))
        with pytest.raises(CorruptionError, match=r"PATH_OUTSIDE.*log/0\.json"):
            Manifest.decode(data, "log/0.json")
    with pytest.raises(CorruptionError, match="PATH_OUTSIDE"):
        SegmentInfo.from_json(bad.to_json())


def test_paths_as_they_are_written_are_plain() -> None:
    assert Manifest.decode(FULL.encode()) == FULL
    for path in ("0123456789abcdef/0f.arrow", "a b/ż.parquet", "...", ".hidden/x"):
        assert inside(path, "the file") == path


def test_compacting_a_crafted_checkpoint_touches_nothing_outside_of_it(made: Path, tmp_path: Path) -> None:
    with Checkpoint(str(made), Config(sync=False)) as checkpoint:
        live = checkpoint.log.live()
        last = checkpoint.log.read(live.epoch)
    assert last is not None
    everything = [info for infos in live.segments.values() for info in infos]
    segment = made / "state" / everything[0].path
    for where in (str(tmp_path / "precious"), "../../precious"):
        # The file is a real segment, so that nothing but its path is wrong.
        (tmp_path / "precious").write_bytes(segment.read_bytes())
        crafted = [dataclasses.replace(everything[0], path=where), *everything[1:]]
        name = made / "log" / f"{live.epoch:012d}.json"
        name.write_bytes(dataclasses.replace(last, snapshot=tuple(crafted)).encode())
        done = CliRunner().invoke(app, ["state", "compact", str(made)])
        assert isinstance(done.exception, CorruptionError)
        assert done.exception.code == "PATH_OUTSIDE"
        assert str(name) in done.exception.cause
        assert (tmp_path / "precious").exists()


@pytest.mark.parametrize("name", ["../precious", "/precious", "a/../../precious", "a//b", "."])
def test_no_tree_opens_or_deletes_such_a_name(made: Path, remote: Files, name: str) -> None:
    for files in (LocalFiles(str(made), sync=False), remote):
        for use in USES:
            with pytest.raises(CorruptionError, match="PATH_OUTSIDE"):
                use(files, name)
    with pytest.raises(CorruptionError, match="PATH_OUTSIDE"):
        SegmentHome(str(made / "state")).delete(name)
    assert (made.parent / "precious").exists()


def test_nothing_is_written_or_deleted_through_a_link(made: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("not ours")
    os.symlink(outside, made / "state" / "link")
    os.symlink(outside, made / "link")
    os.symlink(outside / "precious", made / "file")
    files, home = LocalFiles(str(made), sync=False), SegmentHome(str(made / "state"))
    for use in (
        lambda: files.delete("link/precious"),
        lambda: files.delete_older("link/precious", 1e12),
        lambda: files.put_if_absent("link/new", b""),
        lambda: files.replace("link/precious", b""),
        lambda: files.make_directory("link/folder/below"),
        lambda: files.move("link/precious", "taken"),
        lambda: home.delete("link/precious"),
        lambda: home.create("link/new.arrow", sync=False),
    ):
        with pytest.raises(CheckpointError, match=r"LINK_INSIDE.*symbolic link"):
            use()
    # A link that has the name itself is what is replaced or deleted, not what it leads to.
    files.replace("file", b"ours")
    assert (made / "file").read_bytes() == b"ours"
    with pytest.raises(OSError, match="symbolic link"):
        files.delete_tree("link")
    assert not files.put_if_absent("link", b"")
    files.delete("link")
    assert not (made / "link").exists()
    assert (outside / "precious").read_text() == "not ours"
    assert sorted(os.listdir(outside)) == ["precious"]


def test_a_link_in_place_of_a_query_s_folder_takes_no_results(tmp_path: Path) -> None:
    import pyarrow as pa

    from plait.runtime.task.result_writer import results_folder

    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "results").mkdir()
    os.symlink(outside, tmp_path / "results" / results_folder("q"))
    writer = ResultWriter("q", ("x",), LocalFiles(str(tmp_path / "results"), sync=False), sync=False)
    with pytest.raises(CheckpointError, match="LINK_INSIDE"):
        writer.add(pa.table({"x": [1]}))
    assert os.listdir(outside) == []
