"""Runs a process and all it starts under one memory limit.

`cgroup v1`, `cgroup v2`: the tree lives in a memory cgroup of its own, and the kernel charges it with its processes'
memory, the page cache of files it is first to touch, and what it writes to tmpfs.  Under pressure the page cache goes;
when the rest alone is above the limit, the kernel kills.  The group is a child of the group this process is in, so no
limit that was put on us is left behind, and it is gone afterwards.
`watched`: where no group can be made, the tree is ended here when its summed PSS and its tmpfs folder pass the limit.
Then the page cache is not limited, so only what dies is comparable, not what is slow.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from benchmarks.jobs import tree_bytes
from plait.errors import ConfigError

MOUNT = Path("/sys/fs/cgroup")
LOOK_EVERY_SECONDS = 0.2
AFTER_A_KILL_SECONDS = 20.0
"""What is left of a tree after the kernel killed a part of it gets this long to notice."""
STARTING_SECONDS = 180.0
"""More than the start of Java and a warm-up take on a busy machine."""


@dataclass(frozen=True, slots=True)
class Look:
    """Memory of the tree at one moment: what cannot be reclaimed (anonymous, tmpfs), and the page cache."""

    seconds: float
    held: int
    cache: int


@dataclass(slots=True)
class Ended:
    """How a tree ended.  `peak_bytes` includes the page cache, `peak_held` is sampled and does not.

    `begun` is when its patience began to count; `read_bytes` and `written_bytes` went from and to block devices.
    """

    code: int
    seconds: float
    enforced: str
    limit: int | None
    peak_bytes: int
    peak_held: int
    oom_kills: int
    reclaims: int
    late: bool
    begun: float = 0.0
    read_bytes: int = 0
    written_bytes: int = 0
    looks: list[Look] = field(default_factory=list)

    @property
    def over_limit(self) -> bool:
        """Whether it was killed for its memory."""
        return self.oom_kills > 0


class Group(Protocol):
    """Where a tree's memory is limited and read."""

    enforced: str

    def entering(self, command: Sequence[str]) -> list[str]:
        """The command that first enters the group."""
        ...

    def members(self) -> list[int]:
        """Processes in the group now."""
        ...

    def look(self, pid: int) -> tuple[int, int]:
        """Bytes that cannot be reclaimed, and of page cache, now."""
        ...

    def peak(self) -> int:
        """The most bytes there ever were."""
        ...

    def kills(self) -> int:
        """Processes killed for memory."""
        ...

    def reclaims(self) -> int:
        """How often the limit was hit."""
        ...

    def close(self) -> None:
        """The group goes."""
        ...


def bytes_of(text: str) -> int:
    """A size as Spark and Java write it.

    >>> bytes_of("2g"), bytes_of("1.5m"), bytes_of("700")
    (2147483648, 1572864, 700)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgt]?)b?", text.strip().lower())
    if found is None:
        raise ConfigError("BENCH_SIZE", f"{text!r} is no size", "write, for example, 512m or 2g")
    return int(float(found[1]) * 1024 ** " kmgt".index(found[2] or " "))


class CgroupV1:
    """A child of our own memory cgroup, by its version 1 files."""

    enforced = "cgroup v1"

    def __init__(self, limit: int | None, mount: Path = MOUNT, own: str | None = None) -> None:
        inside = own if own is not None else _own_cgroup("memory")
        self.folder = mount / "memory" / inside.lstrip("/") / f"plait-bench-{uuid.uuid4().hex[:12]}"
        _make(self.folder, "memory.limit_in_bytes", limit)

    def entering(self, command: Sequence[str]) -> list[str]:
        return _entering(self.folder, command)

    def members(self) -> list[int]:
        return _numbers(self.folder / "cgroup.procs")

    def look(self, pid: int) -> tuple[int, int]:
        stat = _keyed(self.folder / "memory.stat")
        shared = stat.get("total_shmem", 0)
        return stat.get("total_rss", 0) + shared, max(stat.get("total_cache", 0) - shared, 0)

    def peak(self) -> int:
        return int((self.folder / "memory.max_usage_in_bytes").read_text())

    def kills(self) -> int:
        return _keyed(self.folder / "memory.oom_control").get("oom_kill", 0)

    def reclaims(self) -> int:
        return int((self.folder / "memory.failcnt").read_text())

    def close(self) -> None:
        _remove(self.folder)


class CgroupV2:
    """The same by the files of version 2; needs a group whose memory controller may be handed on."""

    enforced = "cgroup v2"

    def __init__(self, limit: int | None, mount: Path = MOUNT, own: str | None = None) -> None:
        parent = mount / (own if own is not None else _own_cgroup("")).lstrip("/")
        if "memory" not in (parent / "cgroup.subtree_control").read_text().split():
            (parent / "cgroup.subtree_control").write_text("+memory")
        self.folder = parent / f"plait-bench-{uuid.uuid4().hex[:12]}"
        _make(self.folder, "memory.max", limit)
        self._peak = 0

    def entering(self, command: Sequence[str]) -> list[str]:
        return _entering(self.folder, command)

    def members(self) -> list[int]:
        return _numbers(self.folder / "cgroup.procs")

    def look(self, pid: int) -> tuple[int, int]:
        stat = _keyed(self.folder / "memory.stat")
        self._peak = max(self._peak, int((self.folder / "memory.current").read_text()))
        shared = stat.get("shmem", 0)
        return stat.get("anon", 0) + shared, max(stat.get("file", 0) - shared, 0)

    def peak(self) -> int:
        # Kernels before 5.19 have no memory.peak.
        file = self.folder / "memory.peak"
        return int(file.read_text()) if file.exists() else self._peak

    def kills(self) -> int:
        return _keyed(self.folder / "memory.events").get("oom_kill", 0)

    def reclaims(self) -> int:
        return _keyed(self.folder / "memory.events").get("max", 0)

    def close(self) -> None:
        _remove(self.folder)


class Watched:
    """No group: sums are taken here, and a tree above the limit is ended here."""

    enforced = "watched"

    def __init__(self, limit: int | None, tmpfs: Path | None) -> None:
        self.limit, self.tmpfs = limit, tmpfs
        self._peak = self._kills = 0

    def entering(self, command: Sequence[str]) -> list[str]:
        return list(command)

    def members(self) -> list[int]:
        return []

    def look(self, pid: int) -> tuple[int, int]:
        held = tree_bytes(pid) + (folder_bytes(self.tmpfs) if self.tmpfs else 0)
        self._peak = max(self._peak, held)
        if self.limit is not None and held > self.limit and not self._kills:
            self._kills = 1
            _kill(pid, [])
        return held, 0

    def peak(self) -> int:
        return self._peak

    def kills(self) -> int:
        return self._kills

    def reclaims(self) -> int:
        return 0

    def close(self) -> None:
        pass


class Traffic:
    """Bytes that processes have read from and written to block devices; one that has ended counts as last seen."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, int]] = {}

    def look(self, pids: Sequence[int]) -> None:
        """At these, now."""
        for pid in pids:
            with contextlib.suppress(OSError):
                counts = _keyed(Path(f"/proc/{pid}/io"))
                self._seen[pid] = counts.get("read_bytes:", 0), counts.get("write_bytes:", 0)

    def total(self) -> tuple[int, int]:
        """Read and written, by all there ever were."""
        return sum(read for read, _ in self._seen.values()), sum(written for _, written in self._seen.values())


def new_group(limit: int | None, tmpfs: Path | None = None) -> Group:
    """The best there is on this machine."""
    for make in (CgroupV1, CgroupV2):
        try:
            return make(limit)
        except (OSError, LookupError):
            continue
    return Watched(limit, tmpfs)


def run_limited(
    command: Sequence[str],
    limit: int | None,
    log: Path,
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    patience: float | None = None,
    begins: Path | None = None,
    tmpfs: Path | None = None,
    beside: Callable[[], None] = lambda: None,
) -> Ended:
    """Run `command` to its end under `limit` bytes; `beside` is called several times a second meanwhile.

    After `patience` seconds it is ended as late; they count from when the file `begins` is there, if one is named.
    Nothing of the tree is alive afterwards.
    """
    group = new_group(limit, tmpfs)
    began = time.monotonic()
    looks: list[Look] = []
    traffic = Traffic()
    late, killed_at, kills = False, None, 0
    begun = 0.0 if begins is None else None
    try:
        with log.open("wb") as said:
            process = subprocess.Popen(
                group.entering(command), stdout=said, stderr=subprocess.STDOUT, env=env and dict(env), cwd=cwd
            )
            try:
                while not _ended(process):
                    now = time.monotonic() - began
                    looks.append(Look(round(now, 2), *group.look(process.pid)))
                    traffic.look(group.members())
                    kills = group.kills()
                    killed_at = now if kills and killed_at is None else killed_at
                    begun = now if begun is None and begins is not None and begins.exists() else begun
                    late = patience is not None and now - (STARTING_SECONDS if begun is None else begun) > patience
                    if late or (killed_at is not None and now > killed_at + AFTER_A_KILL_SECONDS):
                        break
                    beside()
                kills = max(kills, group.kills())
            finally:
                _kill(process.pid, group.members())
                process.wait()
        read, written = traffic.total()
        return Ended(
            code=process.returncode,
            seconds=time.monotonic() - began,
            enforced=group.enforced,
            limit=limit,
            peak_bytes=group.peak(),
            peak_held=max((look.held for look in looks), default=0),
            oom_kills=kills,
            reclaims=group.reclaims(),
            late=late,
            begun=begun or 0.0,
            read_bytes=read,
            written_bytes=written,
            looks=looks,
        )
    finally:
        group.close()


def folder_bytes(folder: Path) -> int:
    """What the files below a folder take, now; files that vanish meanwhile count nothing."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(parent, name)).st_blocks * 512
            except OSError:
                continue
    return total


def _ended(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(LOOK_EVERY_SECONDS)
    except subprocess.TimeoutExpired:
        return False
    return True


def _kill(pid: int, members: Sequence[int]) -> None:
    """End the process, its descendants, and those of the group that have lost their parent; nothing else."""
    import psutil

    tree: list[Any] = []
    with contextlib.suppress(psutil.Error):
        tree = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    for member in members:
        try:
            tree.append(psutil.Process(member))
        except psutil.Error:
            continue
    for process in tree:
        try:
            process.kill()
        except psutil.Error:
            continue


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


def _entering(folder: Path, command: Sequence[str]) -> list[str]:
    """A shell enters the group and becomes the command: whatever that starts is in the group from its first page on."""
    return ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', str(folder / "cgroup.procs"), *command]


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


def _keyed(file: Path) -> dict[str, int]:
    pairs = (line.split() for line in file.read_text().splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2}


def _numbers(file: Path) -> list[int]:
    return [int(line) for line in file.read_text().split()]
