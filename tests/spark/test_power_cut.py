"""A power cut loses what was not synced, above all what Spark wrote.  The restart gives exactly the oracle's rows.

`Disk` sees every fsync of this process.  After the cut it gives back the checkpoint as such a disk has it: a file has
the bytes it had when it was last synced, a directory the names.  Python workers sync what they write themselves, in
processes of their own; that is taken as given here.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

import plait
from plait.runtime.driver import commit as commits
from plait.runtime.driver import join
from plait.runtime.driver.offsets import same_source, source_digest
from plait.state.files.storage import LocalFiles
from plait.testing import ScriptedStream, run_epochs
from tests.oracle import bag, batch_join
from tests.spark.pair import Pair

pytestmark = pytest.mark.spark

WORKERS = ("state", "results")
"""What tasks write."""


class Cut(Exception):
    """The power is off."""


class Disk:
    """What a disk below a directory holds for sure."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.bytes: dict[int, bytes] = {}
        self.names: dict[str, dict[str, int]] = {}
        # What has survived the last cut is there.
        for folder, _, names in os.walk(root):
            self.names[folder] = {entry.name: entry.inode() for entry in os.scandir(folder)}
            for path in (Path(folder, name) for name in names):
                self.bytes[path.stat().st_ino] = path.read_bytes()
        real = os.fsync

        def fsync(handle: int) -> None:
            real(handle)
            path = os.readlink(f"/proc/self/fd/{handle}")
            if os.path.isdir(path):
                self.names[path] = {entry.name: entry.inode() for entry in os.scandir(path)}
            else:
                with open(f"/proc/self/fd/{handle}", "rb") as file:
                    self.bytes[os.fstat(handle).st_ino] = file.read()

        patch.setattr(os, "fsync", fsync)

    def after_the_cut(self, torn: bool) -> dict[str, bytes | None]:
        """Files with their bytes, folders with None.  With `torn` unsynced files are there by name, without bytes."""
        found: dict[str, bytes | None] = {}

        def look(folder: str) -> None:
            found[folder] = None
            synced = self.names.get(folder, {})
            for entry in os.scandir(folder):
                if entry.is_dir():
                    if entry.name in WORKERS:
                        for path in Path(entry.path).rglob("*"):
                            found[str(path)] = path.read_bytes() if path.is_file() else None
                    elif torn or entry.name in synced:
                        look(entry.path)
                elif synced.get(entry.name) == entry.inode():
                    found[entry.path] = self.bytes.get(entry.inode(), b"")
                elif torn:
                    found[entry.path] = b""

        look(str(self.root))
        return found

    def restore(self, found: dict[str, bytes | None]) -> None:
        shutil.rmtree(self.root)
        for path, data in found.items():
            if data is None:
                os.makedirs(path, exist_ok=True)
            else:
                os.makedirs(os.path.dirname(path), exist_ok=True)
                Path(path).write_bytes(data)


class Unlimited(Pair):
    """Streams that give all their files in one epoch."""

    def frames(self) -> dict[str, DataFrame]:
        read = self.spark.readStream
        return {name: read.schema(s.schema).parquet(s.directory) for name, s in (("a", self.a), ("b", self.b))}


def cut_at(pair: Pair, point: str, epoch: int, torn: bool) -> None:
    """Runs until the power goes at a point of an epoch, and leaves what the disk has."""
    view: list[dict[str, bytes | None]] = []

    def reached(at: str, number: int) -> None:
        if (at, number) == (point, epoch):
            view.append(disk.after_the_cut(torn))
            raise Cut

    with pytest.MonkeyPatch.context() as patch:
        disk = Disk(pair.checkpoint, patch)
        for module in (commits, join):
            patch.setattr(module, "reached", reached)
        with pair.engine() as engine, pytest.raises(plait.PlaitError) as caught:
            run_epochs(engine)
    assert view, f"something else has happened: {caught.value}"
    disk.restore(view[0])


@pytest.mark.parametrize("torn", [False, True], ids=["forgotten", "torn"])
def test_a_power_cut_after_any_commit_loses_and_doubles_nothing(
    spark: SparkSession, tmp_path: Path, torn: bool
) -> None:
    pair = Pair(spark, tmp_path).arrive(14)
    # With the first epoch, where Spark compacts its logs of files (9), and before a commit: what Spark has written of
    # the epoch is synced at commit.2, and is not at commit.1.
    for point, epoch in (("commit.3", 0), ("commit.1", 1), ("commit.3", 2), ("commit.2", 4), ("commit.3", 9)):
        cut_at(pair, point, epoch, torn)
        manifests = sorted(int(p.stem) for p in (pair.checkpoint / "log").glob("*.json"))
        assert manifests == list(range(epoch + (point == "commit.3")))
    pair.arrive()
    assert pair.run() == [10, 11, 12, 13, 14]
    assert pair.run() == []


def test_a_stop_while_spark_writes_its_first_offsets_leaves_a_checkpoint_that_starts(
    spark: SparkSession, tmp_path: Path
) -> None:
    pair = Pair(spark, tmp_path)
    pair.run()
    for folder in ("offsets", "commits"):
        logs = pair.checkpoint / "spark" / folder
        assert not [name for name in os.listdir(logs) if name.isdigit()]
        for left in (".0.0f2a.tmp", "..0.0f2a.tmp.crc", ".0.crc"):
            (logs / left).write_bytes(b"v1")
    assert pair.arrive().run() == [0]


def test_more_that_arrives_after_the_cut_is_no_part_of_the_epoch_that_was_committed(
    spark: SparkSession, tmp_path: Path
) -> None:
    pair = Unlimited(spark, tmp_path).arrive(2)
    for epoch in range(3):
        cut_at(pair, "commit.3", epoch, torn=False)
        # Planned again, the epoch would have these rows too.
        pair.arrive(2)
    assert pair.run() == [3]


def test_without_sync_an_epoch_that_spark_plans_again_goes_on_if_it_is_the_same_and_is_refused_if_not(
    spark: SparkSession, tmp_path: Path
) -> None:
    streams = {name: ScriptedStream(spark, tmp_path / name, "k long, v long") for name in "ab"}
    for number in range(3):
        for name, stream in streams.items():
            stream.add([(number, ord(name))])

    def run() -> list[int]:
        with plait.Engine(spark, str(tmp_path / "checkpoint"), plait.Config(tasks=1, sync=False)) as engine:
            for name, stream in streams.items():
                # All files that there are in one epoch.
                engine.stream(name, spark.readStream.schema(stream.schema).parquet(stream.directory))
            query = engine.query("q", "SELECT a.k, a.v, b.v AS w FROM a JOIN b ON a.k = b.k")
            done = [progress["epoch"] for progress in run_epochs(engine)]
            tables = {name: stream.table() for name, stream in streams.items()}
            sql = "SELECT a.k, a.v, b.v AS w FROM a JOIN b ON a.k = b.k"
            assert bag(query.results().toArrow()) == batch_join(tables, sql)
            return done

    def lose(epoch: int) -> None:
        """All that Spark has written of an epoch."""
        logs = tmp_path / "checkpoint" / "spark"
        for folder in (logs / "offsets", logs / "commits", *(logs / "sources").iterdir()):
            for name in (f"{epoch}", f".{epoch}.crc"):
                (folder / name).unlink(missing_ok=True)

    assert run() == [0]
    lose(0)
    assert run() == [], "planned again, with the same files at another time"
    lose(0)
    for stream in streams.values():
        stream.add([(7, 7)])
    # The offsets would be the same, and the rows of the new files would never be joined.
    with pytest.raises(plait.CheckpointError, match="OFFSETS_CHANGED"):
        run()


def test_the_digest_covers_offsets_and_files_and_nothing_else(tmp_path: Path) -> None:
    files = LocalFiles(str(tmp_path), sync=False)
    for folder in ("spark/offsets", "spark/sources/0", "spark/sources/1", "spark/sources/late"):
        os.makedirs(tmp_path / folder)

    def offsets(epoch: int, *lines: str, version: int = 1, metadata: str = "{}") -> None:
        (tmp_path / "spark/offsets" / str(epoch)).write_text("\n".join((f"v{version}", metadata, *lines)))

    def listing(source: str, number: int, *paths: str, compact: bool = False) -> None:
        lines = (f'{{"path":"{p}","timestamp":1,"batchId":{number}}}' for p in paths)
        older = ['{"path":"old","timestamp":1,"batchId":0}'] if compact else []
        name = f"{number}.compact" if compact else str(number)
        (tmp_path / "spark/sources" / source / name).write_text("\n".join(("v1", *older, *lines)))

    assert source_digest(files, 0) == ""
    assert same_source(files, 0, "")
    listing("0", 0, "a")
    offsets(0, '{"logOffset":0}', '{"topic":{"0":7}}', "-")
    first = source_digest(files, 0)
    offsets(0, '{"logOffset":0}', '{"topic":{"0":7}}', "-", metadata='{"batchTimestampMs":1}')
    assert same_source(files, 0, first)
    offsets(0, '{"logOffset":0}', '{"topic":{"0":8}}', "-")
    assert not same_source(files, 0, first)
    offsets(0, '{"logOffset":0}', '{"topic":{"0":7}}', "-")
    listing("0", 0, "a", "b")
    assert not same_source(files, 0, first)
    listing("0", 0, "a")
    assert same_source(files, 0, first)
    # After a crash between two listings an epoch reads both of them.
    listing("0", 1, "b")
    listing("0", 2, "c", compact=True)
    offsets(1, '{"logOffset":2}', '{"topic":{"0":7}}', "-")
    second = source_digest(files, 1)
    listing("0", 1, "x")
    assert not same_source(files, 1, second)
    # A listing that Spark has compacted since is found in the next.
    os.unlink(tmp_path / "spark/sources/0/1")
    (tmp_path / "spark/sources/0/2.compact").write_text(
        'v1\n{"path":"b","timestamp":1,"batchId":1}\n{"path":"c","timestamp":1,"batchId":2}'
    )
    assert same_source(files, 1, second)
    # Named sources, in any order.
    listing("late", 0, "z")
    offsets(2, 'late:{"logOffset":0}', '0:{"logOffset":2}', version=2)
    named = source_digest(files, 2)
    offsets(2, '0:{"logOffset":2}', 'late:{"logOffset":0}', version=2, metadata='{"x":1}')
    assert same_source(files, 2, named)
    listing("late", 0, "y")
    assert not same_source(files, 2, named)


def test_a_digest_of_an_earlier_version_is_still_compared(tmp_path: Path) -> None:
    import xxhash

    files = LocalFiles(str(tmp_path), sync=False)
    os.makedirs(tmp_path / "spark/offsets")
    (tmp_path / "spark/offsets/0").write_bytes(b"v1\n{}\n-")
    old = xxhash.xxh3_128_hexdigest(b"v1\n{}\n-")
    assert same_source(files, 0, old)
    (tmp_path / "spark/offsets/0").write_bytes(b"v1\n{}\n0")
    assert not same_source(files, 0, old)
    os.unlink(tmp_path / "spark/offsets/0")
    assert not same_source(files, 0, old)
