"""A Spark session tuned for short epochs.  Any classic SparkSession from 4.1 on works; this one starts warm."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Mapping
from typing import Any

from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark import SparkConf, SparkContext
from pyspark.sql import SparkSession

from plait.errors import without_secrets
from plait.runtime.driver.batch_sizes import BATCH_BYTES, LIMIT
from plait.runtime.spark.java import require_java
from plait.runtime.task.task_memory import machine_memory

SETTINGS = {
    # An epoch is one small job: re-planning it at run time costs more than it can gain.
    "spark.sql.adaptive.enabled": "false",
    "spark.python.daemon.module": "plait.runtime.spark.daemon",
    "spark.python.worker.reuse": "true",
    # Over TCP a small task waits 25 to 40 ms, most likely for delayed acknowledgements; over these it does not.
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    # Every job tells its listeners its plan in words, whether there are listeners or not: few words.
    "spark.sql.ui.explainMode": "simple",
    # Files of answers lie on this machine: listing them takes no job.
    "spark.sql.sources.parallelPartitionDiscovery.threshold": "1000",
    "spark.sql.shuffle.partitions": "2",
    # Look for new data at once; the trigger decides the pace.
    "spark.sql.streaming.pollingDelay": "1ms",
    # Buckets are Arrow bytes that stay on this machine: compressing them costs more than it saves.
    "spark.shuffle.compress": "false",
    # Spark never checks these sums, it only explains a failed fetch with them: a file more for every task.
    "spark.shuffle.checksum.enabled": "false",
    # Until the first epoch has shown that rows are narrow.
    LIMIT: str(BATCH_BYTES),
    # Spark's default manager starts a `readlink` process eight times for every log file it renames, 48 an epoch with
    # four sources; this one renames.  Its second checksum file beside Hadoop's own is as dear: 24 threads an epoch.
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
    "spark.sql.streaming.checkpoint.fileChecksum.enabled": "false",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    # Hadoop runs `chmod` for every file it makes; vfork starts it without a helper process in between.
    "spark.driver.extraJavaOptions": "-XX:+UseParallelGC -Djdk.lang.Process.launchMechanism=VFORK",
}


_SECRET = re.compile(r"secret|passw|token|credential|key(?!tab)|jaas|\bsas\b", re.IGNORECASE)
"""Names of settings that may hold a secret; none of them is needed to start Java."""


def session(app: str = "plait", master: str | None = None, settings: Mapping[str, str] | None = None) -> SparkSession:
    """A local session with warm Python workers; `settings` override the defaults in `SETTINGS`.

    A failed task is retried twice, as on a cluster (plain `local[n]` would give up at once).  Settings that look like
    secrets are not part of any process's command line.
    """
    require_java()
    # Workers must run the interpreter that has Plait installed, not whatever `python3` is on the path.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    cores = os.cpu_count() or 2
    master = master or f"local[{cores},3]"
    chosen = {**SETTINGS, "spark.driver.memory": _heap(), **(settings or {})}
    if any(_is_secret(key, value) for key, value in chosen.items()):
        _start_java({"spark.master": master, "spark.app.name": app, **chosen})
    builder = SparkSession.builder.appName(app).master(master)
    for key, value in chosen.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def _is_secret(key: str, value: str) -> bool:
    return _SECRET.search(key) is not None or without_secrets(value) != value


def _start_java(settings: Mapping[str, str]) -> None:
    """Starts the JVM with all settings but secrets, which every user of the machine would see in its command line.

    PySpark would give it all of them there.  The builder sets them again, the secrets too, through its own channel.
    """
    public = SparkConf()
    for key, value in settings.items():
        if not _is_secret(key, value):
            public.set(key, value)
    SparkContext._ensure_initialized(conf=public)


def _heap() -> str:
    """Java's heap: 2 GB, or a quarter of what this machine, or the memory cgroup around, can give."""
    return f"{max(512, min(2048, machine_memory() // 4 >> 20))}m"


def forget_origins(spark: SparkSession) -> None:
    """Makes the Hadoop settings of a session of ours small to send: a file source sends all of them in every epoch.

    With each of more than a thousand goes where it was read (`core-default.xml`), compressed by itself: 6 to 10 ms per
    source.  Only messages about settings use it.  Where Hadoop has no such field, nothing is gained or lost.
    """
    if spark.conf.get("spark.python.daemon.module", "") != SETTINGS["spark.python.daemon.module"]:
        return
    context: Any = spark.sparkContext
    with contextlib.suppress(Py4JJavaError):
        # All defaults first: a file of them that is read later would bring the origins of all others back.
        context._jvm.org.apache.hadoop.mapreduce.util.ConfigUtil.loadResources()
        settings = context._jsc.hadoopConfiguration()
        origins = settings.getClass().getDeclaredField("updatingResource")
        origins.setAccessible(True)
        # The look at the field may itself load defaults.
        for _ in range(3):
            if settings.size() and not origins.get(settings).size():
                break
            origins.get(settings).clear()
