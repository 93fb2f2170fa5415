"""Limits and reads the memory of a process and all it starts.

`cgroup v1`, `cgroup v2`: the tree lives in a memory cgroup of its own, and the kernel charges it with its processes'
memory, the page cache of files it is first to touch, and what it writes to tmpfs.  Under pressure the page cache goes;
when the rest alone is above the limit, the kernel kills.  The group is a child of the group this process is in, so no
limit that was put on us is left behind, and it is gone afterwards.
`watched`: a tree is ended here when its summed PSS and its tmpfs folder pass the limit.  The page cache is not limited
then, so only what dies is comparable, not what is slow.  This is what is used where no group can be made, and where
memory is only read: PSS counts shared pages, such as mapped files, once.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

MOUNT = Path("/sys/fs/cgroup")
LOOK_EVERY_SECONDS = 0.2
WATCH_EVERY_SECONDS = 1.0
"""Summing up PSS disturbs the tree, so it is done less often where no limit depends on it."""


class MemoryGroup(Protocol):
    """A place where the memory of a process tree is limited and read."""

    enforced: str

    def entering(self, command: Sequence[str]) -> list[str]:
        """The command that first enters the group."""
        ...

    def members(self) -> list[int]:
        """Process ids in the group now."""
        ...

    def pause(self, elapsed: float) -> float:
        """Seconds to wait before the next look, for a tree that has run for `elapsed` seconds."""
        ...

    def look(self, pid: int) -> tuple[int, int]:
        """Bytes that cannot be reclaimed, and bytes of page cache, now."""
        ...

    def peak(self) -> int:
        """The largest number of bytes there ever were."""
        ...

    def kills(self) -> int:
        """Number of processes killed for memory."""
        ...

    def reclaims(self) -> int:
        """Number of times that the limit was hit."""
        ...

    def close(self) -> None:
        """Remove the group."""
        ...


class _Cgroup:
    """What the groups of both versions have in common: a folder, in which a process is entered by its id."""

    def __init__(self, folder: Path, limit_file: str, limit: int | None) -> None:
        self.folder = folder
        _make(folder, limit_file, limit)

    def entering(self, command: Sequence[str]) -> list[str]:
        # A shell enters and becomes the command: whatever that starts is in the group from its first page on.
        return ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.folder / "cgroup.procs"), *command]

    def members(self) -> list[int]:
        return [int(line) for line in (self.folder / "cgroup.procs").read_text().split()]

    def pause(self, elapsed: float) -> float:
        return LOOK_EVERY_SECONDS

    def close(self) -> None:
        _remove(self.folder)


class CgroupV1(_Cgroup):
    """A child of our own memory cgroup, by its version 1 files."""

    enforced = "cgroup v1"

    def __init__(self, limit: int | None, mount: Path = MOUNT, own: str | None = None) -> None:
        inside = own if own is not None else _own_cgroup("memory")
        super().__init__(mount / "memory" / inside.lstrip("/") / _new_name(), "memory.limit_in_bytes", limit)

    def look(self, pid: int) -> tuple[int, int]:
        stat = read_numbers(self.folder / "memory.stat")
        shared = stat.get("total_shmem", 0)
        return stat.get("total_rss", 0) + shared, max(stat.get("total_cache", 0) - shared, 0)

    def peak(self) -> int:
        return int((self.folder / "memory.max_usage_in_bytes").read_text())

    def kills(self) -> int:
        return read_numbers(self.folder / "memory.oom_control").get("oom_kill", 0)

    def reclaims(self) -> int:
        return int((self.folder / "memory.failcnt").read_text())


class CgroupV2(_Cgroup):
    """The same by the files of version 2; needs a group whose memory controller may be handed on."""

    enforced = "cgroup v2"

    def __init__(self, limit: int | None, mount: Path = MOUNT, own: str | None = None) -> None:
        parent = mount / (own if own is not None else _own_cgroup("")).lstrip("/")
        if "memory" not in (parent / "cgroup.subtree_control").read_text().split():
            (parent / "cgroup.subtree_control").write_text("+memory")
        super().__init__(parent / _new_name(), "memory.max", limit)
        self._peak = 0

    def look(self, pid: int) -> tuple[int, int]:
        stat = read_numbers(self.folder / "memory.stat")
        self._peak = max(self._peak, int((self.folder / "memory.current").read_text()))
        shared = stat.get("shmem", 0)
        return stat.get("anon", 0) + shared, max(stat.get("file", 0) - shared, 0)

    def peak(self) -> int:
        # Kernels before 5.19 have no memory.peak.
        file = self.folder / "memory.peak"
        return int(file.read_text()) if file.exists() else self._peak

    def kills(self) -> int:
        return read_numbers(self.folder / "memory.events").get("oom_kill", 0)

    def reclaims(self) -> int:
        return read_numbers(self.folder / "memory.events").get("max", 0)


class Watched:
    """No group of the kernel's: PSS is summed up here, and a tree above the limit is ended here."""

    enforced = "watched"

    def __init__(self, limit: int | None = None, tmpfs: Path | None = None) -> None:
        self.limit, self.tmpfs = limit, tmpfs
        self._peak = self._kills = 0

    def entering(self, command: Sequence[str]) -> list[str]:
        return list(command)

    def members(self) -> list[int]:
        return []

    def pause(self, elapsed: float) -> float:
        # Short runs are watched closely, long ones are not disturbed.
        return LOOK_EVERY_SECONDS if self.limit is not None else min(WATCH_EVERY_SECONDS, 0.05 + elapsed / 10)

    def look(self, pid: int) -> tuple[int, int]:
        held = tree_bytes(pid) + (folder_bytes(self.tmpfs) if self.tmpfs else 0)
        self._peak = max(self._peak, held)
        if self.limit is not None and held > self.limit and not self._kills:
            self._kills = 1
            kill_tree(pid)
        return held, 0

    def peak(self) -> int:
        return self._peak

    def kills(self) -> int:
        return self._kills

    def reclaims(self) -> int:
        return 0

    def close(self) -> None:
        pass


def new_group(limit: int | None, tmpfs: Path | None = None) -> MemoryGroup:
    """A cgroup where one can be made on this machine, else a watched tree."""
    for make in (CgroupV1, CgroupV2):
        try:
            return make(limit)
        except (OSError, LookupError):
            continue
    return Watched(limit, tmpfs)


def folder_bytes(folder: Path) -> int:
    """Bytes on disk of the files below a folder, now; a file that vanishes meanwhile counts nothing."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(parent, name)).st_blocks * 512
            except OSError:
                continue
    return total


def tree_bytes(pid: int) -> int:
    """Summed PSS of a process and its descendants, now; RSS where the system does not tell PSS."""
    import psutil

    total = 0
    for member in _tree(pid):
        with contextlib.suppress(psutil.Error):
            info = member.memory_full_info()
            total += getattr(info, "pss", 0) or info.rss
    return total


def kill_tree(pid: int | None, members: Sequence[int] = ()) -> None:
    """End a process, its descendants, and the members of its group that have lost their parent; nothing else."""
    import psutil

    tree = [] if pid is None else _tree(pid)
    for member in members:
        with contextlib.suppress(psutil.Error):
            tree.append(psutil.Process(member))
    for process in tree:
        with contextlib.suppress(psutil.Error):
            process.kill()


def _tree(pid: int) -> list[Any]:
    import psutil

    try:
        return [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.Error:
        return []


def read_numbers(file: Path) -> dict[str, int]:
    """The lines `name number` of a file, as the kernel writes them."""
    pairs = (line.split() for line in file.read_text().splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2}


def _new_name() -> str:
    return f"plait-bench-{uuid.uuid4().hex[:12]}"


def _own_cgroup(controller: str) -> str:
    """The path of the group we are in, below the mount of this controller ("" is version 2)."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return path
    raise LookupError(f"no cgroup controller {controller!r}")


def _make(folder: Path, file: str, limit: int | None) -> None:
    folder.mkdir()
    try:
        if limit is not None:
            (folder / file).write_text(str(limit))
        elif not (folder / file).exists():
            raise LookupError(f"{folder} has no {file}")
    except (OSError, LookupError):
        _remove(folder)
        raise


def _remove(folder: Path) -> None:
    """A group can only go when the last of its processes is gone, which takes a moment after the kill."""
    for _ in range(100):
        try:
            folder.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.1)
