"""How much memory there is, and how much of it a task may use."""

from __future__ import annotations

import contextlib
import os

from plait.config import LEAST_MEMORY, Config, bytes_of

_MOST_BY_DEFAULT = 2 << 30
_CACHED_FLAT = 0.75
"""Of what the page cache can have: state that is larger would be read from disk again and again."""
_CGROUP_LIMITS = ("memory.max", "memory.limit_in_bytes")


def machine_memory() -> int:
    """Bytes that this process can have: those of the machine, or of a memory cgroup around it that has less."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *(limit for limit, _ in _cgroups())])


def cacheable_memory() -> int:
    """Bytes that the page cache can have now: what is there less what processes hold, here or in a cgroup around."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free = [max(0, limit - held) for limit, held in _cgroups() if limit < machine]
    with contextlib.suppress(OSError, ValueError, StopIteration), open("/proc/meminfo", encoding="ascii") as file:
        free.append(int(next(line.split()[1] for line in file if line.startswith("MemAvailable"))) << 10)
    return min(free, default=machine)


def _cgroups() -> list[tuple[int, int]]:
    """Limits of the memory cgroups this process is in, and what their processes hold."""
    try:
        with open("/proc/self/cgroup", encoding="ascii") as file:
            groups = [line.strip().split(":", 2) for line in file]
    except (OSError, ValueError):
        return []
    found = []
    for _, controllers, path in groups:
        if controllers not in ("", "memory"):
            continue
        root = "/sys/fs/cgroup/memory" if controllers else "/sys/fs/cgroup"
        # A group has no more than those above it.  Inside a container the path is often that of the host, and the group
        # itself is mounted at the root.
        for folder in (root + path[:i] for i, letter in enumerate(path + "/") if letter == "/"):
            for name in _CGROUP_LIMITS:
                with contextlib.suppress(OSError, ValueError), open(os.path.join(folder, name)) as file:
                    found.append((int(file.read()), _held(folder)))
    return found


def _held(folder: str) -> int:
    """Anonymous memory of a cgroup and those below it: `total_rss` in version 1, `anon` in version 2."""
    with contextlib.suppress(OSError, ValueError), open(os.path.join(folder, "memory.stat")) as file:
        return sum(int(line.split()[1]) for line in file if line.startswith(("total_rss ", "anon ")))
    return 0


def task_memory(config: Config, tasks: int, executor_cores: str | None) -> int:
    """What one task may hold: tasks that run at the same time on an executor share `Config.memory_limit`."""
    cores = int(executor_cores) if executor_cores and executor_cores.isdigit() else os.cpu_count() or 1
    if config.memory_limit is not None:
        limit = bytes_of("memory_limit", config.memory_limit)
    else:
        limit = max(LEAST_MEMORY, min(machine_memory() // 16, _MOST_BY_DEFAULT))
    return limit // max(1, min(tasks, cores))


def compress_above(config: Config) -> float:
    """State larger than this is compressed."""
    if config.compress_above is not None:
        return bytes_of("compress_above", config.compress_above)
    return _CACHED_FLAT * cacheable_memory()
