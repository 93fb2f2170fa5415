"""Hashing against its inverse and a naive loop; key groups against their definition."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.config import KEY_GROUPS
from plait.kernels import U64, hashing
from plait.kernels.hashing import combine, even_bounds, hash_bytes, key_group, mix64, owner

WORD = st.integers(0, 2**64 - 1)
MASK = 2**64 - 1


def oracle_mix(z: int) -> int:
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    return z ^ (z >> 31)


def unmix(z: int) -> int:
    """The inverse of splitmix64's finaliser, step by step."""
    z ^= (z >> 31) ^ (z >> 62)
    z = z * pow(0x94D049BB133111EB, -1, 2**64) & MASK
    z ^= (z >> 27) ^ (z >> 54)
    z = z * pow(0xBF58476D1CE4E5B9, -1, 2**64) & MASK
    return z ^ (z >> 30) ^ (z >> 60)


def oracle_hash(data: bytes) -> int:
    h = len(data) * 0x9E3779B97F4A7C15 & MASK
    for at in range(0, len(data), 8):
        word = int.from_bytes(data[at : at + 8], "little") * 0x87C37B91114253D5 & MASK
        word = (word << 31 | word >> 33) & MASK
        h ^= word * 0x4CF5AD432745937F & MASK
        h = ((h << 27 | h >> 37) & MASK) * 5 + 0x52DCE729 & MASK
    return oracle_mix(h)


def hashes_of(texts: list[bytes]) -> list[int]:
    offsets = np.cumsum([0] + [len(t) for t in texts])
    return [int(h) for h in hash_bytes(offsets, np.frombuffer(b"".join(texts), np.uint8))]


@given(st.lists(WORD, max_size=50))
def test_mix64_is_the_splitmix_finaliser_and_can_be_undone(values: list[int]) -> None:
    mixed = [int(v) for v in mix64(np.array(values, np.uint64))]
    assert mixed == [oracle_mix(v) for v in values]
    assert [unmix(v) for v in mixed] == values


@given(st.lists(st.binary(max_size=40), max_size=20))
def test_byte_strings_hash_as_the_naive_loop_says(texts: list[bytes]) -> None:
    assert hashes_of(texts) == [oracle_hash(t) for t in texts]


def test_a_slice_hashes_the_same_wherever_it_lies() -> None:
    data = np.frombuffer(b"xxhello worldyy", np.uint8)
    assert int(hash_bytes(np.array([2, 13]), data)[0]) == hashes_of([b"hello world"])[0]


def test_hashes_depend_on_length_and_on_every_byte() -> None:
    zeros = [b"\0" * n for n in range(64)]
    assert len(set(hashes_of(zeros))) == 64
    base = bytearray(b"the quick brown fox jumps")
    changed = []
    for at in range(len(base)):
        for bit in range(8):
            other = bytearray(base)
            other[at] ^= 1 << bit
            changed.append(bytes(other))
    assert len(set(hashes_of([bytes(base), *changed]))) == 1 + len(changed)


def test_a_million_short_strings_do_not_collide() -> None:
    numbers = np.arange(1_000_000)
    data = np.char.zfill(numbers.astype("S7"), 7).view(np.uint8)
    hashes = hash_bytes(np.arange(0, 7_000_001, 7), data)
    assert len(np.unique(hashes)) == 1_000_000
    # And they spread: no key group has twice its share.
    assert np.bincount(key_group(hashes), minlength=KEY_GROUPS).max() < 2 * 1_000_000 / KEY_GROUPS


def test_combining_depends_on_order() -> None:
    left, right = mix64(np.arange(1000, dtype=np.uint64)), mix64(np.arange(1000, 2000, dtype=np.uint64))
    assert not (combine(left, right) == combine(right, left)).any()
    grid = combine(np.repeat(left, 1000), np.tile(right, 1000))
    assert len(np.unique(grid)) == 1_000_000


def test_the_number_of_key_groups_is_the_configured_one() -> None:
    assert hashing.GROUPS == KEY_GROUPS == 1 << (64 - 54)


def task_bounds(tasks: int) -> U64:
    """The first hash of every task."""
    return np.array(even_bounds(tasks)[:-1], np.uint64) << np.uint64(54)


@pytest.mark.parametrize("tasks", [1, 2, 3, 7, 10, 1000, 1023, 1024])
def test_every_key_group_has_exactly_one_owner(tasks: int) -> None:
    groups = np.arange(KEY_GROUPS, dtype=np.uint64)
    hashes = np.concatenate([groups << np.uint64(54), (groups << np.uint64(54)) + np.uint64(2**54 - 1)])
    owners = owner(hashes, even_bounds(tasks))
    for t in range(tasks):
        mine = key_group(hashes[owners == t])
        assert set(mine.tolist()) == set(range(t * 1024 // tasks, (t + 1) * 1024 // tasks))
    assert (np.searchsorted(task_bounds(tasks), hashes, side="right") - 1 == owners).all()


@given(st.lists(WORD, max_size=60), st.integers(1, 9))
def test_a_tasks_share_of_a_sorted_run_is_a_slice(values: list[int], tasks: int) -> None:
    run = np.sort(np.array([*values, 0, MASK], np.uint64))
    owners = owner(run, even_bounds(tasks))
    slices = [*np.searchsorted(run, task_bounds(tasks)).tolist(), len(run)]
    assert slices[0] == 0
    for t, (begin, end) in enumerate(pairwise(slices)):
        assert (owners[begin:end] == t).all()


def test_compiled_code_is_cached_where_only_the_user_can_write(tmp_path: Path) -> None:
    code = "import plait.kernels, os; print(os.environ['NUMBA_CACHE_DIR'])"
    env = {k: v for k, v in os.environ.items() if k != "NUMBA_CACHE_DIR"}
    found = _run(code, {**env, "HOME": str(tmp_path)})
    assert found == str(tmp_path / ".cache/plait/numba")
    assert stat.S_IMODE(os.stat(found).st_mode) == 0o700
    (tmp_path / "file").touch()
    fallback = _run(code, {**env, "HOME": str(tmp_path / "file"), "TMPDIR": str(tmp_path)})
    assert os.path.dirname(fallback) == str(tmp_path)
    assert stat.S_IMODE(os.stat(fallback).st_mode) == 0o700
    assert _run(code, {**env, "NUMBA_CACHE_DIR": str(tmp_path / "own")}) == str(tmp_path / "own")


def _run(code: str, env: dict[str, str]) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True
    ).stdout.strip()
