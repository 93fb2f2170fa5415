"""Every error Plait raises, drawn once.

    PlaitError                    code, cause, remedy
    ├── QueryError                the SQL text or what it asks for cannot be joined
    ├── StreamError               a registered stream cannot be used as it is
    ├── ConfigError               a knob has a value it cannot take
    ├── PipelineError             a pipeline file is wrong
    ├── CheckpointError           the checkpoint does not fit this engine, or is held by another driver
    │   └── CorruptionError       bytes on disk are not the bytes that were committed
    ├── StorageError              the state directory cannot be read or written
    └── SourceError               a source failed while it was being read

An error says what is wrong (`cause`), what to do (`remedy`) and carries a stable `code`, so that
people read the sentence and programs read the code.

>>> str(QueryError("CROSS_PRODUCT", "a and b share no equality", "add a.k = b.k"))
'[CROSS_PRODUCT] a and b share no equality — add a.k = b.k'

What is quoted from services and files may hold credentials in URLs; no error shows them.

>>> PlaitError("X", "https://me:secret@host/a?sig=abc does not answer").cause
'https://host/a?… does not answer'
"""

from __future__ import annotations

import re

_USER = re.compile(
    # A name and a password; the password may hold a slash, as keys of S3 do, if it is not a port.
    r"(?<=://)[^\s/@:'\"]*:(?:[^\s/@'\"]*|(?!\d+/)[^\s@'\"]*)@"
)
_QUERY = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://[^\s?'\"]*\?)[^\s'\")>\]]+")


def without_secrets(text: str) -> str:
    """A text without what may be a secret in its URLs: names with passwords, and query strings, which may be signed.

    >>> without_secrets("abfss://container@account/x and s3://key:a/b+c@bucket/x and http://host:80/a@b")
    'abfss://container@account/x and s3://bucket/x and http://host:80/a@b'
    """
    return _QUERY.sub(r"\1…", _USER.sub("", text)) if "://" in text else text


class PlaitError(Exception):
    """The root: `code` for programs, `cause` and `remedy` for people."""

    def __init__(self, code: str, cause: str, remedy: str = "") -> None:
        cause = without_secrets(cause)
        super().__init__(f"[{code}] {cause}" + (f" — {remedy}" if remedy else ""))
        self.code = code
        self.cause = cause
        self.remedy = remedy

    def __reduce__(self) -> tuple[type[PlaitError], tuple[str, str, str]]:
        # Python workers send errors to the driver; keep all three parts on the way.
        return (type(self), (self.code, self.cause, self.remedy))


class QueryError(PlaitError):
    """The SQL text, or what it asks for, cannot be run on streams."""


class RecomputationWarning(UserWarning):
    """A query runs, but each of its answers costs as much as all rows that have ever been joined for it."""


class StreamError(PlaitError):
    """A registered stream cannot be used as it is."""


class ConfigError(PlaitError):
    """A configuration value is out of its range."""


class PipelineError(PlaitError):
    """A pipeline file is missing something or says something that cannot be."""


class CheckpointError(PlaitError):
    """The checkpoint does not fit this engine, or another driver holds it."""


class CorruptionError(CheckpointError):
    """Bytes on disk are not the bytes that were committed."""


class StorageError(PlaitError):
    """The state directory cannot be read or written."""


class SourceError(PlaitError):
    """A source failed while Spark was reading it."""
