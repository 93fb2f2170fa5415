"""8 INNER LOOPS: arrays in, arrays out; numpy and numba only.

Contract.  Public functions take numpy arrays of any matching dtype, bring them to one canonical form (`frozen`)
and call one compiled specialisation each: hashes are uint64, everything that counts or points is int64.

Cost.  The first process of a user compiles (seconds); later ones load from numba's cache (milliseconds).  That
cache is a pickle, so it lives in a private directory of the user, never in a checkpoint.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt


def _private_cache() -> str:
    """A directory only this user can write to: `~/.cache/plait/numba`, else a temporary one."""
    path = os.path.join(os.path.expanduser("~"), ".cache", "plait", "numba")
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
        found = os.lstat(path)
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
            os.chmod(path, 0o700)
            if os.access(path, os.W_OK | os.X_OK):
                return path
    except OSError:
        pass
    return tempfile.mkdtemp(prefix="plait-numba-")


if "NUMBA_CACHE_DIR" not in os.environ:
    os.environ["NUMBA_CACHE_DIR"] = _private_cache()

import numba  # noqa: E402  (reads NUMBA_CACHE_DIR when imported)

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]
Flags = npt.NDArray[np.bool_]

F = TypeVar("F", bound=Callable[..., Any])


def jit(function: F) -> F:
    """`function` compiled on first use, cached on disk, running without the GIL."""
    return cast(F, numba.njit(cache=True, nogil=True)(function))


def frozen(values: npt.ArrayLike, kind: type[np.generic]) -> Any:
    """`values` as a contiguous, aligned, read-only array: the one form compiled code sees.  No copy where it is one.

    Memory-mapped columns are read-only and fresh arrays are not; without this, numba would compile for both.
    """
    view = np.require(values, kind, ["C", "A"]).view()
    view.flags.writeable = False
    return view
