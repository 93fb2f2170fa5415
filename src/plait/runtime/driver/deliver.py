"""The way of committed rows to sinks: those of joins at once, answers of whole queries by `answers/answer_queue.py`.

Contract.  A sink gets each epoch once per epoch number, in order, and after a crash at most the last one again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING

from pyspark.sql import DataFrame

from plait.errors import PlaitError
from plait.runtime.answers.answer import Answer
from plait.runtime.answers.result_reader import ResultRows
from plait.runtime.driver import commit as commits
from plait.runtime.driver.offsets import remove_torn
from plait.runtime.driver.sinks import Parquet, Sink
from plait.runtime.spark.failures import sink_failed, translated
from plait.state.files.owner import owner_of
from plait.state.log.manifest import Manifest, ResultFile

if TYPE_CHECKING:
    from plait.runtime.driver.epoch import Driver, Epoch

HandOver = Callable[[int, list[ResultFile]], None]
"""Gives a sink an epoch, by its number and its files."""


def arrive(epoch: Epoch) -> None:
    """The answers of the epoch before must have arrived: no more than one epoch is ever undelivered."""
    epoch.driver.behind.wait()


def deliver(epoch: Epoch) -> None:
    """Sinks that have no receipt for this epoch get its rows; answers follow while the next epoch is joined."""
    driver = epoch.driver
    assert epoch.manifest is not None

    def to(query: str, sink: Sink) -> HandOver:
        def hand_over(number: int, files: list[ResultFile]) -> None:
            results = driver.checkpoint.results
            if isinstance(sink, Parquet) and not results.local:
                # It copies files, from one path of this machine to another.
                with driver.rows.copies(files) as copies, _named(query, number):
                    sink.deliver(number, copies, lambda: driver.rows.frame(query, files))
                return
            # What this very run has just written need not be read back; what it found on disk must be.
            written = epoch.task is not None
            paths = [results.where(file.path) for file in files] if written else driver.rows.paths(files)
            with _named(query, number):
                sink.deliver(number, paths, lambda: driver.rows.frame(query, files))

        return hand_over

    ran = epoch.manifest.rows_out
    sinks = {query: to(query, sink) for query, sink in driver.sinks.items() if sink.delivers and query in ran}
    if sinks:
        commits.deliver(driver.checkpoint, epoch.manifest, sinks)
    if any(answer.sink.delivers for answer in driver.sources.answers.values()):
        driver.behind.start(partial(_answer, driver, epoch.manifest, driver.rows, epoch.seconds))


def deliver_joined(
    driver: Driver, manifest: Manifest, query: str, sink: Sink, columns: tuple[tuple[str, str], ...]
) -> None:
    """Hands over what an epoch has of a query that the plan does not know any more."""

    def hand_over(number: int, files: list[ResultFile]) -> None:
        with _named(query, number):
            sink.deliver(number, driver.rows.paths(files), lambda: driver.rows.read(columns, files))

    commits.deliver(driver.checkpoint, manifest, {query: hand_over})


def catch_up(driver: Driver) -> None:
    """The answers of the last epoch that have not arrived: the process died, or was stopped, before they had."""
    last = driver.checkpoint.log.last()
    _claim(driver, ran=last is not None)
    remove_torn(driver.checkpoint)
    manifest = None if last is None else driver.checkpoint.log.read(last)
    if manifest is not None:
        _answer(driver, manifest, driver.rows, {})


def _claim(driver: Driver, ran: bool) -> None:
    """What sinks write to belongs to their queries, before anything is delivered."""
    checkpoint = driver.checkpoint
    answers = {name: answer.sink for name, answer in driver.sources.answers.items()}
    for query, sink in {**driver.sinks, **answers}.items():
        sink.claim(owner_of(checkpoint.files, checkpoint.id, query), ran)


def _answer(driver: Driver, manifest: Manifest, rows: ResultRows, seconds: dict[str, float]) -> None:
    """Hands over the answers after an epoch, the last one committed, to sinks that have no receipt for it."""

    def to(answer: Answer) -> HandOver:
        def hand_over(number: int, _files: list[ResultFile]) -> None:
            def frame() -> DataFrame:
                return answer.delivered(rows, driver.sources.live)

            with ExitStack() as stack:
                stack.enter_context(_named(answer.name, number))
                wants_files = isinstance(answer.sink, Parquet)
                files = stack.enter_context(rows.one_file(answer.name, frame())) if wants_files else []
                answer.sink.deliver(number, files, frame)

        return hand_over

    begun = time.perf_counter()
    ran = {join.partition(".")[0] for join in manifest.rows_out}
    sinks = {name: to(a) for name, a in driver.sources.answers.items() if a.sink.delivers and name in ran}
    if sinks:
        commits.deliver(driver.checkpoint, manifest, sinks)
        seconds["answers"] = time.perf_counter() - begun


@contextmanager
def _named(query: str, number: int) -> Iterator[None]:
    """What a sink raises, as an error that says whose sink it is and what comes next."""
    try:
        yield
    except PlaitError:
        raise
    except Exception as error:
        found = translated(error)
        raise (found if found.code == "SPARK_LOST" else sink_failed(query, number, error)) from error
