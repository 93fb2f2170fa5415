"""Where the hosts of a run note which segments they have verified: directories in the folder for temporary files."""

from __future__ import annotations

import contextlib
import glob
import os
import secrets
import shutil
import tempfile

from plait.state.log.checkpoint import Checkpoint


def verified_dir(checkpoint: Checkpoint) -> str:
    """Where this run notes, on every host, which segments it has verified: a name that nobody can guess."""
    return f"{_prefix(checkpoint)}{checkpoint.token}-{secrets.token_hex(16)}"


def _prefix(checkpoint: Checkpoint) -> str:
    return os.path.join(tempfile.gettempdir(), f"plait-{os.geteuid()}-{checkpoint.id}-")


def forget_verified(checkpoint: Checkpoint) -> None:
    """Removes the notes of this run, and of those before it that were killed."""
    for folder in glob.glob(f"{glob.escape(_prefix(checkpoint))}*"):
        with contextlib.suppress(OSError):
            if os.lstat(folder).st_uid == os.geteuid():
                shutil.rmtree(folder, ignore_errors=True)
