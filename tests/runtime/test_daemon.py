"""Python workers of a session: one whose JVM has hung up ends without a word."""

from __future__ import annotations

import os
import subprocess
import sys

SCRIPT = """
import socket
from plait.runtime.spark import daemon

ours, theirs = socket.socketpair()
theirs.close()
print("ended with", daemon.{worker}(ours, True))
"""


def run(worker: str) -> subprocess.CompletedProcess[str]:
    # As Spark sets it, unless it is told otherwise.
    env = os.environ | {"PYTHON_DAEMON_KILL_WORKER_ON_FLUSH_FAILURE": "true"}
    script = SCRIPT.format(worker=worker)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env, timeout=120)


def test_a_worker_whose_jvm_has_hung_up_ends_without_a_word() -> None:
    assert "BrokenPipeError" in run("_spark_worker").stderr, "Spark's own says something: is ours still needed?"
    done = run("worker")
    assert done.stdout == "ended with 1\n"
    assert "Traceback" not in done.stderr
