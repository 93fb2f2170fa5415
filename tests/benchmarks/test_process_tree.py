"""Process trees: memory limits that hold, patience that ends, and nothing left behind."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from benchmarks.memory_group import CgroupV1, CgroupV2, Watched, new_group
from benchmarks.process_tree import run_tree

HOLD = "import sys, time; held = bytearray(int(sys.argv[1]) << 20); print(len(held), flush=True); time.sleep(1)"


def holding(mib: int) -> list[str]:
    return [sys.executable, "-c", HOLD, str(mib)]


def test_a_tree_within_its_limit_ends_well_and_leaves_no_group(tmp_path: Path) -> None:
    group = new_group(512 << 20)
    ended = run_tree(holding(10), group, tmp_path / "log")
    assert (ended.code, ended.oom_kills, ended.late) == (0, 0, False)
    assert 10 << 20 < ended.peak_held <= ended.peak_bytes < 512 << 20
    assert (tmp_path / "log").read_text() == f"{10 << 20}\n"
    assert isinstance(group, Watched) or (isinstance(group, CgroupV1 | CgroupV2) and not group.folder.exists())


def test_a_tree_above_its_limit_is_killed(tmp_path: Path) -> None:
    ended = run_tree(holding(300), new_group(100 << 20), tmp_path / "log")
    assert ended.code == -9
    assert ended.over_limit


def test_without_a_group_the_tree_is_watched(tmp_path: Path) -> None:
    ended = run_tree(holding(300), Watched(100 << 20), tmp_path / "log")
    assert (ended.code, ended.enforced, ended.over_limit) == (-9, "watched", True)


def test_a_watched_trees_tmpfs_folder_counts(tmp_path: Path) -> None:
    (tmp_path / "state").write_bytes(os.urandom(1 << 20))
    assert Watched(None, tmp_path).look(os.getpid())[0] > Watched(None, None).look(os.getpid())[0] + (1 << 19)


def test_a_tree_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    ended = run_tree(
        [sys.executable, "-c", "import time; time.sleep(60)"], new_group(None), tmp_path / "log", patience=0.3
    )
    assert ended.late
    assert ended.seconds < 10


def test_patience_counts_from_the_file_that_says_it_has_begun(tmp_path: Path) -> None:
    starting = f"import time, pathlib; time.sleep(0.7); pathlib.Path({str(tmp_path / 'begun')!r}).touch(); "
    begins = tmp_path / "begun"
    soon = run_tree([sys.executable, "-c", starting], new_group(None), tmp_path / "log", patience=0.4, begins=begins)
    assert (soon.code, soon.late) == (0, False)
    begins.unlink()
    slow = [sys.executable, "-c", starting + "time.sleep(60)"]
    ended = run_tree(slow, new_group(None), tmp_path / "log", patience=0.4, begins=begins)
    assert ended.late
    assert 0.6 < ended.begun < ended.seconds - 0.3


def test_what_goes_to_the_disk_is_counted(tmp_path: Path) -> None:
    write = f"import os, time; f = open({str(tmp_path / 'file')!r}, 'wb'); f.write(bytes(4 << 20)); f.flush(); "
    ended = run_tree([sys.executable, "-c", write + "time.sleep(0.6)"], new_group(None), tmp_path / "log")
    if ended.enforced != "watched" and os.access("/proc/self/io", os.R_OK):
        assert ended.written_bytes >= 4 << 20


def test_the_files_of_both_versions_are_read(tmp_path: Path) -> None:
    (tmp_path / "memory" / "own").mkdir(parents=True)
    one = CgroupV1(5, mount=tmp_path, own="/own")
    assert (one.folder / "memory.limit_in_bytes").read_text() == "5"
    (one.folder / "memory.stat").write_text("cache 1\ntotal_cache 70\ntotal_rss 30\ntotal_shmem 20\n")
    (one.folder / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    assert (one.look(1), one.kills()) == ((50, 50), 2)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "cgroup.subtree_control").write_text("cpu memory\n")
    two = CgroupV2(6, mount=tmp_path, own="/own")
    assert (two.folder / "memory.max").read_text() == "6"
    (two.folder / "memory.stat").write_text("anon 30\nfile 70\nshmem 20\n")
    (two.folder / "memory.current").write_text("100\n")
    (two.folder / "memory.events").write_text("low 0\nhigh 0\nmax 4\noom 1\noom_kill 1\n")
    assert (two.look(1), two.kills(), two.reclaims(), two.peak()) == ((50, 50), 1, 4, 100)
