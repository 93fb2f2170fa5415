"""Makes an archive of the Java classes that Spark needs: the tests start many JVMs, each with half of the work then.

`python tests/class_archive.py FILE` runs two queries and lets Java write down the classes that it has loaded by then
(Java's class data sharing).  `make test` does this after installing; tests work without the file as well.  Java leaves
an archive that does not fit alone, so an old one does no harm.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

ARCHIVE = Path(sys.prefix) / "spark-classes.jsa"
QUICK = "-XX:TieredStopAtLevel=1 -Xlog:disable"
"""Tests run much code a few times: compiling it well takes more than it gives.  Java is not to talk about archives."""


def java_options() -> str:
    """What the JVMs of tests are started with."""
    return f"{QUICK} -XX:SharedArchiveFile={ARCHIVE}" if ARCHIVE.exists() else QUICK


def make(archive: Path) -> None:
    """Runs what most tests run, in a JVM that writes the archive when it ends."""
    draft = archive.with_name(f"{archive.name}.{os.getpid()}")
    os.environ["SPARK_SUBMIT_OPTS"] = f"{QUICK} -XX:ArchiveClassesAtExit={draft}"
    import plait
    from plait.testing import ScriptedStream

    spark = plait.session(app="class-archive", master="local[2]", settings={"spark.sql.shuffle.partitions": "2"})
    spark.sparkContext.setLogLevel("OFF")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        streams = {name: ScriptedStream(spark, folder / name, "k bigint, v string") for name in ("a", "b", "c")}
        for stream in streams.values():
            stream.add([(i, f"v{i}") for i in range(5)])
        with plait.Engine(spark, checkpoint=str(folder / "checkpoint")) as engine:
            for name, stream in streams.items():
                engine.stream(name, stream.frame())
            plain = engine.query("plain", "SELECT a.v, b.v AS w FROM a JOIN b ON a.k = b.k JOIN c ON b.k = c.k")
            groups = engine.query("groups", "SELECT a.v, count(*) AS n FROM a JOIN b ON a.k = b.k GROUP BY a.v")
            engine.start(available_now=True).await_termination()
            assert len(plain.results().collect()) == len(groups.results().collect()) == 5
    java = spark.sparkContext._gateway.proc
    spark.stop()
    java.stdin.close()
    java.wait()
    os.replace(draft, archive)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
