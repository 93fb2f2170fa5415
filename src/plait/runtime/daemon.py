"""Spark's Python daemon, started warm: what every worker needs is imported before workers are forked.

`plait.session()` sets `spark.python.daemon.module` to this module.  A forked worker then starts in milliseconds
instead of importing numpy, Arrow and the compiled kernels by itself.

Spark's daemon calls `gc.collect()` after every task.  With all that is imported here one collection takes 0.1 to
0.3 seconds, during which the worker keeps the next task waiting; frozen objects are not looked at, and it takes
a millisecond.
"""

from __future__ import annotations

import gc

import pyspark.sql.pandas.serializers  # noqa: F401 - imported for its effect, like those below
import pyspark.worker  # noqa: F401

import plait.kernels.warm  # noqa: F401 - kernels loaded before the fork
import plait.runtime.bucketise  # noqa: F401
import plait.runtime.task  # noqa: F401

if __name__ == "__main__":
    from pyspark.daemon import manager

    gc.collect()
    gc.freeze()
    manager()
