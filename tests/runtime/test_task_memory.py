"""How much memory a task may use: what the settings say, and what the machine has."""

from __future__ import annotations

import builtins
import io
import os
from pathlib import Path
from typing import Any

import pytest

from plait.config import LEAST_MEMORY, Config, bytes_of
from plait.errors import ConfigError
from plait.runtime.task import task_memory as memory
from plait.runtime.task.task_memory import compress_above, machine_memory, task_memory

SIZES = {
    "64m": 64 << 20, "2g": 2 << 30, "1t": 1 << 40, "65536k": 64 << 20, "67108864": 64 << 20,
    "64M": 64 << 20, "64 mb": 64 << 20, " 1GiB ": 1 << 30,
}  # fmt: skip


@pytest.mark.parametrize("text", SIZES)
def test_sizes_are_read_as_spark_writes_them(text: str) -> None:
    assert task_memory(Config(memory_limit=text), 1, "1") == SIZES[text]
    assert compress_above(Config(compress_above=text)) == SIZES[text]


@pytest.mark.parametrize("text", ["", "much", "1.5g", "-1g", "1x", "g", "1g 2", "0x10", "½g"])
def test_what_is_no_size_is_refused(text: str) -> None:
    for name in ("memory_limit", "compress_above"):
        with pytest.raises(ConfigError, match=rf"CONFIG.*{name}=.* is not a size.*512m or 2g"):
            Config(**{name: text})


@pytest.mark.parametrize("text", ["0", "63m", "67108863"])
def test_less_memory_than_works_is_refused_with_the_least(text: str) -> None:
    with pytest.raises(ConfigError, match=r"below the least that works.*at least 64m"):
        Config(memory_limit=text)
    assert task_memory(Config(memory_limit=str(LEAST_MEMORY)), 1, None) == LEAST_MEMORY


def test_sizes_can_be_spark_settings() -> None:
    settings = {"spark.plait.memory_limit": "256m", "spark.plait.compress_above": "0"}
    config = Config().with_spark_settings(settings)
    assert (task_memory(config, 1, None), compress_above(config)) == (256 << 20, 0)
    for name in ("memory_limit", "compress_above"):
        assert getattr(config.with_spark_settings({f"spark.plait.{name}": "none"}), name) is None
    with pytest.raises(ConfigError, match="is not a size"):
        Config().with_spark_settings({"spark.plait.memory_limit": "lots"})


def test_tasks_that_run_at_the_same_time_share_the_memory() -> None:
    config = Config(memory_limit="1g")
    assert task_memory(config, 8, "4") == 256 << 20
    assert task_memory(config, 2, "4") == 512 << 20
    assert task_memory(config, 1, "4") == 1 << 30
    cores = os.cpu_count() or 1
    for unknown in (None, "", "*"):
        assert task_memory(config, 1000, unknown) == (1 << 30) // cores
    assert task_memory(config, 4, "0") == 1 << 30


def test_state_is_compressed_above_what_is_said_or_the_page_cache_can_have() -> None:
    assert compress_above(Config(compress_above="3g")) == 3 << 30
    assert compress_above(Config(compress_above="0")) == 0
    assert 0 < compress_above(Config()) <= 0.75 * machine_memory()


def machine(monkeypatch: pytest.MonkeyPatch, files: dict[str, str]) -> None:
    """A machine of 8 GB on which these files, and no others, say something about cgroups."""

    def open_(path: str, *how: Any, **more: Any) -> Any:
        if path.startswith(("/proc/self/cgroup", "/sys/fs/cgroup")):
            if path not in files:
                raise FileNotFoundError(path)
            return io.StringIO(files[path])
        return builtins.open(path, *how, **more)

    sizes = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": (8 << 30) // 4096}
    monkeypatch.setattr(memory, "open", open_, raising=False)
    monkeypatch.setattr(memory.os, "sysconf", sizes.__getitem__)


V2 = {"/proc/self/cgroup": "0::/app\n"}
V1 = {"/proc/self/cgroup": "5:memory:/docker/x\n4:cpu,cpuacct:/docker/x\n0::/docker/x\n"}
MACHINES: dict[str, tuple[dict[str, str], int]] = {
    "no cgroups": ({}, 8 << 30),
    "no limit": ({**V2, "/sys/fs/cgroup/app/memory.max": "max\n"}, 8 << 30),
    "a limit": ({**V2, "/sys/fs/cgroup/app/memory.max": f"{1 << 30}\n"}, 1 << 30),
    "a limit above the machine": ({**V2, "/sys/fs/cgroup/app/memory.max": f"{1 << 40}\n"}, 8 << 30),
    "a limit mounted at the root": ({**V2, "/sys/fs/cgroup/memory.max": f"{2 << 30}\n"}, 2 << 30),
    "the first version": ({**V1, "/sys/fs/cgroup/memory/docker/x/memory.limit_in_bytes": f"{3 << 30}\n"}, 3 << 30),
    "the first version, unlimited": ({**V1, "/sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2**63 - 4096}"}, 8 << 30),
    "nonsense": ({**V2, "/sys/fs/cgroup/app/memory.max": "what?\n"}, 8 << 30),
}


@pytest.mark.parametrize("name", MACHINES)
def test_a_process_can_have_what_its_cgroup_lets_it(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    files, expected = MACHINES[name]
    machine(monkeypatch, files)
    assert machine_memory() == expected


def test_the_limit_of_a_group_above_holds_too(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "/proc/self/cgroup": "0::/system.slice/app.service\n",
        "/sys/fs/cgroup/system.slice/app.service/memory.max": "max\n",
        "/sys/fs/cgroup/system.slice/memory.max": f"{1 << 30}\n",
    }
    machine(monkeypatch, files)
    assert machine_memory() == 1 << 30


@pytest.mark.parametrize(
    ("limit", "expected"), [("2g", 128 << 20), ("8g", 512 << 20), ("64m", LEAST_MEMORY), ("64g", 512 << 20)]
)
def test_by_default_the_engine_takes_a_sixteenth_of_what_there_is(
    monkeypatch: pytest.MonkeyPatch, limit: str, expected: int
) -> None:
    machine(monkeypatch, {**V2, "/sys/fs/cgroup/app/memory.max": str(bytes_of("", limit))})
    assert task_memory(Config(), 1, "1") == expected
    assert task_memory(Config(memory_limit="3g"), 1, "1") == 3 << 30


@pytest.mark.parametrize(
    "files",
    [
        {**V2, "/sys/fs/cgroup/app/memory.max": "1000000", "/sys/fs/cgroup/app/memory.stat": "anon 600000\nfile 7\n"},
        {
            **V1,
            "/sys/fs/cgroup/memory/docker/x/memory.limit_in_bytes": "1000000",
            "/sys/fs/cgroup/memory/docker/x/memory.stat": "rss 1\ntotal_rss 600000\ntotal_cache 9\n",
        },
    ],
)
def test_the_page_cache_can_have_what_processes_do_not_hold(
    monkeypatch: pytest.MonkeyPatch, files: dict[str, str]
) -> None:
    machine(monkeypatch, files)
    assert memory.cacheable_memory() == 400_000
    assert compress_above(Config()) == 300_000


def test_this_machine_has_some(tmp_path: Path) -> None:
    assert LEAST_MEMORY < machine_memory() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
