"""Files under a memory map whose reading is under control.

The operating system reads ahead when a page of a map is missing, on some disks by megabytes.  That is right for rows
that are read through, and ruins lookups here and there in files that do not fit memory.  `map_file(random=True)` turns
it off; `announce` says what will be needed, so that the disk works on many things at a time.  Neither changes what is
read, only when, so where the system does not know these calls nothing else happens.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os

import numpy as np
import pyarrow as pa

from plait.kernels import I64

_GAP = 32 << 10
"""What is at most this far apart is announced as one read."""
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class _Map:
    """Owner of a map: it ends when the last buffer that looks into it is gone.  No file stays open for it."""

    def __init__(self, path: str) -> None:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.size = os.fstat(handle).st_size
            self.address = _LIBC.mmap(None, self.size, mmap.PROT_READ, mmap.MAP_SHARED, handle, 0)
            if self.address in (None, ctypes.c_void_p(-1).value):
                self.address = None
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), path)
        finally:
            os.close(handle)

    def __del__(self) -> None:
        if getattr(self, "address", None) is not None:
            _LIBC.munmap(self.address, self.size)


def map_file(path: str, random: bool = False) -> pa.Buffer:
    """All bytes of a file that is not empty; with `random`, a page that is missing is read and no more than that."""
    owner = _Map(path)
    if random:
        _LIBC.madvise(owner.address, owner.size, mmap.MADV_RANDOM)
    return pa.foreign_buffer(owner.address, owner.size, base=owner)


def announce(content: pa.Buffer, begins: I64, ends: I64) -> None:
    """These ranges of a map will be read; they come in ascending order, more or less."""
    if not len(begins):
        return
    starts = np.flatnonzero(np.concatenate(([True], np.abs(begins[1:] - ends[:-1]) > _GAP)))
    stops = np.concatenate((starts[1:], [len(begins)])) - 1
    low = begins[starts] // mmap.PAGESIZE * mmap.PAGESIZE
    sizes = ends[stops] - low
    base = content.address
    with contextlib.suppress(AttributeError):
        for at, size in zip(low.tolist(), sizes.tolist(), strict=True):
            _LIBC.madvise(base + at, size, mmap.MADV_WILLNEED)
