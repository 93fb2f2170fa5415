"""Spark's Python daemon, started warm: what every worker needs is imported before workers are forked.

`plait.session()` sets `spark.python.daemon.module` to this module.  A forked worker then starts in milliseconds
instead of importing numpy, Arrow and the compiled kernels by itself.

Spark's daemon calls `gc.collect()` after every task.  With all that is imported here one full collection takes 0.1
to 0.3 seconds, during which the worker keeps the next task waiting.  So what is imported is frozen, which takes it
out of every collection, and after a task only the young generations are collected; Python collects the old one by
itself when it has grown.
"""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pyspark.daemon
import pyspark.sql.pandas.serializers
import pyspark.worker

import plait.kernels.warm
import plait.runtime.bucketise
import plait.runtime.task  # noqa: F401

if __name__ == "__main__":
    gc.collect()
    gc.freeze()
    setattr(pyspark.daemon, "gc", SimpleNamespace(collect=lambda: gc.collect(1)))  # noqa: B010 - not a typed attribute
    pyspark.daemon.manager()
