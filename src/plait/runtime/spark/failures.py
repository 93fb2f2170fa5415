"""Spark's exceptions become Plait's: the cause a person can act on, dug out of a stack trace from another process."""

from __future__ import annotations

import re

from py4j.protocol import Py4JNetworkError  # type: ignore[import-untyped]

import plait.errors
from plait.errors import PlaitError, SourceError, StorageError

_OURS = re.compile(r"plait\.errors\.(\w+): \[([A-Z_]+)\] (.*?)(?: — (.*?))?(?:\n|$)")
_FILE = re.compile(r"(file:/[^\s,'\"]+)")
_UNREADABLE = re.compile(r"FAILED_READ_FILE|CANNOT_READ_FILE_FOOTER|is not a Parquet file|ParquetDecodingException")
_UNREACHED = re.compile(r"wiki\.apache\.org/hadoop/(?:ConnectionRefused|UnknownHost|NoRouteToHost|SocketTimeout)")
_GONE = re.compile(r"FileNotFoundException|FAILED_READ_FILE\.FILE_NOT_EXIST|PATH_NOT_FOUND")


def translated(error: BaseException) -> PlaitError:
    """The PlaitError that says what `error` means for the user; `error` itself if it is one already."""
    if isinstance(error, PlaitError):
        return error
    if isinstance(error, ConnectionError | EOFError | Py4JNetworkError):
        return PlaitError(
            "SPARK_LOST",
            f"Spark's JVM does not answer any more: {str(error) or type(error).__name__}",
            "see why it ended (its memory, its log) and start again: what was committed stays as it is",
        )
    text = str(error)
    ours = list(_OURS.finditer(text))
    if ours:
        kind, code, cause, remedy = ours[-1].groups()
        found = getattr(plait.errors, kind, PlaitError)
        known = isinstance(found, type) and issubclass(found, PlaitError)
        return (found if known else PlaitError)(code, cause, remedy or "")
    if _UNREACHED.search(text):
        return StorageError(
            "STORAGE_UNREACHABLE",
            f"a file system does not answer Spark: {_telling_line(text)}",
            "check the service, the network and the credentials, then start again: what was committed stays",
        )
    where = _FILE.search(text)
    name = f" {where.group(1).rstrip('.')}" if where else ""
    if _GONE.search(text):
        return SourceError(
            "SOURCE_MISSING",
            f"a source file{name} is gone: {_telling_line(text)}",
            "put the file back and start again; if it is gone for good, put one of the same name and columns, without "
            "rows, in its place",
        )
    if _UNREADABLE.search(text):
        return SourceError(
            "SOURCE_CORRUPT",
            f"a source file{name} cannot be read: {_telling_line(text)}",
            "repair, replace or remove the file and start again; what was committed stays as it is",
        )
    if "Python worker exited unexpectedly" in text:
        return PlaitError(
            "WORKER_LOST",
            "a Python worker died more often than Spark retries a task, most likely for lack of memory",
            "give it more memory, or lower chunk_rows or the rows per epoch; then start again: nothing is lost",
        )
    if "No space left on device" in text:
        return StorageError("STATE_FULL", f"a disk is full: {_telling_line(text)}", "free space and start again")
    remedy = "see the exception this one was raised from"
    return PlaitError("SPARK", f"the Spark job failed: {_telling_line(text)}", remedy)


def sink_failed(query: str, epoch: int, error: BaseException) -> PlaitError:
    """What a user's own sink raised, in its own words."""
    said = f": {_telling_line(str(error))}" if str(error).strip() else ""
    return PlaitError(
        "SINK_FAILED",
        f"the sink of query {query!r} failed in epoch {epoch}: {type(error).__name__}{said}",
        "correct the sink and start again: the epoch is committed, and the sink gets it again",
    )


def _telling_line(text: str) -> str:
    """The first line that says something, without Spark's wrapping."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if re.search(r"(Exception|Error|\[[A-Z_.]+\])", line) and "Traceback" not in line]
    return (telling or lines or ["unknown"])[0][:500]
