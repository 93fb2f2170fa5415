"""The property of `tests/runtime/test_join_property.py` end to end: SQL in, Spark streams, committed rows out.

Few examples: each costs seconds.  What is new against the local engine is Catalyst's reading of the SQL, Spark's
reading of the rows and the real exchange.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from pyspark.sql import SparkSession

import plait
from plait.testing import ScriptedStream, run_epochs
from tests.oracle import Oracle
from tests.random_joins import Case, cases
from tests.spark.test_queries import epoch_bags

pytestmark = pytest.mark.spark


@settings(deadline=None, derandomize=True, database=None, max_examples=6, suppress_health_check=list(HealthCheck))
@given(cases(most_aliases=4, most_queries=3))
def test_oracle_random_sql_on_spark_is_the_batch_join_after_every_epoch(spark: SparkSession, case: Case) -> None:
    epochs = len(case.arrivals)
    with tempfile.TemporaryDirectory(prefix="plait-case-") as directory:
        base = Path(directory)
        streams = {}
        for name, relation in case.relations.items():
            streams[name] = ScriptedStream(spark, base / name, ", ".join(f"{c} {t}" for c, t in relation.columns))
            for arrivals in case.arrivals:
                streams[name].add(arrivals.get(name, case.schemas[name].empty_table()))
        with plait.Engine(spark, str(base / "checkpoint"), plait.Config(tasks=2, fan_in=2, sync=False)) as engine:
            for name, stream in streams.items():
                engine.stream(name, stream.frame())
            for name, query in case.queries.items():
                engine.query(name, query.sql)
            run_epochs(engine)
            found = {name: epoch_bags(engine, name, epochs) for name in case.queries}
        with Oracle() as oracle:
            for epoch in range(epochs):
                oracle.load({name: stream.table(epoch + 1) for name, stream in streams.items()})
                for name, query in case.queries.items():
                    assert found[name][epoch] == oracle.bag(query.sql), f"{name} after epoch {epoch}"
