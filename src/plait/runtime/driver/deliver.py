"""The way of committed rows to sinks: those of joins at once, answers of whole queries by `answers/answer_queue.py`.

Contract.  A sink gets each epoch once per epoch number, in order, and after a crash at most the last one again.  That
of a parked query (`parking.py`) gets none until it is resumed; then it gets those that it missed, in order
(`missed.py`), and goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from functools import partial

from plait.errors import PlaitError
from plait.runtime.answers.answer import Answer
from plait.runtime.answers.answers_together import Together
from plait.runtime.answers.result_reader import ResultRows
from plait.runtime.driver import commit as commits
from plait.runtime.driver.driver import Driver, Epoch, Services
from plait.runtime.driver.offsets import remove_torn
from plait.runtime.driver.sinks import Memory, Parquet, Sink
from plait.runtime.spark.failures import sink_failed, translated
from plait.state.files.owner import owner_of
from plait.state.log.manifest import Manifest, ResultFile

HandOver = Callable[[int, list[ResultFile]], None]
"""Gives a sink an epoch, by its number and its files."""


def arrive(epoch: Epoch) -> None:
    """The answers of the epoch before must have arrived: no more than one epoch is ever undelivered."""
    epoch.driver.services.behind.wait()


def deliver(epoch: Epoch) -> None:
    """Sinks that have no receipt for this epoch get its rows; answers follow while the next epoch is joined."""
    services, rows = epoch.driver.services, epoch.driver.now.rows
    assert epoch.manifest is not None
    _deliver_joined(services, epoch.manifest, rows)
    if any(answer.sink.delivers for answer in services.sources.answers.values()):
        services.behind.start(partial(_answer, services, epoch.manifest, rows, epoch.seconds))


def _deliver_joined(services: Services, manifest: Manifest, rows: ResultRows) -> None:
    def to(query: str, sink: Sink) -> HandOver:
        def hand_over(number: int, files: list[ResultFile]) -> None:
            with files_for(rows, sink, files) as paths, named(query, number):
                sink.deliver(number, paths, lambda: rows.frame(query, files))

        return hand_over

    ran, parked = manifest.rows_out, services.parking.of
    wanted = {query: sink for query, sink in services.sinks.items() if sink.delivers and query in ran}
    sinks = {query: to(query, sink) for query, sink in wanted.items() if parked(query) is None}
    if sinks:
        commits.deliver(services.checkpoint, manifest, sinks, partial(_failed, services, manifest))


def _failed(services: Services, manifest: Manifest, query: str, error: Exception) -> None:
    """Parks a query whose sink has failed, or raises the error again."""
    begun = any(join.partition(".")[0] == query for join in manifest.begins)
    before = None if begun else manifest.before_marks_ms
    services.parking.take(query, manifest.epoch, error, services.queries, before)


def files_for(rows: ResultRows, sink: Sink, files: list[ResultFile]) -> AbstractContextManager[list[str]]:
    """What a sink that copies files is given: of this machine, with its query's rows only.  Others ask for rows."""
    return rows.apart(files) if isinstance(sink, Parquet) else nullcontext([])


def deliver_joined(
    driver: Driver, manifest: Manifest, query: str, sink: Sink, columns: tuple[tuple[str, str], ...]
) -> None:
    """Hands over what an epoch has of a query that the plan does not know any more."""
    rows = driver.now.rows

    def hand_over(number: int, files: list[ResultFile]) -> None:
        with files_for(rows, sink, files) as paths, named(query, number):
            sink.deliver(number, paths, lambda: rows.read(columns, files))

    commits.deliver(driver.services.checkpoint, manifest, {query: hand_over})


def catch_up(driver: Driver) -> None:
    """The answers of the last epoch that have not arrived: the process died, or was stopped, before they had."""
    services = driver.services
    checkpoint = services.checkpoint
    last = checkpoint.log.last()
    claim(services, ran=last is not None)
    remove_torn(checkpoint)
    manifest = None if last is None else checkpoint.log.read(last)
    if manifest is not None and manifest.idle:
        # Spark knows nothing of it, and will not repeat it.
        _deliver_joined(services, manifest, driver.now.rows)
    if manifest is not None:
        _answer(services, manifest, driver.now.rows, {})


def claim(services: Services, ran: bool, before: Services | None = None) -> None:
    """What sinks write to belongs to their queries, before anything is delivered; `before` has claimed its own."""
    checkpoint = services.checkpoint
    claimed = {} if before is None else _all_sinks(before)
    for query, sink in _all_sinks(services).items():
        if claimed.get(query) is not sink:
            sink.claim(owner_of(checkpoint.files, checkpoint.id, query), ran)


def _all_sinks(services: Services) -> dict[str, Sink]:
    answers = {name: answer.sink for name, answer in services.sources.answers.items()}
    both = {**services.sinks, **answers}
    # What a parked query writes to may be what is broken.
    return {query: sink for query, sink in both.items() if services.parking.of(query) is None}


def _answer(services: Services, manifest: Manifest, rows: ResultRows, seconds: dict[str, float]) -> None:
    """Hands over the answers after an epoch, the last one committed, to sinks that have no receipt for it."""

    begun = time.perf_counter()
    ran = {join.partition(".")[0] for join in manifest.rows_out if services.parking.of(join.partition(".")[0]) is None}
    answers = {name: a for name, a in services.sources.answers.items() if a.sink.delivers and name in ran}
    if not answers:
        return
    done = services.checkpoint.log.receipt(manifest.epoch)
    waiting = [answer for name, answer in answers.items() if name not in done and not isinstance(answer.sink, Memory)]
    together = Together(services.sources, rows, waiting)

    def to(answer: Answer) -> HandOver:
        def hand_over(number: int, _files: list[ResultFile]) -> None:
            with ExitStack() as stack:
                stack.enter_context(named(answer.name, number))
                wants_files = isinstance(answer.sink, Parquet)
                files = stack.enter_context(together.one_file(answer)) if wants_files else []
                answer.sink.deliver(number, files, lambda: together.delivered(answer))

        return hand_over

    with closing(together):
        sinks = {name: to(answer) for name, answer in answers.items()}
        commits.deliver(services.checkpoint, manifest, sinks, partial(_failed, services, manifest))
    seconds["answers"] = time.perf_counter() - begun


@contextmanager
def named(query: str, number: int) -> Iterator[None]:
    """What a sink raises, as an error that says whose sink it is and what comes next."""
    try:
        yield
    except PlaitError:
        raise
    except Exception as error:
        found = translated(error)
        raise (found if found.code == "SPARK_LOST" else sink_failed(query, number, error)) from error
