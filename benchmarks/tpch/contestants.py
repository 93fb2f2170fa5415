"""The contestants of the benchmark `tpch`.  A job runs one contestant over all queries.

`plait`         the query over eight streams; after every epoch the whole answer is collected
`spark`         Spark's own streaming plan, where it accepts the query; else the batch query over all files so far,
                again after every epoch, its answer collected
`spark-tuned`   the same in the session that Plait ships; it runs only when it is named

The session is up and every query was run once over the first epoch before anything is timed.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.sessions import session
from benchmarks.tpch.data import prefix
from benchmarks.tpch.queries import QUERIES, SCHEMAS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Rows = list[list[Any]]


@dataclass(frozen=True, slots=True)
class TpchJob:
    """One contestant over some queries; the answers after the `checked` epochs are kept, `memory` is the Java heap."""

    who: str
    queries: list[int]
    data: str
    epochs: int
    memory: str
    checked: list[int]


@dataclass(slots=True)
class QueryRun:
    """One query: seconds of each epoch from its start to its answer, how it was run, its answers by epoch."""

    seconds: float = 0.0
    epochs: list[float] = field(default_factory=list)
    how: str = ""
    answers: dict[str, Rows] = field(default_factory=dict)
    parts: dict[str, float] = field(default_factory=dict)


Take = Callable[["DataFrame", int], None]


def plait(spark: SparkSession, job: TpchJob, query: int, epochs: int, folder: Path, take: Take) -> QueryRun:
    """Run a query in Plait, through its public surface."""
    import plait

    ended: list[float] = []
    with plait.Engine(spark, checkpoint=str(folder)) as engine:
        for table, frame in streams(spark, Path(job.data), epochs).items():
            engine.stream(table, frame)
        handle = engine.query("q", QUERIES[query])

        def taken(rows: DataFrame, epoch: int) -> None:
            take(rows, epoch)
            ended.append(time.perf_counter())

        handle.foreach_batch(taken)
        begun = time.perf_counter()
        run = engine.start(available_now=True)
        run.await_termination()
        seconds = time.perf_counter() - begun
        kept = engine._desk.registered("q").read.residual
        sources = () if kept is None else kept.sources
        rows = [source.name for source in sources if source.maintained is None]
        parts: dict[str, float] = {}
        for report in run.recent_progress:
            for name, value in report["seconds"].items():
                parts[name] = parts.get(name, 0.0) + value
    how = f"{len(sources)} nodes, {len(sources) - len(rows)} as aggregates"
    return QueryRun(seconds, _steps(begun, ended), how, parts=parts)


def spark_again(spark: SparkSession, job: TpchJob, query: int, epochs: int, folder: Path, take: Take) -> QueryRun:
    """Run a query by Spark's streaming plan, or else as a batch query after every epoch."""
    from pyspark.errors import AnalysisException, PySparkException

    ended: list[float] = []

    def taken(rows: DataFrame, epoch: int) -> None:
        take(rows, epoch)
        ended.append(time.perf_counter())

    try:
        for table, frame in streams(spark, Path(job.data), epochs).items():
            frame.createOrReplaceTempView(table)
        begun = time.perf_counter()
        writer = spark.sql(QUERIES[query]).writeStream.outputMode("complete").foreachBatch(taken)
        running = writer.option("checkpointLocation", str(folder)).trigger(availableNow=True).start()
        running.awaitTermination()
        how = "its own streaming plan"
    except (AnalysisException, PySparkException) as error:
        refused = error.getCondition() or "refused"
        ended.clear()
        begun = time.perf_counter()
        for epoch in range(epochs):
            for table in SCHEMAS:
                files = prefix(Path(job.data), table, epoch)
                spark.read.schema(SCHEMAS[table]).parquet(*files).createOrReplaceTempView(table)
            taken(spark.sql(QUERIES[query]), epoch)
        how = f"batch again after every epoch (streaming: {refused})"
    return QueryRun(time.perf_counter() - begun, _steps(begun, ended), how)


CONTESTANTS = {"plait": plait, "spark": spark_again, "spark-tuned": spark_again}


def streams(spark: SparkSession, data: Path, epochs: int) -> dict[str, DataFrame]:
    """The eight tables as streams, one file per trigger; the warm-up reads the first file only."""
    frames = {}
    for table, schema in SCHEMAS.items():
        names = "*.parquet" if epochs > 1 else "0000*.parquet"
        reader = spark.readStream.schema(schema).option("maxFilesPerTrigger", 1)
        frames[table] = reader.parquet(str(data / table / names))
    return frames


def _steps(begun: float, ended: list[float]) -> list[float]:
    return [b - a for a, b in zip([begun, *ended], ended, strict=False)]


def _drop(rows: DataFrame, _epoch: int) -> None:
    rows.collect()


def contest(job: TpchJob, work: Path) -> dict[str, dict[str, Any]]:
    """Run the contestant that the job names over all queries; gives a `QueryRun` as a dict for each."""
    warnings.simplefilter("ignore")
    spark = session(job.who, job.memory, work)
    spark.sparkContext.setLogLevel("OFF")
    contestant = CONTESTANTS[job.who]
    result: dict[str, dict[str, Any]] = {}
    for query in job.queries:
        contestant(spark, job, query, 1, work / f"warm-{query}", _drop)
        answers: dict[str, Rows] = {}

        def take(rows: DataFrame, epoch: int, answers: dict[str, Rows] = answers) -> None:
            collected = rows.collect()
            if epoch in job.checked:
                answers[str(epoch)] = [list(row) for row in collected]

        run = contestant(spark, job, query, job.epochs, work / f"checkpoint-{query}", take)
        run.answers = answers
        result[str(query)] = asdict(run)
    spark.stop()
    return result
