"""Spark's Python daemon, started warm: what every worker needs is imported before workers are forked.

`plait.session()` sets `spark.python.daemon.module` to this module.  A forked worker then starts in milliseconds
instead of importing numpy, Arrow and the compiled kernels by itself.

Spark's daemon calls `gc.collect()` after every task.  With all that is imported here one full collection takes 0.1
to 0.3 seconds, during which the worker keeps the next task waiting.  So what is imported is frozen, which takes it
out of every collection, and after a task only the young generations are collected; Python collects the old one by
itself when it has grown.

A worker whose JVM has hung up ends without a word.  Spark's prints a traceback, into the terminal of whoever has
just stopped a query: there is nobody to tell, and nothing is lost that is not done again.
"""

from __future__ import annotations

import gc
import socket
from types import SimpleNamespace

import pyspark.daemon
import pyspark.sql.pandas.serializers
import pyspark.worker

import plait.kernels.warm
import plait.runtime.task.bucketise
import plait.runtime.task.hops  # noqa: F401

_spark_worker = pyspark.daemon.worker


def worker(sock: socket.socket, authenticated: bool) -> int:
    """Spark's: runs one task, and says whether the process may run another (0) or must end."""
    try:
        return _spark_worker(sock, authenticated)
    except (BrokenPipeError, ConnectionResetError):
        return 1


if __name__ == "__main__":
    gc.collect()
    gc.freeze()
    setattr(pyspark.daemon, "gc", SimpleNamespace(collect=lambda: gc.collect(1)))  # noqa: B010 - not a typed attribute
    pyspark.daemon.worker = worker
    pyspark.daemon.manager()
