"""The Spark sessions of the contestants: the one that Plait ships, or a stock one; all on two cores."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

CORES = 2
STATE_STORES = "org.apache.spark.sql.execution.streaming.state"
ROCKSDB = {
    "spark.sql.streaming.stateStore.providerClass": f"{STATE_STORES}.RocksDBStateStoreProvider",
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
}
"""Settings that put the state of Spark's own joins into RocksDB."""


def session(who: str, heap: str, work: Path, more: Mapping[str, str] | None = None) -> SparkSession:
    """The session of a contestant: Plait's for `plait` and `spark-tuned`, a stock one for Spark's other contestants."""
    settings = {
        "spark.driver.memory": heap,
        "spark.ui.enabled": "false",
        "spark.sql.shuffle.partitions": str(CORES),
        "spark.sql.warehouse.dir": f"{work}/warehouse",
        "spark.local.dir": f"{work}/local",
        **(more or {}),
    }
    app, master = f"bench-{who}", f"local[{CORES}]"
    if who.startswith("plait") or who == "spark-tuned":
        import plait

        return plait.session(app=app, master=master, settings=settings)
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName(app).master(master)
    for key, value in settings.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()
