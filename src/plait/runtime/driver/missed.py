"""The epochs that a parked query has missed, handed over when it is resumed.

Contract.  A query that only joins gets every missed epoch by its number, in order, with the rows that the epoch
committed; each has a receipt before the next is handed over, so a kill repeats at most one of them.  One that Spark
answers gets a single answer, under the number of the last epoch, which stands for all it missed.  If its sink fails
again the query stays parked, from the epoch that failed on.  Called while no epoch runs (`Services.working`).

Rows for which Spark's part is still to be done (`ResultFile.raw`) are finished by the next epoch, which commits them;
until then the query waits.
"""

from __future__ import annotations

from contextlib import ExitStack

from pyspark.sql import DataFrame

from plait.errors import PlaitError
from plait.runtime.answers.answer import Answer
from plait.runtime.driver.deliver import files_for, named
from plait.runtime.driver.driver import Driver, Epoch
from plait.runtime.driver.parking import SKIP
from plait.runtime.driver.sinks import Parquet, Sink
from plait.runtime.faults import reached
from plait.state.files.owner import owner_of
from plait.state.log.manifest import ResultFile
from plait.state.log.parked import ParkedQuery


def catch_up_parked(epoch: Epoch) -> None:
    """The step of an epoch: queries that somebody has asked to resume get what they missed."""
    deliver_missed(epoch.driver)


def deliver_missed(driver: Driver) -> dict[str, PlaitError]:
    """Hands missed epochs over to all queries that are to be resumed; by id, the errors of those that failed again."""
    services, failed = driver.services, dict[str, PlaitError]()
    if any(record.asked for record in services.parking.records):
        # Answers that are under way in a thread of their own write receipts, too.
        services.behind.wait()
    for record in services.parking.records:
        answer, sink = services.sources.answers.get(record.query), services.sinks.get(record.query)
        if not record.asked or (answer is None and sink is None):
            continue
        try:
            if record.asked == SKIP:
                _receipt(driver, record.query, driver.now.live.epoch)
                services.parking.caught_up(record.query)
            elif answer is not None:
                _deliver_answer(driver, record, answer)
            elif sink is not None:
                _deliver_epochs(driver, record, sink)
        except Exception as error:
            services.parking.take(record.query, record.since, error, services.queries)
            found = services.parking.of(record.query)
            assert found is not None
            failed[record.query] = found.error
    return failed


def _deliver_epochs(driver: Driver, record: ParkedQuery, sink: Sink) -> None:
    services, rows, last, query = driver.services, driver.now.rows, driver.now.live.epoch, record.query
    owed: dict[int, list[ResultFile]] = {}
    for file in services.sources.live.files.get(query, ()):
        if file.raw:
            # The next epoch does Spark's part first.
            return
        if file.held is not None or file.passing:
            owed.setdefault(last if file.held is None else file.held, []).append(file)
    _claim(driver, query, sink)
    # Of rows that stay in the checkpoint the last epoch stands for all.
    first = max(record.since, last) if sink.keeps_rows else record.since
    for number in range(first, last + 1) if sink.delivers else ():
        files = owed.get(number, [])
        if query not in services.checkpoint.log.receipt(number):
            services.checkpoint.check_fence()
            with files_for(rows, sink, files) as paths, named(query, number):

                def frame(files: list[ResultFile] = files) -> DataFrame:
                    return rows.frame(query, files)

                sink.deliver(number, paths, frame)
            reached("missed", number)
            _receipt(driver, query, number)
        services.parking.moved_on(query, number + 1)
    services.parking.caught_up(query)


def _deliver_answer(driver: Driver, record: ParkedQuery, answer: Answer) -> None:
    services, rows, last = driver.services, driver.now.rows, driver.now.live.epoch

    def frame() -> DataFrame:
        return answer.caught_up(rows, services.sources.live, record.before_ms)

    _claim(driver, answer.name, answer.sink)
    missed = record.since <= last and answer.sink.delivers
    if missed and answer.name not in services.checkpoint.log.receipt(last):
        services.checkpoint.check_fence()
        with ExitStack() as stack:
            stack.enter_context(named(answer.name, last))
            wants_files = isinstance(answer.sink, Parquet)
            files = stack.enter_context(rows.one_file(answer.name, frame())) if wants_files else []
            answer.sink.deliver(last, files, frame)
        reached("missed", last)
        _receipt(driver, answer.name, last)
    services.parking.caught_up(answer.name)


def _claim(driver: Driver, query: str, sink: Sink) -> None:
    checkpoint = driver.services.checkpoint
    sink.claim(owner_of(checkpoint.files, checkpoint.id, query), ran=True)


def _receipt(driver: Driver, query: str, epoch: int) -> None:
    if epoch >= 0:
        driver.services.checkpoint.log.record_receipt(epoch, {query})
