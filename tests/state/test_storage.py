"""One contract for all places that can hold a checkpoint: a directory, and a WebHDFS service."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from plait.config import Config
from plait.errors import CheckpointError, StorageError
from plait.state.files import remote
from plait.state.files.places import place
from plait.state.files.remote import RemoteFiles
from plait.state.files.storage import Files, LocalFiles, numbered
from plait.state.log.checkpoint import Checkpoint
from tests.webhdfs import WebHdfs


@pytest.fixture
def service(tmp_path: Path) -> Iterator[WebHdfs]:
    it = WebHdfs(tmp_path / "service")
    yield it
    it.stop()


@pytest.fixture(params=["directory", "file", "webhdfs"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Files:
    if request.param == "webhdfs":
        found = place(request.getfixturevalue("service").uri("some/where/"), sync=True)
    else:
        path = tmp_path / "a b"
        found = place(f"file://{path}" if request.param == "file" else str(path), sync=True)
    found.make_directory("")
    return found


def test_a_file_is_created_once_and_read_back(files: Files) -> None:
    files.make_directory("log")
    assert files.read("log/1.json") is None
    assert files.put_if_absent("log/1.json", b"one")
    assert not files.put_if_absent("log/1.json", b"one")
    assert not files.put_if_absent("log/1.json", b"two")
    assert files.read("log/1.json") == b"one"
    assert files.names("log") == ["1.json"]
    assert files.where("log/1.json").endswith("/log/1.json")


def test_of_many_who_create_one_file_exactly_one_wins(files: Files) -> None:
    files.make_directory("fence")
    for name in ("fence/1.json", "fence/2.json"):
        start = threading.Barrier(8)

        def write(n: int, name: str = name, start: threading.Barrier = start) -> bool:
            start.wait()
            return files.put_if_absent(name, str(n).encode() * 1000)

        with ThreadPoolExecutor(8) as pool:
            won = [n for n, first in enumerate(pool.map(write, range(8))) if first]
        assert len(won) == 1
        assert files.read(name) == str(won[0]).encode() * 1000
    assert numbered(files, "fence") == [1, 2]
    assert sorted(files.names("fence")) == ["1.json", "2.json"], "no draft is left"


def test_a_file_is_replaced_whole(files: Files) -> None:
    for data in (b"a" * 1000, b"b"):
        files.replace("x", data)
        assert files.read("x") == data
    assert files.names("") == ["x"]


def test_what_is_not_there_is_no_error(files: Files) -> None:
    assert files.names("nothing") == []
    assert list(files.walk("nothing")) == []
    assert files.read("nothing") is None
    assert not files.delete_older("nothing", time.time() + 1000)
    files.delete("nothing")
    with pytest.raises(FileNotFoundError):
        list(files.blocks("nothing"))


def test_folders_are_walked_and_files_moved_and_deleted(files: Files) -> None:
    for name, size in (("r/a/1", 1), ("r/a/2", 2), ("r/b/c/3", 3), ("s", 4)):
        files.make_directory(name.rpartition("/")[0])
        files.put_if_absent(name, b"x" * size)
    assert sorted(files.walk("r")) == [("r/a/1", 1), ("r/a/2", 2), ("r/b/c/3", 3)]
    assert len(list(files.walk(""))) == 4
    files.move("r/b/c/3", "r/a/3")
    assert b"".join(files.blocks("r/a/3")) == b"xxx"
    files.delete_tree("r/b")
    files.delete("r/a/1")
    now = time.time()
    assert not files.delete_older("r/a/2", now - 1000)
    assert files.delete_older("r/a/2", now + 1000)
    assert [name for name, _ in files.walk("r")] == ["r/a/3"]


def test_a_large_file_goes_up_and_comes_back(tmp_path: Path, service: WebHdfs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "BLOCK", 1 << 16)
    data = os.urandom(11 << 20)
    (tmp_path / "large").write_bytes(data)
    there = RemoteFiles(service.uri("state"))
    with open(tmp_path / "large", "rb") as file:
        there.upload(file, "store/large")
    assert service.at(there.where("store/large")).read_bytes() == data
    there.download("store/large", str(tmp_path / "back"))
    assert (tmp_path / "back").read_bytes() == data
    assert abs((there.modified("store/large") or 0) - time.time()) < 100
    assert there.modified("store/nothing") is None


def test_a_service_that_does_not_answer_is_said_to_be_unreachable_by_every_call(service: WebHdfs) -> None:
    there = RemoteFiles(service.uri("x"))
    service.stop()
    calls: tuple[Callable[[], Any], ...] = (
        lambda: there.read("a"),
        lambda: there.names("a"),
        lambda: there.put_if_absent("a", b""),
        lambda: there.replace("a", b""),
        lambda: list(there.blocks("a")),
        lambda: there.make_directory("a"),
        lambda: there.modified("a"),
        lambda: Checkpoint(there.root, Config()).open(),
    )
    for call in calls:
        with pytest.raises(StorageError, match=r"STORAGE_UNREACHABLE.*webhdfs://localhost.*start again"):
            call()
    there.delete("a")
    service.start()
    assert there.names("a") == []


class Careless(MemoryFileSystem):  # type: ignore[misc]
    """A store that ignores the condition, as some S3 look-alikes do."""

    cachable = False
    store: dict[str, Any] = {}  # noqa: RUF012 - fsspec's own has it

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        super().pipe_file(path, value)


def test_a_store_that_creates_files_twice_is_refused_before_anything_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    careless = Careless()
    monkeypatch.setattr(RemoteFiles, "_client", lambda self: careless)
    monkeypatch.setattr(RemoteFiles, "_path", lambda self, name: f"/{name}")
    with pytest.raises(CheckpointError, match=r"STORAGE_NOT_ATOMIC.*two drivers"):
        Checkpoint("s3a://bucket/x", Config()).open()
    assert careless.find("/") == []


def test_a_missing_client_is_named_with_the_package_to_install() -> None:
    with pytest.raises(CheckpointError, match=r"STORAGE_CLIENT.*pip install gcsfs.*every executor"):
        Checkpoint("gs://bucket/x", Config()).open()


@pytest.mark.parametrize("uri", ["dbfs:/x", "ftp://host/x", "memory://x", "file://host/x"])
def test_other_schemes_are_refused_by_name_and_with_the_reason(uri: str) -> None:
    with pytest.raises(CheckpointError, match=f"SCHEME.*{uri.split(':')[0]!r}.*only if it is absent.*s3a.*webhdfs"):
        Checkpoint(uri, Config())


def test_hadoops_ports_are_taken_where_none_is_given() -> None:
    assert RemoteFiles("webhdfs://name-node/x")._client().url == "http://name-node:9870/webhdfs/v1"
    assert RemoteFiles("swebhdfs://name-node/x")._client().url == "https://name-node:9871/webhdfs/v1"
    assert RemoteFiles("webhdfs://name-node:1234/x")._client().url == "http://name-node:1234/webhdfs/v1"
    assert RemoteFiles("webhdfs://name-node/x/y")._path("a b") == "/x/y/a b"


def test_local_files_are_local() -> None:
    assert isinstance(place("/tmp/x", False), LocalFiles)
    assert place("file:///tmp/x", False).root == "/tmp/x"
