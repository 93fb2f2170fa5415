"""How far a task is with a first pass over state, for people: one small file, now and then (`driver/first_pass.py`)."""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import dataclass

from plait.config import KEY_GROUPS
from plait.runtime.task.epoch_task import EpochTask
from plait.runtime.task.passes import HashRange

TELL_EVERY_SECONDS = 0.2


@dataclass
class PassReport:
    """What a task has told so far."""

    told_at: float = 0.0

    def tell(self, context: EpochTask, task: int, hashes: HashRange, share: float) -> None:
        """So much of a range of hashes is through, and the ranges before it.  Failing to write it is no failure."""
        if context.passes is None or time.monotonic() - self.told_at < TELL_EVERY_SECONDS:
            return
        self.told_at = time.monotonic()
        low, high = (group * ((1 << 64) // KEY_GROUPS) for group in context.groups(task))
        begin, end = hashes
        done = (begin - low + (end - begin) * share) / max(1, high - low)
        with contextlib.suppress(OSError):
            os.makedirs(context.passes, 0o700, exist_ok=True)
            draft = os.path.join(context.passes, f".{context.epoch}-{task}")
            with open(draft, "w", encoding="utf-8") as file:
                json.dump({"share": round(done, 4), "tasks": context.tasks}, file)
            os.replace(draft, os.path.join(context.passes, f"{context.epoch}-{task}.json"))
