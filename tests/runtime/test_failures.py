"""Exceptions from Spark and from workers, as they really look, become errors a person can act on."""

from __future__ import annotations

import pytest

from plait.errors import CorruptionError, PlaitError, QueryError, SourceError, StorageError
from plait.runtime.spark.failures import sink_failed, translated

WORKER = """Job aborted due to stage failure: Task 1 in stage 7.0 failed 3 times, most recent failure: Lost task 1.2 \
in stage 7.0 (TID 31) (localhost executor driver): org.apache.spark.api.python.PythonException: \
Traceback (most recent call last):
  File "/x/plait/runtime/task/hops.py", line 174, in runs
    self._opened[step.store] = [self._open(info) for info in mine]
  File "/x/plait/state/segments/segment.py", line 203, in _map
    raise CorruptionError("SEGMENT_CORRUPT", f"the bytes of segment {full} are not those committed", RESTORE)
plait.errors.CorruptionError: [SEGMENT_CORRUPT] the bytes of segment /s/ab/cd.arrow are not those committed \
— restore the file from a backup, or restart from an earlier copy of the checkpoint

\tat org.apache.spark.api.python.BasePythonRunner$ReaderIterator.handlePythonException(PythonRunner.scala:581)
\tat java.base/java.lang.Thread.run(Thread.java:840)

Driver stacktrace:"""

UNREADABLE = """Job aborted due to stage failure: Task 0 in stage 1.0 failed 1 times, most recent failure: Lost task \
0.0 in stage 1.0 (TID 1) (localhost executor driver): org.apache.spark.SparkException: [FAILED_READ_FILE.NO_HINT] \
Encountered error while reading file file:///data/a/000001.parquet.  SQLSTATE: KD001
\tat org.apache.spark.sql.errors.QueryExecutionErrors$.cannotReadFilesError(QueryExecutionErrors.scala:857)
Caused by: java.lang.RuntimeException: file:/data/a/000001.parquet is not a Parquet file."""

GONE = """[STREAM_FAILED] Query [id = 1, runId = 2] terminated with exception: [FAILED_READ_FILE.FILE_NOT_EXIST] \
Encountered error while reading file file:///data/a/000001.parquet. File does not exist. SQLSTATE: KD001"""

CRASHED = """Job aborted due to stage failure: Task 0 in stage 2.0 failed 1 times, most recent failure: Lost task 0.0 \
in stage 2.0 (TID 3) (localhost executor driver): org.apache.spark.SparkException: Python worker exited unexpectedly \
(crashed). Consider setting 'spark.sql.execution.pyspark.udf.faulthandler.enabled' for the better Python traceback."""

FULL = """An error occurred while calling o101.parquet.
: java.io.IOException: No space left on device
\tat java.base/java.io.FileOutputStream.writeBytes(Native Method)"""


def test_a_plait_error_stays_itself() -> None:
    error = QueryError("SYNTAX", "a cause", "a remedy")
    assert translated(error) is error


def test_an_error_from_a_worker_keeps_its_class_code_cause_and_remedy() -> None:
    error = translated(RuntimeError(WORKER))
    assert type(error) is CorruptionError
    assert error.code == "SEGMENT_CORRUPT"
    assert error.cause == "the bytes of segment /s/ab/cd.arrow are not those committed"
    assert error.remedy == "restore the file from a backup, or restart from an earlier copy of the checkpoint"


def test_the_newest_of_several_errors_counts_and_a_remedy_may_be_missing() -> None:
    chained = "plait.errors.StorageError: [STATE_FULL] first — a\nplait.errors.PlaitError: [SPARK] second\n"
    error = translated(RuntimeError(chained))
    assert (type(error), error.code, error.cause, error.remedy) == (PlaitError, "SPARK", "second", "")


@pytest.mark.parametrize("kind", ["NoSuchError", "annotations", "__doc__"])
def test_a_name_that_is_no_error_of_ours_is_only_text(kind: str) -> None:
    error = translated(RuntimeError(f"plait.errors.{kind}: [CODE] words — more"))
    assert (type(error), error.code, error.cause) == (PlaitError, "CODE", "words")


@pytest.mark.parametrize(
    ("text", "kind", "code", "words"),
    [
        (UNREADABLE, SourceError, "SOURCE_CORRUPT", "file:///data/a/000001.parquet"),
        (GONE, SourceError, "SOURCE_MISSING", "file:///data/a/000001.parquet"),
        (FULL, StorageError, "STATE_FULL", "No space left"),
        (CRASHED, PlaitError, "WORKER_LOST", "a Python worker died"),
        ("java.lang.OutOfMemoryError: Java heap space", PlaitError, "SPARK", "Java heap space"),
        ("", PlaitError, "SPARK", "unknown"),
    ],
)
def test_what_spark_says_is_understood(text: str, kind: type[PlaitError], code: str, words: str) -> None:
    error = translated(RuntimeError(text))
    assert type(error) is kind
    assert error.code == code
    assert words in error.cause
    assert error.remedy
    assert "\n" not in str(error)


@pytest.mark.parametrize("error", [ConnectionRefusedError(111, "Connection refused"), EOFError()])
def test_a_jvm_that_is_gone_is_called_so(error: Exception) -> None:
    found = translated(error)
    assert found.code == "SPARK_LOST"
    assert "JVM" in found.cause
    assert "committed" in found.remedy


def test_a_sink_is_quoted() -> None:
    error = sink_failed("q", 3, ValueError("closed\non Sundays"))
    assert error.code == "SINK_FAILED"
    assert error.cause == "the sink of query 'q' failed in epoch 3: ValueError: closed"
    assert sink_failed("q", 3, KeyError()).cause.endswith("epoch 3: KeyError")


def test_a_missing_source_file_is_not_answered_by_ignoring_missing_files() -> None:
    # Spark would then skip missing result files as well.
    error = translated(RuntimeError(GONE))
    assert error.code == "SOURCE_MISSING"
    assert "ignoreMissingFiles" not in error.remedy
    assert "same name" in error.remedy


@pytest.mark.parametrize(
    ("quoted", "shown"),
    [
        ("PUT s3://AKIA:se/cr+et@bucket/x failed", "PUT s3://bucket/x failed"),
        ("PUT https://user:secret@host:443/x failed", "PUT https://host:443/x failed"),
        ("GET 'https://host/x?X-Amz-Signature=secret&y=1' failed", "GET 'https://host/x?…' failed"),
        ("GET (https://host/x?sig=secret) failed", "GET (https://host/x?…) failed"),
        ("webhdfs://user@host:9870/a@b is gone", "webhdfs://user@host:9870/a@b is gone"),
        ("abfss://container@account.dfs.core.windows.net/x", "abfss://container@account.dfs.core.windows.net/x"),
        ("what is this? ask: a@b", "what is this? ask: a@b"),
    ],
)
def test_no_error_quotes_credentials(quoted: str, shown: str) -> None:
    assert PlaitError("X", quoted).cause == shown
    assert "secret" not in str(StorageError("X", quoted))
    error = translated(RuntimeError(f"java.io.IOException: {quoted}"))
    assert shown in error.cause
    assert shown in sink_failed("q", 1, RuntimeError(quoted)).cause
