"""Runs a command to its end, watches its whole process tree meanwhile, and leaves nothing of it alive."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.memory_group import MemoryGroup, kill_tree, read_numbers

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
    """How a tree ended.  `peak_bytes` includes the page cache (but for a watched tree), `peak_held` does not.

    `begun` is when its patience began to count; `read_bytes` and `written_bytes` went from and to block devices.
    """

    code: int
    seconds: float
    enforced: str
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
        """Whether the tree was killed for its memory."""
        return self.oom_kills > 0


class Traffic:
    """Bytes that processes have read from and written to block devices; one that has ended counts as last seen."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, int]] = {}

    def look(self, pids: Sequence[int]) -> None:
        """Note how much these processes have read and written by now."""
        for pid in pids:
            with contextlib.suppress(OSError):
                counts = read_numbers(Path(f"/proc/{pid}/io"))
                self._seen[pid] = counts.get("read_bytes:", 0), counts.get("write_bytes:", 0)

    def total(self) -> tuple[int, int]:
        """Bytes read and bytes written by all processes that were seen."""
        return sum(read for read, _ in self._seen.values()), sum(written for _, written in self._seen.values())


def run_tree(
    command: Sequence[str],
    group: MemoryGroup,
    log: Path,
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    patience: float | None = None,
    begins: Path | None = None,
    beside: Callable[[], None] = lambda: None,
) -> Ended:
    """Run `command` to its end in `group`, which is closed afterwards; `beside` is called at every look meanwhile.

    After `patience` seconds the tree is ended as late; they count from when the file `begins` exists, if one is named.
    """
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
                while not _ended(process, group.pause(time.monotonic() - began)):
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
                # The id of a process that has ended may be another's by now.
                kill_tree(process.pid if process.poll() is None else None, group.members())
                process.wait()
        read, written = traffic.total()
        return Ended(
            code=process.returncode,
            seconds=time.monotonic() - began,
            enforced=group.enforced,
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


def _ended(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Whether a process ends within some seconds."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True
