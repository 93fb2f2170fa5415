"""Where a path or URI leads: to files of this machine, or to those behind a URI."""

from __future__ import annotations

import os
import re
from urllib.parse import unquote, urlsplit

from plait.errors import CheckpointError
from plait.state.files.remote import SCHEMES, RemoteFiles
from plait.state.files.storage import Files, LocalFiles


def scheme_of(path: str) -> str | None:
    """The scheme of a URI in small letters; None for a path.

    >>> scheme_of("s3a://bucket/x"), scheme_of("/tmp/x"), scheme_of("rel:ative")
    ('s3a', None, None)
    """
    found = re.match(r"([A-Za-z][A-Za-z0-9+.-]*):/", path)
    return None if found is None else found[1].lower()


def local_path(path: str) -> str | None:
    """The absolute local path that a plain path or a `file:` URI means; None if it means none.

    >>> local_path("file:///tmp/a%20b")
    '/tmp/a b'
    """
    if (scheme := scheme_of(path)) is None:
        return os.path.abspath(path)
    parts = urlsplit(path)
    return os.path.abspath(unquote(parts.path)) if scheme == "file" and parts.netloc in ("", "localhost") else None


def place(path: str, sync: bool) -> Files:
    """The files below a path or URI."""
    if (local := local_path(path)) is not None:
        return LocalFiles(local, sync)
    scheme = scheme_of(path)
    if scheme not in SCHEMES:
        raise CheckpointError(
            "SCHEME",
            f"{path} cannot hold a checkpoint: it is not known how scheme {scheme!r} creates a file only if it is "
            "absent, and without that two drivers could both commit",
            f"give a local directory, a mounted file system, or a URI with one of: {', '.join(SCHEMES)}",
        )
    return RemoteFiles(path.rstrip("/"))
