"""Bytes that do not fit a task's memory wait in a file without a name, which ends with the task."""

from __future__ import annotations

import mmap
import os
import tempfile
from dataclasses import dataclass
from typing import IO

import pyarrow as pa

from plait.state.files.storage import storage_error


@dataclass(frozen=True, slots=True)
class Spilled:
    """Where bytes lie in a spill file."""

    begin: int
    size: int

    def __len__(self) -> int:
        return self.size


class Spill:
    """A file in Spark's local directory, made when it is first needed; bytes are added at its end."""

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None
        self.size = 0

    def add(self, data: bytes | pa.Buffer) -> Spilled:
        """Puts bytes away."""
        folder = os.environ.get("SPARK_LOCAL_DIRS", "").split(",")[0] or None
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - lives as long as this object
            self._file.write(data)
            # Here, so that a full disk is met here and not when the bytes are asked for.
            self._file.flush()
        except OSError as error:
            raise storage_error("SPILL", folder or tempfile.gettempdir(), error) from error
        size = data.size if isinstance(data, pa.Buffer) else len(data)
        self.size += size
        return Spilled(self.size - size, size)

    def read(self, place: Spilled) -> bytes:
        """Bytes that were put away, as a copy."""
        assert self._file is not None
        return os.pread(self._file.fileno(), place.size, place.begin)

    def mapped(self) -> pa.Buffer:
        """All of it under a memory map: pages that the operating system can take back."""
        if self._file is None:
            return pa.py_buffer(b"")
        return pa.py_buffer(mmap.mmap(self._file.fileno(), self.size, prot=mmap.PROT_READ))

    def clear(self) -> None:
        """Gives the space back."""
        if self._file is not None:
            self._file.close()
        self._file, self.size = None, 0
