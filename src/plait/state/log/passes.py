"""How far tasks are with a first pass over state (`since="state"`): `passes/<epoch>-<task>.json`, for people.

Tasks write them now and then (`runtime/task/pass_report.py`), where the checkpoint is on this machine.  Nothing depends
on them; they go with the commit of their epoch.
"""

from __future__ import annotations

import json
from contextlib import suppress

from plait.errors import PlaitError
from plait.state.files.storage import Files

FOLDER = "passes"


def told_share(files: Files, epoch: int) -> float | None:
    """Which share of the first pass of an epoch is done, as far as its tasks have told; None if they have not."""
    shares, tasks = list[float](), 1
    for name in files.names(FOLDER):
        if name.startswith(f"{epoch}-") and (data := files.read(f"{FOLDER}/{name}")) is not None:
            with suppress(ValueError, KeyError, TypeError):
                value = json.loads(data)
                shares.append(min(1.0, float(value["share"])))
                tasks = max(1, int(value["tasks"]))
    return sum(shares) / max(tasks, len(shares)) if shares else None


def forget_passes(files: Files) -> None:
    """What tasks have told of a pass that is over."""
    with suppress(OSError, PlaitError):
        for name in files.names(FOLDER):
            files.delete(f"{FOLDER}/{name}")
