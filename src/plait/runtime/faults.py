"""Named places where a test can make the process die: `PLAIT_FAULT="commit.3@2"` kills it there in epoch 2.

With `PLAIT_FAULT_ONCE=<path>` only the first process to create that file dies, so a retried task gets through.
Costs one look at the environment; does nothing unless asked.
"""

from __future__ import annotations

import os
import signal


def reached(point: str, epoch: int) -> None:
    """Dies here, by SIGKILL, if this is the point the environment names."""
    if os.environ.get("PLAIT_FAULT") != f"{point}@{epoch}":
        return
    once = os.environ.get("PLAIT_FAULT_ONCE")
    if once is not None:
        try:
            os.close(os.open(once, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
    os.kill(os.getpid(), signal.SIGKILL)
