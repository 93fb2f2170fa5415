"""Taking over: which manifests of earlier drivers count.

A driver looks at the fence and then puts its manifest; another one may take over in between.  So a driver that takes
over notes, after its token stands in the fence, the last epoch that it has seen: `fence/<token>-after.json`.

Invariant.  Of every epoch, either the driver that committed it found no newer token after its manifest was there, and
then whoever takes over has seen it; or it did find one, and stopped (`FENCED`) before a sink or Spark heard of that
epoch.  A manifest behind the epoch noted, with a lower token, is of the second kind: it is refused wherever it is read.
Only the epoch right behind it can have one, since a driver stops at the first.

It rests on what `Files` promises: names are put once, and a listing shows all names that were put before it.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import asdict, dataclass

from plait.errors import CheckpointError, CorruptionError
from plait.state.files.storage import Files
from plait.state.log.manifest import Manifest, ManifestLog, manifest_name
from plait.state.log.sealed import seal, unseal

FENCE = "fence"
_KIND = "plait-takeover"


@dataclass(frozen=True)
class Takeover:
    """What a driver saw when it took over."""

    token: int
    after: int
    """The last epoch that was committed; −1 if none was."""

    def overtakes(self, epoch: int, token: int) -> bool:
        """Whether a manifest came too late."""
        return epoch == self.after + 1 and token < self.token


def newest(files: Files) -> Takeover | None:
    """What the last driver noted that took over; None if there was none."""
    found = tokens(files)
    if not found:
        return None
    name = note_name(found[-1])
    data = files.read(name)
    return None if data is None else Takeover(**unseal(_KIND, data, files.where(name), "CHECKPOINT_CORRUPT"))


def note(files: Files, token: int) -> Takeover:
    """Notes a takeover, after the token stands in the fence.  What the driver before has refused stays refused."""
    before, log = newest(files), ManifestLog(files)
    after = max(log.epochs(), default=-1)
    if before is not None and after == before.after + 1:
        # A damaged one is for whoever reads the state to tell of.
        with contextlib.suppress(CorruptionError):
            last = log.read(after)
            after = before.after if last is not None and before.overtakes(after, last.token) else after
    made = Takeover(token, after)
    files.put_if_absent(note_name(token), seal(_KIND, asdict(made)))
    return made


def tokens(files: Files) -> list[int]:
    """The drivers that have left a note, ascending."""
    matches = (re.fullmatch(r"(\d{12})-after\.json", name) for name in files.names(FENCE))
    return sorted(int(match[1]) for match in matches if match)


def note_name(token: int) -> str:
    """Where a note lies in the checkpoint."""
    return f"{FENCE}/{token:012d}-after.json"


def refuse_overtaken(takeover: Takeover | None, manifest: Manifest, files: Files) -> None:
    """Raises if a manifest came after another driver had taken over."""
    if takeover is not None and takeover.overtakes(manifest.epoch, manifest.token):
        raise CheckpointError(
            "COMMITTED_TOO_LATE",
            f"{files.where(manifest_name(manifest.epoch))} was written by driver {manifest.token} after driver "
            f"{takeover.token} had taken over behind epoch {takeover.after}",
            "stop all drivers, delete that file, and start one: nothing is lost, no sink has seen that epoch, and its "
            "rows are joined again",
        )
