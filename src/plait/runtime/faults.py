"""Named places where a test can make the process die: `PLAIT_FAULT="commit.3@2"` kills it there in epoch 2.

Several are separated by commas.  With `PLAIT_FAULT_ONCE=<prefix>` each kills only the first process to create the
file `<prefix><point>@<epoch>`, so that a retried task, or the same program started again, gets through.
Costs one look at the environment; does nothing unless asked.

    task.append  task.probe  task.merge               in a Python worker, after that part of its work
    task.replay  task.build                           the same: old rows of a first look, and of a store that is filled
    task.end  task.hop                                the same, when all is written and handed over: first, later hop
    commit.1 … commit.5                               on the driver, between the steps of runtime/driver/commit.py
    finish                                            on the driver, after Spark's part of a query
    results.merge                                     on the driver, when small result files have become a larger one
    sink.draft  sink.file  receipt                    on the driver, inside a sink, and after each sink's receipt
    parked  missed                                    on the driver: a query is parked; a missed epoch is handed over
    troubled                                          on the driver: queries that cannot go on are parked, not committed
"""

from __future__ import annotations

import os
import signal


def reached(point: str, epoch: int) -> None:
    """Dies here, by SIGKILL, if this is a point the environment names."""
    wanted = os.environ.get("PLAIT_FAULT")
    if wanted is None or f"{point}@{epoch}" not in wanted.split(","):
        return
    once = os.environ.get("PLAIT_FAULT_ONCE")
    if once is not None:
        try:
            os.close(os.open(f"{once}{point}@{epoch}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
    die()


def die() -> None:
    """Ends the process, as a power cut would."""
    os.kill(os.getpid(), signal.SIGKILL)
