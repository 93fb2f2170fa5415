"""Secrets in Spark's settings reach Spark, and nobody who lists processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.spark

SESSION = """
import glob, json, sys
import plait
settings = json.loads(sys.argv[1])
# What is on this process's own command line is the test's affair.
spark = plait.session(app="plait-secrets", master="local[1]", settings=dict(zip(settings, sys.stdin.read().split())))
seen = []
for path in glob.glob("/proc/[0-9]*/cmdline"):
    try:
        seen.append(open(path, "rb").read().decode(errors="replace"))
    except OSError:
        pass
java = spark.sparkContext._gateway.proc.pid
conf = spark.sparkContext.getConf()
hadoop = spark.sparkContext._jsc.hadoopConfiguration()
print(json.dumps({
    "seen": seen,
    "java": open(f"/proc/{java}/cmdline", "rb").read().decode(),
    "conf": {key: conf.get(key) for key in settings},
    "hadoop": {key: hadoop.get(key.removeprefix("spark.hadoop.")) for key in settings if "hadoop" in key},
    "memory": int(spark._jvm.java.lang.Runtime.getRuntime().maxMemory()),
    "app": spark.sparkContext.appName,
}))
spark.stop()
"""


def test_a_secret_is_in_no_command_line() -> None:
    settings = {
        "spark.hadoop.fs.s3a.secret.key": "hush-1-hush",
        "spark.hadoop.fs.azure.account.key.x": "hush-2-hush",
        "spark.ssl.keyPassword": "hush-3-hush",
        "spark.hadoop.fs.defaultFS.proxy": "http://me:hush-4-hush@proxy:80/",
        "spark.driver.memory": "700m",
        "spark.plait.tasks": "3",
    }
    done = subprocess.run(
        [sys.executable, "-c", SESSION, json.dumps(list(settings))],
        input=" ".join(settings.values()),
        env={**os.environ},
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert "SparkSubmit" in found["java"]
    assert "spark.plait.tasks=3" in found["java"], "what is no secret is passed as ever"
    assert not [line for line in found["seen"] if "hush" in line]
    assert found["conf"] == settings
    assert all(found["hadoop"][key] == value for key, value in settings.items() if "hadoop" in key)
    assert found["memory"] < 800 << 20, "settings that Java starts with are obeyed"
    assert found["app"] == "plait-secrets"
