"""What a start does besides planning: tables to load, streams that Spark can read, and rows owed to old sinks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

from plait.admission import Admitted, loaded
from plait.catalog.catalog import Catalog, QueryEntry
from plait.errors import CheckpointError, StreamError
from plait.query.relation import Relation
from plait.query.store import Input
from plait.runtime.driver.deliver import deliver_joined
from plait.runtime.driver.driver import Driver
from plait.runtime.driver.offsets import last_batch
from plait.runtime.driver.sinks import make_sink
from plait.runtime.driver.source_log import refuse_fixed
from plait.runtime.task.bucketise import bucketised
from plait.runtime.task.selections import Selection, covers, selection_of, widened
from plait.sql.catalyst.read_query import read_query
from plait.state.log.checkpoint import Checkpoint
from plait.state.log.manifest import Manifest


def loads(now: Admitted, frames: Mapping[str, DataFrame], epoch: int) -> dict[int, DataFrame]:
    """By epoch, the rows of the tables that are read with it."""
    edges = loaded(now, epoch)
    inputs = now.allocation.layout.input_by_relation
    read = [replace(inputs[name], edges=edges[name]) for name in sorted(edges)]
    found = [bucketised(frames[i.relation], i.relation, selection_of(i), i) for i in read]
    return {epoch: reduce(DataFrame.union, found)} if found else {}


def refuse_other_positions(
    checkpoint: Checkpoint,
    spark: SparkSession,
    catalog: Catalog,
    registered: Mapping[str, DataFrame],
) -> None:
    """Where Spark knows sources by position, queries can read the streams that were there at the beginning."""
    positions = catalog.positions
    used = {i.relation for i in catalog.layout.inputs if i.edges and not i.table}
    if positions is not None and not used <= set(positions):
        refuse_fixed(checkpoint, spark, positions, {*positions, *used})
    if positions is not None and not set(positions) <= set(registered):
        refuse_fixed(checkpoint, spark, positions, set(positions) & set(registered))


def streamed(catalog: Catalog) -> list[Input]:
    """What is needed of the sources of the streaming query."""
    inputs = sorted(catalog.layout.inputs, key=lambda i: i.relation)
    # Where Spark's checkpoint knows sources by position, it must not depend on the order of registration.
    return [i for i in inputs if not i.table and (catalog.positions is None or i.relation in catalog.positions)]


def selected(streams: Sequence[Input], before: Mapping[str, Selection] | None) -> dict[str, Selection]:
    """What the streaming query hands over of each stream: what is needed.

    In a run that goes on (`before` is what it handed over so far), also what other queries may need next.
    """
    found: dict[str, Selection] = {}
    for source in streams:
        if before is None:
            found[source.relation] = selection_of(source)
            continue
        old = before.get(source.relation, selection_of(source))
        found[source.relation] = old if covers(old, source) else widened(old, source)
    return found


def is_covered(streams: Sequence[Input], selections: Mapping[str, Selection]) -> bool:
    """Whether a streaming query hands over what is needed, and has no other sources."""
    names = {source.relation for source in streams}
    return names == selections.keys() and all(covers(selections[source.relation], source) for source in streams)


def will_replay(checkpoint: Checkpoint) -> bool:
    """Whether Spark, once it is started, repeats the epoch that was committed last."""
    last = last_batch(checkpoint)
    return last >= 0 and str(last) not in checkpoint.files.names("spark/commits")


def triggered(writer: DataStreamWriter, available_now: bool, every: str | None) -> DataStreamWriter:
    """The writer with the pace that a user asked for."""
    if available_now:
        return writer.trigger(availableNow=True)
    if every is None:
        return writer
    try:
        return writer.trigger(processingTime=every)
    except PySparkException as error:
        cause = f"every={every!r} is not a time between epochs"
        raise StreamError("TRIGGER", cause, 'write, for example, "1 second"') from error


def deliver_to_old_sinks(
    driver: Driver,
    before: Catalog,
    now: Catalog,
    relations: Mapping[str, Relation],
    frames: Mapping[str, DataFrame],
) -> None:
    """Rows of the last epoch that have not reached the sink of a query which ends now."""
    log = driver.services.checkpoint.log
    last = log.last()
    manifest = None if last is None else log.read(last)
    living = {entry.id for entry in now.queries.values()}
    for entry in before.queries.values():
        kind = None if entry.sink is None else entry.sink["kind"]
        if manifest is None or entry.id in living or kind in (None, "noop", "memory", "console"):
            continue
        if driver.services.parking.of(entry.id) is not None:
            # Whoever drops a parked query drops what it missed.
            continue
        if entry.id in log.receipt(manifest.epoch) or entry.live_since is None:
            continue
        if entry.live_since > manifest.epoch:
            continue
        _deliver_once(driver, entry, manifest, relations, frames)


def _deliver_once(
    driver: Driver,
    entry: QueryEntry,
    manifest: Manifest,
    relations: Mapping[str, Relation],
    frames: Mapping[str, DataFrame],
) -> None:
    services = driver.services
    if entry.sink is None or entry.sink["kind"] != "parquet" or entry.joins != (entry.id,):
        raise CheckpointError(
            "SINK_UNSERVED",
            f"rows of epoch {manifest.epoch} have not reached the sink of query {entry.name!r}, which ends now",
            "start once more with its old text and sink; then drop or replace it",
        )
    sink = make_sink("parquet", entry.name, _no_rows, entry.sink["options"], services.config.sync)
    schemas = {stream: df.schema for stream, df in frames.items()}
    read = read_query(services.spark, relations, schemas, entry.id, entry.sql)
    assert entry.id in read.graphs
    deliver_joined(driver, manifest, entry.id, sink, tuple((o.name, o.type) for o in read.graphs[entry.id].outputs))


def _no_rows() -> DataFrame:
    raise AssertionError("a parquet sink copies files")
