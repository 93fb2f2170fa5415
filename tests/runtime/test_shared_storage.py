"""A checkpoint behind a URI: the same answers, whatever becomes of the cache, the service and other drivers."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from typer.testing import CliRunner

from plait.errors import CheckpointError, CorruptionError, StorageError
from plait.serve.state_cli import app
from plait.state.files.remote import RemoteFiles
from plait.state.files.segment_home import SegmentHome
from plait.state.log.checkpoint import Checkpoint, collect_garbage
from plait.state.log.compact import compact
from plait.state.log.inspect import Inspection
from plait.state.log.manifest import Manifest, manifest_name
from plait.state.segments.block_cache import CACHE
from plait.state.segments.segment import SegmentInfo, write_segment, writing
from plait.state.segments.segment_reader import open_segment
from plait.testing import LocalEngine
from tests.runtime.test_state_property import Life
from tests.state.rows import store
from tests.webhdfs import WebHdfs


@pytest.fixture
def service(tmp_path: Path) -> Iterator[WebHdfs]:
    it = WebHdfs(tmp_path / "service")
    yield it
    it.stop()


@pytest.fixture
def life(service: WebHdfs, tmp_path: Path) -> Life:
    return at(service.uri("check/point"), cache_dir=str(tmp_path / "cache"), merge_share=0.9)


def at(uri: str, **settings: Any) -> Life:
    return Life(uri, **settings)  # type: ignore[arg-type]


def steps(life: Life, engine: LocalEngine, count: int) -> None:
    for _ in range(count):
        life.step(engine)


def again(life: Life) -> None:
    """A step that failed had told its rows to the oracle; they come again."""
    for seen in life.seen.values():
        seen.pop()


def infos(engine: LocalEngine) -> list[SegmentInfo]:
    return [info for found in engine.live.segments.values() for info in found]


def cached(engine: LocalEngine) -> list[Path]:
    return [p for p in Path(engine.checkpoint.home.directory).rglob("*") if p.is_file()]


def on_service(service: WebHdfs, engine: LocalEngine, info: SegmentInfo) -> Path:
    return service.at(f"{engine.checkpoint.state_dir}/{info.path}")


def test_every_start_with_an_empty_cache_goes_on_exactly(life: Life, tmp_path: Path) -> None:
    for host in range(2):
        with life.start(cache_dir=str(tmp_path / f"host-{host}")) as engine:
            assert engine.checkpoint.state_dir.startswith("webhdfs://")
            steps(life, engine, 4)
            life.check(engine)
            account = engine.progress[-4]["state"]["cache"]
            assert (account["misses"] > 0) == (host > 0)
            assert (account["bytes"] > 0) == (host > 0)
    assert any(info.deep for info in infos(engine))
    life.sound()


def test_a_cache_that_is_wiped_or_loses_files_while_running_costs_nothing_but_downloads(life: Life) -> None:
    with life.start() as engine:
        for number in range(6):
            life.step(engine)
            if number % 2:
                shutil.rmtree(engine.checkpoint.home.directory)
            else:
                for path in cached(engine)[::2]:
                    path.unlink()
        life.check(engine)


def test_wiping_goes_on_while_segments_are_opened(life: Life) -> None:
    with life.start() as engine:
        steps(life, engine, 3)
        home, stop = engine.checkpoint.home, threading.Event()

        def wipe() -> None:
            while not stop.wait(0.1):
                shutil.rmtree(home.directory, ignore_errors=True)

        wiper = threading.Thread(target=wipe)
        wiper.start()
        try:
            for _ in range(20):
                for info in infos(engine):
                    assert len(open_segment(home, info).hashes) == info.rows
        finally:
            stop.set()
            wiper.join()
        life.check(engine)


def test_a_small_cache_stays_small_and_the_answer_right(life: Life) -> None:
    evicted = 0
    with life.start(cache_limit="10k") as engine:
        for _ in range(8):
            life.step(engine)
            evicted += engine.progress[-1]["state"]["cache"]["evicted"]
            weight = sum(p.stat().st_size for p in cached(engine))
            assert weight <= max(10 << 10, *(info.bytes for info in infos(engine)))
        life.check(engine)
        assert sum(info.bytes for info in infos(engine)) > 2 * (10 << 10)
    assert evicted > 8


def test_a_segment_being_written_is_not_evicted_by_others_and_survives_a_wipe(life: Life) -> None:
    """CI once lost the file of one task to the eviction of another, between its last byte and its upload."""
    with life.start(cache_limit="1k") as engine:
        steps(life, engine, 1)
        home = engine.checkpoint.home
        rows = pa.table({"k": list(range(500))})
        hashes = np.arange(500, dtype=np.uint64)

        def write(number: int) -> SegmentInfo:
            return write_segment(home, store(), rows, hashes, epoch=number, tier=0, sync=False)

        with ThreadPoolExecutor(4) as tasks:
            written = list(tasks.map(write, range(40)))
        for path in ("aa/bb.arrow", "aa/cc.arrow"):
            with writing(home, path, True) as tee:
                tee.write(b"half,")
                home.shrink(limit=0)
                if path.endswith("cc.arrow"):
                    shutil.rmtree(home.directory)
                tee.write(b"whole")
            assert home.files.read(path) == b"half,whole"
        assert [len(open_segment(home, info).hashes) for info in written] == [500] * 40
        assert not [path for path in cached(engine) if path.name.startswith(".tmp-")]


def test_segments_that_are_not_live_leave_the_cache(life: Life) -> None:
    with life.start(fan_in=64) as engine:
        steps(life, engine, 2)
        home, one, *rest = engine.checkpoint.home, *infos(engine)
        home.forget({one.path}, time.time() - 1000)
        assert len(cached(engine)) == 1 + len(rest)
        home.forget({one.path}, time.time() + 1000)
        assert [str(p.relative_to(home.directory)) for p in cached(engine)] == [one.path]


def test_many_who_fetch_one_segment_at_once_all_get_it(life: Life) -> None:
    with life.start() as engine:
        life.step(engine)
        home, info = engine.checkpoint.home, infos(engine)[0]
        shutil.rmtree(home.directory)
        start = threading.Barrier(6)

        def fetch(_: int) -> bool:
            start.wait()
            return home.fetch(info)

        with ThreadPoolExecutor(6) as pool:
            assert any(pool.map(fetch, range(6)))
        assert len(open_segment(home, info).hashes) == info.rows
        assert len(cached(engine)) == 1, "no draft is left"


def test_a_segment_that_is_gone_or_damaged_on_the_service_is_named_and_all_is_well_when_it_is_back(
    life: Life, service: WebHdfs
) -> None:
    with life.start() as engine:
        steps(life, engine, 4)
        engine.change(compress_above=None)
        life.step(engine)
        for info in (next(i for i in infos(engine) if i.deep), next(i for i in infos(engine) if not i.deep)):
            there = on_service(service, engine, info)
            whole = there.read_bytes()
            for damage, code in (
                (None, "SEGMENT_MISSING"),
                (whole[:-1], "SEGMENT_TRUNCATED"),
                (bytes([whole[0] ^ 1]) + whole[1:], "SEGMENT_CORRUPT"),
                (whole[:-1] + bytes([whole[-1] ^ 1]), "SEGMENT_CORRUPT"),
            ):
                shutil.rmtree(engine.checkpoint.home.directory)
                there.unlink() if damage is None else there.write_bytes(damage)
                before = engine.live
                with pytest.raises(CorruptionError, match=f"{code}.*webhdfs://localhost.*{info.path}.*restore"):
                    open_segment(engine.checkpoint.home, info)
                assert engine.live == before
                there.write_bytes(whole)
        life.step(engine)
        life.check(engine)


def test_a_damaged_copy_is_fetched_again(life: Life) -> None:
    CACHE.resize(0)
    with life.start() as engine:
        steps(life, engine, 5)
        for path in cached(engine):
            data = path.read_bytes()
            path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
        life.step(engine)
        for path in cached(engine):
            path.write_bytes(path.read_bytes()[:-3])
        life.step(engine)
        life.check(engine)


def test_a_block_that_rots_in_the_cache_is_replaced_by_the_next_attempt(life: Life) -> None:
    CACHE.resize(0)
    with life.start() as engine:
        steps(life, engine, 5)
        home, info = engine.checkpoint.home, next(i for i in infos(engine) if i.deep)
        segment = open_segment(home, info)
        path = Path(home.directory, info.path)
        with path.open("r+b") as file:
            file.write(bytes(b ^ 1 for b in path.read_bytes()[: info.meta]))
        with pytest.raises(CorruptionError, match="SEGMENT_CORRUPT"):
            segment.slice(info.first, info.first + 1)
        assert open_segment(home, info).slice(info.first, info.first + 1).num_rows == 1


def test_a_second_driver_takes_over_and_the_first_is_fenced(life: Life) -> None:
    with life.start() as first:
        steps(life, first, 2)
        with life.start() as second:
            with pytest.raises(CheckpointError, match=r"FENCED.*taken over"):
                life.step(first)
            again(life)
            steps(life, second, 2)
            life.check(second)


def test_a_service_that_is_down_is_reported_and_the_engine_goes_on_when_it_is_back(
    life: Life, service: WebHdfs
) -> None:
    with life.start() as engine:
        steps(life, engine, 3)
        service.stop()
        with pytest.raises(StorageError, match="STORAGE_UNREACHABLE"):
            life.step(engine)
        again(life)
        service.start()
        steps(life, engine, 2)
        life.check(engine)


def test_a_cache_directory_that_others_may_write_to_is_refused(life: Life) -> None:
    with life.start() as engine:
        directory = engine.checkpoint.home.directory
        os.makedirs(directory)
        os.chmod(directory, 0o777)
        with pytest.raises(StorageError, match=r"CACHE_NOT_PRIVATE.*cache_dir"):
            life.step(engine)
        again(life)
        os.chmod(directory, 0o700)
        life.step(engine)
        life.check(engine)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of its own, of one megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "plait-test", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_makes_room_by_giving_up_what_is_cached(service: WebHdfs, disk: Path) -> None:
    life = at(service.uri("x"), cache_dir=str(disk), cache_limit="1g", merge_share=0.9)
    with life.start() as engine:

        def fill() -> None:
            """Segments of long ago take all there is."""
            old = Path(engine.checkpoint.home.directory, "old")
            old.mkdir(parents=True, exist_ok=True)
            (old / "segment.arrow").write_bytes(bytes(shutil.disk_usage(disk).free - 4096))
            os.utime(old / "segment.arrow", (1, 1))

        steps(life, engine, 4)
        fill()
        with pytest.raises(StorageError, match="CACHE_FULL"):
            # What is being written cannot be begun anew by itself; the next attempt finds room.
            life.step(engine)
        again(life)
        life.step(engine)
        shutil.rmtree(engine.checkpoint.home.directory)
        fill()
        assert all(len(open_segment(engine.checkpoint.home, i).hashes) == i.rows for i in infos(engine))
        life.check(engine)


def test_the_command_line_looks_into_it_verifies_past_the_cache_and_compacts(life: Life, service: WebHdfs) -> None:
    with life.start() as engine:
        steps(life, engine, 5)
        life.catalogue(engine)
    uri = str(life.directory)

    def run(*arguments: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
        return result.exit_code, result.output

    assert "a[k]" in run("ls", uri)[1]
    assert "deep" in run("show", uri, "a[k]")[1]
    code, said = run("verify", uri)
    assert (code, said[:6]) == (0, "Sound:")
    there = on_service(service, engine, infos(engine)[0])
    whole = there.read_bytes()
    there.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    code, said = run("verify", uri)
    assert code == 1
    assert "SEGMENT_CORRUPT" in said
    there.write_bytes(whole)
    assert run("compact", uri)[0] == 0
    assert "Nothing to do" in run("compact", uri)[1]
    assert run("verify", uri)[0] == 0
    with life.start() as engine:
        steps(life, engine, 2)
        life.check(engine)


def slipping_in(engine: LocalEngine, meanwhile: Callable[[], None]) -> None:
    """Lets something happen between an engine's look at the fence and its manifest."""
    append = engine.checkpoint.log.append

    def late(manifest: Manifest) -> None:
        meanwhile()
        append(manifest)

    engine.checkpoint.log.append = late  # type: ignore[method-assign]


def test_a_commit_that_slips_in_after_a_takeover_does_not_count(life: Life) -> None:
    with life.start() as first:
        steps(life, first, 2)
        takers: list[LocalEngine] = []
        slipping_in(first, lambda: takers.append(life.start()))
        # Its manifest is there, and it stops before any sink hears of it.
        with pytest.raises(CheckpointError, match=r"FENCED.*taken over"):
            life.step(first)
    again(life)
    (second,) = takers
    with second:
        assert (second.live.epoch, second.checkpoint.log.last()) == (1, 2)
        with pytest.raises(CheckpointError, match=r"COMMITTED_TOO_LATE.*driver 1 after driver"):
            second.checkpoint.log.results()
        with pytest.raises(CheckpointError, match="EPOCH_COMMITTED_ELSEWHERE"):
            life.step(second)
        again(life)
    # Whoever comes next has not seen it either: it stays refused, until it is gone.
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"COMMITTED_TOO_LATE.*delete that file"):
            life.start()
    RemoteFiles(str(life.directory)).delete(manifest_name(2))
    with life.start() as third:
        steps(life, third, 3)
        life.check(third)
    # What was committed in time counts for every later driver.
    with life.start() as fourth:
        life.check(fourth)


def test_a_commit_that_slips_in_beside_a_compaction_is_found_and_nothing_is_lost(life: Life) -> None:
    def compacted() -> None:
        with life.start() as other:
            assert list(compact(other.checkpoint, 0, True))

    with life.start(fan_in=64) as engine:
        steps(life, engine, 3)
        slipping_in(engine, compacted)
        with pytest.raises(CheckpointError, match="FENCED"):
            life.step(engine)
    again(life)
    with pytest.raises(CheckpointError, match=r"COMMITTED_TOO_LATE.*delete that file"):
        life.start()
    RemoteFiles(str(life.directory)).delete(manifest_name(3))
    with life.start() as engine:
        life.check(engine)
        steps(life, engine, 2)
        life.check(engine)


def test_garbage_is_collected_by_the_clock_of_the_service(life: Life, service: WebHdfs) -> None:
    with life.start() as engine:
        steps(life, engine, 6)
        checkpoint, live = engine.checkpoint, engine.live
        named = {info.path for info in infos(engine)}
        stray = service.at(f"{checkpoint.state_dir}/x/stray")
        stray.parent.mkdir()
        stray.touch()
        # A driver whose clock is far ahead must not take what is being written for old.
        keep = engine.results.paths()
        collect_garbage(checkpoint, live, keep, 600, time.time() + 10_000)
        assert stray.exists()
        os.utime(stray, (1, 1))
        collect_garbage(checkpoint, live, keep, 600, time.time())
        assert not stray.exists()
        assert named <= {name for name, _ in checkpoint.home.files.walk("")}
        life.check(engine)


def test_state_and_checkpoint_may_lie_in_different_places(service: WebHdfs, tmp_path: Path) -> None:
    for checkpoint, state in (
        (service.uri("one"), str(tmp_path / "state")),
        (str(tmp_path / "two"), service.uri("state")),
    ):
        life = at(checkpoint, state_dir=state, cache_dir=str(tmp_path / "cache"), merge_share=0.9)
        for _ in range(2):
            with life.start() as engine:
                steps(life, engine, 3)
                life.check(engine)
                life.catalogue(engine)
        assert list(Inspection(checkpoint, state).findings()) == []


def test_the_default_cache_is_the_users_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    remote = RemoteFiles("webhdfs://host/x")
    monkeypatch.setenv("LOCAL_DIRS", f"{tmp_path / 'one'},{tmp_path / 'two'}")
    home = SegmentHome("", remote, "abc")
    assert home.directory == str(tmp_path / "one" / f"plait-cache-{os.geteuid()}-abc")
    home.prepare()
    assert os.stat(home.directory).st_mode & 0o777 == 0o700


def test_a_checkpoint_closed_and_opened_has_no_lock_and_a_new_token(life: Life) -> None:
    config = life.start_config()
    with Checkpoint(str(life.directory), config) as first, Checkpoint(str(life.directory), config) as second:
        assert (first.token, second.token) == (1, 2)
        assert first.id == second.id
        assert "driver.lock" not in first.files.names("")
