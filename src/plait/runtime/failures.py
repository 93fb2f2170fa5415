"""Spark's exceptions become Plait's: the cause a person can act on, dug out of a stack trace from another process."""

from __future__ import annotations

import re

import plait.errors
from plait.errors import PlaitError, SourceError, StorageError

_OURS = re.compile(r"plait\.errors\.(\w+): \[([A-Z_]+)\] (.*?)(?: — (.*?))?(?:\n|$)")
_FILE = re.compile(r"(file:/[^\s,'\"]+)")
_UNREADABLE = re.compile(r"FAILED_READ_FILE|CANNOT_READ_FILE_FOOTER|is not a Parquet file|ParquetDecodingException")
_GONE = re.compile(r"FileNotFoundException|FAILED_READ_FILE\.FILE_NOT_EXIST|PATH_NOT_FOUND")


def translated(error: BaseException) -> PlaitError:
    """The PlaitError that says what `error` means for the user; `error` itself if it is one already."""
    if isinstance(error, PlaitError):
        return error
    text = str(error)
    ours = list(_OURS.finditer(text))
    if ours:
        kind, code, cause, remedy = ours[-1].groups()
        found = getattr(plait.errors, kind, PlaitError)
        return found(code, cause, remedy or "") if issubclass(found, PlaitError) else PlaitError(code, cause)
    where = _FILE.search(text)
    name = f" {where.group(1)}" if where else ""
    if _UNREADABLE.search(text):
        return SourceError(
            "SOURCE_CORRUPT",
            f"a source file{name} cannot be read: {_first_line(text)}",
            "repair, replace or remove the file and start again; what was committed stays as it is",
        )
    if _GONE.search(text):
        return SourceError(
            "SOURCE_MISSING",
            f"a source file{name} is gone: {_first_line(text)}",
            "put the file back and start again, or set spark.sql.files.ignoreMissingFiles=true",
        )
    if "No space left on device" in text:
        return StorageError("STATE_FULL", f"a disk is full: {_first_line(text)}", "free space and start again")
    return PlaitError("SPARK", f"the Spark job failed: {_first_line(text)}", "see the exception this one was raised from")


def _first_line(text: str) -> str:
    """The first line that says something, without Spark's wrapping."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if re.search(r"(Exception|Error|\[[A-Z_.]+\])", line) and "Traceback" not in line]
    return (telling or lines or ["unknown"])[0][:500]
