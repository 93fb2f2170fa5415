"""A file that hashes and counts what passes: the checksum is of what was written, not of what is read back."""

from __future__ import annotations

from typing import IO, Any

import xxhash


class ChecksummedFile:
    """A file for Arrow to write to; closing it leaves the file below open."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.size, self.closed = file, 0, False
        self.digest: Any = xxhash.xxh3_128()

    def write(self, data: Any) -> int:
        """Arrow's call."""
        self.digest.update(data)
        self.file.write(data)
        self.size += len(data)
        return len(data)

    def flush(self) -> None:
        """Arrow's call."""
        self.file.flush()

    def tell(self) -> int:
        """Parquet's call: where the next bytes go."""
        return self.size

    def close(self) -> None:
        """Arrow's call."""
        self.closed = True
