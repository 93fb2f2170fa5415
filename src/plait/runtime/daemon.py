"""Spark's Python daemon, started warm: what every worker needs is imported before workers are forked.

`plait.session()` sets `spark.python.daemon.module` to this module.  A forked worker then starts in milliseconds
instead of importing numpy, Arrow and the compiled kernels by itself.
"""

from __future__ import annotations

import plait.kernels.warm  # noqa: F401 - imported for its effect: kernels loaded before the fork
import plait.runtime.bucketise  # noqa: F401
import plait.runtime.task  # noqa: F401

if __name__ == "__main__":
    from pyspark.daemon import manager

    manager()
