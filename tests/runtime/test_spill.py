"""Spill files: bytes come back, nothing stays behind, and a full disk is said to be full."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.errors import StorageError
from plait.runtime.task.spill import Spill


@given(st.lists(st.binary(min_size=1, max_size=100), min_size=1))
def test_bytes_come_back_from_where_they_were_put(parts: list[bytes]) -> None:
    spill = Spill()
    places = []
    for number, part in enumerate(parts):
        places.append(spill.add(pa.py_buffer(part) if number % 2 else part))
        # Reading in between does not disturb writing.
        assert spill.read(places[number // 2]) == parts[number // 2]
    assert [len(place) for place in places] == [len(part) for part in parts]
    assert spill.size == sum(map(len, parts))
    mapped = spill.mapped()
    spill.clear()
    assert bytes(mapped) == b"".join(parts), "a map outlives the file"
    assert spill.size == 0


def test_what_needs_no_file_makes_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path / "gone"))
    spill = Spill()
    assert spill.mapped().size == 0
    spill.clear()


def test_the_file_lies_in_sparks_first_local_directory_and_has_no_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARK_LOCAL_DIRS", f"{tmp_path},/nowhere")
    spill = Spill()
    spill.add(b"abc")
    open_files = [os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd") if _is_link(n)]
    assert any(str(tmp_path) in name for name in open_files)
    assert list(tmp_path.iterdir()) == []
    spill.clear()
    open_files = [os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd") if _is_link(n)]
    assert not any(str(tmp_path) in name for name in open_files)


def _is_link(handle: str) -> bool:
    return os.path.islink(f"/proc/self/fd/{handle}")


def test_a_space_given_back_can_be_filled_again() -> None:
    spill = Spill()
    for text in (b"one", b"three"):
        place = spill.add(text)
        assert (place.begin, spill.read(place)) == (0, text)
        spill.clear()


def test_a_local_directory_that_is_gone_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path / "gone"))
    with pytest.raises(StorageError, match=r"SPILL_UNWRITABLE.*gone"):
        Spill().add(b"abc")


FULL = """
    import resource, sys
    from plait.errors import StorageError
    from plait.runtime.task.spill import Spill
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
    spill = Spill()
    try:
        for _ in range(1000):
            spill.add(b"x" * int(sys.argv[1]))
    except StorageError as error:
        print(error.code, error.remedy)
"""


@pytest.mark.parametrize("size", [100, 60_000], ids=["small", "large"])
def test_a_full_disk_is_reported(size: int) -> None:
    root = Path(__file__).resolve().parents[2]
    env = {**os.environ, "PYTHONPATH": str(root / "src")}
    command = [sys.executable, "-c", textwrap.dedent(FULL), str(size)]
    done = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
    assert done.stdout.startswith("SPILL_FULL free space")
